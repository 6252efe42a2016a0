"""Updates and takeovers with real weights in a real daemon: a tiny Llama of random weights, and its tokenizer."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from preload.engine.client.control import make_selector

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
NUM_STREAMS = 32
NUM_TOKENS = 12


def write_checkpoint(folder: Path, seed: int) -> Path:
    from preload.engine.models.configs import spec_from_config
    from preload.engine.models.llama_names import expected_tensors

    rng = np.random.default_rng(seed)
    expected = expected_tensors(spec_from_config(CONFIG, "config.json"))
    weights = {name: rng.normal(0, 0.3, t.shape).astype(np.float32) for name, t in expected.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    return write_checkpoint(tmp_path / "first", 1), write_checkpoint(tmp_path / "second", 2)


class Served:
    """`preload serve` of a tiny checkpoint."""

    def __init__(self, daemon: Any, log: Path, *words: str, folder: Path | None = None) -> None:
        self.daemon = daemon
        self.log = log
        command = [sys.executable, "-m", "preload.cli.main", "serve", *words, "--port", "0"]
        command += ["--runtime-dir", str(daemon.runtime_dir), "--num-threads", "1", "--max-num-seqs", "32"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=folder)
        self.url = ""

    def find_url(self) -> str:
        assert self.process.poll() is None, self.log.read_text()
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("serving ")]
        self.url = lines[0].rsplit(" ", 1)[1] if lines else ""
        return self.url

    def is_ready(self) -> bool:
        return httpx.get(f"{self.url}/ready", timeout=30).status_code == 200

    def cores(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/debug/cores", timeout=30).json()["cores"]
        return found

    def in_state(self, state: str) -> list[int]:
        return [core["pid"] for core in self.cores() if core["state"] == state]

    def has_advanced(self, beyond: int) -> bool:
        """Whether another core than `beyond` has given enough tokens to clear its requests of a death."""
        serving = [core for core in self.cores() if core["state"] == "serving" and core["pid"] != beyond]
        return bool(serving) and time.monotonic_ns() - (serving[0]["first_token_at_ns"] or math.inf) > 1e8

    def stream(
        self, prompt: str, max_tokens: int, at_token: Callable[[int], None] = lambda _: None, **body: Any
    ) -> str:
        """The text of a stream that must not fail in any way."""
        asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **body}
        pieces = []
        # httpx makes a TLS context for each of its clients, which 32 streams at a time feel.
        connection = http.client.HTTPConnection("127.0.0.1", int(self.url.rpartition(":")[2]), timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps({**asked, "stream": True}))
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    pieces.append(event["choices"][0]["text"])
                    at_token(len(pieces))
        return "".join(pieces)

    def rollout(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "preload.cli.main", "rollout", self.url, *words]
        command += ["--runtime-dir", str(self.daemon.runtime_dir), "--json"]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture
def serve(wait_for: Any, tmp_path: Path, demo_model: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(daemon: Any, *words: str, folder: Path | None = None) -> Served:
        words = (*words, "--tokenizer", str(demo_model))
        started.append(Served(daemon, tmp_path / "serve.log", *words, folder=folder))
        wait_for(started[-1].find_url, "the server to listen")
        wait_for(started[-1].is_ready, "the server to be ready", 120)
        return started[-1]

    yield start
    for served in started:
        served.process.terminate()
        assert served.process.wait(60) == 0


@contextmanager
def load(served: Served, allowed: Callable[[str], set[str]]) -> Iterator[list[int]]:
    """32 streams at a time; each text must be one that is `allowed` for its prompt. Gives a list of ended ones."""
    over = threading.Event()
    ended: list[int] = []

    def run(index: int) -> None:
        prompt = f"stream number {index}"
        texts = set()
        while not over.is_set():
            texts.add(served.stream(prompt, NUM_TOKENS))
            ended.append(index)
        assert texts <= allowed(prompt)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(run, index) for index in range(NUM_STREAMS)]
        try:
            yield ended
        finally:
            over.set()
        for future in running:
            future.result()


def texts_of(served: Served) -> dict[str, str]:
    return {
        f"stream number {index}": served.stream(f"stream number {index}", NUM_TOKENS) for index in range(NUM_STREAMS)
    }


def test_an_update_to_another_checkpoint_under_32_streams_mixes_and_loses_nothing(
    daemon: Any, checkpoints: tuple[Path, Path], serve: Callable[..., Served], wait_for: Any
) -> None:
    served = serve(daemon, str(checkpoints[0]))
    first_id = daemon.generations()[0].id
    first = texts_of(served)
    second: dict[str, str] = {}
    with load(served, lambda prompt: {first[prompt], second[prompt]}) as ended:
        wait_for(lambda: len(ended) >= NUM_STREAMS, "every stream to have run")
        finished = served.rollout("--to", str(checkpoints[1]))
        count = len(ended)
        wait_for(lambda: len(ended) >= count + NUM_STREAMS, "every stream to have run again")
        second.update(texts_of(served))
    assert finished.returncode == 0, finished.stderr
    assert all(first[prompt] != second[prompt] for prompt in first)
    steps = {step["step"]: step for step in json.loads(finished.stdout)["steps"]}
    assert list(steps) == ["load", "start", "canary", "memory", "switch", "drain", "retire", "done"]
    memory = steps["memory"]
    assert memory["weights_bytes"] == memory["new_weights_bytes"] > 0
    assert memory["peak_bytes"] > memory["kv_cache_bytes"] + memory["new_kv_cache_bytes"] > 0
    (generation,) = daemon.generations()
    assert generation.id == steps["done"]["generation"] != first_id
    assert [model["id"] for model in httpx.get(f"{served.url}/v1/models").json()["data"]] == ["first"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}])
def test_a_stream_survives_its_cores_although_the_checkpoint_is_gone(
    daemon: Any,
    checkpoints: tuple[Path, Path],
    serve: Callable[..., Served],
    wait_for: Any,
    tmp_path: Path,
    sampling: dict[str, Any],
) -> None:
    served = serve(daemon, str(checkpoints[0]), "--standby", "1")
    wait_for(lambda: served.in_state("standby"), "a warm standby")
    undisturbed = served.stream("Once upon a time", 1000, **sampling)
    checkpoints[0].rename(tmp_path / "gone")
    killed: list[int] = []

    def kill_twice(num_chunks: int) -> None:
        if num_chunks == 20 or (len(killed) == 1 and served.has_advanced(beyond=killed[0])):
            killed.append(served.in_state("serving")[0])
            os.kill(killed[-1], signal.SIGKILL)

    assert served.stream("Once upon a time", 1000, kill_twice, **sampling) == undisturbed
    assert len(set(killed)) == 2  # the standby took over, then most likely a core that had to be started


def test_a_checkpoint_that_does_not_fit_beside_is_refused_with_numbers_and_fits_instead(
    make_daemon: Callable[..., Any], checkpoints: tuple[Path, Path], serve: Callable[..., Served]
) -> None:
    size = (checkpoints[0] / "model.safetensors").stat().st_size
    daemon = make_daemon("--host-limit", str(int(size * 1.5)))
    served = serve(daemon, str(checkpoints[0]))
    before = served.stream("a b c", 10)
    (core,) = served.in_state("serving")
    refused = served.rollout("--to", str(checkpoints[1]))
    assert refused.returncode == 18
    assert any(character.isdigit() for character in refused.stderr)
    assert served.in_state("serving") == [core]
    assert served.stream("a b c", 10) == before
    finished = served.rollout("--to", str(checkpoints[1]), "--evict-first")
    assert finished.returncode == 0, finished.stderr
    assert served.stream("a b c", 10) != before
    assert len(daemon.generations()) == 1


def test_an_update_that_had_to_evict_and_fails_brings_the_old_weights_back(
    make_daemon: Callable[..., Any], checkpoints: tuple[Path, Path], serve: Callable[..., Served], wait_for: Any
) -> None:
    size = (checkpoints[0] / "model.safetensors").stat().st_size
    served = serve(make_daemon("--host-limit", str(int(size * 1.5))), str(checkpoints[0]))
    before = served.stream("a b c", 10)
    (checkpoints[1] / "config.json").write_text("{}")
    failed = served.rollout("--to", str(checkpoints[1]), "--evict-first")
    assert failed.returncode == 25
    assert "rolled back" in failed.stderr
    assert served.stream("a b c", 10) == before


def test_a_generation_is_served_without_its_checkpoint(
    daemon: Any, checkpoints: tuple[Path, Path], serve: Callable[..., Served], tmp_path: Path
) -> None:
    generation = daemon.load(checkpoints[0])
    checkpoints[0].rename(tmp_path / "gone")
    served = serve(daemon, "--generation", generation.id)
    assert served.stream("a b c", 10)
    assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"] == generation.id[:12]


def replace_core(served: Served, wait_for: Any) -> dict[str, Any]:
    """Kills the core; the next one, when it serves."""
    (victim,) = served.in_state("serving")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: served.in_state("serving") not in ([], [victim]), "the next core", 120)
    return next(core for core in served.cores() if core["state"] == "serving")


@pytest.mark.parametrize("cause", ["rolled back", "plain load", "eviction"])
def test_a_service_goes_on_although_the_generation_it_serves_retires(
    daemon: Any,
    checkpoints: tuple[Path, Path],
    serve: Callable[..., Served],
    wait_for: Any,
    tmp_path: Path,
    cause: str,
) -> None:
    current = tmp_path / "current"
    current.symlink_to(checkpoints[0])
    served = serve(daemon, str(current))
    before = served.stream("a b c", 10)
    (generation,) = daemon.generations()
    wait_for(lambda: len(daemon.generations()[0].leases) == 2, "the frontend to have a lease of its own")
    if cause != "eviction":
        current.unlink()
        current.symlink_to(checkpoints[1])
    if cause == "rolled back":
        failed = served.rollout("--to", str(current), "--set", "kv_cache_bytes=1000")
        assert "rolled back" in failed.stderr
    elif cause == "plain load":
        daemon.load(current)
    else:
        with daemon.control() as control:
            control.evict(make_selector(generation_id=generation.id))
    for _ in range(2):
        replace_core(served, wait_for)
        assert served.stream("a b c", 10) == before
    for words in (("--restart",), ("--restart", "--evict-first")):
        assert served.rollout(*words).returncode == 0
        assert served.stream("a b c", 10) == before
    finished = served.rollout("--to", str(checkpoints[1]))
    assert finished.returncode == 0, finished.stderr
    assert served.stream("a b c", 10) != before
    assert [g.id for g in daemon.generations()] == [json.loads(finished.stdout)["steps"][-1]["generation"]]


def test_a_rollback_that_finds_other_weights_at_the_old_path_says_so(
    make_daemon: Callable[..., Any], checkpoints: tuple[Path, Path], serve: Callable[..., Served], tmp_path: Path
) -> None:
    current = tmp_path / "current"
    current.symlink_to(checkpoints[0])
    daemon = make_daemon()
    served = serve(daemon, str(current))
    before = served.stream("a b c", 10)
    (old,) = daemon.generations()
    current.unlink()
    current.symlink_to(checkpoints[1])
    failed = served.rollout("--to", str(current), "--evict-first", "--set", "kv_cache_bytes=1000")
    assert failed.returncode == 25
    (new,) = daemon.generations()
    assert f"does not hold generation {old.id[:12]} any more" in failed.stderr
    assert f"generation {new.id[:12]}, which it holds now, serves instead" in failed.stderr
    assert served.stream("a b c", 10) != before


def test_a_core_is_replaced_although_the_folder_of_the_frontend_is_gone(
    daemon: Any, checkpoints: tuple[Path, Path], serve: Callable[..., Served], wait_for: Any, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    served = serve(daemon, str(checkpoints[0]), folder=tmp_path / "folder")
    before = served.stream("a b c", 10)
    (path,) = wait_for(lambda: list(daemon.runtime_dir.glob("template-*.log")), "a template to be started")
    wait_for(lambda: "forks cores at" in path.read_text(), "the template to serve", 120)
    (tmp_path / "folder").rmdir()
    assert replace_core(served, wait_for)["is_forked"] is True
    assert served.stream("a b c", 10) == before
    os.kill(int(path.with_suffix(".lock").read_text()), signal.SIGKILL)
    assert replace_core(served, wait_for)["is_forked"] is False
    assert served.stream("a b c", 10) == before
