"""JSON as checkpoints need it: an object, no key twice since the second would silently win, and nothing that JSON
does not have or that cannot be written down again: NaN, infinities, halves of surrogate pairs, endless nesting."""

from __future__ import annotations

import json
import math
from typing import Any

from .files import REPLACE, CheckpointFile, fault

_MAX_DEPTH = 64


class _DuplicateKeyError(ValueError):
    pass


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return value


def _refuse_odd(value: Any) -> None:
    """Raises ValueError for text that is no Unicode, a number beyond float's range, or too deep a nesting."""
    rest: list[tuple[Any, int]] = [(value, 0)]
    while rest:
        item, depth = rest.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(item, dict):
            rest.extend((part, depth + 1) for pair in item.items() for part in pair)
        elif isinstance(item, list):
            rest.extend((part, depth + 1) for part in item)
        elif isinstance(item, str):
            item.encode()  # a UnicodeEncodeError is a ValueError
        elif isinstance(item, float) and math.isinf(item):
            raise ValueError("it has a number that is too large")


def parse_object(data: bytes, path: str, what: str) -> dict[str, Any]:
    """The JSON object in `data`; `what` names it in messages ("header", "index", …). Raises CheckpointError."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant
        )
        _refuse_odd(value)
    except _DuplicateKeyError as error:
        raise fault(path, f"has the key {str(error)!r} twice in its {what}; {REPLACE}") from error
    except (ValueError, RecursionError) as error:
        raise fault(path, f"has no valid JSON in its {what}: {error}; {REPLACE}") from error
    if not isinstance(value, dict):
        raise fault(path, f"must hold a JSON object as its {what}, not {type(value).__name__}; {REPLACE}")
    return value


def read_object(file: CheckpointFile, what: str, max_bytes: int) -> tuple[dict[str, Any], bytes]:
    """The JSON object that is the whole file, and its bytes. Raises CheckpointError."""
    if file.size_bytes > max_bytes:
        raise fault(file.path, f"has {file.size_bytes} bytes, too many for a {what}; check the path")
    data = file.read(0, file.size_bytes)
    return parse_object(data, file.path, what), data
