"""`ModelSpec`: the shape of a decoder, the same for every checkpoint format.

Families differ by their spec and by a weight-name map; the decoder itself is one definition. The spec is part
of a generation's identity: it travels in the manifest as canonical JSON, so an engine needs no checkpoint file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding. `scaling` is "none", "linear", "dynamic", "yarn" or "llama3"; its parameters keep the
    names of Hugging Face's `rope_scaling` (factor, low_freq_factor, original_max_position_embeddings, …)."""

    theta: float = 10000.0
    scaling: str = "none"
    parameters: dict[str, float | bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of one decoder-only transformer."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: RopeSpec = field(default_factory=RopeSpec)
    num_mtp_layers: int = 0
    """Multi-token-prediction heads behind the last layer: 0 or 1. See `MtpHead`."""

    num_experts: int = 0
    """Of each layer's mixture of experts, whose weights are normalized over the chosen ones. 0: one feed-forward."""
    num_experts_per_token: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Without heads or experts it is what it was before there were any, so that identities stay."""
        value = asdict(self)
        for name in ("num_mtp_layers", "num_experts", "num_experts_per_token"):
            if not value[name]:
                del value[name]
        return value

    @staticmethod
    def from_dict(value: dict[str, Any]) -> ModelSpec:
        return ModelSpec(**{**value, "rope": RopeSpec(**value["rope"])})
