"""The units under a real systemd, booted in namespaces of its own: daemon killed, restarted, reloaded, hung;
frontends restarted while clients connect."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "fakes"
DAEMON = "preload.service"
ENGINE = "preload-engine@demo"
RUNTIME_DIR = "/run/preload"
PRELOAD = Path(sys.executable).with_name("preload")
CONFIG = Path("/etc/preload/daemon.toml")


@pytest.fixture(scope="module")
def installed(box: Any) -> Any:
    """The box with units and user as an operator gets them; logs go to the share, for want of a journal."""
    said = box.run(PRELOAD, "install-units")
    assert "systemctl enable --now preload.service" in said
    box.run("systemd-sysusers", "/etc/sysusers.d/preload.conf")
    box.run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/preload.conf")
    for unit in (DAEMON, f"{ENGINE}.service"):
        text = f"[Service]\nStandardOutput=append:{box.share}/{unit}.log\nStandardError=inherit\n"
        box.write(Path(f"/etc/systemd/system/{unit}.d/test.conf"), text)
    box.write(Path(f"/etc/systemd/system/{DAEMON}.d/watchdog.conf"), "[Service]\nWatchdogSec=3\n")
    box.write(CONFIG, "[daemon]\nhttp_port = 0\nhost_limit = '1G'\n")
    box.systemctl("daemon-reload")
    return box


class Holder:
    """tests/fakes/holder.py as the services' user inside the box."""

    def __init__(self, box: Any, generation: str) -> None:
        options = {"runtime_dir": RUNTIME_DIR, "generation_id": generation, "tensors": "buffers"}
        words = box.words(sys.executable, FAKES / "holder.py", json.dumps(options), user="preload")
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.opening = self.next()

    def next(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the holder ended with {self.process.wait()}"
        said: dict[str, Any] = json.loads(line)
        return said

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def digest(self) -> str:
        self.tell("digest a")
        return str(self.next()["digest"])

    def end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.kill()
        self.process.wait()


class Service:
    """The daemon as a service, with one generation whose checkpoint is gone from the disk."""

    def __init__(self, box: Any, wait_for: Callable[..., Any], checkpoint: Path) -> None:
        self.box = box
        self._wait_for = wait_for
        self.holders: list[Holder] = []
        box.systemctl("start", DAEMON)
        box.run(PRELOAD, "load", "--runtime-dir", RUNTIME_DIR, checkpoint, "--model", "raw", user="preload")
        (self.generation,) = (g["id"] for g in self.status()["generations"] if g["state"] == "READY")
        checkpoint.unlink()

    def status(self) -> dict[str, Any]:
        """As `preload status` sees it, once the daemon answers."""

        def answer() -> dict[str, Any] | None:
            words = ("status", "--runtime-dir", RUNTIME_DIR, "--json")
            said: dict[str, Any] = json.loads(self.box.run(PRELOAD, *words, user="preload", check=False))
            return said if "epoch" in said else None

        status: dict[str, Any] = self._wait_for(answer, "the daemon to answer")
        return status

    def hold(self) -> Holder:
        self.holders.append(Holder(self.box, self.generation))
        return self.holders[-1]

    def pid(self) -> str:
        return str(self.box.show(DAEMON, "MainPID"))

    def log(self) -> str:
        return (self.box.share / f"{DAEMON}.log").read_text()

    def require_reclaimed(self, holder: Holder, events: list[str], epoch: int) -> None:
        """The holder took its lease again, and never missed a byte; another process attaches, without the files."""
        for kind in events:
            assert holder.next()["event"] == kind
        (generation,) = self.status()["generations"]
        assert self.status()["epoch"] == epoch
        assert generation["state"] == "READY"
        assert holder.opening["lease"] in [lease["id"] for lease in generation["leases"]]
        second = self.hold()
        assert second.opening["epoch"] == epoch
        assert second.digest() == holder.digest()


@pytest.fixture
def service(
    installed: Any, wait_for: Callable[..., Any], write_safetensors: Callable[..., Path], tmp_path: Path
) -> Iterator[Service]:
    path = installed.share / f"{tmp_path.name}.safetensors"
    write_safetensors(path, {"a": ("F32", [64, 16], tmp_path.name.encode().ljust(4096, b"x"))})
    path.chmod(0o644)
    made = Service(installed, wait_for, path)
    yield made
    for holder in made.holders:
        holder.end()
    installed.systemctl("stop", DAEMON)


def test_a_killed_daemon_serves_again_what_is_gone_from_the_disk(
    service: Service, wait_for: Callable[..., Any]
) -> None:
    holder = service.hold()
    before, epoch = service.pid(), service.status()["epoch"]
    service.box.signal(DAEMON, "SIGKILL")
    wait_for(lambda: service.pid() not in (before, "0"), "another daemon")
    service.require_reclaimed(holder, ["lost", "reclaimed"], epoch + 1)


def test_a_restarted_daemon_serves_again_what_is_gone_from_the_disk(service: Service) -> None:
    holder = service.hold()
    before, epoch = service.pid(), service.status()["epoch"]
    service.box.systemctl("restart", DAEMON)
    assert service.pid() != before
    service.require_reclaimed(holder, ["draining", "lost", "reclaimed"], epoch + 1)


def test_a_hung_daemon_is_replaced(service: Service, wait_for: Callable[..., Any]) -> None:
    holder = service.hold()
    before, epoch = service.pid(), service.status()["epoch"]
    service.box.signal(DAEMON, "SIGSTOP")
    wait_for(lambda: service.pid() not in (before, "0"), "the watchdog to replace the daemon")
    service.require_reclaimed(holder, ["lost", "reclaimed"], epoch + 1)


def test_reload_applies_a_configuration_and_refuses_a_wrong_one(
    service: Service, wait_for: Callable[..., Any]
) -> None:
    def capacity() -> int:
        return int(service.status()["devices"][0]["capacity_bytes"])

    before = service.pid()
    service.box.write(CONFIG, "[daemon]\nhttp_port = 0\nhost_limit = '2G'\n")
    service.box.systemctl("reload", DAEMON)
    wait_for(lambda: capacity() == 2 << 30, "the new limit")
    service.box.write(CONFIG, "[daemon]\nhost_limit = 'much'\n")
    service.box.systemctl("reload", DAEMON)
    wait_for(lambda: "the old one stays" in service.box.show(DAEMON, "StatusText"), "the refusal in the status")
    assert "memory limit 'much'" in service.log()
    service.box.write(CONFIG, "[daemon]\nhttp_port = 0\nhost_limit = '1G'\n")
    service.box.systemctl("reload", DAEMON)
    wait_for(lambda: capacity() == 1 << 30, "the old limit again")
    wait_for(lambda: service.box.show(DAEMON, "ActiveState") == "active", "the end of the reload")
    assert service.pid() == before


def test_stop_lets_weights_go_unless_systemd_preserves_them(service: Service) -> None:
    epoch = service.status()["epoch"]
    version = int(re.findall(r"\d+", service.box.run("systemctl", "--version"))[0])
    service.box.systemctl("stop", DAEMON)
    stored = service.box.show(DAEMON, "NFileDescriptorStore")
    service.box.systemctl("start", DAEMON)
    status = service.status()
    assert status["epoch"] == epoch + 1
    generations = [generation["id"] for generation in status["generations"]]
    assert generations == ([service.generation] if version >= 254 else [])
    assert int(stored) > 0 if version >= 254 else int(stored) == 0


def test_loaders_convert_weights_under_the_hardening(
    service: Service, write_llama: Callable[..., Path], tiny_config: Any, tiny_weights: Any
) -> None:
    """MemoryDenyWriteExecute and the system-call filter hold for torch in a loader."""
    folder = service.box.share / "llama"
    shutil.copytree(write_llama(tiny_config, tiny_weights(tiny_config)), folder)
    service.box.run("chmod", "-R", "a+rX", folder)
    for quantization in ("keep", "bf16", "int8_per_channel", "int4_group32"):
        words = ("load", "--runtime-dir", RUNTIME_DIR, folder, "--quantization", quantization)
        service.box.run(PRELOAD, *words, user="preload")
    states = [generation["state"] for generation in service.status()["generations"]]
    assert states == ["READY"] * 5


@pytest.fixture
def engine(installed: Any, demo_model: Path, wait_for: Callable[..., Any]) -> Iterator[str]:
    """A frontend with a fake core under its socket unit; the value is its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {"checkpoint": str(demo_model), "runtime_dir": RUNTIME_DIR, "served_model_name": "demo"}
    installed.write(Path("/etc/preload/engines/demo.conf"), f"CONFIG='{json.dumps(config)}'\n")
    units = Path("/etc/systemd/system")
    command = f"{sys.executable} {FAKES / 'run_frontend.py'} ${{CONFIG}} {{}}"
    installed.write(units / f"{ENGINE}.service.d/fake.conf", f"[Service]\nExecStart=\nExecStart={command}\n")
    installed.write(
        units / f"{ENGINE}.socket.d/port.conf", f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{port}\n"
    )
    installed.systemctl("daemon-reload")
    installed.systemctl("start", f"{ENGINE}.socket")
    yield f"http://127.0.0.1:{port}"
    installed.systemctl("stop", f"{ENGINE}.service", f"{ENGINE}.socket")


def complete(url: str) -> int:
    """The status of one request on a connection of its own."""
    body = json.dumps({"model": "demo", "prompt": "Hello", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return int(response.status)


class Client:
    """Connects again and again until it is stopped; `answers` are statuses, or errors."""

    def __init__(self, url: str) -> None:
        self.answers: list[Any] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,))
        self._thread.start()

    def _run(self, url: str) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(complete(url))
            except OSError as error:
                self.answers.append(error)

    def stop(self) -> list[Any]:
        self._stop.set()
        self._thread.join()
        return self.answers


def test_a_first_connection_starts_the_frontend(installed: Any, engine: str) -> None:
    assert installed.show(f"{ENGINE}.service", "ActiveState") == "inactive"
    assert complete(engine) == 200
    assert installed.show(f"{ENGINE}.service", "ActiveState") in ("activating", "active")


def test_no_connection_is_refused_while_the_frontend_restarts(
    installed: Any, engine: str, wait_for: Callable[..., Any]
) -> None:
    installed.systemctl("start", f"{ENGINE}.service")
    before = installed.show(f"{ENGINE}.service", "MainPID")
    clients = [Client(engine) for _ in range(4)]
    try:
        for _ in range(2):
            wait_for(lambda: all(200 in client.answers for client in clients), "answers")
            installed.systemctl("restart", f"{ENGINE}.service")
    finally:
        answers = [answer for client in clients for answer in client.stop()]
    assert set(answers) == {200}
    assert installed.show(f"{ENGINE}.service", "MainPID") != before


def test_a_frontend_that_is_killed_leaves_its_socket_to_the_next(
    installed: Any, engine: str, wait_for: Callable[..., Any]
) -> None:
    installed.systemctl("start", f"{ENGINE}.service")
    before = installed.show(f"{ENGINE}.service", "MainPID")
    installed.signal(f"{ENGINE}.service", "SIGKILL")
    assert complete(engine) == 200
    assert installed.show(f"{ENGINE}.service", "MainPID") not in (before, "0")


def test_units_are_clean(installed: Any) -> None:
    """`systemd-analyze verify` says nothing, and `security` is content."""
    names = ("preload.service", "preload-template.service", f"{ENGINE}.service", f"{ENGINE}.socket")
    units = [f"/etc/systemd/system/{name}" for name in names]
    done = subprocess.run(
        installed.words("systemd-analyze", "verify", *units), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for unit in units[:3]:
        said = installed.run("systemd-analyze", "security", "--offline=true", unit.replace("@demo", "@"), check=False)
        level = re.search(r"Overall exposure level for \S+: (\S+) (\w+)", said)
        assert level is not None, said
        assert level[2] == "OK", said
