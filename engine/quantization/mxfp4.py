"""mxfp4: e2m1 weights with a power-of-two scale per group of 32 columns.

Resident parts of a weight [rows, cols], cols a multiple of 32:

    weight  uint8[rows, cols / 2]      e2m1 codes of w / scale; column 2j in the low nibble of byte j
    scale   uint8[rows, cols / 32]     e8m0: the smallest power of two ≥ max(amax of the group, 6·2⁻¹²⁶) / 6

    w = weight · 2^(scale − 127). 4.25 bits per weight. Source: OCP Microscaling Formats (MX) v1.0, with a scale
    rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .minifloat import (
    E2M1_MAX,
    ceil_e8m0,
    divided,
    from_e2m1_codes,
    from_e8m0,
    grouped,
    pack_nibbles,
    to_e2m1_codes,
    unpack_nibbles,
)

LAYOUT = "mxfp4"
GROUP_SIZE = 32
MIN_AMAX = 6 * 2.0**-126


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """`weight: float32[rows, cols]`, finite → parts, row by row. Raises ValueError if cols % 32 != 0."""
    groups = grouped(weight, GROUP_SIZE)
    scale = ceil_e8m0(divided(groups.abs().amax(dim=2).clamp(min=MIN_AMAX), E2M1_MAX))
    codes = to_e2m1_codes(groups / from_e8m0(scale).unsqueeze(2)).view(weight.shape)
    return {"weight": pack_nibbles(codes), "scale": scale}


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    """Parts of any rows → float32[rows, cols]."""
    groups = grouped(from_e2m1_codes(unpack_nibbles(parts["weight"])), GROUP_SIZE)
    return torch.mul(groups, from_e8m0(parts["scale"]).unsqueeze(2)).flatten(1)
