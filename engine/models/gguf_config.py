"""GGUF metadata of a Llama model, as a configuration with Hugging Face's keys.

Overrides and plausibility checks then are the same for both formats. Keys that describe something this engine
does not compute (experts, partial rotary, other key and value lengths) are refused here by their GGUF name.
Source: the GGUF specification; llama.cpp for the meaning of rope.scaling.attn_factor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from preload.engine.errors import CheckpointError

_PREFIX = "llama."
_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]], path: str
) -> dict[str, Any]:
    """The configuration. `tensor_shapes` (GGUF names) tells what metadata leaves open: biases, tying, vocabulary.

    Raises CheckpointError if the architecture is not "llama" or a key asks for what is not computed.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise _wrong(path, f"has general.architecture {architecture!r}, which is not supported; supported is llama")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    for gguf_key, key in _KEYS.items():
        if _PREFIX + gguf_key in metadata:
            config[key] = _uniform(metadata[_PREFIX + gguf_key], _PREFIX + gguf_key, path)
    embedding = tensor_shapes.get("token_embd.weight")
    if "vocab_size" not in config and embedding:
        config["vocab_size"] = embedding[0]
    config["tie_word_embeddings"] = "output.weight" not in tensor_shapes
    config["attention_bias"] = _has_suffix(tensor_shapes, (".attn_q.bias", ".attn_k.bias", ".attn_v.bias"))
    config["mlp_bias"] = _has_suffix(tensor_shapes, (".ffn_gate.bias", ".ffn_up.bias", ".ffn_down.bias"))
    _refuse_unsupported(metadata, config, path)
    scaling = _rope_scaling(metadata, path)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _uniform(value: Any, key: str, path: str) -> Any:
    """Some files give a size per layer; this decoder has one for all."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    items = set(value)
    if len(items) != 1:
        raise _wrong(path, f"has {key} that differs between layers, which is not supported")
    return items.pop()


def _has_suffix(names: Collection[str], suffixes: tuple[str, ...]) -> bool:
    return any(name.startswith("blk.") and name.endswith(suffixes) for name in names)


def _refuse_unsupported(metadata: Mapping[str, Any], config: Mapping[str, Any], path: str) -> None:
    if metadata.get(_PREFIX + "expert_count"):
        raise _wrong(path, "has llama.expert_count, a mixture of experts, which is not supported")
    if metadata.get(_PREFIX + "attention.sliding_window"):
        raise _wrong(path, "has llama.attention.sliding_window, which is not supported")
    hidden_size, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0:
        head_dim = hidden_size // num_heads
    for key in ("rope.dimension_count", "attention.value_length"):
        value = metadata.get(_PREFIX + key, head_dim)
        if value != head_dim:
            raise _wrong(path, f"has {_PREFIX + key}={value}, unlike its head size {head_dim}: not supported")


def _rope_scaling(metadata: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    prefix = _PREFIX + "rope.scaling."
    legacy = metadata.get(_PREFIX + "rope.scale_linear")
    kind = metadata.get(prefix + "type", "none" if legacy in (None, 1.0) else "linear")
    if kind == "none":
        return None
    factor = metadata.get(prefix + "factor", legacy)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise _wrong(path, f"has {prefix}type {kind!r}, which is not supported; known are none, linear, yarn")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for gguf_key, key in (
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if prefix + gguf_key in metadata:
            scaling[key] = metadata[prefix + gguf_key]
    for key in ("yarn_log_multiplier", "yarn_ext_factor"):
        if metadata.get(prefix + key, 1.0) != 1.0:
            raise _wrong(path, f"has {prefix}{key}, which is not supported")
    name = "attn_factor" if prefix + "attn_factor" in metadata else "yarn_attn_factor"
    attn_factor = _positive(metadata.get(prefix + name, 1.0), prefix + name, path)
    if attn_factor != 1.0:
        # llama.cpp multiplies its attn_factor onto YaRN's own; Hugging Face's attention_factor replaces it.
        own = 0.1 * math.log(_positive(factor, prefix + "factor", path)) + 1.0
        scaling["attention_factor"] = attn_factor * own
    return scaling


def _positive(value: Any, key: str, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise _wrong(path, f"has {key}={value!r}, which must be a positive number")
    return float(value)


def _wrong(path: str, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}; model 'raw' loads the weights as they are", {"file": path})
