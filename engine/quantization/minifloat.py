"""Numbers of 8 and 4 bits that several formats are made of: e4m3, e2m1 and the power-of-two scales of e8m0.

    e4m3   1 sign, 4 exponent (bias 7), 3 mantissa; no infinity; largest 448, smallest 2⁻⁹   torch.float8_e4m3fn
    e2m1   1 sign, 2 exponent (bias 1), 1 mantissa: ±{0, .5, 1, 1.5, 2, 3, 4, 6}             two to a byte
    e8m0   8 exponent (bias 127): 2^(b − 127)                                                uint8

Rounding is to nearest, ties to even. A packed byte holds the even column in its low nibble. Functions work on any
device. Source: OCP Microscaling Formats (MX) v1.0, section 5.3; OCP 8-bit Floating Point v1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def divided(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once on every device. On a GPU, torch multiplies by the reciprocal of a Python number, and
    weights that are converted there would not be those that a CPU makes."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def to_e4m3(x: Tensor) -> Tensor:
    """float32[...] → float8_e4m3fn[...], saturating: torch alone would make a NaN of what is too large."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_e2m1_codes(x: Tensor) -> Tensor:
    """float32[...] → uint8[...] of codes 0 … 15, saturating.

    Boundary i lies between codes i and i + 1; a tie goes to the even one of them.
    """
    magnitude = x.abs()
    codes = torch.signbit(x).to(torch.uint8) << 3
    for i, boundary in enumerate(_E2M1_BOUNDARIES):
        codes += magnitude >= boundary if i % 2 else magnitude > boundary
    return codes


def from_e2m1_codes(codes: Tensor) -> Tensor:
    """uint8[...] of codes 0 … 15 → float32[...].

    The bits are put into a float16's, whose bias is 14 more. Without a table, a graph of it can be captured."""
    wide = codes.to(torch.int16)
    bits = ((wide & 7) << 9) | ((wide & 8) << 12)
    return bits.view(torch.float16).float() * 16384.0


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8[rows, cols] of codes 0 … 15 → uint8[rows, cols / 2]."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8[rows, cols / 2] → uint8[rows, cols]."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=2).flatten(1)


def ceil_e8m0(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x: float32[...], positive and normal → uint8[...] of exponents."""
    return ((x.view(torch.int32) + 0x7FFFFF) >> 23).to(torch.uint8)


def from_e8m0(exponents: Tensor) -> Tensor:
    """uint8[...] → float32[...]. 0 is 2⁻¹²⁷, which is subnormal; 255 is NaN."""
    bits = exponents.int() << 23
    bits = torch.where(exponents == 0, 0x00400000, bits)
    return torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """float32[rows, cols] → [rows, cols / group_size, group_size]. Raises ValueError if the columns do not divide."""
    rows, cols = weight.shape
    if cols % group_size:
        raise ValueError(f"{cols} columns are not a multiple of {group_size}")
    return weight.reshape(rows, cols // group_size, group_size)
