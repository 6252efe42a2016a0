"""Tensors as views of mapped segments: no copy and no system call for any of them.

`bind` builds one typed view of each segment per dtype and slices that, so ten thousand tensors cost ten thousand
cheap slices. Bounds are checked for every tensor before anything is built.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from preload.engine.errors import ManifestError, RequestError
from preload.protos import weight_cache_pb2 as pb

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip
"""Bytes per element of every dtype a manifest may name."""

_Maker = Callable[[mmap.mmap, pb.Tensor], Any]


def bind(manifest: pb.Manifest, segments: Sequence[mmap.mmap], kind: str) -> dict[str, Any]:
    """Every tensor of a manifest by name, as "torch" tensors, "numpy" arrays or read-only "buffers" (memoryviews of
    bytes). Raises ManifestError naming a tensor that does not fit, RequestError on another kind."""
    makers: dict[str, Callable[[], Callable[[pb.Tensor], Any]]] = {
        "torch": lambda: _torch_maker(segments),
        "numpy": lambda: _numpy_maker(segments),
        "buffers": lambda: _buffer_maker(segments),
    }
    if kind not in makers:
        raise RequestError(f"unknown kind of tensors {kind!r}; known are {', '.join(makers)}")
    make = makers[kind]()
    sizes = [len(segment) for segment in segments]
    tensors = {}
    for tensor in manifest.tensors:
        _check_bounds(tensor, sizes)
        tensors[tensor.name] = make(tensor)
    return tensors


def _check_bounds(tensor: pb.Tensor, segment_bytes: Sequence[int]) -> None:
    item_bytes = ITEM_BYTES.get(tensor.dtype)
    if item_bytes is None:
        raise ManifestError(f"tensor {tensor.name} has the unknown dtype {tensor.dtype!r}")
    num_bytes = tensor.num_bytes
    if math.prod(tensor.shape) * item_bytes != num_bytes or tensor.stride:
        raise ManifestError(f"tensor {tensor.name}: {num_bytes} bytes do not hold {tensor.dtype}{list(tensor.shape)}")
    if num_bytes and (
        tensor.segment >= len(segment_bytes)
        or tensor.offset + num_bytes > segment_bytes[tensor.segment]
        or tensor.offset % item_bytes
    ):
        raise ManifestError(f"tensor {tensor.name} lies outside its segment, or is not aligned")


def _torch_maker(segments: Sequence[mmap.mmap]) -> Callable[[pb.Tensor], Any]:
    import torch

    typed: dict[tuple[int, str], torch.Tensor] = {}

    def base(index: int, dtype: str) -> torch.Tensor:
        view = typed.get((index, dtype))
        if view is None:
            with warnings.catch_warnings():
                # The mapping is read-only on purpose; torch has no read-only tensors and says so.
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                view = torch.frombuffer(segments[index], dtype=getattr(torch, dtype))
            typed[index, dtype] = view
        return view

    def make(tensor: pb.Tensor) -> torch.Tensor:
        shape = tuple(tensor.shape)
        if not tensor.num_bytes:
            return torch.empty(shape, dtype=getattr(torch, tensor.dtype))
        stride = _contiguous(shape)
        return base(tensor.segment, tensor.dtype).as_strided(shape, stride, tensor.offset // ITEM_BYTES[tensor.dtype])

    return make


def _numpy_maker(segments: Sequence[mmap.mmap]) -> Callable[[pb.Tensor], Any]:
    import numpy as np

    def make(tensor: pb.Tensor) -> Any:
        # numpy has no bfloat16 and no float8: their bits come as unsigned integers of the same width.
        known = hasattr(np, tensor.dtype) or tensor.dtype == "bool"
        dtype = np.dtype(tensor.dtype if known else f"uint{8 * ITEM_BYTES[tensor.dtype]}")
        shape = tuple(tensor.shape)
        if not tensor.num_bytes:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, segments[tensor.segment], tensor.offset)

    return make


def _buffer_maker(segments: Sequence[mmap.mmap]) -> Callable[[pb.Tensor], Any]:
    views = [memoryview(segment) for segment in segments]

    def make(tensor: pb.Tensor) -> memoryview:
        if not tensor.num_bytes:
            return memoryview(b"")
        return views[tensor.segment][tensor.offset : tensor.offset + tensor.num_bytes]

    return make


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, strides = 1, [1] * len(shape)
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = stride
        stride *= shape[axis]
    return tuple(strides)
