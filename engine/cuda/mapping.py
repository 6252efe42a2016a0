"""Device segments of another process mapped into this one.

By descriptors or fabric handles: one address range, in which the segments lie one after the other. By IPC handles: a
range for each, always writable, which is the exporter's memory and ends with it. The number of driver calls depends
on the number of segments, never on that of tensors. Descriptors stay the caller's. Whatever fails on the way, what
was taken before it is given back.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from preload.engine.errors import DeviceError, PreloadError

from .context import DeviceContext
from .driver import Driver

CUDA_VMM, CUDA_IPC = "cuda_vmm", "cuda_ipc"
HANDLE_BYTES = 64


@dataclass(frozen=True)
class Shared:
    """A shard's segments as they were passed on: by descriptors, or by handles of 64 bytes (fabric or IPC, as the
    backend has them)."""

    sizes: Sequence[int]
    fds: Sequence[int] = ()
    handles: Sequence[bytes] = field(default=(), repr=False)
    backend: str = CUDA_VMM


class DeviceMapping:
    """Owns the mappings. `addresses` and `sizes` are those of the segments, in order.

    Sizes must be multiples of the device's granularity, as the daemon's are. Raises DeviceError, NoMemoryError."""

    def __init__(self, context: DeviceContext, shared: Shared, *, writable: bool) -> None:
        self.sizes = list(shared.sizes)
        self.addresses: list[int] = []
        self._undo: list[tuple[Any, ...]] = []
        self._context = context
        self._driver = context.driver
        self._needs_context = shared.backend == CUDA_IPC
        if not self.sizes:
            return
        try:
            if shared.backend == CUDA_IPC:
                self._open_all(shared)
            else:
                self._map_all(shared, writable)
        except BaseException:
            self._unwind()
            raise

    def _map_all(self, shared: Shared, writable: bool) -> None:
        driver, total = self._driver, sum(self.sizes)
        start = int(driver.call("cuMemAddressReserve", total, 0, 0, 0))
        self._undo.append(("cuMemAddressFree", start, total))
        addresses = list(accumulate(self.sizes, initial=start))[:-1]
        given: Sequence[int | bytes] = shared.fds or shared.handles
        for passed, address, size in zip(given, addresses, self.sizes, strict=True):
            _map(driver, passed, address, size)
            self._undo.append(("cuMemUnmap", address, size))
        driver.call("cuMemSetAccess", start, total, [_access(self._context, writable)], 1)
        self.addresses = addresses

    def _open_all(self, shared: Shared) -> None:
        addresses = []
        for handle in shared.handles:
            addresses.append(_open(self._driver, handle))
            self._undo.append(("cuIpcCloseMemHandle", addresses[-1]))
        if len(addresses) != len(self.sizes):
            raise DeviceError(f"{len(addresses)} IPC handles came for {len(self.sizes)} segments")
        self.addresses = addresses

    def close(self) -> None:
        """Unmaps everything: no tensor over it may be used any more. Idempotent. Raises DeviceError."""
        if self._undo and self._needs_context:
            self._context.make_current()  # the last view may go in any thread
        error = self._unwind()
        if error is not None:
            raise error

    def _unwind(self) -> PreloadError | None:
        """Gives back all that the driver takes back; the first thing that it would not."""
        first = None
        while self._undo:
            try:
                self._driver.call(*self._undo.pop())
            except PreloadError as error:
                first = first or error
        return first


def _map(driver: Driver, passed: int | bytes, address: int, size: int) -> None:
    """A mapping keeps its memory: the handle is needed no longer than for mapping."""
    handle = _import(driver, passed)
    try:
        driver.call("cuMemMap", address, size, 0, handle, 0)
    except BaseException:
        with contextlib.suppress(PreloadError):  # the first error is the one to hear of
            driver.call("cuMemRelease", handle)
        raise
    try:
        driver.call("cuMemRelease", handle)
    except BaseException:
        for undo in (("cuMemRelease", handle), ("cuMemUnmap", address, size)):  # what failed once is tried again
            with contextlib.suppress(PreloadError):
                driver.call(*undo)
        raise


def _import(driver: Driver, passed: int | bytes) -> Any:
    kinds = driver.api.CUmemAllocationHandleType
    if isinstance(passed, int):
        kind = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return driver.call("cuMemImportFromShareableHandle", passed, kind)
    fabric = driver.api.CUmemFabricHandle()
    fabric.data = passed
    where = int(fabric.getPtr())  # cuda-bindings takes its address, and not the handle that it is
    return driver.call("cuMemImportFromShareableHandle", where, kinds.CU_MEM_HANDLE_TYPE_FABRIC)


def _open(driver: Driver, handle: bytes) -> int:
    if len(handle) != HANDLE_BYTES:
        raise DeviceError(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    opaque = driver.api.CUipcMemHandle()
    ctypes.memmove(int(opaque.getPtr()), handle, HANDLE_BYTES)
    lazily = driver.api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    try:
        return int(driver.call("cuIpcOpenMemHandle", opaque, lazily))
    except DeviceError as error:
        raise DeviceError(
            f"{error.message}: the memory of another process cannot be opened here. Either that process, the holder, "
            "has ended, or this container does not let IPC through: run it with the PID and IPC namespaces of the "
            "daemon (docker: --pid=host --ipc=host), or use a daemon with --device-memory cuda_vmm",
            {**error.fields, "cause": "ipc_blocked"},
        ) from error


def _access(context: DeviceContext, writable: bool) -> Any:
    api = context.driver.api
    flags = api.CUmemAccess_flags
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = int(context.device.handle)
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    return access
