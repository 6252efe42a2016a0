"""Runner: turns a schedule into tensors and runs the decoder on them.

Owns the persistent batch and the KV cache's tensors; decides nothing. Order of a step: rows started, blocks
appended, staged writes applied, inputs built, forward, logits of the rows that sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from preload.engine.kernels.attention import AttentionBatch
from preload.engine.models.decoder import Decoder

from .batch import PersistentBatch
from .kv_cache import KVCache
from .request import Request
from .scheduler import Schedule, ScheduledRequest


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What one step computes. Requests are in batch order: those with one token first."""

    input_ids: Tensor
    """int64[num_tokens]"""
    positions: Tensor
    """int64[num_tokens]"""
    attention: AttentionBatch
    logits_indices: Tensor
    """int64[num_sampling]: tokens whose logits are needed."""
    sampling: Sequence[Request]
    """The requests of `logits_indices`; a logit row's request row is its request's `row`."""


class Runner:
    """Prepares and runs steps on one decoder."""

    def __init__(self, decoder: Decoder, cache: KVCache, batch: PersistentBatch) -> None:
        self.decoder = decoder
        self.cache = cache
        self.batch = batch

    def prepare(self, plan: Schedule) -> StepInputs:
        """Applies the plan's writes to the batch and builds the step's tensors."""
        for request in plan.started:
            self.batch.start(request.row, request.token_ids(), request.block_ids)
        for request, blocks in plan.grown:
            self.batch.append_blocks(request.row, blocks)
        self.batch.apply()
        scheduled = sorted(plan.scheduled, key=lambda s: s.num_new_tokens > 1)
        return self._build(scheduled)

    def _build(self, scheduled: Sequence[ScheduledRequest]) -> StepInputs:
        idx_mapping = torch.tensor([s.request.row for s in scheduled])
        query_lens = torch.tensor([s.num_new_tokens for s in scheduled])
        computed = self.batch.num_computed_tokens[idx_mapping].long()
        ends = query_lens.cumsum(0)
        request_of = torch.arange(len(scheduled)).repeat_interleave(query_lens)
        positions = torch.arange(int(ends[-1])) + (computed - ends + query_lens)[request_of]
        rows = idx_mapping[request_of]
        block_size = self.batch.block_size
        seq_lens = computed + query_lens
        samples = [i for i, s in enumerate(scheduled) if s.samples]
        return StepInputs(
            input_ids=self.batch.token_ids[rows, positions].long(),
            positions=positions,
            attention=AttentionBatch(
                query_start_loc=torch.cat((ends.new_zeros(1), ends)).int(),
                seq_lens=seq_lens.int(),
                block_table=self._gather_block_table(idx_mapping, seq_lens),
                slot_mapping=self.batch.block_table[rows, positions // block_size].long() * block_size
                + positions % block_size,
                num_decodes=sum(s.num_new_tokens == 1 for s in scheduled),
            ),
            logits_indices=ends[samples] - 1,
            sampling=[scheduled[i].request for i in samples],
        )

    def _gather_block_table(self, idx_mapping: Tensor, seq_lens: Tensor) -> Tensor:
        """int32[num_reqs, blocks of the longest], padded with the null block."""
        num_blocks = -(-seq_lens // self.batch.block_size)
        table = self.batch.block_table[idx_mapping, : int(num_blocks.max())]
        beyond = torch.arange(table.shape[1]) >= num_blocks[:, None]
        return table.masked_fill_(beyond, 0)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Runs the decoder and writes the KV cache: float32[num_sampling, vocab_size], logits where needed."""
        hidden = self.decoder.forward(inputs.input_ids, inputs.positions, self.cache.layers, inputs.attention)
        return self.decoder.compute_logits(hidden[inputs.logits_indices])

    def warm_up(self, num_tokens: int) -> None:
        """One step on ids drawn uniformly from the vocabulary; neither batch nor KV cache is touched.

        Tokens are spread evenly over min(num_tokens, max_num_seqs) requests, the remainder one each to the last.
        Their keys and values go nowhere (slots −1) and they read the null block, so results mean nothing, but
        every weight and every kernel is used once. Ids vary, because value-dependent kernels would take other
        paths on constant ones.
        """
        num_reqs = min(num_tokens, self.batch.max_num_seqs)
        lengths = torch.full((num_reqs,), num_tokens // num_reqs)
        lengths[num_reqs - num_tokens % num_reqs :] += 1
        ends = lengths.cumsum(0)
        positions = torch.arange(num_tokens) - (ends - lengths).repeat_interleave(lengths)
        inputs = StepInputs(
            input_ids=torch.randint(self.decoder.spec.vocab_size, (num_tokens,)),
            positions=positions,
            attention=AttentionBatch(
                query_start_loc=torch.cat((ends.new_zeros(1), ends)).int(),
                seq_lens=lengths.int(),
                block_table=torch.zeros(num_reqs, num_tokens, dtype=torch.int32),
                slot_mapping=torch.full((num_tokens,), -1),
                num_decodes=int((lengths == 1).sum()) if int(lengths[0]) == 1 else 0,
            ),
            logits_indices=ends - 1,
            sampling=(),
        )
        self.forward(inputs)
