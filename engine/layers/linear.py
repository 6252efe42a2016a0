"""Linear layers and embeddings over resident weights, which are dequantized inside the product.

Owns the choice of how a product is computed: one table from (layout, device type) to a function. What is not
in the table is computed by `product_by_rows`, the specification: rows are dequantized in pieces, so the scratch
is bounded whatever the size of the weight, and a step leaves nothing behind. Dense weights in the compute
dtype go straight to torch's matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from preload.engine.kernels import block_products
from preload.engine.quantization.layouts import DENSE

from .weights import Weight

PIECE_ELEMENTS = 1 << 18
"""Elements dequantized at once: 1 MiB of float32, which stays in a core's cache."""

Product = Callable[[Tensor, Mapping[str, Tensor]], Tensor]

PRODUCTS: dict[tuple[str, str], Product] = {
    (layout, "cpu"): product for layout, product in block_products.PRODUCTS.items()
}
"""(layout, device type) → a function of x and the weight's parts that equals `product_by_rows`, but faster."""


def product_by_rows(x: Tensor, weight: Weight) -> Tensor:
    """x · weightᵀ in float32, a piece of the weight's rows at a time.

    x: dtype[num_tokens, num_cols]. Returns dtype[num_tokens, num_rows], rounded once from float32.
    """
    wide = x.float()
    out = torch.empty(x.shape[0], weight.num_rows, dtype=torch.float32, device=x.device)
    step = max(1, PIECE_ELEMENTS // weight.num_cols)
    for start in range(0, weight.num_rows, step):
        rows = slice(start, start + step)
        out[:, rows] = functional.linear(wide, weight.rows(rows))
    return out.to(x.dtype)


def product(x: Tensor, weight: Weight) -> Tensor:
    """x · weightᵀ: dtype[num_tokens, num_rows], by the fastest way there is for the weight's layout."""
    if weight.layout == DENSE and weight.parts["weight"].dtype == x.dtype:
        return functional.linear(x, weight.parts["weight"])
    fast = PRODUCTS.get((weight.layout, x.device.type))
    return product_by_rows(x, weight) if fast is None else fast(x, weight.parts)


class Linear:
    """x · weightᵀ + bias. bias: dtype[num_rows] or none."""

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out = product(x, self.weight)
        return out if self.bias is None else out + self.bias


class Embedding:
    """Rows of a weight by token id; only the rows asked for are dequantized."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self.weight = weight
        self.dtype = dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """ids: int64[num_tokens] → dtype[num_tokens, num_cols]."""
        return self.weight.rows(ids).to(self.dtype)
