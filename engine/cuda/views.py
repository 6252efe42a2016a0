"""Resident device memory as arrays: for other libraries, for torch, and, on an emulated device, for the host.

Every view keeps the mapping alive; the last one that goes unmaps it and lets go of the context.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from preload.engine.errors import DeviceError, PreloadError

from .context import DeviceContext
from .mapping import DeviceMapping

log = logging.getLogger(__name__)


class DeviceSegments:
    """A shard's segments, mapped read-only into this process. Raises DeviceError, NoMemoryError."""

    def __init__(self, device: str, fds: Sequence[int], sizes: Sequence[int]) -> None:
        context = DeviceContext(device)
        try:
            mapping = DeviceMapping(context, fds, sizes, writable=False)
        except BaseException:
            _release(None, context)
            raise
        self.device = context.device
        self.addresses = mapping.addresses
        self.sizes = mapping.sizes
        # Not at the interpreter's end: the driver may be gone by then, and the process takes everything with it.
        weakref.finalize(self, _release, mapping, context).atexit = False

    def host_views(self) -> list[memoryview]:
        """Read-only views by the host's own addresses, which only an emulated device's memory has.

        Raises DeviceError on a real one."""
        if not self.device.is_emulated:
            raise DeviceError(
                f"memory of {self.device.name} has no addresses on the host: attach with tensors='torch' (a build of "
                "torch with CUDA) or tensors='device'",
                {"device": self.device.name},
            )
        views = []
        for address, size in zip(self.addresses, self.sizes, strict=True):
            array: Any = (ctypes.c_ubyte * size).from_address(address)
            array.keeps = self  # as long as anybody looks at it
            views.append(memoryview(array).cast("B").toreadonly())
        return views


def _release(mapping: DeviceMapping | None, context: DeviceContext) -> None:
    """Nobody is there to hear of errors when the last view goes, or when another error is on its way."""
    for release in (mapping.close if mapping is not None else None, context.close):
        try:
            if release is not None:
                release()
        except PreloadError as error:
            log.warning("device memory is not given back before this process ends: %s", error.message)


@dataclass(frozen=True)
class DeviceArray:
    """One tensor in device memory, for any library that reads the CUDA array interface.

    dtypes that the interface has no code for (bfloat16, float8) come as unsigned integers of their width; `dtype` is
    the real one. The memory is mapped read-only, which the interface says of no array that torch would take: a store
    through it kills the context of whoever stores."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    item_bytes: int
    segments: DeviceSegments | None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": _TYPE_CODES.get(self.dtype, f"<u{self.item_bytes}"),
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }


_TYPE_CODES = {
    "bool": "|b1", "uint8": "|u1", "int8": "|i1", "uint16": "<u2", "int16": "<i2", "float16": "<f2",
    "uint32": "<u4", "int32": "<i4", "float32": "<f4", "uint64": "<u8", "int64": "<i8", "float64": "<f8",
    "complex64": "<c8",
}  # fmt: skip
"""What numpy calls those dtypes that it has."""
