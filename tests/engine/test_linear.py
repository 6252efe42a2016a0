"""Products and embeddings over every resident layout."""

from __future__ import annotations

import pytest
import torch

from preload.engine.kernels import block_products
from preload.engine.layers import linear
from preload.engine.layers.linear import Embedding, Linear, product
from preload.engine.layers.weights import Weight
from preload.engine.quantization.layouts import dequantize


def random_weight(layout: str, rows: int, cols: int) -> Weight:
    generator = torch.Generator().manual_seed(7)

    def bytes_of(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def floats(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) / 16

    if layout == "int8_per_channel":
        parts = {"weight": bytes_of(rows, cols).view(torch.int8), "scale": floats(rows)}
    elif layout == "int4_group32":
        parts = {
            "weight": bytes_of(rows, cols // 2),
            "scale": floats(rows, cols // 32),
            "min": floats(rows, cols // 32),
        }
    elif layout.startswith("gguf."):
        size, halves = {"gguf.q4_0": (18, 1), "gguf.q4_1": (20, 2), "gguf.q5_1": (24, 2), "gguf.q8_0": (34, 1)}[
            layout
        ]
        blocks = bytes_of(rows, cols // 32, size)
        blocks[..., : 2 * halves] = floats(rows, cols // 32, halves).half().view(torch.uint8)
        parts = {"weight": blocks.flatten(1)}
    else:
        parts = {"weight": torch.randn(rows, cols, generator=generator).to(getattr(torch, layout))}
        layout = "dense"
    return Weight("w", layout, parts)


FLOATS = ["float32", "bfloat16", "float16"]
QUANTIZED = ["int8_per_channel", "int4_group32", "gguf.q4_0", "gguf.q4_1", "gguf.q5_1", "gguf.q8_0"]
LAYOUTS = FLOATS + QUANTIZED


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_equals_the_product_with_the_dequantized_weight(
    layout: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (linear, block_products):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", 64 * 7)  # several pieces, the last one short
    weight = random_weight(layout, 33, 64)
    x = torch.randn(num_tokens, 64)
    expected = x @ dequantize(weight.layout, weight.parts).T
    torch.testing.assert_close(product(x, weight), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_activations_get_bfloat16_results(layout: str) -> None:
    weight = random_weight(layout, 33, 64)
    x = torch.randn(3, 64).bfloat16()
    got = product(x, weight)
    assert got.dtype == torch.bfloat16
    expected = x.float() @ dequantize(weight.layout, weight.parts).T
    torch.testing.assert_close(got.float(), expected, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_embedding_gives_the_rows_asked_for(layout: str) -> None:
    weight = random_weight(layout, 33, 64)
    ids = torch.tensor([32, 0, 0, 7])
    torch.testing.assert_close(Embedding(weight, torch.float32)(ids), dequantize(weight.layout, weight.parts)[ids])


def test_a_bias_is_added_once() -> None:
    weight = random_weight("float32", 33, 64)
    x, bias = torch.randn(2, 64), torch.randn(33)
    torch.testing.assert_close(Linear(weight, bias)(x), x @ weight.parts["weight"].T + bias)


@pytest.mark.parametrize("layout", QUANTIZED)
def test_a_product_with_a_weight_of_one_block_does_not_write_to_it(layout: str) -> None:
    weight = random_weight(layout, 1, 32)
    before = {name: part.clone() for name, part in weight.parts.items()}
    product(torch.randn(2, 32), weight)
    assert all(torch.equal(before[name], part) for name, part in weight.parts.items())
