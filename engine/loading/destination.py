"""Where a load writes: memfds of the host, or segments of a GPU mapped read-write into this process.

A destination takes bytes at (segment, offset) from any thread. What it was given may be reused when the call returns;
it is in place when `finish` has returned. `close` gives everything back, also after an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from preload.engine.cuda.context import DeviceContext
from preload.engine.cuda.devices import HOST
from preload.engine.cuda.mapping import DeviceMapping, Shared
from preload.engine.errors import PreloadError
from preload.engine.huge_pages import HugePages

STAGING_BYTES = 1 << 20
"""Of each of a thread's two pinned buffers: one is filled while the other is on its way to the device."""


class Destination(Protocol):
    """Use it as a context manager; `open` comes before the first `write`."""

    def open(self, granted: Shared) -> None:
        """Takes the granted segments. Raises DeviceError, NoMemoryError."""

    def write(self, segment: int, offset: int, data: memoryview) -> None:
        """Raises DeviceError, NoMemoryError, OSError."""

    def address(self, segment: int, offset: int) -> int:
        """Where that is, for what writes on the device by itself; only a GPU's destination is asked."""

    def finish(self) -> None:
        """Returns when every byte is in place. Raises DeviceError."""

    def close(self) -> None:
        """Lets go of whatever is held; for a GPU, unmaps the segments. Idempotent."""

    def __enter__(self) -> Destination: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def make_destination(device: str) -> Destination:
    """For the device of a job. A GPU is asked for its context here, before anything is read.

    Raises DeviceError, NoMemoryError."""
    return HostDestination() if device in ("", HOST) else DeviceDestination(device)


class HostDestination:
    """Writes through the descriptors of memfds, into huge pages where the system has some."""

    def __init__(self) -> None:
        self._fds: Sequence[int] = ()
        self._pages: list[HugePages] = []

    def open(self, granted: Shared) -> None:
        self._fds = granted.fds
        self._pages = [HugePages(fd, size) for fd, size in zip(granted.fds, granted.sizes, strict=True)]

    def write(self, segment: int, offset: int, data: memoryview) -> None:
        self._pages[segment].prepare(offset, len(data))
        done = 0
        while done < len(data):
            done += os.pwrite(self._fds[segment], data[done:], offset + done)

    def address(self, segment: int, offset: int) -> int:
        raise AssertionError("memory of the host is written through descriptors")

    def finish(self) -> None:
        for pages in self._pages:
            pages.finish()
        wanted, got = (sum(getattr(pages, name) for pages in self._pages) for name in ("num_pages", "num_huge"))
        if got < wanted:
            print(f"{got} of {wanted} pieces of 2 MiB are huge pages: engines read the rest slower", file=sys.stderr)

    def close(self) -> None:
        for pages in self._pages:
            pages.close()

    def __enter__(self) -> HostDestination:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass
class _Staging:
    """A pinned buffer: its address, a view of it, and the event after which it may be filled again."""

    address: int
    view: Any
    event: Any
    is_busy: bool = False


class _Lane:
    """One thread's stream with its two pinned buffers."""

    def __init__(self, context: DeviceContext) -> None:
        import ctypes

        import numpy as np

        self._call = context.driver.call
        self._staging: list[_Staging] = []
        self._stream: Any = None
        self._next = 0
        context.make_current()
        try:
            self._stream = self._call("cuStreamCreate", context.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
            for _ in range(2):
                address = int(self._call("cuMemHostAlloc", STAGING_BYTES, 0))
                staging = _Staging(address, None, None)
                self._staging.append(staging)
                staging.view = np.ctypeslib.as_array((ctypes.c_ubyte * STAGING_BYTES).from_address(address))
                staging.event = self._call("cuEventCreate", context.driver.api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        except BaseException:
            with contextlib.suppress(PreloadError):  # the first error is the one to hear of
                self.close()
            raise

    def write(self, address: int, data: Any) -> None:
        """`data`: uint8[n] of numpy, whose copying releases the interpreter's lock."""
        for start in range(0, len(data), STAGING_BYTES):
            piece = data[start : start + STAGING_BYTES]
            staging = self._staging[self._next]
            self._next = 1 - self._next
            if staging.is_busy:
                self._call("cuEventSynchronize", staging.event)
            staging.view[: len(piece)] = piece
            self._call("cuMemcpyHtoDAsync", address + start, staging.address, len(piece), self._stream)
            self._call("cuEventRecord", staging.event, self._stream)
            staging.is_busy = True

    def finish(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        if self._stream is not None:
            self._call("cuStreamDestroy", self._stream)
            self._stream = None
        while self._staging:
            staging = self._staging.pop()
            if staging.event is not None:
                self._call("cuEventDestroy", staging.event)
            self._call("cuMemFreeHost", staging.address)


class DeviceDestination:
    """Copies through pinned buffers on one stream for each thread. Transient memory: two buffers a thread."""

    def __init__(self, device: str) -> None:
        self._context = DeviceContext(device)
        self._mapping: DeviceMapping | None = None
        self._local = threading.local()
        self._lanes: list[_Lane] = []
        self._lock = threading.Lock()

    def open(self, granted: Shared) -> None:
        self._mapping = DeviceMapping(self._context, granted, writable=True)

    def address(self, segment: int, offset: int) -> int:
        assert self._mapping is not None
        return self._mapping.addresses[segment] + offset

    def write(self, segment: int, offset: int, data: memoryview) -> None:
        import numpy as np

        lane: _Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = _Lane(self._context)
            with self._lock:
                self._lanes.append(lane)
        lane.write(self.address(segment, offset), np.frombuffer(data, np.uint8))

    def finish(self) -> None:
        for lane in self._lanes:
            lane.finish()

    def close(self) -> None:
        while self._lanes:
            self._lanes.pop().close()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        self._context.close()

    def __enter__(self) -> DeviceDestination:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """After an error nothing more is asked of a driver that may be the cause: the loader ends, and with it all
        that it holds."""
        if error is None:
            self.close()
