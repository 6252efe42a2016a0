"""The command line as a shell sees it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
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


def test_no_command_is_a_wrong_use() -> None:
    answer = preload()
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("usage: preload COMMAND")


def test_unknown_command_is_named() -> None:
    answer = preload("sreve")
    assert answer.returncode == 2
    assert "'sreve'" in answer.stderr


@pytest.mark.parametrize("name", ["load", "ls", "status", "evict", "verify", "check", "serve", "generate"])
def test_command_without_a_daemon_says_so_in_one_line(name: str, tmp_path: Path) -> None:
    words = {"status": [], "ls": [], "generate": ["/m", "hello"]}.get(name, ["/m"])
    answer = preload(name, *words, "--runtime-dir", str(tmp_path), "--wait-daemon", "0")
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
    assert run("verify", loaded["name"])["tensors"] == 3
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


def error_of(answer: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one object that a failed command with --json leaves on stdout."""
    error: dict[str, Any] = json.loads(answer.stdout)["error"]
    assert error["exit_code"] == answer.returncode
    assert error["message"] in answer.stderr
    return error


@pytest.mark.parametrize("words", [("load", "/m"), ("ls",), ("status",), ("evict", "/m"), ("evict", "--failed")])
def test_failure_as_json_is_one_object_with_reason_message_and_exit_code(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    answer = preload(*words, "--json", "--runtime-dir", str(tmp_path), "--wait-daemon", "0")
    assert (answer.returncode, error_of(answer)["reason"]) == (10, "NO_DAEMON")


@pytest.mark.parametrize(
    "words", [("load",), ("load", ""), ("evict", ""), ("check", "abc12"), ("evict",), ("bench", "attach", "-n", "0")]
)
def test_wrong_arguments_as_json_are_told_alike(words: tuple[str, ...], daemon: Any) -> None:
    place = () if words[0] == "bench" else ("--runtime-dir", str(daemon.runtime_dir))
    answer = preload(*words, "--json", *place)
    assert (answer.returncode, error_of(answer)["reason"]) == (2, "BAD_REQUEST")


def test_check_tells_its_failure_in_fields_of_its_own_as_well(daemon: Any, tmp_path: Path) -> None:
    answer = preload("check", str(tmp_path / "none"), "--json", "--runtime-dir", str(daemon.runtime_dir))
    told = json.loads(answer.stdout)
    assert (told["ok"], told["reason"], told["exit_code"]) == (False, "CHECKPOINT_NOT_FOUND", 15)
    assert told["error"] == {key: told[key] for key in ("reason", "message", "exit_code")}


@pytest.mark.parametrize(
    "words", [("load", ""), ("evict", ""), ("serve", ""), ("generate", "", "hello"), ("check", "")]
)
def test_empty_name_never_means_the_current_folder(words: tuple[str, ...], daemon: Any) -> None:
    answer = preload(*words, "--runtime-dir", str(daemon.runtime_dir))
    assert answer.returncode == 2
    assert daemon.generations() == []


def test_digits_that_are_too_few_for_an_id_are_told_so(daemon: Any) -> None:
    answer = preload("evict", "abc123", "--runtime-dir", str(daemon.runtime_dir))
    assert answer.returncode == 2
    assert "abc123 is no file here, and a generation's id needs at least 8 of its digits" in answer.stderr


def test_load_waits_for_a_daemon_that_is_just_starting(make_daemon: Callable[..., Any], raw_checkpoint: Path) -> None:
    daemon = make_daemon(wait=False)
    words = ("--model", "raw", "--runtime-dir", str(daemon.runtime_dir), "--wait-daemon", "60")
    answer = preload("load", str(raw_checkpoint), *words)
    assert answer.returncode == 0, answer.stderr


def test_socket_of_a_killed_daemon_is_told_from_one_that_does_not_answer(daemon: Any) -> None:
    daemon.kill()
    answer = preload("ls", "--runtime-dir", str(daemon.runtime_dir))
    assert answer.returncode == 10
    assert f"the daemon in {daemon.runtime_dir} is gone (its socket is a dead predecessor's)" in answer.stderr


def test_failures_have_a_name_and_an_age_and_are_forgotten_by_name_or_all_at_once(
    daemon: Any, tmp_path: Path
) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return preload(*words, "--runtime-dir", str(daemon.runtime_dir))

    for number in range(3):
        (tmp_path / f"{number}.safetensors").write_text("no weights, but a text that somebody has renamed")
        assert run("load", str(tmp_path / f"{number}.safetensors")).returncode == 16
    shown = json.loads(run("ls", "--json").stdout)
    names = [generation["name"] for generation in shown]
    assert names == ["@1", "@2", "@3"]
    status = run("status").stdout
    assert all(f"{name}  FAILED " in status for name in names)
    assert "loaded in" not in status
    assert "is neither safetensors nor GGUF" in status
    assert run("check", "@1").returncode == 13
    assert run("evict", "@1").stdout == "@1 is forgotten\n"
    assert run("evict", "--failed").stdout == "@2 is forgotten\n@3 is forgotten\n"
    assert run("evict", "--failed").stdout == "nothing has failed\n"
    assert run("ls").stdout == "nothing is resident\n"


def test_load_says_which_files_it_loads_anew_because_they_changed(
    daemon: Any, raw_checkpoint: Path, write_safetensors: Callable[..., Path]
) -> None:
    before = daemon.load(raw_checkpoint, model="raw")
    write_safetensors(raw_checkpoint, {"a": ("F32", [4], bytes(16))})
    answer = preload("load", str(raw_checkpoint), "--model", "raw", "--runtime-dir", str(daemon.runtime_dir))
    assert answer.returncode == 0
    said = f"preload: {raw_checkpoint} changed on disk since generation {before.id[:12]} was loaded: loading anew"
    assert said in answer.stderr.splitlines()


def test_generate_that_may_not_load_says_what_is_missing(daemon: Any, raw_checkpoint: Path) -> None:
    answer = preload("generate", str(raw_checkpoint), "hello", "--no-load", "--runtime-dir", str(daemon.runtime_dir))
    assert answer.returncode == 11
    assert daemon.generations() == []


@pytest.mark.host_only
def test_generate_computes_as_it_is_told(daemon: Any, demo_model: Path) -> None:
    words = ("The capital of France is", "--max-tokens", "6", "--kv-cache-dtype", "bfloat16", "--json")
    answer = preload("generate", str(demo_model), *words, "--runtime-dir", str(daemon.runtime_dir))
    if "this CPU has neither AVX-512 BF16" in answer.stderr:
        pytest.skip(answer.stderr)
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in json.loads(answer.stdout)["text"]
    assert "keys and values in bfloat16" in answer.stderr


@pytest.mark.parametrize(
    ("words", "code"), [(("--host-limit", "1G"), 0), (("--max-loaders", "0"), 2), (("--http-port", "99999"), 2)]
)
def test_configuration_is_checked_without_a_daemon(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    answer = preload("daemon", "--check-config", "--runtime-dir", str(tmp_path / "run"), *words)
    assert answer.returncode == code
    assert "Traceback" not in answer.stderr
    assert not (tmp_path / "run").exists()


def test_model_that_no_loader_would_take_is_found_by_check_config(tmp_path: Path) -> None:
    config = tmp_path / "preload.toml"
    config.write_text('[[models]]\ncheckpoint = "/m"\nquantization = "int3"\n')
    answer = preload("daemon", "--check-config", "--config", str(config))
    assert answer.returncode == 2
    assert "/m: unknown quantization 'int3'" in answer.stderr


def test_bench_that_is_terminated_leaves_no_file_and_no_process(tmp_path: Path, wait_for: Callable[..., Any]) -> None:
    command = [sys.executable, "-P", "-m", "preload.cli.main", "bench", "memory"]
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        assert bench.stderr.readline().startswith("bench: loading "), "it says how far it is"
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    wait_for(lambda: not processes_of(tmp_path), "every process of the bench to be gone")


def processes_of(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes()
        except OSError:  # it ended while we looked
            continue
        if str(folder).encode() in words:
            found.append(words.decode())
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--wrong",), "unrecognized arguments: --wrong"),
        (("--host-limit", "much"), "memory limit 'much'"),
    ],
)
def test_keeper_ends_with_what_its_first_daemon_says_of_its_arguments(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    answer = preload("keeper", "--runtime-dir", str(tmp_path / "run"), "--", *words)
    assert answer.returncode == 2
    assert said in answer.stderr
    assert answer.stderr.count("started daemon") == 1


def test_keeper_and_daemon_share_their_folder(tmp_path: Path) -> None:
    answer = preload("keeper", "--runtime-dir", str(tmp_path / "run"), "--", f"--runtime-dir={tmp_path}")
    assert answer.returncode == 2
    assert "name it before the --" in answer.stderr


def test_serve_takes_its_address_before_it_loads_anything(daemon: Any, raw_checkpoint: Path) -> None:
    held = {generation.id for generation in daemon.generations()}
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        answer = preload("serve", str(raw_checkpoint), "--runtime-dir", str(daemon.runtime_dir), "--port", port)
    assert answer.returncode == 2
    assert f"port {port}: Address already in use" in answer.stderr
    assert {generation.id for generation in daemon.generations()} == held


def test_recipes_of_one_checkpoint_are_told_apart(make_daemon: Callable[..., Any], raw_checkpoint: Path) -> None:
    daemon = make_daemon()
    daemon.load(raw_checkpoint, model="raw")
    (listed,) = json.loads(preload("ls", "--runtime-dir", str(daemon.runtime_dir), "--json").stdout)
    assert (listed["model"], listed["config_overrides"]) == ("raw", {})
    assert "keep/float32 raw" in preload("ls", "--runtime-dir", str(daemon.runtime_dir)).stdout
    assert "keep/float32 raw" in preload("status", "--runtime-dir", str(daemon.runtime_dir)).stdout


def test_a_picture_that_cannot_be_written_is_a_wrong_argument(daemon: Any, tmp_path: Path) -> None:
    answer = preload("status", "--runtime-dir", str(daemon.runtime_dir), "--svg", str(tmp_path / "no" / "x.svg"))
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
    assert "x.svg cannot be written" in answer.stderr


def test_bench_names_a_checkpoint_that_is_missing(tmp_path: Path) -> None:
    answer = preload("bench", "restart", "--json", "--checkpoint", str(tmp_path / "none"))
    assert (answer.returncode, error_of(answer)["reason"]) == (15, "CHECKPOINT_NOT_FOUND")
