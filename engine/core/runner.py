"""Runner: turns a schedule into tensors and runs the decoder on them.

Owns the persistent batch and the KV cache's tensors; decides nothing. Order of a step: rows started, blocks
appended, staged writes applied, inputs built, forward, logits of the rows that sample. What depends only on which
rows compute how many tokens is kept from one step to the next, which mostly decodes the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from preload.engine.kernels.attention import AttentionBatch
from preload.engine.models.decoder import Decoder

from .batch import PersistentBatch
from .kv_cache import KVCache
from .on_device import DeviceSteps
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
    """int64[num_logit_rows]: tokens whose logits are needed: a sampling request's last one and its drafts."""
    sampling: Sequence[Request]
    """The requests of `logits_indices`, each with 1 + num_drafts rows; its `row` is the request row of these."""
    num_drafts: Sequence[int]
    """Of each sampling request: how many of its drafts are computed."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Which rows compute how many tokens, and the tensors that follow from that alone."""

    rows: list[int]
    """In batch order."""
    lengths: list[int]
    """Tokens of each."""
    samples: list[int]
    """Which of them sample."""
    num_drafts: list[int]
    """Of each that samples."""
    idx_mapping: Tensor
    """int64[num_reqs]: request row of each request of the batch."""
    query_lens: Tensor
    """int64[num_reqs]"""
    query_start_loc: Tensor
    """int32[num_reqs + 1]"""
    request_of: Tensor
    """int64[num_tokens]: index in the batch of each token's request."""
    offsets: Tensor
    """int64[num_tokens]: of each token among its request's."""
    row_of: Tensor
    """int64[num_tokens]: request row of each token."""
    logits_indices: Tensor
    """int64[num_logit_rows]"""
    num_decodes: int

    @property
    def key(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """What decides all the rest."""
        return self.rows, self.lengths, self.samples, self.num_drafts

    @staticmethod
    def of(rows: list[int], lengths: list[int], samples: list[int], num_drafts: list[int]) -> Composition:
        idx_mapping, query_lens = torch.tensor(rows), torch.tensor(lengths)
        ends = query_lens.cumsum(0)
        request_of = torch.arange(len(rows)).repeat_interleave(query_lens)
        return Composition(
            rows=rows,
            lengths=lengths,
            samples=samples,
            num_drafts=num_drafts,
            idx_mapping=idx_mapping,
            query_lens=query_lens,
            query_start_loc=torch.cat((ends.new_zeros(1), ends)).int(),
            request_of=request_of,
            offsets=torch.arange(len(request_of)) - (ends - query_lens)[request_of],
            row_of=idx_mapping[request_of],
            logits_indices=_last_tokens(ends[samples], num_drafts),
            num_decodes=sum(length == 1 for length in lengths),
        )


class Runner:
    """Prepares and runs steps on one decoder."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, batch: PersistentBatch, on_device: DeviceSteps | None = None
    ) -> None:
        """`on_device` computes what is prepared here somewhere else than on the host."""
        self.on_device = on_device
        self.decoder = decoder
        self.cache = cache
        self.batch = batch
        self._composition: Composition | None = None
        self._block_table = torch.empty(0, 0, dtype=torch.int32)

    def prepare(self, plan: Schedule) -> StepInputs:
        """Applies the plan's writes to the batch and builds the step's tensors."""
        batch = self.batch
        for request in plan.started:
            batch.start(request.row, request.token_ids(), request.block_ids, request.num_computed_tokens)
        for request, blocks in plan.grown:
            batch.append_blocks(request.row, blocks)
        for item in plan.scheduled:
            if item.num_draft_tokens:
                for position, token_id in enumerate(item.draft_ids, item.request.num_tokens):
                    batch.append_token(item.request.row, position, max(token_id, 0))
        batch.apply()
        scheduled = sorted(plan.scheduled, key=lambda s: s.num_new_tokens > 1)
        composition = self._compose(scheduled, table_changed=bool(plan.started or plan.grown))
        sampling = [scheduled[i].request for i in composition.samples]
        return self._build(composition, sampling)

    def _compose(self, scheduled: Sequence[ScheduledRequest], *, table_changed: bool) -> Composition:
        """The step's composition and block table: the last step's, as far as nothing has changed."""
        rows = [item.request.row for item in scheduled]
        lengths = [item.num_new_tokens for item in scheduled]
        samples = [i for i, item in enumerate(scheduled) if item.samples]
        num_drafts = [scheduled[i].num_draft_tokens for i in samples]
        composition = self._composition
        if composition is None or (rows, lengths, samples, num_drafts) != composition.key:
            composition = self._composition = Composition.of(rows, lengths, samples, num_drafts)
            table_changed = True
        if table_changed:
            width, mapping = self.batch.num_blocks(composition.rows), composition.idx_mapping
            if self.on_device is None:
                self._block_table = self.batch.block_table[:, :width].index_select(0, mapping)
            else:
                self._block_table = self.on_device.block_table(self.batch.take_block_writes(), mapping, width)
        return composition

    def _build(self, composition: Composition, sampling: Sequence[Request]) -> StepInputs:
        batch, row_of, block_size = self.batch, composition.row_of, self.batch.block_size
        computed = batch.num_computed_tokens[composition.idx_mapping]
        positions = computed[composition.request_of] + composition.offsets
        blocks = batch.block_table[row_of, positions // block_size]
        return StepInputs(
            input_ids=batch.token_ids[row_of, positions].long(),
            positions=positions,
            attention=AttentionBatch(
                query_start_loc=composition.query_start_loc,
                seq_lens=(computed + composition.query_lens).int(),
                block_table=self._block_table,
                slot_mapping=blocks.long() * block_size + positions % block_size,
                num_decodes=composition.num_decodes,
            ),
            logits_indices=composition.logits_indices,
            sampling=sampling,
            num_drafts=composition.num_drafts,
        )

    def commit(self, num_rejected: Mapping[int, int]) -> None:
        """The tokens of the step that was prepared last are computed, but those at its end that were rejected.

        num_rejected: by request row, of rows that had any."""
        assert self._composition is not None, "nothing was prepared"
        self.batch.advance(self._composition.idx_mapping, self._composition.query_lens)
        if num_rejected:
            self.batch.advance(torch.tensor(list(num_rejected)), -torch.tensor(list(num_rejected.values())))

    def forward(self, inputs: StepInputs) -> Tensor:
        """Runs the decoder and writes the KV cache: float32[num_logit_rows, vocab_size], logits where needed."""
        if self.on_device is not None:
            where = inputs.input_ids, inputs.positions, self.cache.layers, inputs.attention
            self.hidden = self.on_device.hidden(*where)
            return self.on_device.logits(self.hidden, inputs.logits_indices)
        self.hidden = self.decoder.forward(inputs.input_ids, inputs.positions, self.cache.layers, inputs.attention)
        return self.decoder.compute_logits(self.hidden[inputs.logits_indices])

    def warm_up(self, num_tokens: int, num_before: int = 0) -> None:
        """One step on ids drawn uniformly from the vocabulary; neither batch nor KV cache is touched.

        Tokens are spread evenly over min(num_tokens, max_num_seqs) requests, the remainder one each to the last, and
        each of these has num_before tokens already. Their keys and values go nowhere (slots −1) and they read the
        null block, so results mean nothing, but every weight and every kernel is used once. Ids vary, because
        value-dependent kernels would take other paths on constant ones.
        """
        num_reqs = min(num_tokens, self.batch.max_num_seqs)
        lengths = torch.full((num_reqs,), num_tokens // num_reqs)
        lengths[num_reqs - num_tokens % num_reqs :] += 1
        ends = lengths.cumsum(0)
        positions = torch.arange(num_tokens) - (ends - lengths).repeat_interleave(lengths) + num_before
        num_blocks = -(-(num_before + int(lengths[-1])) // self.batch.block_size)
        inputs = StepInputs(
            input_ids=torch.randint(self.decoder.spec.vocab_size, (num_tokens,)),
            positions=positions,
            attention=AttentionBatch(
                query_start_loc=torch.cat((ends.new_zeros(1), ends)).int(),
                seq_lens=(lengths + num_before).int(),
                block_table=torch.zeros(num_reqs, num_blocks, dtype=torch.int32),
                slot_mapping=torch.full((num_tokens,), -1),
                num_decodes=int((lengths == 1).sum()) if int(lengths[0]) == 1 else 0,
            ),
            logits_indices=ends - 1,
            sampling=(),
            num_drafts=(),
        )
        self.forward(inputs)


def _last_tokens(ends: Tensor, num_drafts: Sequence[int]) -> Tensor:
    """Indices of the last 1 + num_drafts[i] tokens before each of `ends`: int64[num_logit_rows]."""
    if not any(num_drafts):
        return ends - 1
    lasts = zip(ends.tolist(), num_drafts, strict=True)
    return torch.tensor([index for end, drafts in lasts for index in range(end - 1 - drafts, end)])
