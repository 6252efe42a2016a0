"""Every reason the daemon gives: the engine's typed error, the same from Check and Attach, and the exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from preload.engine import errors
from preload.engine.client import attach
from preload.engine.client.control import make_selector
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

RAW = Recipe(model="raw")


def preload(daemon: Any, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "preload.cli.main", *words, "--runtime-dir", str(daemon.runtime_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@dataclass
class Scene:
    """A daemon whose loaders wait, crash or lie on demand, and a checkpoint in some trouble."""

    daemon: Any
    gate: Any
    path: Path
    hold: Callable[..., Any]
    start_load: Callable[..., Any]

    def not_resident(self) -> None:
        pass

    def still_loading(self) -> None:
        self.gate.stop_at(self.gate.HEADER)
        self.start_load(self.daemon, self.path, model="raw")
        self.gate.loader_pid()

    def load_failed(self) -> None:
        self.gate.set("crash", "out of luck")
        self.start_load(self.daemon, self.path, model="raw").join()

    def retiring(self) -> None:
        self.daemon.load(self.path, model="raw")
        self.hold(self.daemon, self.path, recipe={"model": "raw"})
        with self.daemon.control() as control:
            control.evict(make_selector(self.path, recipe=RAW))

    def checkpoint_not_found(self) -> None:
        self.daemon.load(self.path, model="raw")
        self.path.unlink()

    def bad_checkpoint(self) -> None:
        self.daemon.load(self.path, model="raw")
        self.path.write_bytes(self.path.read_bytes()[:-1])

    def checkpoint_changed(self) -> None:
        self.daemon.load(self.path, model="raw")
        data = self.path.read_bytes()
        self.path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def draining(self) -> None:
        self.daemon.load(self.path, model="raw")
        self.hold(self.daemon, self.path, recipe={"model": "raw"})
        self.daemon.process.send_signal(signal.SIGTERM)


@pytest.fixture
def scene(
    make_daemon: Callable[..., Any], gate: Any, raw_checkpoint: Path, hold: Callable[..., Any],
    start_load: Callable[..., Any],
) -> Scene:  # fmt: skip
    return Scene(
        make_daemon("--drain-timeout-s", "0.2", command=gate.command()), gate, raw_checkpoint, hold, start_load
    )


@pytest.mark.parametrize(
    ("trouble", "error", "exit_code"),
    [
        ("not_resident", errors.NotResidentError, 11),
        ("still_loading", errors.StillLoadingError, 12),
        ("load_failed", errors.LoadFailedError, 13),
        ("retiring", errors.RetiringError, 14),
        ("checkpoint_not_found", errors.CheckpointNotFoundError, 15),
        ("bad_checkpoint", errors.CheckpointError, 16),
        ("checkpoint_changed", errors.CheckpointChangedError, 17),
    ],
)
def test_check_gives_the_reason_an_attach_would_and_its_exit_code(
    scene: Scene, trouble: str, error: type[errors.PreloadError], exit_code: int
) -> None:
    getattr(scene, trouble)()
    with pytest.raises(error) as attached:
        attach(scene.path, recipe=RAW, runtime_dir=str(scene.daemon.runtime_dir), tensors="buffers")
    with scene.daemon.control() as control, pytest.raises(error) as checked:
        control.check(make_selector(scene.path, recipe=RAW))
    assert type(attached.value) is type(checked.value) is error
    assert attached.value.message == checked.value.message
    assert str(scene.path) in checked.value.message
    told = preload(scene.daemon, "check", str(scene.path), "--model", "raw", "--json")
    assert told.returncode == exit_code, told
    assert json.loads(told.stdout)["reason"] == pb.ErrorReason.Name(error.reason)
    plain = preload(scene.daemon, "check", str(scene.path), "--model", "raw")
    assert (plain.returncode, plain.stdout) == (exit_code, "")
    assert plain.stderr == f"preload: {checked.value.message}\n"


def test_a_draining_daemon_refuses_new_work_by_that_reason(
    make_daemon: Callable[..., Any], raw_checkpoint: Path, hold: Callable[..., Any]
) -> None:
    """It drains for as long as somebody holds a lease, up to its limit."""
    daemon = make_daemon("--drain-timeout-s", "50")
    daemon.load(raw_checkpoint, model="raw")
    holder = hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    daemon.process.send_signal(signal.SIGTERM)
    assert holder.event() == ("draining", "")
    with daemon.control() as control:
        with pytest.raises(errors.DrainingError):
            control.check(make_selector(raw_checkpoint, recipe=RAW))
        with pytest.raises(errors.DrainingError):
            list(control.load(raw_checkpoint, RAW, timeout_s=60))
        assert control.list().generations, "looking is still allowed"
    with pytest.raises(errors.DrainingError):
        attach(raw_checkpoint, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers")
    assert preload(daemon, "check", str(raw_checkpoint), "--model", "raw").returncode == 22
    holder.end()
    assert daemon.process.wait(40) == 0


@pytest.mark.parametrize(
    ("words", "exit_code", "what"),
    [
        (["evict", "0123456789abcdef"], 11, "no generation with id"),
        (["verify", "0123456789abcdef"], 11, "no generation with id"),
        (["load", "/nowhere"], 15, "checkpoint /nowhere: No such file"),
        (["load", "BAD"], 16, "bad.safetensors"),
        (["load", "RAW", "--quantization", "int8_per_channel", "--model", "raw"], 2, "has no quantization"),
        (["load", "RAW", "--model", "gpt17"], 2, "unknown model 'gpt17'"),
        (["load", "RAW"], 15, "config.json"),
    ],
)
def test_a_refused_command_ends_with_the_code_of_its_cause(
    daemon: Any, raw_checkpoint: Path, words: list[str], exit_code: int, what: str
) -> None:
    bad = raw_checkpoint.with_name("bad.safetensors")
    bad.write_bytes(b"\xff" * 100)
    named = {"RAW": str(raw_checkpoint), "BAD": str(bad)}
    told = preload(daemon, *(named.get(word, word) for word in words))
    assert (told.returncode, told.stdout) == (exit_code, "")
    assert what in told.stderr
    assert "Traceback" not in told.stderr


def test_a_command_without_a_daemon_says_that_none_answers(tmp_path: Path) -> None:
    @dataclass
    class Absent:
        runtime_dir: Path

    for words in (["ls"], ["status"], ["check", "/x"], ["load", "/x"]):
        told = preload(Absent(tmp_path), *words)
        assert (told.returncode, told.stdout) == (10, "")
        assert "no daemon serves in" in told.stderr


def test_loads_that_die_are_cancelled_or_find_no_room_have_codes_of_their_own(
    make_daemon: Callable[..., Any], gate: Any, raw_checkpoint: Path, sparse_checkpoint: Callable[..., Path],
    start_load: Callable[..., Any],
) -> None:  # fmt: skip
    daemon = make_daemon("--host-limit", "3M", command=gate.command())
    large = preload(daemon, "load", str(sparse_checkpoint(1, 4 << 20)), "--model", "raw")
    assert large.returncode == 18
    assert "limit of 3,145,728 bytes" in large.stderr
    gate.set("crash", "out of luck")
    died = preload(daemon, "load", str(raw_checkpoint), "--model", "raw")
    assert died.returncode == 19
    assert "exited with status 3; its last words:\nout of luck" in died.stderr
    gate.unset("crash")
    gate.set("lie")
    daemon.load(raw_checkpoint, model="raw")
    corrupted = preload(daemon, "verify", str(raw_checkpoint), "--model", "raw")
    assert corrupted.returncode == 20
    gate.unset("lie")
    gate.stop_at(gate.HEADER)
    call = start_load(daemon, raw_checkpoint, model="raw")
    gate.loader_pid()
    command = [sys.executable, "-P", "-m", "preload.cli.main", "load", str(raw_checkpoint), "--model", "raw"]
    joined = subprocess.Popen([*command, "--runtime-dir", str(daemon.runtime_dir)], stderr=subprocess.PIPE, text=True)
    assert joined.stderr is not None
    assert joined.stderr.readline().startswith("load: "), "it has joined when it shows progress"
    with daemon.control() as control:
        control.evict(make_selector(raw_checkpoint, recipe=RAW))
    assert call.join().error is not None
    _, stderr = joined.communicate(timeout=60)
    assert joined.returncode == 23, stderr


def test_every_reason_on_the_wire_has_one_engine_error_and_one_exit_code() -> None:
    from preload.cli.exit_codes import code_of
    from preload.daemon.errors import BY_REASON

    codes = {}
    for name, value in pb.ErrorReason.items():
        if name == "ERROR_REASON_UNSPECIFIED":
            continue
        assert name in BY_REASON
        error = errors.from_proto(pb.ErrorInfo(reason=value, message="what", fields={"key": "value"}))
        assert (error.reason, error.message, error.fields) == (value, "what", {"key": "value"})
        codes[name] = code_of(error)
    assert None not in codes.values()
    assert len(set(codes.values())) == len(codes)
