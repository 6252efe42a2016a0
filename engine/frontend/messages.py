"""The messages of a chat: roles and plain text content, validated.

Content given as an array of text parts becomes one string. The role "developer" is passed on as "system", which is
what templates know. Calls of tools and anything that is not text are refused.
"""

from __future__ import annotations

from typing import Any

from .errors import BadRequestError
from .fields import wrong_type
from .unsupported import unsupported

_ROLES = ("system", "developer", "user", "assistant")


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
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise unsupported(f"{param}.{name}", "is not supported")
    message = {"role": "system" if role == "developer" else role}
    message["content"] = _content(f"{param}.content", value.get("content"))
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    return message


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
