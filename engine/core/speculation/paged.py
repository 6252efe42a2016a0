"""Inputs of a drafter's own passes over the KV blocks that the model's requests own.

A drafter's keys and values lie in a storage of its own, in blocks of the same numbers: one allocator and one block
table serve both, and a block that is shared by two requests with one prefix is shared in both storages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from preload.engine.core.batch import PersistentBatch
from preload.engine.core.request import Request
from preload.engine.kernels.attention import AttentionBatch


@dataclass(frozen=True)
class Span:
    """Tokens start … start + count − 1 of a running request."""

    request: Request
    start: int
    count: int


@dataclass(frozen=True, kw_only=True)
class PagedInputs:
    """One pass over spans, those of one token first."""

    rows: Tensor
    """int64[num_tokens]: request row of each token."""
    positions: Tensor
    """int64[num_tokens]"""
    last: Tensor
    """int64[num_spans]: index of each span's last token."""
    attention: AttentionBatch


def in_batch_order(spans: Sequence[Span]) -> list[Span]:
    """Those of one token first, as attention wants them."""
    return sorted(spans, key=lambda span: span.count > 1)


def paged_inputs(batch: PersistentBatch, spans: Sequence[Span]) -> PagedInputs:
    """Where the spans' tokens sit. The batch's staged writes must be applied, and blocks be there for all of them."""
    row_list = [span.request.row for span in spans]
    span_rows, counts = torch.tensor(row_list), torch.tensor([span.count for span in spans])
    starts, ends = torch.tensor([span.start for span in spans]), counts.cumsum(0)
    span_of = torch.arange(len(spans)).repeat_interleave(counts)
    positions = torch.arange(len(span_of)) + (starts - ends + counts)[span_of]
    rows = span_rows[span_of]
    return PagedInputs(
        rows=rows,
        positions=positions,
        last=ends - 1,
        attention=AttentionBatch(
            query_start_loc=torch.cat((ends.new_zeros(1), ends)).int(),
            seq_lens=(starts + counts).int(),
            block_table=batch.block_table[:, : batch.num_blocks(row_list)].index_select(0, span_rows),
            slot_mapping=_slots(batch, rows, positions),
            num_decodes=sum(span.count == 1 for span in spans),
        ),
    )


def next_inputs(batch: PersistentBatch, rows: Tensor, positions: Tensor) -> AttentionBatch:
    """One token of each request: that at `positions`. rows, positions: int64[num_reqs]."""
    num_reqs, width = len(rows), int(positions.max()) // batch.block_size + 1
    return AttentionBatch(
        query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32),
        seq_lens=(positions + 1).int(),
        block_table=batch.block_table[:, :width].index_select(0, rows),
        slot_mapping=_slots(batch, rows, positions),
        num_decodes=num_reqs,
    )


NOWHERE = AttentionBatch(
    query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
    seq_lens=torch.ones(1, dtype=torch.int32),
    block_table=torch.zeros(1, 1, dtype=torch.int32),
    slot_mapping=torch.full((1,), -1),
    num_decodes=1,
)
"""One token that reads the null block and is not written: to use weights and kernels once."""


def room(request: Request, block_size: int) -> int:
    """Tokens that the request's blocks hold."""
    return len(request.block_ids) * block_size


def _slots(batch: PersistentBatch, rows: Tensor, positions: Tensor) -> Tensor:
    size = batch.block_size
    return batch.block_table[rows, positions // size].long() * size + positions % size
