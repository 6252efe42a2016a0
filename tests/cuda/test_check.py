"""`preload check` of weights on a GPU: what is missing is told apart, in words, by exit code and by cause."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
HAS_VMM, HAS_FD, IS_MIG, HAS_IPC = 1, 2, 4, 8
DRIVER = ("LD_LIBRARY_PATH", "FAKE_CUDA_STATE")


@pytest.fixture
def machine(tmp_path: Path, load_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a machine of the test's GPUs, which every process started from then on finds."""
    machines = load_module("fakes/cuda_machine.py")

    def make(*gpus: dict[str, Any]) -> Any:
        made = machines.Machine(tmp_path, [machines.Gpu(**{"total_bytes": 64 * MIB, **gpu}) for gpu in gpus])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        return made

    return make


@pytest.fixture
def checked(raw_checkpoint: Path) -> Callable[..., tuple[int, str, str]]:
    """(exit code, cause, message) of a check in another environment than the daemon's."""

    def check(daemon: Any, device: str, *before: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        words = ("check", str(raw_checkpoint), "--model", "raw", "--device", device, "--json")
        command = [*before, sys.executable, "-P", "-m", "preload.cli.main", *words]
        command += ["--runtime-dir", str(daemon.runtime_dir)]
        environment = {key: value for key, value in {**os.environ, **(env or {})}.items() if value}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        told = json.loads(done.stdout)
        assert done.returncode == told["exit_code"]
        return done.returncode, told.get("cause", ""), told.get("message", "")

    return check


def start(make_daemon: Any, load_on: Any, path: Path, device: str, backend: str = "cuda_vmm") -> Any:
    daemon = make_daemon("--device-memory", backend, "--device-limit", "100%")
    load_on(daemon, path, device)
    return daemon


@pytest.mark.parametrize("backend", ["cuda_vmm", "cuda_ipc"])
def test_what_an_engine_could_map_is_ready(
    machine: Any, make_daemon: Any, load_on: Any, raw_checkpoint: Path, checked: Any, backend: str
) -> None:
    gpus = machine({})
    daemon = start(make_daemon, load_on, raw_checkpoint, gpus.device(), backend)
    assert checked(daemon, gpus.device()) == (0, "", "")
    assert not [lease for generation in daemon.generations() for lease in generation.leases]


def test_a_missing_driver_is_told(
    machine: Any, make_daemon: Any, load_on: Any, raw_checkpoint: Path, checked: Any
) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("this machine has a driver")
    except OSError:
        pass
    gpus = machine({})
    daemon = start(make_daemon, load_on, raw_checkpoint, gpus.device())
    code, cause, message = checked(daemon, gpus.device(), env=dict.fromkeys(DRIVER, ""))
    assert (code, cause) == (27, "no_driver")
    assert "no NVIDIA driver (libcuda.so.1) is installed" in message


def test_a_device_that_this_process_does_not_see_is_told_from_one_without_the_weights(
    machine: Any, make_daemon: Any, load_on: Any, raw_checkpoint: Path, checked: Any
) -> None:
    gpus = machine({}, {})
    daemon = start(make_daemon, load_on, raw_checkpoint, gpus.device(0))
    code, cause, message = checked(daemon, gpus.device(0), env={"CUDA_VISIBLE_DEVICES": "1"})
    assert (code, cause) == (27, "no_device")
    assert f"this process does not see {gpus.device(0)}; it sees {gpus.device(1)}" in message
    code, _, message = checked(daemon, gpus.device(1))
    assert (code, f"not resident with quantization keep on {gpus.device(1)}, but on {gpus.device(0)}" in message) == (
        11,
        True,
    )
    code, cause, message = checked(daemon, gpus.device(0), env={"CUDA_VISIBLE_DEVICES": "-1"})
    assert (code, cause) == (27, "no_device")


def test_another_mig_instance_is_told(
    machine: Any, make_daemon: Any, load_on: Any, raw_checkpoint: Path, checked: Any
) -> None:
    flags = HAS_VMM | HAS_FD | HAS_IPC | IS_MIG
    instance = {"flags": flags, "name": "Preload emulated device MIG 1g.10gb"}
    gpus = machine(instance, instance)
    uuid = gpus.device(1).removeprefix("cuda:GPU-")
    daemon = start(make_daemon, load_on, raw_checkpoint, gpus.device(0))
    own = gpus.device(0).removeprefix("cuda:GPU-")
    assert checked(daemon, f"MIG-{own}", env={"CUDA_VISIBLE_DEVICES": f"MIG-{own}"})[0] == 0
    code, cause, message = checked(daemon, gpus.device(0), env={"CUDA_VISIBLE_DEVICES": f"MIG-{uuid}"})
    assert (code, cause) == (27, "mig")
    assert "a process sees one MIG instance at most" in message


def test_a_driver_without_descriptors_is_told_and_what_does_without_them_works(
    machine: Any, make_daemon: Any, load_on: Any, raw_checkpoint: Path, checked: Any, cli: Any
) -> None:
    gpus = machine({"flags": HAS_IPC})
    daemon = make_daemon()
    words = ("load", str(raw_checkpoint), "--model", "raw", "--device", "cuda:0", "--runtime-dir")
    done = cli(*words, str(daemon.runtime_dir))
    assert done.returncode == 27
    assert "offers no virtual memory management" in done.stderr
    assert "--device-memory cuda_ipc does without" in done.stderr
    daemon = start(make_daemon, load_on, raw_checkpoint, gpus.device(), "cuda_ipc")
    assert checked(daemon, gpus.device()) == (0, "", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")
def test_another_pid_namespace_is_told(
    machine: Any, make_daemon: Any, load_on: Any, raw_checkpoint: Path, checked: Any
) -> None:
    gpus = machine({})
    daemon = start(make_daemon, load_on, raw_checkpoint, gpus.device(), "cuda_ipc")
    code, cause, message = checked(daemon, gpus.device(), "unshare", "--pid", "--fork", "--mount-proc")
    assert (code, cause) == (27, "pid_namespace")
    assert "in another PID namespace than the daemon and its holder: run the container with --pid=host" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")
def test_ipc_that_a_container_blocks_is_told(
    machine: Any, make_daemon: Any, load_on: Any, raw_checkpoint: Path, checked: Any
) -> None:
    gpus = machine({})
    daemon = start(make_daemon, load_on, raw_checkpoint, gpus.device(), "cuda_ipc")
    gpus.inject("cuIpcOpenMemHandle", 801, nth=0, process="check")
    code, cause, message = checked(daemon, gpus.device(), "unshare", "--ipc")
    assert (code, cause) == (27, "ipc_namespace")
    assert "CUDA_ERROR_NOT_SUPPORTED" in message
    code, cause, message = checked(daemon, gpus.device())
    assert (code, cause) == (27, "ipc_blocked")
    assert "or use a daemon with --device-memory cuda_vmm" in message


def test_a_device_without_room_for_a_context_or_a_mapping_is_told(
    machine: Any, make_daemon: Any, load_on: Any, raw_checkpoint: Path, checked: Any
) -> None:
    gpus = machine({"context_bytes": 16 * MIB})
    daemon = start(make_daemon, load_on, raw_checkpoint, gpus.device())
    assert checked(daemon, gpus.device())[0] == 0
    gpus.inject("cuMemMap", 2, nth=0, process="check")
    assert checked(daemon, gpus.device())[:2] == (18, "no_memory")
    gpus.heal()
    taken = gpus.take_all_but(15 * MIB)
    try:
        code, cause, message = checked(daemon, gpus.device())
        assert (code, cause) == (18, "no_context")
        assert "has no memory left for a context of this process" in message
    finally:
        os.close(taken)
    assert checked(daemon, gpus.device())[0] == 0
