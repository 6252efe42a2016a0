"""Device segments mapped into this process: one address range, in which they lie one after the other.

The number of driver calls depends on the number of segments, never on that of tensors. Descriptors stay the caller's.
Whatever fails on the way, what was taken before it is given back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from preload.engine.errors import PreloadError

from .context import DeviceContext
from .driver import Driver


class DeviceMapping:
    """Owns the range and the mappings in it. `addresses` and `sizes` are those of the segments, in order.

    `sizes` must be multiples of the device's granularity, as the daemon's are. Raises DeviceError, NoMemoryError."""

    def __init__(self, context: DeviceContext, fds: Sequence[int], sizes: Sequence[int], *, writable: bool) -> None:
        self.sizes = list(sizes)
        self.addresses: list[int] = []
        self._undo: list[tuple[str, int, int]] = []
        self._driver = context.driver
        if not self.sizes:
            return
        try:
            self._map_all(context, fds, writable)
        except BaseException:
            self._unwind()
            raise

    def _map_all(self, context: DeviceContext, fds: Sequence[int], writable: bool) -> None:
        driver, total = self._driver, sum(self.sizes)
        start = int(driver.call("cuMemAddressReserve", total, 0, 0, 0))
        self._undo.append(("cuMemAddressFree", start, total))
        addresses = list(accumulate(self.sizes, initial=start))[:-1]
        for fd, address, size in zip(fds, addresses, self.sizes, strict=True):
            _map(driver, fd, address, size)
            self._undo.append(("cuMemUnmap", address, size))
        driver.call("cuMemSetAccess", start, total, [_access(context, writable)], 1)
        self.addresses = addresses

    def close(self) -> None:
        """Unmaps everything: no tensor over it may be used any more. Idempotent. Raises DeviceError."""
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


def _map(driver: Driver, fd: int, address: int, size: int) -> None:
    """A mapping keeps its memory: the handle is needed no longer than for mapping."""
    kind = driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = driver.call("cuMemImportFromShareableHandle", fd, kind)
    try:
        driver.call("cuMemMap", address, size, 0, handle, 0)
    except BaseException:
        with contextlib.suppress(PreloadError):  # the first error is the one to hear of
            driver.call("cuMemRelease", handle)
        raise
    try:
        driver.call("cuMemRelease", handle)
    except BaseException:
        with contextlib.suppress(PreloadError):
            driver.call("cuMemUnmap", address, size)
        raise


def _access(context: DeviceContext, writable: bool) -> Any:
    api = context.driver.api
    flags = api.CUmemAccess_flags
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = int(context.device.handle)
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    return access
