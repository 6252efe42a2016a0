"""int4_group32: 4-bit weights with a scale and a minimum per group of 32 columns.

Resident parts of a weight [rows, cols], cols a multiple of 32:

    weight  uint8[rows, cols / 2]        byte j: column 2j in the low nibble, column 2j + 1 in the high one
    scale   float32[rows, cols / 32]     (max − min of the group) / 15 (0 for a constant group)
    min     float32[rows, cols / 32]     min of the group

    w = q · scale + min, q in 0 … 15, so that |error| ≤ scale / 2 per weight. 6 bits per weight in all.

int4_group64 and int4_group128 are the same with larger groups. They hold what was quantized elsewhere (GPTQ, AWQ):
(q − zero) · s with a float16 s is q · s + (−zero · s), and both products and their sum are exact in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .minifloat import divided

LAYOUT = "int4_group32"
GROUP_SIZE = 32
WIDER_LAYOUTS = {"int4_group64": 64, "int4_group128": 128}


def quantize(weight: Tensor, group_size: int = GROUP_SIZE) -> dict[str, Tensor]:
    """`weight: float32[rows, cols]`, finite → parts, row by row. Raises ValueError if groups do not divide cols."""
    if weight.shape[1] % group_size:
        raise ValueError(f"{weight.shape[1]} columns are not a multiple of {group_size}")
    groups = weight.reshape(weight.shape[0], weight.shape[1] // group_size, group_size)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    # Not (high − low) / 15: the difference of two finite numbers may overflow.
    scale = divided(high, 15.0) - divided(low, 15.0)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(2)
    q = torch.round((groups - low.unsqueeze(2)) / divisor).clamp_(0, 15).to(torch.uint8).flatten(1)
    return {"weight": q[:, 0::2] | (q[:, 1::2] << 4), "scale": scale, "min": low}


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    """Parts of any rows, of groups of any even size → float32[rows, cols]."""
    packed, (rows, groups) = parts["weight"], parts["scale"].shape
    group_size = 2 * packed.shape[1] // groups if groups else GROUP_SIZE
    q = torch.stack((packed & 0x0F, packed >> 4), dim=2).reshape(rows, groups, group_size)
    return (q.float() * parts["scale"].unsqueeze(2) + parts["min"].unsqueeze(2)).flatten(1)
