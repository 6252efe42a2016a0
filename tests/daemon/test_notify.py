"""What the daemon says to its service manager, to a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
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
    monkeypatch.setattr(notify, "_PATIENCE_S", 3600.0)
    notifier = notifier_of(manager)
    for _ in range(2000):
        assert notifier.watchdog()
    assert not notifier.take_replaced()


def fill(manager: socket.socket) -> int:
    """Makes it so that the manager has no room for another message; how many it has to read now."""
    count = 0
    while True:  # each sender has room for some
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            other.connect(manager.getsockname())
            before = count
            with contextlib.suppress(BlockingIOError):
                while True:
                    other.send(b"noise")
                    count += 1
            if count == before:
                return count


def heard(manager: socket.socket, count: int) -> list[tuple[str, bytes]]:
    """(message, content of its descriptor) of the next messages, in order."""
    found = []
    for _ in range(count):
        data, fds, _, _ = socket.recv_fds(manager, 4096, 4)
        found.append((data.decode(), b"".join(os.pread(fd, 100, 0) for fd in fds)))
        for fd in fds:
            os.close(fd)
    return found


@pytest.mark.parametrize("has_loop", [False, True])
def test_what_a_manager_does_not_read_is_owed_to_it(manager: socket.socket, has_loop: bool) -> None:
    """In order, with the descriptors as they were, and of each name the last word only. It is no other manager."""
    notifier = notifier_of(manager)
    notifier.ready()
    noise = fill(manager)
    fds_before = len(os.listdir("/proc/self/fd"))

    async def speak() -> None:
        for name in ("a", "b", "c"):
            fd = os.memfd_create(name)
            os.write(fd, name.encode())
            assert notifier.store(name, fd)
            os.close(fd)
        assert notifier.forget("a")
        assert notifier.ready("serving")
        assert notifier.watchdog()
        assert not notifier.take_replaced()
        assert len(heard(manager, 1 + noise)) == 1 + noise
        if has_loop:
            assert await asyncio.to_thread(heard, manager, 4) == said
        else:
            assert notifier.watchdog()
            assert heard(manager, 5) == [*said, ("WATCHDOG=1", b"")]

    said = [
        ("FDSTORE=1\nFDNAME=b\nFDPOLL=0", b"b"),
        ("FDSTORE=1\nFDNAME=c\nFDPOLL=0", b"c"),
        ("FDSTOREREMOVE=1\nFDNAME=a", b""),
        ("READY=1\nSTATUS=serving", b""),
    ]
    if has_loop:
        asyncio.run(speak())
    else:
        with pytest.raises(StopIteration):
            speak().send(None)
    assert len(os.listdir("/proc/self/fd")) == fds_before
    assert not notifier.take_replaced()


def test_what_is_owed_is_dropped_with_the_manager(tmp_path: Path) -> None:
    """Who comes then is told everything."""
    path = tmp_path / "notify.sock"
    with listen(path) as first:
        notifier = Notifier(str(path))
        notifier.ready()
        fill(first)
        fds_before = len(os.listdir("/proc/self/fd"))
        assert notifier.store("a", 0)
        assert len(os.listdir("/proc/self/fd")) == fds_before + 1
    path.unlink()
    assert not notifier.watchdog()
    with listen(path) as second:
        assert notifier.store("b", 0)
        assert notifier.take_replaced()
        assert second.recv(100).startswith(b"FDSTORE=1\nFDNAME=b")
    notifier.close()


def test_last_words_are_waited_for(manager: socket.socket) -> None:
    notifier = notifier_of(manager)
    notifier.ready()
    noise = fill(manager)
    notifier.stopping()
    reader = threading.Thread(target=heard, args=(manager, noise + 1))
    reader.start()
    notifier.close()
    reader.join(60)
    assert heard(manager, 1) == [("STOPPING=1", b"")]


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
