"""The weights of the Llama family: what a spec needs, and how GGUF calls it.

Canonical names are Hugging Face's. Owns the shapes a spec implies and, for messages, the configuration keys behind
each of them; owns the row order of GGUF's q and k projections. Mixtral's layers have a router and experts in place of
the feed-forward; the experts' weights, stored one by one, are resident as two (`stacked_experts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
ROPE_FREQS = "rope_freqs.weight"
ROUTER = "block_sparse_moe.gate"
EXPERTS = "block_sparse_moe.experts"


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that the model needs; `keys` are the configuration keys that its shape follows from."""

    shape: tuple[int, ...]
    keys: tuple[str, ...]


def expected_tensors(spec: ModelSpec) -> dict[str, ExpectedTensor]:
    """Every tensor of the model by canonical name; lm_head.weight only if it is not tied."""
    hidden = (spec.hidden_size,)
    embedding = ExpectedTensor((spec.vocab_size, spec.hidden_size), ("vocab_size", "hidden_size"))
    expected = {EMBEDDING: embedding, "model.norm.weight": ExpectedTensor(hidden, ("hidden_size",))}
    for layer in range(spec.num_layers):
        for name, tensor in _layer_tensors(spec):
            expected[f"model.layers.{layer}.{name}"] = tensor
    for layer in range(spec.num_layers, spec.num_layers + spec.num_mtp_layers):
        for name, tensor in (*_layer_tensors(spec), *_mtp_tensors(spec)):
            expected[f"model.layers.{layer}.{name}"] = tensor
    if not spec.tie_word_embeddings:
        expected[LM_HEAD] = embedding
    return expected


def _layer_tensors(spec: ModelSpec) -> Iterator[tuple[str, ExpectedTensor]]:
    """The tensors of one layer, without its prefix."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q_keys = ("num_attention_heads", "head_dim", "hidden_size")
    kv_keys = ("num_key_value_heads", "head_dim", "hidden_size")
    mlp_keys = ("intermediate_size", "hidden_size")
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", ExpectedTensor((hidden,), ("hidden_size",))
    feed_forward: tuple[tuple[str, int, int, tuple[str, ...], bool], ...] = (
        ("mlp.gate_proj", mlp, hidden, mlp_keys, spec.mlp_bias),
        ("mlp.up_proj", mlp, hidden, mlp_keys, spec.mlp_bias),
        ("mlp.down_proj", hidden, mlp, mlp_keys, spec.mlp_bias),
    )
    if spec.num_experts:
        feed_forward = (
            (ROUTER, spec.num_experts, hidden, ("num_local_experts", "hidden_size"), False),
            *(
                (f"{EXPERTS}.{expert}.{name}", rows, cols, mlp_keys, False)
                for expert in range(spec.num_experts)
                for name, rows, cols in (("w1", mlp, hidden), ("w2", hidden, mlp), ("w3", mlp, hidden))
            ),
        )
    for name, rows, cols, keys, bias in (
        ("self_attn.q_proj", q_size, hidden, q_keys, spec.attention_bias),
        ("self_attn.k_proj", kv_size, hidden, kv_keys, spec.attention_bias),
        ("self_attn.v_proj", kv_size, hidden, kv_keys, spec.attention_bias),
        ("self_attn.o_proj", hidden, q_size, q_keys, spec.attention_bias),
        *feed_forward,
    ):
        yield f"{name}.weight", ExpectedTensor((rows, cols), keys)
        if bias:
            yield f"{name}.bias", ExpectedTensor((rows,), keys)


def stacked_experts(spec: ModelSpec) -> dict[str, list[str]]:
    """Resident weights that hold all experts of a layer, each by its stored ones in the order of their rows: of
    every expert gate and up projection, and of every expert the down projection."""
    experts = range(spec.num_experts)
    stacks: dict[str, list[str]] = {}
    for layer in range(spec.num_layers if spec.num_experts else 0):
        prefix = f"model.layers.{layer}.{EXPERTS}"
        stacks[f"{prefix}.gate_up.weight"] = [f"{prefix}.{e}.{w}.weight" for e in experts for w in ("w1", "w3")]
        stacks[f"{prefix}.down.weight"] = [f"{prefix}.{e}.w2.weight" for e in experts]
    return stacks


def _mtp_tensors(spec: ModelSpec) -> Iterator[tuple[str, ExpectedTensor]]:
    """What a multi-token-prediction head has beside a layer. Embedding and output are the model's own."""
    keys = ("hidden_size", "num_nextn_predict_layers")
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{norm}.weight", ExpectedTensor((spec.hidden_size,), keys)
    yield "eh_proj.weight", ExpectedTensor((spec.hidden_size, 2 * spec.hidden_size), keys)


def is_ignorable(name: str) -> bool:
    """Buffers that old checkpoints store and that the model computes itself (canonical or GGUF name)."""
    return name.endswith((".rotary_emb.inv_freq", ".attn_rot_embd", ".attn_rot_embd.weight"))


_GGUF_TOP = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": LM_HEAD,
    "rope_freqs.weight": ROPE_FREQS,
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]*)\.([a-z_]+)\.(weight|bias)")


def canonical_name(gguf_name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name without one stays as it is (and is then unexpected)."""
    if gguf_name in _GGUF_TOP:
        return _GGUF_TOP[gguf_name]
    match = _GGUF_PATTERN.fullmatch(gguf_name)
    if match is None or match[2] not in _GGUF_LAYER:
        return gguf_name
    return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"


def permuted_head_dim(name: str, spec: ModelSpec) -> int:
    """Head size if GGUF stores this tensor's rows permuted (q and k, weight and bias), else 0."""
    return spec.head_dim if ".self_attn.q_proj." in name or ".self_attn.k_proj." in name else 0


def stored_row(row: int, head_dim: int) -> int:
    """Where GGUF keeps row `row` of q or k. Within a head, it interleaves the two halves that rotate together:
    half p, index i is stored at 2·i + p instead of p·head_dim/2 + i."""
    head, within = divmod(row, head_dim)
    half, index = divmod(within, head_dim // 2)
    return head * head_dim + 2 * index + half
