"""Log-probabilities of prompts, against a computation without a cache."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest


def expected(model: Any, prompt: list[int]) -> list[list[float]]:
    rows: list[list[float]] = model.logits(prompt)[:-1].double().log_softmax(dim=-1).tolist()
    return rows


def check(model: Any, prompt: list[int], got: list[Any], num_top: int) -> None:
    rows = expected(model, prompt)
    assert len(got) == len(prompt) - 1
    for row, token, entry in zip(rows, prompt[1:], got, strict=True):
        order = sorted(range(len(row)), key=lambda i: -row[i])
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert entry.rank == 1 + order.index(token)
        assert entry.top_ids == order[:num_top]
        assert entry.top_logprobs == pytest.approx([row[i] for i in order[:num_top]], abs=1e-4)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(97) for _ in range(rng.randrange(2, 45))] for _ in range(count)]


@pytest.mark.parametrize("token_budget", [8, 32, 512])
def test_prompt_logprobs_are_complete_in_any_chunks_and_beside_other_requests(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, token_budget: int
) -> None:
    batch = prompts(7)
    requests = [
        make_request(str(i), p, max_tokens=3, prompt_logprobs=i if i % 2 == 0 else None) for i, p in enumerate(batch)
    ]
    got = run_core(make_core(tiny, num_blocks=200, token_budget=token_budget), *requests)
    for i, prompt in enumerate(batch):
        outputs = got[str(i)].outputs
        assert got[str(i)].token_ids == tiny.greedy(prompt, 3)
        assert all(not output.prompt_logprobs for output in outputs[1:])
        if i % 2 == 0:
            check(tiny, prompt, outputs[0].prompt_logprobs, i)
        else:
            assert not outputs[0].prompt_logprobs


def test_a_prompt_that_is_cached_is_computed_all_the_same(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    prompt = prompts(1)[0] * 2
    prompt = prompt[:40]
    core = make_core(tiny, num_blocks=200)
    run_core(core, make_request("first", prompt, max_tokens=2))
    got = run_core(core, make_request("second", prompt, max_tokens=2, prompt_logprobs=2))["second"]
    check(tiny, prompt, got.outputs[0].prompt_logprobs, 2)


def test_preemption_leaves_prompt_logprobs_as_they_are(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    batch = prompts(10)
    core = make_core(tiny, num_blocks=17, token_budget=8)
    got = run_core(core, *(make_request(str(i), p, max_tokens=18, prompt_logprobs=1) for i, p in enumerate(batch)))
    assert core.scheduler.num_preemptions > 0
    for i, prompt in enumerate(batch):
        check(tiny, prompt, got[str(i)].outputs[0].prompt_logprobs, 1)


def test_prompt_logprobs_are_raw(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    prompt = prompts(1)[0]
    changed = {"logit_bias": {3: 50.0}, "repetition_penalty": 2.0, "temperature": 0.3, "top_k": 2}
    got = run_core(make_core(tiny), make_request("r", prompt, max_tokens=2, prompt_logprobs=3, **changed))["r"]
    check(tiny, prompt, got.outputs[0].prompt_logprobs, 3)


def test_a_continued_request_does_not_give_them_again(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    got = run_core(make_core(tiny), make_request("r", [1, 2, 3], output_ids=[4], prompt_logprobs=1, max_tokens=4))[
        "r"
    ]
    assert all(not output.prompt_logprobs for output in got.outputs)


def test_a_prompt_of_one_token_has_none(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    got = run_core(make_core(tiny), make_request("r", [1], prompt_logprobs=1, logprobs=True))["r"]
    assert got.outputs[0].prompt_logprobs == []
    assert all(math.isfinite(output.logprobs[0].logprob) for output in got.outputs)
