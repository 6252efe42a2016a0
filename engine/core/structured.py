"""`StructuredOutput`: the form an answer must have, and its translation for llguidance.

Both sides use it: the frontend checks a form before it is sent, the core compiles it for its vocabulary. It imports
no torch, and llguidance only when there is a form. Errors of a form are the client's; they name what is wrong in it.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preload.engine.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLParserLimits
    from llguidance._lib import JsonCompileOptions

MAX_FORM_CHARACTERS = 1 << 20
_MAX_REASON = 600

JSON_WHITESPACE = r"[ ]?|\n[ \t]{0,40}"
"""Between the tokens of JSON: nothing, a space, or a line break with its indentation. Any amount would be correct,
but small models then go on with blanks until the answer's length ends it."""


class FormKind(enum.Enum):
    """How a form is written down."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


@dataclass(frozen=True)
class StructuredOutput:
    """`text` is a JSON schema as JSON, a regular expression, or a grammar (Lark or GBNF)."""

    kind: FormKind
    text: str


class FormError(RequestError):
    """Raised when a form cannot be used; the message says why. The client should correct it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, {"param": "structured_outputs"})


def check(form: StructuredOutput) -> None:
    """Raises FormError naming what is wrong. Takes milliseconds, more for large forms: not for an event loop."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(to_llguidance(form), limits=limits())
    if is_error:
        raise FormError(reason(messages[0]))


def to_llguidance(form: StructuredOutput) -> str:
    """The form as llguidance takes it. Raises FormError for what can be told without compiling it."""
    from llguidance import LLMatcher

    if len(form.text) > MAX_FORM_CHARACTERS:
        raise FormError(f"it has {len(form.text)} characters; at most {MAX_FORM_CHARACTERS} are allowed")
    if form.kind is FormKind.JSON_SCHEMA:
        _check_schema(form.text)
        try:
            return LLMatcher.grammar_from_json_schema(form.text, defaults=_json_options())
        except ValueError as error:
            raise FormError(f"the JSON schema cannot be read: {reason(str(error))}") from error
    if form.kind is FormKind.REGEX:
        return LLMatcher.grammar_from_regex(form.text)
    return LLMatcher.grammar_from_lark(_lark(form.text))


def limits() -> LLParserLimits:
    """What bounds the time of compiling and of every step. Errors must not show the parser's state to clients."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def reason(message: str) -> str:
    """llguidance's words, as far as they fit into an answer."""
    text = " ".join(message.split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}…"


def _json_options() -> JsonCompileOptions:
    return {"whitespace_flexible": True, "whitespace_pattern": JSON_WHITESPACE}


def _check_schema(text: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormError(f"the JSON schema is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormError("a JSON schema is an object")
    if "x-guidance" in value:
        raise FormError("a JSON schema must not have the key 'x-guidance' here")


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:
        raise FormError(f"the grammar is not one: {reason(str(error))}") from error
