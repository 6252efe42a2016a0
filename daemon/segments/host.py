"""Host-memory segments: sealed memfds.

A segment is created empty and writable for its one loader, and sealed for good at commit: it can no longer
shrink, grow, be written, or be mapped writable, by anybody, and no seal can be added. The daemon holds only the
descriptor; it never maps the memory.
"""

from __future__ import annotations

import fcntl
import os

from .closer import close_later

_MAX_NAME_BYTES = 249
_LAYOUT_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1; not in Python's fcntl before 3.13. No new writable mapping and no write(); the loader's own
writable mapping lives on until it exits, which the daemon waits for before it serves the segment."""


def is_sealed(fd: int) -> bool:
    """Whether a descriptor is a segment as `HostSegment.seal` leaves it."""
    wanted = _LAYOUT_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted)
    except OSError:
        return False


class HostSegment:
    """Owns one memfd. `size_bytes` is a multiple of the page size."""

    backend = "host"
    handle = b""
    dies_with_us = False

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes

    @staticmethod
    def allocate(size_bytes: int, name: str) -> HostSegment:
        """Reserves address space only; pages are charged to whoever touches them first, the loader. The name is for
        whoever looks at /proc, and is cut to what the kernel takes.

        Raises OSError (EMFILE, ENFILE, ENOMEM, EFBIG)."""
        label = f"preload:{name}".encode(errors="replace").replace(b"\0", b"?")[:_MAX_NAME_BYTES]
        fd = os.memfd_create(os.fsdecode(label), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _LAYOUT_SEALS)
        except OSError:
            os.close(fd)
            raise
        return HostSegment(fd, size_bytes)

    def seal(self) -> None:
        """Read-only for everybody from now on, irrevocably."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)

    def close(self) -> None:
        """Lets go of the descriptor, in a thread."""
        if self.fd >= 0:
            close_later(self.fd)
            self.fd = -1
