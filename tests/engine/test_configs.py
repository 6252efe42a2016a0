"""From configuration to spec: Hugging Face's keys, old and new, and GGUF's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from preload.engine.errors import CheckpointError, RequestError
from preload.engine.models.configs import apply_overrides, spec_from_config
from preload.engine.models.gguf_config import config_from_gguf
from preload.engine.models.spec import ModelSpec, RopeSpec

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return spec_from_config({**config, **changes}, "/m/config.json")


def test_a_config_as_transformers_writes_it_becomes_a_spec() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        architectures=["LlamaForCausalLM"],
    ).to_dict()
    assert spec_from_config(config, "config.json") == ModelSpec(
        family="llama",
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        attention_bias=True,
        rope=RopeSpec(theta=5e5, scaling="llama3", parameters={k: float(v) for k, v in LLAMA3.items()}),
    )


def test_a_spec_survives_its_json_form(tiny_config: dict[str, Any]) -> None:
    original = spec(tiny_config, rope_scaling={"type": "linear", "factor": 2})
    assert ModelSpec.from_dict(original.to_dict()) == original


@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear", "factor": 4},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "truncate": False},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "default"},
    None,
])  # fmt: skip
def test_old_and_new_spelling_of_rope_are_one_spec(tiny_config: dict[str, Any], scaling: Any) -> None:
    old = spec(tiny_config, rope_theta=2e4, rope_scaling=scaling)
    del tiny_config["rope_theta"]
    new = spec(tiny_config, rope_parameters={"rope_theta": 2e4, **(scaling or {"rope_type": "default"})})
    assert old == new
    assert old.rope.theta == 2e4
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type", "default")
    assert old.rope.scaling == ("none" if kind == "default" else kind)


def test_whole_and_broken_numbers_are_one_recipe(tiny_config: dict[str, Any]) -> None:
    a = spec(tiny_config, rope_scaling={"rope_type": "linear", "factor": 2})
    b = spec(tiny_config, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert repr(a) == repr(b)


def test_yarn_knows_the_length_it_extends(tiny_config: dict[str, Any]) -> None:
    yarn = spec(tiny_config, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert yarn.rope.parameters["original_max_position_embeddings"] == 128.0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel, which is not supported"),
    ({"architectures": None, "model_type": "mamba"}, "architecture mamba"),
    ({"vocab_size": None}, "vocab_size=None must be a positive integer"),
    ({"hidden_size": "64"}, "hidden_size='64' must be a positive integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4 is not divisible by num_key_value_heads=3"),
    ({"hidden_size": 66}, "hidden_size=66 is not divisible by num_attention_heads=4"),
    ({"head_dim": 15}, "must be even"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ({"sliding_window": 4096}, "sliding_window=4096 is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope type 'longrope' is unknown"),
    ({"rope_scaling": {"factor": 2}}, "rope type None is unknown"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "needs low_freq_factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2, "warp": 1}}, "unknown parameter warp=1"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope factor 0.5 must be at least 1"),
    ({"rope_scaling": 3}, "rope_scaling=3 must be an object"),
    ({"rope_theta": "big"}, "rope_theta='big' must be a number"),
    ({"rope_theta": -1}, "rope_theta=-1.0 must be positive"),
    ({"rope_theta": math.nan}, "rope_theta=nan must be a finite number"),
    ({"rope_theta": 10**400}, "must be a finite number"),
    ({"rms_norm_eps": math.inf}, "rms_norm_eps=inf must be a positive number"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan must be a positive number"),
    ({"rms_norm_eps": 10**400}, "must be a positive number"),
    ({"num_attention_heads": 1 << 40, "num_key_value_heads": 1}, "num_attention_heads=1099511627776 is more than"),
    ({"max_position_embeddings": 10**400}, "is more than"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": math.inf}}, "factor=inf must be a finite number"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": True}}, "factor=True must be a number"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": 1}}, "truncate=1 must be true or false"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 0}}, "beta_fast=0 must be positive"),
    ({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_theta=1.0 must be above 1"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "must be above low_freq_factor"),
    ({"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "too small for dynamic"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_config_that_cannot_be_is_refused_by_key(
    tiny_config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec(tiny_config, **changes)
    assert "/m/config.json" in caught.value.message
    assert message in caught.value.message


def test_mistral_without_a_window_is_a_llama(tiny_config: dict[str, Any]) -> None:
    assert spec(tiny_config, architectures=["MistralForCausalLM"], sliding_window=None).family == "llama"


def test_overrides_replace_keys_in_either_spelling(tiny_config: dict[str, Any]) -> None:
    config = {**tiny_config, "rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}}
    theta = spec_from_config(apply_overrides(config, {"rope_theta": 5.0}), "c").rope
    assert (theta.theta, theta.scaling) == (5.0, "linear")
    scaling = spec_from_config(apply_overrides(config, {"rope_scaling": None}), "c").rope
    assert (scaling.theta, scaling.scaling) == (1e6, "none")
    both = spec_from_config(apply_overrides(config, {"rope_parameters": {"rope_type": "default"}}), "c").rope
    assert (both.theta, both.scaling) == (1e6, "none")
    assert spec_from_config(apply_overrides(config, {"max_position_embeddings": 7}), "c").max_position_embeddings == 7


def test_an_unknown_override_is_refused_by_name(tiny_config: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="unknown configuration override rope_tetha"):
        apply_overrides(tiny_config, {"rope_tetha": 1})


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
}
SHAPES = {"token_embd.weight": (100, 64), "output.weight": (100, 64)}


def gguf_spec(shapes: dict[str, tuple[int, ...]] | None = None, **metadata: Any) -> ModelSpec:
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    return spec_from_config(config_from_gguf({**METADATA, **keys}, shapes or SHAPES, "m.gguf"), "m.gguf")


def test_gguf_metadata_becomes_the_same_spec(tiny_config: dict[str, Any]) -> None:
    assert gguf_spec() == spec(tiny_config, rope_theta=5e5, max_position_embeddings=256)
    tied = gguf_spec({"token_embd.weight": (100, 64), "blk.0.attn_q.bias": (64,)})
    assert tied.tie_word_embeddings
    assert tied.attention_bias
    assert not tied.mlp_bias


def test_gguf_rope_scaling_becomes_hugging_faces() -> None:
    prefix = "llama__rope__scaling__"
    linear = gguf_spec(**{f"{prefix}type": "linear", f"{prefix}factor": 4.0}).rope
    assert (linear.scaling, linear.parameters) == ("linear", {"factor": 4.0})
    yarn = gguf_spec(**{f"{prefix}type": "yarn", f"{prefix}factor": 8.0, f"{prefix}original_context_length": 32,
                        f"{prefix}attn_factor": 0.5}).rope  # fmt: skip
    assert yarn.scaling == "yarn"
    assert yarn.parameters["original_max_position_embeddings"] == 32.0
    assert yarn.parameters["attention_factor"] == pytest.approx(0.5 * (0.1 * math.log(8.0) + 1))
    assert gguf_spec(**{f"{prefix}type": "none"}).rope.scaling == "none"
    assert gguf_spec(llama__rope__scale_linear=2.0).rope.scaling == "linear"


@pytest.mark.parametrize(("key", "value", "message"), [
    ("general__architecture", "gemma", "general.architecture 'gemma'"),
    ("llama__expert_count", 8, "llama.expert_count"),
    ("llama__rope__dimension_count", 8, "llama.rope.dimension_count=8"),
    ("llama__attention__value_length", 8, "llama.attention.value_length=8"),
    ("llama__attention__head_count_kv", [2, 4], "differs between layers"),
    ("llama__rope__scaling__type", "longrope", "llama.rope.scaling.type 'longrope'"),
])  # fmt: skip
def test_gguf_metadata_that_is_not_computed_is_refused_by_key(key: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        gguf_spec(**{key: value})
    assert message in caught.value.message
    assert "m.gguf" in caught.value.message


@pytest.mark.parametrize("changes", [
    {"attn_factor": 0.5},
    {"yarn_attn_factor": 0.5},
    {"attn_factor": "half", "factor": 2.0},
    {"attn_factor": math.nan, "factor": 2.0},
    {"attn_factor": 0.5, "factor": 0.0},
    {"attn_factor": 0.5, "factor": "two"},
])  # fmt: skip
def test_a_gguf_yarn_whose_factors_are_no_factors_is_refused(changes: dict[str, Any]) -> None:
    keys = {f"llama__rope__scaling__{key}": value for key, value in {"type": "yarn", **changes}.items()}
    with pytest.raises(CheckpointError, match=r"m\.gguf has llama\.rope\.scaling\.(yarn_attn_|attn_)?factor="):
        gguf_spec(**keys)


def test_a_size_per_layer_that_never_differs_is_one_size() -> None:
    assert gguf_spec(llama__attention__head_count_kv=[2, 2]).num_kv_heads == 2
