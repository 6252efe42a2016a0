"""Accounting of one device's memory: what is resident, what is promised, what is free.

A load reserves before it allocates, and turns its reservation into residency at commit. The ledger only counts;
it neither allocates nor frees.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from .errors import BadRequestError, CacheError, InternalError, NoMemoryError, TooManyError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_limit(text: str, physical_bytes: int) -> int:
    """Bytes of a limit such as "80%", "64G", "512MiB" or "1000000".

    Raises BadRequestError if it is none of these."""
    value = text.strip()
    try:
        if value.endswith("%"):
            share = float(value[:-1])
            if not 0 < share <= 100:
                raise BadRequestError(f"memory limit {text!r}: a share lies between 0 and 100 %")
            return int(physical_bytes * share / 100)
        number = value.upper().removesuffix("IB").removesuffix("B")
        unit = number[-1:] if number[-1:] in ("K", "M", "G", "T") else ""
        result = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError) as error:
        raise BadRequestError(
            f"memory limit {text!r} is neither a share such as 80% nor a size such as 64G"
        ) from error
    if result <= 0:
        raise BadRequestError(f"memory limit {text!r}: a size is positive")
    return result


def physical_host_bytes() -> int:
    """Memory of the host, or of the control group if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def available_host_bytes() -> int:
    """What the kernel could give without swapping: MemAvailable of /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def control_group_headroom_bytes(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int:
    """The least that any control group above this process leaves (version 2: memory.max − memory.current, where
    cache that can be reclaimed counts as left); a number beyond any host if none has a limit."""
    headroom = 1 << 62
    for line in Path(own).read_text().splitlines():
        if not line.startswith("0::/"):
            continue
        folder = Path(root) / line.removeprefix("0::/")
        while folder != Path(root).parent:
            try:
                limit = (folder / "memory.max").read_text().strip()
                used = int((folder / "memory.current").read_text())
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                limit, used, stat = "max", 0, {}
            if limit.isdigit():
                headroom = min(headroom, int(limit) - used + int(stat.get("inactive_file", 0)))
            folder = folder.parent
    return headroom


def refusal(error: OSError, what: str) -> CacheError:
    """The error for something that the system did not give us, naming the limit that was met."""
    match error.errno:
        case errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return TooManyError(
                f"cannot create {what}: the daemon has as many open descriptors as its limit allows, {limit}; raise "
                "it (ulimit -n, LimitNOFILE=) or evict generations"
            )
        case errno.ENFILE:
            return TooManyError(f"cannot create {what}: the host has as many open files as fs.file-max allows")
        case errno.EAGAIN:
            return TooManyError(
                f"cannot create {what}: a limit on processes is reached (ulimit -u, TasksMax=, kernel.pid_max)"
            )
        case errno.ENOMEM | errno.ENOSPC:
            return NoMemoryError(f"cannot create {what}: the kernel has no memory for it ({error.strerror})")
        case errno.EFBIG:
            return BadRequestError(f"cannot create {what}: it is larger than the system lets a file be")
    return InternalError(f"cannot create {what}: {error}")


class Ledger:
    """Counts one device. Invariant: resident + reserved never exceeds capacity through `reserve`."""

    def __init__(self, device: str, capacity_bytes: int) -> None:
        self.device = device
        self.capacity_bytes = capacity_bytes
        self.resident_bytes = 0
        self.reserved_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.resident_bytes - self.reserved_bytes

    def shortage(self, num_bytes: int) -> int:
        """How many bytes must go before `num_bytes` fit; 0 if they fit now."""
        return max(0, num_bytes - self.free_bytes)

    def reserve(self, num_bytes: int, evictable_bytes: int) -> None:
        """Promises `num_bytes` to a load. Raises NoMemoryError with the numbers."""
        if num_bytes > self.free_bytes:
            raise NoMemoryError(
                f"{self.device}: needs {num_bytes:,} bytes, but of a limit of {self.capacity_bytes:,} bytes "
                f"{self.resident_bytes:,} are resident and {self.reserved_bytes:,} reserved, so "
                f"{max(self.free_bytes, 0):,} are free; {evictable_bytes:,} could be evicted (--evict lru)",
                {
                    "device": self.device,
                    "needed_bytes": str(num_bytes),
                    "capacity_bytes": str(self.capacity_bytes),
                    "resident_bytes": str(self.resident_bytes),
                    "reserved_bytes": str(self.reserved_bytes),
                    "evictable_bytes": str(evictable_bytes),
                },
            )
        self.reserved_bytes += num_bytes

    def commit(self, num_bytes: int) -> None:
        """Turns a reservation into residency."""
        self.release(num_bytes)
        self.resident_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Gives a reservation back."""
        assert 0 <= num_bytes <= self.reserved_bytes
        self.reserved_bytes -= num_bytes

    def adopt(self, num_bytes: int) -> None:
        """Counts what an earlier life of the daemon made resident, also beyond a limit that is lower by now."""
        self.resident_bytes += num_bytes

    def free(self, num_bytes: int) -> None:
        """Takes bytes that were resident off the books."""
        assert 0 <= num_bytes <= self.resident_bytes
        self.resident_bytes -= num_bytes


def check_kernel_has(num_bytes: int, promised_bytes: int = 0) -> None:
    """Raises NoMemoryError if the host, or this process's control group, could not hold `num_bytes` more, whatever
    the limit says. `promised_bytes` are other loads', which the kernel does not know of yet."""
    available = min(available_host_bytes(), control_group_headroom_bytes()) - promised_bytes
    if num_bytes > available:
        raise NoMemoryError(
            f"host: needs {num_bytes:,} bytes, but the kernel reports only {available:,} available",
            {"device": "host", "needed_bytes": str(num_bytes), "available_bytes": str(available)},
        )
