"""Resident device memory as arrays: for other libraries, for torch, and, on an emulated device, for the host.

Every view keeps the mapping alive; the last one that goes unmaps it and lets go of the context.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from preload.engine.errors import DeviceError, PreloadError

from . import dlpack
from .context import DeviceContext
from .mapping import DeviceMapping, Shared

log = logging.getLogger(__name__)


class DeviceSegments:
    """A shard's segments, mapped into this process: read-only, if that can be. Raises DeviceError, NoMemoryError."""

    def __init__(self, device: str, shared: Shared) -> None:
        context = DeviceContext(device)
        try:
            mapping = DeviceMapping(context, shared, writable=False)
        except BaseException:
            _release(None, context, [])
            raise
        self.device = context.device
        self.backend = shared.backend
        self._afterwards: list[Callable[[], None]] = []
        self.addresses = mapping.addresses
        self.sizes = mapping.sizes
        # Not at the interpreter's end: the driver may be gone by then, and the process takes everything with it.
        weakref.finalize(self, _release, mapping, context, self._afterwards).atexit = False

    def when_unmapped(self, action: Callable[[], None]) -> None:
        """Calls `action` after the last view is gone and everything is unmapped, in whatever thread that is."""
        self._afterwards.append(action)

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


def _release(mapping: DeviceMapping | None, context: DeviceContext, afterwards: list[Callable[[], None]]) -> None:
    """Nobody is there to hear of errors when the last view goes, or when another error is on its way."""
    for release in (mapping.close if mapping is not None else None, context.close):
        try:
            if release is not None:
                release()
        except PreloadError as error:
            log.warning("device memory is not given back before this process ends: %s", error.message)
    for action in afterwards:
        action()


@dataclass(frozen=True)
class DeviceArray:
    """One tensor in device memory, for any library that reads the CUDA array interface or DLPack.

    dtypes that the CUDA array interface has no code for (bfloat16, float8, 4-bit pairs) come by it as unsigned
    integers of their width; `dtype` is the real one, and DLPack has them all. The memory is mapped read-only, which
    neither says of an array that torch would take: a store through it kills the context of whoever stores."""

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

    def __dlpack_device__(self) -> tuple[int, int]:
        """The device as DLPack counts: an emulated one is the host, whose addresses these are."""
        if self.segments is None or self.segments.device.is_emulated:
            return dlpack.CPU, 0
        return dlpack.CUDA, self.segments.device.index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule, without a copy. Nobody writes resident memory, so no stream has to be waited for.

        Raises BufferError if a copy is wanted, or another device."""
        here = self.__dlpack_device__()
        if copy or dl_device not in (None, here):
            raise BufferError(f"resident weights are passed on where they are, {here}, and without a copy")
        return dlpack.make_capsule(self.address, self.dtype, self.shape, here, self)


_TYPE_CODES = {
    "bool": "|b1", "uint8": "|u1", "int8": "|i1", "uint16": "<u2", "int16": "<i2", "float16": "<f2",
    "uint32": "<u4", "int32": "<i4", "float32": "<f4", "uint64": "<u8", "int64": "<i8", "float64": "<f8",
    "complex64": "<c8",
}  # fmt: skip
"""What numpy calls those dtypes that it has."""
