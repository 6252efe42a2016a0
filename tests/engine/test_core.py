"""The engine core in process: batching, preemption, resumption, finish rules, refusals."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from preload.engine.core.request import FinishReason

LENGTH, STOP, ABORT, ERROR = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def test_requests_together_give_what_transformers_gives_each(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    batch = prompts(12)
    got = run_core(make_core(tiny, num_blocks=200), *(make_request(str(i), p) for i, p in enumerate(batch)))
    for i, prompt in enumerate(batch):
        assert got[str(i)].token_ids == tiny.greedy(prompt, 8)
        assert got[str(i)].last.finish_reason is LENGTH


def test_preemption_under_a_tiny_cache_changes_no_text(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    def requests() -> list[Any]:
        return [
            make_request(str(i), p, max_tokens=20, temperature=(i % 2) * 0.8, seed=i, frequency_penalty=i % 3)
            for i, p in enumerate(prompts(10, seed=3))
        ]

    ample = run_core(make_core(tiny, num_blocks=400), *requests())
    core = make_core(tiny, num_blocks=17)
    got = run_core(core, *requests())
    assert core.scheduler.num_preemptions > 0
    assert {n: f.token_ids for n, f in got.items()} == {n: f.token_ids for n, f in ample.items()}
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_usable


@pytest.mark.parametrize("cut", [1, 5, 11])
@pytest.mark.parametrize("name", ["greedy", "seeded", "penalized", "barred"])
def test_a_resumed_request_goes_on_as_if_uninterrupted(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, name: str, cut: int
) -> None:
    sampling: dict[str, dict[str, Any]] = {
        "greedy": {},
        "seeded": {"temperature": 1.0, "seed": 1 << 63, "top_p": 0.95},
        "penalized": {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        "barred": {"temperature": 1.5, "seed": 4, "min_tokens": 9, "stop_token_ids": frozenset(range(60))},
    }
    prompt, params = prompts(1, seed=cut)[0], {**sampling[name], "max_tokens": 12, "logprobs": True}
    whole = run_core(make_core(tiny), make_request("r", prompt, **params))["r"]
    if len(whole.token_ids) <= cut:
        cut = 1
    resumed = run_core(make_core(tiny), make_request("r", prompt, output_ids=whole.token_ids[:cut], **params))["r"]
    assert resumed.token_ids == whole.token_ids[cut:]
    assert resumed.last.finish_reason is whole.last.finish_reason
    got = [output.logprobs[0].logprob for output in resumed.outputs]
    assert got == pytest.approx([o.logprobs[0].logprob for o in whole.outputs[cut:]], abs=1e-4)


def test_a_resumed_request_that_had_ended_ends_at_once(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    got = run_core(
        make_core(tiny),
        make_request("length", [1, 2], max_tokens=2, output_ids=[3, 4]),
        make_request("stop", [1, 2], max_tokens=9, output_ids=[3, 4], stop_token_ids=frozenset({4})),
    )
    assert [(got[n].token_ids, got[n].last.finish_reason) for n in ("length", "stop")] == [([], LENGTH), ([], STOP)]


def test_a_stop_id_ends_a_request_and_is_its_last_token(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    prompt = [5, 6, 7]
    plain = tiny.greedy(prompt, 8)
    stop = plain[3]
    first = plain.index(stop)
    got = run_core(make_core(tiny), make_request("r", prompt, stop_token_ids=frozenset({stop})))["r"]
    assert got.token_ids == plain[: first + 1]
    assert got.last.finish_reason is STOP


def test_min_tokens_bars_stop_ids_until_then(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    everything = frozenset(range(90))
    got = run_core(
        make_core(tiny), make_request("r", [5, 6], min_tokens=4, max_tokens=30, stop_token_ids=everything)
    )["r"]
    assert all(token not in everything for token in got.token_ids[:4])
    assert got.last.finish_reason is STOP
    assert got.token_ids[-1] in everything


def test_the_model_length_ends_a_request(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    got = run_core(make_core(tiny), make_request("r", [1] * 60, max_tokens=50))["r"]
    assert len(got.token_ids) == 4
    assert got.last.finish_reason is LENGTH


def test_an_aborted_request_ends_and_the_others_go_on(tiny: Any, make_core: Any, make_request: Any) -> None:
    core = make_core(tiny)
    for name in ("a", "b"):
        core.add_request(make_request(name, [1, 2, 3], max_tokens=6))
    outputs = core.step()
    core.abort_request("a")
    core.abort_request("unknown")
    while core.has_work:
        outputs += core.step()
    assert [o.finish_reason for o in outputs if o.request_id == "a"] == [FinishReason.NONE, ABORT]
    tokens = [t for o in outputs if o.request_id == "b" for t in o.token_ids]
    assert tokens == tiny.greedy([1, 2, 3], 6)
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_usable


def test_a_freed_row_serves_its_next_owner_without_a_trace(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    core = make_core(tiny, max_num_seqs=1)
    core.add_request(
        make_request("first", [1, 2, 3, 4], max_tokens=9, logit_bias={9: 50.0}, repetition_penalty=2.0, logprobs=True)
    )
    core.step()
    core.step()
    core.abort_request("first")
    got = run_core(core, make_request("second", [8, 9]))["second"]
    assert got.token_ids == tiny.greedy([8, 9], 8)
    assert got.last.logprobs == []


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -1.0}, "temperature is -1.0"),
    "nan": ({"temperature": math.nan}, "temperature is nan"),
    "top_p": ({"top_p": 1.5}, "top_p is 1.5"),
    "min_p": ({"min_p": -0.1}, "min_p is -0.1"),
    "repetition": ({"repetition_penalty": -2.0}, "repetition_penalty is -2.0"),
    "bias_id": ({"logit_bias": {97: 1.0}}, "logit_bias has the token id 97; the vocabulary ends at 96"),
    "bias_value": ({"logit_bias": {3: math.inf}}, "logit_bias of token 3 is inf"),
    "bias_size": ({"logit_bias": dict.fromkeys(range(2000), 0.0)}, "logit_bias has 2000 entries"),
    "stop_id": ({"stop_token_ids": frozenset({1000})}, "stop_token_ids has the token id 1000"),
    "top_logprobs": ({"logprobs": True, "num_top_logprobs": 21}, "num_top_logprobs is 21"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens is 0"),
    "overflow": ({"repetition_penalty": 1e-45}, "no finite maximum"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_fail_their_request_and_no_other(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, name: str
) -> None:
    params, message = BAD[name]
    got = run_core(
        make_core(tiny), make_request("good", [1, 2, 3]), make_request("bad", list(range(97))[:40], **params)
    )
    assert got["bad"].last.finish_reason is ERROR
    assert message in got["bad"].last.error
    assert got["good"].token_ids == tiny.greedy([1, 2, 3], 8)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt has no tokens"),
        ([97], "the prompt has the token id 97"),
        ([1] * 64, "the prompt has 64 tokens"),
        ([1] * 5000, "the prompt has 5000 tokens"),
    ],
)
def test_bad_prompts_are_refused(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, prompt: list[int], message: str
) -> None:
    got = run_core(make_core(tiny), make_request("r", prompt))["r"]
    assert got.last.finish_reason is ERROR
    assert message in got.last.error


def test_two_requests_of_one_id_both_end(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    got = run_core(make_core(tiny), make_request("r", [1, 2]), make_request("r", [3]))["r"]
    assert got.token_ids == []
    assert "in use" in got.last.error


def test_a_sequence_larger_than_the_cache_is_refused_with_the_numbers(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    got = run_core(make_core(tiny, num_blocks=5), make_request("r", [1] * 15, max_tokens=20))["r"]
    assert got.last.finish_reason is ERROR
    assert "9 KV blocks of 4; the cache has 4" in got.last.error


def test_a_warm_up_between_steps_changes_nothing(tiny: Any, make_core: Any, make_request: Any) -> None:
    core = make_core(tiny)
    core.add_request(make_request("r", [4, 5, 6]))
    tokens = []
    while core.has_work:
        core.warm_up(11)
        tokens += [t for o in core.step() for t in o.token_ids]
    assert tokens == tiny.greedy([4, 5, 6], 8)


def test_dropped_requests_leave_nothing(tiny: Any, make_core: Any, make_request: Any) -> None:
    core = make_core(tiny)
    for i, prompt in enumerate(prompts(12)):
        core.add_request(make_request(str(i), prompt))
    core.add_request(make_request("bad", []))
    core.step()
    core.drop_all()
    assert not core.has_work
    assert core.num_requests == 0
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_usable


def test_broken_weights_fail_requests_and_not_the_core(
    tiny_model: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    model = tiny_model()
    model.tensors["model.norm.weight"] = torch.full((32,), math.nan)
    got = run_core(make_core(model), make_request("r", [1, 2]))["r"]
    assert got.last.finish_reason is ERROR
    assert "no finite maximum" in got.last.error
