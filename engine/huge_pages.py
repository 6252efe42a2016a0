"""Memory in huge pages: weights are read from end to end for every token, and with pages of 4 KiB a
processor may spend a third of that time on finding them.

The loader asks the kernel for each 2 MiB of a segment before it writes there (`HugePages`); whoever maps the segment
does it where such pages can be mapped (`map_shared`). MADV_COLLAPSE (Linux 6.1) does that whatever the system's
settings for shared memory are. Without it, or without free memory in such pieces, the pages are small ones.
Keys and values are read as often, and are the process's own (`private_memory`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading

HUGE_BYTES = 2 << 20
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAX_FAILURES = 8
"""In a row; each may have searched for memory."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_shared(fd: int, size_bytes: int) -> memoryview:
    """The file's first size_bytes bytes, read-only and shared, for as long as somebody has the view or a part of it.

    Raises OSError."""
    return _Mapping(fd, size_bytes).view


class _Mapping:
    """A reservation that belongs to `mmap`, and the file over a part of it that begins where a huge page may."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        area = mmap.mmap(-1, size_bytes + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        start = _address_of(area)
        self.address = -(-start // HUGE_BYTES) * HUGE_BYTES
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(self.address, size_bytes, mmap.PROT_READ, flags, fd, 0) != self.address:
            number = ctypes.get_errno()
            raise OSError(number, f"mmap of {size_bytes:,} bytes: {os.strerror(number)}")
        self.view = memoryview(area)[self.address - start : self.address - start + size_bytes]


def _address_of(area: mmap.mmap) -> int:
    """Where a mapping lies; ctypes takes no addresses of read-only buffers."""
    view = ctypes.py_object(area)
    buffer = _PyBuffer()
    if ctypes.pythonapi.PyObject_GetBuffer(view, ctypes.byref(buffer), 0) != 0:
        raise BufferError("a mapping has no buffer")
    address = int(buffer.buf)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


class _PyBuffer(ctypes.Structure):
    """Py_buffer of the C API, of which the address is read."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


def private_memory(size_bytes: int) -> memoryview:
    """Memory of this process, zero until it is written, in huge pages where there are some. Raises OSError."""
    area = mmap.mmap(-1, size_bytes + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    offset = -_address_of(area) % HUGE_BYTES
    return memoryview(area)[offset : offset + size_bytes]


def populate(address: int, size_bytes: int) -> bool:
    """Has the kernel find memory for a range before anybody writes there. False where it does not (before Linux 5.14,
    or without free memory); nothing is lost then."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_libc.madvise(start, address + size_bytes - start, _MADV_POPULATE_WRITE) == 0)


class HugePages:
    """Those of one segment that is being filled. Thread-safe; `close` before the segment is sealed or mapped."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.num_pages = size_bytes // HUGE_BYTES
        self._mapping = _Mapping(fd, size_bytes) if self.num_pages else None
        self._asked = bytearray(self.num_pages)
        self._is_huge = bytearray(self.num_pages)
        self._lock = threading.Lock()
        self._num_failures = 0

    @property
    def num_huge(self) -> int:
        return sum(self._is_huge)

    def prepare(self, offset: int, num_bytes: int) -> None:
        """Makes the pages of the range huge ones where that is possible, before the first byte is written there."""
        for page in range(offset // HUGE_BYTES, min(self.num_pages, -(-(offset + num_bytes) // HUGE_BYTES))):
            with self._lock:
                is_first, self._asked[page] = not self._asked[page], 1
            if is_first and self._num_failures < _MAX_FAILURES:
                self._collapse(page)

    def finish(self) -> None:
        """Tries those again that could not be prepared, as while another thread was writing to a page of them."""
        self._num_failures = 0
        for page in range(self.num_pages):
            if not self._is_huge[page] and self._num_failures < _MAX_FAILURES:
                self._collapse(page)

    def _collapse(self, page: int) -> None:
        assert self._mapping is not None
        with contextlib.suppress(OSError):  # whoever writes there hears of it
            os.posix_fallocate(self._fd, page * HUGE_BYTES, mmap.PAGESIZE)  # nothing at all is not collapsed
        if _libc.madvise(self._mapping.address + page * HUGE_BYTES, HUGE_BYTES, _MADV_COLLAPSE) == 0:
            self._is_huge[page] = 1
            self._num_failures = 0
        elif ctypes.get_errno() != errno.EAGAIN:
            self._num_failures += 1

    def close(self) -> None:
        """Lets go of the mapping. Idempotent."""
        self._mapping = None
