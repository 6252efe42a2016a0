"""Serving from weights in device memory, over HTTP: the same text as from the host, also when cores are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

PROMPT = "The capital of France is"
NUM_TOKENS = 12
SMALL = ("--max-model-len", "256", "--max-num-seqs", "2", "--token-budget", "64")


@pytest.fixture
def serve(daemon: Any, tmp_path: Path, wait_for: Any) -> Iterator[Callable[..., str]]:
    """Starts `preload serve` with these words; its URL. What it logs is in tmp_path / "log"."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> str:
        log = tmp_path / "log"
        command = [sys.executable, "-P", "-m", "preload.cli.main", "serve", *words, "--port", "0", *SMALL]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--runtime-dir", str(daemon.runtime_dir)], stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        processes.append(process)

        def url() -> str:
            assert process.poll() is None, log.read_text()
            lines = [line for line in log.read_text().splitlines() if line.startswith("serving ")]
            return lines[0].rsplit(" ", 1)[1] if lines else ""

        found = str(wait_for(url, "the server to listen", 120))
        wait_for(lambda: httpx.get(f"{found}/ready").status_code == 200, "the server to be ready", 120)
        return found

    yield start
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def complete(url: str) -> str:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def pieces(url: str) -> Iterator[str]:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


@pytest.fixture(scope="module")
def host_text(daemon: Any, demo_model: Path) -> str:
    """What `preload generate` says from host memory."""
    words = ("generate", str(demo_model), PROMPT, "--max-tokens", str(NUM_TOKENS), "--json")
    command = [sys.executable, "-P", "-m", "preload.cli.main", *words, "--runtime-dir", str(daemon.runtime_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["text"])


def test_a_server_on_a_device_says_what_the_host_says_and_goes_on_when_its_core_is_killed(
    machine: Any,
    daemon: Any,
    device: str,
    demo_model: Path,
    serve: Any,
    host_text: str,
    tmp_path: Path,
    wait_for: Any,
) -> None:
    url = serve(str(demo_model), "--device", "cuda:0")
    assert [g.device for g in daemon.generations() if g.device != "host"] == [device]
    assert complete(url) == host_text
    victim = httpx.get(f"{url}/debug/cores").json()["cores"][-1]["pid"]
    live = machine.process(victim).live
    assert live["mappings"] + live["imports"] == live["allocations"] == 1, "weights mapped, keys and values allocated"
    said = []
    for piece in pieces(url):
        said.append(piece)
        if len(said) == 3:
            os.kill(victim, signal.SIGKILL)
    assert "".join(said) == host_text
    assert httpx.get(f"{url}/debug/cores").json()["cores"][-1]["pid"] != victim
    named = "kernels: torch, by the host over the memory of an emulated device"
    wait_for(lambda: (tmp_path / "log").read_text().count(named) >= 2, "both cores to have named their kernels")


def test_generate_answers_from_a_device_and_refuses_one_that_is_not_there(
    machine: Any, daemon: Any, cli: Any, demo_model: Path, host_text: str
) -> None:
    words = ("generate", str(demo_model), PROMPT, "--max-tokens", str(NUM_TOKENS), "--json")
    runtime = ("--runtime-dir", str(daemon.runtime_dir))
    refused = cli(*words, "--device", "cuda:7", *runtime)
    assert refused.returncode == 27
    assert "this process sees" in refused.stderr + refused.stdout
    done = cli(*words, "--device", "cuda:1", "--config-overrides", '{"max_position_embeddings": 256}', *runtime)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == host_text
    assert {g.device for g in daemon.generations()} >= {machine.device(1)}
