"""Takeovers of a running stream: SIGKILL of the core to the stream's next token, by a standby and by a fresh process.

A fresh process cannot be faster than its imports, so `import torch` is measured in the same run, by turns with it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from .forked_start import takeover
from .processes import PrivateDaemon, Server, tell, wait_until
from .restart import load, wait_for_phases


def run(checkpoint: str, *, num_standby: int = 20, num_fresh: int = 20) -> dict[str, Any]:
    """`takeover_standby`, `takeover_fresh` and `import_torch`: p50 and every figure in s."""
    with PrivateDaemon() as daemon:
        load(daemon, checkpoint)
        standby, phases = by_standby(daemon, checkpoint, num_standby)
        fresh, imports = by_fresh_process(daemon, checkpoint, num_fresh)
    return {
        "takeover_standby": {**_summary(standby), "core_phases": phases},
        "takeover_fresh": _summary(fresh),
        "import_torch": _summary(imports),
    }


def by_standby(daemon: PrivateDaemon, checkpoint: str, count: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Seconds of `count` takeovers, each with the next standby warm again; and phases of the last core."""
    seconds = []
    with Server(daemon, checkpoint, "--standby", "1", "--no-template") as server:
        for number in range(count):
            tell(f"takeover by a standby, {number + 1} of {count}")
            wait_until(lambda: any(life["state"] == "standby" for life in server.cores()) or None, "a warm standby")
            seconds.append(takeover(server))
        serving = next(life for life in server.cores() if life["state"] == "serving")
    return seconds, serving["phases"]


def by_fresh_process(daemon: PrivateDaemon, checkpoint: str, count: int) -> tuple[list[float], list[float]]:
    """Seconds of `count` takeovers by a process that is started then, and of as many imports of torch."""
    seconds, imports = [], []
    with Server(daemon, checkpoint, "--no-template") as server:
        for number in range(count):
            tell(f"takeover by a fresh process, {number + 1} of {count}")
            imports.append(import_torch())
            seconds.append(takeover(server))
            wait_for_phases(server)
    return seconds, imports


def import_torch() -> float:
    """Seconds from exec to the end of a process that imports torch."""
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - start_s


def _summary(seconds: list[float]) -> dict[str, Any]:
    return {"p50_s": round(statistics.median(seconds), 4), "all_s": [round(s, 4) for s in seconds]}
