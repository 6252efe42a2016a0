"""A whole service for the failpoint tests: kept daemon, template, frontend with real cores of a tiny model, clients.

Every process has its failpoints. Two checkpoints lie on disk, whose answers differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import string
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import preload.engine
import preload.protos
from preload.cli.rollout import ask, services
from preload.engine.errors import PreloadError

FAKES = Path(__file__).parent
NUM_CLIENTS = 3
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
    "max_position_embeddings": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 94,
}  # fmt: skip


def write_model(folder: Path, seed: int) -> Path:
    """A random Llama with a byte-level tokenizer of the printable characters, one a token."""
    from safetensors.numpy import save_file

    from preload.engine.models.configs import spec_from_config
    from preload.engine.models.llama_names import expected_tensors

    folder.mkdir()
    rng = np.random.default_rng(seed)
    expected = expected_tensors(spec_from_config(_CONFIG, "config.json"))
    tensors = {name: rng.normal(0, 0.3, t.shape).astype(np.float32) for name, t in expected.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    characters = [c for c in string.printable if c.isprintable() and c != " "]
    vocabulary = {character: index for index, character in enumerate(characters)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": level, "decoder": level}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def copy_engine(site: Path) -> dict[str, str]:
    """An environment in which the engine is a copy that nobody edits: a template ends when its code is changed."""
    for module in (preload.engine, preload.protos):
        source = Path(module.__path__[0])
        shutil.copytree(source, site / "preload" / source.name)
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


class Clients:
    """Threads that stream completions without a pause, each its own. Any error, or any other text than an undisturbed
    one, is a failure."""

    def __init__(self, url: str, until: Callable[[Callable[[], str]], None]) -> None:
        self._url = url
        self._until = until
        self.allowed: list[set[str]] = [set() for _ in range(NUM_CLIENTS)]
        self.num_done = 0
        self.failures: list[str] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def learn(self) -> None:
        """Takes the answers of now as right ones."""
        for index in range(NUM_CLIENTS):
            self.allowed[index].add(self._complete(index))

    def start(self) -> None:
        self._stopping.clear()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"
        self._threads = []
        assert not self.failures, self.failures

    def go_on(self, num: int = 2 * NUM_CLIENTS) -> None:
        """Waits for so many more answers."""
        goal = self.num_done + num
        self._until(lambda: "" if self.num_done >= goal or self.failures else f"{self.num_done} of {goal} answers")
        assert not self.failures, self.failures

    def _run(self, index: int) -> None:
        while not self._stopping.is_set() and not self.failures:
            try:
                text = self._complete(index)
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"client {index}: {error!r}")
                return
            if text not in self.allowed[index]:
                self.failures.append(f"client {index}: wrong answer {text!r}")
            self.num_done += 1

    def _complete(self, index: int) -> str:
        """A greedy answer, or a seeded one."""
        sampling = {"temperature": 0} if index % 2 == 0 else {"temperature": 1, "seed": index}
        body = {"prompt": f"client{index}:", "max_tokens": 24, "stream": True, **sampling}
        pieces = []
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=90) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    pieces.append(event["choices"][0]["text"])
        return "".join(pieces)


@dataclass
class Service:
    """The processes beside the kept daemon. `checkpoint` is the one that is served, and `other` the other."""

    kept: Any
    folder: Path
    checkpoint: Path
    other: Path
    environment: dict[str, str]
    standby: int = 0
    answers: list[set[str]] = field(default_factory=list)
    template: subprocess.Popen[bytes] | None = None
    frontend: subprocess.Popen[bytes] | None = None
    url: str = ""

    @property
    def points(self) -> Any:
        return self.kept.points

    @property
    def log(self) -> str:
        return (self.folder / "serve.log").read_text()

    def start_template(self) -> None:
        words = ["-m", "preload.engine.template", "--runtime-dir", self.kept.runtime_dir]
        with (self.folder / "template.log").open("wb") as log:
            command = self.points.command("template,core", *words)
            self.template = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        text = self.folder / "template.log"
        self.points.until(lambda: "" if "forks cores at" in text.read_text() else text.read_text() or "no template")

    def replace_template(self) -> None:
        """Ours is dead, and the frontend has started one of its own, which has no failpoints."""
        assert self.template is not None
        self.template.wait(60)
        self.points.until(lambda: "" if self._detached() else "the frontend starts no template")
        for pid in self._detached():
            os.kill(pid, signal.SIGKILL)
        self.points.until(lambda: str(self._detached() or ""))
        self.start_template()

    def _detached(self) -> list[int]:
        """Templates of the frontend that have left their starter behind."""
        found = []
        for pid in self.points.processes():
            with contextlib.suppress(OSError):
                log = Path(os.readlink(f"/proc/{pid}/fd/2"))
                if log.match("template-*.log") and str(log.parent) == self.kept.runtime_dir:
                    found.append(pid)
        return found

    def swap(self) -> None:
        """The other checkpoint is served from now on."""
        self.checkpoint, self.other = self.other, self.checkpoint

    def start(self) -> None:
        """The frontend, and with it a core."""
        config = {
            "checkpoint": str(self.checkpoint), "generation": self.kept.under.load(self.checkpoint).id,
            "port": 0, "num_threads": 1, "runtime_dir": self.kept.runtime_dir, "served_model_name": "demo",
            "standby": self.standby, "max_num_seqs": 8, "kv_cache_bytes": 4 << 20, "drain_timeout_s": 5.0,
        }  # fmt: skip
        core = self.points.command("core", "-m", "preload.engine.core")
        command = self.points.command("frontend", str(FAKES / "run_serve.py"), json.dumps(config), json.dumps(core))
        with (self.folder / "serve.log").open("wb") as log:
            self.frontend = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment
            )
        self.points.until(self._not_listening)
        self.points.until(lambda: "" if httpx.get(f"{self.url}/ready").status_code == 200 else self.log)
        self.points.until(self._lacks_standbys)

    def _not_listening(self) -> str:
        assert self.frontend is not None
        assert self.frontend.poll() is None, self.log
        found = re.search(r"^serving .* on (http://\S+)$", self.log, re.MULTILINE)
        self.url = found[1] if found else ""
        return "" if found else self.log or "nothing is said"

    def _lacks_standbys(self) -> str:
        return "" if len(self.cores("standby")) == self.standby else str(self.cores())

    def stop(self) -> None:
        assert self.frontend is not None
        self.frontend.terminate()
        assert self.frontend.wait(60) == 0, self.log

    def cores(self, state: str = "") -> list[dict[str, Any]]:
        """Records of all cores, or of those in one state."""
        found = httpx.get(f"{self.url}/debug/cores", timeout=60).json()["cores"]
        return [core for core in found if state in ("", core["state"])]

    def kill_core(self) -> None:
        (core,) = self.cores("serving")
        os.kill(core["pid"], signal.SIGKILL)

    def core_pids(self) -> set[int]:
        """Cores, and forks that are to become cores."""
        found = set()
        template = self.template.pid if self.template is not None else 0
        for pid, line in self.points.processes().items():
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name == "preload-core" or " -m preload.engine.core " in line or parent == template:
                    found.add(pid)
        return found

    def _has_other_cores(self) -> str:
        """What is wrong, if not one core serves, or others than it and the standbys are there."""
        serving = self.cores("serving")
        wanted, found = {core["pid"] for core in (*serving, *self.cores("standby"))}, self.core_pids()
        if len(serving) != 1:  # or one that was killed has not been missed yet
            return str(self.cores())
        return "" if found == wanted else f"{found} instead of {wanted}"

    def settled(self) -> None:
        """One core serves, its standbys are warm, and there is no other; each has its lease, and nobody else any."""
        self.points.until(self._lacks_standbys)
        self.points.until(self._has_other_cores)
        self.kept.settled(num_leases=2 + self.standby)  # the frontend has one of its own
        folders = [path.name for path in Path(self.kept.runtime_dir).glob("frontend-*")]
        assert len(folders) == 1, folders

    def update(self, to: Path) -> Update:
        (found,) = services(self.kept.runtime_dir)
        return Update(found["socket"], str(to))

    def end(self) -> None:
        """Stops everything and fails if anything is left."""
        self.stop()
        assert self.template is not None
        self.template.terminate()
        self.template.wait(60)
        assert not list(Path(self.kept.runtime_dir).glob("frontend-*"))
        self.kept.settled(num_leases=0)
        self.kept.end()


class Update:
    """A rollout in a thread of its own. `steps` are what was reported; an "error" ends it, or "done"."""

    def __init__(self, socket_path: str, to: str) -> None:
        self.steps: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, args=(socket_path, to), daemon=True)
        self._thread.start()

    def _run(self, socket_path: str, to: str) -> None:
        # The frontend may be killed in the middle of it.
        with contextlib.suppress(OSError, PreloadError):
            for step in ask(socket_path, {"do": "update", "to": to}, None):
                self.steps.append(step)
                if "error" in step or step["step"] == "done":
                    return

    def end(self) -> str:
        """How it ended: "done", the error, or "" if the frontend died."""
        self._thread.join(120)
        assert not self._thread.is_alive(), self.steps
        last = self.steps[-1] if self.steps else {"step": ""}
        return str(last.get("error") or (last["step"] if last["step"] == "done" else ""))


@pytest.fixture(scope="module")
def service(
    make_kept: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Service]:
    """Everything but the frontend, which the module starts; the end of the module fails if anything is left."""
    folder = tmp_path_factory.mktemp("service")
    kept = make_kept(folder)
    models = [write_model(folder / "model-a", 0), write_model(folder / "model-b", 1)]
    made = Service(kept, folder, *models, environment=copy_engine(folder / "site"))
    try:
        made.start_template()
        yield made
        if request.session.testsfailed == 0:
            made.end()
    finally:
        kept.clean_up()


@pytest.fixture(scope="module")
def make_clients(service: Service) -> Callable[[], Clients]:
    """Of the frontend that there is now; idle, and without any answer that they would accept."""
    return lambda: Clients(service.url, service.points.until)


@pytest.fixture
def clients(make_clients: Callable[[], Clients]) -> Iterator[Clients]:
    """Clients that know the answers; idle until they are started."""
    made = make_clients()
    made.learn()
    yield made
    made.stop()


__all__ = ["Clients", "Service", "clients", "make_clients", "service"]
