"""Paged attention on GPUs. Reference, and the meaning of blocks, slots and batches: kernels/attention.py.

Decode: one query token per sequence. Each sequence's context is cut into the same number of splits, programs attend
to one split and one group of query heads each, and a second kernel joins what they found. A sequence without tokens
(the padding of a graph) gets zeros. Where a context is cut depends on its length and on `num_splits` alone, so a
token's result does not depend on its neighbours.
Prefill: a program takes BLOCK_M query tokens of one sequence and one head over all keys up to its last token.
Programs find their sequence themselves, so the host need not know the lengths.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from preload.engine.kernels.attention import AttentionBatch

MAX_SPLITS = 16
MIN_SPLIT_TOKENS = 128


@triton.jit
def _slots(block_table, positions, mask, block_size):
    """Flat indices of positions: int64[n]."""
    blocks = tl.load(block_table + positions // block_size, mask=mask, other=0).to(tl.int64)
    return blocks * block_size + positions % block_size


@triton.jit
def decode_split_kernel(
    query, key_cache, value_cache, block_table, seq_lens, mixed, stats, scale,
    query_stride, slot_stride, table_stride, block_size, head_dim, num_kv_heads,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    length = tl.load(seq_lens + request)
    split_tokens = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_T) * BLOCK_T
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, length)

    group, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + group
    query_mask = (group < GROUP)[:, None] & (dims < head_dim)[None, :]
    at = query + request * query_stride + heads[:, None] * head_dim + dims[None, :]
    q = tl.load(at, mask=query_mask, other=0.0)
    highest = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_G,), dtype=tl.float32)
    mix = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        positions = start + tl.arange(0, BLOCK_T)
        valid = positions < end
        slots = _slots(block_table + request * table_stride, positions, valid, block_size)
        offsets = slots[:, None] * slot_stride + kv_head * head_dim + dims[None, :]
        mask = valid[:, None] & (dims < head_dim)[None, :]
        k = tl.load(key_cache + offsets, mask=mask, other=0.0)
        v = tl.load(value_cache + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - above[:, None])
        fade = tl.exp(highest - above)
        total = total * fade + tl.sum(weights, axis=1)
        mix = mix * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = above
    part = (request * num_kv_heads * GROUP + heads) * num_splits + split
    tl.store(mixed + part[:, None] * head_dim + dims[None, :], mix, mask=query_mask)
    tl.store(stats + part * 2, highest, mask=group < GROUP)
    tl.store(stats + part * 2 + 1, total, mask=group < GROUP)


@triton.jit
def decode_join_kernel(
    mixed, stats, out, out_stride, head_dim, num_splits, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    part = (request * tl.num_programs(1) + head) * num_splits + splits
    valid = splits < num_splits
    highest = tl.load(stats + part * 2, mask=valid, other=float("-inf"))
    total = tl.load(stats + part * 2 + 1, mask=valid, other=0.0)
    used = highest > float("-inf")  # a split without tokens has neither weight nor a maximum
    above = tl.max(highest, axis=0)
    weights = tl.where(used, tl.exp(highest - tl.where(above > float("-inf"), above, 0.0)), 0.0)
    mask = used[:, None] & (dims < head_dim)[None, :]
    mix = tl.load(mixed + part[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
    sum_of_weights = tl.sum(weights * total, axis=0)
    result = tl.sum(weights[:, None] * mix, axis=0) / tl.where(sum_of_weights > 0, sum_of_weights, 1.0)
    at = out + request * out_stride + head * head_dim + dims
    tl.store(at, result.to(out.dtype.element_ty), mask=dims < head_dim)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    num_splits: int | None = None,
) -> None:
    """One query token per sequence. out, query: dtype[num_reqs, num_heads, head_dim], heads of a token adjacent.

    Caches as of `paged_attention`, contiguous; block_table: int32[num_reqs, max_blocks]; seq_lens: int32[num_reqs], 0
    for padding. `num_splits`: by default as many as the longest possible context is worth.
    """
    num_reqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if not num_reqs:
        return
    if num_splits is None:
        num_splits = min(MAX_SPLITS, max(1, block_table.shape[1] * block_size // MIN_SPLIT_TOKENS))
    group = num_heads // num_kv_heads
    block_d = triton.next_power_of_2(head_dim)
    mixed = torch.empty(num_reqs, num_heads, num_splits, head_dim, device=query.device)
    stats = torch.empty(num_reqs, num_heads, num_splits, 2, device=query.device)
    decode_split_kernel[(num_reqs, num_kv_heads, num_splits)](
        query, key_cache, value_cache, block_table, seq_lens, mixed, stats, 1 / math.sqrt(head_dim),
        query.stride(0), num_kv_heads * head_dim, block_table.stride(0), block_size, head_dim, num_kv_heads,
        GROUP=group, BLOCK_G=max(16, triton.next_power_of_2(group)), BLOCK_T=_key_tile(query.dtype, block_d),
        BLOCK_D=block_d, num_warps=4, num_stages=2,
    )  # fmt: skip
    decode_join_kernel[(num_reqs, num_heads)](
        mixed, stats, out, out.stride(0), head_dim, num_splits,
        BLOCK_S=triton.next_power_of_2(num_splits), BLOCK_D=block_d, num_warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_reqs"])
def prefill_kernel(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, scale,
    num_reqs, query_stride, out_stride, slot_stride, table_stride, block_size, head_dim,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.program_id(1)
    # Sequence r owns the programs from (its first token) // BLOCK_M + r on: at least as many as it has tiles.
    origin = tl.load(query_start_loc)
    request, beyond = program * 0, num_reqs + program * 0
    while beyond - request > 1:
        middle = (request + beyond) // 2
        if (tl.load(query_start_loc + middle) - origin) // BLOCK_M + middle <= program:
            request = middle
        else:
            beyond = middle
    first_token = tl.load(query_start_loc + request)
    num_query = tl.load(query_start_loc + request + 1) - first_token
    tile = (program - (first_token - origin) // BLOCK_M - request) * BLOCK_M
    if tile < num_query:
        length = tl.load(seq_lens + request)
        offsets, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        dim_mask = (dims < head_dim)[None, :]
        query_mask = (tile + offsets < num_query)[:, None] & dim_mask
        tokens = (first_token + tile + offsets).to(tl.int64)
        columns = head * head_dim + dims[None, :]
        q = tl.load(query + tokens[:, None] * query_stride + columns, mask=query_mask, other=0.0)
        rows = length - num_query + tile + offsets  # each query token's own position
        end = tl.minimum(length - num_query + tile + BLOCK_M, length)
        highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        mix = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        for start in range(0, end, BLOCK_T):
            positions = start + tl.arange(0, BLOCK_T)
            valid = positions < end
            slots = _slots(block_table + request.to(tl.int64) * table_stride, positions, valid, block_size)
            at = slots[:, None] * slot_stride + head // GROUP * head_dim + dims[None, :]
            k = tl.load(key_cache + at, mask=valid[:, None] & dim_mask, other=0.0)
            v = tl.load(value_cache + at, mask=valid[:, None] & dim_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = valid[None, :] & (positions[None, :] <= rows[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            above = tl.maximum(highest, tl.max(scores, axis=1))
            weights = tl.exp(scores - above[:, None])
            fade = tl.exp(highest - above)
            total = total * fade + tl.sum(weights, axis=1)
            mix = mix * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = above
        result = (mix / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + tokens[:, None] * out_stride + columns, result, mask=query_mask)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    max_query_tokens: int,
) -> None:
    """Any number of query tokens per sequence, the last ones of its context. out, query: dtype[num_tokens, num_heads,
    head_dim], heads of a token adjacent.

    query_start_loc: int32[num_reqs + 1], rows of `query`; seq_lens: int32[num_reqs]; max_query_tokens: not less than
    the query tokens of all these sequences together, as the host knows it.
    """
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_reqs = seq_lens.shape[0]
    if not num_reqs or not max_query_tokens:
        return
    block_d = triton.next_power_of_2(head_dim)
    block_m = 32 if query.dtype == torch.float32 or block_d > 128 else 64
    prefill_kernel[(max_query_tokens // block_m + num_reqs, num_heads)](
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, 1 / math.sqrt(head_dim),
        num_reqs, query.stride(0), out.stride(0), num_kv_heads * head_dim, block_table.stride(0), block_size,
        head_dim, GROUP=num_heads // num_kv_heads, BLOCK_M=block_m, BLOCK_T=_key_tile(query.dtype, block_d),
        BLOCK_D=block_d, num_warps=4, num_stages=2,
    )  # fmt: skip


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch) -> Tensor:
    """attention.paged_attention. Tokens beyond the batch's last sequence get zeros."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    n = batch.num_decodes
    paged_decode(query[:n], key_cache, value_cache, batch.block_table[:n], batch.seq_lens[:n], out[:n])
    paged_prefill(
        query, key_cache, value_cache, batch.block_table[n:], batch.query_start_loc[n:], batch.seq_lens[n:], out,
        query.shape[0] - n,
    )  # fmt: skip
    return out


def _key_tile(dtype: torch.dtype, block_d: int) -> int:
    """Keys per iteration: two stages of keys and values fit in the shared memory of every target."""
    return 32 if dtype == torch.float32 or block_d > 128 else 64
