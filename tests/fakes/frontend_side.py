"""Fixtures for the frontend: the real one, over real sockets, with a fake core process behind it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

FAKES = Path(__file__).parent


@dataclass
class FrontendUnderTest:
    """A frontend process. `config` are fields of FrontendConfig, `behaviour` is the fake core's."""

    folder: Path
    checkpoint: str
    wait_for: Callable[..., Any]
    behaviour: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def runtime_dir(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self, wait_ready: bool = True) -> FrontendUnderTest:
        config = {
            "checkpoint": self.checkpoint,
            "port": 0,
            "runtime_dir": str(self.runtime_dir),
            "served_model_name": "demo",
            **self.config,
        }
        command = [sys.executable, FAKES / "run_frontend.py", json.dumps(config), json.dumps(self.behaviour)]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.port = int(self.wait_for(self._announced_port, "the frontend to listen"))
        if wait_ready:
            self.wait_for(lambda: self.get("/ready").status_code == 200, "the frontend to be ready")
        return self

    def _announced_port(self) -> str | None:
        assert self.process is not None
        assert self.process.poll() is None, f"the frontend ended: {self.log}"
        found = re.search(r"^serving .* on http://127\.0\.0\.1:(\d+)$", self.log, re.MULTILINE)
        return found and found[1]

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **options)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", json=body)

    def metric(self, name: str) -> float:
        """The value of one line of /metrics; 0 if it is not there."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def cores(self) -> list[dict[str, Any]]:
        lives: list[dict[str, Any]] = self.get("/debug/cores").json()["cores"]
        return lives

    def kill_core(self) -> int:
        pid = int(self.cores()[-1]["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@pytest.fixture(scope="session")
def prepare_frontend(
    tmp_path_factory: pytest.TempPathFactory, demo_model: Path, wait_for_session: Callable[..., Any]
) -> Callable[..., FrontendUnderTest]:
    """Makes a frontend that is not started yet."""

    def prepare(behaviour: dict[str, Any] | None = None, **config: Any) -> FrontendUnderTest:
        folder = tmp_path_factory.mktemp("frontend")
        return FrontendUnderTest(folder, str(demo_model), wait_for_session, behaviour or {}, config)

    return prepare


@pytest.fixture(scope="session")
def wait_for_session() -> Callable[..., Any]:
    """`wait_for` for fixtures that outlive a test."""

    def wait(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
        end_s = time.monotonic() + deadline_s
        while time.monotonic() < end_s:
            value = condition()
            if value:
                return value
            time.sleep(0.01)
        return pytest.fail(f"waited {deadline_s:.0f} s in vain: {what}")

    return wait


@pytest.fixture
def start_frontend(
    prepare_frontend: Callable[..., FrontendUnderTest],
) -> Iterator[Callable[..., FrontendUnderTest]]:
    """Starts frontends of a test's own; all are gone when it ends."""
    started: list[FrontendUnderTest] = []

    def start(behaviour: dict[str, Any] | None = None, wait_ready: bool = True, **config: Any) -> FrontendUnderTest:
        started.append(prepare_frontend(behaviour, **config))
        return started[-1].start(wait_ready)

    yield start
    for frontend in started:
        frontend.stop()


@pytest.fixture(scope="session")
def frontend(prepare_frontend: Callable[..., FrontendUnderTest]) -> Iterator[FrontendUnderTest]:
    """One frontend for all tests that do it no harm."""
    shared = prepare_frontend().start()
    yield shared
    shared.stop()
