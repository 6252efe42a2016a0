"""The primary context of one device, which torch uses as well: memory mapped here can be used by its kernels."""

from __future__ import annotations

import contextlib
from types import TracebackType

from preload.engine.errors import PreloadError

from .devices import VisibleDevice, find_device
from .driver import Driver, shared_driver


class DeviceContext:
    """Retains the context of a device by its resolved name, and makes it current in this thread.

    Raises DeviceError if this process does not see the device, NoMemoryError if it has no room for a context."""

    def __init__(self, name: str) -> None:
        self.driver: Driver = shared_driver()
        self.device: VisibleDevice = find_device(name)
        self._context = self.driver.call("cuDevicePrimaryCtxRetain", self.device.handle)
        self._is_open = True
        try:
            self.make_current()
        except BaseException:
            with contextlib.suppress(PreloadError):  # the first error is the one to hear of
                self.close()
            raise

    def make_current(self) -> None:
        """Every thread that copies needs this once."""
        self.driver.call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Lets go of the context; it ends with its last holder. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.driver.call("cuDevicePrimaryCtxRelease", self.device.handle)

    def __enter__(self) -> DeviceContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(PreloadError):  # what ended the block is what to hear of
            self.close()
