"""Sampling against formulas written out in numpy, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preload.engine.core import sampler as sampler_module
from preload.engine.core.noise import gumbel_noise, hash_tokens, uniform
from preload.engine.core.request import Request, SamplingParams
from preload.engine.core.sampler import SampledToken, Sampler, truncate

VOCAB = 40


def sample(logits: torch.Tensor, *requests: Request) -> list[SampledToken]:
    """One step of a fresh sampler; request i gets row 2i + 1, so that rows and logit rows differ."""
    sampler = Sampler(2 * len(requests) + 1, logits.shape[1])
    for i, request in enumerate(requests):
        request.row = 2 * i + 1
        sampler.add(request.row, request)
    return sampler.sample(logits.clone(), requests)


def processed(logits: np.ndarray, request: Request) -> np.ndarray:
    """Bias, penalties and the bar on stop ids, token by token."""
    params, out = request.sampling, logits.astype(np.float64)
    for token in range(len(out)):
        out[token] += params.logit_bias.get(token, 0.0)
        count = request.output_ids.count(token)
        if count or token in request.prompt_ids:
            repetition = params.repetition_penalty
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
        if len(request.output_ids) < params.min_tokens and token in params.stop_token_ids:
            out[token] = -math.inf
    return out


def allowed(scaled: np.ndarray, min_p: float, top_k: int, top_p: float) -> set[int]:
    """Tokens left by min-p, then top-k, then top-p."""
    probs = np.exp(scaled - scaled.max())
    keep = set(np.flatnonzero(probs >= min_p * probs.max()))
    order = sorted(keep, key=lambda t: -scaled[t])
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        total, mass, kept = sum(probs[t] for t in order), 0.0, []
        for token in order:
            if mass >= top_p:
                break
            kept.append(token)
            mass += probs[token] / total
        order = kept
    return set(map(int, order))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 31),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 17, 40, 10**6]),
    top_p=st.sampled_from([1.0, 0.9, 0.33, 0.01]),
    candidates=st.sampled_from([4, 1024]),
)
def test_truncation_keeps_what_the_definitions_keep(
    seed: int, min_p: float, top_k: int, top_p: float, candidates: int
) -> None:
    x = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    x = (x - x.max())[None]
    expected = allowed(x[0].double().numpy(), min_p, top_k, top_p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "MAX_CANDIDATES", candidates)
        truncate(x, torch.tensor([min_p]), torch.tensor([top_k]), torch.tensor([top_p]))
    assert set(x[0].isfinite().nonzero().flatten().tolist()) == expected


def test_truncation_keeps_all_of_equal_logits() -> None:
    x = torch.zeros(1, VOCAB)
    truncate(x, torch.tensor([0.0]), torch.tensor([2]), torch.tensor([0.5]))
    assert bool(x.isfinite().all())


PARAMS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {3: 5.0, 7: -100.0}},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "stop_bar": {"min_tokens": 9, "stop_token_ids": frozenset({1, 5})},
    "no_bar_any_more": {"min_tokens": 4, "stop_token_ids": frozenset({1, 5})},
    "all": {
        "logit_bias": {1: 2.0, 2: -1.0}, "repetition_penalty": 1.3, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "min_tokens": 9, "stop_token_ids": frozenset({4}),
    },
    "nothing": {},
}  # fmt: skip


def test_logprobs_are_taken_after_bias_and_penalties_and_before_temperature() -> None:
    logits = torch.randn(len(PARAMS), VOCAB)
    requests = [
        Request(
            request_id=name,
            prompt_ids=[1, 2, 3],
            output_ids=[5, 5, 9, 2],
            sampling=SamplingParams(
                **changes, logprobs=True, num_top_logprobs=4, max_tokens=99, temperature=0.5, seed=3
            ),
        )
        for name, changes in PARAMS.items()
    ]
    for row, request, got in zip(logits, requests, sample(logits, *requests), strict=True):
        expected = processed(row.numpy(), request)
        expected -= np.log(np.exp(expected).sum())
        assert got.logprobs is not None
        assert got.logprobs.logprob == pytest.approx(expected[got.token_id], abs=1e-5)
        assert got.logprobs.top_ids == np.argsort(-expected)[:4].tolist()
        np.testing.assert_allclose(got.logprobs.top_logprobs, np.sort(expected)[::-1][:4], atol=1e-5)


def test_greedy_takes_the_largest_processed_logit() -> None:
    logits = torch.randn(len(PARAMS), VOCAB)
    requests = [
        Request(request_id=n, prompt_ids=[1, 2], output_ids=[5, 9, 9, 9], sampling=SamplingParams(**c, max_tokens=99))
        for n, c in PARAMS.items()
    ]
    for row, request, got in zip(logits, requests, sample(logits, *requests), strict=True):
        assert got.token_id == int(processed(row.numpy(), request).argmax())
        assert got.logprobs is None


def test_penalties_count_what_was_sampled_since() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 2.0, 1.5
    request = Request(
        request_id="r", prompt_ids=[1], sampling=SamplingParams(frequency_penalty=0.3, max_tokens=9), row=0
    )
    sampler = Sampler(1, VOCAB)
    sampler.add(0, request)
    got = []
    for _ in range(5):
        got.append(sampler.sample(logits.clone(), [request])[0].token_id)
        request.output_ids.append(got[-1])
    assert got == [7, 7, 8, 7, 8]


def draw(seed: int, position: int, logits: torch.Tensor, **changes: Any) -> Request:
    return Request(
        request_id=f"{seed}-{position}",
        prompt_ids=[0] * position,
        sampling=SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 9, **changes}),
    )


def test_a_token_depends_on_seed_and_position_and_not_on_the_batch() -> None:
    logits = torch.randn(1, 3000)
    others = [draw(s, 7, logits, top_p=0.9) for s in range(6)]
    alone = sample(logits, draw(11, 5, logits, top_k=50))[0]
    for place in range(7):
        batch = [*others[:place], draw(11, 5, logits, top_k=50), *others[place:]]
        rows = torch.randn(7, 3000)
        rows[place] = logits[0]
        assert sample(rows, *batch)[place] == alone
    tokens = {sample(logits, draw(11, p, logits))[0].token_id for p in range(1, 40)}
    assert len(tokens) > 20


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1, 1 << 63])
def test_every_seed_of_64_bits_is_usable(seed: int) -> None:
    assert 0 <= sample(torch.zeros(1, VOCAB), draw(seed, 1, torch.zeros(1)))[0].token_id < VOCAB


def test_samples_follow_the_softmax_at_the_temperature() -> None:
    num_samples, vocab = 100_000, 16
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    expected = torch.softmax(logits.double() / 0.7, dim=-1)
    noise = gumbel_noise(torch.full((num_samples,), 42), torch.arange(num_samples), hash_tokens(vocab))
    counts = torch.bincount((logits / 0.7 + noise).argmax(dim=-1), minlength=vocab).double()
    # Expected total variation of a multinomial sample: about half the sum of sqrt(2 p (1 - p) / (pi n)).
    error = 0.5 * (2 * expected * (1 - expected) / (math.pi * num_samples)).sqrt().sum()
    assert 0.5 * (counts / num_samples - expected).abs().sum() < 2 * error


def test_uniforms_are_even_over_seeds_positions_and_tokens() -> None:
    hashes = hash_tokens(1000)
    by_seed = uniform(torch.arange(1000) - 500, torch.full((1000,), 3), hashes)
    for u in (by_seed[:, 7], by_seed[3], uniform(torch.full((1000,), 5), torch.arange(1000), hashes)[:, 999]):
        ordered = u.double().sort().values
        distance = (ordered - (torch.arange(1000) + 0.5) / 1000).abs().max()
        assert distance < 1.95 / math.sqrt(1000)  # Kolmogorov-Smirnov at 0.1 %
    assert by_seed.min() >= 4.66e-10
    assert by_seed.max() < 1
    correlation = np.corrcoef(by_seed[:, 7].numpy(), by_seed[:, 8].numpy())[0, 1]
    assert abs(correlation) < 0.11


@pytest.mark.parametrize(
    "spoil",
    [
        lambda logits: logits.fill_(math.nan),
        lambda logits: logits[0, 5].fill_(math.nan),
        lambda logits: logits.fill_(-math.inf),
        lambda logits: logits[0, 5].fill_(math.inf),
    ],
)
def test_logits_without_a_finite_maximum_fail_their_row_only(spoil: Callable[[torch.Tensor], Any]) -> None:
    logits = torch.randn(3, VOCAB)
    best = logits.argmax(dim=-1).tolist()
    spoil(logits[1:2])
    got = sample(logits, *(draw(1, 1, logits, temperature=0.0) for _ in range(3)))
    assert [bool(token.error) for token in got] == [False, True, False]
    assert [got[0].token_id, got[2].token_id] == [best[0], best[2]]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_still_a_choice() -> None:
    logits = torch.randn(2, VOCAB)
    got = sample(logits, draw(1, 1, logits, temperature=1e-30), draw(1, 1, logits, temperature=1e6, top_k=1))
    assert [token.token_id for token in got] == logits.argmax(dim=-1).tolist()
