"""What a restart costs: SIGKILL of the engine core to the next token of a new request, against a cold start from
disk, in one run.

Cold: a daemon that holds nothing, the checkpoint's pages dropped from the page cache, `preload load`, `preload
serve`, the first token. Warm: the core is killed, the frontend starts another, a new request gets its first token.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from .processes import PrivateDaemon, Server, preload_command, tell, wait_until
from .statistics import machine

PROMPT = "What is the capital of France?"


def run(checkpoint: str, num_restarts: int = 5, serve_words: tuple[str, ...] = ()) -> dict[str, Any]:
    """Seconds and phases of one cold start and of `num_restarts` warm restarts, and their ratio; and, over 20 starts
    each, what bench/forked_start.py and bench/takeover.py measure."""
    from .forked_start import run as measure_forks
    from .takeover import run as measure_takeovers

    with PrivateDaemon() as daemon:
        drop_page_cache(checkpoint)
        tell("a cold start from disk")
        start_s = time.monotonic()
        load_phases = load(daemon, checkpoint)
        with Server(daemon, checkpoint, "--no-template", *serve_words) as server:
            first_token(server)
            cold_s = time.monotonic() - start_s
            cold_core = wait_for_phases(server)
            restarts = []
            for number in range(num_restarts):
                tell(f"restart {number + 1} of {num_restarts}")
                restarts.append(restart(server))
    warm_s = [seconds for seconds, _ in restarts]
    median = sorted(restarts, key=lambda item: item[0])[len(restarts) // 2]
    return {
        "machine": machine(),
        "cold": {"s": round(cold_s, 4), "load_phases": load_phases, "core_phases": cold_core},
        "warm_restart": {
            "p50_s": round(statistics.median(warm_s), 4),
            "all_s": [round(s, 4) for s in warm_s],
            "core_phases": median[1],
        },
        "ratio": round(cold_s / statistics.median(warm_s), 2),
        **measure_forks(checkpoint),
        **measure_takeovers(checkpoint),
    }


def drop_page_cache(path: str) -> None:
    """Asks the kernel to forget the pages of a file, or of every file of a folder."""
    names = [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path]
    for name in names:
        if os.path.isfile(name):
            fd = os.open(name, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def load(daemon: PrivateDaemon, checkpoint: str) -> list[dict[str, Any]]:
    """Runs `preload load` with its progress on our stderr; returns the loader's phases."""
    subprocess.run(
        preload_command("load", checkpoint, "--runtime-dir", daemon.runtime_dir),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with daemon.control() as control:
        phases = control.list().generations[-1].load_phases
    return [{"name": p.name, "start_ns": p.start_ns, "s": (p.end_ns - p.start_ns) / 1e9} for p in phases]


def first_token(server: Server, on_text: Callable[[str], None] = lambda _: None, max_tokens: int = 1) -> float:
    """Seconds from sending a chat request to the first piece of its answer, which is then read to its end."""
    start_s = time.monotonic()
    first_s = 0.0
    for text in server.stream_chat(PROMPT, max_tokens):
        first_s = first_s or time.monotonic() - start_s
        on_text(text)
    return first_s


def restart(server: Server) -> tuple[float, list[dict[str, Any]]]:
    """Kills the core; returns the seconds to the first token of a new request, and the new core's phases."""
    victim = server.core_pid()
    start_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{victim}") or None, "the killed core to be gone")
    first_token(server)
    seconds = time.monotonic() - start_s
    return seconds, wait_for_phases(server)


def wait_for_phases(server: Server) -> list[dict[str, Any]]:
    """Phases of the newest core, once its first token is among them."""

    def phases() -> list[dict[str, Any]] | None:
        newest: list[dict[str, Any]] = server.cores()[-1]["phases"]
        return newest if any(phase["name"] == "first_token" for phase in newest) else None

    return wait_until(phases, "the core to report its first token")
