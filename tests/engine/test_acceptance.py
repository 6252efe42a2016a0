"""Verification keeps the model's distribution: counted over many samples, for every rule and kind of draft."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from preload.engine.core.noise import derive_seeds, gumbel_noise, hash_tokens, uniform
from preload.engine.core.speculation.acceptance import (
    count_block,
    count_equal,
    count_sampled,
    residual_log_weights,
)

VOCAB = 16
NUM_SAMPLES = 100_000
NUM_DRAFTS = 3
HASHES = hash_tokens(VOCAB)
SEEDS = torch.arange(NUM_SAMPLES) * 7919


@dataclass
class Models:
    """Two random Markov chains: log-probabilities float32[VOCAB, VOCAB] of the next token by the one before it."""

    target: Tensor
    drafter: Tensor


@pytest.fixture(scope="module")
def models() -> Models:
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    drafter = target + torch.randn(VOCAB, VOCAB, generator=generator) * 0.8
    target[:, 3] = -math.inf  # a token that truncation has excluded
    return Models(target.log_softmax(-1), drafter.log_softmax(-1))


def draw(log_probs: Tensor, position: int, purpose: int) -> Tensor:
    seeds = derive_seeds(SEEDS, purpose, torch.zeros(NUM_SAMPLES, dtype=torch.int64))
    positions = torch.full((NUM_SAMPLES,), position)
    return (log_probs + gumbel_noise(seeds, positions, HASHES)).argmax(-1)


@dataclass
class Drafts:
    ids: Tensor
    log_probs: Tensor | None
    target: Tensor
    """float32[NUM_SAMPLES, NUM_DRAFTS + 1, VOCAB]"""


def make_drafts(models: Models, kind: str) -> Drafts:
    """The first token follows token 0. `kind`: drawn, the most likely ones, or drawn and of different lengths."""
    before = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    ids, q, p = [], [], [models.target[before]]
    for position in range(NUM_DRAFTS):
        log_probs = models.drafter[before]
        before = log_probs.argmax(-1) if kind == "one-hot" else draw(log_probs, position, 2)
        ids.append(before)
        q.append(log_probs)
        p.append(models.target[before])
    draft_ids = torch.stack(ids, 1)
    if kind == "ragged":
        lengths = torch.arange(NUM_SAMPLES) % (NUM_DRAFTS + 1)
        draft_ids = draft_ids.masked_fill(torch.arange(NUM_DRAFTS) >= lengths[:, None], -1)
    return Drafts(draft_ids, None if kind == "one-hot" else torch.stack(q, 1), torch.stack(p, 1))


def verify(drafts: Drafts, rule: str, strictness: float = 1.0) -> tuple[Tensor, Tensor]:
    """Number of drafts kept, and the token after them."""
    positions = torch.arange(NUM_DRAFTS).repeat(NUM_SAMPLES)
    seeds = derive_seeds(SEEDS, 0, torch.zeros(NUM_SAMPLES, dtype=torch.int64)).repeat_interleave(NUM_DRAFTS)
    uniforms = uniform(seeds, positions, hash_tokens(1)).view(NUM_SAMPLES, NUM_DRAFTS) * strictness
    reach = None
    if rule == "block":
        kept, all_reach = count_block(drafts.target, drafts.ids, drafts.log_probs, uniforms)
        reach = all_reach.gather(1, kept[:, None]).squeeze(1)
    else:
        kept = count_sampled(drafts.target, drafts.ids, drafts.log_probs, uniforms)
    each = torch.arange(NUM_SAMPLES)
    rejected = torch.cat((drafts.ids, drafts.ids.new_full((NUM_SAMPLES, 1), -1)), 1)[each, kept]
    q = None if drafts.log_probs is None else drafts.log_probs[each, kept.clamp(max=NUM_DRAFTS - 1)]
    weights = residual_log_weights(drafts.target[each, kept], rejected, q, reach)
    seeds = derive_seeds(SEEDS, 1, torch.zeros(NUM_SAMPLES, dtype=torch.int64))
    return kept, (weights + gumbel_noise(seeds, kept, HASHES)).argmax(-1)


def first_two(models: Models, drafts: Drafts, kept: Tensor, after: Tensor) -> Tensor:
    """The first two tokens of each answer; a second one that was not reached is drawn from the model."""
    first = torch.where(kept > 0, drafts.ids[:, 0], after)
    drawn = (models.target[first] + gumbel_noise(SEEDS + 1, torch.full((NUM_SAMPLES,), 99), HASHES)).argmax(-1)
    second = torch.where(kept > 1, drafts.ids[:, 1], torch.where(kept == 1, after, drawn))
    return torch.stack((first, second), 1)


def variation(models: Models, pairs: Tensor) -> tuple[float, float]:
    """Total variation between the pairs' frequencies and the model's, and what chance alone gives at most."""
    expected = (models.target[0][:, None] + models.target).exp().double().flatten()
    counts = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB * VOCAB)
    distance = (counts / NUM_SAMPLES - expected).abs().sum() / 2
    # The mean is 0.8 of half this sum, and single deviations are far below the rest.
    bound = (expected * (1 - expected) / NUM_SAMPLES).sqrt().sum() / 2
    return float(distance), float(bound)


@pytest.mark.parametrize("kind", ["drawn", "one-hot", "ragged"])
@pytest.mark.parametrize("rule", ["sampled", "block"])
def test_a_hundred_thousand_answers_have_the_models_distribution(models: Models, rule: str, kind: str) -> None:
    drafts = make_drafts(models, kind)
    kept, after = verify(drafts, rule)
    assert int((kept > 0).sum()) > 0.15 * NUM_SAMPLES  # drafts matter
    distance, bound = variation(models, first_two(models, drafts, kept, after))
    assert distance < bound
    assert int((after == 3).sum()) == 0


@pytest.mark.parametrize("rule", ["sampled", "block"])
def test_a_rule_that_keeps_a_little_too_much_is_found_out(models: Models, rule: str) -> None:
    drafts = make_drafts(models, "drawn")
    distance, bound = variation(models, first_two(models, drafts, *verify(drafts, rule, strictness=0.8)))
    assert distance > 1.2 * bound


def test_block_verification_keeps_more_in_the_mean(models: Models) -> None:
    drafts = make_drafts(models, "drawn")
    sampled, block = (verify(drafts, rule)[0].double().mean() for rule in ("sampled", "block"))
    assert block > sampled + 0.01


@pytest.mark.parametrize("rule", ["sampled", "block"])
def test_drafts_from_the_models_own_distribution_are_all_kept(models: Models, rule: str) -> None:
    drafts = make_drafts(Models(models.target, models.target), "drawn")
    kept, _ = verify(drafts, rule)
    assert bool((kept == NUM_DRAFTS).all())


def test_no_draft_is_kept_that_is_none(models: Models) -> None:
    drafts = make_drafts(models, "drawn")
    drafts.ids[:] = -1
    for rule in ("sampled", "block"):
        kept, after = verify(drafts, rule)
        assert int(kept.max()) == 0
        distance, bound = variation(models, first_two(models, drafts, kept, after))
        assert distance < bound


def test_equal_drafts_are_counted_up_to_the_first_difference() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [-1, 2, 3]])
    chosen = torch.tensor([[1, 2, 3]] * 4)
    assert count_equal(drafts, chosen).tolist() == [3, 1, 0, 0]


def by_hand(p: list[list[float]], q: list[list[float]], ids: list[int], uniforms: list[float]) -> tuple[int, float]:
    """Algorithm 2 of arXiv 2403.10444 for one request, as it stands there: kept drafts, and p_i there."""
    reach, kept, reached = 1.0, 0, 1.0
    for i in range(1, len(ids) + 1):
        token = ids[i - 1]
        reach = min(reach * p[i - 1][token] / q[i - 1][token], 1.0)
        chance = reach
        if i < len(ids):
            rest = sum(max(reach * a - b, 0.0) for a, b in zip(p[i], q[i], strict=True))
            chance = rest / (rest + 1 - reach) if rest + 1 - reach else 1.0
        if uniforms[i - 1] <= chance:
            kept, reached = i, reach
    return kept, reached


def test_block_verification_equals_its_algorithm(models: Models) -> None:
    drafts = make_drafts(models, "drawn")
    assert drafts.log_probs is not None
    uniforms = torch.rand(NUM_SAMPLES, NUM_DRAFTS, generator=torch.Generator().manual_seed(1))
    kept, reach = count_block(drafts.target, drafts.ids, drafts.log_probs, uniforms)
    p, q = drafts.target.exp().double(), drafts.log_probs.exp().double()
    for i in range(400):
        arguments: Any = (p[i].tolist(), q[i].tolist(), drafts.ids[i].tolist(), uniforms[i].tolist())
        expected, reached = by_hand(*arguments)
        assert int(kept[i]) == expected
        assert float(reach[i, expected]) == pytest.approx(reached, rel=1e-4)
