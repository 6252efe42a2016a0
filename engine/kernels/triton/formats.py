"""Weights of every layout as numbers, a tile at a time: the part of a product that knows the formats.

The specification is engine/quantization. Small floats are decoded by moving their bits into a float16 and multiplying
by a power of two, which is exact, subnormals included, and works on every target: not all have instructions for them.
NaN (0x7F of e4m3) would become 480; weights are finite.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_to_float(codes):
    """uint8[...] → float32[...]."""
    codes = codes.to(tl.uint16)
    bits = ((codes & 0x7F) << 7) | ((codes & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def float_to_e4m3(x):
    """float32[...], |x| ≤ 448 → uint8[...], to nearest, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)  # the exponent's bias is 127 there, 7 here
    # 2¹⁴ has a last place of 2⁻⁹, the step of e4m3's subnormals: the addition rounds.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.uint32, bitcast=True) & 0xFF
    return (tl.where(magnitude < 0x3C800000, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def e2m1_to_float(codes):
    """uint8[...] of codes 0 … 15 → float32[...]."""
    codes = codes.to(tl.uint16)
    bits = ((codes & 7) << 9) | ((codes & 8) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0_to_float(exponents):
    """uint8[...] → float32[...]; 0 gives 0 instead of the subnormal 2⁻¹²⁷, which no product would notice."""
    return (exponents.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half_at(address, mask):
    """The float16 in two bytes at an address that may be odd → float32."""
    low = tl.load(address, mask=mask, other=0).to(tl.uint16)
    high = tl.load(address + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _nibbles(weight, rows, row_mask, first_col, num_cols, row_stride, BLOCK_K: tl.constexpr):
    """Codes of columns first_col … first_col + BLOCK_K − 1, even ones in low nibbles: uint8[rows, BLOCK_K]."""
    at = first_col // 2 + tl.arange(0, BLOCK_K // 2)
    mask = row_mask[:, None] & (at < num_cols // 2)[None, :]
    packed = tl.load(weight + rows[:, None] * row_stride + at[None, :], mask=mask, other=0)
    pairs = tl.join(packed & 0xF, packed >> 4)
    return tl.reshape(pairs, (packed.shape[0], BLOCK_K))


@triton.jit
def _group_scales(scale, rows, mask, cols, row_stride, GROUP: tl.constexpr):
    """The entry of each weight's group, as stored: [rows, cols]."""
    return tl.load(scale + rows[:, None] * row_stride + (cols // GROUP)[None, :], mask=mask, other=0)


@triton.jit
def _gguf_tile(weight, rows, mask, cols, row_stride, LAYOUT: tl.constexpr):
    """Blocks of 32 columns with their scales among them: float32[rows, cols]. See quantization/gguf_blocks32.py."""
    if LAYOUT == "gguf.q8_0":
        at = weight + rows[:, None] * row_stride + (cols // 32 * 34)[None, :]
        quant = tl.load(at + 2 + (cols % 32)[None, :], mask=mask, other=0).to(tl.int8, bitcast=True)
        return quant.to(tl.float32) * _half_at(at, mask)
    HEAD: tl.constexpr = 4 if LAYOUT == "gguf.q4_1" else 2
    at = weight + rows[:, None] * row_stride + (cols // 32 * (HEAD + 16))[None, :]
    packed = tl.load(at + HEAD + (cols % 16)[None, :], mask=mask, other=0)
    quant = ((packed >> (cols % 32 // 16 * 4).to(tl.uint8)[None, :]) & 0xF).to(tl.float32)
    if LAYOUT == "gguf.q4_1":
        return quant * _half_at(at, mask) + _half_at(at + 2, mask)
    return (quant - 8.0) * _half_at(at, mask)


@triton.jit
def weight_tile(
    weight,
    scale,
    third,
    rows,
    row_mask,
    first_col,
    num_cols,
    weight_stride,
    scale_stride,
    LAYOUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_K columns of some rows: float32[rows, BLOCK_K], 0 where masked.

    rows: int64[n]. `third`: the minima of int4 groups. Scales that serve a whole row or more are not in the tile:
    `row_scales` has them; nor are those of fp8_per_block, which the product applies to sums.
    """
    cols = first_col + tl.arange(0, BLOCK_K)
    mask = row_mask[:, None] & (cols < num_cols)[None, :]
    if LAYOUT == "mxfp4":
        codes = _nibbles(weight, rows, row_mask, first_col, num_cols, weight_stride, BLOCK_K)
        return e2m1_to_float(codes) * e8m0_to_float(_group_scales(scale, rows, mask, cols, scale_stride, 32))
    if LAYOUT == "nvfp4":
        codes = _nibbles(weight, rows, row_mask, first_col, num_cols, weight_stride, BLOCK_K)
        return e2m1_to_float(codes) * e4m3_to_float(_group_scales(scale, rows, mask, cols, scale_stride, 16))
    if LAYOUT == "int4_group32" or LAYOUT == "int4_group64" or LAYOUT == "int4_group128":
        GROUP: tl.constexpr = 32 if LAYOUT == "int4_group32" else (64 if LAYOUT == "int4_group64" else 128)
        codes = _nibbles(weight, rows, row_mask, first_col, num_cols, weight_stride, BLOCK_K)
        minimum = _group_scales(third, rows, mask, cols, scale_stride, GROUP)
        return codes.to(tl.float32) * _group_scales(scale, rows, mask, cols, scale_stride, GROUP) + minimum
    if LAYOUT == "gguf.q8_0" or LAYOUT == "gguf.q4_0" or LAYOUT == "gguf.q4_1":
        return _gguf_tile(weight, rows, mask, cols, weight_stride, LAYOUT)
    stored = tl.load(weight + rows[:, None] * weight_stride + cols[None, :], mask=mask, other=0)
    if LAYOUT == "mxfp8":
        return e4m3_to_float(stored) * e8m0_to_float(_group_scales(scale, rows, mask, cols, scale_stride, 32))
    if LAYOUT == "fp8_per_tensor" or LAYOUT == "fp8_per_block":
        return e4m3_to_float(stored)
    return stored.to(tl.float32)


@triton.jit
def row_scales(scale, third, rows, row_mask, LAYOUT: tl.constexpr):
    """What a row's product is multiplied by in the end: float32[rows]."""
    if LAYOUT == "int8_per_channel":
        return tl.load(scale + rows, mask=row_mask, other=0.0)
    if LAYOUT == "fp8_per_tensor":
        return tl.load(scale + rows * 0, mask=row_mask, other=0.0)
    if LAYOUT == "nvfp4":
        return 1.0 / tl.load(third + rows * 0, mask=row_mask, other=1.0)
    return row_mask.to(tl.float32)
