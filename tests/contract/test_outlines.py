"""A look at a checkpoint's headers spares the reading of its weights, where it can; where not, the reading shows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from preload.engine.client import attach
from preload.engine.client.control import make_selector
from preload.engine.errors import CheckpointChangedError, NotResidentError
from preload.engine.recipe import Recipe

RAW = Recipe(model="raw")
MIB = 1 << 20


def header_bytes(path: Path) -> int:
    """What a loader reads of a file with a header before its first tensor: the first bytes, twice, and the rest."""
    return 32 + 8 + int.from_bytes(path.read_bytes()[:8], "little")


def refused(daemon: Any, path: Path) -> None:
    with pytest.raises(NotResidentError):
        attach(path, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers")


@pytest.fixture
def write(tmp_path: Path, write_safetensors: Callable[..., Path]) -> Callable[..., Path]:
    def make(name: str, num_bytes: int = 4 * MIB, dtype: str = "U8") -> Path:
        return write_safetensors(tmp_path / f"{name}.safetensors", {"t": (dtype, [num_bytes], os.urandom(num_bytes))})

    return make


def test_what_is_not_resident_by_its_headers_is_not_read(
    gated_daemon: Any, gate: Any, write: Callable[..., Path], start_load: Callable[..., Any]
) -> None:
    gated_daemon.load(write("resident"), model="raw")
    for path in (write("longer", 4 * MIB + 1), write("other", dtype="I8")):
        gate.stop_at(header_bytes(path))
        refused(gated_daemon, path)
        with gated_daemon.control() as control, pytest.raises(NotResidentError):
            control.check(make_selector(path, recipe=RAW))
        assert not (gate.folder / "waiting").exists(), "a tensor was read"
        call = start_load(gated_daemon, path, model="raw")
        gate.loader_pid()
        gate.open()
        phases = [progress.phase for progress in call.join().progress if progress.total_bytes]
        assert set(phases) == {"read"}, "its one reading was its load"
        (gate.folder / "waiting").unlink()


def test_what_could_be_resident_is_read_and_the_caller_of_load_sees_it(
    gated_daemon: Any,
    gate: Any,
    write: Callable[..., Path],
    start_load: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> None:
    resident = gated_daemon.load(write("resident"), model="raw")
    twin = write("twin")
    gate.stop_at(header_bytes(twin) + MIB)
    call = start_load(gated_daemon, twin, model="raw")
    wait_for(lambda: any(p.phase == "digest" and p.done_bytes for p in call.progress), "the digest to show")
    (seen,) = {p.total_bytes for p in call.progress if p.phase == "digest" and p.total_bytes}
    assert seen == 4 * MIB
    gate.open()
    assert call.join().loaded.id != resident.id
    refused(gated_daemon, write("third"))


def test_a_digest_of_a_load_that_is_given_up_ends(
    gated_daemon: Any,
    gate: Any,
    write: Callable[..., Path],
    start_load: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> None:
    gated_daemon.load(write("resident"), model="raw")
    twin = write("twin")
    gate.stop_at(header_bytes(twin))
    call = start_load(gated_daemon, twin, model="raw")
    pid = gate.loader_pid()
    call.call.cancel()
    assert call.join().error.code() is grpc.StatusCode.CANCELLED
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the loader to end")


def test_a_change_that_the_headers_tell_names_its_file_without_reading_weights(
    gated_daemon: Any, gate: Any, llama: Any, tmp_path: Path
) -> None:
    folder = llama.folder(tmp_path / "model", llama.tensors())
    gated_daemon.load(folder)
    gate.stop_at(header_bytes(folder / "model.safetensors") + 4096)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))
    with pytest.raises(CheckpointChangedError, match=r"config\.json") as refusal:
        attach(folder, runtime_dir=str(gated_daemon.runtime_dir), tensors="buffers")
    assert refusal.value.fields["paths"] == str(folder / "config.json")
    assert not (gate.folder / "waiting").exists()
