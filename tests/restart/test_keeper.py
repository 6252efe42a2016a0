"""`preload keeper` and its daemon, killed in every order: weights are served on, without a look at the disk."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.daemon import runtime_folder
from preload.engine.client import Attachment, attach
from preload.engine.client.control import make_selector
from preload.engine.errors import DaemonUnreachableError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

FAKES = Path(__file__).parents[1] / "fakes"
RAW = Recipe(model="raw")
DEADLINE_S = 60.0


class Kept:
    """A keeper with its daemon, in one folder. `process` is the keeper's."""

    def __init__(self, daemon: Any, wait_for: Callable[..., Any]) -> None:
        self.daemon = daemon
        self.wait_for = wait_for
        self.runtime_dir = str(daemon.runtime_dir)

    @property
    def log(self) -> str:
        return str(self.daemon.log)

    @property
    def keeper_pid(self) -> int:
        return int(self.daemon.pid)

    def status(self) -> Any:
        """As a daemon that is coming back tells it."""

        def listed() -> Any:
            with contextlib.suppress(DaemonUnreachableError), self.daemon.control() as control:
                return control.list()

        return self.wait_for(listed, "the daemon to answer")

    def kill_daemon(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Returns when another life of it answers."""
        pid = self.status().pid
        os.kill(pid, number)
        self.wait_for_next(pid)

    def wait_for_next(self, pid: int) -> None:
        self.wait_for(lambda: self.status().pid != pid, "the next daemon")

    def stored(self) -> list[str]:
        """Names of the memfds that the keeper holds."""
        return memfds(self.keeper_pid)

    def generation(self) -> Any:
        (only,) = self.status().generations
        return only

    def leases(self) -> list[Any]:
        return [lease for generation in self.status().generations for lease in generation.leases]

    def attach(self, generation_id: str) -> Attachment:
        return attach(generation_id=generation_id, runtime_dir=self.runtime_dir, tensors="buffers")

    def evict(self, generation_id: str) -> Any:
        with self.daemon.control() as control:
            return control.evict(make_selector(generation_id=generation_id))


def memfds(pid: int | str) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/{pid}/fd/{fd}")
                found += [name] if name.startswith(("/memfd:preload", "/memfd:fakecuda")) else []
    return sorted(found)


@pytest.fixture
def make_kept(make_daemon: Callable[..., Any], wait_for: Callable[..., Any]) -> Iterator[Callable[..., Kept]]:
    """Starts keepers with settings of run_keeper_with.py; no daemon is left, also where a keeper was killed."""
    made: list[Kept] = []

    def make(**settings: Any) -> Kept:
        command = [sys.executable, str(FAKES / "run_keeper_with.py"), json.dumps(settings)]
        made.append(Kept(make_daemon(command=command), wait_for))
        return made[-1]

    yield make
    for kept in made:
        kept.daemon.stop()
        orphan = runtime_folder.open_holder(kept.daemon.runtime_dir, runtime_folder.DAEMON_LOCK)
        if orphan is not None:
            signal.pidfd_send_signal(orphan[1], signal.SIGKILL)
            os.close(orphan[1])


@pytest.fixture
def num_parked(tested_backend: str) -> int:
    """Of one generation: the catalog, the manifest, and the segment unless a holder has it."""
    return 2 if tested_backend == "cuda_ipc" else 3


@pytest.fixture
def kept(make_kept: Callable[..., Kept]) -> Kept:
    return make_kept()


@pytest.fixture
def gone(kept: Kept, raw_checkpoint: Path) -> str:
    """The id of a resident generation whose checkpoint is not on the disk any more."""
    return load_and_remove(kept, raw_checkpoint)


def load_and_remove(kept: Kept, checkpoint: Path) -> str:
    loaded = kept.daemon.load(checkpoint, model="raw")
    checkpoint.rename(checkpoint.with_name(f"away-{checkpoint.name}"))
    return str(loaded.id)


class Events:
    """A lease's events, taken one by one with a deadline."""

    def __init__(self, attachment: Attachment) -> None:
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        attachment.lease.on_event(self._events.put)

    def next(self) -> tuple[str, str]:
        event = self._events.get(timeout=DEADLINE_S)
        return event.kind, event.detail


@pytest.fixture
def holder(kept: Kept, gone: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lease, stopped, so that it does not come back."""
    options = {"runtime_dir": kept.runtime_dir, "generation_id": gone, "tensors": "buffers"}
    process = subprocess.Popen(
        [sys.executable, FAKES / "holder.py", json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert "lease" in json.loads(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        yield process
        process.kill()
        process.wait()


def test_a_killed_daemon_serves_again_without_its_checkpoint(kept: Kept, gone: str) -> None:
    with kept.attach(gone) as attachment:
        before = {name: bytes(tensor) for name, tensor in attachment.tensors.items()}
        events = Events(attachment)
        kept.kill_daemon()
        assert events.next() == ("lost", "")
        assert events.next() == ("reclaimed", "2")
        assert kept.status().epoch == 2
        assert kept.generation().state == pb.GENERATION_STATE_READY
        (lease,) = kept.leases()
        assert lease.id == attachment.lease.id
        assert not lease.unclaimed
        with kept.attach(gone) as second:
            assert {name: bytes(tensor) for name, tensor in second.tensors.items()} == before
            assert second.lease.attached.epoch == 2
    del attachment, second  # memory of a holder is leased as long as anything refers to it
    kept.wait_for(lambda: kept.leases() == [], "both leases to end")


def test_every_life_counts(kept: Kept, gone: str) -> None:
    for epoch in (2, 3, 4):
        kept.kill_daemon()
        assert kept.status().epoch == epoch
    assert kept.generation().id == gone
    assert kept.generation().resident_bytes == kept.daemon.device().resident_bytes > 0


def test_a_lease_whose_holder_stays_away_ends_and_others_stay(
    kept: Kept, gone: str, holder: subprocess.Popen[str]
) -> None:
    with kept.attach(gone) as attachment:
        kept.daemon.options += ["--reclaim-timeout-s", "3"]
        restart_keeper(kept)
        os.kill(kept.status().pid, signal.SIGKILL)
        kept.wait_for(lambda: [e.pid for e in kept.leases() if e.unclaimed] == [holder.pid], "an unclaimed lease")
        kept.wait_for(lambda: [e.id for e in kept.leases()] == [attachment.lease.id], "its end")
    assert kept.generation().state == pb.GENERATION_STATE_READY


def restart_keeper(kept: Kept) -> None:
    """SIGKILL of the keeper; the next one, with the options as they are now, has everything when this returns."""
    before = kept.stored()
    kept.daemon.kill()
    kept.daemon.start()
    kept.wait_for(lambda: kept.stored() == before, "the daemon to park again")


def test_a_retiring_generation_outlives_the_daemon_until_its_holder_lets_go(kept: Kept, gone: str) -> None:
    with kept.attach(gone) as attachment:
        assert not kept.evict(gone).freed
        kept.kill_daemon()
        kept.wait_for(lambda: [lease.unclaimed for lease in kept.leases()] == [False], "the lease to be reclaimed")
        assert kept.generation().state == pb.GENERATION_STATE_RETIRING
        with kept.attach(gone) as second:
            assert bytes(second.tensors["a"]) == bytes(attachment.tensors["a"])
    del attachment, second
    kept.wait_for(lambda: list(kept.status().generations) == [], "the generation to be freed")
    assert kept.stored() == ["/memfd:preload:catalog (deleted)"]


def test_a_retiring_generation_whose_holder_is_gone_is_freed_in_time(
    kept: Kept, gone: str, holder: subprocess.Popen[str]
) -> None:
    kept.evict(gone)
    kept.daemon.options += ["--reclaim-timeout-s", "2"]
    restart_keeper(kept)
    kept.kill_daemon()
    holder.kill()
    kept.wait_for(lambda: list(kept.status().generations) == [], "the generation to be freed")
    assert kept.daemon.device().resident_bytes == 0
    assert kept.stored() == ["/memfd:preload:catalog (deleted)"]


@pytest.mark.host_only
def test_a_half_loaded_generation_is_dropped_with_its_memory(
    make_kept: Callable[..., Kept], sparse_checkpoint: Callable[..., Path], raw_checkpoint: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    loader = [sys.executable, str(FAKES / "gated_loader.py"), str(gate)]
    command = [sys.executable, str(FAKES / "run_daemon.py"), json.dumps({"loader_command": loader})]
    kept = make_kept(command=command)
    whole = kept.daemon.load(raw_checkpoint, model="raw")
    (gate / "stop_at").write_text("100000")
    half = sparse_checkpoint(4, 1 << 20, name=f"half-{os.getpid()}")
    thread = threading.Thread(target=lambda: load_in_vain(kept, half), daemon=True)
    thread.start()
    kept.wait_for(lambda: (gate / "waiting").exists() and (gate / "waiting").read_text(), "a loader at the gate")
    assert everybodys_memfds(half.name)
    kept.kill_daemon()
    (gate / "stop_at").unlink()
    thread.join(DEADLINE_S)
    assert kept.generation().id == whole.id
    assert kept.daemon.device().resident_bytes == whole.resident_bytes
    kept.wait_for(lambda: not everybodys_memfds(half.name), "its memory to be free")
    with kept.attach(whole.id):
        pass


def load_in_vain(kept: Kept, path: Path) -> None:
    with contextlib.suppress(Exception):
        kept.daemon.load(path, model="raw")


def everybodys_memfds(word: str) -> list[str]:
    return [name for pid in os.listdir("/proc") if pid.isdigit() for name in memfds(pid) if word in name]


def test_a_catalog_of_an_unknown_version_is_refused_and_the_weights_are_kept(
    make_kept: Callable[..., Kept], raw_checkpoint: Path, tmp_path: Path
) -> None:
    version = tmp_path / "version"
    version.write_text("2")
    command = [sys.executable, str(FAKES / "run_daemon.py"), json.dumps({"format_version_file": str(version)})]
    kept = make_kept(command=command)
    gone = load_and_remove(kept, raw_checkpoint)
    before = kept.stored()
    version.write_text("1")
    os.kill(kept.status().pid, signal.SIGKILL)
    refusal = "the parked catalog has format 2, and this daemon reads format 1: the weights are kept"
    kept.wait_for(lambda: refusal in kept.log, "the refusal")
    assert kept.stored() == before
    version.write_text("2")
    assert kept.generation().id == gone
    with kept.attach(gone):
        pass


def test_the_next_keeper_adopts_the_daemon_and_holds_what_it_parks_again(kept: Kept, gone: str) -> None:
    pid = kept.status().pid
    before = kept.stored()
    with kept.attach(gone) as attachment:
        events = Events(attachment)
        kept.daemon.kill()
        with kept.attach(gone):
            assert kept.status().pid == pid, "the daemon goes on without a keeper"
        kept.daemon.start()
        kept.wait_for(lambda: kept.stored() == before, "the daemon to park again")
        assert f"adopted daemon {pid}" in kept.log
        assert kept.status().pid == pid
        kept.kill_daemon()
        assert events.next() == ("lost", "")
        assert events.next() == ("reclaimed", "2")
        assert kept.generation().id == gone


def test_what_is_loaded_without_a_keeper_is_parked_with_the_next(
    kept: Kept, raw_checkpoint: Path, num_parked: int
) -> None:
    kept.daemon.kill()
    gone = load_and_remove(kept, raw_checkpoint)
    kept.daemon.start()
    kept.wait_for(lambda: len(kept.stored()) == num_parked, "catalog, manifest and segment to be parked")
    kept.kill_daemon()
    assert kept.generation().id == gone


def test_a_keeper_leaves_a_daemon_alone_that_was_started_without_one(
    make_daemon: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    """It gives no sign of life, and is not killed for it; when it ends, the keeper starts its own."""
    daemon = make_daemon()
    command = [sys.executable, FAKES / "run_keeper_with.py", json.dumps({"watchdog_s": 0.2})]
    words = [*command, "--runtime-dir", daemon.runtime_dir, "--http-port", "0"]
    with (tmp_path / "log").open("wb") as log:
        keeper = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        wait_for(lambda: f"adopted daemon {daemon.pid}" in (tmp_path / "log").read_text(), "the keeper to adopt it")
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.process.wait(1.0)
        daemon.kill()
        wait_for(lambda: "started daemon" in (tmp_path / "log").read_text(), "a daemon of the keeper's own")
    finally:
        keeper.terminate()
        keeper.wait(DEADLINE_S)


def test_sighup_replaces_the_daemon_gracefully(kept: Kept, gone: str) -> None:
    pid = kept.status().pid
    with kept.attach(gone) as attachment:
        events = Events(attachment)
        os.kill(kept.keeper_pid, signal.SIGHUP)
        assert [events.next()[0] for _ in range(3)] == ["draining", "lost", "reclaimed"]
        assert kept.status().pid != pid
        assert [lease.id for lease in kept.leases()] == [attachment.lease.id]
    assert f"daemon {pid} ended (0)" in kept.log


def test_a_daemon_that_hangs_is_replaced(make_kept: Callable[..., Kept], raw_checkpoint: Path) -> None:
    kept = make_kept(watchdog_s=3)
    gone = load_and_remove(kept, raw_checkpoint)
    pid = kept.status().pid
    os.kill(pid, signal.SIGSTOP)
    kept.wait_for(lambda: f"daemon {pid} ended (-9)" in kept.log, "the hung daemon to be killed")
    assert kept.generation().id == gone


@pytest.mark.parametrize("what", ["folder", "notify.sock"])
def test_a_keeper_whose_files_were_removed_goes_on_keeping(
    kept: Kept, gone: str, write_safetensors: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    """The daemon that was alive parks again, and the next one is reached at the same folder."""
    notify = Path(kept.runtime_dir) / "notify.sock"
    pid, before = kept.status().pid, notify.stat()
    with kept.attach(gone) as attachment:
        shutil.rmtree(kept.runtime_dir) if what == "folder" else notify.unlink()
        kept.wait_for(lambda: notify.exists() and notify.stat() != before, "the keeper to listen anew")
        assert Path(f"/proc/{pid}").exists(), "the daemon is not ended for it"
        os.kill(kept.keeper_pid, signal.SIGHUP)
        kept.wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of the first daemon")
        assert kept.generation().id == gone
        kept.wait_for(lambda: [e.unclaimed for e in kept.leases()] == [False], "the lease to be reclaimed")
        assert [lease.id for lease in kept.leases()] == [attachment.lease.id]
    second = kept.daemon.load(write_safetensors(tmp_path / "b", {"b": ("F32", [1], bytes(4))}), model="raw")
    kept.kill_daemon()
    assert {generation.id for generation in kept.status().generations} == {gone, second.id}
    words = [sys.executable, "-m", "preload.cli.main", "keeper", "--runtime-dir", kept.runtime_dir]
    assert subprocess.run(words, capture_output=True, timeout=DEADLINE_S, check=False).returncode == 2


def test_a_second_keeper_is_refused_and_the_first_unharmed(kept: Kept, gone: str) -> None:
    words = [sys.executable, "-m", "preload.cli.main", "keeper", "--runtime-dir", kept.runtime_dir]
    second = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert second.returncode == 2
    assert second.stderr == f"preload: another keeper holds {kept.runtime_dir}\n"
    kept.kill_daemon()
    assert kept.generation().id == gone


def test_a_keeper_that_does_not_read_holds_up_nobody_and_is_told_everything_later(
    kept: Kept, raw_checkpoint: Path, num_parked: int
) -> None:
    """It is stopped, and its socket is full: the daemon loads, is looked at, and owes it what there is to park."""
    os.kill(kept.keeper_pid, signal.SIGSTOP)
    for _ in range(4):  # each sender has room for some
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
            other.setblocking(False)
            other.connect(f"{kept.runtime_dir}/notify.sock")
            while True:
                other.send(b"noise")
    gone = load_and_remove(kept, raw_checkpoint)
    kept.wait_for(lambda: "does not read" in kept.log, "the daemon to notice")
    assert kept.generation().id == gone
    assert len(kept.stored()) == 1
    os.kill(kept.keeper_pid, signal.SIGCONT)
    kept.wait_for(lambda: len(kept.stored()) == num_parked, "manifest and segment to be parked")
    assert "another keeper listens" not in kept.log
    kept.kill_daemon()
    assert kept.generation().id == gone


def test_a_message_of_a_stranger_is_ignored(kept: Kept, gone: str) -> None:
    before = kept.stored()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, open(os.devnull) as other:
        sock.connect(f"{kept.runtime_dir}/notify.sock")
        for name in ("catalog", *(f"x.segment.{index}" for index in range(3))):
            sock.send(f"FDSTOREREMOVE=1\nFDNAME={name}".encode())
            socket.send_fds(sock, [f"FDSTORE=1\nFDNAME={name}".encode()], [other.fileno()])
        sock.send(b"\xff" * 3000)
        sock.send(b"")
    ignored = f"a message from process {os.getpid()}, which is not the daemon, is ignored"
    kept.wait_for(lambda: kept.log.count(ignored) == 10, "all messages to be read")
    assert kept.stored() == before
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{kept.keeper_pid}/fd")]
    assert links.count("/dev/null") <= 1, "descriptors of strangers are closed"
    kept.kill_daemon()
    assert kept.generation().id == gone


def test_descriptors_of_a_freed_generation_leave_the_keeper(kept: Kept, gone: str, num_parked: int) -> None:
    assert len(kept.stored()) == num_parked
    assert kept.evict(gone).freed
    kept.wait_for(lambda: kept.stored() == ["/memfd:preload:catalog (deleted)"], "manifest and segment to go")
    kept.kill_daemon()
    assert list(kept.status().generations) == []


@pytest.mark.host_only
def test_a_stopped_keeper_takes_daemon_and_memory_along(kept: Kept, raw_checkpoint: Path) -> None:
    checkpoint = raw_checkpoint.rename(raw_checkpoint.with_name(f"whole-{os.getpid()}.safetensors"))
    kept.daemon.load(checkpoint, model="raw")
    assert everybodys_memfds(checkpoint.name)
    pid = kept.status().pid
    assert kept.daemon.stop() == 0
    assert not Path(f"/proc/{pid}").exists()
    assert not {"notify.sock", "daemon.sock", "segments.sock"} & set(os.listdir(kept.runtime_dir))
    assert not everybodys_memfds(checkpoint.name)


def test_the_command_line_keeps_a_daemon_and_stays_small(
    tmp_path: Path, wait_for: Callable[..., Any], record_property: Callable[..., None]
) -> None:
    words = [sys.executable, "-m", "preload.cli.main", "keeper", "--runtime-dir", tmp_path / "run"]
    words += ["--", "--http-port", "0"]
    with (tmp_path / "log").open("wb") as log:
        keeper = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        wait_for(lambda: "epoch 1 serves" in (tmp_path / "log").read_text(), "the daemon to serve")
        maps = Path(f"/proc/{keeper.pid}/maps").read_text()
        assert not re.findall(r"cygrpc|google/_upb|_message", maps)
        resident = Path(f"/proc/{keeper.pid}/status").read_text().split("VmRSS:")[1].split()[0]
        record_property("keeper_rss_kib", resident)
        print(f"the keeper has {resident} KiB resident")
        assert int(resident) < 32 * 1024
    finally:
        keeper.terminate()
        assert keeper.wait(DEADLINE_S) == 0
