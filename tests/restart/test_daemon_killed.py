"""The daemon is killed under its engines: they keep what they map, and reclaim their leases from its successor."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client import attach
from preload.engine.recipe import Recipe

pytestmark = pytest.mark.by_descriptor
RAW = Recipe(model="raw")
DEADLINE_S = 60.0


@pytest.fixture
def attached(daemon: Any, raw_checkpoint: Path) -> Iterator[Any]:
    daemon.load(raw_checkpoint, model="raw")
    with attach(raw_checkpoint, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
        yield attachment


class Events:
    """A lease's events, taken one by one with a deadline."""

    def __init__(self, lease: Any) -> None:
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(lease,), daemon=True).start()

    def _read(self, lease: Any) -> None:
        for event in lease.events():
            self._events.put(event)

    def next(self) -> tuple[str, str]:
        event = self._events.get(timeout=DEADLINE_S)
        return event.kind, event.detail


def leases(daemon: Any) -> list[Any]:
    return [lease for generation in daemon.generations() for lease in generation.leases]


def test_weights_stay_readable_when_the_daemon_is_killed(daemon: Any, attached: Any, raw_checkpoint: Path) -> None:
    before = {name: bytes(tensor) for name, tensor in attached.tensors.items()}
    events = Events(attached.lease)
    daemon.kill()
    assert events.next() == ("lost", "")
    assert {name: bytes(tensor) for name, tensor in attached.tensors.items()} == before
    assert raw_checkpoint.read_bytes().endswith(before["a"] + before["b"] + before["c"])


def test_a_lease_is_refused_by_a_successor_that_has_not_the_generation(daemon: Any, attached: Any) -> None:
    events = Events(attached.lease)
    kept = bytes(attached.tensors["a"])
    daemon.kill()
    daemon.start()
    assert events.next() == ("lost", "")
    kind, detail = events.next()
    assert kind == "refused"
    assert f"no generation with id {attached.generation_id}" in detail
    assert bytes(attached.tensors["a"]) == kept
    assert leases(daemon) == []


def test_a_refused_lease_is_reclaimed_once_the_generation_is_back(
    daemon: Any, attached: Any, raw_checkpoint: Path
) -> None:
    events = Events(attached.lease)
    daemon.kill()
    daemon.start()
    assert [events.next()[0] for _ in range(2)] == ["lost", "refused"]
    assert daemon.load(raw_checkpoint, model="raw").id == attached.generation_id
    assert events.next() == ("reclaimed", "2")
    assert [lease.id for lease in leases(daemon)] == [attached.lease.id]


def test_a_lease_can_be_closed_while_a_daemon_accepts_and_never_answers(daemon: Any, attached: Any) -> None:
    events = Events(attached.lease)
    daemon.kill()
    path = daemon.runtime_dir / "daemon.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        assert events.next() == ("lost", "")
        accepted, _ = silent.accept()
        with accepted:
            closer = threading.Thread(target=attached.lease.close)
            closer.start()
            closer.join(DEADLINE_S)
            assert not closer.is_alive()


def test_a_lease_is_reclaimed_from_a_successor_that_has_it(
    daemon: Any, attached: Any, raw_checkpoint: Path, wait_for: Callable[..., Any]
) -> None:
    """The holder sleeps through the successor's load: it is stopped as the kernel stops it, and goes on."""
    script = Path(__file__).parents[1] / "fakes" / "holder.py"
    options = {"runtime_dir": str(daemon.runtime_dir), "generation_id": attached.generation_id, "tensors": "buffers"}
    holder = subprocess.Popen(
        [sys.executable, script, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        opening = json.loads(holder.stdout.readline())
        holder.stdin.write("phases\ndigest a\n")
        holder.stdin.flush()
        assert json.loads(holder.stdout.readline()) == {"reported": True}
        digest = json.loads(holder.stdout.readline())
        wait_for(lambda: any(lease.phases for lease in leases(daemon)), "its phases to arrive")
        stop_holder(holder)
        daemon.kill()
        daemon.start()
        daemon.load(raw_checkpoint, model="raw")
        holder.send_signal(signal.SIGCONT)
        assert json.loads(holder.stdout.readline()) == {"event": "lost", "detail": ""}
        assert json.loads(holder.stdout.readline()) == {"event": "reclaimed", "detail": "2"}
        (lease,) = [lease for lease in leases(daemon) if lease.pid == holder.pid]
        assert lease.id != opening["lease"]
        wait_for(
            lambda: [p.name for e in leases(daemon) if e.pid == holder.pid for p in e.phases] == ["warm-up"],
            "its phases to be reported anew",
        )
        holder.stdin.write("digest a\n")
        holder.stdin.flush()
        assert json.loads(holder.stdout.readline()) == digest
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    wait_for(lambda: not any(lease.pid == holder.pid for lease in leases(daemon)), "the reclaimed lease to end")


def stop_holder(holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED)


def test_a_lease_can_be_closed_while_no_daemon_answers(daemon: Any, attached: Any) -> None:
    events = Events(attached.lease)
    daemon.kill()
    assert events.next() == ("lost", "")
    attached.close()
    assert attached.tensors["a"][0] is not None


def num_sockets() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith("socket:") for link in links)


def test_reclaims_leave_no_channel_behind(
    daemon: Any, raw_checkpoint: Path, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """Every life of the daemon is another connection. The holder sees it through a link, which is away while the
    successor loads."""
    link = tmp_path / "run"
    link.symlink_to(daemon.runtime_dir)
    daemon.load(raw_checkpoint, model="raw")
    with attach(raw_checkpoint, recipe=RAW, runtime_dir=str(link), tensors="buffers") as attachment:
        before = num_sockets()
        events = Events(attachment.lease)
        for epoch in ("2", "3", "4"):
            link.unlink()
            daemon.kill()
            assert events.next() == ("lost", "")
            daemon.start()
            daemon.load(raw_checkpoint, model="raw")
            link.symlink_to(daemon.runtime_dir)
            assert events.next() == ("reclaimed", epoch)
        assert attachment.lease.attached.epoch == 4
        wait_for(lambda: num_sockets() <= before, "the old connections to be closed")
    wait_for(lambda: leases(daemon) == [], "the lease to end")


def test_an_engine_attaches_anew_after_a_restart(daemon: Any, attached: Any, raw_checkpoint: Path) -> None:
    daemon.kill()
    daemon.start()
    daemon.load(raw_checkpoint, model="raw")
    with attach(raw_checkpoint, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as again:
        assert again.generation_id == attached.generation_id
        assert again.lease.attached.epoch == 2
        assert bytes(again.tensors["a"]) == bytes(attached.tensors["a"])
