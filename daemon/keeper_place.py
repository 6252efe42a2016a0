"""The keeper's place in the runtime folder: its lock, and the socket that the daemon speaks to.

Both are files that anybody who cleans up may remove, with the folder or without. Whoever holds a place looks whether
it is whole, and takes it again where it is not. Imports nothing heavy: see keeper.py.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from . import runtime_folder
from .runtime_folder import KEEPER_LOCK, NOTIFY_SOCKET

_Identity = tuple[int, int]
"""Device and inode. A lock or a socket that is open keeps its inode's number from being given away."""


class Place:
    """Owns the lock and the listening socket; a socket that was replaced is the caller's to read out and close."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._lock_fd: int | None = None
        self._lock: _Identity | None = None
        self._bound: _Identity | None = None
        self.socket: socket.socket | None = None

    def is_whole(self) -> bool:
        """Whether the files at our paths are ours."""
        return self._is(KEEPER_LOCK, self._lock) and self._is(NOTIFY_SOCKET, self._bound)

    def take(self) -> None:
        """Makes what is missing of folder, lock and socket.

        Raises BadRequestError if another keeper has the folder or it cannot be used, OSError if it cannot be written
        to; what we had before is kept then."""
        runtime_folder.prepare(str(self._runtime_dir))
        if not self._is(KEEPER_LOCK, self._lock):
            before = self._lock_fd
            self._lock_fd = runtime_folder.take_lock(self._runtime_dir, KEEPER_LOCK, "another keeper holds")
            self._lock = _identity(os.fstat(self._lock_fd))
            if before is not None:
                os.close(before)
        if not self._is(NOTIFY_SOCKET, self._bound):
            self.socket = self._listen()

    def _listen(self) -> socket.socket:
        path = self._runtime_dir / NOTIFY_SOCKET
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            path.unlink(missing_ok=True)
            sock.bind(str(path))
            os.chmod(path, 0o600)
            self._bound = _identity(os.stat(path))
        except BaseException:
            sock.close()
            raise
        return sock

    def _is(self, name: str, wanted: _Identity | None) -> bool:
        try:
            return _identity(os.stat(self._runtime_dir / name)) == wanted
        except OSError:
            return False

    def leave(self) -> None:
        """Removes our socket's file, if it is ours, and gives up the lock."""
        if self.socket is not None:
            if self._is(NOTIFY_SOCKET, self._bound):
                (self._runtime_dir / NOTIFY_SOCKET).unlink(missing_ok=True)
            self.socket.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)


def _identity(seen: os.stat_result) -> _Identity:
    return seen.st_dev, seen.st_ino
