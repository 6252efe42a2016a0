"""The service-manager protocol of sd_notify(3) and sd_listen_fds(3): what the daemon says to systemd, or to
`preload keeper`, which speaks the same.

Owns the datagram socket. Messages are lines of KEY=VALUE; descriptors to be stored travel with them. The socket stays
connected, so that the end of the manager that holds our descriptors is noticed even if its successor listens at the
same name already.
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
        self._socket: socket.socket | None = None
        self._has_lost = False
        self._is_new = False

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

    def send(self, *lines: str, fds: Sequence[int] = (), wait: bool = True) -> bool:
        """Sends one message. False if nobody listens or there is no manager; the daemon goes on without one.

        Without `wait`, a manager that does not read is not waited for: it has enough to read."""
        if not self._address:
            return False
        data = "\n".join(lines).encode()
        while True:
            is_old = self._socket is not None
            try:
                sock = self._socket or self._connect()
                sock.settimeout(_SEND_DEADLINE_S if wait else 0)
                socket.send_fds(sock, [data], list(fds))
                return True
            except BlockingIOError:
                return True
            except OSError as error:
                self._lose(error)
                if not is_old or isinstance(error, TimeoutError):
                    return False
                # That one is gone; its successor may listen already.

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            sock.connect(self._address)
        except OSError:
            sock.close()
            raise
        self._socket = sock
        self._is_new = self._has_lost
        return sock

    def _lose(self, error: OSError) -> None:
        self._has_lost = True  # also if nobody was there from our start on: who comes then knows nothing
        if self._socket is not None:
            log.warning("the service manager does not listen: %s", error)
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ready(self, status: str = "") -> bool:
        """The start, or a reload, is over; `status` is what `systemctl status` shows of it."""
        return self.send("READY=1", f"STATUS={status}")

    def reloading(self) -> bool:
        return self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> bool:
        return self.send("STOPPING=1")

    def watchdog(self) -> bool:
        return self.send("WATCHDOG=1", wait=False)

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
