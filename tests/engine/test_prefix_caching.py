"""Prefix caching in the core: who finds keys and values computed for others gets the same text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from preload.engine.core.scheduler import Policy, SchedulingOptions

BEGINNING = [random.Random(5).randrange(97) for _ in range(24)]


def prompts(count: int) -> list[list[int]]:
    """Prompts that begin alike, up to different points."""
    rng = random.Random(count)
    return [BEGINNING[: 3 * i] + [rng.randrange(97) for _ in range(1 + i % 5)] for i in range(count)]


def texts(finished: dict[str, Any]) -> dict[str, list[int]]:
    return {name: entry.token_ids for name, entry in finished.items()}


@pytest.mark.parametrize("num_blocks", [65, 12])
def test_requests_that_begin_alike_give_what_transformers_gives_each(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, num_blocks: int
) -> None:
    core, plain = (
        make_core(tiny, num_blocks=num_blocks, scheduling=SchedulingOptions(prefix_caching=on))
        for on in (True, False)
    )
    for wave in range(3):
        names = [f"{wave}-{i}" for i in range(8)]
        waves = [
            run_core(c, *(make_request(n, p, max_tokens=6) for n, p in zip(names, prompts(8), strict=True)))
            for c in (core, plain)
        ]
        assert texts(waves[0]) == texts(waves[1])
    assert texts(waves[0]) == {n: tiny.greedy(p, 6) for n, p in zip(names, prompts(8), strict=True)}
    assert core.scheduler.prefix_counters.num_hit_tokens > 0
    assert plain.scheduler.prefix_counters.num_hit_tokens == 0


def test_the_first_output_says_how_many_tokens_were_cached(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    core = make_core(tiny)
    first = run_core(core, make_request("first", BEGINNING))["first"]
    again = run_core(core, make_request("again", BEGINNING))["again"]
    assert [o.num_cached_tokens for o in first.outputs] == [0] * 8
    assert [o.num_cached_tokens for o in again.outputs] == [20] + [0] * 7  # of blocks of 4, and not the last token
    assert again.token_ids == first.token_ids


def test_an_answer_is_part_of_what_the_next_turn_finds(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    core = make_core(tiny)
    answer = run_core(core, make_request("turn", [1, 2, 3], max_tokens=10))["turn"].token_ids
    following = [1, 2, 3, *answer, 4]
    got = run_core(core, make_request("next", following))["next"]
    assert got.outputs[0].num_cached_tokens == 12
    assert got.token_ids == tiny.greedy(following, 8)


def test_salts_keep_requests_apart(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    core = make_core(tiny)
    cached = []
    for salt in ("", "a", "b", "a", ""):
        request = make_request("r", BEGINNING)
        request.cache_salt = salt
        cached.append(run_core(core, request)["r"].outputs[0].num_cached_tokens)
    assert cached == [0, 0, 0, 20, 20]


def test_a_request_for_log_probabilities_of_its_prompt_computes_all_of_it(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    core = make_core(tiny)
    run_core(core, make_request("first", BEGINNING))
    got = run_core(core, make_request("r", BEGINNING, prompt_logprobs=0))["r"].outputs[0]
    assert got.num_cached_tokens == 0
    assert len(got.prompt_logprobs) == len(BEGINNING) - 1


def test_a_request_that_loses_its_row_for_a_more_urgent_one_goes_on_where_it_was(
    tiny: Any, make_core: Any, make_request: Any
) -> None:
    core = make_core(tiny, max_num_seqs=2, scheduling=SchedulingOptions(policy=Policy.PRIORITY))
    outputs = []
    for name in ("a", "b"):
        core.add_request(make_request(name, [*BEGINNING[:7], ord(name) - 90], max_tokens=9, repetition_penalty=1.2))
    for step in range(40):
        if step in (3, 5):
            core.add_request(make_request(f"urgent{step}", [step], max_tokens=3, priority=-step))
        outputs += core.step()
    assert not core.has_work
    got = {
        n: [t for o in outputs if o.request_id == n for t in o.token_ids] for n in ("a", "b", "urgent3", "urgent5")
    }
    assert got["urgent3"] == tiny.greedy([3], 3)
    alone = make_core(tiny)
    for name in ("a", "b"):
        alone.add_request(make_request(name, [*BEGINNING[:7], ord(name) - 90], max_tokens=9, repetition_penalty=1.2))
    plain = [o for _ in range(12) for o in alone.step()]
    for name in ("a", "b"):
        assert got[name] == [t for o in plain if o.request_id == name for t in o.token_ids]
    assert core.scheduler.num_preemptions == 0
