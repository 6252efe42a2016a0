"""The messages of a chat: roles, plain text content and calls of tools, validated.

Content given as an array of text parts becomes one string. The role "developer" is passed on as "system", which is
what templates know. The arguments of calls become objects, as templates want them. Anything that is not text is
refused.
"""

from __future__ import annotations

import json
from typing import Any

from .errors import BadRequestError
from .fields import wrong_type
from .unsupported import unsupported

_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_messages(value: Any) -> tuple[dict[str, Any], ...]:
    """`messages` of a chat request. Raises BadRequestError naming the message and its field."""
    if value is None:
        raise BadRequestError("'messages' is missing", param="messages", code="missing_required_parameter")
    if not isinstance(value, list):
        raise wrong_type("messages", "an array of messages", value)
    if not value:
        raise BadRequestError("'messages' is an empty array", param="messages", code="empty_array")
    return tuple(_message(f"messages[{index}]", item) for index, item in enumerate(value))


def _message(param: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    role = value.get("role")
    if role not in _ROLES:
        raise BadRequestError(
            f"'{param}.role' must be one of {', '.join(_ROLES)}", param=f"{param}.role", code="invalid_value"
        )
    for name in ("function_call", "audio"):
        if value.get(name):
            raise unsupported(f"{param}.{name}", "is not supported")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = value.get("tool_calls") or None
    if calls is not None:
        message["tool_calls"] = _tool_calls(f"{param}.tool_calls", role, calls)
    if calls is None or value.get("content") is not None:
        message["content"] = _content(f"{param}.content", value.get("content"))
    else:
        message["content"] = ""
    if role == "tool":
        if not isinstance(value.get("tool_call_id"), str):
            raise wrong_type(f"{param}.tool_call_id", "a string", value.get("tool_call_id"))
        message["tool_call_id"] = value["tool_call_id"]
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    return message


def _tool_calls(param: str, role: str, value: Any) -> list[dict[str, Any]]:
    if role != "assistant":
        raise BadRequestError(f"'{param}' belongs to messages of the assistant", param=param, code="invalid_value")
    if not isinstance(value, list):
        raise wrong_type(param, "an array of tool calls", value)
    return [_tool_call(f"{param}[{index}]", call) for index, call in enumerate(value)]


def _tool_call(param: str, value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong_type(f"{param}.function", "an object with a name", function)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(
                f"'{param}.function.arguments' is not valid JSON: {error}",
                param=f"{param}.function.arguments",
                code="invalid_value",
            ) from error
    call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(value.get("id"), str):
        call["id"] = value["id"]
    return call


def _content(param: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise BadRequestError(f"'{param}' is missing", param=param, code="missing_required_parameter")
    if not isinstance(value, list):
        raise wrong_type(param, "a string or an array of text parts", value)
    texts = []
    for index, part in enumerate(value):
        here = f"{param}[{index}]"
        if not isinstance(part, dict):
            raise wrong_type(here, "an object", part)
        if part.get("type") != "text":
            raise unsupported(f"{here}.type", "must be 'text'; this model reads nothing else")
        if not isinstance(part.get("text"), str):
            raise wrong_type(f"{here}.text", "a string", part.get("text"))
        texts.append(part["text"])
    return "".join(texts)
