"""List, Describe, Evict, Verify and Check over a real socket; Verify by a loader that lied at its commit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client import attach
from preload.engine.client.control import make_selector
from preload.engine.errors import (
    CheckpointNotFoundError,
    CorruptedError,
    LoadFailedError,
    NotResidentError,
    RequestError,
)
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

RAW = Recipe(model="raw")


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon("--host-limit", "1G")


@pytest.mark.host_only
def test_list_tells_of_the_daemon_and_its_device(daemon: Any, raw_checkpoint: Path) -> None:
    daemon.load(raw_checkpoint, model="raw")
    with daemon.control() as control:
        listed = control.list()
    assert listed.pid == daemon.pid
    assert listed.epoch == 1
    assert listed.version
    assert listed.http_address.startswith("127.0.0.1:")
    (device,) = listed.devices
    assert (device.name, device.capacity_bytes, device.reserved_bytes) == ("host", 1 << 30, 0)
    assert device.resident_bytes == sum(g.resident_bytes for g in listed.generations)


def test_describe_has_manifest_leases_and_receipts(
    daemon: Any, raw_checkpoint: Path, hold: Callable[..., Any]
) -> None:
    loaded = daemon.load(raw_checkpoint, model="raw")
    hold(daemon, raw_checkpoint, recipe={"model": "raw"})
    with daemon.control() as control:
        described = control.describe(make_selector(raw_checkpoint, recipe=RAW))
    assert described.generation.id == loaded.id
    assert len(described.generation.leases) == 1
    manifest = pb.Manifest.FromString(described.manifest)
    assert manifest.checkpoint_digest == loaded.checkpoint_digest
    (receipt,) = described.receipts
    seen = os.stat(raw_checkpoint)
    assert receipt.path == str(raw_checkpoint)
    assert (receipt.device, receipt.inode, receipt.size_bytes) == (seen.st_dev, seen.st_ino, seen.st_size)
    assert (receipt.mtime_ns, receipt.ctime_ns) == (seen.st_mtime_ns, seen.st_ctime_ns)
    assert len(receipt.content_digest) == 32


def test_describe_names_what_is_not_known(daemon: Any, tmp_path: Path) -> None:
    with daemon.control() as control:
        with pytest.raises(NotResidentError, match=str(tmp_path)):
            control.describe(make_selector(tmp_path))
        with pytest.raises(RequestError, match="neither a checkpoint nor a generation"):
            control.describe(pb.Selector())
        with pytest.raises(RequestError, match="not absolute"):
            control.describe(pb.Selector(checkpoint_path="model"))


def test_a_prefix_too_short_to_be_unique_is_refused(daemon: Any, raw_checkpoint: Path) -> None:
    loaded = daemon.load(raw_checkpoint, model="raw")
    with daemon.control() as control:
        for length in (0, 1, 7):
            with pytest.raises(RequestError, match=r"shorter than 8|neither"):
                control.evict(make_selector(generation_id=loaded.id[:length]))
        assert control.describe(make_selector(generation_id=loaded.id[:8])).generation.id == loaded.id


def test_evicting_what_nobody_uses_frees_it_at_once(daemon: Any, raw_checkpoint: Path) -> None:
    before = daemon.device().resident_bytes
    loaded = daemon.load(raw_checkpoint, model="raw")
    with daemon.control() as control:
        answer = control.evict(make_selector(generation_id=loaded.id[:12]))
        assert answer.freed
        assert answer.generation.id == loaded.id
        with pytest.raises(NotResidentError):
            control.evict(make_selector(generation_id=loaded.id))
    assert daemon.device().resident_bytes == before


def test_evicting_a_failure_forgets_it(daemon: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"nonsense")
    from preload.engine.errors import CheckpointError

    with pytest.raises(CheckpointError):
        daemon.load(path, model="raw")
    selector = make_selector(path, recipe=RAW)
    with daemon.control() as control:
        assert control.describe(selector).generation.state == pb.GENERATION_STATE_FAILED
        assert control.evict(selector).freed
        with pytest.raises(NotResidentError):
            control.describe(selector)


def test_verify_re_hashes_every_byte(daemon: Any, sparse_checkpoint: Callable[..., Path]) -> None:
    loaded = daemon.load(sparse_checkpoint(4, 8 << 20), model="raw")
    with daemon.control() as control:
        *progress, last = control.verify(make_selector(generation_id=loaded.id), timeout_s=60)
        assert last.verified.generation_id == loaded.id
        assert (last.verified.num_tensors, last.verified.num_bytes) == (4, 32 << 20)
        done = [event.progress.done_bytes for event in progress]
        assert done == sorted(done)
        assert done[-1] == 32 << 20
    assert not any(g.leases for g in daemon.generations()), "its own lease is back"


def test_a_mismatch_fails_the_generation_and_nobody_attaches_to_it(
    gated_daemon: Any, gate: Any, raw_checkpoint: Path, hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    gate.set("lie")
    loaded = gated_daemon.load(raw_checkpoint, model="raw")
    holder = hold(gated_daemon, raw_checkpoint, recipe={"model": "raw"})
    selector = make_selector(raw_checkpoint, recipe=RAW)
    with gated_daemon.control() as control:
        with pytest.raises(CorruptedError, match=f"generation {loaded.id[:12]}: .* in a$") as corrupted:
            list(control.verify(selector, timeout_s=60))
        assert corrupted.value.fields["tensors"] == "a"
        assert holder.event() == ("retiring", "")
        (failed,) = control.list().generations
        assert failed.state == pb.GENERATION_STATE_FAILED
        assert failed.failure.reason == pb.CORRUPTED
        assert gated_daemon.device().resident_bytes == loaded.resident_bytes, "its holder still maps it"
        holder.end()
        wait_for(lambda: gated_daemon.device().resident_bytes == 0, "its memory to be free")
        for refused in (lambda: control.check(selector), lambda: attach_by(gated_daemon, raw_checkpoint)):
            with pytest.raises(LoadFailedError, match="differ from the manifest"):
                refused()
    gate.unset("lie")
    assert gated_daemon.load(raw_checkpoint, model="raw").state == pb.GENERATION_STATE_READY
    assert attach_by(gated_daemon, raw_checkpoint) == loaded.id


def attach_by(daemon: Any, path: Path) -> str:
    with attach(path, recipe=RAW, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
        return attachment.generation_id


def test_a_ticket_of_a_generation_that_proved_corrupted_is_refused(
    gated_daemon: Any, gate: Any, raw_checkpoint: Path, stub_of: Callable[[Any], Any]
) -> None:
    import queue

    from preload.engine.client.mapping import fetch_descriptors
    from preload.engine.errors import BadTicketError

    gate.set("lie")
    loaded = gated_daemon.load(raw_checkpoint, model="raw")
    requests: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
    requests.put(pb.AttachRequest(open=pb.AttachOpen(selector=pb.Selector(generation_id=loaded.id))))
    call = stub_of(gated_daemon).Attach(iter(requests.get, None))
    attached = next(call).attached
    with gated_daemon.control() as control, pytest.raises(CorruptedError):
        list(control.verify(make_selector(generation_id=loaded.id), timeout_s=60))
    with pytest.raises(BadTicketError):
        fetch_descriptors(attached.handover_socket, attached.ticket, 60)
    requests.put(None)
    call.cancel()


def test_check_answers_with_the_id_and_takes_no_lease(daemon: Any, raw_checkpoint: Path) -> None:
    loaded = daemon.load(raw_checkpoint, model="raw")
    with daemon.control() as control:
        assert control.check(make_selector(raw_checkpoint, recipe=RAW)) == loaded.id
        after = control.describe(make_selector(generation_id=loaded.id)).generation
    assert after.num_attaches == loaded.num_attaches
    assert after.leases == []


def test_check_of_an_unknown_device_says_so(daemon: Any, raw_checkpoint: Path, stub_of: Callable[[Any], Any]) -> None:
    loaded = daemon.load(raw_checkpoint, model="raw")
    selector = pb.Selector(generation_id=loaded.id)
    answer = stub_of(daemon).Check(pb.CheckRequest(selector=selector, device="GPU-0"), timeout=60)
    assert (answer.ok, answer.failure.reason) == (False, pb.BAD_REQUEST)


def test_a_long_message_in_another_script_still_comes_as_a_typed_error(daemon: Any, tmp_path: Path) -> None:
    """Headers are bounded, and bytes beyond ASCII grow in them."""
    path = tmp_path / "/".join(["権" * 80] * 14)
    with daemon.control() as control:
        with pytest.raises(CheckpointNotFoundError, match="権"):
            list(control.load(path, RAW, timeout_s=60))
        with pytest.raises(CheckpointNotFoundError, match="権"):
            control.check(make_selector(path, recipe=RAW))
