"""Loaders that come to grief half way: killed, crashed, robbed of their file, or given up by their caller."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from preload.engine.errors import CheckpointChangedError, LoaderDiedError, NoMemoryError
from preload.protos import weight_cache_pb2 as pb

TENSOR_BYTES = 64 << 10
NUM_TENSORS = 256
TOTAL_BYTES = TENSOR_BYTES * NUM_TENSORS


@pytest.fixture
def checkpoint(sparse_checkpoint: Callable[..., Path]) -> Path:
    """16 MiB in 256 tensors: loads can be stopped at a percentage."""
    return sparse_checkpoint(NUM_TENSORS, TENSOR_BYTES)


def read_bytes(daemon: Any) -> int:
    (generation,) = daemon.generations()
    return int(generation.progress.done_bytes)


def expect_nothing_left(daemon: Any, checkpoint: Path, reason: int, words: str) -> None:
    """FAILED with the reason, all memory back, no loader; and the same load works now."""
    (failed,) = daemon.generations()
    assert failed.state == pb.GENERATION_STATE_FAILED
    assert failed.failure.reason == reason
    assert words in failed.failure.message
    device = daemon.device()
    assert (device.resident_bytes, device.reserved_bytes) == (0, 0)
    assert daemon.loaders() == []
    assert not [fd for fd in os.listdir(f"/proc/{daemon.pid}/fd") if is_segment(daemon.pid, fd)]
    loaded = daemon.load(checkpoint, model="raw")
    assert [g.id for g in daemon.generations()] == [loaded.id]


def is_segment(pid: int, fd: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith(("/memfd:preload", "/memfd:fakecuda"))
    except FileNotFoundError:  # closed since it was listed
        return False


@pytest.mark.parametrize("percent", [10, 50, 99])
def test_a_loader_killed_half_way_is_told_of_and_leaves_nothing(
    gated_daemon: Any, gate: Any, checkpoint: Path, start_load: Callable[..., Any],
    wait_for: Callable[..., Any], percent: int,
) -> None:  # fmt: skip
    gate.stop_at(TOTAL_BYTES * percent // 100)
    call = start_load(gated_daemon, checkpoint, model="raw")
    pid = gate.loader_pid()
    at_least = TOTAL_BYTES * percent // 100 - 2 * TENSOR_BYTES
    wait_for(lambda: read_bytes(gated_daemon) >= at_least, f"{percent} percent to be read")
    assert read_bytes(gated_daemon) < TOTAL_BYTES
    assert gated_daemon.device().reserved_bytes > TOTAL_BYTES
    os.kill(pid, signal.SIGKILL)
    assert call.join().error.code() is grpc.StatusCode.ABORTED
    assert f"loader {pid} killed by SIGKILL" in call.error.details()
    gate.open()
    expect_nothing_left(gated_daemon, checkpoint, pb.LOADER_DIED, "killed by SIGKILL")


def test_a_loader_killed_before_it_has_read_a_header_is_told_of_too(
    gated_daemon: Any, gate: Any, checkpoint: Path, start_load: Callable[..., Any]
) -> None:
    gate.stop_at(0)
    call = start_load(gated_daemon, checkpoint, model="raw")
    os.kill(gate.loader_pid(), signal.SIGKILL)
    assert call.join().error is not None
    gate.open()
    expect_nothing_left(gated_daemon, checkpoint, pb.LOADER_DIED, "killed by SIGKILL")


def test_a_crashed_loader_leaves_its_status_and_its_last_words(
    gated_daemon: Any, gate: Any, checkpoint: Path
) -> None:
    gate.set("crash", "\n".join(f"line {i} " + "x" * 3000 for i in range(100)) + "\nthe very last words")
    with pytest.raises(LoaderDiedError, match=r"exited with status 3; its last words:") as death:
        gated_daemon.load(checkpoint, model="raw")
    assert death.value.message.endswith("the very last words")
    gate.unset("crash")
    (failed,) = gated_daemon.generations()
    assert len(failed.failure.message) < 32_768, "what a loader says is kept in bounds"
    expect_nothing_left(gated_daemon, checkpoint, pb.LOADER_DIED, "the very last words")


@pytest.mark.parametrize("change", ["written", "touched", "replaced", "removed", "truncated"])
def test_a_file_that_changes_while_it_is_read_is_refused_by_name(
    gated_daemon: Any, gate: Any, checkpoint: Path, start_load: Callable[..., Any], change: str
) -> None:
    gate.stop_at(TOTAL_BYTES // 2)
    call = start_load(gated_daemon, checkpoint, model="raw")
    gate.loader_pid()
    aside = checkpoint.with_suffix(".aside")
    aside.write_bytes(checkpoint.read_bytes())
    match change:
        case "written":
            with checkpoint.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\xff")
        case "touched":
            os.utime(checkpoint)
        case "replaced":
            checkpoint.with_suffix(".new").write_bytes(checkpoint.read_bytes())
            checkpoint.with_suffix(".new").rename(checkpoint)
        case "removed":
            checkpoint.unlink()
        case "truncated":
            os.truncate(checkpoint, 4096)
    gate.open()
    assert call.join().error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert f"{checkpoint} " in call.error.details()
    assert "while it was read" in call.error.details()
    aside.rename(checkpoint)
    expect_nothing_left(gated_daemon, checkpoint, pb.CHECKPOINT_CHANGED, "while it was read")


def test_a_file_that_changes_while_it_is_hashed_again_is_refused_at_attach(
    gated_daemon: Any, gate: Any, checkpoint: Path
) -> None:
    import threading

    from preload.engine.client import attach
    from preload.engine.recipe import Recipe

    loaded = gated_daemon.load(checkpoint, model="raw")
    os.utime(checkpoint)
    gate.stop_at(TOTAL_BYTES // 2)

    def spoil() -> None:
        gate.loader_pid()
        os.utime(checkpoint)
        gate.open()

    spoiler = threading.Thread(target=spoil)
    spoiler.start()
    options: dict[str, Any] = {"runtime_dir": str(gated_daemon.runtime_dir), "tensors": "buffers"}
    with pytest.raises(CheckpointChangedError, match=str(checkpoint)):
        attach(checkpoint, recipe=Recipe(model="raw"), **options)
    spoiler.join()
    with attach(checkpoint, recipe=Recipe(model="raw"), **options) as attachment:
        assert attachment.generation_id == loaded.id


def test_a_caller_that_leaves_a_hash_behind_takes_its_loader_along(
    gated_daemon: Any, gate: Any, checkpoint: Path, start_load: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    loaded = gated_daemon.load(checkpoint, model="raw")
    os.utime(checkpoint)
    gate.stop_at(TOTAL_BYTES // 2)
    calls = [start_load(gated_daemon, checkpoint, model="raw") for _ in range(2)]
    pid = gate.loader_pid()
    assert gated_daemon.loaders() == [pid], "two callers share one hash"
    for call in calls:
        call.call.cancel()
    wait_for(lambda: not gated_daemon.loaders(), "the hashing loader to be gone")
    gate.open()
    assert gated_daemon.load(checkpoint, model="raw").serial == loaded.serial


def test_a_load_for_which_there_is_no_memory_is_refused_before_it_reads(
    make_daemon: Callable[..., Any], gate: Any, checkpoint: Path, tested_backend: str
) -> None:
    """The gate is shut for everything behind the header: a loader that went on would never end."""
    daemon = make_daemon("--host-limit", "1M", command=gate.command())
    gate.stop_at(gate.HEADER)
    size = "16,781,312" if tested_backend == "host" else "18,874,368"  # pages, or pieces of 2 MiB
    with pytest.raises(NoMemoryError, match=f"needs {size} bytes, but of a limit of 1,048,576 bytes 0 are"):
        daemon.load(checkpoint, model="raw")
    (failed,) = daemon.generations()
    assert failed.failure.reason == pb.NO_MEMORY
    assert (daemon.device().resident_bytes, daemon.device().reserved_bytes) == (0, 0)


def test_a_failed_load_harms_no_other(
    gated_daemon: Any, gate: Any, checkpoint: Path, raw_checkpoint: Path, start_load: Callable[..., Any],
    hold: Callable[..., Any],
) -> None:  # fmt: skip
    gated_daemon.load(raw_checkpoint, model="raw")
    holder = hold(gated_daemon, raw_checkpoint, recipe={"model": "raw"})
    before, digest = gated_daemon.device(), holder.ask("digest a")
    gate.set("crash", "out of luck")
    assert start_load(gated_daemon, checkpoint, model="raw").join().error is not None
    gate.unset("crash")
    assert gated_daemon.device() == before
    assert holder.ask("digest a") == digest
    assert hold(gated_daemon, raw_checkpoint, recipe={"model": "raw"}).generation == holder.generation
