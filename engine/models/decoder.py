"""The decoder: one definition for every family a `ModelSpec` describes.

Owns the order of the computation; layers own the weights' formats and the operations (`Ops`, by default plain
torch), kernels the arithmetic, and the caller the KV cache. Weights are read-only views of mapped segments and are
never copied. Canonical names are Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from preload.engine.kernels.attention import AttentionBatch
from preload.engine.kernels.norm import rms_norm
from preload.engine.layers.linear import Embedding, Linear
from preload.engine.layers.ops import Experts, Heads, LayerCache, Norm, Ops, Rotation, TorchOps
from preload.engine.layers.rope import RotaryEmbedding
from preload.engine.layers.weights import WeightTable

from .llama_names import EXPERTS, ROUTER
from .spec import ModelSpec


class Decoder:
    """A decoder-only transformer. Raises ManifestError if the tensors are not exactly what the spec needs."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        layouts: Mapping[str, str],
        compute_dtype: torch.dtype,
        ops: Ops | None = None,
    ) -> None:
        ops = ops or TorchOps()
        table = WeightTable(tensors, layouts, compute_dtype)
        self.spec = spec
        self.dtype = compute_dtype
        embedding = table.take_weight("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.embed = Embedding(embedding, compute_dtype)
        self.layers = [DecoderLayer(spec, table, i, ops) for i in range(spec.num_layers)]
        self._run_layers = ops.layers(self.layers)
        self.norm_weight = table.take_vector("model.norm.weight", spec.hidden_size)
        lm_head = embedding
        if table.has("lm_head.weight") or not spec.tie_word_embeddings:
            lm_head = table.take_weight("lm_head.weight", spec.vocab_size, spec.hidden_size)
        self.lm_head = ops.projection([Linear(lm_head)])
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.cache_dtype = ops.cache_dtype(heads) or compute_dtype
        self.kernels = f"{ops.describe()}; keys and values in {str(self.cache_dtype).removeprefix('torch.')}"
        self.choose, self.scatter = ops.choose, ops.scatter
        divisors = None
        if table.has("rope_freqs.weight"):
            divisors = table.take_vector("rope_freqs.weight", spec.head_dim // 2, torch.float32)
        self.rope = RotaryEmbedding(spec, divisors, embedding.parts["weight"].device)
        self.mtp = MtpHead(spec, table, self.embed, self.rope, ops) if spec.num_mtp_layers else None
        table.finish()

    def forward(
        self, input_ids: Tensor, positions: Tensor, caches: Sequence[LayerCache], batch: AttentionBatch
    ) -> Tensor:
        """Hidden states after the final norm: dtype[num_tokens, hidden_size].

        input_ids, positions: int64[num_tokens]. Writes this step's keys and values into `caches` by
        `batch.slot_mapping`.
        """
        hidden = self._run_layers(self.embed(input_ids), self.rope(positions), caches, batch)
        return rms_norm(hidden, self.norm_weight, self.spec.rms_norm_eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: dtype[num_rows, hidden_size] → float32[num_rows, vocab_size]."""
        return self.lm_head(hidden).float()


class MtpHead:
    """Multi-token prediction: from the model's state at position i and the token at i + 1 to a state from which
    `compute_logits` tells the token at i + 2. Source: arXiv 2412.19437, section 2.2; names are DeepSeek's."""

    def __init__(
        self, spec: ModelSpec, table: WeightTable, embed: Embedding, rope: RotaryEmbedding, ops: Ops
    ) -> None:
        prefix = f"model.layers.{spec.num_layers}"
        self._embed, self._rope, self._eps = embed, rope, spec.rms_norm_eps
        self._token_norm = table.take_vector(f"{prefix}.enorm.weight", spec.hidden_size)
        self._state_norm = table.take_vector(f"{prefix}.hnorm.weight", spec.hidden_size)
        projection = table.take_weight(f"{prefix}.eh_proj.weight", spec.hidden_size, 2 * spec.hidden_size)
        self._projection = ops.projection([Linear(projection)])
        self._layer = DecoderLayer(spec, table, spec.num_layers, ops)
        self._norm = table.take_vector(f"{prefix}.shared_head.norm.weight", spec.hidden_size)

    def __call__(
        self, token_ids: Tensor, states: Tensor, positions: Tensor, cache: LayerCache, batch: AttentionBatch
    ) -> Tensor:
        """States after the head's norm: dtype[num_tokens, hidden_size].

        token_ids, positions: int64[num_tokens], the tokens at positions + 1; states: dtype[num_tokens, hidden_size],
        the model's after its final norm, or the head's own. Writes keys and values into `cache`."""
        tokens = rms_norm(self._embed(token_ids), self._token_norm, self._eps)
        both = torch.cat((tokens, rms_norm(states, self._state_norm, self._eps)), dim=1)
        hidden = self._layer(self._projection(both), self._rope(positions), cache, batch)
        return rms_norm(hidden, self._norm, self._eps)


class DecoderLayer:
    """Attention and feed-forward, each behind its norm and around its residual."""

    def __init__(self, spec: ModelSpec, table: WeightTable, index: int, ops: Ops) -> None:
        prefix = f"model.layers.{index}"
        norm = Norm(table.take_vector(f"{prefix}.input_layernorm.weight", spec.hidden_size), spec.rms_norm_eps)
        self.attention = Attention(spec, table, f"{prefix}.self_attn", norm, ops)
        norm_weight = table.take_vector(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size)
        norm = Norm(norm_weight, spec.rms_norm_eps)
        kind = Mixture if spec.num_experts else FeedForward
        self.mlp = kind(spec, table, prefix, norm, ops)

    def operations(self) -> Sequence[object]:
        """What the layer computes with, in order."""
        return self.attention.qkv, self.attention.attend, self.attention.o, *self.mlp.operations()

    def __call__(self, hidden: Tensor, rotation: Rotation, cache: LayerCache, batch: AttentionBatch) -> Tensor:
        return self.mlp(self.attention(hidden, rotation, cache, batch))


class Attention:
    """residual + o(attention(q, k, v of norm(residual))): grouped-query, rotary, over the paged cache."""

    def __init__(self, spec: ModelSpec, table: WeightTable, prefix: str, norm: Norm, ops: Ops) -> None:
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        bias = spec.attention_bias
        sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        linears = [_linear(table, f"{prefix}.{n}", size, spec.hidden_size, bias) for n, size in sizes.items()]
        self.qkv = ops.projection(linears, norm)
        self.attend = ops.attention(Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim))
        self.o = ops.added_projection(_linear(table, f"{prefix}.o_proj", spec.hidden_size, query_size, bias))

    def __call__(self, hidden: Tensor, rotation: Rotation, cache: LayerCache, batch: AttentionBatch) -> Tensor:
        return self.o(self.attend(self.qkv(hidden), rotation, cache, batch), hidden)


class FeedForward:
    """residual + down(silu(gate(x)) · up(x)), x = norm(residual)."""

    def __init__(self, spec: ModelSpec, table: WeightTable, prefix: str, norm: Norm, ops: Ops) -> None:
        inner, outer, bias = spec.intermediate_size, spec.hidden_size, spec.mlp_bias
        gate = _linear(table, f"{prefix}.mlp.gate_proj", inner, outer, bias)
        up = _linear(table, f"{prefix}.mlp.up_proj", inner, outer, bias)
        self.gated = ops.gated_projection(gate, up, norm)
        self.down = ops.added_projection(_linear(table, f"{prefix}.mlp.down_proj", outer, inner, bias))

    def operations(self) -> Sequence[object]:
        return self.gated, self.down

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.gated(hidden), hidden)


class Mixture:
    """residual + the experts' answers to norm(residual), each weighted by how much its token likes it."""

    def __init__(self, spec: ModelSpec, table: WeightTable, prefix: str, norm: Norm, ops: Ops) -> None:
        count, inner, outer = spec.num_experts, spec.intermediate_size, spec.hidden_size
        experts = Experts(
            router=_linear(table, f"{prefix}.{ROUTER}", count, outer, bias=False),
            gate_up=table.take_weight(f"{prefix}.{EXPERTS}.gate_up.weight", count * 2 * inner, outer),
            down=table.take_weight(f"{prefix}.{EXPERTS}.down.weight", count * outer, inner),
            per_token=spec.num_experts_per_token,
        )
        self.mix = ops.mixture(experts, norm)

    def operations(self) -> Sequence[object]:
        return (self.mix,)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.mix(hidden)


def _linear(table: WeightTable, name: str, num_rows: int, num_cols: int, bias: bool) -> Linear:
    weight = table.take_weight(f"{name}.weight", num_rows, num_cols)
    return Linear(weight, table.take_vector(f"{name}.bias", num_rows) if bias else None)
