"""GGUF formats with super-blocks of 256 weights: Q4_K, Q5_K, Q6_K, dequantized in plain torch.

A row is a sequence of super-blocks; each covers 256 consecutive columns. `d` and `dmin` are float16. Bytes of
one super-block, in order:

    Q4_K  144  d:2  dmin:2  scales:12  qs:128             8 groups of 32   w = (d·sc)·q − dmin·mn
    Q5_K  176  d:2  dmin:2  scales:12  qh:32  qs:128      8 groups of 32   w = (d·sc)·q − dmin·mn
    Q6_K  210  ql:128  qh:64  scales:16 (int8)  d:2      16 groups of 16   w = (d·sc)·(q − 32)

`scales` of Q4_K and Q5_K packs eight 6-bit scales sc and eight 6-bit minima mn into 12 bytes. For group
g < 4: sc = byte g, mn = byte g + 4, low 6 bits each. For g ≥ 4, byte g + 4 holds the low four bits (low
nibble: sc, high nibble: mn), and the top two bits of bytes g − 4 (sc) and g (mn) are their bits 4 and 5.

Quants: 32 bytes of `qs` serve two groups: group 2k in the low nibbles of bytes 32k … 32k + 31, group
2k + 1 in the high nibbles. Bit g of `qh[i]` is the fifth bit of weight i of group g (Q5_K). Q6_K works on
halves of 128 weights, with 64 bytes of `ql` and 32 bytes of `qh` each: weights 0…31 and 32…63 are the low
nibbles of `ql`, 64…95 and 96…127 the high ones; the two upper bits of weight 32k + i are bits 2k and
2k + 1 of `qh[i]`.

Functions take `blocks: uint8[..., num_blocks, block_bytes]` and return `float32[..., num_blocks, 256]`.
Source: the GGUF specification; checked against the `gguf` package. Quantizing to them is not offered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gguf_blocks32 import half_field, split_last


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8[..., 12] → 6-bit scales and minima, each float32[..., 8]."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 6) << 4)), dim=-1)
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return scales.float(), minima.float()


def _group_nibbles(qs: Tensor) -> Tensor:
    """uint8[..., 128] → uint8[..., 8, 32]: groups 2k and 2k + 1 from the nibbles of the k-th 32 bytes."""
    pairs = split_last(qs, 4, 1, 32)
    return torch.cat((pairs & 0x0F, pairs >> 4), dim=-2).flatten(-3, -2)


def _scale_groups(blocks: Tensor, q: Tensor) -> Tensor:
    """(d·sc)·q − dmin·mn for q: uint8[..., num_blocks, 8, 32]."""
    scales, minima = _scales_and_minima(blocks[..., 4:16])
    scale = (half_field(blocks, 0) * scales).unsqueeze(-1)
    minimum = (half_field(blocks, 2) * minima).unsqueeze(-1)
    return (scale * q.float() - minimum).flatten(-2)


def dequantize_q4_k(blocks: Tensor) -> Tensor:
    return _scale_groups(blocks, _group_nibbles(blocks[..., 16:144]))


def dequantize_q5_k(blocks: Tensor) -> Tensor:
    groups = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> groups) & 1
    return _scale_groups(blocks, _group_nibbles(blocks[..., 48:176]) | (fifth << 4))


def dequantize_q6_k(blocks: Tensor) -> Tensor:
    low = split_last(blocks[..., 0:128], 2, 1, 64)
    low = torch.cat((low & 0x0F, low >> 4), dim=-2).flatten(-2)  # [..., 2, 128], by halves
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    high = (split_last(blocks[..., 128:192], 2, 1, 32) >> shifts) & 0x03
    q = (low | (high.flatten(-2) << 4)).flatten(-2).to(torch.int8) - 32
    scales = blocks[..., 192:208].view(torch.int8).float()
    scale = (half_field(blocks, 208) * scales).unsqueeze(-1)
    return (scale * split_last(q, 16, 16).float()).flatten(-2)
