"""The decoder: one definition for every family a `ModelSpec` describes.

Owns the order of the computation; layers own the weights' formats, kernels the arithmetic, and the caller the KV
cache. Weights are read-only views of mapped segments and are never copied. Canonical names are Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from preload.engine.kernels.activation import swiglu
from preload.engine.kernels.attention import AttentionBatch, paged_attention, write_kv
from preload.engine.kernels.norm import rms_norm
from preload.engine.kernels.rotary import apply_rotary
from preload.engine.layers.linear import Embedding, Linear, product
from preload.engine.layers.rope import RotaryEmbedding
from preload.engine.layers.weights import WeightTable

from .spec import ModelSpec

LayerCache = tuple[Tensor, Tensor]
"""One layer's key and value caches: dtype[num_blocks, block_size, num_kv_heads, head_dim] each."""


class Decoder:
    """A decoder-only transformer. Raises ManifestError if the tensors are not exactly what the spec needs."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        layouts: Mapping[str, str],
        compute_dtype: torch.dtype,
    ) -> None:
        table = WeightTable(tensors, layouts, compute_dtype)
        self.spec = spec
        self.dtype = compute_dtype
        embedding = table.take_weight("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.embed = Embedding(embedding, compute_dtype)
        self.layers = [DecoderLayer(spec, table, i) for i in range(spec.num_layers)]
        self.norm_weight = table.take_vector("model.norm.weight", spec.hidden_size)
        self.lm_head = embedding
        if table.has("lm_head.weight") or not spec.tie_word_embeddings:
            self.lm_head = table.take_weight("lm_head.weight", spec.vocab_size, spec.hidden_size)
        divisors = None
        if table.has("rope_freqs.weight"):
            divisors = table.take_vector("rope_freqs.weight", spec.head_dim // 2, torch.float32)
        self.rope = RotaryEmbedding(spec, divisors)
        table.finish()

    def forward(
        self, input_ids: Tensor, positions: Tensor, caches: Sequence[LayerCache], batch: AttentionBatch
    ) -> Tensor:
        """Hidden states after the final norm: dtype[num_tokens, hidden_size].

        input_ids, positions: int64[num_tokens]. Writes this step's keys and values into `caches` by
        `batch.slot_mapping`.
        """
        hidden = self.embed(input_ids)
        rotation = self.rope(positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, rotation, cache, batch)
        return rms_norm(hidden, self.norm_weight, self.spec.rms_norm_eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: dtype[num_rows, hidden_size] → float32[num_rows, vocab_size]."""
        return product(hidden, self.lm_head).float()


class DecoderLayer:
    """Attention and feed-forward, each behind its norm and around its residual."""

    def __init__(self, spec: ModelSpec, table: WeightTable, index: int) -> None:
        prefix = f"model.layers.{index}"
        self.eps = spec.rms_norm_eps
        self.attention_norm = table.take_vector(f"{prefix}.input_layernorm.weight", spec.hidden_size)
        self.attention = Attention(spec, table, f"{prefix}.self_attn")
        self.mlp_norm = table.take_vector(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size)
        self.mlp = FeedForward(spec, table, f"{prefix}.mlp")

    def __call__(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: LayerCache, batch: AttentionBatch
    ) -> Tensor:
        normed = rms_norm(hidden, self.attention_norm, self.eps)
        hidden = hidden + self.attention(normed, rotation, cache, batch)
        return hidden + self.mlp(rms_norm(hidden, self.mlp_norm, self.eps))


class Attention:
    """Grouped-query attention with rotary embedding over the paged cache."""

    def __init__(self, spec: ModelSpec, table: WeightTable, prefix: str) -> None:
        self.head_dim = spec.head_dim
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        bias = spec.attention_bias
        self.q = _linear(table, f"{prefix}.q_proj", query_size, spec.hidden_size, bias)
        self.k = _linear(table, f"{prefix}.k_proj", kv_size, spec.hidden_size, bias)
        self.v = _linear(table, f"{prefix}.v_proj", kv_size, spec.hidden_size, bias)
        self.o = _linear(table, f"{prefix}.o_proj", spec.hidden_size, query_size, bias)

    def __call__(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: LayerCache, batch: AttentionBatch
    ) -> Tensor:
        query = apply_rotary(self._heads(self.q(x)), *rotation)
        key = apply_rotary(self._heads(self.k(x)), *rotation)
        write_kv(*cache, key, self._heads(self.v(x)), batch.slot_mapping)
        return self.o(paged_attention(query, *cache, batch).flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)


class FeedForward:
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, spec: ModelSpec, table: WeightTable, prefix: str) -> None:
        inner, outer, bias = spec.intermediate_size, spec.hidden_size, spec.mlp_bias
        self.gate = _linear(table, f"{prefix}.gate_proj", inner, outer, bias)
        self.up = _linear(table, f"{prefix}.up_proj", inner, outer, bias)
        self.down = _linear(table, f"{prefix}.down_proj", outer, inner, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))


def _linear(table: WeightTable, name: str, num_rows: int, num_cols: int, bias: bool) -> Linear:
    weight = table.take_weight(f"{name}.weight", num_rows, num_cols)
    return Linear(weight, table.take_vector(f"{name}.bias", num_rows) if bias else None)
