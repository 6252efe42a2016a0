"""What a request restricts its tokens by: the fields, parsed and validated, but for what needs a tokenizer or a core.

The form of an answer (JSON, a regular expression, a choice, a grammar) is asked for by `response_format`, as OpenAI's
API has it, or by `structured_outputs`, as vLLM's has; one of them, and one form. Custom logits processors get their
parameters by `logits_processors`, an object of name → parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from preload.engine.core.structured import FormKind, StructuredOutput

from .errors import BadRequestError
from .fields import Fields, token_ids, wrong_type
from .unsupported import unsupported

MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 128
MAX_CHOICES = 4096
ANY_JSON_OBJECT = StructuredOutput(FormKind.JSON_SCHEMA, '{"type": "object"}')
_STRUCTURED_FIELDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class Form:
    """What an answer has to look like, and the field that asked for it."""

    output: StructuredOutput
    param: str


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """`bad_words` as text; `logits_processors`: name → parameters as JSON."""

    form: Form | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logits_processors: dict[str, str] = field(default_factory=dict)


def parse_constraints(fields: Fields, vocab_size: int) -> Constraints:
    """Raises BadRequestError naming the field."""
    return Constraints(
        form=_form(fields),
        bad_words=_bad_words(fields.get("bad_words")),
        allowed_token_ids=_allowed(fields.get("allowed_token_ids"), vocab_size),
        logits_processors={name: json.dumps(value) for name, value in fields.object("logits_processors").items()},
    )


def _form(fields: Fields) -> Form | None:
    form = _response_format(Fields(fields.object("response_format")))
    structured = fields.object("structured_outputs")
    if not structured:
        return form
    if form is not None:
        raise BadRequestError(
            "'structured_outputs' cannot be combined with 'response_format'",
            param="structured_outputs",
            code="invalid_value",
        )
    return _structured_outputs(structured)


def _response_format(fields: Fields) -> Form | None:
    kind = fields.text("type")
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return Form(ANY_JSON_OBJECT, "response_format")
    if kind == "json_schema":
        schema = Fields(fields.object("json_schema")).get("schema")
        if not isinstance(schema, dict):
            raise wrong_type("response_format.json_schema.schema", "an object", schema)
        return Form(_json(schema), "response_format")
    raise unsupported("response_format.type", "must be 'text', 'json_object' or 'json_schema'")


def _structured_outputs(values: dict[str, Any]) -> Form:
    asked = [name for name, value in values.items() if value is not None and value is not False]
    unknown = [name for name in asked if name not in _STRUCTURED_FIELDS]
    if unknown:
        raise unsupported(f"structured_outputs.{unknown[0]}", f"is not known; {', '.join(_STRUCTURED_FIELDS)} are")
    if len(asked) != 1:
        raise BadRequestError(
            f"'structured_outputs' must have one of {', '.join(_STRUCTURED_FIELDS)}, and has {len(asked)}",
            param="structured_outputs",
            code="invalid_value",
        )
    param = f"structured_outputs.{asked[0]}"
    return Form(_structured_output(asked[0], values[asked[0]], param), param)


def _structured_output(name: str, value: Any, param: str) -> StructuredOutput:
    if name == "json_object":
        if value is not True:
            raise wrong_type(param, "a boolean", value)
        return ANY_JSON_OBJECT
    if name == "json":
        if not isinstance(value, dict | str):
            raise wrong_type(param, "a JSON schema, as an object or a string", value)
        return StructuredOutput(FormKind.JSON_SCHEMA, value) if isinstance(value, str) else _json(value)
    if name == "choice":
        return _choice(value, param)
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    return StructuredOutput(FormKind.REGEX if name == "regex" else FormKind.GRAMMAR, value)


def _json(schema: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput(FormKind.JSON_SCHEMA, json.dumps(schema))


def _choice(value: Any, param: str) -> StructuredOutput:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise wrong_type(param, "a non-empty array of non-empty strings", value)
    if len(value) > MAX_CHOICES:
        raise _too_many(param, "choices", len(value), MAX_CHOICES)
    alternatives = " | ".join(json.dumps(item, ensure_ascii=False) for item in value)
    return StructuredOutput(FormKind.GRAMMAR, f"start: {alternatives}\n")


def _bad_words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise wrong_type("bad_words", "an array of strings", value)
    if len(value) > MAX_BAD_WORDS:
        raise _too_many("bad_words", "words", len(value), MAX_BAD_WORDS)
    for word in value:
        if not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
            raise BadRequestError(
                f"a word of 'bad_words' has {len(word)} characters; allowed are 1 to {MAX_BAD_WORD_LENGTH}, not all "
                "of them blanks",
                param="bad_words",
                code="out_of_range",
            )
    return tuple(value)


def _allowed(value: Any, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value:
        raise wrong_type("allowed_token_ids", "a non-empty array of token ids", value)
    return tuple(dict.fromkeys(token_ids("allowed_token_ids", value, vocab_size)))


def _too_many(param: str, what: str, count: int, limit: int) -> BadRequestError:
    return BadRequestError(
        f"'{param}' holds {count} {what}; at most {limit} are allowed", param=param, code="out_of_range"
    )
