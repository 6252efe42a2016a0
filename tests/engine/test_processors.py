"""Custom logits processors: loading, what they are told, and what their faults cost."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from preload.engine.core import processors as processors_module
from preload.engine.core.processors import LogitsContext, load_processors
from preload.engine.core.request import FinishReason
from preload.engine.errors import RequestError

VOCAB = 97


class Only:
    """Leaves one token; fails when it is asked for token 13, by raising, or 14, by returning nonsense."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64)
        self.staged: dict[int, int] = {}
        self.contexts: list[LogitsContext] = []

    def validate_params(self, params: Any) -> None:
        if not isinstance(params, dict) or not isinstance(params.get("token"), int):
            raise ValueError("give a token")

    def add_request(self, row: int, params: Any) -> bool:
        if params is None:
            return False
        if params["token"] == 15:
            raise RuntimeError("no row for 15")
        self.staged[row] = params["token"]
        return True

    def apply_staged_writes(self) -> None:
        for row, token in self.staged.items():
            self.tokens[row] = token
        self.staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> Any:
        self.contexts.append(ctx)
        tokens = self.tokens[ctx.expanded_idx_mapping]
        logits.fill_(-100.0)
        if bool((tokens == 13).any()):
            raise RuntimeError("unlucky")
        if bool((tokens == 14).any()):
            return logits[:, :-1]
        return logits.scatter_(1, tokens[:, None], 100.0)


class NoApply:
    def __init__(self, max_num_seqs: int, vocab_size: int) -> None: ...
    def validate_params(self, params: Any) -> None: ...
    def add_request(self, row: int, params: Any) -> bool:
        return False

    def apply_staged_writes(self) -> None: ...


class NoArguments(Only):
    def __init__(self) -> None: ...


@pytest.fixture(autouse=True)
def module() -> Iterator[None]:
    module = types.ModuleType("some_processors")
    module.Only, module.NoApply, module.NoArguments = Only, NoApply, NoArguments  # type: ignore[attr-defined]
    module.a_function = len  # type: ignore[attr-defined]
    sys.modules["some_processors"] = module
    yield
    del sys.modules["some_processors"]


def test_a_processor_is_loaded_by_its_name_and_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("only", "some_processors:Only", processors_module.ENTRY_POINT_GROUP)
    monkeypatch.setattr(processors_module.importlib.metadata, "entry_points", lambda group: [entry])
    loaded = load_processors(["some_processors:Only"], 4, VOCAB)
    assert {name: type(processor) for name, processor in loaded.items()} == {"Only": Only, "only": Only}


@pytest.mark.parametrize(
    ("qualname", "message"),
    [
        ("some_processors:NoApply", "has no method 'apply'"),
        ("some_processors:Missing", "has no 'Missing'"),
        ("missing_module:Only", "missing_module"),
        ("some_processors", "package.module:Class"),
        ("some_processors:a_function", "is no class"),
        ("some_processors:NoArguments", "max_num_seqs"),
    ],
)
def test_what_is_no_processor_is_refused_at_load(qualname: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        load_processors([qualname], 4, VOCAB)
    assert message in caught.value.message


def test_two_processors_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("other_processors")
    other.Only = type("Only", (Only,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "other_processors", other)
    with pytest.raises(RequestError, match="two logits processors with the name 'Only'"):
        load_processors(["some_processors:Only", "other_processors:Only"], 4, VOCAB)


@pytest.fixture
def only() -> Only:
    return Only(max_num_seqs=8, vocab_size=VOCAB)


def test_a_processor_changes_those_that_ask_and_no_other(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, only: Only
) -> None:
    got = run_core(
        make_core(tiny, processors={"Only": only}),
        make_request("free", [5, 6, 7]),
        make_request("a", [1, 2, 3], max_tokens=3, logits_processors={"Only": {"token": 40}}),
        make_request("b", [1, 2], max_tokens=4, temperature=1.0, logits_processors={"Only": {"token": 41}}),
    )
    assert got["free"].token_ids == tiny.greedy([5, 6, 7], 8)
    assert got["a"].token_ids == [40] * 3
    assert got["b"].token_ids == [41] * 4


def test_a_processor_is_told_whose_logits_it_has(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, only: Only
) -> None:
    core = make_core(tiny, processors={"Only": only})
    run_core(core, make_request("a", [9, 8, 7], max_tokens=3, logits_processors={"Only": {"token": 40}}))
    told = [(int(c.positions), int(c.input_ids), int(c.expanded_local_pos)) for c in only.contexts]
    assert told == [(2, 7, 0), (3, 40, 0), (4, 40, 0)]
    assert all(torch.equal(c.idx_mapping, c.expanded_idx_mapping) for c in only.contexts)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"Other": {}}, "no logits processor 'Other' here (Only)"),
        ({"Only": {"token": "x"}}, "'Only' refuses its parameters: give a token"),
        ({"Only": None}, "'Only' refuses its parameters"),
    ],
)
def test_a_wrong_name_and_bad_parameters_are_refused_at_admission(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, only: Only, asked: dict[str, Any], message: str
) -> None:
    core = make_core(tiny, processors={"Only": only})
    got = run_core(core, make_request("r", [1, 2], logits_processors=asked), make_request("free", [5, 6, 7]))
    assert (got["r"].last.refused, got["r"].last.param) == (True, "logits_processors")
    assert message in got["r"].last.error
    assert got["free"].token_ids == tiny.greedy([5, 6, 7], 8)


@pytest.mark.parametrize(("token", "message"), [(13, "unlucky"), (14, "apply returned"), (15, "no row for 15")])
def test_a_processor_that_fails_costs_the_requests_it_fails_on(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, only: Only, token: int, message: str
) -> None:
    core = make_core(tiny, processors={"Only": only})
    got = run_core(
        core,
        make_request("a", [1, 2, 3], max_tokens=3, logits_processors={"Only": {"token": 40}}),
        make_request("bad", [1, 2, 3], max_tokens=3, logits_processors={"Only": {"token": token}}),
        make_request("free", [5, 6, 7]),
    )
    assert got["bad"].last.finish_reason is FinishReason.ERROR
    assert message in got["bad"].last.error
    assert not got["bad"].last.refused
    assert got["a"].token_ids == [40] * 3
    assert got["free"].token_ids == tiny.greedy([5, 6, 7], 8)


def test_a_freed_row_has_no_trace_of_its_last_owner_s_processor(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, only: Only
) -> None:
    core = make_core(tiny, processors={"Only": only}, max_num_seqs=1)
    run_core(core, make_request("a", [1, 2, 3], max_tokens=3, logits_processors={"Only": {"token": 40}}))
    assert run_core(core, make_request("free", [5, 6, 7]))["free"].token_ids == tiny.greedy([5, 6, 7], 8)


def test_preemption_keeps_what_a_processor_does(
    tiny: Any, make_core: Any, make_request: Any, run_core: Any, only: Only
) -> None:
    core = make_core(tiny, num_blocks=17, processors={"Only": only})
    asked = [
        make_request(str(i), [i] * 12, max_tokens=20, logits_processors={"Only": {"token": 40 + i}}) for i in range(6)
    ]
    got = run_core(core, *asked)
    assert core.scheduler.num_preemptions > 0
    assert all(got[str(i)].token_ids == [40 + i] * 20 for i in range(6))
