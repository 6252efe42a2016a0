"""mxfp8: e4m3 weights with a power-of-two scale per group of 32 columns.

Resident parts of a weight [rows, cols], cols a multiple of 32:

    weight  float8_e4m3fn[rows, cols]     w / scale, rounded
    scale   uint8[rows, cols / 32]        e8m0: the smallest power of two ≥ max(amax of the group, 1e-4) / 448

    w = weight · 2^(scale − 127). Source: OCP Microscaling Formats (MX) v1.0, with a scale rounded up, so that the
    largest weight of a group never saturates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .minifloat import E4M3_MAX, ceil_e8m0, divided, from_e8m0, grouped, to_e4m3

LAYOUT = "mxfp8"
GROUP_SIZE = 32
MIN_AMAX = 1e-4


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """`weight: float32[rows, cols]`, finite → parts, row by row. Raises ValueError if cols % 32 != 0."""
    groups = grouped(weight, GROUP_SIZE)
    scale = ceil_e8m0(divided(groups.abs().amax(dim=2).clamp(min=MIN_AMAX), E4M3_MAX))
    quantized = to_e4m3(groups / from_e8m0(scale).unsqueeze(2))
    return {"weight": quantized.view(weight.shape), "scale": scale}


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    """Parts of any rows → float32[rows, cols]."""
    groups = grouped(parts["weight"].float(), GROUP_SIZE)
    return torch.mul(groups, from_e8m0(parts["scale"]).unsqueeze(2)).flatten(1)
