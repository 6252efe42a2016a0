"""What the frontend and its service manager say to each other: sd_listen_fds(3) and sd_notify(3), the few words of
them that a frontend needs.

A listening socket that the manager holds outlives the frontend, so that connections wait while it restarts. Without a
manager everything here does nothing.
"""

from __future__ import annotations

import os
import socket
import sys

from .errors import StartError

_FIRST_LISTEN_FD = 3
_SEND_DEADLINE_S = 2.0


def take_listener() -> socket.socket | None:
    """The listening socket that the manager passed to this process, if it did. Children of ours do not inherit it.

    Raises StartError if there is more than one, or if it is none to accept HTTP connections from."""
    names = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    pid, count, _ = (os.environ.pop(name, "") for name in names)
    if pid != str(os.getpid()) or count in ("", "0"):
        return None
    if count != "1":
        raise StartError(f"the service manager passed {count} sockets; a frontend serves one")
    listener = socket.socket(fileno=_FIRST_LISTEN_FD)
    os.set_inheritable(listener.fileno(), False)
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise StartError("the socket that the service manager passed is not a listening TCP socket")
    listener.setblocking(False)
    return listener


class Manager:
    """The service manager's ear; cores are not told of it."""

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def tell(self, *lines: str) -> None:
        """Sends one message. A manager that does not listen is no reason to stop serving, and is named once."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(_SEND_DEADLINE_S)
            try:
                sock.sendto("\n".join(lines).encode(), self._address)
            except OSError as error:
                print(f"preload serve: the service manager does not listen: {error}", file=sys.stderr)
                self._address = ""
