"""The service-manager protocol of sd_notify(3) and sd_listen_fds(3): what the daemon says to systemd, or to
`preload keeper`, which speaks the same.

Owns the datagram socket. Messages are lines of KEY=VALUE; descriptors to be stored travel with them. Every send says
whether somebody took it, so that a keeper that died is noticed and parked with again when another one listens.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence

log = logging.getLogger(__name__)

_FIRST_LISTEN_FD = 3
_SEND_DEADLINE_S = 2.0


class Notifier:
    """Speaks to the socket at `address` (a path, or an abstract name after "@"); "" is nobody, and says nothing."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.is_connected = bool(address)

    @staticmethod
    def from_environment() -> Notifier:
        """The service manager's socket; children of ours are not told of it."""
        return Notifier(os.environ.pop("NOTIFY_SOCKET", ""))

    @property
    def has_manager(self) -> bool:
        return bool(self._address)

    def send(self, *lines: str, fds: Sequence[int] = ()) -> bool:
        """Sends one message. False if nobody listens or there is no manager; the daemon goes on without one."""
        if not self._address:
            return False
        try:
            # A socket of its own for each message: a manager that came back has another socket at the same name.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(_SEND_DEADLINE_S)
                sock.connect(self._address)
                socket.send_fds(sock, ["\n".join(lines).encode()], list(fds))
        except OSError as error:
            if self.is_connected:
                log.warning("the service manager does not listen: %s", error)
            self.is_connected = False
            return False
        self.is_connected = True
        return True

    def ready(self) -> bool:
        return self.send("READY=1")

    def reloading(self) -> bool:
        return self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> bool:
        return self.send("STOPPING=1")

    def watchdog(self) -> bool:
        return self.send("WATCHDOG=1")

    def store(self, name: str, fd: int) -> bool:
        """Asks the manager to hold a duplicate of `fd` under `name` until it is told to let go."""
        return self.send("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=[fd])

    def forget(self, name: str) -> bool:
        """Asks the manager to close everything it holds under `name`."""
        return self.send("FDSTOREREMOVE=1", f"FDNAME={name}")


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
    found: dict[str, int] = {}
    for index in range(int(os.environ.get("LISTEN_FDS", "0"))):
        fd = _FIRST_LISTEN_FD + index
        os.set_inheritable(fd, False)
        name = names[index] if index < len(names) else ""
        if name in found:
            os.close(found[name])
        found[name] = fd
    for key in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(key, None)
    return found
