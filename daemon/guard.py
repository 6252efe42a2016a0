"""Limits on connections to the gRPC socket, which gRPC itself cannot set: it does not know who its peers are.

The kernel does. Once a second the guard goes through this process's own descriptors, asks each accepted connection
for its peer (SO_PEERCRED), and hangs up on those that are too many for one process or one user, the newest first, and
on users that are not allowed any more. So a client that leaks connections runs into its own limit, and others find a
descriptor left. Nothing here is on the way of a request.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .doors import Doors, Peer, peer_of

log = logging.getLogger(__name__)

MAX_PER_PROCESS = 32


def raise_descriptor_limit() -> int:
    """As many descriptors as the system lets us have: each lease is one, and each segment. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class Guard:
    """Watches the connections that were accepted at `path`.

    One user has at most half of the descriptors of this process, so that others find some. Processes that our pid
    namespace does not show are known by their user alone."""

    def __init__(self, path: str, doors: Doors, max_per_process: int = MAX_PER_PROCESS) -> None:
        self._path = path
        self._doors = doors
        self._max_per_process = max_per_process
        self._was_crowded = False
        self._first_seen: dict[int, int] = {}
        """By inode of a connection, in which look it was found first."""
        self._num_looks = 0

    def look(self) -> None:
        """Once through all connections; call it every second or so."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        refused: Counter[str] = Counter()
        by_pid: Counter[int] = Counter()
        by_uid: Counter[int] = Counter()
        for fd, peer in self._oldest_first():
            by_pid[peer.pid] += 1
            by_uid[peer.uid] += 1
            if not self._doors.admits(peer):
                why = "is not allowed here"
            elif peer.pid and by_pid[peer.pid] > self._max_per_process:
                why = f"has more than {self._max_per_process} connections"
            elif by_uid[peer.uid] > soft // 2:
                why = f"has more than {soft // 2} connections, with its other processes"
            else:
                continue
            if self._hang_up(fd, peer):
                refused[f"process {peer.pid} of user {peer.uid}, which {why}"] += 1
        for whom, count in refused.items():
            log.warning("hung up %d times on %s", count, whom)
        if self._was_crowded and not refused:
            ctypes.CDLL(None).malloc_trim(0)  # what the crowd took is free again, but only this gives it back
        self._was_crowded = bool(refused)

    def _oldest_first(self) -> list[tuple[int, Peer]]:
        """(descriptor, peer): the oldest connections, which hold leases, come first and stay.

        Those of one look are in the order of their descriptors; inode numbers tell nothing, as each processor gives
        out its own."""
        self._num_looks += 1
        found = list(self._connections())
        self._first_seen = {inode: self._first_seen.get(inode, self._num_looks) for inode, _, _ in found}
        found.sort(key=lambda entry: (self._first_seen[entry[0]], entry[1]))
        return [(fd, peer) for _, fd, peer in found]

    def _connections(self) -> Iterator[tuple[int, int, Peer]]:
        """(inode, descriptor, peer) of every connection accepted at our path."""
        for fd in _descriptors():
            with suppress(OSError), _borrowed(fd) as sock:
                if self._is_ours(sock):
                    yield os.fstat(fd).st_ino, fd, peer_of(sock)

    def _is_ours(self, sock: socket.socket) -> bool:
        return (
            (sock.family, sock.type) == (socket.AF_UNIX, socket.SOCK_STREAM)
            and sock.getsockname() == self._path
            and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )

    def _hang_up(self, fd: int, peer: Peer) -> bool:
        """gRPC sees the end of the connection, and closes the descriptor that is its own."""
        with suppress(OSError), _borrowed(fd) as sock:
            if self._is_ours(sock) and peer_of(sock) == peer:
                sock.shutdown(socket.SHUT_RDWR)
                return True
        return False


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # no descriptor left to read them with
        return list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket object around a descriptor that somebody else closes. Raises OSError if it is no socket."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()
