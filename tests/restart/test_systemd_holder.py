"""A holder of GPU memory as a service of its own, under a real systemd and on an emulated GPU: the daemon's end is
not its end, and the other way round."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DAEMON = "preload.service"
RUNTIME_DIR = "/run/preload"
PRELOAD = Path(sys.executable).with_name("preload")
UNITS = Path("/etc/systemd/system")
MIB = 1 << 20


@pytest.fixture(scope="module")
def machine(box: Any, load_fake: Callable[[str], Any]) -> Any:
    """One GPU for the services in the box, whose user is another than ours."""
    machines = load_fake("cuda_machine")
    made = machines.Machine(box.share, [machines.Gpu(64 * MIB)])
    made.path.chmod(0o666)
    return made


@pytest.fixture(scope="module")
def holder(box: Any, machine: Any) -> str:
    """The name of the holder's unit; everything is installed as an operator does it, and enabled."""
    box.run(PRELOAD, "install-units")
    box.run("systemd-sysusers", "/etc/sysusers.d/preload.conf")
    box.run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/preload.conf")
    for unit in (DAEMON, "preload-holder@.service"):
        lines = [f'Environment="{key}={value}"' for key, value in machine.env.items()]
        lines += [
            f"ReadWritePaths={box.share}",
            f"StandardOutput=append:{box.share}/{unit}.log",
            "StandardError=inherit",
        ]
        box.write(UNITS / f"{unit}.d/test.conf", "\n".join(["[Service]", *lines, ""]))
    box.write(Path("/etc/preload/daemon.toml"), "[daemon]\nhttp_port = 0\ndevice_memory = 'cuda_ipc'\n")
    box.systemctl("daemon-reload")
    unit = f"preload-holder@{machine.device().removeprefix('cuda:')}.service"
    box.systemctl("enable", unit)
    return unit


class Service:
    """The daemon as a service, with one generation on the GPU whose checkpoint is gone from the disk."""

    def __init__(self, box: Any, holder: str, device: str, checkpoint: Path, wait_for: Callable[..., Any]) -> None:
        self.box, self.holder, self.device, self._wait_for = box, holder, device, wait_for
        box.systemctl("start", DAEMON)
        self.generation = self.load(checkpoint)
        checkpoint.unlink()

    def preload(self, *words: str | Path, check: bool = True) -> str:
        return str(self.box.run(PRELOAD, *words, "--runtime-dir", RUNTIME_DIR, user="preload", check=check))

    def load(self, checkpoint: Path) -> str:
        self.preload("load", checkpoint, "--model", "raw", "--device", self.device)
        return next(g["id"] for g in self.status()["generations"] if g["state"] == "READY")

    def status(self) -> dict[str, Any]:
        """As `preload status` sees it, once the daemon answers."""

        def answer() -> dict[str, Any] | None:
            said: dict[str, Any] = json.loads(self.preload("status", "--json", check=False))
            return said if "epoch" in said else None

        status: dict[str, Any] = self._wait_for(answer, "the daemon to answer")
        return status

    def holder_pid(self) -> int:
        """Of the device, as the daemon says it."""
        return int(next(d for d in self.status()["devices"] if d["name"] == self.device)["holder_pid"])

    def pid(self, unit: str) -> int:
        return int(self.box.show(unit, "MainPID"))

    def is_served(self, epoch: int) -> None:
        """The same bytes again, from the same holder."""
        status = self.status()
        assert status["epoch"] == epoch
        assert [(g["id"], g["state"]) for g in status["generations"]] == [(self.generation, "READY")]
        assert self.holder_pid() == self.pid(self.holder)
        self.preload("verify", self.generation)


@pytest.fixture
def service(
    box: Any, holder: str, machine: Any, wait_for: Callable[..., Any], write_safetensors: Any, tmp_path: Path
) -> Iterator[Service]:
    path = write_safetensors(box.share / f"{tmp_path.name}.safetensors", {"a": ("U8", [4096], b"w" * 4096)})
    path.chmod(0o644)
    yield Service(box, holder, machine.device(), path, wait_for)
    box.systemctl("stop", DAEMON, holder)
    wait_for(lambda: not machine.used_bytes(), "the GPU's memory to be back")


def test_weights_behind_a_holder_service_outlive_the_daemon(service: Service, wait_for: Callable[..., Any]) -> None:
    daemon, holder, epoch = service.pid(DAEMON), service.pid(service.holder), service.status()["epoch"]
    assert service.holder_pid() == holder, "enabled, it is there before the daemon looks for one"
    service.box.signal(DAEMON, "SIGKILL")
    wait_for(lambda: service.pid(DAEMON) not in (0, daemon), "another daemon")
    service.is_served(epoch + 1)
    service.box.systemctl("restart", DAEMON)
    service.is_served(epoch + 2)
    assert service.pid(service.holder) == holder


def test_a_holder_service_that_is_killed_comes_back_without_the_weights(
    service: Service, write_safetensors: Callable[..., Path], machine: Any, wait_for: Callable[..., Any]
) -> None:
    daemon, holder = service.pid(DAEMON), service.pid(service.holder)
    service.box.signal(service.holder, "SIGKILL")
    wait_for(lambda: service.status()["generations"][0]["state"] == "FAILED", "the generation to be lost")
    wait_for(lambda: service.pid(service.holder) not in (0, holder), "another holder")
    wait_for(lambda: service.box.show(service.holder, "ActiveState") == "active", "it to be ready")
    path = write_safetensors(service.box.share / "again.safetensors", {"a": ("U8", [4096], b"v" * 4096)})
    path.chmod(0o644)
    service.load(path)
    assert service.holder_pid() == service.pid(service.holder)
    assert service.pid(DAEMON) == daemon


def test_the_unit_is_clean(box: Any, holder: str) -> None:
    done = subprocess.run(box.words("systemd-analyze", "verify", UNITS / holder), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    said = box.run("systemd-analyze", "security", "--offline=true", UNITS / "preload-holder@.service", check=False)
    level = re.search(r"Overall exposure level for \S+: (\S+) (\w+)", said)
    assert level is not None, said
    assert level[2] == "OK", said
