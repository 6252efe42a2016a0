"""The keeper's descriptor store and the messages that fill it: see notify.py for the other side."""

from __future__ import annotations

import logging
import os
import socket
import struct
from dataclasses import dataclass

log = logging.getLogger(__name__)

MAX_STORED = 4096
_MAX_MESSAGE_BYTES = 4096
_MAX_DESCRIPTORS = 16
_CREDENTIALS = struct.Struct("3i")
_ROOM = socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS) + socket.CMSG_SPACE(_CREDENTIALS.size)


@dataclass
class Message:
    """One datagram: its sender as the kernel knows it, its fields, and descriptors, which the store may take."""

    sender: int
    fields: dict[str, str]
    fds: list[int]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def receive(sock: socket.socket) -> Message | None:
    """The next message; None when there is none."""
    try:
        data, ancillary, flags, _ = sock.recvmsg(_MAX_MESSAGE_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    sender = 0
    fds: list[int] = []
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            sender = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])[0]
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += struct.unpack(f"{len(value) // 4}i", value[: len(value) // 4 * 4])
    if flags & socket.MSG_CTRUNC:
        log.error("descriptors from process %d were lost: raise the limit of open files", sender)
    lines = data.decode(errors="replace").splitlines()
    return Message(sender, dict(line.partition("=")[::2] for line in lines), fds)


class Store:
    """Descriptors by name, one each: a later one replaces an earlier one."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._fds)

    def items(self) -> tuple[list[str], list[int]]:
        return list(self._fds), list(self._fds.values())

    def apply(self, message: Message) -> None:
        """Does what the message asks for; what it keeps is gone from `message.fds`."""
        name = message.fields.get("FDNAME", "stored")
        if message.fields.get("FDSTOREREMOVE") == "1":
            self._remove(name)
        elif message.fields.get("FDSTORE") == "1":
            while message.fds:
                if name not in self._fds and len(self._fds) >= MAX_STORED:
                    log.error("%d descriptors are stored; %s is refused", MAX_STORED, name)
                    return
                self._remove(name)
                self._fds[name] = message.fds.pop()

    def _remove(self, name: str) -> None:
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for name in list(self._fds):
            self._remove(name)
