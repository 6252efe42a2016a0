"""Activations, plain torch: the specification of any faster version."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, elementwise. gate, up: dtype[num_tokens, intermediate_size]. Source: arXiv 2002.05202."""
    return functional.silu(gate) * up
