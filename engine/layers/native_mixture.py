"""A mixture of experts in native products: each expert that anybody has chosen multiplies its own tokens.

Owns the cut of the experts' weights, which lie one after the other, into an expert's. Choosing is torch's, among what
the router says, which is always multiplied exactly: its few weights decide too much. Where products are exact, a
token's bits do not depend on its neighbours: experts are added in their numbers' order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from preload.engine.kernels.moe import choose_experts
from preload.engine.kernels.norm import rms_norm

from .linear import Linear
from .ops import Experts, Norm, Projection
from .weights import Weight

MakeLinear = Callable[[Sequence[Linear], bool], Projection]
"""(linears of one input, whether they are a gate and its projection up) → x: float32[n, cols] → float32[n, rows]"""


def native_mixture(experts: Experts, router: Projection, norm: Norm, make: MakeLinear) -> Projection:
    """`Ops.mixture`, in float32. Every row of the weights' companions is one row of the weight's."""
    inner = experts.gate_up.num_rows // (2 * experts.count)
    hidden = experts.down.num_rows // experts.count
    gated, down = [], []
    for e in range(experts.count):
        first = 2 * e * inner
        halves = [_rows(experts.gate_up, at, inner) for at in (first, first + inner)]
        gated.append(make(halves, True))
        down.append(make([_rows(experts.down, e * hidden, hidden)], False))

    def project(x: Tensor) -> Tensor:
        normed = rms_norm(x, norm.weight, norm.eps)
        weights, chosen = choose_experts(router(normed), experts.per_token, renormalize=True)
        total = torch.zeros_like(x)
        for e in sorted(set(chosen.flatten().tolist())):
            tokens, place = (chosen == e).nonzero(as_tuple=True)
            total.index_add_(0, tokens, down[e](gated[e](normed[tokens])) * weights[tokens, place, None])
        return x + total

    return project


def _rows(weight: Weight, first: int, count: int) -> Linear:
    rows = slice(first, first + count)
    return Linear(Weight(weight.name, weight.layout, {name: part[rows] for name, part in weight.parts.items()}))
