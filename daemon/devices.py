"""The memories that generations can live in: the host's, and those of GPUs, each with its ledger.

A GPU is known by its UUID and comes in when it is first asked for, or with what the last life of the daemon parked;
the driver is not touched before. Asking a driver blocks, so that happens in threads.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import re
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from .capacity import Ledger, check_kernel_has, parse_limit, physical_host_bytes, refusal
from .errors import BadRequestError
from .holders import Holders
from .segments import Segment
from .segments.cuda_vmm import CudaVmm, CudaVmmSegment
from .segments.driver import DeviceInfo
from .segments.host import HostSegment, is_sealed

HOST = "host"
CUDA_VMM, CUDA_IPC = "cuda_vmm", "cuda_ipc"
DEVICE_MEMORIES = (CUDA_VMM, CUDA_IPC)
_CUDA = re.compile(r"cuda:GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")

T = TypeVar("T")


def checked_name(name: str) -> str:
    """The name of a device as a request or a configuration has it. Raises BadRequestError unless it can be one."""
    if name != HOST and not _CUDA.fullmatch(name):
        raise BadRequestError(
            f"unknown device {name!r}; known are host and GPUs by their UUID, such as "
            "cuda:GPU-01234567-89ab-cdef-0123-456789abcdef",
            {"device": name},
        )
    return name


class Device(Protocol):
    """One memory. `granularity_bytes` divides every segment's size."""

    ledger: Ledger
    granularity_bytes: int

    def check_has(self, num_bytes: int, promised_bytes: int) -> None:
        """Raises NoMemoryError if the device could not give that much now, whatever the limit says."""

    async def allocate(self, size_bytes: int, label: str) -> Segment:
        """Raises CacheError."""

    def revive(self, fd: int, size_bytes: int, handle: bytes = b"") -> Segment | None:
        """The segment behind a parked descriptor; None if it is not what was parked."""


class HostDevice:
    """The host's memory, in sealed memfds."""

    granularity_bytes = mmap.PAGESIZE

    def __init__(self, limit: str) -> None:
        self.ledger = Ledger(HOST, parse_limit(limit, physical_host_bytes()))

    def check_has(self, num_bytes: int, promised_bytes: int) -> None:
        check_kernel_has(num_bytes, promised_bytes)

    async def allocate(self, size_bytes: int, label: str) -> Segment:
        try:
            return HostSegment.allocate(size_bytes, label)
        except OSError as error:
            raise refusal(error, f"a segment of {size_bytes:,} bytes") from error

    def revive(self, fd: int, size_bytes: int, handle: bytes = b"") -> Segment | None:
        is_ours = is_sealed(fd) and os.fstat(fd).st_size == size_bytes
        return HostSegment(fd, size_bytes) if is_ours else None


class GpuMemory(Protocol):
    """How memory of GPUs is got: through the driver, or through holders."""

    def describe(self, name: str) -> DeviceInfo:
        """Raises DeviceError."""

    def allocate(self, name: str, size_bytes: int) -> Segment:
        """Raises NoMemoryError, DeviceError."""


class CudaDevice:
    """Memory of one GPU."""

    def __init__(self, memory: GpuMemory, info: DeviceInfo, limit: str) -> None:
        self._memory = memory
        self.info = info
        self.granularity_bytes = info.granularity_bytes
        self.ledger = Ledger(info.name, parse_limit(limit, info.total_bytes))

    def check_has(self, num_bytes: int, promised_bytes: int) -> None:
        """What others leave of a GPU can be asked with a context only, which the daemon has not: it is found out by
        allocating."""

    async def allocate(self, size_bytes: int, label: str) -> Segment:
        return await _in_thread(
            lambda: self._memory.allocate(self.info.name, size_bytes), lambda segment: segment.close()
        )

    def revive(self, fd: int, size_bytes: int, handle: bytes = b"") -> Segment | None:
        """The driver tells no size of a descriptor that is not mapped: the catalog is believed."""
        return CudaVmmSegment(fd, size_bytes, handle)


class Devices:
    """All memories of this daemon, by name. Of GPUs, new segments are of one backend; those that an earlier life
    parked are of whatever it was then."""

    def __init__(self, host_limit: str, device_limit: str, holders: Holders, device_memory: str = CUDA_VMM) -> None:
        self.host = HostDevice(host_limit)
        self.holders = holders
        self._limit = device_limit
        self._memory: GpuMemory = holders if device_memory == CUDA_IPC else CudaVmm()
        self._cuda: dict[str, CudaDevice] = {}

    def __iter__(self) -> Iterator[Device]:
        """Those that are known, the host first."""
        yield self.host
        yield from self._cuda.values()

    def of(self, name: str) -> Device:
        """A device that is known already: every generation's is."""
        return self.host if name == HOST else self._cuda[name]

    async def open(self, name: str) -> Device:
        """A device that somebody asks for. Raises BadRequestError, DeviceError."""
        checked_name(name)
        if name != HOST and name not in self._cuda:
            info = await _in_thread(lambda: self._memory.describe(name))
            if name not in self._cuda:  # another may have asked meanwhile
                self.adopt(info)
        return self.of(name)

    def adopt(self, info: DeviceInfo) -> None:
        """Takes a device in as it was described, by the driver or by an earlier life of the daemon."""
        self._cuda[info.name] = CudaDevice(self._memory, info, self._limit)

    def described(self) -> list[DeviceInfo]:
        """The GPUs that are known."""
        return [device.info for device in self._cuda.values()]

    def limit(self, host_limit: str, device_limit: str) -> None:
        """Other limits from now on. Raises BadRequestError before anything is changed."""
        host_bytes = parse_limit(host_limit, physical_host_bytes())
        cuda_bytes = {name: parse_limit(device_limit, device.info.total_bytes) for name, device in self._cuda.items()}
        self._limit = device_limit
        self.host.ledger.capacity_bytes = host_bytes
        for name, capacity_bytes in cuda_bytes.items():
            self._cuda[name].ledger.capacity_bytes = capacity_bytes


async def _in_thread(work: Callable[[], T], undo: Callable[[T], None] = lambda _: None) -> T:
    """Runs what blocks. It cannot be cancelled: if the caller is, the result is undone when it is there."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else undo(done.result()))
        raise
