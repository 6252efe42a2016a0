"""Real processes to measure: a private daemon, and a server over it. Each is gone when its `with` block ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from preload.engine.client import Control
from preload.engine.errors import DaemonUnreachableError

T = TypeVar("T")

START_DEADLINE_S = 120.0
_POLL_S = 0.002


class BenchError(Exception):
    """Raised when something that is measured did not work; the message says what and shows its log."""


def tell(text: str) -> None:
    """How far a measurement is, on stderr: stdout has the result only."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def clean_up_when_terminated() -> None:
    """From now on SIGTERM and SIGHUP end this process through its `with` blocks, as SIGINT does: no process and no
    file of a measurement stays behind. Call it from the main thread."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)


def _end(number: int, frame: object) -> NoReturn:
    for again in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(again, signal.SIG_IGN)  # once is enough, and must not disturb the cleaning up
    raise SystemExit(128 + number)


def preload_command(*words: str) -> list[str]:
    """The command line of `preload`, run by this interpreter."""
    return [sys.executable, "-P", "-m", "preload.cli.main", *words]


def wait_until(condition: Callable[[], T | None], what: str, deadline_s: float = START_DEADLINE_S) -> T:
    """The first value of `condition` that is not None or False. Raises BenchError at the deadline."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        value = condition()
        if value:
            return value
        time.sleep(_POLL_S)
    raise BenchError(f"waited {deadline_s:.0f} s in vain for {what}")


class Child:
    """One `preload` process with its log in a file, which holds nothing of an earlier one."""

    def __init__(self, log: Path, *words: str) -> None:
        self.log = log
        self.started_ns = time.monotonic_ns()
        with log.open("wb") as out:
            self.process = subprocess.Popen(preload_command(*words), stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self.process.pid

    def require_alive(self) -> None:
        if self.process.poll() is not None:
            raise BenchError(f"process ended with {self.process.returncode}:\n{self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not obeyed in time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class PrivateDaemon:
    """A daemon in a folder of its own, removed with it."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def __enter__(self) -> PrivateDaemon:
        self._folder = tempfile.TemporaryDirectory(prefix="preload-")
        self.folder = Path(self._folder.name)
        self.runtime_dir = str(self.folder / "run")
        os.mkdir(self.runtime_dir, 0o700)
        options = ("--runtime-dir", self.runtime_dir, "--http-port", "0", *self._words)
        self._child = Child(self.folder / "daemon.log", "daemon", *options)
        try:
            wait_until(self._answers, "the daemon to answer")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _answers(self) -> bool:
        self._child.require_alive()
        try:
            with self.control() as control:
                control.list()
        except DaemonUnreachableError:
            return False
        return True

    def __exit__(self, *exc_info: object) -> None:
        self._child.stop()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._child.pid

    def control(self) -> Control:
        return Control(self.runtime_dir)


class Server:
    """`preload serve` on a port the kernel chose."""

    def __init__(self, daemon: PrivateDaemon, checkpoint: str, *words: str) -> None:
        self._daemon = daemon
        self._words = (checkpoint, "--runtime-dir", daemon.runtime_dir, "--port", "0", *words)

    def __enter__(self) -> Server:
        self.child = Child(self._daemon.folder / "serve.log", "serve", *self._words)
        try:
            self.port = wait_until(self._find_port, "the server to listen")
            wait_until(self._is_ready, "the server to be ready")
        except BaseException:
            self.child.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.child.stop()

    def _find_port(self) -> int:
        self.child.require_alive()
        for line in self.child.log.read_text().splitlines():
            if line.startswith("serving ") and " on http://" in line:
                return int(line.rsplit(":", 1)[1])
        return 0

    def _is_ready(self) -> bool:
        self.child.require_alive()
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON body of a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_DEADLINE_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def stream_chat(self, content: str, max_tokens: int) -> Iterator[str]:
        """Pieces of a greedy answer's text as they arrive. Raises BenchError on anything but an answer."""
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_DEADLINE_S)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise BenchError(f"status {response.status}: {response.read().decode(errors='replace')}")
            for raw in response:
                line = raw.decode().strip()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise BenchError(f"the stream ended with {event['error']}")
                for choice in event["choices"]:
                    if choice["delta"].get("content"):
                        yield choice["delta"]["content"]
        finally:
            connection.close()

    def cores(self) -> list[dict[str, Any]]:
        """Every core life so far, oldest first, with its phases as {"name", "start_ns", "s"}."""
        lives: list[dict[str, Any]] = self.get("/debug/cores")[1]["cores"]
        for life in lives:
            life["phases"] = [
                {"name": p["name"], "start_ns": p["start_ns"], "s": (p["end_ns"] - p["start_ns"]) / 1e9}
                for p in life["phases"]
            ]
        return lives

    def core_pid(self) -> int:
        """The core that serves now."""
        serving = [life for life in self.cores() if life["died_at_ns"] is None and life["ready_at_ns"]]
        if not serving:
            raise BenchError("no core serves")
        return int(serving[-1]["pid"])
