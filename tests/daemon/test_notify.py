"""What the daemon says to its service manager, to a real socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from preload.daemon import notify
from preload.daemon.notify import Notifier, watchdog_interval_s


def listen(path: Path | str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(path))
    sock.settimeout(10)
    return sock


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with listen(tmp_path / "notify.sock") as sock:
        yield sock


def notifier_of(manager: socket.socket) -> Notifier:
    return Notifier(manager.getsockname())


def test_without_a_manager_nothing_is_said() -> None:
    notifier = Notifier("")
    assert not notifier.has_manager
    assert not notifier.ready()
    assert not notifier.take_replaced()


def test_states_are_lines(manager: socket.socket) -> None:
    notifier = notifier_of(manager)
    assert notifier.reloading()
    kind, clock = manager.recv(4096).decode().split("\n")
    assert kind == "RELOADING=1"
    assert clock.removeprefix("MONOTONIC_USEC=").isdigit()
    for say, words in (
        (lambda: notifier.ready("serving"), "READY=1\nSTATUS=serving"),
        (notifier.stopping, "STOPPING=1"),
        (notifier.watchdog, "WATCHDOG=1"),
        (lambda: notifier.forget("x.manifest"), "FDSTOREREMOVE=1\nFDNAME=x.manifest"),
    ):
        assert say()
        assert manager.recv(4096).decode() == words


def test_a_descriptor_is_stored_by_name(manager: socket.socket) -> None:
    fd = os.memfd_create("test")
    os.write(fd, b"weights")
    assert notifier_of(manager).store("a.segment.0", fd)
    os.close(fd)
    data, (received,), _, _ = socket.recv_fds(manager, 4096, 4)
    assert data == b"FDSTORE=1\nFDNAME=a.segment.0\nFDPOLL=0"
    assert os.pread(received, 100, 0) == b"weights"
    os.close(received)


def test_an_abstract_address_is_understood() -> None:
    name = f"preload-test-{os.getpid()}"
    with listen(f"\0{name}") as sock:
        assert Notifier(f"@{name}").ready()
        assert sock.recv(100).startswith(b"READY=1")


def test_a_manager_that_is_gone_and_one_that_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "notify.sock"
    with listen(path) as first:
        notifier = Notifier(str(path))
        assert notifier.ready()
        assert not notifier.take_replaced()
        assert first.recv(100)
    assert not notifier.watchdog()
    assert not notifier.watchdog()
    path.unlink()
    assert not notifier.watchdog()
    with listen(path) as second:
        assert notifier.watchdog()
        assert second.recv(100) == b"WATCHDOG=1"
        assert notifier.take_replaced()
        assert not notifier.take_replaced()


def test_a_successor_that_listens_at_once_is_told_from_its_predecessor(tmp_path: Path) -> None:
    path = tmp_path / "notify.sock"
    with listen(path):
        notifier = Notifier(str(path))
        notifier.ready()
    path.unlink()
    with listen(path) as second:
        assert notifier.stopping(), "what is said meanwhile reaches the successor"
        assert second.recv(100) == b"STOPPING=1"
        assert notifier.take_replaced()


def test_a_manager_that_does_not_read_holds_up_no_sign_of_life(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_SEND_DEADLINE_S", 3600.0)
    notifier = notifier_of(manager)
    for _ in range(2000):
        assert notifier.watchdog()
    assert not notifier.take_replaced()


@pytest.mark.parametrize(
    ("microseconds", "pid", "interval_s"),
    [("10000000", "", 5.0), ("3000000", "own", 1.5), ("3000000", "1", 0.0), ("", "", 0.0), ("soon", "", 0.0)],
)
def test_the_watchdog_is_told_twice_as_often_as_it_asks(
    monkeypatch: pytest.MonkeyPatch, microseconds: str, pid: str, interval_s: float
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)
    assert watchdog_interval_s() == interval_s


TAKE = """
import json, os, sys
for place, name in enumerate(sys.argv[2:], 3):
    fd = os.memfd_create(name)
    os.write(fd, str(place).encode())
    os.dup2(fd, place + 20)
for place in range(3, 3 + len(sys.argv[2:])):
    os.dup2(place + 20, place)
pid = os.getpid() if sys.argv[1] == "own" else 1
os.environ.update(LISTEN_PID=str(pid), LISTEN_FDS=str(len(sys.argv[2:])), LISTEN_FDNAMES=":".join(sys.argv[2:]))
from preload.daemon.notify import stored_descriptors
found = stored_descriptors()
print({name: (os.pread(fd, 10, 0).decode(), os.get_inheritable(fd)) for name, fd in found.items()})
print([key for key in os.environ if key.startswith("LISTEN_") and sys.argv[1] == "own"])
"""


@pytest.mark.parametrize(
    ("pid", "names", "found"),
    [
        ("own", ["catalog", "a.segment.0"], {"catalog": ("3", False), "a.segment.0": ("4", False)}),
        ("own", ["twice", "twice"], {"twice": ("4", False)}),
        ("own", [], {}),
        ("another's", ["catalog"], {}),
    ],
)
def test_stored_descriptors_are_taken_by_name_and_not_inherited(
    pid: str, names: list[str], found: dict[str, tuple[str, bool]]
) -> None:
    done = subprocess.run([sys.executable, "-c", TAKE, pid, *names], capture_output=True, text=True, check=True)
    assert done.stdout == f"{found}\n[]\n"
