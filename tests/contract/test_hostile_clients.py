"""Clients that mean no good: rpcs that are none, nonsense in place of messages, leases that are others'."""

from __future__ import annotations

import os
import queue
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from preload.engine.client import attach
from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

RAW = Recipe(model="raw")


def rpc(path: bytes) -> bytes:
    """A whole HTTP/2 client that makes one call, in one write."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload

    pairs = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"), (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]  # fmt: skip
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    return preface + frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))


def test_an_rpc_that_is_none_is_refused_and_ends_nobody(daemon: Any, raw_checkpoint: Path) -> None:
    """Also when its name is no text, which grpc.aio itself does not survive. Others keep their leases."""
    loaded = daemon.load(raw_checkpoint, model="raw")
    with attach(generation_id=loaded.id, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
        with grpc.insecure_channel(f"unix:{daemon.runtime_dir / 'daemon.sock'}") as channel:
            call = channel.unary_unary("/preload.weight_cache.v1.WeightCache/Nothing")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "no such method" in refused.value.details()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.runtime_dir / "daemon.sock"))
            sock.sendall(rpc(b"/preload.weight_cach\xe5.v1.WeightCache/Evict"))
            sock.settimeout(60)
            answer = b""
            while b"grpc-status" not in answer:
                piece = sock.recv(65536)
                assert piece, "the daemon hung up"
                answer += piece
        assert [lease.id for g in daemon.generations() for lease in g.leases] == [attachment.lease.id]


@pytest.mark.parametrize("method", ["Load", "Attach", "List", "Describe", "Evict", "Verify", "Check"])
def test_a_message_that_is_none_is_a_bad_request(daemon: Any, method: str) -> None:
    with grpc.insecure_channel(f"unix:{daemon.runtime_dir / 'daemon.sock'}") as channel:
        name = f"/preload.weight_cache.v1.WeightCache/{method}"
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream(name)(iter([b"\xff" * 9]), timeout=60))  # on the wire all four kinds are alike
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a message of this contract" in refused.value.details()
    assert "Traceback" not in daemon.log


def test_nonsense_after_the_first_message_of_an_attach_is_refused_and_ends_that_lease(
    daemon: Any, raw_checkpoint: Path, wait_for: Callable[..., Any]
) -> None:
    loaded = daemon.load(raw_checkpoint, model="raw")
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    opening = pb.AttachOpen(selector=pb.Selector(generation_id=loaded.id), pid=1, client="x")
    requests.put(pb.AttachRequest(open=opening).SerializeToString())
    with grpc.insecure_channel(f"unix:{daemon.runtime_dir / 'daemon.sock'}") as channel:
        call = channel.stream_stream("/preload.weight_cache.v1.WeightCache/Attach")(iter(requests.get, None))
        assert pb.AttachEvent.FromString(next(call)).attached.generation_id == loaded.id
        requests.put(b"\xff" * 9)
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
        requests.put(None)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    wait_for(lambda: not any(g.leases for g in daemon.generations()), "the lease to end")
    assert "Traceback" not in daemon.log


def test_nobody_takes_a_lease_that_has_its_holder_by_its_secret(daemon: Any, raw_checkpoint: Path) -> None:
    """Not even who got hold of the secret: it takes only a lease whose holder has not come back."""
    from preload.engine.client.lease import Lease

    loaded = daemon.load(raw_checkpoint, model="raw")
    with attach(generation_id=loaded.id, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
        opening = pb.AttachOpen(
            selector=pb.Selector(generation_id=loaded.id),
            pid=os.getpid(),
            client="thief",
            reclaim_secret=attachment.lease.attached.reclaim_secret,
        )
        thief = Lease(str(daemon.runtime_dir), opening, 60.0)
        assert thief.id != attachment.lease.id
        thief.close()
        assert attachment.lease.id in {lease.id for g in daemon.generations() for lease in g.leases}


def test_phases_are_reported_for_ones_own_lease_only(
    daemon: Any, raw_checkpoint: Path, hold: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    daemon.load(raw_checkpoint, model="raw")
    first, second = (
        hold(daemon, raw_checkpoint, recipe={"model": "raw"}),
        hold(daemon, raw_checkpoint, recipe={"model": "raw"}),
    )
    assert first.ask("phases")

    def phases() -> dict[int, list[str]]:
        return {lease.pid: [p.name for p in lease.phases] for g in daemon.generations() for lease in g.leases}

    wait_for(lambda: phases() == {first.pid: ["warm-up"], second.pid: []}, "the phases of one lease")


def test_no_secret_and_no_ticket_is_in_the_log_at_any_level(
    make_daemon: Callable[..., Any], raw_checkpoint: Path
) -> None:
    daemon = make_daemon("--verbose")
    loaded = daemon.load(raw_checkpoint, model="raw")
    with attach(generation_id=loaded.id, runtime_dir=str(daemon.runtime_dir), tensors="buffers") as attachment:
        attached = attachment.lease.attached
        secrets = [attached.ticket, attached.reclaim_secret, *(s.handle for s in attached.segments if s.handle)]
        for _ in range(2):  # the ticket of memory that has no descriptors is not spent yet
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(str(daemon.runtime_dir / "segments.sock"))
                sock.send(pb.HandoverRequest(ticket=secrets[0]).SerializeToString())
                answer = pb.HandoverResponse.FromString(sock.recv(65536))
        assert answer.error.reason == pb.BAD_TICKET
        with daemon.control() as control:
            answers = [str(control.list()), str(control.describe(pb.Selector(generation_id=loaded.id)))]
    log = daemon.log
    assert "hand-over refused" in log
    for secret in secrets:
        for form in (secret.hex(), repr(secret)[2:-1], str(pb.HandoverRequest(ticket=secret))[9:-2]):
            assert form not in log
            assert not any(form in answer for answer in answers), "and nobody is told by another rpc"


def test_nothing_in_the_runtime_folder_is_for_others(
    daemon: Any, raw_checkpoint: Path, llama: Any, tmp_path: Path
) -> None:
    daemon.load(raw_checkpoint, model="raw")
    daemon.load(llama.folder(tmp_path / "llama"))
    log = daemon.runtime_dir / "daemon.log"  # the test's own
    found = [daemon.runtime_dir, *daemon.runtime_dir.rglob("*")]
    assert len(found) > 5
    assert {
        str(path): oct(path.lstat().st_mode) for path in found if path != log and path.lstat().st_mode & 0o077
    } == {}
