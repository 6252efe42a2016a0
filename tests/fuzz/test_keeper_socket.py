"""The keeper's notify socket under attack by a process of the same user that is not its daemon."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from preload.engine.client import attach
from preload.engine.errors import DaemonUnreachableError
from preload.engine.recipe import Recipe


def test_the_notify_socket(
    make_daemon: Callable[..., Any],
    raw_checkpoint: Path,
    attack: Any,
    fuzzing: Any,
    wait_for: Callable[..., Any],
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-P", "-m", "preload.cli.main", "keeper"]
    kept = make_daemon("--stop-timeout-s", "20", "--", "--http-port", "0", command=command)
    loaded = kept.load(raw_checkpoint, model="raw")
    path = str(kept.runtime_dir / "notify.sock")

    def next_daemon(pid: int) -> bool:
        try:
            with kept.control() as control:
                return bool(control.list().pid != pid)
        except DaemonUnreachableError:
            return False

    def good() -> None:
        """The daemon is killed; the next one serves the same weights, and what strangers stored is nowhere."""
        with kept.control() as control:
            pid = control.list().pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: next_daemon(pid), "the next daemon")
        with attach(
            raw_checkpoint, recipe=Recipe(model="raw"), runtime_dir=str(kept.runtime_dir), tensors="buffers"
        ) as attachment:
            assert attachment.generation_id == loaded.id
            assert len(attachment.tensors["a"]) == 4096
        assert "nothing describes is dropped" not in kept.log

    class Door:
        def __init__(self) -> None:
            self.moves = [self.message]

        def message(self, rng: random.Random) -> None:
            words = (
                "FDSTORE=1",
                "FDSTOREREMOVE=1",
                "FDNAME=catalog",
                "FDNAME=x",
                "READY=1",
                "WATCHDOG=1",
                "STOPPING=1",
            )
            lines = "\n".join(rng.choice(words) for _ in range(rng.randrange(6))).encode()
            data = fuzzing.mutate(rng, lines) if rng.random() < 0.5 else fuzzing.junk(rng, 6000)
            fds = [0] * rng.choice((0, 1, 1, 16, 17, 250))
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(5.0)
                sock.connect(path)
                socket.send_fds(sock, [data], fds)

        def close(self) -> None:
            pass

    attack("notify.sock", kept.process, lambda: kept.log, good, Door())
