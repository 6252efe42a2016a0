"""Mixture of experts on GPUs. Reference, and how experts lie in their weights: kernels/moe.py.

Pairs of token and expert are put in order of their experts, in blocks of BLOCK_M that hold one expert's pairs only;
the order is made by tensor operations whose shapes depend on the number of tokens alone. One product gates, another
projects down and applies the pair's weight; at last each token's pairs are added, in the order of its choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .products import byte_view, companions, dot_rows

Parts = Mapping[str, Tensor]


@triton.jit
def choose_experts_kernel(
    logits, weights, experts, num_experts, logits_stride,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_E)
    values = tl.load(logits + token * logits_stride + at, mask=at < num_experts, other=float("-inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, axis=0))
    total = tl.sum(powers, axis=0)
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), dtype=tl.float32)
    left = tl.where(at < num_experts, powers, -1.0)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(left, axis=0)
        chosen = tl.where(places == k, tl.max(left, axis=0), chosen)
        left = tl.where(at == best, -1.0, left)
        tl.store(experts + token * TOP_K + k, best.to(tl.int64))
    if RENORMALIZE:
        total = tl.sum(chosen, axis=0)
    tl.store(weights + token * TOP_K + places, chosen / total, mask=places < TOP_K)


def choose_experts(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """moe.choose_experts; of equal experts the first."""
    num_tokens, num_experts = router_logits.shape
    weights = torch.empty(num_tokens, top_k, device=router_logits.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64, device=router_logits.device)
    if num_tokens:
        choose_experts_kernel[(num_tokens,)](
            router_logits, weights, experts, num_experts, router_logits.stride(0),
            TOP_K=top_k, RENORMALIZE=renormalize,
            BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return weights, experts


@dataclass(frozen=True)
class PairBlocks:
    """Pairs in order of experts, and the blocks they are computed in."""

    order: Tensor
    """int64[num_pairs]: pair number = token · top_k + place of the choice."""
    expert: Tensor
    """int64[num_blocks]: each block's; num_experts for a block that is not needed."""
    first: Tensor
    """int64[num_blocks]: where the block begins in `order`."""
    end: Tensor
    """int64[num_blocks]: where its expert's pairs end."""


def group_pairs(experts: Tensor, num_experts: int, block_m: int) -> PairBlocks:
    """experts: int64[num_tokens, top_k]."""
    flat = experts.flatten()
    counts = (flat[:, None] == torch.arange(num_experts, device=flat.device)).sum(dim=0)
    ends = counts.cumsum(0)
    blocks = (counts + block_m - 1) // block_m
    block_ends = blocks.cumsum(0)
    numbers = torch.arange(flat.shape[0] // block_m + num_experts, device=flat.device)
    expert = torch.searchsorted(block_ends, numbers, right=True)
    known = expert.clamp(max=num_experts - 1)
    first = (ends - counts)[known] + (numbers - (block_ends - blocks)[known]) * block_m
    return PairBlocks(flat.argsort(stable=True), expert, first, ends[known])


@triton.jit
def gate_up_kernel(
    x, weight, scale, third, order, block_expert, block_first, block_end, out,
    num_experts, inner, num_cols, x_stride, weight_stride, scale_stride, out_stride,
    LAYOUT: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(block_expert + block)
    if expert < num_experts:
        at = tl.load(block_first + block) + tl.arange(0, BLOCK_M)
        mask = at < tl.load(block_end + block)
        tokens = tl.load(order + at, mask=mask, other=0) // TOP_K
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = columns < inner
        rows = expert * 2 * inner + columns
        source = x + tokens * x_stride
        gate = dot_rows(
            source, mask, weight, scale, third, rows, column_mask, num_cols, weight_stride, scale_stride,
            LAYOUT, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        up = dot_rows(
            source, mask, weight, scale, third, rows + inner, column_mask, num_cols, weight_stride, scale_stride,
            LAYOUT, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        gated = gate / (1.0 + tl.exp(-gate)) * up
        to = out + at[:, None] * out_stride + columns[None, :]
        tl.store(to, gated.to(out.dtype.element_ty), mask=mask[:, None] & column_mask[None, :])


@triton.jit
def down_kernel(
    gated, weight, scale, third, pair_weights, order, block_expert, block_first, block_end, out,
    num_experts, hidden, num_cols, gated_stride, weight_stride, scale_stride, out_stride,
    LAYOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(block_expert + block)
    if expert < num_experts:
        at = tl.load(block_first + block) + tl.arange(0, BLOCK_M)
        mask = at < tl.load(block_end + block)
        pairs = tl.load(order + at, mask=mask, other=0)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = columns < hidden
        total = dot_rows(
            gated + at * gated_stride, mask, weight, scale, third, expert * hidden + columns, column_mask, num_cols,
            weight_stride, scale_stride, LAYOUT, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = total * tl.load(pair_weights + pairs, mask=mask, other=0.0)[:, None]
        to = out + pairs[:, None] * out_stride + columns[None, :]
        tl.store(to, total, mask=mask[:, None] & column_mask[None, :])


@triton.jit
def add_pairs_kernel(pairs, out, num_cols, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(pairs + (token * TOP_K + k) * num_cols + cols, mask=mask, other=0.0)
    tl.store(out + token * num_cols + cols, total.to(out.dtype.element_ty), mask=mask)


def mixture(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: tuple[str, Parts],
    down: tuple[str, Parts],
    num_experts: int,
) -> Tensor:
    """moe.mixture. Layouts: products.LAYOUTS and "dense", of any float dtype, which are rounded to x's as all are.
    x: elements of a row adjacent."""
    num_tokens, hidden = x.shape
    top_k = experts.shape[1]
    out = torch.empty(num_tokens, hidden, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    num_pairs = num_tokens * top_k
    block_m = 16 if num_pairs <= 16 * num_experts else 64
    blocks = group_pairs(experts, num_experts, block_m)
    is_wide = torch.float32 in (x.dtype, gate_up[1]["weight"].dtype, down[1]["weight"].dtype)
    tile = {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": 64 if is_wide else 128, "num_warps": 4}
    where = (blocks.order, blocks.expert, blocks.first, blocks.end)

    layout, parts = gate_up
    weight = byte_view(parts["weight"])
    scale, third = companions(layout, parts)
    inner = weight.shape[0] // (2 * num_experts)
    gated = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    gate_up_kernel[(blocks.expert.shape[0], triton.cdiv(inner, 64))](
        x, weight, scale, third, *where, gated, num_experts, inner, hidden, x.stride(0), weight.stride(0),
        scale.stride(0), inner, LAYOUT=layout, TOP_K=top_k, **tile,
    )  # fmt: skip

    layout, parts = down
    weight = byte_view(parts["weight"])
    scale, third = companions(layout, parts)
    pairs = torch.empty(num_pairs, hidden, device=x.device)
    down_kernel[(blocks.expert.shape[0], triton.cdiv(hidden, 64))](
        gated, weight, scale, third, weights, *where, pairs, num_experts, hidden, inner, inner, weight.stride(0),
        scale.stride(0), hidden, LAYOUT=layout, **tile,
    )  # fmt: skip
    add_pairs_kernel[(num_tokens, triton.cdiv(hidden, 1024))](pairs, out, hidden, TOP_K=top_k, BLOCK=1024)
    return out
