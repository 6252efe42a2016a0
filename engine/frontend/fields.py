"""Reading typed fields out of a JSON object, each refusal naming the field.

JSON's `null` counts as absent, as in OpenAI's API. Booleans are never numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import BadRequestError


def parse_object(body: bytes) -> Fields:
    """The request body as fields. Raises BadRequestError unless it is one JSON object."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        _refuse_half_characters(body, value)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequestError(f"the request body must be a JSON object, not {_kind(value)}", code="invalid_json")
    return Fields(value)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_half_characters(body: bytes, value: object) -> None:
    """JSON can spell half of a surrogate pair, which is no text: no tokenizer takes it, no answer can hold it."""
    if b"\\ud" in body.lower():
        json.dumps(value, ensure_ascii=False).encode()


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def wrong_type(param: str, expected: str, value: object) -> BadRequestError:
    """The refusal of a field whose value is of another type."""
    return BadRequestError(f"'{param}' must be {expected}, not {_kind(value)}", param=param, code="invalid_type")


class Fields:
    """Typed access to one JSON object."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str) -> Any:
        """The raw value; None when absent or null."""
        return self._values.get(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise wrong_type(name, "a string", value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong_type(name, "a boolean", value)
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, "an integer", value)
        if not low <= value <= high:
            raise out_of_range(name, low, high, value)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, "a number", value)
        if not low <= value <= high:  # also what is not finite
            raise out_of_range(name, low, high, value)
        return float(value)

    def object(self, name: str) -> dict[str, Any]:
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise wrong_type(name, "an object", value)
        return value


def out_of_range(param: str, low: float, high: float, value: float) -> BadRequestError:
    """The refusal of a number outside its range."""
    return BadRequestError(
        f"'{param}' must be between {low} and {high}, and is {value}", param=param, code="out_of_range"
    )


def token_ids(param: str, value: list[Any], vocab_size: int) -> tuple[int, ...]:
    """`value` as token ids of a vocabulary of `vocab_size`. Raises BadRequestError naming `param`."""
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int):
            raise wrong_type(param, "an array of token ids", item)
        if not 0 <= item < vocab_size:
            raise BadRequestError(
                f"'{param}' holds token id {item}; ids run from 0 to {vocab_size - 1}",
                param=param,
                code="out_of_range",
            )
    return tuple(value)
