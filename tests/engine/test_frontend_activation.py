"""The frontend and its service manager: a socket that it is given, and the words it says."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TAKE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=sys.argv[2])
from preload.engine.frontend.activation import take_listener
from preload.engine.frontend.errors import StartError
try:
    listener = take_listener()
except StartError as error:
    print(error)
else:
    print(listener and listener.getsockname()[1], os.get_inheritable(3), [k for k in os.environ if "LISTEN_" in k])
"""


def take(fd: int, count: str = "1") -> str:
    words = [sys.executable, "-c", TAKE, str(fd), count]
    return subprocess.run(words, capture_output=True, text=True, check=True, pass_fds=(fd,)).stdout.strip()


def test_a_listening_socket_is_taken_and_not_passed_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert take(server.fileno()) == f"{server.getsockname()[1]} False []"


def test_no_socket_is_none() -> None:
    with open(os.devnull) as file:
        assert take(file.fileno(), "0").startswith("None")


def test_several_sockets_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert take(server.fileno(), "2") == "the service manager passed 2 sockets; a frontend serves one"


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_of_another_kind_is_refused(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as sock:
        assert take(sock.fileno()) == "the socket that the service manager passed is not a listening TCP socket"


def test_the_manager_hears_and_children_are_not_told_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from preload.engine.frontend.activation import Manager

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        manager = Manager()
        assert "NOTIFY_SOCKET" not in os.environ
        manager.tell("READY=1", "STATUS=serving")
        assert sock.recv(100) == b"READY=1\nSTATUS=serving"
    manager.tell("STOPPING=1")  # nobody listens any more, which is no error


def test_without_a_manager_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from preload.engine.frontend.activation import Manager

    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Manager().tell("READY=1")
