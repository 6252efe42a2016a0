"""Drafts by a smaller language model with the same vocabulary.

It is a decoder like the model, with keys and values in blocks of the same numbers (paged.py). Before it guesses, it
is fed what it has not seen of a sequence: after a step that is the token that was chosen last, and, if all drafts
were kept, also the last of those, which it had guessed but never read. Keys and values of rejected drafts are
overwritten before they are read. It keeps pace with the model's prefill; blocks that a request shares with an earlier
one are known if they were fed then (`_is_filled`), else it is fed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from preload.engine.core.batch import PersistentBatch
from preload.engine.core.graphs import DecodeGraphs
from preload.engine.core.kv_cache import Empty, KVCache, block_bytes
from preload.engine.core.on_device import DeviceSteps, HostSteps, Steps
from preload.engine.core.request import Request
from preload.engine.core.scheduler import Schedule
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.models.decoder import Decoder

from .drafter import Computed, Draft, Task
from .guessing import Draw, Wish, guess
from .paged import NOWHERE, Span, in_batch_order, next_inputs, paged_inputs, room


@dataclass
class _Progress:
    """`num_fed` tokens from the first have keys and values, and after them those `guesses`, if they came true."""

    num_fed: int
    guesses: list[int] = field(default_factory=list)


class DraftModelDrafter:
    """A decoder that guesses. `num_fed_at_once`: tokens of all requests together in one proposal; who waits for more
    gets no draft meanwhile. `steps` computes its passes and `empty` allocates its storage, if not on the host."""

    keeps_up = True
    never_rests = False

    def __init__(
        self, decoder: Decoder, batch: PersistentBatch, draw: Draw, *, num_draft_tokens: int, num_fed_at_once: int,
        steps: DeviceSteps | None = None, empty: Empty | None = None,
    ) -> None:  # fmt: skip
        self.num_lookahead_tokens = num_draft_tokens
        self.bytes_per_block = block_bytes(decoder.spec, batch.block_size, decoder.cache_dtype)
        self._decoder = decoder
        self._on_device = steps
        self._steps: Steps = steps or HostSteps(decoder)
        self._allocate = empty
        self._batch = batch
        self._draw = draw
        self._num_fed_at_once = num_fed_at_once
        self._progress: dict[str, _Progress] = {}
        self.allocate_kv(2)

    def allocate_kv(self, num_blocks: int) -> None:
        if self._on_device is not None:
            self._on_device.drop_graphs()
        decoder = self._decoder
        self._cache = KVCache(decoder.spec, num_blocks, self._batch.block_size, decoder.cache_dtype, self._allocate)
        self._is_filled = bytearray(num_blocks)
        self._progress.clear()

    @property
    def graphs(self) -> DecodeGraphs | None:
        return None if self._on_device is None else self._on_device.graphs

    def use_graphs(self, token_budget: int) -> None:
        if self._on_device is not None:
            self._on_device.use_graphs(self._cache.layers, token_budget)

    def describe(self) -> str:
        spec = self._decoder.spec
        return f"drafts by a model of {spec.num_layers} layers, {spec.hidden_size} wide"

    def warm_up(self) -> None:
        token_ids = torch.randint(self._decoder.spec.vocab_size, (1,))
        self._forward(token_ids, torch.zeros(1, dtype=torch.int64), NOWHERE)

    def observe(self, plan: Schedule) -> None:
        size = self._batch.block_size
        for request in (*plan.preempted, *plan.held):
            self.forget(request)
        for request in plan.started:
            num_shared = request.num_computed_tokens // size
            shared = [self._is_filled[block] for block in request.block_ids[:num_shared]]
            self._progress[request.request_id] = _Progress((*shared, 0).index(0) * size)
            self._empty(request.block_ids[num_shared:])
        for _, blocks in plan.grown:
            self._empty(blocks)

    def forget(self, request: Request) -> None:
        self._progress.pop(request.request_id, None)

    def propose(self, tasks: Sequence[Task], computed: Computed) -> list[Draft]:
        self._batch.apply()  # the tokens of the step before are read from there
        spans = self._choose_spans([task.request for task in tasks])
        drafts = {task.request.request_id: Draft() for task in tasks}
        if spans:
            inputs = paged_inputs(self._batch, spans)
            token_ids = self._batch.token_ids[inputs.rows, inputs.positions].long()
            hidden = self._steps.hidden(token_ids, inputs.positions, self._cache.layers, inputs.attention)
            for span in spans:
                self._note_fed(span)
            num_wanted = {task.request.request_id: task.num_wanted for task in tasks}
            counts = [self._possible(span, num_wanted[span.request.request_id]) for span in spans]
            guessing = [i for i, count in enumerate(counts) if count > 0]
            if guessing:
                wishes = [Wish(spans[i].request, counts[i]) for i in guessing]
                logits = self._steps.logits(hidden, inputs.last[guessing])
                for wish, draft in zip(wishes, self._guess(wishes, logits), strict=True):
                    drafts[wish.request.request_id] = draft
        return list(drafts.values())

    def _choose_spans(self, requests: Sequence[Request]) -> list[Span]:
        """What is fed: of each request what the model has computed, and its last token. Short ones come first."""
        spans = []
        for request in requests:
            progress = self._reconciled(request)
            end = min(request.num_computed_tokens + 1, request.num_tokens, self._room(request))
            if end > progress.num_fed:
                spans.append(Span(request, progress.num_fed, end - progress.num_fed))
        left, chosen = self._num_fed_at_once, []
        for span in sorted(spans, key=lambda span: span.count):
            if left > 0:
                chosen.append(Span(span.request, span.start, min(span.count, left)))
                left -= chosen[-1].count
        return in_batch_order(chosen)

    def _reconciled(self, request: Request) -> _Progress:
        """The request's progress; guesses that came true have been fed."""
        progress = self._progress.setdefault(request.request_id, _Progress(0))
        if progress.guesses:
            end = min(request.num_tokens, progress.num_fed + len(progress.guesses))
            actual = request.tokens_between(progress.num_fed, end)
            equal = [a == b for a, b in zip(actual, progress.guesses, strict=False)]
            before = progress.num_fed
            progress.num_fed += (*equal, False).index(False)
            progress.guesses = []
            self._fill(request, before, progress.num_fed)
        return progress

    def _note_fed(self, span: Span) -> None:
        progress = self._progress[span.request.request_id]
        progress.num_fed = span.start + span.count
        self._fill(span.request, span.start, progress.num_fed)

    def _possible(self, span: Span, num_wanted: int) -> int:
        """Drafts for a request that has been fed its last token: all but the last of them need a slot."""
        request = span.request
        if span.start + span.count < request.num_tokens:
            return 0
        return min(num_wanted, self._room(request) - request.num_tokens + 1)

    def _guess(self, wishes: Sequence[Wish], logits: Tensor) -> list[Draft]:
        rows = torch.tensor([wish.request.row for wish in wishes])

        def advance(active: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
            return self._forward(token_ids, positions, next_inputs(self._batch, rows[active], positions))

        drafts = guess(wishes, logits, self._draw, advance)
        for wish, draft in zip(wishes, drafts, strict=True):
            self._progress[wish.request.request_id].guesses = draft.token_ids[:-1]
        return drafts

    def _forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBatch) -> Tensor:
        hidden = self._steps.hidden(token_ids, positions, self._cache.layers, attention)
        return self._decoder.compute_logits(hidden)

    def _room(self, request: Request) -> int:
        return min(room(request, self._batch.block_size), self._decoder.spec.max_position_embeddings)

    def _fill(self, request: Request, start: int, end: int) -> None:
        size = self._batch.block_size
        for index in range(start // size, end // size):
            self._is_filled[request.block_ids[index]] = 1

    def _empty(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._is_filled[block] = 0
