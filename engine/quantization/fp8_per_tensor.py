"""fp8_per_tensor: e4m3 weights with one scale for all of them.

Resident parts of a weight [rows, cols]:

    weight  float8_e4m3fn[rows, cols]     w / scale, rounded
    scale   float32[1]                    amax / 448 (1 for a weight of zeros)

    w = weight · scale. The scale needs the whole weight: who quantizes by pieces of rows finds the maximum first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .minifloat import E4M3_MAX, divided, to_e4m3

LAYOUT = "fp8_per_tensor"


def scale_for(amax: Tensor) -> Tensor:
    """amax: float32 of any shape, not negative → the scale of weights with that maximum."""
    return torch.where(amax > 0, divided(amax, E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny), 1.0)


def quantize(weight: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
    """`weight: float32[rows, cols]`, finite → parts. `scale: float32[1]` if these are some rows of a larger one."""
    if scale is None:
        amax = weight.abs().amax() if weight.numel() else torch.zeros((), device=weight.device)
        scale = scale_for(amax).reshape(1)
    return {"weight": to_e4m3(weight / scale), "scale": scale}


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    """Parts of any rows, with the one scale → float32[rows, cols]."""
    return parts["weight"].float() * parts["scale"]
