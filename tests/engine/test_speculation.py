"""Speculation in the core: what requests answer is what they answer without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preload.engine.core.core import EngineCore
from preload.engine.core.request import FinishReason, Request
from preload.engine.core.scheduler import Schedule
from preload.engine.core.speculation.build import speculate
from preload.engine.core.speculation.drafter import Computed, Draft, Task
from preload.engine.core.speculation.speculator import Speculator
from preload.engine.core.speculation.verifier import Verifier
from preload.engine.errors import RequestError

VOCAB = 97


class KnowingDrafter:
    """Drafts what is said to come, but wrong tokens at random; sometimes nothing, or −1."""

    keeps_up = never_rests = False
    num_lookahead_tokens = bytes_per_block = 0

    def __init__(self, answers: dict[str, list[int]], seed: int = 0, error_rate: float = 0.3) -> None:
        self._answers = answers
        self._random = random.Random(seed)
        self._error_rate = error_rate

    def observe(self, plan: Schedule) -> None: ...

    def forget(self, request: Request) -> None: ...

    def allocate_kv(self, num_blocks: int) -> None: ...

    def warm_up(self) -> None: ...

    def describe(self) -> str:
        return "knows"

    def propose(self, tasks: Sequence[Task], computed: Computed) -> list[Draft]:
        return [Draft(self._propose(task)) for task in tasks]

    def _propose(self, task: Task) -> list[int]:
        done = len(task.request.output_ids)
        draft = self._answers[task.request.request_id][done : done + task.num_wanted]
        wrong = [-1 if self._random.random() < 0.2 else self._random.randrange(VOCAB) for _ in draft]
        return [w if self._random.random() < self._error_rate else d for d, w in zip(draft, wrong, strict=True)]


def knowing(core: EngineCore, answers: dict[str, list[int]], **settings: Any) -> EngineCore:
    """The core with a drafter that knows the answers."""
    verifier = Verifier(core.sampler, VOCAB, settings.pop("verification", "coupled"))
    core.speculate(
        Speculator(
            KnowingDrafter(answers, **settings), verifier, core.sampler,
            num_draft_tokens=5, max_model_len=core.max_model_len, adaptive=False,
        )
    )  # fmt: skip
    return core


def requests(make_request: Any, count: int = 6, which: int = 0, **sampling: Any) -> list[Request]:
    """Prompts that repeat themselves, so that n-grams find something."""
    rng = random.Random(which)
    made = []
    for i in range(count):
        phrase = [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 9))]
        prompt = (phrase * 4)[: rng.randrange(4, 26)]
        made.append(make_request(str(i), prompt, **{"max_tokens": 24, **sampling}))
    return made


def tokens(finished: dict[str, Any]) -> dict[str, list[int]]:
    return {name: entry.token_ids for name, entry in finished.items()}


SAMPLED = {"temperature": 0.9, "seed": 11, "top_p": 0.9, "top_k": 30}


@pytest.fixture
def other(tiny_model: Any) -> Any:
    """A smaller model with the same vocabulary, of which nothing it says comes true."""
    return tiny_model(seed=3, num_hidden_layers=1)


@pytest.fixture
def similar(tiny: Any, tiny_model: Any) -> Any:
    """The tiny model with disturbed weights: much of what it says comes true."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.tensors.items():
        model.tensors[name] = tensor * (1 + 0.03 * torch.randn(tensor.shape, generator=generator))
    return model


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["ngram", "other", "similar", "itself"])
@pytest.mark.parametrize(
    "limits",
    [(200, 32), (17, 32), (200, 9), (17, 9)],
    ids=["ample", "preempting", "chunked", "preempting-and-chunked"],
)
def test_answers_are_those_without_speculation(
    tiny: Any, other: Any, similar: Any, make_core: Any, make_request: Any, run_core: Any,
    method: str, limits: tuple[int, int], sampling: dict[str, Any],
) -> None:  # fmt: skip
    plain = tokens(run_core(make_core(tiny, num_blocks=200), *requests(make_request, **sampling)))
    num_blocks, token_budget = limits
    core = make_core(tiny, num_blocks=num_blocks, token_budget=token_budget)
    draft = {"other": other, "similar": similar, "itself": tiny}.get(method)
    chosen = "ngram" if draft is None else "draft"
    speculator = speculate(core, chosen, num_draft_tokens=4, draft=draft.decoder() if draft else None, adaptive=False)
    for request in requests(make_request, **sampling):
        core.add_request(request)
    got: dict[str, list[int]] = {name: [] for name in plain}
    while core.has_work:
        for output in core.step():
            got[output.request_id] += output.token_ids
        core.check_invariants()
    assert got == plain
    if num_blocks < 100:
        assert core.scheduler.num_preemptions > 0
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_usable
    drafted, accepted = speculator.acceptance.num_drafted, speculator.acceptance.num_accepted
    if method != "ngram":
        assert sum(drafted) > 20
    elif not sampling:
        assert sum(drafted) > 10
    if method == "similar":
        assert 0 < sum(accepted) < sum(drafted)
    if method == "itself":
        assert accepted == drafted


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), error_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]), sampled=st.booleans())
def test_any_draft_leaves_the_answer_as_it_is(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, seed: int, error_rate: float, sampled: bool
) -> None:
    asked: Callable[[], list[Request]] = lambda: requests(make_request, 3, seed, **(SAMPLED if sampled else {}))  # noqa: E731
    plain = run_core(make_core(tiny), *asked())
    core = knowing(make_core(tiny, num_blocks=24), tokens(plain), seed=seed, error_rate=error_rate)
    got = run_core(core, *asked())
    assert tokens(got) == tokens(plain)
    if error_rate == 0:
        assert core.counters.num_steps < 3 * 24 / 2
        assert core.speculator is not None
        assert core.speculator.acceptance.num_accepted == core.speculator.acceptance.num_drafted


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cut", [1, 2, 7, 13])
def test_another_core_goes_on_where_one_died(
    tiny: Any, similar: Any, make_core: Any, make_request: Any, run_core: Any, cut: int, sampling: dict[str, Any]
) -> None:
    def speculating() -> EngineCore:
        core: EngineCore = make_core(tiny)
        speculate(core, "draft", num_draft_tokens=3, draft=similar.decoder(), adaptive=False)
        return core

    prompt = [5, 6, 7, 8, 5, 6]
    plain = run_core(make_core(tiny), make_request("r", prompt, max_tokens=20, **sampling))["r"].token_ids
    resumed = make_request("r", prompt, max_tokens=20, output_ids=plain[:cut], **sampling)
    assert run_core(speculating(), resumed)["r"].token_ids == plain[cut:]


def test_the_end_may_lie_within_a_draft(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    prompt = [1, 2, 3, 4]
    answer = run_core(make_core(tiny), make_request("r", prompt, max_tokens=40))["r"].token_ids
    for stop in sorted(set(answer[:12])):
        for ending in ({"stop_token_ids": frozenset({stop})}, {"max_tokens": 1 + answer.index(stop)}):
            params = {"max_tokens": 40, **ending}
            plain = run_core(make_core(tiny), make_request("r", prompt, **params))["r"]
            core = knowing(make_core(tiny), {"r": answer}, error_rate=0.0)
            got = run_core(core, make_request("r", prompt, **params))["r"]
            assert got.token_ids == plain.token_ids
            assert got.last.finish_reason is plain.last.finish_reason
            assert core.counters.num_output_tokens == len(got.token_ids)
            assert core.scheduler.pool.num_free == core.scheduler.pool.num_usable


def test_the_models_length_bounds_drafts(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    answer = run_core(make_core(tiny), make_request("r", [1] * 50, max_tokens=60))["r"]
    assert answer.last.finish_reason is FinishReason.LENGTH
    core = knowing(make_core(tiny), {"r": [*answer.token_ids, *range(20)]}, error_rate=0.0)
    got = run_core(core, make_request("r", [1] * 50, max_tokens=60))["r"]
    assert got.token_ids == answer.token_ids
    assert len(got.token_ids) == 14


def test_log_probabilities_come_with_every_token(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    params = {"max_tokens": 20, "logprobs": True, "num_top_logprobs": 3, "temperature": 0.8, "seed": 4}
    plain = run_core(make_core(tiny), make_request("r", [7, 8, 9], **params))["r"]
    core = knowing(make_core(tiny), {"r": plain.token_ids}, error_rate=0.2)
    got = run_core(core, make_request("r", [7, 8, 9], **params))["r"]
    assert any(len(output.token_ids) > 1 for output in got.outputs)
    assert all(len(output.logprobs) == len(output.token_ids) for output in got.outputs)
    expected = [entry for output in plain.outputs for entry in output.logprobs]
    found = [entry for output in got.outputs for entry in output.logprobs]
    assert [e.top_ids for e in found] == [e.top_ids for e in expected]
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in expected], abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 4.0, 9: -3.0}},
        {"min_tokens": 30, "stop_token_ids": frozenset(range(50))},
    ],
    ids=["frequency", "repetition", "bias", "bar"],
)
def test_requests_with_logits_of_their_own_are_not_speculated_and_right(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, params: dict[str, Any]
) -> None:
    asked = {"max_tokens": 30, "temperature": 0.5, "seed": 2, **params}
    plain = run_core(make_core(tiny), make_request("r", [4, 5], **asked))
    beside = run_core(make_core(tiny), make_request("s", [4, 5], max_tokens=30))
    core = knowing(make_core(tiny), tokens(plain | beside), error_rate=0.0)
    got = run_core(core, make_request("r", [4, 5], **asked), make_request("s", [4, 5], max_tokens=30))
    assert tokens(got) == tokens(plain | beside)
    assert sum(output.num_draft_tokens for output in got["r"].outputs) == 0
    assert sum(output.num_accepted_tokens for output in got["s"].outputs) > 20


def test_outputs_tell_what_was_drafted_and_kept(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    answer = tokens(run_core(make_core(tiny), make_request("r", [3, 1], max_tokens=21)))
    core = knowing(make_core(tiny), answer, error_rate=0.0)
    outputs = run_core(core, make_request("r", [3, 1], max_tokens=21))["r"].outputs
    assert [len(output.token_ids) for output in outputs] == [1, 6, 6, 6, 2]
    assert [output.num_draft_tokens for output in outputs] == [0, 5, 5, 5, 1]
    assert [output.num_accepted_tokens for output in outputs] == [0, 5, 5, 5, 1]
    assert core.speculator is not None
    assert core.speculator.acceptance.num_drafted == [4, 3, 3, 3, 3]


@pytest.mark.parametrize("verification", ["sampled", "block"])
def test_other_verifications_answer_greedily_alike_and_repeat_themselves(
    tiny: Any, similar: Any, make_core: Any, make_request: Any, run_core: Any, verification: str
) -> None:
    def answers(**sampling: Any) -> dict[str, list[int]]:
        core = make_core(tiny, num_blocks=200)
        speculate(
            core, "draft", num_draft_tokens=3, draft=similar.decoder(), verification=verification, adaptive=False
        )
        return tokens(run_core(core, *requests(make_request, **sampling)))

    assert answers() == tokens(run_core(make_core(tiny, num_blocks=200), *requests(make_request)))
    drawn = answers(**SAMPLED)
    assert drawn == answers(**SAMPLED)
    assert all(len(ids) == 24 for ids in drawn.values())


def test_a_draft_models_broken_weights_cost_drafts_and_nothing_else(
    tiny: Any, tiny_model: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    broken = tiny_model(seed=3)
    broken.tensors["model.norm.weight"] = torch.full((32,), float("nan"))
    plain = run_core(make_core(tiny, num_blocks=200), *requests(make_request))
    for verification in ("coupled", "sampled", "block"):
        core = make_core(tiny, num_blocks=200)
        speculate(core, "draft", draft=broken.decoder(), verification=verification, adaptive=False)
        drawn = requests(make_request, **SAMPLED)
        for request in drawn:
            request.request_id += "-drawn"
        got = run_core(core, *requests(make_request), *drawn)
        assert {name: ids for name, ids in tokens(got).items() if "-" not in name} == tokens(plain)
        assert all(entry.last.finish_reason is FinishReason.LENGTH for entry in got.values())


def test_a_draft_model_without_enough_memory_costs_drafts_and_nothing_else(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, draft = make_core(tiny, num_blocks=200), tiny.decoder()
    speculator = speculate(core, "draft", num_draft_tokens=3, draft=draft, adaptive=False)
    forward, calls = draft.forward, iter(range(1000))

    def seldom_fails(*args: Any) -> Any:
        if next(calls) % 5 == 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return forward(*args)

    monkeypatch.setattr(draft, "forward", seldom_fails)
    got = run_core(core, *requests(make_request))
    assert tokens(got) == tokens(run_core(make_core(tiny, num_blocks=200), *requests(make_request)))
    assert next(calls) > 10
    assert speculator.acceptance.num_accepted == speculator.acceptance.num_drafted


def test_a_draft_model_with_another_vocabulary_is_refused(tiny: Any, tiny_model: Any, make_core: Any) -> None:
    with pytest.raises(RequestError, match="vocabulary of 50 tokens and the model one of 97"):
        speculate(make_core(tiny), "draft", draft=tiny_model(vocab_size=50).decoder())


def test_a_draft_model_that_rested_is_fed_what_it_missed(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    core = make_core(tiny, num_blocks=200)
    speculator = speculate(core, "draft", num_draft_tokens=3, draft=tiny.decoder(), adaptive=False)
    core.add_request(make_request("r", [9, 8, 7] * 3, max_tokens=40))
    got: list[int] = []
    for step in range(100):
        speculator._num_draft_tokens = 0 if 3 <= step < 12 else 3
        if not core.has_work:
            break
        got += [token for output in core.step() for token in output.token_ids]
    assert got == tiny.greedy([9, 8, 7] * 3, 40)
    assert speculator.acceptance.num_accepted == speculator.acceptance.num_drafted


def test_a_shared_prefix_is_shared_by_the_draft_model_too(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any
) -> None:
    core = make_core(tiny, num_blocks=200)
    speculator = speculate(core, "draft", num_draft_tokens=3, draft=tiny.decoder(), adaptive=False)
    prompt = list(range(30))
    run_core(core, make_request("first", prompt, max_tokens=6))
    got = run_core(core, make_request("second", [*prompt, 4, 5], max_tokens=20))["second"]
    assert got.token_ids == tiny.greedy([*prompt, 4, 5], 20)
    assert core.scheduler.prefix_counters.num_hit_tokens > 0
    assert speculator.acceptance.num_accepted == speculator.acceptance.num_drafted


def test_a_warm_up_between_steps_changes_nothing(tiny: Any, similar: Any, make_core: Any, make_request: Any) -> None:
    core = make_core(tiny)
    speculate(core, "draft", num_draft_tokens=3, draft=similar.decoder(), adaptive=False)
    core.add_request(make_request("r", [4, 5, 6], max_tokens=12))
    got = []
    while core.has_work:
        core.warm_up(5)
        got += [token for output in core.step() for token in output.token_ids]
    assert got == tiny.greedy([4, 5, 6], 12)
