"""Tool calls: forms that make them, and the reading of answers in those forms, however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from preload.engine.core.grammar import GrammarCompiler, Vocabulary
from preload.engine.core.structured import FormKind, StructuredOutput
from preload.engine.frontend.fields import Fields
from preload.engine.frontend.tool_calls import ToolCallScanner
from preload.engine.frontend.tools import ToolChoice, Tools, calls_grammar, parse_tools

INTEGER_X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
SCHEMAS: dict[str, Any] = {"f": {**INTEGER_X, "additionalProperties": False}, "g": {"type": "object"}}
REQUIRED = '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"a": ["}\\"]", {}]}}]'
MARKED = (
    'Well, <tool is near. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {"a": ["}\\"]", {}]}}\n</tool_call> Done <tool'
)
CALLS = [("f", '{"x": 1}'), ("g", '{"a": ["}\\"]", {}]}')]
VOCABULARY = Vocabulary((*(bytes([i]) for i in range(256)), b"<eos>"), frozenset({256}), (256,))


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text has the form; False also if only something longer has."""
    compiler = GrammarCompiler(257)
    compiler.set_vocabulary(VOCABULARY)
    place = compiler.compile(StructuredOutput(FormKind.GRAMMAR, grammar)).result()
    return not place.follow(text.encode()) and bool(place.matcher.is_accepting())


@pytest.mark.parametrize(
    ("choice", "several", "text", "is_accepted"),
    [
        (ToolChoice.REQUIRED, True, REQUIRED, True),
        (ToolChoice.REQUIRED, False, REQUIRED, False),
        (ToolChoice.REQUIRED, False, '[{"name": "f", "arguments": {"x": 1}}]', True),
        (ToolChoice.REQUIRED, True, "[]", False),
        (ToolChoice.REQUIRED, True, '[{"name": "f", "arguments": {"x": "1"}}]', False),
        (ToolChoice.REQUIRED, True, '[{"name": "h", "arguments": {}}]', False),
        (ToolChoice.AUTO, True, MARKED, True),
        (ToolChoice.AUTO, True, "only text", True),
        (ToolChoice.AUTO, True, '<tool_call>\n{"name": "h"', False),
        (ToolChoice.AUTO, True, '<tool_call>\n{"name": "f", "arguments": {"y"', False),
    ],
)
def test_forms_of_calls(choice: ToolChoice, several: bool, text: str, is_accepted: bool) -> None:
    assert accepts(calls_grammar(choice, SCHEMAS, several=several), text) is is_accepted


def test_the_form_of_a_named_function_is_its_arguments() -> None:
    grammar = calls_grammar(ToolChoice.NAMED, {"f": SCHEMAS["f"]}, several=True)
    assert accepts(grammar, '{"x": -5}')
    assert not accepts(grammar, '{"x": -5.5}')


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("tools", "text", "beside", "calls"),
    [
        (Tools(choice=ToolChoice.REQUIRED), REQUIRED, "", CALLS),
        (Tools(choice=ToolChoice.AUTO), MARKED, "Well, <tool is near. \n Done <tool", CALLS),
        (Tools(choice=ToolChoice.AUTO), "Nothing <tool_call", "Nothing <tool_call", []),
        (Tools(choice=ToolChoice.AUTO), "It is <tool_call>, no", "It is <tool_call>, no", []),
        (Tools(choice=ToolChoice.NAMED, named="f"), '{"x": 1}', "", CALLS[:1]),
        (Tools(choice=ToolChoice.REQUIRED), REQUIRED[:60], "", [CALLS[0], ("g", "")][:1]),
    ],
)
def test_calls_are_read_wherever_the_text_is_cut(
    tools: Tools, text: str, beside: str, calls: list[tuple[str, str]], size: int
) -> None:
    scanner = ToolCallScanner(tools)
    shown, streamed = "", {}
    for start in range(0, len(text), size):
        part, deltas = scanner.add(text[start : start + size])
        shown += part
        for delta in deltas:
            call = streamed.setdefault(delta["index"], {"name": "", "arguments": ""})
            for key, value in delta["function"].items():
                call[key] += value
    assert shown + scanner.finish() == beside
    assert [(call.name, call.arguments) for call in scanner.calls] == calls
    assert [(call["name"], call["arguments"]) for call in streamed.values()] == calls
    assert len({call.id for call in scanner.calls}) == len(calls)


def test_why_an_answer_ended() -> None:
    scanner = ToolCallScanner(Tools(choice=ToolChoice.REQUIRED))
    assert scanner.finish_reason("stop") == "stop"
    scanner.add(REQUIRED)
    assert (scanner.finish_reason("stop"), scanner.finish_reason("length")) == ("tool_calls", "length")
    named = ToolCallScanner(Tools(choice=ToolChoice.NAMED, named="f"))
    named.add("{}")
    assert named.finish_reason("stop") == "stop"


def test_tools_that_need_not_be_called_ask_for_no_form() -> None:
    definition = {"type": "function", "function": {"name": "f", "parameters": INTEGER_X}}
    told = parse_tools(Fields({"tools": [definition], "tool_choice": "none"}))
    assert (told.choice, told.form, told.definitions) == (ToolChoice.NONE, None, (definition,))
    assert parse_tools(Fields({})) == Tools()
    asked = parse_tools(Fields({"tools": [definition]}))
    assert asked.choice is ToolChoice.AUTO
    assert asked.form is not None
    assert json.dumps(INTEGER_X)[1:-1] in asked.form.output.text
