"""The native choice of tokens: those that the sampler chooses in torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from preload.engine.core.request import Request, SamplingParams
from preload.engine.core.sampler import Sampler
from preload.engine.layers.native_sampling import NativeSampling

VARIANTS = ["native", "without AVX-512"]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 20.0},
    "min_p": {"min_p": 0.1},
    "all but the largest barred": {"min_p": 1.0},
    "top_k": {"top_k": 40},
    "top_k of one": {"top_k": 1},
    "top_k of more than there are": {"top_k": 10**6},
    "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 0.01},
    "top_p, hot": {"top_p": 0.99, "temperature": 3.0},
    "all": {"min_p": 0.02, "top_k": 50, "top_p": 0.8, "temperature": 0.7},
    "min_p and top_p": {"min_p": 0.05, "top_p": 0.7},
}


def choose(choose: Any, logits: torch.Tensor, changes: dict[str, Any], seed: int = 5) -> tuple[list[int], list[Any]]:
    """Of every row of logits, all at other positions of one request's stream."""
    sampler = Sampler(1, logits.shape[1], choose=choose)
    request = Request(
        request_id="a",
        prompt_ids=[1],
        sampling=SamplingParams(**{"temperature": 1.0, "max_tokens": 9, "seed": seed, **changes}),
    )
    request.row = 0
    sampler.add(0, request)
    got = sampler.choose(logits.clone(), [0] * len(logits), range(len(logits)))
    return [token.token_id for token in got], [token.error for token in got]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("changes", PARAMS.values(), ids=PARAMS)
def test_tokens_are_those_of_torch(open_library: Any, changes: dict[str, Any], variant: str) -> None:
    native = NativeSampling(open_library(variant, 2))
    generator = torch.Generator().manual_seed(len(str(changes)))
    for num_rows, vocab_size, spread in [(48, 5003, 3.0), (8, 49152, 4.0), (48, 40, 1.0), (48, 3, 0.1)]:
        logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
        assert choose(native, logits, changes) == choose(None, logits, changes)


def test_as_many_tokens_as_top_k_keeps_are_found_before_all_are_looked_at(open_library: Any) -> None:
    """40 logits within reach of the largest, and a crowd below."""
    native = NativeSampling(open_library("native", 1))
    logits = torch.full((64, 5000), -4.5)
    logits[:, :40] = torch.linspace(0, -3.9, 40)
    tokens, _ = choose(native, logits, {"top_k": 40})
    assert max(tokens) < 40
    assert tokens == choose(None, logits, {"top_k": 40})[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_barred_and_equal_logits_are_chosen_as_by_torch(open_library: Any, variant: str) -> None:
    native = NativeSampling(open_library(variant, 1))
    logits = torch.randn(32, 1000, generator=torch.Generator().manual_seed(1)).round()  # with many equal ones
    logits[:, 100:] = -math.inf
    logits[3] = 2.0
    for changes in PARAMS.values():
        tokens, errors = choose(native, logits, changes)
        assert (tokens, errors) == choose(None, logits, changes)
        assert max(tokens[:3] + tokens[4:]) < 100
        assert not any(errors)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_rows_without_a_finite_maximum_are_errors_and_spoil_no_other(
    open_library: Any, broken: float, variant: str
) -> None:
    native = NativeSampling(open_library(variant, 2))
    logits = torch.randn(4, 333)
    logits[1, 332], logits[2] = broken, -math.inf
    for changes in ({"temperature": 0.0}, {"top_p": 0.5}):
        tokens, errors = choose(native, logits, changes)
        expected, expected_errors = choose(None, logits, changes)
        assert [bool(error) for error in errors] == [False, True, True, False]
        assert errors == expected_errors
        assert [tokens[0], tokens[3]] == [expected[0], expected[3]]


def test_rows_of_a_wider_tensor_are_read_where_they_are(open_library: Any) -> None:
    native = NativeSampling(open_library("native", 1))
    wide = torch.randn(6, 2000)
    arguments = {
        "temperature": torch.tensor([0.0, 0.8, 1.0]),
        "min_p": torch.zeros(3),
        "top_k": torch.zeros(3, dtype=torch.int64),
        "top_p": torch.ones(3),
        "seeds": torch.arange(3),
        "positions": torch.arange(3),
        "token_hashes": torch.arange(1000, dtype=torch.int32),
    }
    strided = native(wide[::2, 500:1500], **arguments)
    copied = native(wide[::2, 500:1500].contiguous(), **arguments)
    assert all(map(torch.equal, strided, copied))
    assert torch.equal(strided[0], wide[::2, 500:1500].amax(dim=1))
