"""Drafts by the model's own multi-token-prediction head: one more decoder layer, fed with the model's last states.

The head's slot for position i holds keys and values made of the model's state at i and the token at i + 1. It is fed
after every step, for all positions that were computed and kept: the step's inputs shifted by one, and the token that
was chosen last. For drafts after the first it is fed its own state and draft; their slots are overwritten later. A
block shared by two prefixes has, in its last slot, the next token of whoever came first: a worse guess there, never
a wrong answer. Source: arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from preload.engine.core.batch import PersistentBatch
from preload.engine.core.kv_cache import Empty, KVCache, block_bytes
from preload.engine.core.on_device import HostSteps, Steps
from preload.engine.core.request import Request
from preload.engine.core.scheduler import Schedule
from preload.engine.errors import RequestError
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.models.decoder import Decoder

from .drafter import Computed, Draft, Task
from .guessing import Draw, Wish, guess
from .paged import NOWHERE, Span, in_batch_order, next_inputs, paged_inputs, room


class MtpDrafter:
    """The head of a decoder whose spec has one; `steps` are the decoder's. Raises RequestError if it has none.

    Its own passes are eager on a device, too: they are those of a single layer."""

    keeps_up = True
    never_rests = True
    graphs = None

    def __init__(
        self, decoder: Decoder, batch: PersistentBatch, draw: Draw, *, num_draft_tokens: int,
        steps: Steps | None = None, empty: Empty | None = None,
    ) -> None:  # fmt: skip
        if decoder.mtp is None:
            raise RequestError(
                "the model has no multi-token-prediction head (num_nextn_predict_layers); choose another way to "
                "speculate: ngram, or draft with a draft model"
            )
        self.num_lookahead_tokens = num_draft_tokens
        self._spec = replace(decoder.spec, num_layers=1)
        self.bytes_per_block = block_bytes(self._spec, batch.block_size, decoder.cache_dtype)
        self._head = decoder.mtp
        self._decoder = decoder
        self._steps: Steps = steps or HostSteps(decoder)
        self._allocate = empty
        self._batch = batch
        self._draw = draw
        self._num_fed: dict[str, int] = {}
        self.allocate_kv(2)

    def allocate_kv(self, num_blocks: int) -> None:
        block_size, dtype = self._batch.block_size, self._decoder.cache_dtype
        self._cache = KVCache(self._spec, num_blocks, block_size, dtype, self._allocate)
        self._num_fed.clear()

    def use_graphs(self, token_budget: int) -> None:
        """It has none."""

    def describe(self) -> str:
        return "drafts by the model's multi-token-prediction head"

    def warm_up(self) -> None:
        state = self._steps.over(torch.zeros(1, self._spec.hidden_size, dtype=self._decoder.dtype))
        token_ids = torch.randint(self._spec.vocab_size, (1,))
        state = self._forward(token_ids, state, torch.zeros(1, dtype=torch.int64), NOWHERE)
        self._decoder.compute_logits(state)

    def observe(self, plan: Schedule) -> None:
        for request in (*plan.preempted, *plan.held):
            self.forget(request)
        for request in plan.started:
            self._num_fed[request.request_id] = request.num_computed_tokens

    def forget(self, request: Request) -> None:
        self._num_fed.pop(request.request_id, None)

    def propose(self, tasks: Sequence[Task], computed: Computed) -> list[Draft]:
        self._batch.apply()  # the tokens of the step before are read from there
        first_of = {
            item.request.request_id: first
            for item, first in zip(computed.scheduled, computed.query_start_loc.tolist(), strict=False)
        }
        spans = in_batch_order([self._span(task.request) for task in tasks])
        inputs = paged_inputs(self._batch, spans)
        indices = torch.cat([torch.arange(span.count) + first_of[span.request.request_id] for span in spans])
        token_ids = self._batch.token_ids[inputs.rows, inputs.positions + 1].long()
        before = computed.hidden[self._steps.over(indices)]
        states = self._forward(token_ids, before, inputs.positions, inputs.attention)
        drafts = {task.request.request_id: Draft() for task in tasks}
        num_wanted = {task.request.request_id: task.num_wanted for task in tasks}
        counts = [self._possible(span.request, num_wanted[span.request.request_id]) for span in spans]
        guessing = [i for i, count in enumerate(counts) if count > 0]
        if guessing:
            wishes = [Wish(spans[i].request, counts[i]) for i in guessing]
            states = states[self._steps.over(inputs.last[guessing])]
            for wish, draft in zip(wishes, self._guess(wishes, states), strict=True):
                drafts[wish.request.request_id] = draft
        return list(drafts.values())

    def _span(self, request: Request) -> Span:
        """What the step before has computed of a request, without rejected drafts."""
        start = self._num_fed[request.request_id]
        self._num_fed[request.request_id] = request.num_computed_tokens
        return Span(request, start, request.num_computed_tokens - start)

    def _possible(self, request: Request, num_wanted: int) -> int:
        """Drafts that there are slots for: the first needs none, the i-th one that for its predecessor."""
        return min(num_wanted, room(request, self._batch.block_size) - request.num_tokens + 2)

    def _guess(self, wishes: Sequence[Wish], states: Tensor) -> list[Draft]:
        """states: dtype[len(wishes), hidden_size], the head's at each request's last computed position."""
        rows = torch.tensor([wish.request.row for wish in wishes])
        latest = [states]

        def advance(active: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
            # The head's slot lies one before the token's: its token at i + 1 is fed with the state at i.
            attention, chosen = next_inputs(self._batch, rows[active], positions - 1), self._steps.over(active)
            states = self._forward(token_ids, latest[0][chosen], positions - 1, attention)
            latest[0][chosen] = states
            return self._decoder.compute_logits(states)

        return guess(wishes, self._decoder.compute_logits(states), self._draw, advance)

    def _forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, attention: AttentionBatch) -> Tensor:
        steps = self._steps
        where = steps.over(positions), self._cache.layers[0], steps.over_batch(attention)
        return self._head(steps.over(token_ids), states, *where)
