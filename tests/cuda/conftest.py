"""Fixtures of the tests on emulated GPUs: a machine with two of them, and daemons, holders and loaders on it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
MIB = 1 << 20


def _load(path: Path) -> Any:
    """A module of the tests, which are no package, by its path."""
    spec = importlib.util.spec_from_file_location(f"for_cuda_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


machines = _load(TESTS / "fakes" / "cuda_machine.py")
_contract = _load(TESTS / "contract" / "conftest.py")
hold = _contract.hold
gate = _contract.gate
start_load = _contract.start_load
stub_of = _contract.stub_of


def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_LIBRARY_PATH", "FAKE_CUDA_STATE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two GPUs of 128 MiB that every process started by the tests of a module finds. They share it: each leaves it
    without faults and without memory in use that was not before."""
    made = machines.Machine(tmp_path_factory.mktemp("cuda"), [machines.Gpu(128 * MIB), machines.Gpu(128 * MIB)])
    with pytest.MonkeyPatch.context() as patch:
        _without_gpus(patch)
        for name, value in made.env.items():
            patch.setenv(name, value)
        yield made


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest, wait_for: Callable[..., Any]) -> Iterator[None]:
    """After each test: no fault any more, the shared daemon empty, and all memory back, as the driver counts it. It
    comes first, so that holders and other daemons have ended by then."""
    shared = [request.getfixturevalue(name) for name in ("machine", "daemon") if name in request.fixturenames]
    yield
    if not shared or not hasattr(shared[0], "heal"):
        return
    machine, *daemons = shared
    machine.heal()
    for daemon in daemons:
        _forget_everything(daemon)
    wait_for(lambda: machine.used_bytes(0) + machine.used_bytes(1) == 0, "the devices' memory to be back")


def _forget_everything(daemon: Any) -> None:
    from preload.engine.client.control import make_selector

    with daemon.control() as control:
        for generation in control.list().generations:
            control.evict(make_selector(generation_id=f"@{generation.serial}"))


@pytest.fixture(scope="module")
def device(machine: Any) -> str:
    return str(machine.device(0))


@pytest.fixture(scope="module", params=["cuda_vmm", "cuda_ipc"])
def backend(request: pytest.FixtureRequest) -> str:
    """How the daemons of a test share device memory."""
    return str(request.param)


@pytest.fixture(scope="module")
def daemon(machine: Any, backend: str, make_shared_daemon: Callable[..., Any]) -> Any:
    """A daemon on the machine, for all tests of a module."""
    return make_shared_daemon("--drain-timeout-s", "0.2", "--device-limit", "100%", "--device-memory", backend)


@pytest.fixture
def owner_pid(backend: str, device: str) -> Callable[[Any], int]:
    """The process that holds a daemon's device memory: itself, or its holder."""

    def find(daemon: Any) -> int:
        with daemon.control() as control:
            listed = control.list()
        holders = {found.name: found.holder_pid for found in listed.devices}
        return holders[device] if backend == "cuda_ipc" else listed.pid

    return find


@pytest.fixture
def load_module() -> Callable[[str], Any]:
    """A module of the tests by its path below them."""
    return lambda path: _load(TESTS / path)


@pytest.fixture
def load_on() -> Callable[..., Any]:
    """Loads a raw checkpoint on a device and returns its generation."""

    def load(daemon: Any, path: Path | str, device: str, model: str = "raw", **recipe: Any) -> Any:
        from preload.engine.recipe import Recipe

        with daemon.control() as control:
            *_, last = control.load(path, Recipe(model=model, **recipe), device=device, timeout_s=60)
        return last.loaded

    return load


@pytest.fixture
def cli() -> Callable[..., Any]:
    """Runs `preload` with these words; the finished process."""

    def run(*words: str, env: dict[str, str] | None = None) -> Any:
        command = [sys.executable, "-P", "-m", "preload.cli.main", *words]
        return subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def attacher() -> Iterator[Callable[..., Any]]:
    """Processes that attach as often as they are asked: see tests/fakes/cuda_attacher.py."""
    started: list[Any] = []

    def start(daemon: Any, **options: Any) -> Callable[[str], Any]:
        text = json.dumps({"runtime_dir": str(daemon.runtime_dir), **options}, default=str)
        command = [sys.executable, str(TESTS / "fakes" / "cuda_attacher.py"), text]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)

        def ask(word: str) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, f"the attacher ended with {process.wait()}"
            return json.loads(line)

        return ask

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
