"""Every recipe's perplexity on 4,096 tokens, and the error of its last logits, against float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preload.bench.recipes import Setting, run
from preload.cli.bench import _print_recipes

MAX_COST = {
    Setting("keep"): (1e-4, 1e-4),
    Setting("f32"): (1e-4, 1e-4),
    Setting("bf16"): (0.005, 0.02),
    Setting("int8_per_channel"): (0.02, 0.08),
    Setting("int4_group32"): (0.15, 0.2),
    Setting("keep", matmul_precision="medium"): (0.005, 0.05),
    Setting("keep", "bfloat16"): (0.01, 0.05),
    Setting("bf16", "bfloat16"): (0.01, 0.05),
}
"""Growth of the perplexity, and relative error of the last logits. Formats for GPUs are left to the bench itself:
torch takes minutes for them here."""


@pytest.fixture(scope="module")
def result(demo_model: Path) -> dict[str, Any]:
    return run(str(demo_model), chosen=list(MAX_COST))


def setting_of(recipe: dict[str, Any]) -> Setting:
    return Setting(recipe["quantization"], recipe["compute_dtype"], recipe["matmul_precision"])


def test_no_recipe_costs_more_than_it_may(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        _print_recipes(result)
    assert [setting_of(recipe) for recipe in result["recipes"]] == list(MAX_COST)
    for recipe in result["recipes"]:
        perplexity, error = MAX_COST[setting_of(recipe)]
        assert recipe["perplexity"] / result["float32_perplexity"] - 1 < perplexity, recipe
        assert recipe["relative_error"] < error, recipe


def test_the_model_has_learned_the_language_of_the_text(result: dict[str, Any]) -> None:
    # Of a vocabulary of 49,152: a text read wrongly, or shifted by one, is beyond a thousand.
    assert 5 < result["float32_perplexity"] < 60


def test_coarser_recipes_are_less_exact(result: dict[str, Any]) -> None:
    """A recipe that silently did nothing would be as exact as its neighbour."""
    error = {setting_of(recipe): recipe["relative_error"] for recipe in result["recipes"]}
    float32 = [error[Setting(name)] for name in ("f32", "bf16", "int8_per_channel", "int4_group32")]
    assert float32 == sorted(float32)
    assert error[Setting("bf16", "bfloat16")] > error[Setting("bf16")]
    assert error[Setting("keep", matmul_precision="medium")] > 100 * error[Setting("keep")]
