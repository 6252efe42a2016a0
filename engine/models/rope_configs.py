"""`RopeSpec` from a configuration, in its old spelling and its new one.

    old  {"rope_theta": 500000.0, "rope_scaling": {"type" or "rope_type": "llama3", "factor": 8.0, …}}
    new  {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, …}}

Numbers become floats, so that 8 and 8.0 are one recipe. A type or parameter that is not known is refused: rotary
settings that are ignored give wrong text, not an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from preload.engine.errors import CheckpointError

from .spec import RopeSpec

_REQUIRED: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "dynamic": ("original_max_position_embeddings",),
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_ORIGINAL = "original_max_position_embeddings"
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")
_IGNORED = ("finetuned",)  # a note of how the weights came about


def with_canonical_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in the old spelling, so that an override in one spelling replaces the other."""
    result = dict(config)
    parameters = result.pop("rope_parameters", None)
    if isinstance(parameters, Mapping):
        scaling = dict(parameters)
        theta = scaling.pop("rope_theta", None)
        if theta is not None:
            result["rope_theta"] = theta
        result["rope_scaling"] = scaling or None
    elif parameters is not None:
        result["rope_scaling"] = parameters
    return result


def rope_from_config(config: Mapping[str, Any], max_position_embeddings: int, path: str) -> RopeSpec:
    """The rotary settings of a configuration in the old spelling. Raises CheckpointError naming `path`."""
    theta = _number(config.get("rope_theta", 10000.0), "rope_theta", path)
    if theta <= 0:
        raise _wrong(path, f"rope_theta={theta} must be positive")
    scaling = config.get("rope_scaling")
    if scaling is None:
        return RopeSpec(theta=theta)
    if not isinstance(scaling, Mapping):
        raise _wrong(path, f"rope_scaling={scaling!r} must be an object")
    values = {key: value for key, value in scaling.items() if key not in _IGNORED and value is not None}
    old_kind, kind = values.pop("type", None), values.pop("rope_type", None)
    kind = kind if kind is not None else old_kind
    if kind in ("default", "none"):
        kind = "none"
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise _wrong(path, f"rope type {kind!r} is unknown; known are default, {', '.join(list(_REQUIRED)[1:])}")
    if kind == "yarn" and theta <= 1:
        raise _wrong(path, f"rope_theta={theta} must be above 1 for yarn")
    return RopeSpec(theta=theta, scaling=kind, parameters=_parameters(kind, values, max_position_embeddings, path))


def _parameters(
    kind: str, values: Mapping[str, Any], max_position_embeddings: int, path: str
) -> dict[str, float | bool]:
    for key in _REQUIRED[kind]:
        if key not in values:
            raise _wrong(path, f"rope type {kind!r} needs {key}, which is missing")
    known = _REQUIRED[kind] + _OPTIONAL.get(kind, ())
    parameters: dict[str, float | bool] = {}
    for key, value in values.items():
        if key not in known:
            raise _wrong(path, f"rope type {kind!r} has the unknown parameter {key}={value!r}")
        if key == "truncate":
            if not isinstance(value, bool):
                raise _wrong(path, f"rope parameter truncate={value!r} must be true or false")
            parameters[key] = value
            continue
        parameters[key] = _number(value, key, path)
        if parameters[key] <= 0 and key not in _MAY_BE_ZERO:
            raise _wrong(path, f"rope parameter {key}={value!r} must be positive")
    if _ORIGINAL in known:
        parameters.setdefault(_ORIGINAL, float(max_position_embeddings))
    if parameters.get("factor", 1.0) < 1:
        raise _wrong(path, f"rope factor {parameters['factor']} must be at least 1")
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise _wrong(path, f"rope high_freq_factor {parameters['high_freq_factor']} must be above low_freq_factor")
    return parameters


def _number(value: Any, key: str, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(path, f"{key}={value!r} must be a number")
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise _wrong(path, f"{key}={value!r} must be a finite number")
    return float(value)


def _wrong(path: str, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}; correct the configuration", {"file": path})
