"""What tensors a quantized weight becomes: names, dtypes and shapes of each layout's parts, without importing torch.

The formats themselves are engine/quantization's; a test holds both against each other.
"""

from __future__ import annotations

Parts = dict[str, tuple[str, tuple[int, ...]]]
"""Part → dtype and shape; "weight" comes first."""

GROUP_SIZES = {"int4_group32": 32, "int4_group64": 64, "int4_group128": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Columns that share a scale; a weight's columns must be a multiple."""

PIECE_ROWS = {"fp8_per_block": 128}
"""Rows that can only be quantized together, where it is more than one."""

NEED_AMAX = ("fp8_per_tensor", "nvfp4")
"""Layouts with a scale for the whole weight, whose largest magnitude has to be known before any row is quantized."""

_BLOCK = 128


def resident_parts(layout: str, rows: int, cols: int) -> Parts:
    """The parts of a weight [rows, cols]; whether the columns divide is for the caller to see."""
    groups = (rows, cols // GROUP_SIZES.get(layout, cols or 1))
    blocks = (-(-rows // _BLOCK), -(-cols // _BLOCK))
    packed, whole = (rows, cols // 2), (rows, cols)
    int4: Parts = {"weight": ("uint8", packed), "scale": ("float32", groups), "min": ("float32", groups)}
    known: dict[str, Parts] = {
        "int8_per_channel": {"weight": ("int8", whole), "scale": ("float32", (rows,))},
        "int4_group32": int4,
        "int4_group64": int4,
        "int4_group128": int4,
        "fp8_per_tensor": {"weight": ("float8_e4m3fn", whole), "scale": ("float32", (1,))},
        "fp8_per_block": {"weight": ("float8_e4m3fn", whole), "scale": ("float32", blocks)},
        "mxfp8": {"weight": ("float8_e4m3fn", whole), "scale": ("uint8", groups)},
        "mxfp4": {"weight": ("uint8", packed), "scale": ("uint8", groups)},
        "nvfp4": {
            "weight": ("uint8", packed),
            "scale": ("float8_e4m3fn", groups),
            "global_scale": ("float32", (1,)),
        },
    }
    return known[layout]
