"""int8_per_channel: symmetric 8-bit weights with one scale per output channel.

Resident parts of a weight [rows, cols]:

    weight  int8[rows, cols]     q, in −127 … 127
    scale   float32[rows]        amax of the row / 127 (0 for a row of zeros)

    w = q · scale, so that |error| ≤ scale / 2 per weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .minifloat import divided

LAYOUT = "int8_per_channel"


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """`weight: float32[rows, cols]`, finite → parts. Any rows may be quantized alone."""
    scale = divided(weight.abs().amax(dim=1), 127.0)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
    q = torch.round(weight / divisor).clamp_(-127, 127).to(torch.int8)
    return {"weight": q, "scale": scale}


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    """Parts of any rows → float32[rows, cols]."""
    return parts["weight"].float() * parts["scale"].unsqueeze(1)
