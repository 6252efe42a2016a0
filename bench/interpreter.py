"""Triton's interpreter, put right where it computes something else than a GPU would.

It truncates a float32 that becomes a bfloat16, where every GPU rounds to nearest, ties to even; and it multiplies
bfloat16 matrices as if their bits were integers. Everything else is as Triton has it (3.7). The environment variable
TRITON_INTERPRET must be 1 before triton is imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(bits: Any) -> Any:
    """bfloat16 as uint16[...] → float32[...]."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Any) -> Any:
    """float32[...] → bfloat16 as uint16[...]."""
    rounded = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def repair() -> None:
    """Changes this process's interpreter. Raises RuntimeError if kernels are not interpreted here."""
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 must be in the environment before triton is imported")
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(narrow(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(widen(source.data), tl.float32)
        return cast(self, source, target)

    def create_dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (TensorHandle(widen(side.data), tl.float32) for side in (a, b))
        return dot(self, a, b, total, *options)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot
