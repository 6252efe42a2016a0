"""The decoder's operations on a GPU: Triton kernels behind the seam that ops.py describes.

Dense weights in the compute dtype go to torch's matmul; layouts that products.LAYOUTS names are dequantized in the
product; what is left (k-quants of GGUF, dense weights in another dtype) is computed by torch in float32, and
`describe` says so. Experts of a mixture are multiplied by the fused kernels or refused. Projections of one input
write side by side into one tensor, residuals and biases are added where the product is stored. Nothing synchronizes
with the host, so a step can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from preload.engine.core.sampler import truncate
from preload.engine.errors import ManifestError
from preload.engine.kernels.attention import AttentionBatch
from preload.engine.kernels.triton import moe, products
from preload.engine.kernels.triton.attention import paged_attention
from preload.engine.kernels.triton.elementwise import rms_norm, rotate, swiglu
from preload.engine.kernels.triton.sampling import gumbel_argmax
from preload.engine.kernels.triton.scatter import scatter_ranges, write_kv
from preload.engine.quantization.layouts import DENSE

from .linear import Linear, product_by_rows
from .ops import (
    AddedProjection,
    Attention,
    Choose,
    Experts,
    Heads,
    Layer,
    LayerCache,
    Layers,
    Norm,
    Projection,
    Rotation,
    Scatter,
    one_by_one,
)

EagerAttention = Callable[[Tensor, LayerCache, AttentionBatch], Tensor]
"""As paged_attention."""


class TritonOps:
    """All operations, for activations of one float dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._by_torch: set[str] = set()
        self.scatter: Scatter = scatter_ranges
        self.choose: Choose | None = partial(choose_tokens, device)

    def describe(self) -> str:
        note = f"; products of {', '.join(sorted(self._by_torch))} by torch" if self._by_torch else ""
        return f"Triton kernels{note}"

    def projection(self, linears: Sequence[Linear], norm: Norm | None = None) -> Projection:
        self._note(linears)
        sizes = [linear.weight.num_rows for linear in linears]

        def project(x: Tensor) -> Tensor:
            x = x if norm is None else rms_norm(x, norm.weight, norm.eps)
            out = torch.empty(x.shape[0], sum(sizes), dtype=x.dtype, device=x.device)
            parts: Sequence[Tensor] = torch.split(out, sizes, dim=1)
            for linear, part in zip(linears, parts, strict=True):
                multiply(x, linear, part)
            return out

        return project

    def added_projection(self, linear: Linear) -> AddedProjection:
        self._note([linear])

        def project(x: Tensor, residual: Tensor) -> Tensor:
            multiply(x, linear, residual, add=True)
            return residual

        return project

    def gated_projection(self, gate: Linear, up: Linear, norm: Norm) -> Projection:
        project_both = self.projection([gate, up], norm)

        def project(x: Tensor) -> Tensor:
            both = project_both(x)
            return swiglu(both[:, : gate.weight.num_rows], both[:, gate.weight.num_rows :])

        return project

    def mixture(self, experts: Experts, norm: Norm) -> Projection:
        """Raises ManifestError for experts that the kernels do not read."""
        self._note([experts.router])
        for weight in (experts.gate_up, experts.down):
            if weight.layout not in (DENSE, *products.LAYOUTS):
                raise ManifestError(
                    f"{weight.name} is resident as {weight.layout}, which no kernel of a GPU mixes experts of; load "
                    "with another quantization, or on the host",
                    {"tensor": weight.name},
                )
        gate_up, down = ((weight.layout, weight.parts) for weight in (experts.gate_up, experts.down))

        def project(x: Tensor) -> Tensor:
            normed = rms_norm(x, norm.weight, norm.eps)
            liked = torch.empty(x.shape[0], experts.count, dtype=x.dtype, device=x.device)
            multiply(normed, experts.router, liked)
            chosen = moe.choose_experts(liked, experts.per_token, renormalize=True)
            return x.add_(moe.mixture(normed, *chosen, gate_up, down, experts.count))

        return project

    def cache_dtype(self, heads: Heads) -> None:
        return None

    def layers(self, layers: Sequence[Layer]) -> Layers:
        return one_by_one(layers)

    def attention(self, heads: Heads) -> Attention:
        return self._attention(heads, None)

    def _attention(self, heads: Heads, eagerly: EagerAttention | None) -> Attention:
        """`eagerly`: what attends in steps that no graph replays."""
        sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]

        def attend(qkv: Tensor, rotation: Rotation, cache: LayerCache, batch: AttentionBatch) -> Tensor:
            by_head = qkv.view(qkv.shape[0], sum(sizes), heads.head_dim)
            rotate(by_head[:, : heads.num_heads + heads.num_kv_heads], *rotation)
            parts: Sequence[Tensor] = torch.split(by_head, sizes, dim=1)
            query, key, value = parts
            write_kv(*cache, key, value, batch.slot_mapping)
            if eagerly is not None and not batch.is_replayed:
                return eagerly(query, cache, batch).flatten(1)
            return paged_attention(query, *cache, batch).flatten(1)

        return attend

    def _note(self, linears: Sequence[Linear]) -> None:
        for weight in (linear.weight for linear in linears):
            stored = weight.parts["weight"].dtype
            if weight.layout == DENSE and stored != self._dtype:
                self._by_torch.add(f"{DENSE} {str(stored).removeprefix('torch.')}")
            elif weight.layout not in (DENSE, *products.LAYOUTS):
                self._by_torch.add(weight.layout)


def choose_tokens(
    device: torch.device, logits: Tensor, *, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor,
    seeds: Tensor, positions: Tensor, token_hashes: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`Choose` on a device: logits may be there already, or on the host, where all the rest is and results go."""
    logits = logits.to(device)
    largest = logits.amax(dim=1)
    x, drawn = logits, temperature > 0
    if bool(drawn.any()):
        # Rows that are not drawn keep their order: what is less than the largest stays less.
        x = (x - largest[:, None]) / torch.where(drawn, temperature, 1.0).to(device)[:, None]
        if bool(((min_p > 0) | (top_k > 0) | (top_p < 1)).any()):
            truncate(x, min_p.to(device), top_k.to(device), top_p.to(device))
    tokens = gumbel_argmax(x, drawn.to(device), seeds.to(device), positions.to(device))
    return largest.cpu(), tokens.cpu()


def multiply(x: Tensor, linear: Linear, out: Tensor, *, add: bool = False) -> None:
    """out = x · weightᵀ + bias, or out += that. x: dtype[num_tokens, num_cols]; out: dtype[num_tokens, num_rows]."""
    weight, bias = linear.weight, linear.bias
    if weight.layout in products.LAYOUTS:
        products.product(x, weight.layout, weight.parts, bias=bias, residual=out if add else None, out=out)
        return
    if weight.layout == DENSE and weight.parts["weight"].dtype == x.dtype:
        result = x @ weight.parts["weight"].T
    else:
        result = product_by_rows(x, weight)
    if bias is not None:
        result += bias
    if add:
        out += result
    else:
        out.copy_(result)
