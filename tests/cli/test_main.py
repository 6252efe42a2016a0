"""The command line as a shell sees it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from preload.cli.main import COMMANDS


def preload(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "preload.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_help_lists_every_command() -> None:
    answer = preload("--help")
    assert answer.returncode == 0
    assert all(name in answer.stdout and text in answer.stdout for name, text in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    answer = preload(name, "--help")
    assert answer.returncode == 0
    assert answer.stdout.startswith(f"usage: preload {name}")


def test_unknown_command_is_named() -> None:
    answer = preload("sreve")
    assert answer.returncode == 2
    assert "'sreve'" in answer.stderr


@pytest.mark.parametrize("name", ["load", "ls", "status", "evict", "verify", "check", "serve", "generate"])
def test_command_without_a_daemon_says_so_in_one_line(name: str, tmp_path: Path) -> None:
    words = {"status": [], "ls": [], "generate": ["/m", "hello"]}.get(name, ["/m"])
    answer = preload(name, *words, "--runtime-dir", str(tmp_path))
    assert answer.returncode == 10
    (line,) = answer.stderr.splitlines()
    assert str(tmp_path) in line
    assert "preload daemon" in line


def test_wrong_recipe_is_a_wrong_argument(daemon: Any, raw_checkpoint: Path) -> None:
    words = ("--config-overrides", "[1]", "--runtime-dir", str(daemon.runtime_dir))
    answer = preload("load", str(raw_checkpoint), *words)
    assert answer.returncode == 2
    assert "JSON object" in answer.stderr


def test_generation_is_loaded_listed_checked_verified_and_evicted(daemon: Any, raw_checkpoint: Path) -> None:
    def run(name: str, *words: str) -> Any:
        answer = preload(name, *words, "--runtime-dir", str(daemon.runtime_dir), "--json")
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    raw = ("--model", "raw")
    loaded = run("load", str(raw_checkpoint), *raw)
    assert (loaded["state"], loaded["num_tensors"]) == ("READY", 3)
    assert run("ls")[0]["id"] == loaded["id"]
    assert run("status")["generations"][0]["checkpoints"] == [str(raw_checkpoint)]
    assert run("check", str(raw_checkpoint), *raw) == {"ok": True, "id": loaded["id"], "exit_code": 0}
    assert run("verify", loaded["id"][:12])["tensors"] == 3
    assert run("evict", loaded["id"]) == {"id": loaded["id"], "freed": True, "leases": 0}
    assert run("ls") == []
    refused = preload("check", str(raw_checkpoint), *raw, "--runtime-dir", str(daemon.runtime_dir), "--json")
    assert refused.returncode == 11
    assert json.loads(refused.stdout)["reason"] == "NOT_RESIDENT"


def test_load_into_a_log_prints_plain_lines(daemon: Any, raw_checkpoint: Path) -> None:
    answer = preload("load", str(raw_checkpoint), "--model", "raw", "--runtime-dir", str(daemon.runtime_dir))
    assert answer.returncode == 0
    assert "\r" not in answer.stderr
    assert "READY" in answer.stdout


def test_status_writes_a_timeline_and_a_picture(daemon: Any, raw_checkpoint: Path, tmp_path: Path) -> None:
    daemon.load(raw_checkpoint, model="raw")
    picture = tmp_path / "timeline.svg"
    words = ("--timeline", "--svg", str(picture), "--runtime-dir", str(daemon.runtime_dir))
    answer = preload("status", *words)
    assert answer.returncode == 0
    assert "total to ready" in answer.stdout
    assert picture.read_text().startswith("<svg")


def test_second_daemon_in_a_folder_is_refused(daemon: Any) -> None:
    answer = preload("daemon", "--runtime-dir", str(daemon.runtime_dir), "--http-port", "0")
    assert answer.returncode == 2
    assert "another daemon serves" in answer.stderr
    assert daemon.generations() == []
