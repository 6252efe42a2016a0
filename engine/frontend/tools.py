"""Tools of a chat: the fields `tools` and `tool_choice`, and the form that makes an answer, or parts of it, calls.

Every call is held to the parameter schema of its function, as in OpenAI's strict mode. What the form frames the
arguments with is spelled exactly like this:

    auto       text<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>text…   (so do Hermes and Qwen models)
    required   [{"name": "f", "arguments": {…}}, {"name": …, "arguments": {…}}]
    named      {…}

With "auto" a model that marks calls in another way answers with text. What tools there are, the chat template tells
the model; one that does not speak of tools leaves it to guess.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preload.engine.core.structured import JSON_WHITESPACE, FormKind, StructuredOutput

from .constraints import Form
from .errors import BadRequestError
from .fields import Fields, wrong_type
from .unsupported import unsupported

MAX_TOOLS = 128
CALL_MARK, CALL_END = "<tool_call>", "\n</tool_call>"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ANY_OBJECT = {"type": "object"}


class ToolChoice(enum.Enum):
    """Whether functions are called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, kw_only=True)
class Tools:
    """`definitions` are what the chat template is given; `named` is the one function there is to call."""

    choice: ToolChoice = ToolChoice.NONE
    definitions: tuple[dict[str, Any], ...] = ()
    form: Form | None = None
    named: str = ""


def parse_tools(fields: Fields) -> Tools:
    """Raises BadRequestError naming the field."""
    definitions = fields.get("tools") or []
    if not isinstance(definitions, list):
        raise wrong_type("tools", "an array of tools", definitions)
    if len(definitions) > MAX_TOOLS:
        raise BadRequestError(
            f"'tools' holds {len(definitions)} tools; at most {MAX_TOOLS} are allowed",
            param="tools",
            code="out_of_range",
        )
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, definition in enumerate(definitions):
        name, schema = _function(f"tools[{index}]", definition)
        if name in schemas:
            raise BadRequestError(
                f"'tools' has two functions {name!r}", param=f"tools[{index}].function.name", code="invalid_value"
            )
        schemas[name] = schema
    choice, named = _choice(fields.get("tool_choice"), schemas)
    form = None
    if choice is not ToolChoice.NONE:
        if named:
            schemas = {named: schemas[named]}
        grammar = calls_grammar(choice, schemas, several=fields.flag("parallel_tool_calls", default=True))
        form = Form(StructuredOutput(FormKind.GRAMMAR, grammar), "tools")
    return Tools(choice=choice, definitions=tuple(definitions), form=form, named=named)


def _function(param: str, definition: Any) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(definition, dict):
        raise wrong_type(param, "an object", definition)
    if definition.get("type") != "function":
        raise unsupported(f"{param}.type", "must be 'function'")
    function = definition.get("function")
    if not isinstance(function, dict):
        raise wrong_type(f"{param}.function", "an object", function)
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequestError(
            f"'{param}.function.name' must be 1 to 64 letters, digits, underscores and dashes",
            param=f"{param}.function.name",
            code="invalid_value",
        )
    if schema is None:
        return name, _ANY_OBJECT
    if not isinstance(schema, dict):
        raise wrong_type(f"{param}.function.parameters", "an object", schema)
    if schema.get("type", "object") != "object" or "x-guidance" in schema:
        raise BadRequestError(
            f"'{param}.function.parameters' must be the schema of an object",
            param=f"{param}.function.parameters",
            code="invalid_value",
        )
    return name, {**schema, "type": "object"}


def _choice(value: Any, schemas: Mapping[str, Any]) -> tuple[ToolChoice, str]:
    """How tools are to be chosen, and the name of the function that is named, if one is."""
    if value is None:
        value = "auto" if schemas else "none"
    if value == "none" or (value == "auto" and not schemas):
        return ToolChoice.NONE, ""
    if not schemas:
        raise BadRequestError("'tool_choice' needs 'tools'", param="tool_choice", code="invalid_value")
    if value in ("auto", "required"):
        return ToolChoice(value), ""
    if not isinstance(value, dict) or value.get("type") != "function":
        raise unsupported("tool_choice", "must be 'none', 'auto', 'required', or an object that names a function")
    name = Fields(value).object("function").get("name")
    if not isinstance(name, str) or name not in schemas:
        raise BadRequestError(
            f"'tool_choice.function.name' is {str(name)[:80]!r}, which is none of the tools",
            param="tool_choice.function.name",
            code="invalid_value",
        )
    return ToolChoice.NAMED, name


def calls_grammar(choice: ToolChoice, schemas: Mapping[str, Mapping[str, Any]], *, several: bool) -> str:
    """Lark: an answer with calls of these functions, at most one of them unless `several`."""
    if choice is ToolChoice.NAMED:
        (schema,) = schemas.values()
        return f"start: %json {_schema(schema)}\n"
    if choice is ToolChoice.AUTO:
        lines = [
            f"start: marked{'*' if several else '?'} END",
            r"END: TEXT",
            r"TEXT: /(.|\n)*/",
            f"mark[lazy]: TEXT {json.dumps(CALL_MARK)}",
            f'marked: mark "\\n" call {json.dumps(CALL_END)}',
        ]
    else:
        lines = [f'start: "[" call {"(" + json.dumps(", ") + " call)*" if several else ""} "]"']
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(schemas))))
    for i, (name, schema) in enumerate(schemas.items()):
        begin = json.dumps(f'{{"name": "{name}", "arguments": ')
        lines.append(f'call_{i}: {begin} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: %json {_schema(schema)}")
    return "\n".join(lines) + "\n"


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}})
