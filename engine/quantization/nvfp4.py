"""nvfp4: e2m1 weights with an e4m3 scale per group of 16 columns, and a float32 scale for all of them.

Resident parts of a weight [rows, cols], cols a multiple of 16:

    weight        uint8[rows, cols / 2]            e2m1 codes of w · global_scale / scale, low nibble first
    scale         float8_e4m3fn[rows, cols / 16]   amax of the group · global_scale / 6, within 2⁻⁹ … 448, rounded
    global_scale  float32[1]                       448 · 6 / amax of the weight, or 1

    w = weight · scale / global_scale. 4.5 bits per weight. The global scale brings the largest group's scale to
    e4m3's largest number; without one (1) the format takes numbers up to 448 · 6, which is what a KV cache uses. It
    needs the whole weight: who quantizes by pieces of rows finds the maximum first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .minifloat import (
    E2M1_MAX,
    E4M3_MAX,
    divided,
    from_e2m1_codes,
    grouped,
    pack_nibbles,
    to_e2m1_codes,
    to_e4m3,
    unpack_nibbles,
)

LAYOUT = "nvfp4"
GROUP_SIZE = 16
MIN_SCALE = 2.0**-9
MIN_AMAX = 2.0**-100
"""Weights smaller than this are taken for 0; their global scale would not be a finite float32."""


def global_scale_for(amax: Tensor) -> Tensor:
    """amax: float32[], the largest magnitude of a weight → float32[1]."""
    return (E4M3_MAX * E2M1_MAX / amax.clamp(min=MIN_AMAX)).reshape(1)


def quantize(weight: Tensor, global_scale: Tensor | None = None) -> dict[str, Tensor]:
    """`weight: float32[rows, cols]`, finite → parts, row by row. Raises ValueError if cols % 16 != 0.

    `global_scale: float32[1]`; by default the weight's own. A 1 makes the format without a global scale."""
    groups = grouped(weight, GROUP_SIZE)
    if global_scale is None:
        amax = weight.abs().amax() if weight.numel() else torch.zeros((), device=weight.device)
        global_scale = global_scale_for(amax)
    wanted = groups.abs().amax(dim=2) * divided(global_scale, E2M1_MAX)
    scale = to_e4m3(wanted.clamp(MIN_SCALE, E4M3_MAX))
    codes = to_e2m1_codes(groups * global_scale / scale.float().unsqueeze(2))  # in this order: a tie stays a tie
    return {"weight": pack_nibbles(codes.view(weight.shape)), "scale": scale, "global_scale": global_scale}


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    """Parts of any rows, with the one global scale → float32[rows, cols]."""
    groups = grouped(from_e2m1_codes(unpack_nibbles(parts["weight"])), GROUP_SIZE)
    return torch.mul(groups, parts["scale"].float().unsqueeze(2)).flatten(1) / parts["global_scale"]
