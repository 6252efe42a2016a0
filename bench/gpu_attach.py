"""Weights in a GPU's memory: how long attaching takes, and whether they are the same after anybody's death.

"The same" is what the daemon's verification finds: every resident tensor is hashed again and held against the digest
that its loader wrote, before and after; beside that, a process that stays attached reads the memory all along.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from preload.engine.client import Control, attach
from preload.engine.client.control import make_selector
from preload.engine.cuda.context import DeviceContext
from preload.engine.errors import PreloadError
from preload.engine.recipe import Recipe

from .gpu_peers import Peer, said
from .processes import BenchError, Child, tell, wait_until
from .statistics import summary_ms
from .synthetic import write_synthetic

RAW = Recipe(model="raw")
_READ_BYTES = 1 << 20


class KeptDaemon:
    """A daemon under a keeper of its own, as on a host without systemd."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.runtime_dir = str(folder / "run")
        os.mkdir(self.runtime_dir, 0o700)
        options = ("--runtime-dir", self.runtime_dir, "--", "--http-port", "0", *words)
        self.keeper = Child(folder / "keeper.log", "keeper", *options)
        wait_until(self.pid, "the daemon to answer")

    def control(self) -> Control:
        return Control(self.runtime_dir)

    def pid(self) -> int:
        """0 while no daemon answers."""
        self.keeper.require_alive()
        try:
            with self.control() as control:
                return int(control.list().pid)
        except PreloadError:
            return 0

    def load(self, path: Path, device: str) -> Any:
        with self.control() as control:
            *_, last = control.load(str(path), RAW, device=device)
        return last.loaded

    def verify(self, generation_id: str) -> str:
        """What a verification finds, in a few words."""
        try:
            with self.control() as control:
                *_, last = control.verify(make_selector(generation_id=generation_id))
        except PreloadError as error:
            return error.message
        return f"{last.verified.num_tensors} tensors, {last.verified.num_bytes} bytes as their digests say"

    def evict(self, generation_id: str) -> None:
        with self.control() as control:
            control.evict(make_selector(generation_id=generation_id))


@contextmanager
def kept_daemon(*words: str) -> Iterator[tuple[KeptDaemon, Path]]:
    """The daemon, and a folder for what it is to load."""
    with tempfile.TemporaryDirectory(prefix="preload-") as name:
        daemon = KeptDaemon(Path(name), "--device-limit", "97%", *words)
        try:
            yield daemon, Path(name)
        finally:
            daemon.keeper.stop()
            for pid in _holders(daemon.runtime_dir):
                os.kill(pid, signal.SIGTERM)


def attach_times(device: str, sizes: list[int], tensor_counts: list[int], num_attaches: int) -> list[dict[str, Any]]:
    """One row for each size with the first number of tensors, and for the smallest size with every other number."""
    shapes = [(size, tensor_counts[0]) for size in sizes] + [(min(sizes), count) for count in tensor_counts[1:]]
    rows = []
    with kept_daemon() as (daemon, folder), DeviceContext(device) as context:

        def free_bytes() -> int:
            return int(context.driver.call("cuMemGetInfo")[0])

        for size, count in shapes:
            tell(f"{size >> 20} MiB in {count} tensors")
            path = write_synthetic(folder / "synthetic.safetensors", count, size // count)
            before = free_bytes()
            start_s = time.perf_counter()
            loaded = daemon.load(path, device)
            load_s = time.perf_counter() - start_s
            taken = before - free_bytes()
            seconds = _attach(daemon.runtime_dir, loaded.id, num_attaches)
            attached = before - free_bytes() - taken
            daemon.evict(loaded.id)
            wait_until(lambda before=before: free_bytes() >= before - (64 << 20), "the memory to be free again", 30)  # type: ignore[misc]
            rows.append(
                {
                    "bytes": size,
                    "num_tensors": count,
                    "load_s": round(load_s, 3),
                    "load_gb_per_s": round(size / load_s / 1e9, 3),
                    "resident_bytes": taken,
                    "bytes_by_attach": attached,
                    "free_before": before,
                    "free_after": free_bytes(),
                    **summary_ms(seconds),
                }
            )
    return rows


def _attach(runtime_dir: str, generation_id: str, count: int) -> list[float]:
    """Seconds from nothing to every tensor as an array of device memory."""
    seconds = []
    for number in range(count + 1):
        start_s = time.perf_counter()
        attachment = attach(generation_id=generation_id, runtime_dir=runtime_dir, tensors="device")
        if number:
            seconds.append(time.perf_counter() - start_s)
        attachment.close()
        del attachment
    return seconds


def deaths(device: str, size: int) -> list[dict[str, str]]:
    """One {"event", "found"} each: SIGKILL of daemon, loader and engine, and a store into the weights."""
    rows: list[dict[str, str]] = []
    with kept_daemon() as (daemon, folder), Peer(device) as engine:
        path = write_synthetic(folder / "kept.safetensors", 64, size // 64)
        loaded = daemon.load(path, device)
        where = {"runtime_dir": daemon.runtime_dir, "generation_id": loaded.id}
        engine.need("attach", **where)
        wanted = engine.need("read", bytes=_READ_BYTES)["digest"]
        rows.append(_row("before", daemon.verify(loaded.id)))

        tell("SIGKILL of the daemon")
        rows.append(_row("daemon killed", _kill_daemon(daemon, loaded.id)))
        found = engine.ask("read", bytes=_READ_BYTES)
        rows.append(_row("an engine attached before it", _same(found, wanted)))
        rows.append(_row("weights after it", daemon.verify(loaded.id)))

        tell("SIGKILL of a loader")
        rows.append(_row("loader killed", _kill_loader(daemon, folder, device, size)))
        rows.append(_row("weights after it", daemon.verify(loaded.id)))

        tell("SIGKILL of an engine, and a store into read-only memory")
        engine.kill()
        rows.append(_row("engine killed; weights after it", daemon.verify(loaded.id)))
        with Peer(device) as writer:
            writer.need("attach", **where)
            rows.append(_row("a store into the weights", said(writer.ask("write", byte=1))))
            rows.append(_row("the writer reads after it", said(writer.ask("read", bytes=_READ_BYTES))))
        rows.append(_row("weights after it", daemon.verify(loaded.id)))
    return rows


def holder_death(device: str, size: int) -> list[dict[str, str]]:
    """The same for memory that a holder process shares by IPC handles."""
    rows: list[dict[str, str]] = []
    with kept_daemon("--device-memory", "cuda_ipc") as (daemon, folder), Peer(device) as engine:
        path = write_synthetic(folder / "held.safetensors", 64, size // 64)
        loaded = daemon.load(path, device)
        engine.need("attach", runtime_dir=daemon.runtime_dir, generation_id=loaded.id)
        wanted = engine.need("read", bytes=_READ_BYTES)["digest"]
        rows.append(_row("before", daemon.verify(loaded.id)))
        rows.append(_row("daemon killed", _kill_daemon(daemon, loaded.id)))
        rows.append(_row("an engine attached before it", _same(engine.ask("read", bytes=_READ_BYTES), wanted)))
        rows.append(_row("weights after it", daemon.verify(loaded.id)))
        holders = _holders(daemon.runtime_dir)
        if not holders:
            raise BenchError("there is no holder process to kill")
        os.kill(holders[0], signal.SIGKILL)
        end_s = time.monotonic() + 2
        while time.monotonic() < end_s and "digest" in (found := engine.ask("read", bytes=_READ_BYTES)):
            pass
        rows.append(_row("holder killed; an engine attached before it", _same(found, wanted)))
        rows.append(_row("weights after it", daemon.verify(loaded.id)))
    return rows


def _kill_daemon(daemon: KeptDaemon, generation_id: str) -> str:
    """Kills it, and waits for a new engine that has attached again."""
    victim = daemon.pid()
    start_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)

    def attached() -> bool:
        try:
            attach(generation_id=generation_id, runtime_dir=daemon.runtime_dir, tensors="device").close()
        except PreloadError:
            return False
        return daemon.pid() != victim

    wait_until(attached, "an attach to the daemon's next life", 60)
    return f"attached again after {time.monotonic() - start_s:.3f} s"


def _kill_loader(daemon: KeptDaemon, folder: Path, device: str, size: int) -> str:
    """Kills the loader of another load as soon as it is there; what the daemon says then."""
    path = write_synthetic(folder / "other.safetensors", 32, size // 32)
    owner, is_over = daemon.pid(), threading.Event()
    others = set(_loaders(owner))  # one that has verified may not have ended yet

    def kill() -> None:
        while not is_over.is_set():
            for pid in set(_loaders(owner)) - others:  # of one that only hashed the files, too
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        daemon.load(path, device)
    except PreloadError as error:
        return error.message
    finally:
        is_over.set()
        killer.join()
    return "it had finished before it was killed"


def _loaders(daemon_pid: int) -> list[int]:
    """Of that daemon."""
    found = []
    for pid, words in _command_lines():
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == daemon_pid and "preload.engine.loading.loader" in words:
                found.append(pid)
    return found


def _holders(runtime_dir: str) -> list[int]:
    """Of that runtime folder; they outlive the daemon that started them."""
    return [pid for pid, words in _command_lines() if "preload.daemon.holder" in words and runtime_dir in words]


def _command_lines() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            yield int(entry.name), words


def _same(found: dict[str, Any], wanted: str) -> str:
    return "reads the same bytes" if found.get("digest") == wanted else said(found)


def _row(event: str, found: str) -> dict[str, str]:
    return {"event": event, "found": found}
