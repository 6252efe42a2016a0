"""Forms: what is refused, and with which words."""

from __future__ import annotations

import pytest

from preload.engine.core.structured import MAX_FORM_CHARACTERS, FormError, FormKind, StructuredOutput, check

GOOD = [
    (FormKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"enum": [1, "x"]}}}'),
    (FormKind.JSON_SCHEMA, "{}"),
    (FormKind.REGEX, "[a-z]+-\\d{3}"),
    (FormKind.GRAMMAR, 'start: "yes" | "no"'),
    (FormKind.GRAMMAR, 'root ::= "yes" | "no"'),
]

BAD = [
    (FormKind.JSON_SCHEMA, '{"type": "strin"}', "strin"),
    (FormKind.JSON_SCHEMA, '{"type": "object"', "not valid JSON"),
    (FormKind.JSON_SCHEMA, "5", "is an object"),
    (FormKind.JSON_SCHEMA, "[" * 100_000, "not valid JSON"),
    (FormKind.JSON_SCHEMA, '{"not":' * 300 + "true" + "}" * 300, "recursion limit"),
    (FormKind.JSON_SCHEMA, '{"not": {"type": "string"}}', "not"),
    (FormKind.JSON_SCHEMA, '{"$ref": "#/$defs/missing"}', "missing"),
    (FormKind.JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    (FormKind.JSON_SCHEMA, '{"x-guidance": {}}', "x-guidance"),
    (FormKind.REGEX, "(a", "unclosed group"),
    (FormKind.GRAMMAR, "start: missing", "missing"),
    (FormKind.GRAMMAR, 'root ::= "a', "not one"),
    (FormKind.REGEX, "a" * (MAX_FORM_CHARACTERS + 1), "at most"),
]


@pytest.mark.parametrize(("kind", "text"), GOOD)
def test_a_good_form_passes(kind: FormKind, text: str) -> None:
    check(StructuredOutput(kind, text))


@pytest.mark.parametrize(("kind", "text", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_form_is_refused_naming_what_is_wrong(kind: FormKind, text: str, message: str) -> None:
    with pytest.raises(FormError) as caught:
        check(StructuredOutput(kind, text))
    assert message in caught.value.message
    assert len(caught.value.message) < 1000
