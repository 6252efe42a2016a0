"""`preload serve` with cores from a template: the same answers, and every process may die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import preload.engine
import preload.protos
from preload.engine.template.fingerprint import place_of

PROMPT = "The capital of France is"
PRELOAD = [sys.executable, "-m", "preload.cli.main"]


class Server:
    """`preload serve` of the demo model."""

    def __init__(self, model: Path, runtime_dir: Path, folder: Path, wait_for: Any, *options: str, env: Any = None):
        self.log = folder / f"serve-{len(list(folder.iterdir()))}.log"
        self.wait_for = wait_for
        words = [
            "serve",
            str(model),
            "--port",
            "0",
            "--runtime-dir",
            str(runtime_dir),
            "--num-threads",
            "1",
            *options,
        ]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen([*PRELOAD, *words, *options], stdout=out, stderr=out, env=env)
        self.url = wait_for(self._url, "the server to listen")
        self.wait_ready()

    def _url(self) -> str:
        assert self.process.poll() is None, self.log.read_text()
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("serving ")]
        return lines[0].rsplit(" ", 1)[1] if lines else ""

    def wait_ready(self) -> None:
        self.wait_for(lambda: httpx.get(f"{self.url}/ready").status_code == 200, "the server to be ready", 120)

    def complete(self, max_tokens: int = 8) -> str:
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def core(self) -> dict[str, Any]:
        newest: dict[str, Any] = httpx.get(f"{self.url}/debug/cores", timeout=60).json()["cores"][-1]
        return newest

    def kill_core(self) -> dict[str, Any]:
        """The next core, when it serves."""
        victim = self.core()["pid"]
        os.kill(victim, signal.SIGKILL)
        self.wait_for(lambda: self.core()["pid"] != victim and self.core()["ready_at_ns"], "the next core", 120)
        return self.core()

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0


class Template:
    """`preload template`, in the foreground."""

    def __init__(self, runtime_dir: Path, wait_for: Any, env: Any = None) -> None:
        self.place = place_of(str(runtime_dir))
        command = [*PRELOAD, "template", "--runtime-dir", str(runtime_dir)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env)
        wait_for(lambda: list(runtime_dir.glob("template-*.sock")), "the template to listen", 180)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


@pytest.fixture
def start(demo_model: Path, tmp_path: Path, wait_for: Any) -> Iterator[Callable[..., Any]]:
    """start(Server, daemon, options…) and start(Template, daemon); all are gone at the end."""
    started: list[Any] = []

    def make(kind: Any, daemon: Any, *options: str, env: Any = None) -> Any:
        if kind is Template:
            started.append(Template(daemon.runtime_dir, wait_for, env))
        else:
            started.append(Server(demo_model, daemon.runtime_dir, tmp_path, wait_for, *options, env=env))
        return started[-1]

    yield make
    for process in started:
        if process.process.poll() is None:
            process.stop()


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def detached_templates(daemon: Any) -> list[int]:
    words = f"preload.engine.template\0--runtime-dir\0{daemon.runtime_dir}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if words in (folder / "cmdline").read_bytes() and not ended(int(folder.name)):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def pss_of_torch(pid: int) -> tuple[int, int]:
    """Proportional and resident KiB of torch's libraries in one process."""
    pss = rss = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            inside = "/torch/lib/" in line
        elif inside and words[0] == "Pss:":
            pss += int(words[1])
        elif inside and words[0] == "Rss:":
            rss += int(words[1])
    return pss, rss


def test_a_forked_core_answers_like_a_fresh_one_and_shares_its_libraries(
    daemon: Any, start: Callable[..., Any], wait_for: Any
) -> None:
    fresh = start(Server, daemon, "--no-template")
    assert fresh.core()["is_forked"] is False
    expected = fresh.complete()
    fresh.stop()
    template = start(Template, daemon)
    servers = [start(Server, daemon), start(Server, daemon)]
    for server in servers:
        assert server.core()["is_forked"] is True
        assert server.complete() == expected
        (parent,) = [p for p in Path(f"/proc/{server.core()['pid']}/status").read_text().splitlines() if "PPid" in p]
        assert int(parent.split()[1]) == template.process.pid
    # Three processes have them mapped, and nothing writes to them: each is charged for a third.
    for server in servers:
        pss, rss = pss_of_torch(server.core()["pid"])
        assert pss < rss * 0.5


def test_a_forked_core_has_no_descriptor_of_the_template(daemon: Any, start: Callable[..., Any]) -> None:
    template = start(Template, daemon)
    server = start(Server, daemon)
    other = start(Server, daemon)

    def links(pid: int) -> set[str]:
        folder = Path(f"/proc/{pid}/fd")
        return {os.readlink(entry) + whose(pid, entry.name) for entry in folder.iterdir() if entry.is_symlink()}

    def whose(pid: int, fd: str) -> str:
        """Of a pidfd, for they all have one name."""
        lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
        return "".join(line for line in lines if line.startswith("Pid:"))

    held = links(template.process.pid) - {"/dev/null", "anon_inode:[eventpoll]"}
    for core in (server.core()["pid"], other.core()["pid"]):
        assert not links(core) & held
        assert os.readlink(f"/proc/{core}/fd/0") == "/dev/null"


def test_a_forked_core_dies_with_its_frontend(daemon: Any, start: Callable[..., Any], wait_for: Any) -> None:
    start(Template, daemon)
    server = start(Server, daemon)
    core = server.core()["pid"]
    server.process.kill()
    server.process.wait()
    wait_for(lambda: ended(core), "the core to die with its frontend")


def test_a_killed_core_is_replaced_by_another_fork_and_its_end_is_told(
    daemon: Any, start: Callable[..., Any]
) -> None:
    start(Template, daemon)
    server = start(Server, daemon)
    expected = server.complete()
    assert server.kill_core()["is_forked"] is True
    assert server.complete() == expected
    dead = httpx.get(f"{server.url}/debug/cores").json()["cores"][0]
    assert dead["exit_code"] == -signal.SIGKILL
    assert "SIGKILL" in dead["exit_reason"]


def test_cores_outlive_the_template_and_the_frontend_gets_along_without_and_starts_another(
    daemon: Any, start: Callable[..., Any], wait_for: Any
) -> None:
    template = start(Template, daemon)
    server = start(Server, daemon)
    expected = server.complete()
    template.process.kill()
    template.process.wait()
    assert server.complete() == expected
    fresh = server.kill_core()
    assert fresh["is_forked"] is False
    assert server.complete() == expected
    dead = httpx.get(f"{server.url}/debug/cores").json()["cores"][0]
    assert dead["exit_code"] is None
    assert "only its template knew" in dead["exit_reason"]
    wait_for(lambda: detached_templates(daemon), "a template to be started", 180)
    wait_for(lambda: "forks cores at" in template.place.log.read_text(), "the new template to listen", 180)
    assert template.place.log.stat().st_mode & 0o777 == 0o600
    assert server.kill_core()["is_forked"] is True
    server.stop()
    daemon.stop()
    wait_for(lambda: not detached_templates(daemon), "the detached template to end, as no daemon serves any more")


def test_changed_code_is_never_served_from_an_old_template(
    daemon: Any, start: Callable[..., Any], wait_for: Any, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    for module in (preload.engine, preload.protos):
        source = Path(module.__path__[0])
        shutil.copytree(source, site / "preload" / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    template = start(Template, daemon, env=env)
    server = start(Server, daemon, env=env)
    assert server.core()["is_forked"] is True
    with (site / "preload" / "engine" / "core" / "process.py").open("a") as source_file:
        source_file.write("\nprint('new code')\n")
    assert server.kill_core()["is_forked"] is False
    assert "holds other code" in server.log.read_text()
    assert "new code" in server.log.read_text()
    assert template.process.wait(60) == 0
    wait_for(lambda: list(daemon.runtime_dir.glob("template-*.sock")), "a template of the new code", 180)
    assert server.kill_core()["is_forked"] is True
