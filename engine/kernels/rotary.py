"""Rotary embedding, plain torch: the specification of any faster version."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + head_dim/2]) of each head by the token's angles.

    x: dtype[num_tokens, num_heads, head_dim]; cos, sin: float32[num_tokens, head_dim/2]. Returns x's dtype.
    Source: arXiv 2104.09864, section 3.4.2, in the half-split order of Hugging Face checkpoints.
    """
    cos = cos.to(x.dtype).unsqueeze(1)
    sin = sin.to(x.dtype).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
