"""Products of quantized activations and weights, plain torch: the specification of any faster version."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from preload.engine.quantization import dequantize
from preload.engine.quantization.fp8_per_block import dequantize_activations


def scaled_product(
    x: Tensor, x_scale: Tensor, layout: str, parts: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """x · weightᵀ, both of e4m3, scales applied: dtype[num_tokens, num_rows], rounded once from float32.

    x: float8_e4m3fn[num_tokens, num_cols]; x_scale: float32[num_tokens, ceil(num_cols / 128)], both of
    `quantize_activations`; layout: "fp8_per_tensor" or "fp8_per_block". Source: arXiv 2412.19437, section 3.3.2.
    """
    return functional.linear(dequantize_activations(x, x_scale), dequantize(layout, parts)).to(dtype)
