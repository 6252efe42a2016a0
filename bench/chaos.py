"""Streams under load while every process is killed at random: what clients see, and what is left behind.

The daemon (the keeper's child), the serving core, the standby, the template and a loader are killed with SIGKILL; the
frontend is restarted gracefully. Each stream's text must be the one it has undisturbed; a pause is the longest time a
client waited for its next piece, from the request on.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preload.engine.client import Control
from preload.engine.errors import PreloadError
from preload.engine.recipe import Recipe

from .chaos_service import ChaosService
from .processes import wait_until
from .statistics import machine, percentile
from .synthetic import write_synthetic

KINDS = ("daemon", "core", "standby", "template", "loader", "frontend")
_NUM_CLIENTS = 6
_MAX_TOKENS = 24
_INTERVAL_S = (3.0, 7.0)
_MIB = 1 << 20


@dataclass
class Tally:
    """What the clients saw. Guarded by `lock`."""

    sent: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    segments: dict[tuple[int, int], int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(checkpoint: str, minutes: float, seed: int | None = None) -> dict[str, Any]:
    """Runs for `minutes`; `seed` makes the order of kills repeatable."""
    seed = random.randrange(1 << 32) if seed is None else seed
    prompts = [f"Write a sentence about the number {number}." for number in range(_NUM_CLIENTS)]
    with tempfile.TemporaryDirectory(prefix="preload-chaos-") as name:
        folder = Path(name)
        with ChaosService(folder, checkpoint) as service:
            expected = {prompt: stream(service.port, prompt)[0] for prompt in prompts}
            before_bytes = service.daemon_bytes()
            tally, kills, bad_exits = _let_loose(service, expected, minutes * 60, random.Random(seed))
            wait_until(lambda: service.daemon_pid(), "the daemon to answer")
            wait_until(lambda: service.daemon_bytes() == before_bytes or None, "the books to balance")
            known = tally.segments | segments_of([service.daemon_pid() or 0])
            held_bytes = held(known)
        leaked_bytes = held(known)
    for line in (*tally.failed[:5], *tally.wrong[:5]):
        print(line, file=sys.stderr)
    return {
        "machine": machine(),
        "minutes": minutes,
        "seed": seed,
        "sent": tally.sent,
        "failed": len(tally.failed),
        "wrong": len(tally.wrong),
        "kills": dict(kills),
        "bad_frontend_exits": bad_exits,
        "worst_pause_s": round(max(tally.pauses_s), 3),
        "p99_pause_s": round(percentile(tally.pauses_s, 99), 3),
        "p50_pause_s": round(percentile(tally.pauses_s, 50), 3),
        "resident_bytes_before": before_bytes,
        "held_bytes_after": held_bytes,
        "leaked_bytes": leaked_bytes + (held_bytes - before_bytes),
    }


def _let_loose(
    service: ChaosService, expected: dict[str, str], seconds: float, dice: random.Random
) -> tuple[Tally, Counter[str], int]:
    tally, over = Tally(), threading.Event()
    clients = [
        threading.Thread(target=_ask_for_ever, args=(service.port, prompt, text, tally, over))
        for prompt, text in expected.items()
    ]
    for client in clients:
        client.start()
    kills: Counter[str] = Counter()
    bad_exits = 0
    end_s = time.monotonic() + seconds
    bag: list[str] = []
    while time.monotonic() < end_s:
        bag = bag or dice.sample(KINDS, len(KINDS))
        kind = bag.pop()
        if _strike(service, kind):
            kills[kind] += 1
            print(f"{kind}: {kills[kind]}", file=sys.stderr, flush=True)
        time.sleep(dice.uniform(*_INTERVAL_S))
        bad_exits += service.reap_frontends()
        tally.segments |= segments_of([service.daemon_pid() or 0])
    over.set()
    for client in clients:
        client.join()
    return tally, kills, bad_exits


def _strike(service: ChaosService, kind: str) -> bool:
    """False if there was nothing of that kind to kill just now."""
    if kind == "frontend":
        service.restart_frontend()
        return True
    if kind == "loader":
        return _kill_a_loader(service)
    if kind == "daemon":
        found = service.daemon_pid()
    elif kind == "template":
        found = service.template_pid()
    else:
        found = service.core_pid("serving" if kind == "core" else "standby")
    return found is not None and _kill(found)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _kill_a_loader(service: ChaosService) -> bool:
    """Loads something that nobody needs, kills its loader in the middle, and clears the failure away."""
    path = write_synthetic(service.folder / "unneeded.safetensors", 64, 4 * _MIB)
    killed = False
    # Its death, or the daemon's, is what we came for.
    with contextlib.suppress(PreloadError):
        with Control(service.runtime_dir) as control:
            for event in control.load(path, Recipe(model="raw"), timeout_s=60):
                if event.HasField("progress") and event.progress.done_bytes and not killed:
                    killed = any(_kill(pid) for pid in service.loader_pids())
            for generation in control.list().generations:
                if str(path) in generation.checkpoint_paths:
                    _evict(control, generation.id)
    return killed


def _evict(control: Control, generation_id: str) -> None:
    from preload.engine.client.control import make_selector

    control.evict(make_selector(generation_id=generation_id))


def _ask_for_ever(port: int, prompt: str, expected: str, tally: Tally, over: threading.Event) -> None:
    while not over.is_set():
        try:
            text, pause_s = stream(port, prompt)
        except (OSError, http.client.HTTPException, ValueError) as error:
            with tally.lock:
                tally.sent += 1
                tally.failed.append(f"failed: {error!r}")
            continue
        with tally.lock:
            tally.sent += 1
            tally.pauses_s.append(pause_s)
            if text != expected:
                tally.wrong.append(f"wrong: {text!r} instead of {expected!r}")


def stream(port: int, prompt: str) -> tuple[str, float]:
    """One greedy chat answer: its text, and the longest wait for a piece of it in seconds.

    Raises OSError, HTTPException, or ValueError on anything but a complete answer."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    last_s, worst_s, text, is_complete = time.monotonic(), 0.0, "", False
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read().decode(errors='replace')}")
        for raw in response:
            line = raw.decode().strip()
            if line == "data: [DONE]":
                is_complete = True
            elif line.startswith("data: "):
                now_s = time.monotonic()
                worst_s, last_s = max(worst_s, now_s - last_s), now_s
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(f"the stream ended with {event['error']}")
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    finally:
        connection.close()
    if not is_complete:
        raise ValueError(f"the stream broke off after {text!r}")
    return text, worst_s


def held(known: dict[tuple[int, int], int]) -> int:
    """Bytes of the known segments that any process of this machine still holds open or maps."""
    pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
    return sum(known[segment] for segment in segments_of(pids) if segment in known)


def segments_of(pids: Sequence[int]) -> dict[tuple[int, int], int]:
    """Weight segments that these processes hold open or map: (device, inode) → bytes."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        for place in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):
            with contextlib.suppress(OSError):
                for name in os.listdir(place):
                    _count(f"{place}/{name}", found)
    return found


def _count(path: str, found: dict[tuple[int, int], int]) -> None:
    with contextlib.suppress(OSError):
        target = os.readlink(path)
        if target.startswith("/memfd:preload:") and not target.startswith(_TABLES):
            seen = os.stat(path)
            found[seen.st_dev, seen.st_ino] = seen.st_size


_TABLES = ("/memfd:preload:catalog", "/memfd:preload:manifest", "/memfd:preload:receipts")
