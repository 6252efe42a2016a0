"""Grammars in the core: tiny random models that have to speak in a form, whatever happens to them on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from preload.engine.core.grammar import Grammar, GrammarCompiler, Vocabulary, apply_masks
from preload.engine.core.request import FinishReason
from preload.engine.core.structured import FormError, FormKind, StructuredOutput

EOS = 96
# The tiny models have 97 tokens: printable ASCII, a line break, and the end; some longer ones instead of rare signs.
SPELLED = [chr(32 + i) for i in range(95)] + ["\n", "<eos>"]
SPELLED[ord("~") - 32], SPELLED[ord("`") - 32], SPELLED[ord("^") - 32] = '{"', '": ', "true"
VOCABULARY = Vocabulary(tuple(token.encode() for token in SPELLED), frozenset({EOS}), (EOS,))

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "ok"],
    "additionalProperties": False,
}
JSON_FORM = StructuredOutput(FormKind.JSON_SCHEMA, json.dumps(SCHEMA))
WORDS = StructuredOutput(FormKind.REGEX, "(red|green|blue)(, (red|green|blue)){2,4}")


def text_of(token_ids: list[int]) -> str:
    return "".join(SPELLED[i] for i in token_ids if i != EOS)


def check_json(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "ok"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 3
    assert isinstance(value["ok"], bool)


def check_words(text: str) -> None:
    assert re.fullmatch(WORDS.text, text)


CASES: list[tuple[StructuredOutput, Callable[[str], None]]] = [(JSON_FORM, check_json), (WORDS, check_words)]


@pytest.fixture
def make_speaker(tiny: Any, make_core: Any) -> Callable[..., Any]:
    """A core that knows the vocabulary."""

    def make(**changes: Any) -> Any:
        core = make_core(tiny, **changes)
        core.grammars.set_vocabulary(VOCABULARY)
        return core

    return make


def form_request(make_request: Any, name: str, form: StructuredOutput, **changes: Any) -> Any:
    own = {"max_tokens": 62, "stop_token_ids": frozenset({EOS}), "structured_output": form, **changes}
    return make_request(name, [1, 2], **own)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_outputs_have_their_forms_together_and_beside_free_ones(
    tiny: Any, make_speaker: Any, make_request: Any, run_core: Any, temperature: float
) -> None:
    requests = [make_request("free", [5, 6, 7])]
    for seed in range(6):
        form, _ = CASES[seed % 2]
        requests.append(form_request(make_request, str(seed), form, temperature=temperature, seed=seed))
    got = run_core(make_speaker(), *requests)
    assert got["free"].token_ids == tiny.greedy([5, 6, 7], 8)
    for seed in range(6):
        assert got[str(seed)].last.finish_reason is FinishReason.STOP
        assert got[str(seed)].token_ids[-1] == EOS
        CASES[seed % 2][1](text_of(got[str(seed)].token_ids))


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_resumed_output_goes_on_inside_its_form(
    make_speaker: Any, make_request: Any, run_core: Any, cut: int
) -> None:
    params = {"temperature": 1.0, "seed": 7}
    whole = run_core(make_speaker(), form_request(make_request, "r", JSON_FORM, **params))["r"].token_ids
    rest = run_core(make_speaker(), form_request(make_request, "r", JSON_FORM, output_ids=whole[:cut], **params))[
        "r"
    ].token_ids
    assert whole[:cut] + rest == whole


def test_a_preempted_output_goes_on_inside_its_form(make_speaker: Any, make_request: Any, run_core: Any) -> None:
    def requests() -> list[Any]:
        return [form_request(make_request, str(s), JSON_FORM, temperature=1.0, seed=s) for s in range(6)]

    ample = run_core(make_speaker(num_blocks=400), *requests())
    core = make_speaker(num_blocks=18)
    got = run_core(core, *requests())
    assert core.scheduler.num_preemptions > 0
    assert {n: f.token_ids for n, f in got.items()} == {n: f.token_ids for n, f in ample.items()}


def test_min_tokens_ends_nothing_early_and_breaks_no_form(
    make_speaker: Any, make_request: Any, run_core: Any
) -> None:
    form = StructuredOutput(FormKind.REGEX, "abc")
    got = run_core(make_speaker(), form_request(make_request, "r", form, min_tokens=6))["r"]
    assert text_of(got.token_ids) == "abc"
    assert got.last.finish_reason is FinishReason.STOP
    assert len(got.token_ids) == 7


def test_the_end_is_allowed_only_where_the_form_is_complete() -> None:
    compiler = GrammarCompiler(100)
    compiler.set_vocabulary(VOCABULARY)
    grammar = compiler.compile(StructuredOutput(FormKind.REGEX, "ab?")).result()
    allowed = []
    output: list[int] = []
    for character in ("a", "b", ""):
        assert grammar.follow(output) == ""
        logits = torch.randn(3, 100)
        before = logits.clone()
        apply_masks(logits, [(1, grammar)])
        assert torch.equal(logits[::2], before[::2])
        allowed.append(set(logits[1].isfinite().nonzero().flatten().tolist()))
        output.append(SPELLED.index(character) if character else EOS)
    assert allowed == [{ord("a") - 32}, {ord("b") - 32, EOS}, {EOS}]
    assert grammar.follow(output) == ""
    assert grammar.is_complete


def test_a_token_that_leaves_the_form_is_an_error_of_its_request(
    tiny: Any, make_speaker: Any, make_request: Any, run_core: Any
) -> None:
    got = run_core(
        make_speaker(),
        form_request(make_request, "r", WORDS, output_ids=[SPELLED.index("z")]),
        make_request("free", [5, 6, 7]),
    )
    assert got["r"].last.finish_reason is FinishReason.ERROR
    assert "cannot go on in its form" in got["r"].last.error
    assert got["free"].token_ids == tiny.greedy([5, 6, 7], 8)


def test_a_form_that_does_not_compile_is_refused_and_others_go_on(
    tiny: Any, make_speaker: Any, make_request: Any, run_core: Any
) -> None:
    bad = StructuredOutput(FormKind.REGEX, "(a")
    got = run_core(make_speaker(), form_request(make_request, "bad", bad), make_request("free", [5, 6, 7]))
    assert (got["bad"].last.finish_reason, got["bad"].last.refused) == (FinishReason.ERROR, True)
    assert "unclosed group" in got["bad"].last.error
    assert got["free"].token_ids == tiny.greedy([5, 6, 7], 8)


def test_without_a_vocabulary_a_form_is_refused(tiny: Any, make_core: Any, make_request: Any, run_core: Any) -> None:
    got = run_core(make_core(tiny), form_request(make_request, "r", WORDS))["r"]
    assert "vocabulary" in got.last.error


def test_a_request_can_be_aborted_while_its_form_is_compiled(make_speaker: Any, make_request: Any) -> None:
    core = make_speaker()
    core.add_request(form_request(make_request, "a", WORDS))
    core.abort_request("a")
    assert [output.finish_reason for output in core.step()] == [FinishReason.ABORT]
    core.add_request(form_request(make_request, "b", WORDS))
    core.drop_all()
    assert not core.has_work
    assert core.num_requests == 0


def test_two_requests_of_one_form_share_no_state() -> None:
    compiler = GrammarCompiler(97)
    compiler.set_vocabulary(VOCABULARY)
    first, second = (compiler.compile(StructuredOutput(FormKind.REGEX, "ab")).result() for _ in range(2))
    assert first.follow([ord("a") - 32]) == ""
    assert second.follow([ord("b") - 32]) != ""
    assert first.follow([ord("a") - 32, ord("b") - 32]) == ""


def test_another_vocabulary_is_used_for_what_is_compiled_after_it() -> None:
    compiler = GrammarCompiler(97)
    form = StructuredOutput(FormKind.REGEX, "a")

    def allowed(grammar: Grammar) -> list[int]:
        logits = torch.zeros(1, 97)
        apply_masks(logits, [(0, grammar)])
        found: list[int] = logits[0].isfinite().nonzero().flatten().tolist()
        return found

    compiler.set_vocabulary(VOCABULARY)
    assert allowed(compiler.compile(form).result()) == [ord("a") - 32]
    compiler.set_vocabulary(Vocabulary((b"a", b"<eos>"), frozenset({1}), (1,)))
    assert allowed(compiler.compile(form).result()) == [0]
    with pytest.raises(FormError):
        compiler.compile(StructuredOutput(FormKind.REGEX, "(")).result()
