"""Fixtures of the failpoint tests: arms failpoints, runs processes that have them, and looks for leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client import Attachment, attach
from preload.engine.errors import DaemonUnreachableError, PreloadError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

FAKES = Path(__file__).parent
RAW = Recipe(model="raw")
DEADLINE_S = 120.0


def tested_device() -> str:
    """Where daemons keep what tests load: see `--on` in tests/conftest.py."""
    return os.environ.get("FAKE_CUDA_ON", "host").rpartition("=")[2]


@dataclass
class Points:
    """Failpoints by files in one folder, whose path is also how our processes are told from others'."""

    folder: Path
    wait_for: Callable[..., Any]

    def command(self, processes: str, *words: str) -> list[str]:
        """`words`, a script of tests/fakes or "-m" and a module, with the failpoints of these kinds of processes."""
        return [sys.executable, str(FAKES / "kill_at.py"), str(self.folder), processes, *words]

    def arm(self, name: str, skip: int = 0, hold: bool = False) -> None:
        (self.folder / f"{name}.reached").unlink(missing_ok=True)
        half = self.folder / f".{name}"
        half.write_text(json.dumps({"skip": skip, "hold": hold}))
        half.rename(self.folder / name)

    def fired(self, name: str) -> int:
        """The pid of the process that was killed at the failpoint, or waits there; waits for it."""
        path = self.folder / f"{name}.reached"
        self.until(lambda: "" if path.exists() and path.read_text().isdigit() else f"{name} is not reached")
        return int(path.read_text())

    def until(self, problem: Callable[[], str]) -> None:
        """Waits until there is no problem any more, and fails with the last one that there was."""
        end_s = time.monotonic() + DEADLINE_S
        while last := problem():
            assert time.monotonic() < end_s, last
            time.sleep(0.02)

    def killed(self, name: str) -> int:
        """The same when the process is dead."""
        pid = self.fired(name)
        self.wait_for(lambda: is_dead(pid), f"{pid} to die at {name}")
        return pid

    def release(self, name: str) -> None:
        (self.folder / f"{name}.reached").unlink()

    def processes(self) -> dict[int, str]:
        """Command lines of living processes that were started with these failpoints, or forked from such."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if os.fsencode(self.folder) in line and not is_dead(int(entry.name)):
                    found[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace")
        return found


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def memfds(pid: int | str = "[0-9]*", name: str = "") -> list[str]:
    """Names of the memfds that a process (or any other than this one) has open and that contain `name`."""
    found = []
    for entry in Path("/proc").glob(f"{pid}/fd/*"):
        if entry.parts[2] == str(os.getpid()):
            continue  # a mapping of Python's has a descriptor as long as there are views
        with contextlib.suppress(OSError):
            link = os.readlink(entry)
            if link.startswith("/memfd:preload:") and name in link:
                found.append(link.removeprefix("/memfd:preload:").removesuffix(" (deleted)"))
    return sorted(found)


def has_device_descriptors() -> bool:
    """Whether segments are an (emulated) device's, by descriptors."""
    return os.environ.get("FAKE_CUDA_ON", "host").startswith("cuda_vmm=")


def num_device_descriptors(pid: int) -> int:
    """Segments of emulated devices that a process has descriptors of."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            count += os.readlink(entry).startswith("/memfd:fakecuda:")
    return count


@dataclass
class Weights:
    """A raw checkpoint of a name that no other test has, so that its segments can be found in /proc."""

    path: Path
    content: dict[str, bytes]

    def is_in(self, attachment: Attachment) -> bool:
        return {name: bytes(view) for name, view in attachment.tensors.items()} == self.content


@dataclass
class Kept:
    """A daemon with failpoints, under a keeper with failpoints. `under` is the keeper, as a DaemonUnderTest, or the
    daemon itself if there is no keeper."""

    points: Points
    under: Any
    has_keeper: bool = True
    weights: list[Weights] = field(default_factory=list)

    @property
    def runtime_dir(self) -> str:
        return str(self.under.runtime_dir)

    @property
    def log(self) -> str:
        return str(self.under.log)

    def answers(self) -> Any:
        """What the daemon says of itself; None if there is none at this moment."""
        with contextlib.suppress(PreloadError), self.under.control() as control:
            return control.list()
        return None

    def pid(self) -> int:
        return int(self.points.wait_for(self.answers, "the daemon to answer").pid)

    def kill(self) -> None:
        """The daemon, from outside; another may not serve yet when this returns."""
        pid = self.pid()
        os.kill(pid, signal.SIGKILL)
        self.points.wait_for(lambda: is_dead(pid), "the daemon to die")

    def serves_again(self, epoch: int) -> None:
        def now() -> bool:
            said = self.answers()
            return said is not None and said.epoch >= epoch

        self.points.wait_for(now, f"the daemon's life {epoch}")

    def attach(self, weights: Weights, by_id: str = "") -> Attachment:
        """Attaches as an engine does that starts while the daemon may be away. A wrong byte fails the test."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                name: Any = {"generation_id": by_id} if by_id else {"checkpoint": weights.path}
                found = attach(**name, recipe=RAW, runtime_dir=self.runtime_dir, tensors="buffers")
                break
            except DaemonUnreachableError:
                assert time.monotonic() < end_s, self.log
                time.sleep(0.02)
        assert weights.is_in(found)
        return found

    def states(self) -> dict[str, str]:
        """Of all generations, by the names of their checkpoints; failed ones too."""
        said = self.points.wait_for(self.answers, "the daemon to answer")
        prefix = "GENERATION_STATE_"
        return {
            "+".join(Path(path).name for path in g.checkpoint_paths): pb.GenerationState.Name(g.state)[len(prefix) :]
            for g in said.generations
        }

    def settled(self, num_leases: int) -> None:
        """Waits until books and descriptors agree: no load, no reservation, no other lease, no lost segment."""
        self.points.until(lambda: self._unsettled(num_leases))

    def _unsettled(self, num_leases: int) -> str:
        said = self.answers()
        if said is None:
            return "the daemon does not answer"
        device = next(device for device in said.devices if device.name == tested_device())
        live = [g for g in said.generations if g.state in (pb.GENERATION_STATE_READY, pb.GENERATION_STATE_RETIRING)]
        leases = [lease for g in said.generations for lease in g.leases]
        loading = [g for g in said.generations if g.state == pb.GENERATION_STATE_LOADING]
        if loading or device.reserved_bytes or device.resident_bytes != sum(g.resident_bytes for g in live):
            return f"the books do not balance: {said}"
        if len(leases) != num_leases or any(lease.unclaimed for lease in leases):
            return f"{num_leases} leases are expected: {leases}"
        return self._lost_descriptors(said.pid, live, device.holder_pid)

    def _lost_descriptors(self, daemon: int, live: list[Any], holder: int) -> str:
        """Daemon and keeper hold the catalog, and of each generation the manifest and the segments: nothing else. A
        holder, if there is one, has the segments instead."""
        wanted = []
        if tested_device() == "host":
            wanted += [f"{i}:{Path(g.checkpoint_paths[0]).name}" for g in live for i in range(g.num_segments)]
        if self.has_keeper:
            wanted += ["catalog", *["manifest"] * len(live)]
        num_segments = sum(g.num_segments for g in live)
        if holder and num_device_descriptors(holder) != num_segments:
            return f"the holder has {num_device_descriptors(holder)} segments, not {num_segments}"
        num_on_device = num_segments if has_device_descriptors() else 0
        for who, pid in (("daemon", daemon), ("keeper", self.under.pid)):
            if memfds(pid) != sorted(wanted):
                return f"the {who} has {memfds(pid)}, and {sorted(wanted)} is wanted"
            if num_device_descriptors(pid) != num_on_device:
                return f"the {who} has {num_device_descriptors(pid)} segments of the device, not {num_on_device}"
        return ""

    def end(self) -> None:
        """Stops everything, and fails if anything is left."""
        assert self.under.stop() == 0, self.log
        self.points.until(lambda: f"left over: {left}" if (left := self.points.processes()) else "")
        for weights in self.weights:
            assert not memfds(name=f":{weights.path.name}")

    def clean_up(self) -> None:
        """After a failed test."""
        for pid in self.points.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def points(tmp_path: Path, wait_for: Callable[..., Any]) -> Points:
    folder = tmp_path / "failpoints"
    folder.mkdir()
    return Points(folder, wait_for)


@pytest.fixture
def make_weights(tmp_path: Path, write_safetensors: Callable[..., Path]) -> Callable[[str], Weights]:
    """Raw checkpoints of random content."""

    def make(name: str) -> Weights:
        content = {"a": os.urandom(64 * 16 * 4), "b": os.urandom(20), "c": os.urandom(24)}
        unique = f"{name}-{os.getpid()}-{os.urandom(4).hex()}.safetensors"
        shapes: dict[str, tuple[str, list[int]]] = {"a": ("F32", [64, 16]), "b": ("BF16", [10]), "c": ("I64", [3])}
        path = write_safetensors(tmp_path / unique, {key: (*shapes[key], content[key]) for key in content})
        return Weights(path, content)

    return make


@pytest.fixture(scope="module")
def unkept(tmp_path_factory: pytest.TempPathFactory, make_shared_daemon: Callable[..., Any], wait_for: Any) -> Kept:
    """A daemon that the tests of a module share and do no harm: only what speaks to it has failpoints."""
    points = Points(tmp_path_factory.mktemp("failpoints"), wait_for)
    loader = points.command("loader", "-m", "preload.engine.loading.loader")
    daemon = [sys.executable, str(FAKES / "run_daemon.py"), json.dumps({"loader_command": loader})]
    return Kept(points, make_shared_daemon(command=daemon), has_keeper=False)


@pytest.fixture
def kept(points: Points, make_daemon: Callable[..., Any]) -> Iterator[Kept]:
    """A keeper and its daemon. Leases of holders that do not come back end after two seconds."""
    made = Kept(points, make_daemon("--reclaim-timeout-s", "2", command=keeper_command(points)))
    try:
        yield made
    finally:
        made.clean_up()


@pytest.fixture(scope="module")
def make_kept(make_shared_daemon: Callable[..., Any], wait_for: Callable[..., Any]) -> Callable[[Path], Kept]:
    """The same for all tests of a module; runtime folder and failpoints lie in the folder that is named."""

    def make(folder: Path) -> Kept:
        (folder / "failpoints").mkdir()
        points = Points(folder / "failpoints", wait_for)
        runtime_dir = points.folder / "run"
        options = ("--reclaim-timeout-s", "2")
        return Kept(points, make_shared_daemon(*options, command=keeper_command(points), runtime_dir=runtime_dir))

    return make


def keeper_command(points: Points) -> list[str]:
    loader = points.command("loader", "-m", "preload.engine.loading.loader")
    daemon = points.command("daemon", str(FAKES / "run_daemon.py"), json.dumps({"loader_command": loader}))
    return points.command("keeper", str(FAKES / "run_keeper.py"), json.dumps(daemon))


__all__ = ["Kept", "Points", "Weights", "is_dead", "kept", "make_kept", "make_weights", "memfds", "points", "unkept"]
