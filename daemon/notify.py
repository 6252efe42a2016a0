"""The service-manager protocol of sd_notify(3) and sd_listen_fds(3): what the daemon says to systemd, or to
`preload keeper`, which speaks the same.

Owns the datagram socket. Messages are lines of KEY=VALUE; descriptors to be stored travel with them. The socket stays
connected, so that the end of the manager that holds our descriptors is noticed even if its successor listens at the
same name already. A manager that does not read is another matter: what it is to hear is owed to it, in order, and
said when it reads again, from the event loop if there is one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

_FIRST_LISTEN_FD = 3
_PATIENCE_S = 0.2
_LAST_WORDS_S = 2.0
_TRANSIENT = frozenset((errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ETOOMANYREFS, errno.EINTR))


@dataclass
class _Owed:
    """A message that the manager has yet to hear, with duplicates of its descriptors."""

    data: bytes
    fds: list[int]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Notifier:
    """Speaks to the socket at `address` (a path, or an abstract name after "@"); "" is nobody, and says nothing."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._has_lost = False
        self._is_new = False
        self._is_full = False
        self._owed: dict[str, _Owed] = {}
        self._watching: asyncio.AbstractEventLoop | None = None

    @staticmethod
    def from_environment() -> Notifier:
        """The service manager's socket; children of ours are not told of it."""
        return Notifier(os.environ.pop("NOTIFY_SOCKET", ""))

    @property
    def has_manager(self) -> bool:
        return bool(self._address)

    def take_replaced(self) -> bool:
        """True once after the manager was found to be another one, which holds nothing of ours."""
        is_new, self._is_new = self._is_new, False
        return is_new

    def send(self, *lines: str, fds: Sequence[int] = (), key: str = "") -> bool:
        """Sends one message. False if nobody listens or there is no manager; the daemon goes on without one.

        A manager that does not read is waited for a moment, once. Then the message is owed, in place of an earlier
        one of the same key; one without a key is for now or never."""
        if not self._address:
            return False
        data = "\n".join(lines).encode()
        self._say_owed()
        if not self._owed or not key:
            said = self._say(data, fds, _PATIENCE_S if key else 0.0)
            if said is not None:
                return said
        if key:
            self._owe(key, data, fds)
        return True

    def _say(self, data: bytes, fds: Sequence[int], wait_s: float) -> bool | None:
        """True if it was sent, False if nobody listens, None if this must wait."""
        while True:
            is_old = self._socket is not None
            try:
                sock = self._socket or self._connect()
                sock.settimeout(wait_s)
                socket.send_fds(sock, [data], list(fds))
                return True
            except (BlockingIOError, TimeoutError):
                self._is_full = True
                return None
            except OSError as error:
                if error.errno in _TRANSIENT:
                    log.warning("cannot speak to the service manager now: %s", error)
                    self._is_full = False
                    return None
                self._lose(error)
                if not is_old:
                    return False
                # That one is gone; its successor may listen already.

    def _owe(self, key: str, data: bytes, fds: Sequence[int]) -> None:
        if not self._owed:
            log.warning("the service manager does not read: what it is to hear waits")
        if (earlier := self._owed.pop(key, None)) is not None:
            earlier.close()
        own: list[int] = []
        try:
            own += (os.dup(fd) for fd in fds)
        except OSError as error:
            log.error("cannot keep %s for the service manager: %s; everything is parked again", key, error)
            self._is_new = True
        self._owed[key] = _Owed(data, own)
        self._watch()

    def _say_owed(self, wait_s: float = 0.0) -> None:
        """As much of what is owed as the manager takes; none if nobody listens: who comes then is told all."""
        while self._owed:
            key, owed = next(iter(self._owed.items()))
            said = self._say(owed.data, owed.fds, wait_s)
            if said is None:
                self._watch() if self._is_full else self._unwatch()
                return
            for gone in [key] if said else list(self._owed):
                self._owed.pop(gone).close()
        self._unwatch()

    def _watch(self) -> None:
        """Has the event loop say the rest, once the manager reads again."""
        if self._watching is not None or self._socket is None or not self._is_full:
            return
        try:
            self._watching = asyncio.get_running_loop()
        except RuntimeError:  # no loop: the next message comes with the rest
            return
        self._watching.add_writer(self._socket, self._say_owed)

    def _unwatch(self) -> None:
        if self._watching is not None and self._socket is not None:
            self._watching.remove_writer(self._socket)
        self._watching = None

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            sock.connect(self._address)
        except OSError:
            sock.close()
            raise
        self._socket = sock
        self._is_new |= self._has_lost
        self._has_lost = False
        return sock

    def _lose(self, error: OSError) -> None:
        self._has_lost = True  # also if nobody was there from our start on: who comes then knows nothing
        if self._socket is not None:
            log.warning("the service manager does not listen: %s", error)
            self._unwatch()
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """The last words, if the manager takes them in time."""
        end_s = time.monotonic() + _LAST_WORDS_S
        while self._owed and (left_s := end_s - time.monotonic()) > 0:
            self._say_owed(left_s)
            if self._owed and not self._is_full:
                time.sleep(0.05)
        for owed in self._owed.values():
            owed.close()
        self._owed.clear()
        self._unwatch()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ready(self, status: str = "") -> bool:
        """The start, or a reload, is over; `status` is what `systemctl status` shows of it."""
        return self.send("READY=1", f"STATUS={status}", key="READY=")

    def reloading(self) -> bool:
        return self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", key="RELOADING=")

    def stopping(self) -> bool:
        return self.send("STOPPING=1", key="STOPPING=")

    def watchdog(self) -> bool:
        return self.send("WATCHDOG=1")

    def store(self, name: str, fd: int) -> bool:
        """Asks the manager to hold a duplicate of `fd` under `name` until it is told to let go."""
        return self.send("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=[fd], key=name)

    def forget(self, name: str) -> bool:
        """Asks the manager to close everything it holds under `name`."""
        return self.send("FDSTOREREMOVE=1", f"FDNAME={name}", key=name)


def watchdog_interval_s() -> float:
    """Half of what the manager allows between two signs of life; 0 if it does not watch this process."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(microseconds) / 2e6


def stored_descriptors() -> dict[str, int]:
    """Descriptors that the manager passed to this process by name. Of two with one name the later one stays."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    count = os.environ.get("LISTEN_FDS", "")
    found: dict[str, int] = {}
    for index in range(int(count) if count.isdigit() else 0):
        fd = _FIRST_LISTEN_FD + index
        os.set_inheritable(fd, False)
        name = names[index] if index < len(names) else ""
        if name in found:
            os.close(found[name])
        found[name] = fd
    for key in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(key, None)
    return found
