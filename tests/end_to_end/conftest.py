"""A daemon that holds the real model, and a real server over it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest


@dataclass
class Served:
    """`preload serve`, listening."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=240, max_retries=0)

    def cores(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = httpx.get(f"{self.url}/debug/cores", timeout=30).json()["cores"]
        return answer

    def core_pid(self) -> int:
        return int(self.cores()[-1]["pid"])


@pytest.fixture(scope="module")
def serve(
    shared_daemon: Any, wait_for: Any, tmp_path_factory: pytest.TempPathFactory, demo_model: Path
) -> Iterator[Callable[..., Any]]:
    """Starts a server of the demo model with options of its command line."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> Served:
        log = tmp_path_factory.mktemp("serve") / "log"
        command = [sys.executable, "-P", "-m", "preload.cli.main", "serve", str(demo_model), "--port", "0"]
        command += ["--runtime-dir", str(shared_daemon.runtime_dir), *options]
        with log.open("wb") as out:
            processes.append(subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL))

        def url() -> str:
            assert processes[-1].poll() is None, log.read_text()
            lines = [line for line in log.read_text().splitlines() if line.startswith("serving ")]
            return lines[0].rsplit(" ", 1)[1] if lines else ""

        served = Served(processes[-1], wait_for(url, "the server to listen"), log)
        wait_for(lambda: httpx.get(f"{served.url}/ready").status_code == 200, "the server to be ready", 120)
        return served

    yield start
    for process in processes:
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def shared_daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon()
