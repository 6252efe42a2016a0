"""Files of a checkpoint: opened once, held open, and proved unchanged at the end.

Owns opening, exact reads and the errors that name a file. Knows nothing of formats. Invariant: the stat kept
in `CheckpointFile.stat` was taken from the descriptor before the first byte was read.
"""

from __future__ import annotations

import errno
import os
import stat as stat_bits
from dataclasses import dataclass

from preload.engine.errors import CheckpointChangedError, CheckpointError, CheckpointNotFoundError


@dataclass(frozen=True)
class FileStat:
    """What a receipt keeps of a file's stat; times in nanoseconds."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(result: os.stat_result) -> FileStat:
        return FileStat(result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns, result.st_ctime_ns)


class CheckpointFile:
    """One regular file, open for reading. `path` is absolute, as found: symbolic links are not resolved."""

    def __init__(self, path: str) -> None:
        """Raises CheckpointNotFoundError if the file is missing, unreadable or not a regular file."""
        self.path = os.path.abspath(path)
        try:
            # Without O_NONBLOCK, a FIFO in a file's place would hang the loader.
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise unreadable(self.path, error) from error
        result = os.fstat(self.fd)
        if not stat_bits.S_ISREG(result.st_mode):
            os.close(self.fd)
            raise CheckpointNotFoundError(
                f"{self.path} is not a regular file; put the checkpoint's file in its place",
                {"file": self.path},
            )
        self.stat = FileStat.of(result)

    @property
    def size_bytes(self) -> int:
        return self.stat.size_bytes

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Exactly `num_bytes` from `offset`. Raises CheckpointError if the file ends before."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fills `view` from `offset`. Raises CheckpointError if the file ends before."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self.fd, [view[done:]], offset + done)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if count == 0:
                self.check_unchanged()
                raise fault(self.path, f"is truncated: it ends before byte {offset + len(view)}; {REPLACE}")
            done += count

    def advise_sequential(self) -> None:
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def check_unchanged(self) -> None:
        """Raises CheckpointChangedError if the path no longer leads to the file as it was opened."""
        try:
            now = FileStat.of(os.stat(self.path))
        except OSError as error:
            raise CheckpointChangedError(
                f"{self.path} vanished while it was read: {error.strerror}; load again", {"file": self.path}
            ) from error
        if now != self.stat:
            raise CheckpointChangedError(
                f"{self.path} changed while it was read; load again when nothing writes to it",
                {"file": self.path},
            )

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. `dtype`: torch's name or "gguf.<type>"; `shape`: row major; `offset`: in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: CheckpointFile
    offset: int
    num_bytes: int


REPLACE = "fetch the file again"
MAX_HEADER_BYTES = 100_000_000
"""A header larger than that is refused before it is read."""


def fault(path: str, what: str, tensor: str = "") -> CheckpointError:
    """The error for a file, or a tensor in it, that is wrong: `<path>: tensor '<name>' <what>`."""
    fields = {"file": path, "tensor": tensor} if tensor else {"file": path}
    message = f"{path}: tensor {tensor!r} {what}" if tensor else f"{path} {what}"
    return CheckpointError(message, fields)


def unreadable(path: str, error: OSError) -> CheckpointNotFoundError:
    """The error for a path that the system does not let us read, with the system's reason."""
    if error.errno == errno.ENOENT and os.path.islink(path):
        what = f"is a broken symbolic link to {os.readlink(path)}; fetch the checkpoint again"
    elif error.errno == errno.ENOENT:
        what = "does not exist; check the path"
    elif error.errno == errno.EACCES:
        what = "may not be read by this user (permission denied); change its mode or owner"
    else:
        what = f"cannot be read: {error.strerror}; check the file and its disk"
    return CheckpointNotFoundError(f"{path} {what}", {"file": path})
