"""Mixture of experts, plain torch: the specification of any faster version.

Each token goes to the top_k experts that its router logits like most; their outputs are added with the softmax of all
logits as weights, which may be normalized over the chosen ones. Experts' weights lie one after the other in two
weights of ordinary layouts: rows e · 2·intermediate_size … of `gate_up` are expert e's gate and then its up
projection, rows e · hidden_size … of `down` its down projection. Source: arXiv 2401.04088, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from preload.engine.quantization import dequantize_rows

from .activation import swiglu

Parts = Mapping[str, Tensor]


def choose_experts(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights and experts of each token: float32[num_tokens, top_k], int64[num_tokens, top_k], largest first.

    router_logits: dtype[num_tokens, num_experts].
    """
    weights, experts = torch.softmax(router_logits.float(), dim=1).topk(top_k, dim=1)
    return weights / weights.sum(dim=1, keepdim=True) if renormalize else weights, experts


def mixture(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: tuple[str, Parts],
    down: tuple[str, Parts],
    num_experts: int,
) -> Tensor:
    """Σ over a token's experts of weight · down(silu(gate(x)) · up(x)): dtype[num_tokens, hidden_size].

    x: dtype[num_tokens, hidden_size]; weights, experts: of `choose_experts`; gate_up, down: layout and parts.
    Products are summed in float32; the gated activation is rounded to x's dtype, and so is the sum in the end.
    """
    inner = gate_up[1]["weight"].shape[0] // (2 * num_experts)
    hidden = x.shape[1]
    out = torch.zeros(x.shape[0], hidden, device=x.device)
    for e in range(num_experts):
        tokens, which = (experts == e).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        first = dequantize_rows(*gate_up, slice(e * 2 * inner, (e + 1) * 2 * inner))
        second = dequantize_rows(*down, slice(e * hidden, (e + 1) * hidden))
        gate, up = functional.linear(x[tokens].float(), first).chunk(2, dim=1)
        gated = swiglu(gate, up).to(x.dtype)
        out.index_add_(0, tokens, functional.linear(gated.float(), second) * weights[tokens, which, None])
    return out.to(x.dtype)
