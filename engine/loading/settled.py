"""A file's stat that can prove later that nothing has been written since.

A stat proves that only if every later write changes it. Two kinds of writes would not:

- A page that is mapped shared, and dirty already, takes further stores without the kernel's knowing. Writing the
  file's dirty pages out protects them again, so that the next store is a fault, which sets mtime and ctime.
- Times advance in ticks of some milliseconds: a second write within the tick of the first leaves no trace. So a
  stat is good only when its tick is over.

Linux only. What no stat shows, in any way: stores into file systems that live in memory (tmpfs and its like never
write pages out; `is_stat_blind`), a device written behind the file system's back, and what a file server has not
told this host yet.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from dataclasses import dataclass

_MAX_TRIES = 4
_CLOCK_REALTIME_COARSE = 5  # the clock of file times; Python has no name for it
_MAX_TICK_NS = 20_000_000
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}


@dataclass(frozen=True)
class FileStat:
    """What a receipt keeps of a stat; times in nanoseconds."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(result: os.stat_result) -> FileStat:
        return FileStat(result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns, result.st_ctime_ns)


class NotSettledError(Exception):
    """Raised when a file was written to at every look; the caller should try again when its writer is done."""


def settle(fd: int) -> FileStat:
    """The stat of a file or folder, from which every later write can be told. Waits for dirty pages to be written.

    Raises NotSettledError, and OSError if the file's pages cannot be written out."""
    for _ in range(_MAX_TRIES):
        seen = FileStat.of(os.fstat(fd))
        _pass_tick(seen.ctime_ns)
        _write_out(fd)
        # A store between the two looks may have made its page dirty again, but then it shows.
        if FileStat.of(os.fstat(fd)) == seen:
            return seen
    raise NotSettledError


def _pass_tick(ctime_ns: int) -> None:
    """Returns when a write from now on has a later time. A time of another host's clock is not waited for."""
    while 0 <= ctime_ns - time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) < _MAX_TICK_NS:
        time.sleep(0.001)


def _write_out(fd: int) -> None:
    try:
        os.fdatasync(fd)
    except OSError as error:
        # EROFS: nothing can be dirty. The others: a file system, or a folder of one, that has nothing to write out.
        if error.errno not in (errno.EROFS, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def is_stat_blind(fd: int) -> bool:
    """Whether the file lies in memory only, where stores through mappings never show."""
    result = (ctypes.c_long * 64)()  # struct statfs: its first member is the type, and 120 bytes are all of it
    if _LIBC.fstatfs(ctypes.c_int(fd), result) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return (result[0] & 0xFFFFFFFF) in _IN_MEMORY


_LIBC = ctypes.CDLL(None, use_errno=True)
