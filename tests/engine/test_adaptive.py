"""The choice of draft lengths, with steps that take a made-up time."""

from __future__ import annotations

from collections import Counter

import pytest

from preload.engine.core.speculation.adaptive import REST_STEPS, TRIAL_STEPS, DraftLength


def run(lengths: DraftLength, num_steps: int, seconds: dict[int, float], tokens: dict[int, float]) -> Counter[int]:
    """Steps of one request; `seconds` and `tokens` by draft length. Returns how often each was chosen."""
    chosen: Counter[int] = Counter()
    for step in range(num_steps):
        length = lengths.choose(1)
        chosen[length] += 1
        whole = int(tokens[length] * (step + 1)) - int(tokens[length] * step)
        lengths.measure(1, length, whole, seconds[length])
    return chosen


COSTS = {0: 1.0, 1: 1.1, 3: 1.3, 7: 2.0}


def test_drafts_that_lose_are_switched_off_and_tried_again_now_and_then() -> None:
    lengths = DraftLength(7)
    run(lengths, 200, COSTS, {0: 1.0, 1: 1.05, 3: 1.1, 7: 1.2})
    chosen = run(lengths, 10 * REST_STEPS, COSTS, {0: 1.0, 1: 1.05, 3: 1.1, 7: 1.2})
    assert chosen[0] > 0.85 * chosen.total()
    assert all(chosen[length] >= TRIAL_STEPS for length in (1, 3, 7))


@pytest.mark.parametrize(("tokens", "best"), [({0: 1, 1: 2, 3: 4, 7: 8}, 7), ({0: 1, 1: 1.8, 3: 2.4, 7: 2.6}, 3)])
def test_the_length_that_gives_most_is_used(tokens: dict[int, float], best: int) -> None:
    lengths = DraftLength(7)
    run(lengths, 200, COSTS, tokens)
    chosen = run(lengths, 10 * REST_STEPS, COSTS, tokens)
    assert chosen.most_common(1)[0][0] == best
    assert chosen[best] > 0.85 * chosen.total()


def test_a_change_of_the_text_is_noticed() -> None:
    lengths = DraftLength(7)
    run(lengths, 1000, COSTS, {0: 1, 1: 1, 3: 1, 7: 1})
    assert lengths.choose(1) in COSTS
    chosen = run(lengths, 20 * REST_STEPS, COSTS, {0: 1, 1: 2, 3: 4, 7: 8})
    assert chosen.most_common(1)[0][0] == 7


def test_sizes_of_the_batch_are_decided_apart() -> None:
    lengths = DraftLength(3)
    for _ in range(500):
        for num_requests in (1, 48):
            length = lengths.choose(num_requests)
            cost = 1 + length * (0.1 if num_requests == 1 else 1.0)
            lengths.measure(num_requests, length, num_requests * (1 + length // 2), cost * num_requests)
    rates = lengths.rates()
    assert set(rates) == {1, 32}
    assert max(rates[1], key=lambda length: rates[1][length]) == 3
    assert max(rates[32], key=lambda length: rates[32][length]) == 0


def test_steps_without_a_match_tell_what_plain_steps_take() -> None:
    lengths = DraftLength(7)
    for step in range(400):
        drafted = lengths.choose(1) if step % 2 else 0
        lengths.measure(1, drafted, 1 + drafted, COSTS[drafted])
    assert lengths.rates()[1][0] == pytest.approx(1.0)


def test_a_step_that_had_to_wait_for_the_machine_changes_little() -> None:
    lengths = DraftLength(1)
    run(lengths, 100, COSTS, {0: 1, 1: 2})
    before = lengths.rates()[1][1]
    lengths.measure(1, 1, 2, 500.0)
    assert lengths.rates()[1][1] > 0.9 * before
    assert lengths.choose(1) == 1
