"""The keeper by itself: its store, and children that are no daemons."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.daemon import keeper_store
from preload.daemon.keeper_store import Message, Store, receive

DEADLINE_S = 60


def message(fd: int | None = None, **fields: str) -> Message:
    return Message(1, fields, [] if fd is None else [fd])


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.close()


def contents(store: Store) -> dict[str, bytes]:
    return {name: os.pread(fd, 100, 0) for name, fd in zip(*store.items(), strict=True)}


def test_a_stored_descriptor_is_the_stores_own(store: Store) -> None:
    told = message(memfd(b"one"), FDSTORE="1", FDNAME="a")
    store.apply(told)
    told.close()
    assert contents(store) == {"a": b"one"}


def test_a_second_one_of_a_name_replaces_the_first(store: Store) -> None:
    first = memfd(b"one")
    store.apply(message(first, FDSTORE="1", FDNAME="a"))
    store.apply(message(memfd(b"two"), FDSTORE="1", FDNAME="a"))
    assert contents(store) == {"a": b"two"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)


def test_removing_closes(store: Store) -> None:
    fd = memfd(b"one")
    store.apply(message(fd, FDSTORE="1", FDNAME="a"))
    store.apply(message(FDSTOREREMOVE="1", FDNAME="unknown"))
    store.apply(message(FDSTOREREMOVE="1", FDNAME="a"))
    assert len(store) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_full_store_refuses_new_names_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_store, "MAX_STORED", 2)
    for name in ("a", "b", "c", "b"):
        told = message(memfd(name.encode()), FDSTORE="1", FDNAME=name)
        store.apply(told)
        told.close()
    assert contents(store) == {"a": b"a", "b": b"b"}


def test_a_message_comes_with_the_sender_the_kernel_knows(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs,
    ):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        ours.bind(str(tmp_path / "sock"))
        assert receive(ours) is None
        theirs.connect(str(tmp_path / "sock"))
        socket.send_fds(theirs, [b"FDSTORE=1\nFDNAME=a=b\njunk\n\xff"], [0])
        received = receive(ours)
        assert received is not None
        assert received.sender == os.getpid()
        assert received.fields == {"FDSTORE": "1", "FDNAME": "a=b", "junk": "", "\ufffd": ""}
        assert len(received.fds) == 1
        assert not os.get_inheritable(received.fds[0])
        received.close()


CHILD = """
import os, signal, sys, time
sys.argv.pop(0)
from preload.daemon.notify import Notifier, stored_descriptors
folder = sys.argv[0]
if os.environ["LISTEN_FDS"] == "0":
    notifier = Notifier.from_environment()
    for number in range(40):
        fd = os.memfd_create("x")
        os.write(fd, str(number).encode())
        if not notifier.store(f"n{number}", fd):
            sys.exit(9)
    os.kill(os.getpid(), signal.SIGKILL)
others = sorted(os.readlink(e.path) for e in os.scandir("/proc/self/fd") if int(e.name) > 2 + 40)
found = stored_descriptors()
said = {name: os.pread(fd, 10, 0).decode() for name, fd in found.items()}
with open(folder + "/new", "w") as out:
    print(said == {f"n{n}": str(n) for n in range(40)}, len(others) <= 1, file=out)
os.rename(folder + "/new", folder + "/said")
time.sleep(600)
"""

KEEPER = """
import logging, sys
from pathlib import Path
from preload.daemon.keeper import Keeper
logging.basicConfig(level=logging.INFO)
sys.exit(Keeper(Path(sys.argv[1]), sys.argv[2:], 0.0, 10.0).run())
"""


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a keeper of some command; its log is in tmp_path/log."""
    started = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        (tmp_path / "run").mkdir(exist_ok=True)
        words = [sys.executable, "-c", KEEPER, str(tmp_path / "run"), *command]
        with (tmp_path / "log").open("ab") as log:
            started.append(subprocess.Popen(words, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(DEADLINE_S)


def test_last_words_of_a_child_are_kept_and_handed_back(
    keep: Callable[..., Any], tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """It stores 40 descriptors and is dead before the keeper has read the first message."""
    keep(sys.executable, "-c", CHILD, str(tmp_path))
    wait_for((tmp_path / "said").exists, "the next life")
    assert (tmp_path / "said").read_text() == "True True\n"
    assert "40 descriptors are kept" in (tmp_path / "log").read_text()


def test_a_child_that_cannot_start_is_tried_again_and_again_but_not_busily(
    keep: Callable[..., Any], tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    keeper = keep("/nowhere/preload")

    def num_deaths() -> int:
        return (tmp_path / "log").read_text().count("ended (127)")

    wait_for(lambda: num_deaths() >= 5, "some tries")
    assert "cannot start /nowhere/preload: [Errno 2]" in (tmp_path / "log").read_text()
    assert keeper.poll() is None
    assert num_deaths() < 12


def test_a_child_that_ignores_sigterm_is_killed(keep: Callable[..., Any], tmp_path: Path) -> None:
    """The second SIGTERM changes nothing: the child has its time, and then none."""
    script = "trap '' TERM; touch \"$0\"; while :; do sleep 0.05; done"
    started = tmp_path / "started"
    words = KEEPER.replace("10.0", "0.5")
    (tmp_path / "run").mkdir()
    keeper = subprocess.Popen([sys.executable, "-c", words, str(tmp_path / "run"), "/bin/sh", "-c", script, started])
    while not started.exists():
        assert keeper.poll() is None
    keeper.send_signal(signal.SIGTERM)
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(DEADLINE_S) == 0
    assert not (tmp_path / "run" / "notify.sock").exists()


FAILING = """
import errno, os, sys
import preload.daemon.keeper as module
owner, name = (module.os, sys.argv[2]) if hasattr(os, sys.argv[2]) else (module.runtime_folder, sys.argv[2])
real, calls = getattr(owner, name), []
def failing(*words):
    calls.append(words)
    if len(calls) in (2, 3):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return real(*words)
setattr(owner, name, failing)
del sys.argv[2]
"""

LIFE = 'touch "$0/life.$$"; sleep 0.2; echo over >> "$0/over"'


def num_lives(folder: Path) -> int:
    return len(list(folder.glob("life.*")))


@pytest.mark.parametrize("call", ["fork", "pidfd_open", "is_locked"])
def test_a_start_that_the_system_refuses_is_tried_again(
    call: str, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """And a child that cannot be watched is not left to itself."""
    (tmp_path / "run").mkdir()
    words = [
        sys.executable,
        "-c",
        FAILING + KEEPER,
        str(tmp_path / "run"),
        call,
        "/bin/sh",
        "-c",
        LIFE,
        str(tmp_path),
    ]
    with (tmp_path / "log").open("wb") as log:
        keeper = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        wait_for(lambda: keeper.poll() is not None or "lives" in say(tmp_path), "three lives")
        assert keeper.poll() is None
        assert (tmp_path / "log").read_text().count("cannot start a daemon: BlockingIOError") == 2
        children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
        assert len(children) <= 1
    finally:
        keeper.terminate()
        assert keeper.wait(DEADLINE_S) == 0


def say(folder: Path) -> str:
    over = folder / "over"
    return "three lives" if over.exists() and over.read_text().count("over") >= 3 else ""


def test_a_keeper_without_a_free_descriptor_goes_on_when_there_are_some(
    keep: Callable[..., Any], tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    keeper = keep("/bin/sh", "-c", LIFE, str(tmp_path))
    wait_for(lambda: num_lives(tmp_path) >= 1, "a first life")
    _, hard = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (4, hard))
    wait_for(lambda: "Too many open files" in (tmp_path / "log").read_text(), "a refusal")
    assert keeper.poll() is None
    before = num_lives(tmp_path)
    resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (hard, hard))
    wait_for(lambda: num_lives(tmp_path) > before, "another life")


def test_a_folder_that_another_keeper_took_meanwhile_is_left_alone(
    keep: Callable[..., Any], tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """No daemon is started there; when the other one leaves it is ours again."""
    stop = tmp_path / "stop"
    keeper = keep("/bin/sh", "-c", 'touch "$0/life.$$"; while [ ! -e "$0/stop" ]; do sleep 0.05; done', str(tmp_path))
    wait_for(lambda: num_lives(tmp_path) == 1, "a first life")
    os.kill(keeper.pid, signal.SIGSTOP)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "keeper.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stop.touch()
        os.kill(keeper.pid, signal.SIGCONT)
        wait_for(lambda: "ended (0)" in (tmp_path / "log").read_text(), "the end of the first life")
        refusal = f"no daemon is started: another keeper holds {tmp_path / 'run'}"
        wait_for(lambda: refusal in (tmp_path / "log").read_text(), "the refusal")
        assert num_lives(tmp_path) == 1
        assert not (tmp_path / "run" / "notify.sock").exists()
        stop.unlink()
    wait_for(lambda: num_lives(tmp_path) == 2, "a second life")
    assert (tmp_path / "run" / "notify.sock").exists()
    stop.touch()
