"""Memory behind IPC handles: whose it is, who may ask for it, and what happens to everybody when its holder ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.daemon.holder import names_of
from preload.engine.client.control import make_selector
from preload.engine.errors import CorruptedError, DeviceError, LoadFailedError, NotResidentError, PreloadError
from preload.engine.recipe import Recipe
from preload.protos import holder_pb2
from preload.protos import weight_cache_pb2 as pb

FAKES = Path(__file__).parents[1] / "fakes"
MIB = 1 << 20
GRANULARITY = 2 * MIB
IPC = ("--drain-timeout-s", "0.2", "--device-memory", "cuda_ipc")
RAW = {"model": "raw"}


@pytest.fixture(scope="module")
def backend() -> str:
    return "cuda_ipc"


@pytest.fixture
def make_kept(make_daemon: Callable[..., Any]) -> Callable[..., Any]:
    """Keepers of daemons with holders."""
    command = [sys.executable, "-P", "-m", "preload.cli.main", "daemon"]
    keeper = [sys.executable, str(FAKES / "run_keeper.py"), json.dumps(command)]
    return lambda *options: make_daemon(*IPC, *options, command=keeper)


def list_of(daemon: Any) -> Any:
    with daemon.control() as control:
        return control.list()


def failure_of(daemon: Any) -> str:
    """Why the only generation is FAILED; "" if it is not."""
    (found,) = daemon.generations()
    return str(found.failure.message) if found.state == pb.GENERATION_STATE_FAILED else ""


def test_a_holder_that_dies_fails_its_generations_and_tells_their_holders(
    machine: Any, device: str, make_daemon: Any, raw_checkpoint: Path, load_on: Any, hold: Any, wait_for: Any,
    owner_pid: Any,
) -> None:  # fmt: skip
    daemon = make_daemon(*IPC)
    load_on(daemon, raw_checkpoint, "host")
    load_on(daemon, raw_checkpoint, device)
    on_host = hold(daemon, raw_checkpoint, recipe=RAW)
    importer = hold(daemon, raw_checkpoint, recipe=RAW, device=device)
    first = owner_pid(daemon)
    os.kill(first, signal.SIGKILL)
    kind, detail = importer.event()
    assert kind == "failed"
    assert f"the holder of {device} (process {first}) has ended, and its memory with it" in detail
    found = {g.device: g for g in daemon.generations()}
    assert (found[device].state, found[device].failure.message) == (pb.GENERATION_STATE_FAILED, detail)
    assert found["host"].state == pb.GENERATION_STATE_READY
    assert [(d.resident_bytes, d.reserved_bytes) for d in list_of(daemon).devices if d.name == device] == [(0, 0)]
    with daemon.control() as control, pytest.raises(LoadFailedError, match=f"process {first}. has ended"):
        control.check(make_selector(raw_checkpoint, recipe=Recipe(model="raw"), device=device))
    importer.tell("touch")
    assert importer.process.wait(60) == -signal.SIGSEGV, "its memory went with the exporter"
    assert on_host.ask("touch") > 0
    wait_for(lambda: machine.used_bytes(0) == 0, "the device's memory to be back")
    load_on(daemon, raw_checkpoint, device)
    assert owner_pid(daemon) not in (0, first)
    assert hold(daemon, raw_checkpoint, recipe=RAW, device=device).ask("touch") > 0


def test_a_holder_that_dies_under_a_load_fails_it(
    machine: Any, device: str, make_daemon: Any, gate: Any, raw_checkpoint: Path, wait_for: Any, load_on: Any,
    owner_pid: Any,
) -> None:  # fmt: skip
    daemon = make_daemon(*IPC, command=gate.command())
    gate.stop_at(gate.HEADER)
    with daemon.control() as control:
        events = control.load(raw_checkpoint, Recipe(model="raw"), device=device, timeout_s=60)
        next(events)
        gate.loader_pid()
        wait_for(lambda: machine.used_bytes(0) == GRANULARITY, "the segment to be there")
        os.kill(owner_pid(daemon), signal.SIGKILL)
        with pytest.raises(DeviceError, match="has ended, and its memory with it; load again"):
            list(events)
        wait_for(lambda: machine.used_bytes(0) == 0, "the device's memory to be back")
        assert {d.reserved_bytes for d in control.list().devices} == {0}
    gate.open()
    assert load_on(daemon, raw_checkpoint, device).state == pb.GENERATION_STATE_READY


def test_a_daemon_that_comes_back_finds_the_holder_and_frees_what_nobody_describes(
    machine: Any, device: str, make_kept: Any, raw_checkpoint: Path, sparse_checkpoint: Any, load_on: Any, hold: Any,
    wait_for: Any, owner_pid: Any,
) -> None:  # fmt: skip
    kept = make_kept()
    load_on(kept, raw_checkpoint, device)
    holder_pid, importer = owner_pid(kept), hold(kept, raw_checkpoint, recipe=RAW, device=device)
    # A load that will not be finished: its block is in the holder, and in no catalog.
    with kept.control() as control:
        events = control.load(sparse_checkpoint(1, 100 * MIB), Recipe(model="raw"), device=device, timeout_s=60)
        next(events)
        wait_for(lambda: machine.used_bytes(0) > 100 * MIB, "its block to be there")
        os.kill(control.list().pid, signal.SIGKILL)
        with pytest.raises(Exception, match=r"."):
            list(events)
    assert (importer.event()[0], importer.event()) == ("lost", ("reclaimed", "2"))
    assert owner_pid(kept) == holder_pid
    wait_for(lambda: machine.used_bytes(0) == GRANULARITY, "the unfinished load's block to be freed")
    assert importer.ask("touch") == hold(kept, raw_checkpoint, recipe=RAW, device=device).ask("touch")
    os.kill(holder_pid, signal.SIGKILL)
    assert importer.event()[0] == "failed", "the next life watches the holder that it found"


def test_another_holder_of_the_device_has_none_of_the_weights(
    machine: Any, device: str, make_kept: Any, raw_checkpoint: Path, load_on: Any, owner_pid: Any, wait_for: Any
) -> None:
    kept = make_kept()
    load_on(kept, raw_checkpoint, device)
    pid, holder_pid = list_of(kept).pid, owner_pid(kept)
    os.kill(pid, signal.SIGSTOP)
    os.kill(holder_pid, signal.SIGKILL)
    command = [sys.executable, "-P", "-m", "preload.daemon.holder", "--runtime-dir", str(kept.runtime_dir)]
    other = subprocess.Popen([*command, "--device", device])
    try:
        path = kept.runtime_dir / names_of(device)[1]
        wait_for(lambda: other.pid in {p.pid for p in machine.processes()} and path.exists(), "another holder")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: _pid_of(kept) not in (0, pid), "the next life")
        with kept.control() as control, pytest.raises(NotResidentError):
            control.check(make_selector(raw_checkpoint, recipe=Recipe(model="raw"), device=device))
        load_on(kept, raw_checkpoint, device)
        assert owner_pid(kept) == other.pid, "one that was started by somebody else is used"
    finally:
        other.kill()
        other.wait()


def _pid_of(daemon: Any) -> int:
    try:
        return int(list_of(daemon).pid)
    except PreloadError:  # between two lives
        return 0


def test_a_holder_ends_with_a_daemon_that_nobody_keeps(
    machine: Any, device: str, make_daemon: Any, raw_checkpoint: Path, load_on: Any, owner_pid: Any, wait_for: Any
) -> None:
    daemon = make_daemon(*IPC)
    load_on(daemon, raw_checkpoint, device)
    holder = machine.process(owner_pid(daemon))
    daemon.kill()
    wait_for(lambda: not holder.is_alive, "the holder to end")
    assert machine.used_bytes(0) == 0


def test_a_kept_holder_ends_when_the_keeper_is_gone_as_well(
    machine: Any, device: str, make_kept: Any, raw_checkpoint: Path, load_on: Any, owner_pid: Any, wait_for: Any
) -> None:
    kept = make_kept()
    load_on(kept, raw_checkpoint, device)
    holder = machine.process(owner_pid(kept))
    kept.stop()
    assert holder.is_alive, "the keeper may come back with a daemon"
    wait_for(lambda: not holder.is_alive, "the holder to give up")
    assert machine.used_bytes(0) == 0


def test_a_holder_ends_when_a_daemon_of_another_service_manager_does_not_come_back(
    machine: Any, device: str, make_daemon: Any, raw_checkpoint: Path, load_on: Any, owner_pid: Any, wait_for: Any,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """There is no keeper whose end could be seen, and no group of processes that ends as a whole."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        daemon = make_daemon(*IPC)
        load_on(daemon, raw_checkpoint, device)
        holder = machine.process(owner_pid(daemon))
        daemon.kill()
        wait_for(lambda: not holder.is_alive, "the holder to give up")
    assert machine.used_bytes(0) == 0


def test_whoever_maps_memory_that_the_next_daemon_knows_nothing_of_is_told(
    machine: Any, device: str, make_kept: Any, raw_checkpoint: Path, load_on: Any, hold: Any, owner_pid: Any,
    wait_for: Any,
) -> None:  # fmt: skip
    """Daemon and keeper die, and the holder does not: the next daemon frees what it finds there."""
    kept = make_kept()
    load_on(kept, raw_checkpoint, device)
    importer, holder = hold(kept, raw_checkpoint, recipe=RAW, device=device), owner_pid(kept)
    pid = list_of(kept).pid
    kept.kill()
    os.kill(pid, signal.SIGKILL)
    kept.start()
    assert (importer.event()[0], importer.event()[0]) == ("lost", "failed")
    load_on(kept, raw_checkpoint, device)
    assert owner_pid(kept) == holder
    assert hold(kept, raw_checkpoint, recipe=RAW, device=device).ask("touch") > 0
    importer.end()
    wait_for(lambda: machine.used_bytes(0) == GRANULARITY, "the memory that it mapped to be back")
    os.kill(holder, signal.SIGKILL)  # which would wait for a keeper


def test_whoever_comes_back_after_its_lease_has_ended_is_told_that_its_memory_may_be_freed(
    machine: Any, device: str, make_kept: Any, raw_checkpoint: Path, load_on: Any, hold: Any, owner_pid: Any,
    wait_for: Any,
) -> None:  # fmt: skip
    """It was stopped for longer than a daemon waits for it; the generation was evicted, and is there again."""
    kept = make_kept("--reclaim-timeout-s", "0.2")
    loaded = load_on(kept, raw_checkpoint, device)
    importer = hold(kept, raw_checkpoint, recipe=RAW, device=device)
    importer.process.send_signal(signal.SIGSTOP)
    pid = list_of(kept).pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: _pid_of(kept) not in (0, pid), "the next life")
    wait_for(lambda: not any(g.leases for g in kept.generations()), "the lease to end")
    with kept.control() as control:
        control.evict(make_selector(generation_id=loaded.id))
    assert load_on(kept, raw_checkpoint, device).id == loaded.id
    importer.process.send_signal(signal.SIGCONT)
    assert (importer.event()[0], importer.event()[0]) == ("lost", "failed")
    wait_for(lambda: not any(g.leases for g in kept.generations()), "it to leave")
    os.kill(owner_pid(kept), signal.SIGKILL)  # which would wait for a keeper


def test_memory_is_freed_with_its_last_view_and_not_before(
    machine: Any, daemon: Any, device: str, raw_checkpoint: Path, load_on: Any, attacher: Any, wait_for: Any
) -> None:
    """The exporter's free takes the memory from importers, so a lease lasts as long as anybody can look."""
    loaded = load_on(daemon, raw_checkpoint, device)
    ask = attacher(daemon, checkpoint=raw_checkpoint, device=device)
    before = ask("view")
    with daemon.control() as control:
        assert not control.evict(make_selector(generation_id=loaded.id)).freed
    assert ask("look") == before
    assert ask("drop")
    wait_for(lambda: not daemon.generations(), "the generation to be freed")
    assert machine.used_bytes(0) == 0


def test_corrupted_memory_stays_under_those_who_use_it(
    machine: Any, daemon: Any, device: str, raw_checkpoint: Path, load_on: Any, hold: Any, wait_for: Any
) -> None:
    loaded = load_on(daemon, raw_checkpoint, device)
    reader = hold(daemon, raw_checkpoint, recipe=RAW, device=device)
    writer = hold(daemon, raw_checkpoint, recipe=RAW, device=device, tensors="torch")
    assert writer.ask("write a") == "a"
    writer.end()
    with daemon.control() as control, pytest.raises(CorruptedError):
        list(control.verify(make_selector(generation_id=loaded.id), timeout_s=60))
    assert reader.ask("touch") > 0, "it still maps it"
    assert machine.used_bytes(0) == GRANULARITY
    reader.end()
    wait_for(lambda: machine.used_bytes(0) == 0, "the device's memory to be back")
    assert {d.resident_bytes for d in list_of(daemon).devices} == {0}


def ask(path: Path, data: bytes) -> holder_pb2.Response:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(60)
        sock.connect(str(path))
        with contextlib.suppress(BrokenPipeError):  # refused at the door: the answer is there all the same
            sock.send(data)
        return holder_pb2.Response.FromString(sock.recv(65536))


HELLO = holder_pb2.Request(hello=holder_pb2.Hello(is_kept=True)).SerializeToString()


def ask_as(uid: int, path: Path) -> str:
    """What a holder says to another user who got as far as its socket."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(path.parent)
            os.setresuid(uid, uid, uid)
            os.write(theirs, ask(Path(path.name), HELLO).failed.message.encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as said:
        text = said.read().decode()
    os.waitpid(pid, 0)
    return text


def test_only_one_daemon_and_nobody_else_may_use_a_holder(
    machine: Any, daemon: Any, device: str, raw_checkpoint: Path, load_on: Any
) -> None:
    load_on(daemon, raw_checkpoint, device)
    path = daemon.runtime_dir / names_of(device)[1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ask(path, HELLO).failed.reason == pb.TOO_MANY
    if os.geteuid() == 0:
        folders = [path, path.parent]
        modes = [stat.S_IMODE(folder.stat().st_mode) for folder in folders]
        try:
            for folder in folders:
                folder.chmod(0o777)
            assert "user 65534 may not use this holder" in ask_as(65534, path)
        finally:
            for folder, mode in zip(folders, modes, strict=True):
                folder.chmod(mode)
    assert load_on(daemon, raw_checkpoint, device).state == pb.GENERATION_STATE_READY


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a", holder_pb2.Request().SerializeToString() or b"\x12\x00"])
def test_a_holder_answers_nonsense_and_goes_on(
    machine: Any, device: str, tmp_path: Path, data: bytes, wait_for: Any
) -> None:
    runtime_dir = tmp_path / "run"
    command = [sys.executable, "-P", "-m", "preload.daemon.holder", "--runtime-dir", str(runtime_dir)]
    holder = subprocess.Popen([*command, "--device", device])
    try:
        path = runtime_dir / names_of(device)[1]
        wait_for(path.exists, "the holder's socket")
        assert ask(path, data).failed.reason == pb.BAD_REQUEST
        welcome = wait_for(lambda: ask(path, HELLO).welcome, "the holder to be free again")
        assert (welcome.pid, welcome.device, list(welcome.blocks)) == (holder.pid, device, [])
        assert subprocess.run([*command, "--device", device], capture_output=True, timeout=60).returncode == 2
    finally:
        holder.kill()
        holder.wait()


def test_a_device_without_a_holder_is_refused_with_the_reason(
    machine: Any, daemon: Any, device: str, raw_checkpoint: Path, load_on: Any, make_daemon: Any
) -> None:
    other = make_daemon(*IPC)
    machine.inject("cuDevicePrimaryCtxRetain", 2, process="daemon.holder")
    with pytest.raises(Exception, match="cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"):
        load_on(other, raw_checkpoint, device)
    machine.heal()
    unknown = "cuda:GPU-00000000-0000-0000-0000-000000000000"
    with pytest.raises(DeviceError, match="the daemon's driver shows no device"):
        load_on(other, raw_checkpoint, unknown)
    assert load_on(other, raw_checkpoint, device).state == pb.GENERATION_STATE_READY
