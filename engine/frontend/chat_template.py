"""The model's chat template: jinja2 in a sandbox, with the helpers that templates expect.

The template comes from the checkpoint or from the operator, the messages from clients: the sandbox keeps either from
reaching into the process, and rendering is bounded in characters and in time. Helpers and block trimming follow what
Hugging Face templates are written for (`apply_chat_template`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import BadRequestError, StartError

MAX_RENDERED_CHARACTERS = 16 << 20
MAX_RENDER_S = 5.0


class ChatTemplate:
    """One compiled template. Raises StartError, naming `origin`, when it does not compile."""

    def __init__(self, source: str, *, origin: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise StartError(
                f"the chat template of {origin} does not compile: {error.message} (line {error.lineno})"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt text. What the template makes of `tools` is its own affair.

        Raises BadRequestError with the template's own words when it refuses the messages."""
        variables = {
            "tools": [dict(tool) for tool in tools] or None,
            **self._special_tokens,
            **(arguments or {}),
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        deadline = time.monotonic() + MAX_RENDER_S
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED_CHARACTERS or time.monotonic() > deadline:
                    raise _refusal("the rendered prompt is too large")
        except (
            TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:
            raise _refusal(str(error)) from error
        return "".join(pieces)


class _GenerationTag(Extension):
    """`{% generation %}` marks for training what the assistant said; for a prompt it only means its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refusal(reason: str) -> BadRequestError:
    return BadRequestError(
        f"the chat template refused the messages: {reason}", param="messages", code="chat_template_error"
    )


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which would put <, > and & into the prompt as escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
