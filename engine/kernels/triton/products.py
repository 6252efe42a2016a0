"""Products with quantized weights on GPUs.

`product` equals `product_by_rows` of engine/layers/linear.py: weights are dequantized in the product, a tile at a
time, in the activations' dtype, and summed in float32. Scales of rows, of the tensor and of blocks of 128 columns
multiply sums instead of weights, so that e4m3 and int8 enter the product exactly.
`scaled_product` equals the function of that name in engine/kernels/scaled_products.py: activations are quantized to
e4m3 too, and each 128 columns' sum is multiplied by both scales.
Columns are added in one order whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import e4m3_to_float, float_to_e4m3, row_scales, weight_tile

LAYOUTS = (
    "int8_per_channel",
    "int4_group32",
    "int4_group64",
    "int4_group128",
    "fp8_per_tensor",
    "fp8_per_block",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "gguf.q4_0",
    "gguf.q4_1",
    "gguf.q8_0",
)
"""Layouts that `product` multiplies; a dense one it takes too, but torch's matmul is better at it."""

SCALED_LAYOUTS = ("fp8_per_tensor", "fp8_per_block")
"""Layouts that `scaled_product` multiplies."""

GROUP = 128
"""Columns of one activation scale."""


@dataclass(frozen=True)
class Tile:
    """Shape of a program's work: tokens × rows, BLOCK_K columns at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int


def tile_for(num_tokens: int, dtype: torch.dtype) -> Tile:
    """Few tokens are a matter of reading weights: narrow tiles make many programs. Many are one of arithmetic."""
    block_k = 64 if dtype == torch.float32 else 128
    if num_tokens <= 16:
        return Tile(16, 32, block_k, 4)
    if num_tokens <= 64:
        return Tile(32, 64, block_k, 4)
    return Tile(64, 64, 64, 4) if dtype == torch.float32 else Tile(64, 128, 64, 8)


@triton.jit
def dot_rows(
    x,
    token_mask,
    weight,
    scale,
    third,
    rows,
    row_mask,
    num_cols,
    weight_stride,
    scale_stride,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Some tokens' products with some rows: float32[BLOCK_M, BLOCK_N]. x: pointers[BLOCK_M] to each token's start."""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, num_cols, BLOCK_K):
        cols = first + tl.arange(0, BLOCK_K)
        mask = token_mask[:, None] & (cols < num_cols)[None, :]
        tokens = tl.load(x[:, None] + cols[None, :], mask=mask, other=0.0)
        tile = weight_tile(
            weight, scale, third, rows, row_mask, first, num_cols, weight_stride, scale_stride, LAYOUT, BLOCK_K
        )
        tile = tl.trans(tile.to(tokens.dtype))
        if LAYOUT == "fp8_per_block":
            part = tl.dot(tokens, tile, input_precision="ieee")
            by_block = tl.load(scale + rows // 128 * scale_stride + first // 128, mask=row_mask, other=0.0)
            total += part * by_block[None, :]
        else:
            total = tl.dot(tokens, tile, total, input_precision="ieee")
    return total * row_scales(scale, third, rows, row_mask, LAYOUT)[None, :]


@triton.jit
def product_kernel(
    x,
    weight,
    scale,
    third,
    bias,
    residual,
    out,
    num_tokens,
    num_rows,
    num_cols,
    x_stride,
    weight_stride,
    scale_stride,
    residual_stride,
    out_stride,
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_mask, row_mask = tokens < num_tokens, rows < num_rows
    total = dot_rows(
        x + tokens * x_stride, token_mask, weight, scale, third, rows, row_mask, num_cols,
        weight_stride, scale_stride, LAYOUT, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    dtype = out.dtype.element_ty
    mask = token_mask[:, None] & row_mask[None, :]
    total = total.to(dtype)
    if HAS_BIAS:
        added = tl.load(bias + rows, mask=row_mask, other=0.0)
        total = (total.to(tl.float32) + added.to(tl.float32)[None, :]).to(dtype)
    if HAS_RESIDUAL:
        at = residual + tokens[:, None] * residual_stride + rows[None, :]
        total = (total.to(tl.float32) + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out + tokens[:, None] * out_stride + rows[None, :], total, mask=mask)


def product(
    x: Tensor,
    layout: str,
    parts: Mapping[str, Tensor],
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x · weightᵀ + bias + residual, rounded to x's dtype after each: dtype[num_tokens, num_rows].

    x: dtype[num_tokens, num_cols]; bias: dtype[num_rows]; residual, out: dtype[num_tokens, num_rows], which may be
    the same tensor. Rows of x, residual and out may lie apart, their elements are adjacent. Layouts: LAYOUTS, dense.
    """
    num_tokens, num_cols = x.shape
    weight = byte_view(parts["weight"])
    num_rows = weight.shape[0]
    out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device) if out is None else out
    if not num_tokens:
        return out
    scale, third = companions(layout, parts)
    tile = tile_for(num_tokens, x.dtype)
    grid = (triton.cdiv(num_rows, tile.block_n), triton.cdiv(num_tokens, tile.block_m))
    product_kernel[grid](
        x, weight, scale, third, x if bias is None else bias, x if residual is None else residual, out,
        num_tokens, num_rows, num_cols, x.stride(0), weight.stride(0), scale.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0),
        LAYOUT=layout, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def byte_view(tensor: Tensor) -> Tensor:
    """Small floats as their bytes: kernels take them apart themselves."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def companions(layout: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The kernels' `scale` and `third`; where a layout has none, some tensor that is not read."""
    scale = byte_view(parts.get("scale", parts["weight"]))
    third = parts.get("min", parts.get("global_scale", scale))
    if layout.startswith("int4_group") and third.stride(0) != scale.stride(0):
        raise AssertionError(f"scales and minima of {layout} lie differently")
    return scale, third


@triton.jit
def quantize_activations_kernel(
    x, quantized, scale, num_cols, x_stride, quantized_stride, scale_stride, floor, BLOCK: tl.constexpr
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = group * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    values = tl.load(x + token * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    by = tl.div_rn(tl.maximum(tl.max(tl.abs(values), axis=0), floor), 448.0)
    scaled = tl.minimum(tl.maximum(tl.div_rn(values, by + tl.zeros_like(values)), -448.0), 448.0)
    tl.store(quantized + token * quantized_stride + cols, float_to_e4m3(scaled), mask=mask)
    tl.store(scale + token * scale_stride + group, by)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8_per_block.quantize_activations, bit for bit."""
    from preload.engine.quantization.fp8_per_block import MIN_ACTIVATION_AMAX

    num_tokens, num_cols = x.shape
    num_groups = triton.cdiv(num_cols, GROUP)
    quantized = torch.empty(num_tokens, num_cols, dtype=torch.uint8, device=x.device)
    scale = torch.empty(num_tokens, num_groups, device=x.device)
    if num_tokens:
        quantize_activations_kernel[(num_tokens, num_groups)](
            x, quantized, scale, num_cols, x.stride(0), quantized.stride(0), scale.stride(0), MIN_ACTIVATION_AMAX,
            BLOCK=GROUP,
        )  # fmt: skip
    return quantized.view(torch.float8_e4m3fn), scale


@triton.jit
def scaled_product_kernel(
    x,
    x_scale,
    weight,
    scale,
    out,
    num_tokens,
    num_rows,
    num_cols,
    x_stride,
    x_scale_stride,
    weight_stride,
    scale_stride,
    scale_step,
    out_stride,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_mask, row_mask = tokens < num_tokens, rows < num_rows
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, num_cols, BLOCK_K):
        cols = first + tl.arange(0, BLOCK_K)
        col_mask = (cols < num_cols)[None, :]
        a = tl.load(x + tokens[:, None] * x_stride + cols[None, :], mask=token_mask[:, None] & col_mask, other=0)
        at = weight + rows[:, None] * weight_stride + cols[None, :]
        b = tl.load(at, mask=row_mask[:, None] & col_mask, other=0)
        if NATIVE:
            part = tl.dot(a.to(tl.float8e4nv, bitcast=True), tl.trans(b.to(tl.float8e4nv, bitcast=True)))
        else:
            part = tl.dot(e4m3_to_float(a).to(tl.bfloat16), tl.trans(e4m3_to_float(b).to(tl.bfloat16)))
        group = first // 128
        of_tokens = tl.load(x_scale + tokens * x_scale_stride + group, mask=token_mask, other=0.0)
        of_rows = tl.load(scale + rows // 128 * scale_stride + group * scale_step, mask=row_mask, other=0.0)
        total += part * of_tokens[:, None] * of_rows[None, :]
    mask = token_mask[:, None] & row_mask[None, :]
    tl.store(out + tokens[:, None] * out_stride + rows[None, :], total.to(out.dtype.element_ty), mask=mask)


def scaled_product(
    x: Tensor, x_scale: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype, *, native: bool
) -> Tensor:
    """The product of quantized activations and weights of SCALED_LAYOUTS: dtype[num_tokens, num_rows].

    x: float8_e4m3fn[num_tokens, num_cols]; x_scale: float32[num_tokens, ceil(num_cols / 128)]. `native`: multiply
    e4m3 as it is, which takes compute capability 8.9; else in bfloat16, which holds it exactly.
    """
    num_tokens, num_cols = x.shape
    weight, scale = byte_view(parts["weight"]), parts["scale"]
    num_rows = weight.shape[0]
    out = torch.empty(num_tokens, num_rows, dtype=dtype, device=x.device)
    if not num_tokens:
        return out
    strides = (scale.stride(0), 1) if scale.dim() == 2 else (0, 0)
    tile = tile_for(num_tokens, torch.bfloat16)
    grid = (triton.cdiv(num_rows, tile.block_n), triton.cdiv(num_tokens, tile.block_m))
    scaled_product_kernel[grid](
        byte_view(x), x_scale, weight, scale, out, num_tokens, num_rows, num_cols, x.stride(0), x_scale.stride(0),
        weight.stride(0), *strides, out.stride(0), NATIVE=native,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
    )  # fmt: skip
    return out
