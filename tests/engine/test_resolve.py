"""Model and files must agree: what is missing, unexpected or of another shape, and what a recipe makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preload.engine.errors import CheckpointError, RequestError
from preload.engine.loading.resident_parts import GROUP_SIZES, resident_parts
from preload.engine.loading.resolve import open_and_resolve
from preload.engine.loading.steps import Resolved
from preload.engine.quantization import COMPANIONS
from preload.engine.recipe import Recipe, parse_overrides

Q = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def refusal(tiny_config: Any, tiny_weights: Any, write_llama: Any) -> Callable[..., str]:
    """The message upon loading tiny weights that `change` has spoilt."""

    def refuse(change: Callable[[dict[str, Any]], object], recipe: Recipe | None = None, **config: Any) -> str:
        weights = tiny_weights(tiny_config)
        change(weights)
        folder = write_llama({**tiny_config, **config}, weights)
        with pytest.raises(CheckpointError) as caught:
            open_and_resolve(str(folder), recipe or Recipe())
        assert str(folder) in caught.value.message
        return caught.value.message

    return refuse


def resolve(folder: Path, **recipe: Any) -> Resolved:
    return open_and_resolve(str(folder), Recipe(**recipe))[1]


def test_a_missing_tensor_is_named(refusal: Callable[..., str]) -> None:
    message = refusal(lambda weights: weights.pop(Q))
    assert f"tensor {Q!r} is missing" in message
    assert "num_hidden_layers=2" in message


def test_an_unexpected_tensor_is_named_with_its_file(refusal: Callable[..., str]) -> None:
    message = refusal(lambda weights: weights.update(extra=np.zeros(3, np.float32)))
    assert "model.safetensors: tensor 'extra' is unexpected" in message


def test_a_wrong_shape_is_named_with_the_keys_it_contradicts(refusal: Callable[..., str]) -> None:
    message = refusal(lambda weights: weights.update({Q: np.zeros((32, 64), np.float32)}))
    assert f"model.safetensors: tensor {Q!r} has shape [32, 64]" in message
    assert "config.json (num_attention_heads=4, head_dim=16, hidden_size=64) needs [64, 64]" in message


def test_a_config_that_contradicts_the_tensors_is_named(refusal: Callable[..., str]) -> None:
    message = refusal(lambda weights: None, vocab_size=128)
    assert "has shape [100, 64]" in message
    assert "config.json (vocab_size=128, hidden_size=64) needs [128, 64]" in message


def test_more_layers_than_the_config_says_are_unexpected(refusal: Callable[..., str]) -> None:
    assert "'model.layers.1." in (message := refusal(lambda weights: None, num_hidden_layers=1))
    assert "is unexpected" in message


def test_more_layers_than_there_are_tensors_are_refused_without_being_counted(refusal: Callable[..., str]) -> None:
    message = refusal(lambda weights: None, num_hidden_layers=10**9)
    assert "config.json: num_hidden_layers=1000000000, but" in message
    assert "holds only 21 tensors" in message


def test_weights_that_are_no_floats_are_refused(refusal: Callable[..., str]) -> None:
    assert f"{Q!r} is stored as int8" in refusal(lambda weights: weights.update({Q: np.zeros((64, 64), np.int8)}))


def test_a_vector_that_is_no_float_is_refused(refusal: Callable[..., str]) -> None:
    message = refusal(lambda weights: weights.update({"model.norm.weight": np.zeros(64, np.int32)}))
    assert "'model.norm.weight' is a vector stored as int32" in message


def test_an_output_that_is_neither_stored_nor_tied_is_named(refusal: Callable[..., str]) -> None:
    message = refusal(lambda weights: weights.pop("lm_head.weight"))
    assert "'lm_head.weight' is missing, though tie_word_embeddings is false" in message


def test_a_tied_output_of_another_shape_is_named(refusal: Callable[..., str]) -> None:
    message = refusal(
        lambda weights: weights.update({"lm_head.weight": np.zeros((7, 64), np.float32)}), tie_word_embeddings=True
    )
    assert "'lm_head.weight' differs from model.embed_tokens.weight" in message


def test_int4_refuses_a_weight_whose_columns_make_no_groups(
    tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    config = {**tiny_config, "intermediate_size": 80}
    folder = write_llama(config, tiny_weights(config))
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.weight' has 80 columns, not a multiple"):
        resolve(folder, quantization="int4_group32")


def test_buffers_of_old_checkpoints_are_read_but_not_kept(
    tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = write_llama(tiny_config, {**tiny_weights(tiny_config), name: np.zeros(8, np.float32)})
    step = next(step for step in resolve(folder).steps if step.source.name == name)
    assert step.targets == ()


@pytest.mark.parametrize(("quantization", "dtypes", "layout"), [
    ("keep", ["float32"], "dense"),
    ("f32", ["float32"], "dense"),
    ("bf16", ["bfloat16"], "dense"),
    ("int8_per_channel", ["int8", "float32"], "int8_per_channel"),
    ("int4_group32", ["uint8", "float32", "float32"], "int4_group32"),
    ("fp8_per_tensor", ["float8_e4m3fn", "float32"], "fp8_per_tensor"),
    ("fp8_per_block", ["float8_e4m3fn", "float32"], "fp8_per_block"),
    ("mxfp8", ["float8_e4m3fn", "uint8"], "mxfp8"),
    ("mxfp4", ["uint8", "uint8"], "mxfp4"),
    ("nvfp4", ["uint8", "float8_e4m3fn", "float32"], "nvfp4"),
])  # fmt: skip
def test_a_recipe_decides_layout_and_companions(
    quantization: str, dtypes: list[str], layout: str, tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    folder = write_llama(tiny_config, tiny_weights(tiny_config))
    steps = {step.source.name: step for step in resolve(folder, quantization=quantization).steps}
    assert [target.dtype for target in steps[Q].targets] == dtypes
    assert {target.layout for target in steps[Q].targets} == {layout}
    companions = [f"{Q}_{part}" for part in COMPANIONS.get(layout, ())]
    assert [target.name for target in steps[Q].targets] == [Q, *companions]
    norm = steps["model.norm.weight"].targets[0]
    assert (norm.dtype, norm.layout) == ("float32", "dense")


def test_compute_dtype_decides_the_vectors(tiny_config: Any, tiny_weights: Any, write_llama: Any) -> None:
    folder = write_llama(tiny_config, tiny_weights(tiny_config))
    steps = {step.source.name: step for step in resolve(folder, compute_dtype="bfloat16").steps}
    assert steps["model.norm.weight"].targets[0].dtype == "bfloat16"
    assert steps[Q].targets[0].dtype == "float32"
    assert not steps[Q].converts


def test_recipes_that_differ_have_resolved_forms_that_differ(
    tiny_config: Any, tiny_weights: Any, write_llama: Any
) -> None:
    folder = write_llama(tiny_config, tiny_weights(tiny_config))
    forms = [
        resolve(folder, **recipe).to_json()
        for recipe in (
            {},
            {"quantization": "bf16"},
            {"compute_dtype": "bfloat16"},
            {"config_overrides": {"rope_theta": 5.0}},
            {"config_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2}}},
            {"model": "raw"},
        )
    ]
    assert len(set(forms)) == len(forms)
    assert resolve(folder, model="llama").to_json() == forms[0]


@pytest.mark.parametrize(("recipe", "message"), [
    ({"model": "gpt2"}, "unknown model 'gpt2'"),
    ({"model": "raw", "quantization": "bf16"}, "no quantization 'bf16'"),
    ({"model": "raw", "config_overrides": {"rope_theta": 1}}, "no configuration overrides"),
])  # fmt: skip
def test_a_recipe_that_cannot_be_is_refused(recipe: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        resolve(tmp_path, **recipe)


def test_gguf_blocks_become_rows_of_bytes(demo_model: Path) -> None:
    resolved = resolve(demo_model)
    steps = {step.targets[0].name: step for step in resolved.steps}
    target = steps[Q].targets[0]
    assert (target.dtype, target.shape, target.layout) == ("uint8", (576, 576 // 32 * 20), "gguf.q4_1")
    assert steps[Q].permuted_head_dim == 64
    assert steps["model.layers.1.self_attn.v_proj.weight"].permuted_head_dim == 0
    assert [(target.name, owner) for target, owner in resolved.aliases] == [("lm_head.weight", EMBEDDING)]


@pytest.mark.parametrize("text", ["{", "[]", '{"a":' + "[" * 20_000])
def test_overrides_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="configuration overrides"):
        parse_overrides(text)


@pytest.mark.parametrize("layout", sorted(set(GROUP_SIZES) | {"int8_per_channel", "fp8_per_tensor", "fp8_per_block"}))
def test_parts_are_planned_as_their_formats_make_them(layout: str) -> None:
    """The loader plans without torch; what the formats then make must fit, ragged rows included."""
    import torch

    from preload.engine import quantization

    module = getattr(quantization, layout, None)
    if module is None:
        assert set(quantization.COMPANIONS[layout]) == {"scale", "min"}
        return
    made = module.quantize(torch.randn(200, 192))
    planned = resident_parts(layout, 200, 192)
    assert {part: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for part, t in made.items()} == planned
    assert list(made) == list(planned) == ["weight", *quantization.COMPANIONS[layout]]


def test_an_old_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(RequestError, match="'fp8' is no longer taken; its name is 'fp8_per_tensor'"):
        Recipe(quantization="fp8")
    with pytest.raises(RequestError, match="known are keep, bf16"):
        Recipe(quantization="int3")
