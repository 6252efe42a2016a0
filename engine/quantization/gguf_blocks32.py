"""GGUF formats with blocks of 32 weights: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, dequantized in plain torch.

A row is a sequence of blocks; each block covers 32 consecutive columns. All numbers are little endian; `d`
(scale) and `m` (minimum) are float16. Bytes of one block, in order:

    Q4_0  18  d:2  qs:16                   w = d · (q − 8)     q in 0 … 15
    Q4_1  20  d:2  m:2   qs:16             w = d · q + m
    Q5_0  22  d:2  qh:4  qs:16             w = d · (q − 16)    q in 0 … 31
    Q5_1  24  d:2  m:2   qh:4  qs:16       w = d · q + m
    Q8_0  34  d:2  qs:32 (int8)            w = d · q           q in −128 … 127

`qs` of the 4- and 5-bit formats is not interleaved: byte j holds column j in its low nibble and column
j + 16 in its high nibble. `qh` is a 32-bit word whose bit j is the fifth bit of column j.

Functions take `blocks: uint8[..., num_blocks, block_bytes]` and return `float32[..., num_blocks, 32]`.
Source: the GGUF specification; checked against the `gguf` package. Quantizing to them is not offered.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_last(tensor: Tensor, *sizes: int) -> Tensor:
    """[..., n] → [..., *sizes], one of which may be −1."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)


def half_field(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as float32[..., num_blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(qs: Tensor) -> Tensor:
    """uint8[..., 16] → uint8[..., 32]: the low nibbles, then the high ones."""
    return torch.cat((qs & 0x0F, qs >> 4), dim=-1)


def _fifth_bits(qh: Tensor) -> Tensor:
    """uint8[..., 4] → uint8[..., 32]: bit j of the little-endian word, moved to bit 4 of a byte."""
    shifts = torch.arange(8, dtype=torch.uint8, device=qh.device)
    bits = (qh.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2) << 4


def dequantize_q4_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[..., 2:18]).to(torch.int8) - 8
    return half_field(blocks, 0) * q.float()


def dequantize_q4_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[..., 4:20])
    return half_field(blocks, 0) * q.float() + half_field(blocks, 2)


def dequantize_q5_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[..., 6:22]) | _fifth_bits(blocks[..., 2:6])
    return half_field(blocks, 0) * (q.to(torch.int8) - 16).float()


def dequantize_q5_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[..., 8:24]) | _fifth_bits(blocks[..., 4:8])
    return half_field(blocks, 0) * q.float() + half_field(blocks, 2)


def dequantize_q8_0(blocks: Tensor) -> Tensor:
    q = blocks[..., 2:34].view(torch.int8)
    return half_field(blocks, 0) * q.float()
