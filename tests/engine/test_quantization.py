"""The formats of resident weights, against the `gguf` package and against their own error bounds."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preload.engine.errors import ManifestError
from preload.engine.loading.gguf_types import BLOCK_TYPES, GGUF_TYPES
from preload.engine.quantization import LAYOUTS, dequantize, int4_group32, int8_per_channel, num_cols

GGUF_IDS = {t.name: number for number, t in GGUF_TYPES.items()}
HALF_FIELDS = {"q4_1": [0, 2], "q5_1": [0, 2], "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208]}


def random_blocks(name: str, rows: int, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Any bytes are a block; only its float16 fields must be finite for a comparison to mean something."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, num_blocks, BLOCK_TYPES[name].block_bytes), dtype=np.uint8)
    for start in HALF_FIELDS.get(name, [0]):
        values = rng.normal(0, 0.05, (rows, num_blocks, 1)).astype(np.float16)
        blocks[..., start : start + 2] = values.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES))
@pytest.mark.parametrize(("rows", "num_blocks"), [(1, 1), (3, 2), (5, 7)])
def test_gguf_blocks_dequantize_as_the_gguf_package_does(name: str, rows: int, num_blocks: int) -> None:
    raw = random_blocks(name, rows, num_blocks, seed=rows)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(GGUF_IDS[name]))
    parts = {"weight": torch.from_numpy(raw)}
    got = dequantize(f"gguf.{name}", parts)
    assert got.dtype == torch.float32
    assert got.shape == (rows, num_cols(f"gguf.{name}", parts))
    np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES))
def test_block_geometry_is_that_of_the_gguf_package(name: str) -> None:
    expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(GGUF_IDS[name])]
    assert expected == (BLOCK_TYPES[name].block_size, BLOCK_TYPES[name].block_bytes)
    assert gguf.GGMLQuantizationType(GGUF_IDS[name]).name.lower() == name


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES))
def test_any_rows_of_a_weight_dequantize_alone(name: str) -> None:
    weight = torch.from_numpy(random_blocks(name, 6, 3))
    whole = dequantize(f"gguf.{name}", {"weight": weight})
    rows = torch.tensor([5, 0, 2])
    assert torch.equal(dequantize(f"gguf.{name}", {"weight": weight[rows]}), whole[rows])
    assert torch.equal(dequantize(f"gguf.{name}", {"weight": weight[2:3]}), whole[2:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_dense_weight_becomes_float32(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 5).to(dtype)
    assert torch.equal(dequantize("dense", {"weight": weight}), weight.float())
    assert num_cols("dense", {"weight": weight}) == 5


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 80), st.floats(1e-6, 1e4), st.integers(0, 1000))
def test_int8_is_off_by_at_most_half_a_scale(rows: int, cols: int, magnitude: float, seed: int) -> None:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * magnitude
    parts = int8_per_channel.quantize(weight)
    assert parts["weight"].dtype == torch.int8
    assert parts["scale"].shape == (rows,)
    error = (dequantize("int8_per_channel", parts) - weight).abs()
    assert bool((error <= parts["scale"].unsqueeze(1) * 0.5001).all())
    assert num_cols("int8_per_channel", parts) == cols


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.floats(1e-6, 1e4), st.integers(0, 1000))
def test_int4_is_off_by_at_most_half_a_scale(rows: int, groups: int, magnitude: float, seed: int) -> None:
    weight = torch.randn(rows, groups * 32, generator=torch.Generator().manual_seed(seed)) * magnitude
    parts = int4_group32.quantize(weight)
    assert parts["weight"].shape == (rows, groups * 16)
    assert parts["scale"].shape == parts["min"].shape == (rows, groups)
    error = (dequantize("int4_group32", parts) - weight).abs().unflatten(1, (-1, 32))
    assert bool((error <= parts["scale"].unsqueeze(2) * 0.5001).all())
    assert num_cols("int4_group32", parts) == groups * 32


def test_int4_keeps_the_even_column_in_the_low_nibble() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 1] = 15.0
    assert int4_group32.quantize(weight)["weight"][0, 0].item() == 0xF0


@pytest.mark.parametrize("quantizer", [int8_per_channel, int4_group32])
def test_zeros_and_constants_quantize_exactly(quantizer: object) -> None:
    for weight in (torch.zeros(2, 32), torch.full((2, 32), -3.5)):
        parts = quantizer.quantize(weight)  # type: ignore[attr-defined]
        assert torch.allclose(quantizer.dequantize(parts), weight, rtol=1e-6)  # type: ignore[attr-defined]


def test_int4_refuses_a_partial_group() -> None:
    with pytest.raises(ValueError, match="33 columns"):
        int4_group32.quantize(torch.zeros(1, 33))


@pytest.mark.parametrize("layout", ["gguf.q2_k", "q4_0", "fp8", ""])
def test_an_unknown_layout_is_refused_by_name(layout: str) -> None:
    parts = {"weight": torch.zeros(1, 32, dtype=torch.uint8)}
    with pytest.raises(ManifestError, match="unknown layout"):
        dequantize(layout, parts)
    with pytest.raises(ManifestError, match="unknown layout"):
        num_cols(layout, parts)
    assert "gguf.q6_k" in LAYOUTS
