"""Who holds the weights: once in all, however many processes map them.

Two processes attach to one generation and read all of it. The proportional set sizes (Pss) of the segments' mappings,
summed over every process of the machine, must be the weights' bytes once; no page of them may be private; and the
processes' own memory must not depend on the size of the weights: 1 GiB against 8 GiB.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from typing import Any

from preload.engine.recipe import Recipe

from .processes import BenchError, PrivateDaemon, tell, wait_until
from .statistics import machine
from .synthetic import write_synthetic

GIB = 1 << 30
_NUM_TENSORS = 256
_MAPPING = "/memfd:preload:"


def run(checkpoint: str) -> dict[str, Any]:
    """Bytes by size of the generation, and the growth of private memory from 1 GiB to 8 GiB."""
    with PrivateDaemon("--host-limit", "95%") as daemon:
        result: dict[str, Any] = {"machine": machine(), "real_model": _measure(daemon, checkpoint, "auto")}
        for gib in (1, 8):
            path = daemon.folder / f"{gib}GiB.safetensors"
            write_synthetic(path, _NUM_TENSORS, gib * GIB // _NUM_TENSORS)
            result[f"synthetic_{gib}_gib"] = _measure(daemon, str(path), "raw")
    small, large = result["synthetic_1_gib"], result["synthetic_8_gib"]
    growth = max(large["process_private_bytes"]) - max(small["process_private_bytes"])
    result["private_growth_bytes"] = growth
    return result


def _measure(daemon: PrivateDaemon, checkpoint: str, model: str) -> dict[str, Any]:
    """Loads, attaches twice, reads the numbers, evicts."""
    tell(f"loading {os.path.basename(checkpoint)}, and attaching two processes")
    with daemon.control() as control:
        *_, last = control.load(checkpoint, Recipe(model=model))
        resident_bytes = last.loaded.resident_bytes
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(_holder(daemon, checkpoint, model)) for _ in range(2)]
        mappings = segment_mappings()
        private = [private_bytes(holder.pid) for holder in holders]
        daemon_bytes = resident_set_bytes(daemon.pid)
    with daemon.control() as control:
        from preload.engine.client.control import make_selector

        control.evict(make_selector(generation_id=last.loaded.id))
    return {
        "resident_bytes": resident_bytes,
        "pss_bytes": mappings["Pss"],
        "pss_ratio": round(mappings["Pss"] / resident_bytes, 5),
        "mapping_private_bytes": mappings["Private_Clean"] + mappings["Private_Dirty"],
        "process_private_bytes": private,
        "daemon_rss_bytes": daemon_bytes,
    }


@contextlib.contextmanager
def _holder(daemon: PrivateDaemon, checkpoint: str, model: str) -> Any:
    command = [sys.executable, "-P", "-m", "preload.bench.holder", daemon.runtime_dir, checkpoint, model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "attached\n":
            raise BenchError(f"a holder of {checkpoint} ended with {process.wait()}")
        yield process
        assert process.stdin is not None
        process.stdin.close()
        wait_until(lambda: process.poll() is not None or None, "a holder to end")


def segment_mappings() -> Counter[str]:
    """Fields of /proc/PID/smaps in bytes, summed over the mappings of segments in every process."""
    totals: Counter[str] = Counter()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps") as lines:
            is_segment = False
            for line in lines:
                key, _, rest = line.partition(":")
                if "-" in line.split(" ", 1)[0]:
                    is_segment = _MAPPING in line
                elif is_segment and rest.strip().endswith("kB"):
                    totals[key] += int(rest.split()[0]) * 1024
    return totals


def private_bytes(pid: int) -> int:
    """Anonymous memory of a process: what is its own and nobody else's."""
    return _status_bytes(pid, "RssAnon")


def resident_set_bytes(pid: int) -> int:
    return _status_bytes(pid, "VmRSS")


def _status_bytes(pid: int, field: str) -> int:
    with open(f"/proc/{pid}/status") as lines:
        for line in lines:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise BenchError(f"/proc/{pid}/status has no {field}")
