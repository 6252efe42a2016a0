"""Tensors as views of mapped segments: no copy and no system call for any of them.

`bind` builds one typed view of each segment per dtype and slices that, so ten thousand tensors cost ten thousand
cheap slices. Bounds are checked for every tensor before anything is built.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from preload.engine.cuda.views import DeviceArray, DeviceSegments
from preload.engine.errors import DeviceError, ManifestError, RequestError
from preload.protos import weight_cache_pb2 as pb

from .mapping import Mapped, sizes_of

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip
"""Bytes per element of every dtype a manifest may name."""

Maker = Callable[[str, tuple[int, ...], tuple[int, ...], int, int], Any]
"""(dtype, shape, stride in elements, segment, offset in bytes) → a view; segment −1 for a tensor without elements."""


def bind(manifest: pb.Manifest, segments: Mapped, kind: str) -> dict[str, Any]:
    """Every tensor of a manifest by name, as "torch" tensors, "numpy" arrays, read-only "buffers" (memoryviews of
    bytes), or "device" arrays. Raises ManifestError naming a tensor that does not fit, RequestError on another kind,
    DeviceError on one that the memory of a device cannot be."""
    make = _maker(segments, kind)
    sizes = sizes_of(segments)
    tensors = {}
    for tensor in manifest.tensors:
        # Each field is read once: with ten thousand tensors, reading a message is what this loop costs.
        name, dtype, shape = tensor.name, tensor.dtype, tuple(tensor.shape)
        segment, offset, num_bytes = tensor.segment, tensor.offset, tensor.num_bytes
        item_bytes = ITEM_BYTES.get(dtype)
        if item_bytes is None:
            raise ManifestError(f"tensor {name} has the unknown dtype {dtype!r}")
        num_elements, stride = _contiguous(shape)
        if num_elements * item_bytes != num_bytes or tensor.stride:
            raise ManifestError(f"tensor {name}: {num_bytes} bytes do not hold a contiguous {dtype}{list(shape)}")
        if not num_bytes:
            segment = -1
        elif segment >= len(sizes) or offset + num_bytes > sizes[segment] or offset % item_bytes:
            raise ManifestError(f"tensor {name} lies outside its segment, or is not aligned")
        tensors[name] = make(dtype, shape, stride, segment, offset)
    return tensors


def _maker(segments: Mapped, kind: str) -> Maker:
    makers: dict[str, Callable[[Sequence[memoryview]], Maker]] = {
        "torch": _torch_maker,
        "numpy": _numpy_maker,
        "buffers": _buffer_maker,
    }
    if kind not in (*makers, "device"):
        raise RequestError(f"unknown kind of tensors {kind!r}; known are {', '.join(makers)} and device")
    if isinstance(segments, list):
        if kind == "device":
            raise RequestError("these weights are in host memory: there are no device arrays of them")
        return makers[kind](segments)
    if kind == "device":
        return _device_maker(segments)
    if kind == "torch" and not segments.device.is_emulated:
        return _cuda_maker(segments)
    return makers[kind](segments.host_views())


def _cuda_maker(segments: DeviceSegments) -> Maker:
    """Views of device memory by torch, which reads the CUDA array interface of one whole segment at a time."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            f"these weights are in memory of {segments.device.name}, and this torch ({torch.__version__}) has no "
            "CUDA: install a build that has"
        )
    where = torch.device("cuda", segments.device.index)
    bases: dict[tuple[int, str], torch.Tensor] = {}

    def base(segment: int, dtype: str) -> torch.Tensor:
        size = segments.sizes[segment]
        whole = DeviceArray(segments.addresses[segment], "uint8", (size,), size, 1, segments)
        view = torch.as_tensor(whole, device=where).view(getattr(torch, dtype))
        bases[segment, dtype] = view
        return view

    def make(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], segment: int, offset: int) -> torch.Tensor:
        if segment < 0:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=where)
        view = bases.get((segment, dtype))
        if view is None:
            view = base(segment, dtype)
        return view.as_strided(shape, stride, offset // ITEM_BYTES[dtype])

    return make


def _device_maker(segments: DeviceSegments) -> Maker:
    def make(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], segment: int, offset: int) -> DeviceArray:
        address = segments.addresses[segment] + offset if segment >= 0 else 0
        item_bytes = ITEM_BYTES[dtype]
        return DeviceArray(address, dtype, shape, math.prod(shape) * item_bytes, item_bytes, segments)

    return make


def _torch_maker(segments: Sequence[memoryview]) -> Maker:
    import torch

    bases: dict[tuple[int, str], torch.Tensor] = {}

    def base(segment: int, dtype: str) -> torch.Tensor:
        with warnings.catch_warnings():
            # The mapping is read-only on purpose; torch has no read-only tensors and says so.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            view = torch.frombuffer(segments[segment], dtype=getattr(torch, dtype))
        bases[segment, dtype] = view
        return view

    def make(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], segment: int, offset: int) -> torch.Tensor:
        if segment < 0:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        view = bases.get((segment, dtype))
        if view is None:
            view = base(segment, dtype)
        return view.as_strided(shape, stride, offset // ITEM_BYTES[dtype])

    return make


def _numpy_maker(segments: Sequence[memoryview]) -> Maker:
    import numpy as np

    def make(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], segment: int, offset: int) -> Any:
        # numpy has no bfloat16 and no float8: their bits come as unsigned integers of the same width.
        known = hasattr(np, dtype) or dtype == "bool"
        np_dtype = np.dtype(dtype if known else f"uint{8 * ITEM_BYTES[dtype]}")
        if segment < 0:
            return np.empty(shape, np_dtype)
        return np.ndarray(shape, np_dtype, segments[segment], offset)

    return make


def _buffer_maker(segments: Sequence[memoryview]) -> Maker:
    def make(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], segment: int, offset: int) -> memoryview:
        if segment < 0:
            return memoryview(b"")
        return segments[segment][offset : offset + math.prod(shape) * ITEM_BYTES[dtype]]

    return make


@cache
def _contiguous(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Number of elements and row-major strides of a shape; models repeat few shapes."""
    stride, strides = 1, [1] * len(shape)
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = stride
        stride *= shape[axis]
    return stride, tuple(strides)
