"""Files of a checkpoint: opened once, held open, and proved unchanged at the end.

Owns opening, exact reads and the errors that name a file or folder. Knows nothing of formats. Invariant: the stat
kept in `CheckpointFile.stat` was taken from the descriptor before the first byte was read, and settled then (see
`settled.py`): every later write changes it. Where no stat can tell, `is_stat_blind` says so.
"""

from __future__ import annotations

import errno
import os
import stat as stat_bits
from dataclasses import dataclass

from preload.engine.errors import CheckpointChangedError, CheckpointError, CheckpointNotFoundError

from .settled import FileStat, NotSettledError, is_stat_blind, settle


class CheckpointFile:
    """One regular file, open for reading. `path` is absolute, as found: symbolic links are not resolved."""

    def __init__(self, path: str) -> None:
        """Raises CheckpointNotFoundError if the file is missing, unreadable or not a regular file."""
        self.path = os.path.abspath(path)
        self.fd = -1
        try:
            # Without O_NONBLOCK, a FIFO in a file's place would hang the loader.
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise unreadable(self.path, error) from error
        self._look()

    def _look(self) -> None:
        if not stat_bits.S_ISREG(os.fstat(self.fd).st_mode):
            raise CheckpointNotFoundError(
                f"{self.path} is not a regular file; put the checkpoint's file in its place",
                {"file": self.path},
            )
        try:
            self.stat = settle(self.fd)
            self.is_stat_blind = is_stat_blind(self.fd)
        except NotSettledError as error:
            raise _changed(self.path) from error
        except OSError as error:
            raise unreadable(self.path, error) from error

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
        _check_unchanged(self.path, self.stat)

    def close(self) -> None:
        """Idempotent. A file that is forgotten, because another one of its checkpoint was bad, is closed as well."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close


class CheckpointFolder:
    """A folder whose names decide what a checkpoint is. `names` were listed after `stat` was taken, so that a name
    that comes or goes later changes the folder's times."""

    def __init__(self, path: str) -> None:
        """Raises CheckpointNotFoundError if it cannot be listed."""
        self.path = os.path.abspath(path)
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self.stat = settle(fd)
                self.names = sorted(os.listdir(fd))
            finally:
                os.close(fd)
        except NotSettledError as error:
            raise _changed(self.path) from error
        except OSError as error:
            raise unreadable(self.path, error) from error

    def check_unchanged(self) -> None:
        """Raises CheckpointChangedError if the path no longer leads to the folder as it was listed."""
        _check_unchanged(self.path, self.stat)


def _check_unchanged(path: str, stat: FileStat) -> None:
    try:
        now = FileStat.of(os.stat(path))
    except OSError as error:
        raise CheckpointChangedError(
            f"{path} vanished while it was read: {error.strerror}; load again", {"file": path}
        ) from error
    if now != stat:
        raise _changed(path)


def _changed(path: str) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"{path} changed while it was read; load again when nothing writes to it", {"file": path}
    )


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
MAX_DIMS = 16
MAX_SIZE = 1 << 48
"""Of one dimension, and of all that are not 0 multiplied: beyond any file, and within what tensors can have."""


def require_plausible(path: str, name: str, shape: tuple[int, ...]) -> None:
    """Raises CheckpointError for a shape that no tensor can have, before anything is computed with it."""
    if len(shape) > MAX_DIMS:
        raise fault(path, f"has {len(shape)} dimensions, more than {MAX_DIMS}; {REPLACE}", name)
    num_values = 1
    for size in shape:
        num_values *= max(size, 1)
        if num_values > MAX_SIZE:
            raise fault(path, f"has the impossible shape {list(shape)}; {REPLACE}", name)


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
