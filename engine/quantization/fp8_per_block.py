"""fp8_per_block: e4m3 weights with a scale per block of 128×128, activations with one per token and 128 columns.

Resident parts of a weight [rows, cols]; blocks at the lower and right edge may be cut off:

    weight  float8_e4m3fn[rows, cols]                            w / its block's scale, rounded
    scale   float32[ceil(rows / 128), ceil(cols / 128)]          amax of the block / 448 (1 for a block of zeros)

    w[i, j] = weight[i, j] · scale[i // 128, j // 128]

A product may quantize its activations too (`quantize_activations`), multiply e4m3 by e4m3, and scale each 128
columns' sum by both scales. Source: arXiv 2412.19437, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from .fp8_per_tensor import scale_for
from .minifloat import to_e4m3

LAYOUT = "fp8_per_block"
BLOCK = 128

MIN_ACTIVATION_AMAX = 1e-4
"""Activations smaller than this get the scale of this maximum, so that a token of zeros has a scale too."""


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """`weight: float32[rows, cols]`, finite → parts. Rows may be quantized alone by whole blocks of 128."""
    rows, cols = weight.shape
    padded = functional.pad(weight.abs(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = scale_for(blocks.amax(dim=(1, 3)))
    return {"weight": to_e4m3(weight / _spread(scale, rows, cols)), "scale": scale}


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    """Parts of a weight, or of whole blocks of its rows → float32[rows, cols]."""
    weight = parts["weight"]
    return weight.float() * _spread(parts["scale"], *weight.shape)


def dequantize_rows(parts: Mapping[str, Tensor], index: slice | Tensor) -> Tensor:
    """Some rows of a weight: float32[n, cols]. index: a slice, or int64[n]."""
    weight = parts["weight"][index]
    numbers = torch.arange(parts["weight"].shape[0], device=weight.device)[index]
    scale = parts["scale"][numbers // BLOCK]
    return weight.float() * scale.repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]]


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """dtype[num_tokens, cols] → float8_e4m3fn[num_tokens, cols], float32[num_tokens, ceil(cols / 128)]."""
    num_tokens, cols = x.shape
    padded = functional.pad(x.float(), (0, -cols % BLOCK)).view(num_tokens, -(-cols // BLOCK), BLOCK)
    scale = scale_for(padded.abs().amax(dim=2).clamp(min=MIN_ACTIVATION_AMAX))
    quantized = to_e4m3(padded / scale.unsqueeze(2))
    return quantized.flatten(1)[:, :cols], scale


def dequantize_activations(quantized: Tensor, scale: Tensor) -> Tensor:
    """What `quantize_activations` gave → float32[num_tokens, cols]."""
    return quantized.float() * scale.repeat_interleave(BLOCK, dim=1)[:, : quantized.shape[1]]


def _spread(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Each block's scale for each of its weights: float32[rows, cols]."""
    return scale.repeat_interleave(BLOCK, dim=0)[:rows].repeat_interleave(BLOCK, dim=1)[:, :cols]
