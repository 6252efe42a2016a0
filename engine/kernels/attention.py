"""Attention over a paged KV cache, plain torch: the specification of any faster version.

Keys and values of all sequences live in blocks, `[num_blocks, block_size, num_kv_heads, head_dim]`. A sequence's
position p is in block `block_table[row, p // block_size]` at offset `p % block_size`; that slot's flat index is
`block · block_size + offset`. Block 0 is the null block: tables are padded with it, and what it holds never
reaches a result. Whatever lies beyond a sequence's length may be garbage, NaN included: it is masked, in the
scores and in the values.

A step mixes sequences with one new token (decode) and with many (prefill chunks). Decodes come first in the
batch and are computed in padded calls of bounded size; each prefill chunk is computed on its own, with the
causal offset of what was computed before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_GATHERED_ELEMENTS = 1 << 24
"""Bound of the scratch of one padded decode call: elements of keys gathered, and as many of values."""

MAX_SCORE_ELEMENTS = 1 << 24
"""Bound of the scores of one prefill call; a longer chunk is computed in pieces of its query tokens."""


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """Where the tokens of one step sit. Requests are in batch order, those with one query token first."""

    query_start_loc: Tensor
    """int32[num_reqs + 1]: request r's tokens are query_start_loc[r] … query_start_loc[r + 1] − 1."""
    seq_lens: Tensor
    """int32[num_reqs]: tokens of each request in the cache after this step's are written."""
    block_table: Tensor
    """int32[num_reqs, max_blocks], padded with 0."""
    slot_mapping: Tensor
    """int64[num_tokens]: where each token's key and value go; −1 = padding, never written."""
    num_decodes: int
    """The first num_decodes requests have exactly one query token."""
    is_replayed: bool = False
    """Whether a graph reads it, whose content changes without the host being asked again."""


def write_kv(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Stores each token's key and value in its slot; slots of −1 are left out.

    key_cache, value_cache: dtype[num_blocks, block_size, num_kv_heads, head_dim];
    key, value: dtype[num_tokens, num_kv_heads, head_dim]; slot_mapping: int64[num_tokens].
    """
    if bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    block, offset = slot_mapping // key_cache.shape[1], slot_mapping % key_cache.shape[1]
    key_cache[block, offset] = key
    value_cache[block, offset] = value


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch) -> Tensor:
    """Causal grouped-query attention of a step's tokens over their sequences' caches.

    query: dtype[num_tokens, num_heads, head_dim], num_heads a multiple of the caches' num_kv_heads.
    Returns dtype[num_tokens, num_heads, head_dim]. Scores are scaled by
    1/sqrt(head_dim), and their softmax is taken in float32.
    Source: arXiv 1706.03762 section 3.2.1 (attention), 2305.13245 (groups), 2309.06180 (blocks).
    """
    out = torch.empty_like(query)
    starts = batch.query_start_loc.tolist()
    lengths = batch.seq_lens.tolist()
    for first, last in _decode_pieces(lengths[: batch.num_decodes], key_cache):
        out[first:last] = _decode(query[first:last], key_cache, value_cache, batch, first, last)
    for r in range(batch.num_decodes, len(lengths)):
        chunk = slice(starts[r], starts[r + 1])
        if starts[r] == starts[r + 1]:  # the padding of a graph
            continue
        out[chunk] = _prefill(query[chunk], key_cache, value_cache, batch.block_table[r], lengths[r])
    return out


def _decode_pieces(lengths: list[int], key_cache: Tensor) -> Iterator[tuple[int, int]]:
    """Splits decodes so that no padded piece gathers more than MAX_GATHERED_ELEMENTS of keys."""
    per_token = key_cache.shape[2] * key_cache.shape[3]
    first, longest = 0, 0
    for r, length in enumerate(lengths):
        longest = max(longest, length)
        if r > first and (r + 1 - first) * longest * per_token > MAX_GATHERED_ELEMENTS:
            yield first, r
            first, longest = r, length
    if first < len(lengths):
        yield first, len(lengths)


def _decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, first: int, last: int
) -> Tensor:
    """One query token per sequence, sequences padded to the longest of them: dtype[rows, num_heads, head_dim]."""
    block_size = key_cache.shape[1]
    seq_lens = batch.seq_lens[first:last]
    num_blocks = -(-int(seq_lens.max()) // block_size)
    blocks = batch.block_table[first:last, :num_blocks]
    keys = key_cache[blocks].flatten(1, 2).permute(0, 2, 3, 1)  # [rows, kv_heads, head_dim, padded]
    values = value_cache[blocks].flatten(1, 2)  # [rows, padded, kv_heads, head_dim]
    beyond = torch.arange(num_blocks * block_size, device=query.device) >= seq_lens[:, None]
    values = values.masked_fill_(beyond[:, :, None, None], 0).permute(0, 2, 1, 3)
    rows, num_heads, head_dim = query.shape
    grouped = query.view(rows, key_cache.shape[2], -1, head_dim)
    scores = torch.matmul(grouped, keys).float() / math.sqrt(head_dim)
    weights = torch.softmax(scores.masked_fill_(beyond[:, None, None, :], -math.inf), dim=-1)
    return torch.matmul(weights.to(query.dtype), values).reshape(rows, num_heads, head_dim)


def _prefill(query: Tensor, key_cache: Tensor, value_cache: Tensor, blocks: Tensor, seq_len: int) -> Tensor:
    """The last num_query tokens of one sequence: dtype[num_query, num_heads, head_dim]. blocks: int32[max_blocks]."""
    num_query, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    blocks = blocks[: -(-seq_len // key_cache.shape[1])]
    keys = key_cache[blocks].flatten(0, 1)[:seq_len].permute(1, 2, 0)  # [kv_heads, head_dim, seq_len]
    values = value_cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)  # [kv_heads, seq_len, head_dim]
    columns = torch.arange(seq_len, device=query.device)
    piece = max(1, MAX_SCORE_ELEMENTS // (num_heads * seq_len))
    out = torch.empty_like(query)
    for start in range(0, num_query, piece):
        part = query[start : start + piece]
        length = part.shape[0]
        grouped = part.view(length, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.matmul(grouped, keys).float() / math.sqrt(head_dim)
        scores = scores.view(num_kv_heads, -1, length, seq_len)
        rows = torch.arange(start, start + length, device=query.device) + (seq_len - num_query)
        scores.masked_fill_(columns > rows[:, None], -math.inf)
        weights = torch.softmax(scores, dim=-1).to(query.dtype).flatten(1, 2)
        mixed = torch.matmul(weights, values).view(num_kv_heads, -1, length, head_dim)
        out[start : start + piece] = mixed.permute(2, 0, 1, 3).reshape(length, num_heads, head_dim)
    return out
