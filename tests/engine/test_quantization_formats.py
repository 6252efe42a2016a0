"""Formats for GPUs: the vectors of their definitions, bounds of their errors, and that rows dequantize alone."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from preload.engine.errors import ManifestError
from preload.engine.layers.weights import Weight, WeightTable
from preload.engine.quantization import (
    COMPANIONS,
    dequantize,
    fp8_per_block,
    fp8_per_tensor,
    int4_group32,
    int8_per_channel,
    mxfp4,
    mxfp8,
    nvfp4,
)
from preload.engine.quantization.minifloat import (
    E2M1_VALUES,
    ceil_e8m0,
    from_e2m1_codes,
    from_e8m0,
    pack_nibbles,
    to_e2m1_codes,
    to_e4m3,
    unpack_nibbles,
)

FORMATS = {m.LAYOUT: m for m in (int8_per_channel, int4_group32, fp8_per_tensor, fp8_per_block, mxfp8, mxfp4, nvfp4)}
RELATIVE_STEP = {"fp8_per_tensor": 2**-4, "fp8_per_block": 2**-4, "mxfp8": 2**-4, "mxfp4": 2**-2, "nvfp4": 2**-2}
"""Half the distance of neighbouring numbers over the smaller one: e4m3 has 3 bits of mantissa, e2m1 has 1."""
SMALLEST = {"fp8_per_tensor": 2**-10, "fp8_per_block": 2**-10, "mxfp8": 2**-10, "mxfp4": 2**-2, "nvfp4": 2**-2}
"""Half the smallest number, in units of the scale."""


def group_of(values: list[float], size: int) -> torch.Tensor:
    return torch.tensor([values + [0.0] * (size - len(values))])


def round_trip(module: ModuleType, values: list[float], size: int, **options: torch.Tensor) -> list[float]:
    parts = module.quantize(group_of(values, size), **options)
    result: list[float] = dequantize(module.LAYOUT, parts)[0, : len(values)].tolist()
    return result


def test_e2m1_rounds_ties_to_even() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert from_e2m1_codes(to_e2m1_codes(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert from_e2m1_codes(to_e2m1_codes(-ties)).tolist() == [0, -1, -1, -2, -2, -4, -4]


def test_e2m1_has_its_sign_in_bit_3_and_saturates() -> None:
    values = torch.tensor(E2M1_VALUES)
    assert to_e2m1_codes(values).tolist() == list(range(8))
    assert to_e2m1_codes(-values).tolist() == list(range(8, 16))
    assert from_e2m1_codes(to_e2m1_codes(torch.tensor([100.0, -7.0]))).tolist() == [6, -6]


def test_the_even_column_is_in_the_low_nibble() -> None:
    assert pack_nibbles(torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)).tolist() == [[0x21, 0xF3]]
    assert unpack_nibbles(torch.tensor([[0x21, 0xF3]], dtype=torch.uint8)).tolist() == [[1, 2, 3, 15]]


def test_e8m0_is_rounded_up() -> None:
    values = torch.tensor([1.0, math.nextafter(1.0, 2.0) + 1e-6, 2.0, 3.0, 2.0**-126, 2.0**127])
    assert ceil_e8m0(values).tolist() == [127, 128, 128, 129, 1, 254]
    exponents = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    assert from_e8m0(exponents)[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert from_e8m0(exponents)[4].isnan()


def test_e4m3_saturates_instead_of_overflowing() -> None:
    assert to_e4m3(torch.tensor([448.0, 464.0, 1e9, -1e9, 2.0**-10])).float().tolist() == [448, 448, 448, -448, 0]


@pytest.mark.parametrize(
    ("values", "expected", "scale"),
    [
        ([448, 3, 4.25, 4.75, 3 * 2**-9], [448, 3, 4, 5, 3 * 2**-9], 1),
        ([450, 4.25, 3 * 2**-9], [448, 4, 2**-7], 2),
        ([900, 1], [896, 1], 4),
    ],
)
def test_mxfp8_vectors(values: list[float], expected: list[float], scale: float) -> None:
    assert round_trip(mxfp8, values, 32) == expected
    assert from_e8m0(mxfp8.quantize(group_of(values, 32))["scale"]).item() == scale


@pytest.mark.parametrize(("values", "expected", "scale"), [([6.5, 5], [6, 4], 2), ([3, 0.375], [3, 0.5], 0.5)])
def test_mxfp4_vectors(values: list[float], expected: list[float], scale: float) -> None:
    assert round_trip(mxfp4, values, 32) == expected
    assert from_e8m0(mxfp4.quantize(group_of(values, 32))["scale"]).item() == scale


def test_nvfp4_vector_without_a_global_scale() -> None:
    values, one = [7, 2.8125, 0.5625, 1.4], torch.ones(1)
    assert round_trip(nvfp4, values, 16, global_scale=one) == [6.75, 2.25, 0.5625, 1.125]
    assert nvfp4.quantize(group_of(values, 16), one)["scale"].item() == 1.125


def test_nvfp4_scales_have_bounds() -> None:
    one = torch.ones(1)
    scales = nvfp4.quantize(torch.cat((group_of([1e-6], 16), group_of([1e6], 16))), one)["scale"]
    assert scales.flatten().tolist() == [2**-9, 448]


def test_nvfp4_global_scale_brings_the_largest_group_to_the_largest_scale() -> None:
    weight = torch.zeros(2, 32)
    weight[0, 0], weight[1, 16] = 0.03, 0.01
    parts = nvfp4.quantize(weight)
    assert parts["global_scale"].item() == pytest.approx(448 * 6 / 0.03)
    assert parts["scale"].float().amax().item() == 448
    assert dequantize("nvfp4", parts)[0, 0].item() == pytest.approx(0.03)


def test_fp8_scales_are_the_maximum_over_448() -> None:
    weight = torch.zeros(130, 260)
    weight[0, 0], weight[129, 259] = 896.0, -224.0
    assert fp8_per_tensor.quantize(weight)["scale"].tolist() == [2.0]
    assert fp8_per_block.quantize(weight)["scale"].tolist() == [[2, 1, 1], [1, 1, 0.5]]
    for module in (fp8_per_tensor, fp8_per_block):
        assert torch.equal(dequantize(module.LAYOUT, module.quantize(weight)), weight)


def test_fp8_activations_have_a_scale_per_token_and_128_columns() -> None:
    x = torch.zeros(3, 200)
    x[0, 5], x[1, 150], x[1, 3] = 896.0, 448.0, 3e-5
    quantized, scale = fp8_per_block.quantize_activations(x.bfloat16())
    assert quantized.shape == (3, 200)
    floor = torch.tensor(1e-4) / 448
    torch.testing.assert_close(scale, torch.tensor([[2.0, floor], [floor, 1.0], [floor, floor]]))
    error = fp8_per_block.dequantize_activations(quantized, scale) - x.bfloat16().float()
    assert float(error.abs().amax()) < 3e-6


@pytest.mark.parametrize("layout", RELATIVE_STEP)
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e4])
def test_errors_stay_within_half_a_step(layout: str, magnitude: float) -> None:
    weight = torch.randn(150, 288, generator=torch.Generator().manual_seed(0)) * magnitude
    parts = FORMATS[layout].quantize(weight)
    got = dequantize(layout, parts)
    scale = parts["scale"].float()
    if layout in ("mxfp8", "mxfp4"):
        scale = from_e8m0(parts["scale"])
    if layout == "nvfp4":
        scale = scale / parts["global_scale"]
    bound = weight.abs() * RELATIVE_STEP[layout] + SMALLEST[layout] * float(scale.amax())
    assert bool(((got - weight).abs() <= bound * 1.0001).all())


@pytest.mark.parametrize("layout", FORMATS)
def test_rows_dequantize_alone(layout: str) -> None:
    weight = torch.randn(300, 288, generator=torch.Generator().manual_seed(0))
    parts = FORMATS[layout].quantize(weight)
    whole = dequantize(layout, parts)
    resident = Weight("w", layout, parts)
    assert (resident.num_rows, resident.num_cols) == (300, 288)
    for index in (slice(0, 1), slice(100, 270), torch.tensor([299, 0, 128, 127, 0]), slice(5, 5)):
        assert torch.equal(resident.rows(index), whole[index])


@pytest.mark.parametrize("layout", FORMATS)
def test_zeros_stay_zeros(layout: str) -> None:
    parts = FORMATS[layout].quantize(torch.zeros(3, 64))
    assert not dequantize(layout, parts).any()
    assert dequantize(layout, FORMATS[layout].quantize(torch.zeros(0, 64))).shape == (0, 64)


@pytest.mark.parametrize(("layout", "cols"), [("mxfp8", 48), ("mxfp4", 48), ("nvfp4", 40), ("int4_group32", 48)])
def test_columns_that_do_not_divide_are_refused(layout: str, cols: int) -> None:
    with pytest.raises(ValueError, match=f"{cols} columns"):
        FORMATS[layout].quantize(torch.zeros(2, cols))


@pytest.mark.parametrize("layout", FORMATS)
def test_a_weight_table_hands_out_every_format(layout: str) -> None:
    parts = FORMATS[layout].quantize(torch.randn(130, 64))
    tensors = {"w" if part == "weight" else f"w_{part}": tensor for part, tensor in parts.items()}
    table = WeightTable(tensors, dict.fromkeys(tensors, layout), torch.bfloat16)
    weight = table.take_weight("w", 130, 64)
    table.finish()
    assert set(weight.parts) == {"weight", *COMPANIONS[layout]}
    broken = dict(tensors)
    broken["w_scale"] = torch.cat((broken["w_scale"].view(torch.uint8),) * 2).view(broken["w_scale"].dtype)
    with pytest.raises(ManifestError, match=r"w: its scale has \d+ rows instead of"):
        WeightTable(broken, dict.fromkeys(tensors, layout), torch.bfloat16).take_weight("w", 130, 64)
