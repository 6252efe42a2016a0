"""What a decoder computes per layer, as operations that a device may do in one go; and their plain torch version.

`Ops` is the seam: the decoder asks for its operations once, when it is built, and calls them in every step. A version
for a device (engine/layers/native_ops.py for CPUs) fuses what is written here in small steps. `TorchOps` is the
specification, and what runs where nothing faster does. Operations keep no state of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from preload.engine.errors import RequestError
from preload.engine.kernels.activation import swiglu
from preload.engine.kernels.attention import AttentionBatch, paged_attention, write_kv
from preload.engine.kernels.moe import choose_experts, mixture
from preload.engine.kernels.norm import rms_norm
from preload.engine.kernels.rotary import apply_rotary
from preload.engine.kernels.staging import scatter_ranges

from .linear import Linear, product
from .weights import Weight

LayerCache = tuple[Tensor, Tensor]
"""One layer's key and value caches: dtype[num_blocks, block_size, num_kv_heads, head_dim] each."""

Rotation = tuple[Tensor, Tensor]
"""cos and sin of a step's positions: float32[num_tokens, head_dim/2] each."""


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm in front of a product. weight: dtype[num_cols]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Heads:
    """Shape of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `router` tells how much each expert is liked, `gate_up` and `down` hold all experts' rows
    as kernels/moe.py says, and a token goes to `per_token` of them, weighted by what is left of 1 among these."""

    router: Linear
    gate_up: Weight
    down: Weight
    per_token: int

    @property
    def count(self) -> int:
        return self.router.weight.num_rows


Projection = Callable[[Tensor], Tensor]
"""x: dtype[num_tokens, num_cols] → dtype[num_tokens, num_rows]"""

AddedProjection = Callable[[Tensor, Tensor], Tensor]
"""(x, residual: dtype[num_tokens, num_rows]) → residual + projection of x. The residual may be overwritten."""

Attention = Callable[[Tensor, Rotation, LayerCache, AttentionBatch], Tensor]
"""(queries, keys and values of each token side by side: dtype[num_tokens, (num_heads + 2·num_kv_heads)·head_dim],
rotation, cache, batch) → dtype[num_tokens, num_heads·head_dim]. Rotates queries and keys, writes keys and values to
the cache, attends. The first argument may be overwritten."""


class Layer(Protocol):
    """A decoder's layer, as the operations it was built from."""

    def operations(self) -> Sequence[object]:
        """In the order of their use."""

    def __call__(self, hidden: Tensor, rotation: Rotation, cache: LayerCache, batch: AttentionBatch) -> Tensor: ...


Layers = Callable[[Tensor, Rotation, Sequence[LayerCache], AttentionBatch], Tensor]
"""(hidden states: dtype[num_tokens, hidden_size], rotation, each layer's cache, batch) → hidden states after the last
layer. The first argument may be overwritten."""


class Choose(Protocol):
    """The token that a sampler chooses from each row of logits, without tensors of the vocabulary's size between."""

    def __call__(
        self, logits: Tensor, *, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor,
        positions: Tensor, token_hashes: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The largest logit of each row, NaN where one is: float32[num_rows]; and the tokens: int64[num_rows].

        logits: float32[num_rows, vocab_size]; temperature (0: greedy), min_p, top_p: float32[num_rows]; top_k, seeds,
        positions: int64[num_rows]; token_hashes: int32[vocab_size]. As engine/core/sampler.py and noise.py say."""


Scatter = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""staging.scatter_ranges, of writes whose rows are grouped."""


class Ops(Protocol):
    """Operations over resident weights. Each call returns the operation, ready to be called in every step."""

    scatter: Scatter
    """What a step has staged, into a table."""
    choose: Choose | None
    """None: the sampler's own, in torch."""

    def projection(self, linears: Sequence[Linear], norm: Norm | None = None) -> Projection:
        """Linear layers of one input, normed first if asked to, results side by side."""

    def added_projection(self, linear: Linear) -> AddedProjection:
        """A linear layer added to a residual."""

    def gated_projection(self, gate: Linear, up: Linear, norm: Norm) -> Projection:
        """silu(gate(norm(x))) · up(norm(x))."""

    def mixture(self, experts: Experts, norm: Norm) -> Projection:
        """x + what the experts make of norm(x), which may overwrite x: dtype[num_tokens, hidden_size]."""

    def attention(self, heads: Heads) -> Attention:
        """Rotary embedding, KV write and paged attention."""

    def cache_dtype(self, heads: Heads) -> torch.dtype | None:
        """Of their keys and values; None: the compute dtype."""

    def layers(self, layers: Sequence[Layer]) -> Layers:
        """One layer after the other."""

    def describe(self) -> str:
        """One line for the log: which versions these are."""


def check_cache_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> None:
    """For kernels that keep keys and values in the compute dtype. Raises RequestError if another one is asked for."""
    own = str(dtype).removeprefix("torch.")
    if kv_cache_dtype not in ("auto", own):
        raise RequestError(
            f"kv_cache_dtype is {kv_cache_dtype}, and kernels that compute in {own} here keep keys and values in that"
        )


def one_by_one(layers: Sequence[Layer]) -> Layers:
    """Layers that nothing computes together."""

    def run(hidden: Tensor, rotation: Rotation, caches: Sequence[LayerCache], batch: AttentionBatch) -> Tensor:
        for layer, cache in zip(layers, caches, strict=True):
            hidden = layer(hidden, rotation, cache, batch)
        return hidden

    return run


class TorchOps:
    """The specification. `product` may be a faster product of the same results, `note` says what is in use."""

    choose: Choose | None = None

    def __init__(self, product: Callable[[Tensor, Weight], Tensor] = product, note: str = "torch") -> None:
        self._product = product
        self._note = note
        self.scatter: Scatter = scatter_ranges

    def describe(self) -> str:
        return self._note

    def projection(self, linears: Sequence[Linear], norm: Norm | None = None) -> Projection:
        def project(x: Tensor) -> Tensor:
            x = x if norm is None else rms_norm(x, norm.weight, norm.eps)
            results = [self._linear(x, linear) for linear in linears]
            return results[0] if len(results) == 1 else torch.cat(results, dim=1)

        return project

    def added_projection(self, linear: Linear) -> AddedProjection:
        return lambda x, residual: residual + self._linear(x, linear)

    def gated_projection(self, gate: Linear, up: Linear, norm: Norm) -> Projection:
        def project(x: Tensor) -> Tensor:
            normed = rms_norm(x, norm.weight, norm.eps)
            return swiglu(self._linear(normed, gate), self._linear(normed, up))

        return project

    def mixture(self, experts: Experts, norm: Norm) -> Projection:
        gate_up, down = ((weight.layout, weight.parts) for weight in (experts.gate_up, experts.down))

        def project(x: Tensor) -> Tensor:
            normed = rms_norm(x, norm.weight, norm.eps)
            chosen = choose_experts(self._linear(normed, experts.router), experts.per_token, renormalize=True)
            return x + mixture(normed, *chosen, gate_up, down, experts.count)

        return project

    def attention(self, heads: Heads) -> Attention:
        kv_size = heads.num_kv_heads * heads.head_dim
        sizes = [heads.num_heads * heads.head_dim, kv_size, kv_size]

        def attend(qkv: Tensor, rotation: Rotation, cache: LayerCache, batch: AttentionBatch) -> Tensor:
            parts: Sequence[Tensor] = torch.split(qkv, sizes, dim=1)
            query, key, value = (part.reshape(len(part), -1, heads.head_dim) for part in parts)
            write_kv(*cache, apply_rotary(key, *rotation), value, batch.slot_mapping)
            return paged_attention(apply_rotary(query, *rotation), *cache, batch).flatten(1)

        return attend

    def cache_dtype(self, heads: Heads) -> None:
        return None

    def layers(self, layers: Sequence[Layer]) -> Layers:
        return one_by_one(layers)

    def _linear(self, x: Tensor, linear: Linear) -> Tensor:
        out = self._product(x, linear.weight)
        return out if linear.bias is None else out + linear.bias
