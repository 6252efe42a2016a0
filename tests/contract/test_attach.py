"""Attach over a real socket: selectors, leases that end with their stream, phases and events."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from preload.engine.client import attach
from preload.engine.errors import NotResidentError, PreloadError, RequestError, RetiringError
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

RAW = Recipe(model="raw")


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon("--drain-timeout-s", "0.2")


@pytest.fixture
def loaded(daemon: Any, raw_checkpoint: Path) -> Any:
    return daemon.load(raw_checkpoint, model="raw")


def leases(daemon: Any, generation: Any) -> list[Any]:
    return [lease for g in daemon.generations() if g.id == generation.id for lease in g.leases]


def test_an_attached_process_is_listed_with_its_pid_and_name(
    daemon: Any, loaded: Any, raw_checkpoint: Path, hold: Callable[..., Any]
) -> None:
    holder = hold(daemon, raw_checkpoint, recipe={"model": "raw"}, client="engine\n7")
    (lease,) = leases(daemon, loaded)
    assert (lease.pid, lease.client, lease.mapped) == (holder.pid, "engine?7", True)
    assert holder.generation == loaded.id


@pytest.mark.by_descriptor
def test_a_lease_ends_when_its_holder_gives_it_back(
    daemon: Any, loaded: Any, raw_checkpoint: Path, hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    holder = hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    holder.ask("close")
    wait_for(lambda: not leases(daemon, loaded), "the lease to end")
    assert holder.process.poll() is None


def test_a_lease_ends_when_its_holder_is_killed(
    daemon: Any, loaded: Any, raw_checkpoint: Path, hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    holder = hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    assert leases(daemon, loaded)
    holder.end()
    wait_for(lambda: not leases(daemon, loaded), "the lease to end")


def test_a_holder_that_forgets_to_close_still_exits(
    daemon: Any, loaded: Any, raw_checkpoint: Path, hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    holder = hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    holder.process.stdin.close()
    assert holder.process.wait(60) == 0
    wait_for(lambda: not leases(daemon, loaded), "the lease to end")


def test_two_holders_have_a_lease_each(
    daemon: Any, loaded: Any, raw_checkpoint: Path, hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    first, second = (hold(daemon, raw_checkpoint, recipe={"model": "raw"}) for _ in range(2))
    assert {lease.pid for lease in leases(daemon, loaded)} == {first.pid, second.pid}
    first.end()
    wait_for(lambda: {lease.pid for lease in leases(daemon, loaded)} == {second.pid}, "the first lease to end")


def test_a_holder_of_two_leases_gives_back_one(daemon: Any, loaded: Any, raw_checkpoint: Path) -> None:
    runtime_dir = str(daemon.runtime_dir)
    with attach(raw_checkpoint, recipe=RAW, runtime_dir=runtime_dir, tensors="buffers") as kept:
        with attach(raw_checkpoint, recipe=RAW, runtime_dir=runtime_dir, tensors="buffers") as other:
            assert kept.lease.id != other.lease.id
        assert bytes(other.tensors["b"]) == bytes(kept.tensors["b"])


@pytest.mark.parametrize("kind", ["path", "digest", "id", "prefix"])
def test_every_selector_leads_to_the_generation(daemon: Any, loaded: Any, raw_checkpoint: Path, kind: str) -> None:
    selectors: dict[str, dict[str, Any]] = {
        "path": {"checkpoint": raw_checkpoint, "recipe": RAW},
        "digest": {"checkpoint_digest": loaded.checkpoint_digest, "recipe": RAW},
        "id": {"generation_id": loaded.id},
        "prefix": {"generation_id": loaded.id[:8]},
    }
    runtime_dir = str(daemon.runtime_dir)
    with attach(runtime_dir=runtime_dir, tensors="numpy", **selectors[kind]) as attachment:
        assert attachment.generation_id == loaded.id
        assert attachment.tensors["a"].shape == (64, 16)
        stored = raw_checkpoint.read_bytes()
        assert stored.endswith(attachment.tensors["c"].tobytes())


def test_a_digest_with_another_recipe_is_not_resident(daemon: Any, loaded: Any) -> None:
    with pytest.raises(NotResidentError, match=loaded.checkpoint_digest):
        attach(checkpoint_digest=loaded.checkpoint_digest, runtime_dir=str(daemon.runtime_dir), tensors="buffers")


def test_a_short_prefix_and_an_unknown_id_are_told_apart(daemon: Any, loaded: Any) -> None:
    with pytest.raises(RequestError, match="shorter than 8"):
        attach(generation_id=loaded.id[:7], runtime_dir=str(daemon.runtime_dir), tensors="buffers")
    with pytest.raises(NotResidentError, match="no generation with id"):
        attach(generation_id="0" * 64, runtime_dir=str(daemon.runtime_dir), tensors="buffers")


def test_a_path_that_is_not_resident_names_path_and_recipe(daemon: Any, llama: Any, tmp_path: Path) -> None:
    folder = llama.folder(tmp_path / "llama")
    with pytest.raises(NotResidentError, match=f"{folder} is not resident with quantization int8_per_channel"):
        attach(
            folder,
            recipe=Recipe(quantization="int8_per_channel"),
            runtime_dir=str(daemon.runtime_dir),
            tensors="buffers",
        )


class RawStream:
    """An Attach stream whose requests the test writes itself."""

    def __init__(self, stub: Any, *requests: pb.AttachRequest) -> None:
        import queue

        self._queue: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        for request in requests:
            self._queue.put(request)
        self.call = stub.Attach(iter(self._queue.get, None))

    def half_close(self) -> None:
        self._queue.put(None)

    def refusal(self) -> Any:
        with pytest.raises(grpc.RpcError) as refused:
            next(self.call)
        self.half_close()
        return refused.value


@pytest.fixture
def stream(daemon: Any, stub_of: Callable[[Any], Any]) -> Iterator[Callable[..., RawStream]]:
    stub, streams = stub_of(daemon), []

    def start(*requests: pb.AttachRequest) -> RawStream:
        streams.append(RawStream(stub, *requests))
        return streams[-1]

    yield start
    for started in streams:
        started.half_close()
        started.call.cancel()


def opening(**fields: Any) -> pb.AttachRequest:
    return pb.AttachRequest(open=pb.AttachOpen(pid=os.getpid(), client="test", **fields))


def test_a_first_message_other_than_open_is_refused(stream: Callable[..., RawStream]) -> None:
    error = stream(pb.AttachRequest(phases=pb.PhaseReport())).refusal()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "must be `open`" in error.details()


def test_a_stream_that_ends_before_its_first_message_is_refused(stream: Callable[..., RawStream]) -> None:
    started = stream()
    started.half_close()
    assert "ended before its first request" in started.refusal().details()


def test_a_silent_stream_is_refused_after_its_deadline(
    make_daemon: Callable[..., Any], gate: Any, stub_of: Callable[[Any], Any]
) -> None:
    daemon = make_daemon(command=gate.command(open_deadline_s=0.1))
    error = RawStream(stub_of(daemon)).refusal()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no request came" in error.details()


def test_a_selector_without_a_name_is_refused(stream: Callable[..., RawStream]) -> None:
    error = stream(opening(selector=pb.Selector())).refusal()
    assert "neither a checkpoint nor a generation" in error.details()


def test_an_unknown_device_is_refused(stream: Callable[..., RawStream], loaded: Any) -> None:
    error = stream(opening(selector=pb.Selector(generation_id=loaded.id), device="GPU-0")).refusal()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "unknown device 'GPU-0'" in error.details()


def test_an_oversized_request_is_refused_and_harms_nobody(
    daemon: Any, stream: Callable[..., RawStream], loaded: Any
) -> None:
    request = opening(selector=pb.Selector(generation_id=loaded.id))
    request.open.client = "x" * (2 << 20)
    assert stream(request).refusal().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert leases(daemon, loaded) == []
    assert loaded.id in {generation.id for generation in daemon.generations()}


def test_a_stream_whose_requests_end_gives_its_lease_back(
    daemon: Any, stream: Callable[..., RawStream], loaded: Any, wait_for: Callable[..., Any]
) -> None:
    started = stream(opening(selector=pb.Selector(generation_id=loaded.id)))
    assert next(started.call).attached.generation_id == loaded.id
    started.half_close()
    assert list(started.call) == []
    wait_for(lambda: not leases(daemon, loaded), "the lease to end")


def test_the_answer_has_the_manifest_as_committed_and_every_segment(
    daemon: Any, stream: Callable[..., RawStream], loaded: Any, tested_backend: str
) -> None:
    from preload.engine.client.control import make_selector

    attached = next(stream(opening(selector=pb.Selector(generation_id=loaded.id))).call).attached
    with daemon.control() as control:
        described = control.describe(make_selector(generation_id=loaded.id))
    assert attached.manifest == described.manifest
    manifest = pb.Manifest.FromString(attached.manifest)
    assert {t.name for t in manifest.tensors} == {"a", "b", "c"}
    assert [s.size_bytes for s in attached.segments] == list(manifest.segment_bytes)
    assert {s.backend for s in attached.segments} == {tested_backend}
    assert attached.epoch == 1
    assert len(attached.ticket) == 32


def test_reported_phases_show_in_the_list(
    daemon: Any, loaded: Any, raw_checkpoint: Path, hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    hold(daemon, raw_checkpoint, recipe={"model": "raw"}).ask("phases")
    wait_for(lambda: leases(daemon, loaded)[0].phases, "the report to arrive")
    (phase,) = leases(daemon, loaded)[0].phases
    assert (phase.name, phase.start_ns, phase.end_ns) == ("warm-up", 1, 2)


def test_a_huge_report_is_cut(
    daemon: Any, stream: Callable[..., RawStream], loaded: Any, wait_for: Callable[..., Any]
) -> None:
    report = pb.PhaseReport(phases=[pb.Phase(name="x" * 1000)] * 900)
    started = stream(opening(selector=pb.Selector(generation_id=loaded.id)), pb.AttachRequest(phases=report))
    next(started.call)
    wait_for(lambda: leases(daemon, loaded)[0].phases, "the report to arrive")
    assert len(leases(daemon, loaded)[0].SerializeToString()) < 16_384


@pytest.mark.by_descriptor
def test_evicting_a_leased_generation_retires_it_until_the_lease_ends(
    daemon: Any, loaded: Any, raw_checkpoint: Path, hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    from preload.engine.client.control import make_selector

    selector = make_selector(generation_id=loaded.id)
    holder = hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    digest = holder.ask("digest a")
    before = daemon.device().resident_bytes
    with daemon.control() as control:
        assert not control.evict(selector).freed
        assert not control.evict(selector).freed, "evicting again changes nothing"
        assert control.describe(selector).generation.state == pb.GENERATION_STATE_RETIRING
        assert holder.event() == ("retiring", "")
        with pytest.raises(RetiringError, match="load it anew"):
            control.check(make_selector(raw_checkpoint, recipe=RAW))
        with pytest.raises(RetiringError):
            attach(raw_checkpoint, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers")
    assert holder.ask("digest a") == digest
    assert daemon.device().resident_bytes == before
    holder.ask("close")
    wait_for(lambda: loaded.id not in {g.id for g in daemon.generations()}, "the generation to be freed")
    assert daemon.device().resident_bytes == before - loaded.resident_bytes
    assert holder.ask("digest a") == digest, "its mapping outlives the generation"


@pytest.mark.by_descriptor
def test_a_retiring_generation_that_is_in_use_is_given_to_whoever_asks_for_it_by_id(
    daemon: Any, loaded: Any, raw_checkpoint: Path, hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    from preload.engine.client.control import make_selector

    selector = make_selector(generation_id=loaded.id)
    first = hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    digest = first.ask("digest a")
    with daemon.control() as control:
        assert not control.evict(selector).freed
        assert control.check(selector) == loaded.id
        second = hold(daemon, generation_id=loaded.id)
        assert second.ask("digest a") == digest
        first.ask("close")
        wait_for(lambda: len(leases(daemon, loaded)) == 1, "the first lease to end")
        assert control.describe(selector).generation.state == pb.GENERATION_STATE_RETIRING
        second.ask("close")
        wait_for(lambda: loaded.id not in [g.id for g in daemon.generations()], "the generation to be freed")
        with pytest.raises(NotResidentError):
            attach(generation_id=loaded.id, runtime_dir=str(daemon.runtime_dir), tensors="buffers")


def test_a_retiring_generation_does_not_stop_the_same_checkpoint_from_loading_anew(
    daemon: Any, loaded: Any, raw_checkpoint: Path, hold: Callable[..., Any]
) -> None:
    from preload.engine.client.control import make_selector

    hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    with daemon.control() as control:
        control.evict(make_selector(generation_id=loaded.id))
    again = daemon.load(raw_checkpoint, model="raw")
    assert (again.id, again.state) == (loaded.id, pb.GENERATION_STATE_READY)
    assert again.serial != loaded.serial
    assert hold(daemon, raw_checkpoint, recipe={"model": "raw"}).generation == loaded.id


@pytest.mark.by_descriptor
def test_holders_hear_that_the_daemon_drains(
    make_daemon: Callable[..., Any], raw_checkpoint: Path, hold: Callable[..., Any]
) -> None:
    daemon = make_daemon("--drain-timeout-s", "0.2")
    daemon.load(raw_checkpoint, model="raw")
    holder = hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    assert daemon.stop() == 0
    assert holder.event() == ("draining", "")
    assert holder.event() == ("lost", "")
    assert holder.ask("digest a")


class Weights:
    """Stands for what a caller has, and may lose."""


def refused(daemon: Any, checkpoint: Path, raised: list[type]) -> weakref.ref[Weights]:
    mine = Weights()
    try:
        attach(checkpoint, recipe=RAW, runtime_dir=str(daemon.runtime_dir))
    except PreloadError as error:
        raised.append(type(error))
    return weakref.ref(mine)


def test_a_refused_attach_keeps_nothing_of_its_caller(daemon: Any, raw_checkpoint: Path) -> None:
    """A caller that tries again has weights by then, which must go when it lets go of them: a lease lasts as long."""
    raised: list[type] = []
    gc.disable()
    try:
        assert refused(daemon, raw_checkpoint, raised)() is None
    finally:
        gc.enable()
    assert raised == [NotResidentError]
