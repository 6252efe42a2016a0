"""Checkpoints quantized by GPTQ and AWQ: resident weights mean the very numbers that are stored.

The reference takes words apart one number at a time, as the formats' documents tell it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preload.engine.errors import CheckpointError, RequestError
from preload.engine.loading.resolve import open_and_resolve
from preload.engine.models.decoder import Decoder
from preload.engine.models.spec import ModelSpec
from preload.engine.quantization import dequantize
from preload.engine.recipe import Recipe

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Array = np.ndarray[Any, Any]


def pack(codes: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """Eight numbers of the last axis to a word: number order[i] in nibble i."""
    rows, cols = codes.shape
    words = np.zeros((rows, cols // 8), np.uint32)
    for word in range(cols // 8):
        for i in range(8):
            words[:, word] |= codes[:, 8 * word + order[i]].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


class PackedWeight:
    """One weight [rows, cols] as GPTQ or AWQ stores it, and what it means."""

    def __init__(self, method: str, rows: int, cols: int, group_size: int, rng: Any) -> None:
        groups = cols // group_size
        codes = rng.integers(0, 16, (rows, cols))
        zeros = rng.integers(1, 16, (groups, rows))
        scales = (rng.random((groups, rows)) * 0.02 + 1e-3).astype(np.float16)
        self.meaning = np.zeros((rows, cols), np.float32)
        for col in range(cols):
            group = col // group_size
            difference = (codes[:, col] - zeros[group]).astype(np.float32)
            self.meaning[:, col] = difference * scales[group].astype(np.float32)
        stored_zeros = zeros - 1 if method == "gptq" else zeros
        if method == "awq":
            self.stored = {"qweight": pack(codes.T, AWQ_ORDER), "qzeros": pack(stored_zeros, AWQ_ORDER)}
        else:
            self.stored = {"qweight": pack(codes).T.copy(), "qzeros": pack(stored_zeros)}
            self.stored["g_idx"] = (np.arange(cols) // group_size).astype(np.int32)
        self.stored["scales"] = scales


SETTINGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
}
Packed = Callable[..., tuple[Path, dict[str, Array]]]


@pytest.fixture
def packed(tiny_config: dict[str, Any], tiny_weights: Any, write_llama: Any) -> Packed:
    """Writes a tiny model whose projections are packed; its folder, and every weight as float32.

    `change` spoils what is stored; `old_file` takes the settings out of config.json."""

    def write(
        method: str,
        group_size: int = 32,
        *,
        change: Callable[[dict[str, Array]], object] = lambda stored: None,
        old_file: str = "",
        **settings: Any,
    ) -> tuple[Path, dict[str, Array]]:
        config = {**tiny_config, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
        stored: dict[str, Array] = {}
        meaning: dict[str, Array] = {}
        rng = np.random.default_rng(5)
        for name, weight in tiny_weights(config).items():
            if not name.endswith("_proj.weight"):
                stored[name] = meaning[name] = weight
                continue
            size = weight.shape[1] if group_size == -1 else group_size
            made = PackedWeight(method, *weight.shape, size, rng)
            meaning[name] = made.meaning
            stored |= {f"{name.removesuffix('weight')}{suffix}": array for suffix, array in made.stored.items()}
        change(stored)
        told = {**SETTINGS[method], "group_size": group_size, **settings}
        folder = write_llama(config if old_file else {**config, "quantization_config": told}, stored)
        if old_file:
            told.pop("quant_method")
            (folder / old_file).write_text(json.dumps(told))
        return folder, meaning

    return write


def resident(outcome: Any, name: str) -> torch.Tensor:
    layout = outcome.entry(name).layout
    suffixes = {"weight": ""} if layout == "dense" else {"weight": "", "scale": "_scale", "min": "_min"}
    parts = {part: torch.from_numpy(outcome.array(name + suffix).copy()) for part, suffix in suffixes.items()}
    return dequantize(layout, parts)


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize(
    ("group_size", "layout"), [(32, "int4_group32"), (64, "int4_group64"), (-1, "int4_group128")]
)
def test_resident_weights_mean_what_is_stored(
    packed: Packed, loader: Any, method: str, group_size: int, layout: str
) -> None:
    folder, meaning = packed(method, group_size)
    outcome = loader.load(folder, Recipe())
    assert outcome.returncode == 0, (outcome.failed, outcome.stderr)
    assert outcome.entry("model.layers.0.mlp.down_proj.weight").layout == layout
    for name, expected in meaning.items():
        assert torch.equal(resident(outcome, name), torch.from_numpy(expected)), name
    assert list(loader.verify(outcome).verified.corrupted) == []
    told = json.loads(outcome.manifest.resolved_recipe)
    assert told["packing"] == {"method": method, "group_size": group_size}


def test_a_model_of_packed_weights_computes_as_one_of_the_numbers_they_mean(packed: Packed, loader: Any) -> None:
    folder, meaning = packed("gptq", 128)
    outcome = loader.load(folder, Recipe())
    spec = ModelSpec.from_dict(json.loads(outcome.manifest.resolved_recipe)["spec"])
    names = [tensor.name for tensor in outcome.manifest.tensors]
    tensors = {name: torch.from_numpy(outcome.array(name).copy()) for name in names}
    layouts = {tensor.name: tensor.layout for tensor in outcome.manifest.tensors}
    logits = []
    for weights, tags in (
        (tensors, layouts),
        ({name: torch.from_numpy(array) for name, array in meaning.items()}, dict.fromkeys(meaning, "dense")),
    ):
        decoder = Decoder(spec, weights, tags, torch.float32)
        logits.append(decoder.compute_logits(last_hidden(decoder)))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def last_hidden(decoder: Decoder) -> torch.Tensor:
    from preload.engine.core.kv_cache import KVCache
    from preload.engine.kernels.attention import AttentionBatch

    cache, positions = KVCache(decoder.spec, 3, 16, torch.float32), torch.arange(7)
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, 7], dtype=torch.int32),
        seq_lens=torch.tensor([7], dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=positions + 16,
        num_decodes=0,
    )
    return decoder.forward(positions * 5, positions, cache.layers, batch)


@pytest.mark.parametrize(("method", "file"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")])
def test_settings_of_older_tools_are_found_and_have_a_receipt(
    packed: Packed, loader: Any, method: str, file: str
) -> None:
    folder, meaning = packed(method, 32, old_file=file)
    outcome = loader.load(folder, Recipe())
    assert outcome.returncode == 0, (outcome.failed, outcome.stderr)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(resident(outcome, name), torch.from_numpy(meaning[name]))
    assert str(folder / file) in {receipt.path for receipt in outcome.receipts}


def test_what_zero_points_mean_is_part_of_the_identity(packed: Packed) -> None:
    folder, _ = packed("gptq")
    first = open_and_resolve(str(folder), Recipe())[1].to_json()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (folder / "config.json").write_text(json.dumps(config))
    assert open_and_resolve(str(folder), Recipe())[1].to_json() != first


def test_columns_out_of_order_are_refused_by_name(packed: Packed, loader: Any) -> None:
    name = "model.layers.0.mlp.up_proj.g_idx"
    folder, _ = packed("gptq", 32, change=lambda stored: stored[name].put(0, 3))
    outcome = loader.load(folder, Recipe())
    assert outcome.returncode == 1
    assert "act-order" in outcome.failed.message
    assert name in outcome.failed.message


def test_group_indices_may_be_missing(packed: Packed, loader: Any) -> None:
    def drop(stored: dict[str, Array]) -> None:
        for name in [name for name in stored if name.endswith("g_idx")]:
            del stored[name]

    assert loader.load(packed("gptq", change=drop)[0], Recipe()).returncode == 0


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("gptq", {"bits": 8}, "bits=8 of its quantization"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ("awq", {"version": "gemv"}, "version='gemv'"),
        ("gptq", {"quant_method": "aqlm"}, "quantization_config"),
    ],
)
def test_other_settings_are_refused_by_key(packed: Packed, method: str, settings: Any, words: str) -> None:
    folder, _ = packed(method, 32, **settings)
    with pytest.raises(CheckpointError, match=words):
        open_and_resolve(str(folder), Recipe())


def test_groups_that_no_layout_holds_are_refused(packed: Packed) -> None:
    with pytest.raises(CheckpointError, match="group_size=16 of its quantization"):
        open_and_resolve(str(packed("gptq", 16)[0]), Recipe())


def test_a_packed_checkpoint_is_not_quantized_again(packed: Packed) -> None:
    folder, _ = packed("gptq")
    with pytest.raises(RequestError, match="quantized by gptq already"):
        open_and_resolve(str(folder), Recipe(quantization="nvfp4"))


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
def test_a_part_that_is_missing_or_of_another_shape_is_named(packed: Packed, suffix: str) -> None:
    name = f"model.layers.1.self_attn.k_proj.{suffix}"
    with pytest.raises(CheckpointError, match=f"has no {suffix} beside it"):
        open_and_resolve(str(packed("gptq", change=lambda stored: stored.pop(name))[0]), Recipe())


def test_a_part_of_another_shape_is_named(packed: Packed) -> None:
    name = "model.layers.1.self_attn.k_proj.scales"

    def cut(stored: dict[str, Array]) -> None:
        stored[name] = stored[name][:2].copy()

    with pytest.raises(CheckpointError, match=r"k_proj\.scales' is float16 \[2, 32\]"):
        open_and_resolve(str(packed("gptq", change=cut)[0]), Recipe())


def test_packed_weights_without_settings_say_where_they_would_be(packed: Packed) -> None:
    folder, _ = packed("gptq", old_file="quantize_config.json")
    (folder / "quantize_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither quantize_config\.json nor quant_config\.json"):
        open_and_resolve(str(folder), Recipe())
