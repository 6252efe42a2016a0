"""Root-mean-square normalization, plain torch: the specification of any faster version."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension.

    x: dtype[num_tokens, hidden_size]; weight: dtype[hidden_size]. The mean is taken in float32 and the product
    with `weight` in x's dtype, as Hugging Face's LlamaRMSNorm does. Source: arXiv 1910.07467, equation 4.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm of x + residual, and the sum itself: dtype[num_tokens, hidden_size] each. The sum is rounded first."""
    total = residual + x
    return rms_norm(total, weight, eps), total
