"""Load over a real socket: progress, idempotency, shared loaders and cancellation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon()


def num_loaders_started(daemon: Any) -> int:
    """Loaders report their phases: each generation made by one has them, so serials count loads that began."""
    return max((generation.serial for generation in daemon.generations()), default=0)


def test_progress_grows_and_the_last_event_is_the_loaded_generation(
    daemon: Any, sparse_checkpoint: Callable[..., Path]
) -> None:
    path = sparse_checkpoint(8, 16 << 20)
    with daemon.control() as control:
        *progress, last = control.load(path, Recipe(model="raw"), timeout_s=60)
    assert all(event.WhichOneof("event") == "progress" for event in progress)
    done = [event.progress.done_bytes for event in progress]
    assert done == sorted(done)
    assert done[-1] == progress[-1].progress.total_bytes == 128 << 20
    assert last.WhichOneof("event") == "loaded"
    assert last.loaded.state == pb.GENERATION_STATE_READY
    assert last.loaded.checkpoint_paths == [str(path)]
    assert last.loaded.num_tensors == 8
    assert len(last.loaded.id) == 64
    assert daemon.device().resident_bytes >= last.loaded.resident_bytes >= 128 << 20


def test_a_second_load_answers_without_a_loader(daemon: Any, raw_checkpoint: Path) -> None:
    first = daemon.load(raw_checkpoint, model="raw")
    serial = num_loaders_started(daemon)
    log = daemon.log
    resident_bytes = daemon.device().resident_bytes
    with daemon.control() as control:
        events = list(control.load(raw_checkpoint, Recipe(model="raw"), timeout_s=60))
    assert [event.WhichOneof("event") for event in events] == ["loaded"]
    assert events[0].loaded.id == first.id
    assert num_loaders_started(daemon) == serial
    assert daemon.device().resident_bytes == resident_bytes
    assert daemon.log == log, "neither a loader nor a re-hash leaves a line"


def test_two_loads_at_once_share_one_loader(
    gated_daemon: Any, gate: Any, raw_checkpoint: Path, start_load: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    gate.stop_at(gate.HEADER)
    calls = [start_load(gated_daemon, raw_checkpoint, model="raw") for _ in range(2)]
    pid = gate.loader_pid()
    wait_for(lambda: all(call.progress for call in calls), "both callers to hear of the load")
    assert gated_daemon.loaders() == [pid]
    assert [g.state for g in gated_daemon.generations()] == [pb.GENERATION_STATE_LOADING]
    gate.open()
    ids = {call.join().loaded.id for call in calls}
    assert len(ids) == 1
    assert len(gated_daemon.generations()) == 1


def test_two_recipes_of_one_checkpoint_are_two_generations(
    daemon: Any, llama: Any, tmp_path: Path, tested_backend: str
) -> None:
    folder = llama.folder(tmp_path / "llama")
    before = daemon.device().resident_bytes
    kept = daemon.load(folder)
    int8 = daemon.load(folder, quantization="int8_per_channel")
    assert kept.id != int8.id
    assert kept.checkpoint_digest == int8.checkpoint_digest
    assert int8.resident_bytes < kept.resident_bytes or tested_backend != "host"  # granularity may make them equal
    assert daemon.device().resident_bytes == before + kept.resident_bytes + int8.resident_bytes


def test_a_load_that_its_only_caller_cancels_leaves_nothing_but_the_reason(
    gated_daemon: Any, gate: Any, raw_checkpoint: Path, start_load: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    gate.stop_at(gate.HEADER)
    call = start_load(gated_daemon, raw_checkpoint, model="raw")
    gate.loader_pid()
    assert gated_daemon.device().reserved_bytes > 0
    call.call.cancel()
    wait_for(lambda: not gated_daemon.loaders(), "the loader to be gone")
    wait_for(lambda: gated_daemon.device().reserved_bytes == 0, "the memory to be back")
    (failed,) = gated_daemon.generations()
    assert failed.state == pb.GENERATION_STATE_FAILED
    assert failed.failure.reason == pb.EVICTED
    assert "cancelled by its last caller" in failed.failure.message
    assert str(raw_checkpoint) in failed.failure.message
    assert call.join().error.code() is grpc.StatusCode.CANCELLED
    gate.open()
    assert gated_daemon.load(raw_checkpoint, model="raw").state == pb.GENERATION_STATE_READY
    assert [g.state for g in gated_daemon.generations()] == [pb.GENERATION_STATE_READY]


def test_one_of_two_callers_cancels_and_the_other_gets_its_generation(
    gated_daemon: Any, gate: Any, raw_checkpoint: Path, start_load: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    gate.stop_at(gate.HEADER)
    leaving, staying = (start_load(gated_daemon, raw_checkpoint, model="raw") for _ in range(2))
    wait_for(lambda: leaving.progress and staying.progress, "both callers to hear of the load")
    leaving.call.cancel()
    assert leaving.join().error is not None
    gate.open()
    assert staying.join().loaded.state == pb.GENERATION_STATE_READY


def test_a_caller_that_comes_back_after_its_load_was_cancelled_gets_a_new_load(
    gated_daemon: Any, gate: Any, raw_checkpoint: Path, start_load: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    """The first load is still being taken down when the second caller asks."""
    gate.stop_at(gate.HEADER)
    first = start_load(gated_daemon, raw_checkpoint, model="raw")
    gate.loader_pid()
    gate.open()
    first.call.cancel()
    second = start_load(gated_daemon, raw_checkpoint, model="raw").join()
    assert second.error is None, second.error
    assert second.loaded.state == pb.GENERATION_STATE_READY


def test_a_loading_generation_is_listed_with_its_progress(
    gated_daemon: Any, gate: Any, sparse_checkpoint: Callable[..., Path], start_load: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> None:  # fmt: skip
    gate.stop_at(32 << 20)
    call = start_load(gated_daemon, sparse_checkpoint(64, 1 << 20), model="raw")
    gate.loader_pid()

    def is_half_way() -> bool:
        (listed,) = gated_daemon.generations()
        return (
            listed.state == pb.GENERATION_STATE_LOADING
            and listed.progress.phase == "read"
            and 24 << 20 <= listed.progress.done_bytes <= 32 << 20
            and listed.progress.total_bytes == 64 << 20
        )

    wait_for(is_half_way, "List to show a load half way")
    gate.open()
    assert call.join().loaded.load_phases


def test_evicting_a_load_under_way_tells_its_callers(
    gated_daemon: Any, gate: Any, raw_checkpoint: Path, start_load: Callable[..., Any]
) -> None:
    from preload.engine.client.control import make_selector

    gate.stop_at(gate.HEADER)
    call = start_load(gated_daemon, raw_checkpoint, model="raw")
    gate.loader_pid()
    with gated_daemon.control() as control:
        answer = control.evict(make_selector(raw_checkpoint, recipe=Recipe(model="raw")))
    assert answer.freed
    assert call.join().error.code() is grpc.StatusCode.ABORTED
    assert "was evicted" in call.error.details()
    assert gated_daemon.generations() == []
    assert gated_daemon.loaders() == []
    assert gated_daemon.device().reserved_bytes == 0


def test_the_loaded_generation_is_the_good_one_after_a_failed_reload(daemon: Any, raw_checkpoint: Path) -> None:
    """Between the two good loads the file was bad: its failure must not be taken for the answer."""
    from preload.engine.errors import CheckpointError

    good = raw_checkpoint.read_bytes()
    first = daemon.load(raw_checkpoint, model="raw")
    raw_checkpoint.write_bytes(good + b"trailing")
    with pytest.raises(CheckpointError):
        daemon.load(raw_checkpoint, model="raw")
    raw_checkpoint.write_bytes(good)
    again = daemon.load(raw_checkpoint, model="raw")
    assert (again.id, again.state) == (first.id, pb.GENERATION_STATE_READY)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("relative/path", "is not absolute"),
        ("/with/a\0zero", "is not absolute"),
        ("/" + "long/" * 2000, "4,096"),
    ],
)
def test_an_impossible_path_is_refused(daemon: Any, stub_of: Callable[[Any], Any], path: str, what: str) -> None:
    request = pb.LoadRequest(checkpoint_path=path, recipe=Recipe().to_proto())
    with pytest.raises(grpc.RpcError) as refusal:
        list(stub_of(daemon).Load(request, timeout=60))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert what in refusal.value.details()


def test_an_oversized_recipe_is_refused(daemon: Any, stub_of: Callable[[Any], Any], raw_checkpoint: Path) -> None:
    """The loader's packets have at most 64 KiB; what the client sends may be larger."""
    overrides = '{"rope_theta":' + "1" * 500_000 + "}"
    recipe = pb.Recipe(model="raw", config_overrides=overrides, layout_version=1)
    with pytest.raises(grpc.RpcError) as refusal:
        list(stub_of(daemon).Load(pb.LoadRequest(checkpoint_path=str(raw_checkpoint), recipe=recipe), timeout=60))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert daemon.loaders() == []


def test_an_unknown_device_is_refused(daemon: Any, stub_of: Callable[[Any], Any], raw_checkpoint: Path) -> None:
    request = pb.LoadRequest(
        checkpoint_path=str(raw_checkpoint), recipe=Recipe(model="raw").to_proto(), device="GPU-123"
    )
    with pytest.raises(grpc.RpcError, match="unknown device 'GPU-123'") as refusal:
        list(stub_of(daemon).Load(request, timeout=60))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_load_for_one_of_two_ranks_is_refused(
    daemon: Any, stub_of: Callable[[Any], Any], raw_checkpoint: Path
) -> None:
    recipe = Recipe(model="raw").to_proto()
    for rank, what in ((pb.Rank(tp_rank=2, tp_size=2), "not below"), (pb.Rank(tp_size=2), "not supported")):
        with pytest.raises(grpc.RpcError, match=what) as refusal:
            list(
                stub_of(daemon).Load(
                    pb.LoadRequest(checkpoint_path=str(raw_checkpoint), recipe=recipe, rank=rank), timeout=60
                )
            )
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
