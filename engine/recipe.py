"""Recipes: what an engine asks for when it names a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from preload.engine.errors import RequestError
from preload.protos import weight_cache_pb2 as pb

LAYOUT_VERSION = 1
"""Version of the resident layout that this engine writes and reads. Another version is another generation."""

QUANTIZATIONS = (
    "keep", "bf16", "f32", "int8_per_channel", "int4_group32",
    "fp8_per_tensor", "fp8_per_block", "mxfp8", "mxfp4", "nvfp4",
)  # fmt: skip
"""Resident forms of two-dimensional weights. The formats: engine/quantization."""

_OLD_NAMES = {"fp8": "fp8_per_tensor"}
COMPUTE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that turns a checkpoint into resident tensors. Raises RequestError on an impossible one."""

    model: str = "auto"
    quantization: str = "keep"
    compute_dtype: str = "float32"
    config_overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_quantization(self.quantization)
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise RequestError(f"unknown compute dtype {self.compute_dtype!r}; known are {', '.join(COMPUTE_DTYPES)}")

    def to_proto(self) -> pb.Recipe:
        overrides = canonical_json(self.config_overrides) if self.config_overrides else ""
        return pb.Recipe(
            model=self.model,
            quantization=self.quantization,
            compute_dtype=self.compute_dtype,
            config_overrides=overrides,
            layout_version=LAYOUT_VERSION,
        )

    @staticmethod
    def from_proto(message: pb.Recipe) -> Recipe:
        if message.layout_version != LAYOUT_VERSION:
            raise RequestError(
                f"layout version {message.layout_version} was asked for; this loader writes {LAYOUT_VERSION}"
            )
        return Recipe(
            model=message.model or "auto",
            quantization=message.quantization or "keep",
            compute_dtype=message.compute_dtype or "float32",
            config_overrides=parse_overrides(message.config_overrides),
        )


def check_quantization(name: str) -> None:
    """Raises RequestError for a name that is none, or an old one, whose message tells the new one."""
    if name in _OLD_NAMES:
        raise RequestError(f"the quantization {name!r} is no longer taken; its name is {_OLD_NAMES[name]!r}")
    if name not in QUANTIZATIONS:
        raise RequestError(f"unknown quantization {name!r}; known are {', '.join(QUANTIZATIONS)}")


def parse_overrides(text: str) -> dict[str, Any]:
    """The JSON object of `--config-override`; empty text is no override."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"configuration overrides are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"configuration overrides must be a JSON object, not {type(value).__name__}")
    return value


def canonical_json(value: object) -> str:
    """One text per value: sorted keys, no spaces, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
