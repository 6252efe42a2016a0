"""Every recipe's perplexity on 4,096 tokens, and the error of its last logits, against float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preload.bench.recipes import run
from preload.cli.bench import _print_recipes

MAX_COST = {
    ("keep", "float32"): (1e-4, 1e-4),
    ("f32", "float32"): (1e-4, 1e-4),
    ("bf16", "float32"): (0.005, 0.02),
    ("int8_per_channel", "float32"): (0.02, 0.08),
    ("int4_group32", "float32"): (0.15, 0.2),
    ("keep", "bfloat16"): (0.01, 0.05),
    ("bf16", "bfloat16"): (0.01, 0.05),
}
"""Growth of the perplexity, and relative error of the last logits. Formats for GPUs are left to the bench itself:
torch takes minutes for them here."""


@pytest.fixture(scope="module")
def result(demo_model: Path) -> dict[str, Any]:
    return run(str(demo_model), chosen=list(MAX_COST))


def test_no_recipe_costs_more_than_it_may(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        _print_recipes(result)
    assert [(r["quantization"], r["compute_dtype"]) for r in result["recipes"]] == list(MAX_COST)
    for recipe in result["recipes"]:
        perplexity, error = MAX_COST[recipe["quantization"], recipe["compute_dtype"]]
        assert recipe["perplexity"] / result["float32_perplexity"] - 1 < perplexity, recipe
        assert recipe["relative_error"] < error, recipe


def test_the_model_has_learned_the_language_of_the_text(result: dict[str, Any]) -> None:
    # Of a vocabulary of 49,152: a text read wrongly, or shifted by one, is beyond a thousand.
    assert 5 < result["float32_perplexity"] < 60


def test_coarser_recipes_are_less_exact(result: dict[str, Any]) -> None:
    """A recipe that silently did nothing would be as exact as its neighbour."""
    error = {(r["quantization"], r["compute_dtype"]): r["relative_error"] for r in result["recipes"]}
    float32 = [error[name, "float32"] for name in ("f32", "bf16", "int8_per_channel", "int4_group32")]
    assert float32 == sorted(float32)
    assert error["bf16", "bfloat16"] > error["bf16", "float32"]
