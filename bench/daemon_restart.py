"""What the death of the daemon costs: SIGKILL to the next attach, of weights whose checkpoint is gone from the disk.

Without a runtime folder, under a keeper of its own, with a copy of the checkpoint that is removed once it is
resident. With one, whatever supervises the daemon of that folder is measured, systemd for one, on the weights that
are resident there. Meanwhile an engine that attached before goes on reading; its longest pause is reported.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from preload.engine.client import Attachment, Control, attach
from preload.engine.errors import PreloadError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

from .processes import BenchError, Child, tell, wait_until
from .statistics import machine

_POLL_S = 0.002
_DEADLINE_S = 30.0
_SETTLE_S = 5.5
"""Between two kills: a keeper takes a daemon that dies within 5 s for one that fails, and waits before the next."""


def run(checkpoint: str, count: int = 20, runtime_dir: str = "") -> dict[str, Any]:
    """`daemon_restart`: p50 and every figure in s; `longest_pause_s` of the reader over all kills."""
    if runtime_dir:
        return _measure(runtime_dir, count, "the given daemon's")
    with _kept_daemon(checkpoint) as folder:
        return _measure(folder, count, "a keeper of its own")


@contextmanager
def _kept_daemon(checkpoint: str) -> Iterator[str]:
    """The runtime folder of a daemon under a keeper, which holds the checkpoint when the file is gone."""
    with tempfile.TemporaryDirectory(prefix="preload-") as folder:
        runtime_dir = Path(folder, "run")
        runtime_dir.mkdir(0o700)
        words = ("keeper", "--runtime-dir", str(runtime_dir), "--", "--http-port", "0")
        keeper = Child(Path(folder, "keeper.log"), *words)
        try:
            wait_until(lambda: _pid(str(runtime_dir)), "the daemon to answer")
            copy = shutil.copy(checkpoint, folder)
            with Control(str(runtime_dir)) as control:
                for _ in control.load(copy, Recipe()):
                    pass
            os.unlink(copy)
            yield str(runtime_dir)
        finally:
            keeper.stop()


def _measure(runtime_dir: str, count: int, supervisor: str) -> dict[str, Any]:
    generation_id = _resident(runtime_dir)
    with attach(generation_id=generation_id, runtime_dir=runtime_dir, tensors="buffers") as attachment:
        reader = _Reader(attachment)
        seconds = []
        for number in range(count):
            tell(f"SIGKILL of the daemon, {number + 1} of {count}")
            seconds.append(_kill(runtime_dir, generation_id))
            time.sleep(_SETTLE_S)
        longest_pause_s = reader.stop()
    return {
        "machine": machine(),
        "supervisor": supervisor,
        "daemon_restart": {"p50_s": round(statistics.median(seconds), 4), "all_s": [round(s, 4) for s in seconds]},
        "longest_pause_s": round(longest_pause_s, 4),
    }


def _resident(runtime_dir: str) -> str:
    with Control(runtime_dir) as control:
        ready = [g.id for g in control.list().generations if g.state == pb.GENERATION_STATE_READY]
    if not ready:
        raise BenchError(f"the daemon of {runtime_dir} holds no weights; load some first")
    return ready[0]


def _pid(runtime_dir: str) -> int:
    try:
        with Control(runtime_dir) as control:
            return int(control.list().pid)
    except PreloadError:
        return 0


def _kill(runtime_dir: str, generation_id: str) -> float:
    """Seconds from SIGKILL to every tensor bound again, by a new engine."""
    victim = _pid(runtime_dir)
    start_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while time.monotonic() - start_s < _DEADLINE_S:
        try:
            attach(generation_id=generation_id, runtime_dir=runtime_dir, tensors="buffers").close()
        except PreloadError:
            time.sleep(_POLL_S)
            continue
        if (pid := _pid(runtime_dir)) != victim:
            return time.monotonic() - start_s
        raise BenchError(f"daemon {pid} outlived its SIGKILL")
    raise BenchError(f"no attach within {_DEADLINE_S:.0f} s of the daemon's death")


class _Reader:
    """Reads one page of weights again and again in a thread; the longest time between two reads is its pause."""

    def __init__(self, attachment: Attachment) -> None:
        self._tensor = next(iter(attachment.tensors.values()))
        self._longest_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        last_s = time.monotonic()
        while not self._stopped.wait(_POLL_S):
            bytes(self._tensor[:4096])
            now_s = time.monotonic()
            self._longest_s = max(self._longest_s, now_s - last_s)
            last_s = now_s

    def stop(self) -> float:
        self._stopped.set()
        self._thread.join()
        return self._longest_s
