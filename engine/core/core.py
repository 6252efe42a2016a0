"""The engine core: continuous batching of requests on one decoder.

`step()` reads top to bottom. The core owns a request from `add_request` until an output carries its finish
reason. A bad request ends with an error output and harms no other; a broken invariant raises, and the process
ends. Not thread-safe: one loop calls it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from preload.engine.errors import RequestError
from preload.engine.models.decoder import Decoder

from .batch import PersistentBatch
from .grammar import Grammar, GrammarCompiler
from .graphs import DecodeGraphs
from .invariants import check_batch, check_scheduler
from .kv_cache import BlockPool, KVCache
from .logprobs import collect_prompt_logprobs
from .memory import MemoryProfile, is_out_of_memory
from .on_device import DeviceSteps
from .placement import HostPlacement, Placement
from .processors import Processor
from .request import FinishReason, Request, RequestOutput
from .runner import Runner, StepInputs
from .sampler import SampledToken, Sampler
from .scheduler import Schedule, Scheduler, SchedulingOptions

if TYPE_CHECKING:
    from .speculation.speculator import Speculator

_AHEAD_BYTES = 512 << 20
"""Of keys and values that are populated before they are needed, at most: a few dozen requests' worth."""
_SLICE_BYTES = 2 << 20
"""Populated at once, while a request may arrive."""
_COMPILING_S = 0.01
"""How long a step without anything else to do waits for a grammar."""


@dataclass(kw_only=True)
class Counters:
    """What the core has done since it started."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class EngineCore:
    """Scheduler, KV cache, runner and sampler around one decoder."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 64,
        token_budget: int = 512,
        max_model_len: int,
        scheduling: SchedulingOptions | None = None,
        processors: Mapping[str, Processor] | None = None,
        placement: Placement | None = None,
        on_device: DeviceSteps | None = None,
    ) -> None:
        self.placement = placement or HostPlacement()
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.counters = Counters()
        self._num_populated = 0  # blocks
        self.memory: MemoryProfile | None = None
        """What the size of the KV cache was decided by, if it was not given."""
        self.cache = KVCache(decoder.spec, num_blocks, block_size, decoder.cache_dtype, self.placement.empty)
        self.scheduler = Scheduler(
            BlockPool(num_blocks, block_size),
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            max_model_len=max_model_len,
            options=scheduling,
        )
        batch = PersistentBatch(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size)
        self.runner = Runner(decoder, self.cache, batch, on_device)
        self.sampler = Sampler(max_num_seqs, decoder.spec.vocab_size, processors, decoder.choose)
        self.grammars = GrammarCompiler(decoder.spec.vocab_size)
        self.speculator: Speculator | None = None
        self._vocab_size = decoder.spec.vocab_size
        self._requests: dict[str, Request] = {}
        self._compiling: dict[str, tuple[Request, Future[Grammar]]] = {}
        self._outputs: list[RequestOutput] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or return anything."""
        return bool(self._outputs or self._compiling) or self.scheduler.has_requests

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def kv_cache_bytes(self) -> int:
        """Of the model's keys and values, and of those a drafter keeps."""
        if self.speculator is None:
            return self.cache.num_bytes
        return self.cache.num_bytes + self.cache.num_blocks * self.speculator.drafter.bytes_per_block

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One pass: at most token_budget tokens computed. Each request that is ready for one gets a token, and with
        it those of its drafts that prove right."""
        if self._compiling:
            self._take_compiled()
        outputs, self._outputs = self._outputs, []
        started_s = time.perf_counter()
        plan = self.scheduler.schedule()
        for request in plan.started:
            self.sampler.add(request.row, request)
        if self.speculator is not None:
            self.speculator.observe(plan)
        if plan.scheduled:
            try:
                inputs, sampled = self._compute(plan)
            except (MemoryError, RuntimeError) as error:
                return [*outputs, self._give_up_largest(plan, error)]
            outputs += self._commit(plan, inputs, sampled)
            if self.speculator is not None:
                self.speculator.propose(plan, inputs, self.runner.hidden, started_s)
        return outputs

    def _compute(self, plan: Schedule) -> tuple[StepInputs, Sequence[Sequence[SampledToken]]]:
        """The forward pass, and the tokens it yields for each request that is ready for some."""
        inputs = self.runner.prepare(plan)
        logits = self.runner.forward(inputs)
        if any(self.sampler.needs_host(request) for request in inputs.sampling):
            logits = logits.cpu()
        if any(item.request.needs_prompt_logits for item in plan.scheduled):
            in_batch_order = sorted(plan.scheduled, key=lambda s: s.num_new_tokens > 1)
            collect_prompt_logprobs(self.runner.decoder, self.runner.hidden, in_batch_order)
        if self.speculator is None:
            return inputs, [[token] for token in self.sampler.sample(logits, inputs.sampling)]
        return inputs, self.speculator.verify(logits, inputs)

    def _give_up_largest(self, plan: Schedule, error: MemoryError | RuntimeError) -> RequestOutput:
        """Ends the largest request of a step that memory did not suffice for. Nothing of it was committed, so the
        others are computed in the next one. Any other error is raised again."""
        if not is_out_of_memory(error):
            raise error
        item = max(plan.scheduled, key=lambda item: (item.num_new_tokens, item.request.num_tokens))
        self._finish(item.request)
        self.counters.num_steps += 1
        return RequestOutput(
            request_id=item.request.request_id,
            finish_reason=FinishReason.ERROR,
            error=f"there was not enough memory to compute {item.num_new_tokens} tokens of a sequence of "
            f"{item.request.num_tokens}; it was the largest of its step. Try again, or with fewer tokens",
        )

    def speculate(self, speculator: Speculator) -> None:
        """From now on steps verify the drafts of `speculator`. No request may be here."""
        if self._requests:
            raise AssertionError("speculation begins before the first request")
        self.speculator = speculator
        self.scheduler.num_lookahead_tokens = speculator.drafter.num_lookahead_tokens
        speculator.drafter.allocate_kv(self.cache.num_blocks)

    def add_request(self, request: Request) -> None:
        """Takes a request. One that cannot run ends with an error output at the next step, and no exception."""
        try:
            self._refuse_duplicate(request)
            request.validate(self._vocab_size, self.max_model_len)
            self.sampler.validate(request.sampling)
            reason = request.finish_reason(self.max_model_len) if request.output_ids else FinishReason.NONE
            if reason is FinishReason.NONE:
                self._admit(request)
        except RequestError as error:
            self._refuse(request.request_id, error)
            return
        if reason is not FinishReason.NONE:  # the core before this one had sampled its last token
            self._end(request.request_id, reason)
            return
        self.counters.num_prompt_tokens += len(request.prompt_ids)
        self._requests[request.request_id] = request

    def _admit(self, request: Request) -> None:
        form = request.sampling.structured_output
        if form is None:
            self.scheduler.add(request)
        else:
            self._compiling[request.request_id] = request, self.grammars.compile(form)

    def _take_compiled(self) -> None:
        """Schedules those whose grammars are there. Waits a moment for one if there is nothing else to do."""
        if not self.scheduler.has_requests and not self._outputs:
            wait([future for _, future in self._compiling.values()], _COMPILING_S, FIRST_COMPLETED)
            self.counters.num_steps += 1
        for request_id, (request, future) in list(self._compiling.items()):
            if future.done():
                del self._compiling[request_id]
                try:
                    request.grammar = future.result()
                    self.scheduler.add(request)
                except RequestError as error:
                    del self._requests[request_id]
                    self._refuse(request_id, error)

    def abort_request(self, request_id: str) -> None:
        """Ends a request with FinishReason.ABORT. One that is not here has ended already: nothing happens."""
        if request_id in self._requests:
            self._finish(self._requests[request_id])
            self._end(request_id, FinishReason.ABORT)

    def drop_all(self) -> None:
        """Forgets every request without an output: nobody is left to read one."""
        for request in list(self._requests.values()):
            self._finish(request)
        self._outputs = []

    def allocate_kv(self, num_blocks: int) -> None:
        """Replaces the KV cache by one of `num_blocks`, the null block included. No request may be here."""
        if self._requests:
            raise AssertionError("the KV cache of running requests cannot be replaced")
        block_size, decoder = self.cache.block_size, self.runner.decoder
        if self.runner.on_device is not None:
            self.runner.on_device.drop_graphs()
        self.cache = self.runner.cache = KVCache(
            decoder.spec, num_blocks, block_size, decoder.cache_dtype, self.placement.empty
        )
        self.scheduler.pool = BlockPool(num_blocks, block_size)
        self._num_populated = 0
        if self.speculator is not None:
            self.speculator.drafter.allocate_kv(num_blocks)

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Runs one step on random ids; no request's state is touched."""
        self.runner.warm_up(num_tokens)
        if self.speculator is not None:
            self.speculator.drafter.warm_up()

    def use_graphs(self) -> None:
        """Decode steps on the present KV cache are replayed, as soon as `capture_graph` has made their graphs."""
        if self.runner.on_device is not None:
            self.runner.on_device.use_graphs(self.cache.layers, self.scheduler.token_budget)
            if self.speculator is not None:
                self.speculator.drafter.use_graphs(self.scheduler.token_budget)

    def populate_ahead(self) -> bool:
        """Has memory found for some of the blocks that requests will get next: the first to write where a virtual
        machine has never been waits for milliseconds. For when there is nothing else to do; False: done."""
        if self.placement.device.type != "cpu" or self.placement.is_emulated:
            return False
        block_bytes = self.cache.num_bytes // self.cache.num_blocks
        reached = self.scheduler.pool.num_reached
        first = max(self._num_populated, reached)
        end = min(self.cache.num_blocks, reached + _AHEAD_BYTES // block_bytes)
        count = min(end - first, max(1, _SLICE_BYTES // block_bytes))
        if count < 1 or not self.cache.populate(first, count):
            return False
        self._num_populated = first + count
        return True

    @property
    def num_missing_graphs(self) -> int:
        return sum(graphs.num_missing for graphs in self._graphs())

    @torch.inference_mode()
    def capture_graph(self) -> None:
        """Makes the largest graph that is missing, the model's before a drafter's. No request's state is touched."""
        missing = [graphs for graphs in self._graphs() if graphs.num_missing]
        if missing:
            missing[0].capture_next()

    def _graphs(self) -> list[DecodeGraphs]:
        if self.runner.on_device is None:
            return []
        drafter = None if self.speculator is None else self.speculator.drafter.graphs
        return [graphs for graphs in (self.runner.on_device.graphs, drafter) if graphs is not None]

    @torch.inference_mode()
    def largest_steps(self) -> None:
        """A step of token_budget tokens, and one of a token for each row at full length, on random ids."""
        self.runner.warm_up(self.scheduler.token_budget)
        self.runner.warm_up(self.max_num_seqs, self.max_model_len - 1)

    def check_invariants(self) -> None:
        """Raises InvariantError if the bookkeeping of requests, blocks and rows contradicts itself."""
        self.runner.batch.apply()
        check_scheduler(self.scheduler)
        check_batch(self.runner.batch, self.scheduler.running)

    def _commit(
        self, plan: Schedule, inputs: StepInputs, sampled: Sequence[Sequence[SampledToken]]
    ) -> list[RequestOutput]:
        """Counts what was computed, appends what was sampled, ends what is finished."""
        self.counters.num_steps += 1
        appended, num_rejected = [], {}
        for request, num_drafts, tokens in zip(inputs.sampling, inputs.num_drafts, sampled, strict=True):
            num_new, reason = self._append(request, tokens)
            appended.append((num_new, reason))
            if num_drafts >= max(num_new, 1):
                num_rejected[request.row] = num_drafts + 1 - max(num_new, 1)
        self.runner.commit(num_rejected)
        for item in plan.scheduled:
            self.scheduler.advance(item.request, item.num_new_tokens - num_rejected.get(item.request.row, 0))
        results = zip(inputs.sampling, inputs.num_drafts, sampled, appended, strict=True)
        return [self._output(request, num_drafts, tokens, *new) for request, num_drafts, tokens, new in results]

    def _append(self, request: Request, tokens: Sequence[SampledToken]) -> tuple[int, FinishReason]:
        """Appends tokens to the output until one ends the request; returns how many. An error is none."""
        num_new, reason = 0, FinishReason.NONE
        for token in tokens:
            if token.error:
                break
            request.output_ids.append(token.token_id)
            num_new += 1
            reason = request.finish_reason(self.max_model_len)
            if reason is not FinishReason.NONE:
                break
        return num_new, reason

    def _output(
        self,
        request: Request,
        num_drafts: int,
        tokens: Sequence[SampledToken],
        num_new: int,
        reason: FinishReason,
    ) -> RequestOutput:
        """What the request's client hears of the first num_new tokens; ends the request if they end it."""
        if num_new == 0:
            self._finish(request)
            return RequestOutput(
                request_id=request.request_id, finish_reason=FinishReason.ERROR, error=tokens[0].error
            )
        self.counters.num_output_tokens += num_new
        new = tokens[:num_new]
        if reason is FinishReason.NONE:
            for position, token in enumerate(new, request.num_tokens - num_new):
                self.runner.batch.append_token(request.row, position, token.token_id)
        else:
            self._finish(request)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=[token.token_id for token in new],
            logprobs=[token.logprobs for token in new if token.logprobs],
            finish_reason=reason,
            num_draft_tokens=num_drafts,
            num_accepted_tokens=len(tokens) - 1,
            num_cached_tokens=(request.num_cached_tokens or 0) if len(request.output_ids) == num_new else 0,
            prompt_logprobs=request.take_prompt_logprobs(),
        )

    def _refuse_duplicate(self, request: Request) -> None:
        """Two requests of one id cannot be told apart by their outputs: both end."""
        if request.request_id in self._requests:
            self._finish(self._requests[request.request_id])
            raise RequestError(f"request id {request.request_id!r} is in use; both requests end")

    def _finish(self, request: Request) -> None:
        """Takes a request out of every table, without an output."""
        if self._compiling.pop(request.request_id, None) is None:
            self.scheduler.finish(request)
        if self.speculator is not None:
            self.speculator.forget(request)
        del self._requests[request.request_id]

    def _refuse(self, request_id: str, error: RequestError) -> None:
        output = RequestOutput(
            request_id=request_id,
            finish_reason=FinishReason.ERROR,
            error=error.message,
            refused=True,
            param=error.fields.get("param", ""),
        )
        self._outputs.append(output)

    def _end(self, request_id: str, reason: FinishReason, error: str = "") -> None:
        self._outputs.append(RequestOutput(request_id=request_id, finish_reason=reason, error=error))
