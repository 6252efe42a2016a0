"""`ToolCallScanner`: an answer whose form is that of tool calls (tools.py), read while it comes.

It relies on the form: between the arguments of two calls everything is spelled as it is framed there. An answer that
its length cut off has the calls that had begun, the last one with what there is of its arguments.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from .stop_strings import StopScanner
from .tools import CALL_END, CALL_MARK, ToolChoice, Tools

_BEGIN = re.compile(r'\{"name": "([^"]*)", "arguments": ')


@dataclass
class ToolCall:
    """One call, as far as it has come. `arguments` is JSON, as text."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallScanner:
    """The calls of one answer, and the text beside them."""

    def __init__(self, tools: Tools) -> None:
        self.calls: list[ToolCall] = []
        self._tools = tools
        self._has_text = tools.choice is ToolChoice.AUTO
        self._text = StopScanner((CALL_MARK,))
        self._framing = ""
        self._object = _ObjectEnd()
        self._read = self._read_text if self._has_text else self._read_framing

    def add(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """What is new: text that belongs to no call, and `tool_calls` of a streamed delta."""
        shown: list[str] = []
        deltas: list[dict[str, Any]] = []
        if self._tools.named and not self.calls:
            self._begin(self._tools.named, deltas)
        while text:
            text = self._read(text, shown, deltas)
        return "".join(shown), deltas

    def finish(self) -> str:
        """Text that was held back because a call might have begun with it, which it then did not."""
        if self._has_text and self._read == self._read_framing and not self._framing.startswith("}"):
            return CALL_MARK + self._framing
        return self._text.finish()

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended: one that stops after calls that were not named does so for them."""
        called = bool(self.calls) and not self._tools.named
        return "tool_calls" if reason == "stop" and called else reason

    def _read_text(self, text: str, shown: list[str], deltas: list[dict[str, Any]]) -> str:
        """Each of these takes its part of the text, and returns what comes after it."""
        for i, character in enumerate(text, 1):
            shown.append(self._text.add(character))
            if self._text.stopped:
                self._text = StopScanner((CALL_MARK,))
                self._read = self._read_framing
                return text[i:]
        return ""

    def _read_framing(self, text: str, shown: list[str], deltas: list[dict[str, Any]]) -> str:
        self._framing += text
        if self._has_text and self._framing.startswith("}"):
            if len(self._framing) > len(CALL_END):
                rest, self._framing = self._framing[len(CALL_END) + 1 :], ""
                self._read = self._read_text
                return rest
            return ""
        found = _BEGIN.search(self._framing)
        if found is None:
            return ""
        rest, self._framing = self._framing[found.end() :], ""
        self._begin(found[1], deltas)
        return rest

    def _begin(self, name: str, deltas: list[dict[str, Any]]) -> None:
        self.calls.append(ToolCall(name))
        deltas.append({"index": len(self.calls) - 1, **self.calls[-1].to_json()})
        self._read = self._read_arguments

    def _read_arguments(self, text: str, shown: list[str], deltas: list[dict[str, Any]]) -> str:
        end = next((i for i, character in enumerate(text, 1) if self._object.is_at(character)), None)
        taken, rest = (text, "") if end is None else (text[:end], text[end:])
        if end is not None:
            self._read = self._read_framing
        self.calls[-1].arguments += taken
        deltas.append({"index": len(self.calls) - 1, "function": {"arguments": taken}})
        return rest


class _ObjectEnd:
    """Finds the end of a JSON object, character by character, and then of the next one."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def is_at(self, character: str) -> bool:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False
