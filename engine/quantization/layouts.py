"""Resident layouts of a two-dimensional weight, and their reference dequantization.

A layout is a tag ("dense", "gguf.q4_k", "int8_per_channel", …) and up to three parts, "weight", "scale"
and "min". All of them are row major with one row per output channel, so any subset of rows (every part
sliced alike) dequantizes on its own. This module owns the dispatch only; each format's module explains its
bytes. Plain torch: this is the specification that fast kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from preload.engine.errors import ManifestError
from preload.engine.loading.gguf_types import BLOCK_TYPES

from . import gguf_blocks32, gguf_kquants, int4_group32, int8_per_channel
from .gguf_blocks32 import split_last

DENSE = "dense"
GGUF_PREFIX = "gguf."

GGUF_DEQUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": gguf_blocks32.dequantize_q4_0,
    "q4_1": gguf_blocks32.dequantize_q4_1,
    "q5_0": gguf_blocks32.dequantize_q5_0,
    "q5_1": gguf_blocks32.dequantize_q5_1,
    "q8_0": gguf_blocks32.dequantize_q8_0,
    "q4_k": gguf_kquants.dequantize_q4_k,
    "q5_k": gguf_kquants.dequantize_q5_k,
    "q6_k": gguf_kquants.dequantize_q6_k,
}

LAYOUTS = (
    DENSE,
    *(GGUF_PREFIX + name for name in GGUF_DEQUANTIZERS),
    int8_per_channel.LAYOUT,
    int4_group32.LAYOUT,
)
"""Every layout tag there is."""

COMPANIONS: dict[str, tuple[str, ...]] = {
    int8_per_channel.LAYOUT: ("scale",),
    int4_group32.LAYOUT: ("scale", "min"),
}
"""Parts beside "weight", resident as `<name>_<part>`. A layout that is not named here has none."""


def dequantize(layout: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight as float32[rows, cols]. `parts`: "weight", and "scale" and "min" where the layout has them.

    Raises ManifestError for a layout that does not exist.
    """
    weight = parts["weight"]
    if layout == DENSE:
        return weight.to(torch.float32)
    if layout == int8_per_channel.LAYOUT:
        return int8_per_channel.dequantize(parts)
    if layout == int4_group32.LAYOUT:
        return int4_group32.dequantize(parts)
    name = _gguf_type(layout)
    blocks = split_last(weight, -1, BLOCK_TYPES[name].block_bytes)
    return GGUF_DEQUANTIZERS[name](blocks).flatten(-2)


def num_cols(layout: str, parts: Mapping[str, Tensor]) -> int:
    """Columns of the weight the parts stand for. Raises ManifestError for a layout that does not exist."""
    stored = int(parts["weight"].shape[-1])
    if layout in (DENSE, int8_per_channel.LAYOUT):
        return stored
    if layout == int4_group32.LAYOUT:
        return stored * 2
    block = BLOCK_TYPES[_gguf_type(layout)]
    return stored // block.block_bytes * block.block_size


def _gguf_type(layout: str) -> str:
    name = layout.removeprefix(GGUF_PREFIX)
    if not layout.startswith(GGUF_PREFIX) or name not in GGUF_DEQUANTIZERS:
        raise ManifestError(f"unknown layout {layout!r}; this engine reads {', '.join(LAYOUTS)}")
    return name
