"""Resident layouts of a two-dimensional weight, and their reference dequantization.

A layout is a tag ("dense", "gguf.q4_k", "int8_per_channel", …) and up to three parts: "weight" and its companions.
The weight is row major with one row per output channel, and so are companions, but for those that one entry of
serves many rows (`ROWS_PER_ENTRY`). Any rows dequantize on their own, see `dequantize_rows`. This module owns the
dispatch only; each format's module explains its bytes. Plain torch: this is the specification that fast kernels are
tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from preload.engine.errors import ManifestError
from preload.engine.loading.gguf_types import BLOCK_TYPES

from . import (
    fp8_per_block,
    fp8_per_tensor,
    gguf_blocks32,
    gguf_kquants,
    int4_group32,
    int8_per_channel,
    mxfp4,
    mxfp8,
    nvfp4,
)
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

DEQUANTIZERS: dict[str, Callable[[Mapping[str, Tensor]], Tensor]] = {
    int8_per_channel.LAYOUT: int8_per_channel.dequantize,
    int4_group32.LAYOUT: int4_group32.dequantize,
    **dict.fromkeys(int4_group32.WIDER_LAYOUTS, int4_group32.dequantize),
    fp8_per_tensor.LAYOUT: fp8_per_tensor.dequantize,
    fp8_per_block.LAYOUT: fp8_per_block.dequantize,
    mxfp8.LAYOUT: mxfp8.dequantize,
    mxfp4.LAYOUT: mxfp4.dequantize,
    nvfp4.LAYOUT: nvfp4.dequantize,
}
"""Formats of this engine's own recipes, and those that hold checkpoints quantized elsewhere."""

LAYOUTS = (DENSE, *(GGUF_PREFIX + name for name in GGUF_DEQUANTIZERS), *DEQUANTIZERS)
"""Every layout tag there is."""

COMPANIONS: dict[str, tuple[str, ...]] = {
    int8_per_channel.LAYOUT: ("scale",),
    int4_group32.LAYOUT: ("scale", "min"),
    **dict.fromkeys(int4_group32.WIDER_LAYOUTS, ("scale", "min")),
    fp8_per_tensor.LAYOUT: ("scale",),
    fp8_per_block.LAYOUT: ("scale",),
    mxfp8.LAYOUT: ("scale",),
    mxfp4.LAYOUT: ("scale",),
    nvfp4.LAYOUT: ("scale", "global_scale"),
}
"""Parts beside "weight", resident as `<name>_<part>`. A layout that is not named here has none."""

ALL_ROWS = 0
ROWS_PER_ENTRY: dict[tuple[str, str], int] = {
    (fp8_per_tensor.LAYOUT, "scale"): ALL_ROWS,
    (fp8_per_block.LAYOUT, "scale"): fp8_per_block.BLOCK,
    (nvfp4.LAYOUT, "global_scale"): ALL_ROWS,
}
"""How many rows of the weight one entry of a companion serves, where it is not one."""

PACKED_NIBBLES = (int4_group32.LAYOUT, *int4_group32.WIDER_LAYOUTS, mxfp4.LAYOUT, nvfp4.LAYOUT)
"""Layouts whose weight has two columns in a byte."""


def companion_rows(layout: str, part: str, num_rows: int) -> int:
    """Entries along the first dimension of a companion of a weight with num_rows rows."""
    rows_per_entry = ROWS_PER_ENTRY.get((layout, part), 1)
    return 1 if rows_per_entry == ALL_ROWS else -(-num_rows // rows_per_entry)


def dequantize_rows(layout: str, parts: Mapping[str, Tensor], index: slice | Tensor) -> Tensor:
    """Some rows of a weight as float32[n, cols]. `parts`: all rows; index: a slice, or int64[n]."""
    if layout == fp8_per_block.LAYOUT:
        return fp8_per_block.dequantize_rows(parts, index)
    shared = {part for (tag, part), rows in ROWS_PER_ENTRY.items() if tag == layout and rows == ALL_ROWS}
    return dequantize(layout, {part: t if part in shared else t[index] for part, t in parts.items()})


def dequantize(layout: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight as float32[rows, cols]. `parts`: "weight" and the layout's companions.

    Raises ManifestError for a layout that does not exist.
    """
    weight = parts["weight"]
    if layout == DENSE:
        return weight.to(torch.float32)
    if layout in DEQUANTIZERS:
        return DEQUANTIZERS[layout](parts)
    name = _gguf_type(layout)
    blocks = split_last(weight, -1, BLOCK_TYPES[name].block_bytes)
    return GGUF_DEQUANTIZERS[name](blocks).flatten(-2)


def num_cols(layout: str, parts: Mapping[str, Tensor]) -> int:
    """Columns of the weight the parts stand for. Raises ManifestError for a layout that does not exist."""
    stored = int(parts["weight"].shape[-1])
    if layout in PACKED_NIBBLES:
        return stored * 2
    if layout == DENSE or layout in DEQUANTIZERS:
        return stored
    block = BLOCK_TYPES[_gguf_type(layout)]
    return stored // block.block_bytes * block.block_size


def _gguf_type(layout: str) -> str:
    name = layout.removeprefix(GGUF_PREFIX)
    if not layout.startswith(GGUF_PREFIX) or name not in GGUF_DEQUANTIZERS:
        raise ManifestError(f"unknown layout {layout!r}; this engine reads {', '.join(LAYOUTS)}")
    return name
