"""`ModelSpec` from a configuration: Hugging Face's config.json, or GGUF metadata turned into the same keys.

Owns the names of configuration keys, their defaults (those of Hugging Face's LlamaConfig) and their plausibility.
A setting that this engine would not honour is refused, never ignored: activations, sliding windows, partial
rotary, mixtures of experts in other families than Mixtral's. Rotary settings live in `rope_configs.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from preload.engine.errors import CheckpointError, RequestError

from .rope_configs import rope_from_config, with_canonical_rope
from .spec import ModelSpec

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "mixtral"}
MODEL_TYPES = {"llama": "llama", "mistral": "llama", "mixtral": "mixtral"}
OVERRIDABLE = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_nextn_predict_layers",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
)
"""Keys that a recipe may override."""

_UNSUPPORTED = "is not supported by this engine; load with model 'raw' to keep the weights"
_MAX_SIZE = (1 << 31) - 1

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "sliding_window": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}
"""Keys whose other values change the model in a way that this engine does not compute."""


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with keys replaced. Raises RequestError for a key that is not one."""
    unknown = sorted(set(overrides) - set(OVERRIDABLE))
    if unknown:
        raise RequestError(f"unknown configuration override {', '.join(unknown)}; known are {', '.join(OVERRIDABLE)}")
    return {**with_canonical_rope(config), **with_canonical_rope(overrides)}


def spec_from_config(config: Mapping[str, Any], path: str) -> ModelSpec:
    """The spec of a configuration with Hugging Face's keys; `path` names its file in messages.

    Raises CheckpointError for an unsupported architecture, a missing or impossible value.
    """
    config = with_canonical_rope(config)
    reader = _Reader(config, path)
    family = _family(config, path)
    reader.check_neutral()
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    num_kv_heads = reader.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.wrong("num_attention_heads", f"is not divisible by num_key_value_heads={num_kv_heads}")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise reader.wrong("hidden_size", f"is not divisible by num_attention_heads={num_heads}")
    head_dim = reader.size("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise reader.wrong("head_dim", f"({head_dim}) must be even for rotary embeddings")
    max_positions = reader.size("max_position_embeddings")
    rope = rope_from_config(config, max_positions, path)
    if rope.scaling == "dynamic" and head_dim == 2:
        raise reader.wrong("head_dim", "(2) is too small for dynamic rope scaling")
    return ModelSpec(
        family=family,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("intermediate_size"),
        num_layers=reader.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.positive("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        attention_bias=reader.flag("attention_bias"),
        mlp_bias=reader.flag("mlp_bias"),
        rope=rope,
        num_mtp_layers=reader.num_mtp_layers(),
        **reader.experts(family),
    )


def _family(config: Mapping[str, Any], path: str) -> str:
    architectures = config.get("architectures")
    if architectures:
        names = architectures if isinstance(architectures, list) else [architectures]
        found, known = [name for name in names if isinstance(name, str)], ARCHITECTURES
    else:
        found, known = [str(config.get("model_type"))], MODEL_TYPES
    for name in found:
        if name in known:
            return known[name]
    raise CheckpointError(
        f"{path} names the architecture {', '.join(found)}, which is not supported; supported are "
        f"{', '.join(known)}. Model 'raw' loads the weights as they are",
        {"file": path},
    )


class _Reader:
    """Typed look-ups whose errors name the file, the key and its value."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self._config = config
        self._path = path

    def wrong(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {key}={self._config.get(key)!r} {what}", {"file": self._path, "key": key}
        )

    def size(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None:
            value = default
        if type(value) is not int or value < 1:
            raise self.wrong(key, "must be a positive integer; correct the configuration")
        if value > _MAX_SIZE:
            raise self.wrong(key, f"is more than {_MAX_SIZE}, which no model has; correct the configuration")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self._config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.wrong(key, "must be a positive number; correct the configuration")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._config.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false; correct the configuration")
        return value

    def num_mtp_layers(self) -> int:
        value = self._config.get("num_nextn_predict_layers") or 0
        if type(value) is not int or not 0 <= value <= 1:
            raise self.wrong("num_nextn_predict_layers", "is not supported: a model has one such layer, or none")
        return value

    def experts(self, family: str) -> dict[str, int]:
        """The spec's fields; none for a family without a mixture of experts, which may not ask for one."""
        if family != "mixtral":
            if self._config.get("num_local_experts") not in (None, 0):
                raise self.wrong("num_local_experts", _UNSUPPORTED)
            return {}
        if self.num_mtp_layers():
            raise self.wrong("num_nextn_predict_layers", "is not supported beside a mixture of experts")
        if self.flag("mlp_bias"):
            raise self.wrong("mlp_bias", "is not supported beside a mixture of experts")
        num_experts, per_token = self.size("num_local_experts", 8), self.size("num_experts_per_tok", 2)
        if per_token > num_experts:
            raise self.wrong("num_experts_per_tok", f"is more than num_local_experts={num_experts}")
        return {"num_experts": num_experts, "num_experts_per_token": per_token}

    def check_neutral(self) -> None:
        for key, allowed in _NEUTRAL.items():
            if key in self._config and self._config[key] not in allowed:
                raise self.wrong(key, _UNSUPPORTED)
