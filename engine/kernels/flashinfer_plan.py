"""A step's sequences in FlashInfer's terms: pages of compressed rows instead of a padded block table.

    qo_indptr        int32[num_reqs + 1]   request r's query tokens are rows qo_indptr[r] … qo_indptr[r + 1] − 1
    indptr           int32[num_reqs + 1]   its pages are indices[indptr[r]] … indices[indptr[r + 1] − 1]
    indices          int32[indptr[-1]]     blocks of the cache, in the order of the sequence
    last_page_len    int32[num_reqs]       tokens in its last page: 1 … page_size

A page is a block. Plain tensor arithmetic on the host, where FlashInfer wants to plan; needs nothing of it. Source of
the format: docs.flashinfer.ai, "KV-Cache Layout in FlashInfer".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import AttentionBatch


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Of some requests of a step; see above."""

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def pages_of(batch: AttentionBatch, first: int, end: int, page_size: int) -> Pages:
    """Of requests first … end − 1 of a batch on the host, each of at least one token; their query tokens are counted
    from the first one's."""
    starts = batch.query_start_loc[first : end + 1]
    lengths = batch.seq_lens[first:end].long()
    counts = (lengths + page_size - 1) // page_size
    indptr = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    used = torch.arange(batch.block_table.shape[1]) < counts[:, None]
    return Pages(
        qo_indptr=(starts - starts[0]).int(),
        indptr=indptr.int(),
        indices=batch.block_table[first:end][used].int(),
        last_page_len=(lengths - (counts - 1) * page_size).int(),
    )
