"""Who may come in: the users and groups that the kernel lets through to the daemon's sockets.

Owns the permissions of the runtime folder and the sockets in it. They belong to the daemon's user alone; everybody
else who is allowed is named in an access control list (POSIX ACL) on each of them, so that connect() itself is
refused to all others, at the gRPC socket as at the hand-over socket. Who has connected is asked of the kernel
(SO_PEERCRED), never of the peer. Standard library only.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BadRequestError

_ACL = "system.posix_acl_access"
_ACL_VERSION = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_SEARCH, _CONNECT = 0o1, 0o6
_MAX_ID = _NO_ID - 1
_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59
_PEERGROUPS_BYTES = 1024
"""The most that Python asks of getsockopt: 256 groups. A peer with more is known by its primary one."""


_Identity = tuple[int, int]
"""Device and inode. A bound socket keeps its inode's number, and its folder's, from being given away."""


@dataclass(frozen=True)
class Peer:
    """The process at the other end of a Unix socket, as it was when it connected. `pid` is 0 for all processes that
    our pid namespace does not show, so that only their user tells them apart."""

    pid: int
    uid: int
    gids: frozenset[int]


def is_owner(uid: int) -> bool:
    """Whether this is root or our own user: they may always come in, and may have everything."""
    return uid in (0, os.geteuid())


def peer_of(sock: socket.socket) -> Peer:
    """Asked of the kernel. Raises OSError if the socket has no peer."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(credentials)
    groups = array.array("I")
    try:
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _PEERGROUPS_BYTES))
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
    return Peer(pid, uid, frozenset((gid, *groups)))


class Doors:
    """The users and groups that may come in, and the paths that let them. Our own user and root always may."""

    def __init__(self, runtime_dir: Path, sockets: Sequence[Path]) -> None:
        self._runtime_dir = runtime_dir
        self._sockets = tuple(sockets)
        self._uids: frozenset[int] = frozenset()
        self._gids: frozenset[int] = frozenset()
        self._opened: dict[Path, _Identity | None] | None = None

    def admits(self, peer: Peer) -> bool:
        return is_owner(peer.uid) or peer.uid in self._uids or not self._gids.isdisjoint(peer.gids)

    def opened(self) -> None:
        """The sockets exist now and are ours: from here on what lies at these paths instead is not."""
        self._opened = {path: _identity(path) for path in (self._runtime_dir, *self._sockets)}

    def allow(self, uids: Iterable[int], gids: Iterable[int]) -> None:
        """From now on these users and groups may connect, and nobody else, to the sockets that were opened.

        What is gone, or another daemon's by now, is not touched: see `trouble`. Raises BadRequestError on an id that
        cannot be, or on a file system that keeps no access control lists."""
        wanted_uids, wanted_gids = _ids("allow_uids", uids), _ids("allow_gids", gids)
        for path in self._sockets:
            if self._opened is not None and self._is_ours(path):
                _permit(path, 0o600, _CONNECT, wanted_uids, wanted_gids)
        if self._is_ours(self._runtime_dir):
            _permit(self._runtime_dir, 0o700, _SEARCH, wanted_uids, wanted_gids)
        self._uids, self._gids = wanted_uids, wanted_gids

    def _is_ours(self, path: Path) -> bool:
        if self._opened is None:
            return True
        found = _identity(path)
        return found is not None and found == self._opened[path]

    def trouble(self) -> str:
        """Why nobody can connect, although we serve; "" if all is well."""
        for path in self._sockets:
            if not self._is_ours(path):
                return (
                    f"{path} is gone, or another daemon's: this one goes on for those who hold leases, and nobody "
                    "else can reach it; restart it"
                )
        return ""


def _identity(path: Path) -> _Identity | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def is_open_to_some(path: Path) -> bool:
    """Whether somebody is named in the path's access control list."""
    try:
        os.getxattr(path, _ACL)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise
    return True


def _ids(name: str, ids: Iterable[int]) -> frozenset[int]:
    found = frozenset(ids)
    for value in found:
        if not 0 <= value <= _MAX_ID:
            raise BadRequestError(f"{name}: {value} is no id; ids run from 0 to {_MAX_ID}")
    return found


def _permit(path: Path, mode: int, others: int, uids: frozenset[int], gids: frozenset[int]) -> None:
    """`mode` for us, `others` for the named, nothing for anybody else."""
    try:
        if not uids and not gids:
            if is_open_to_some(path):
                os.removexattr(path, _ACL)
            os.chmod(path, mode)
            return
        os.setxattr(path, _ACL, _access_list(mode >> 6, others, uids, gids))
    except OSError as error:
        hint = "; put it on tmpfs or ext4, or allow nobody else" if error.errno == errno.ENOTSUP else ""
        raise BadRequestError(f"cannot set who may use {path}: {error.strerror}{hint}") from error


def _access_list(own: int, others: int, uids: frozenset[int], gids: frozenset[int]) -> bytes:
    """In the order that the kernel demands: by tag, then by id."""
    entries = [
        (_USER_OBJ, own, _NO_ID),
        *((_USER, others, uid) for uid in sorted(uids)),
        (_GROUP_OBJ, 0, _NO_ID),
        *((_GROUP, others, gid) for gid in sorted(gids)),
        (_MASK, others, _NO_ID),
        (_OTHER, 0, _NO_ID),
    ]
    return _ACL_VERSION.pack(2) + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries)
