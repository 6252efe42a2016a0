"""The hand-over socket: tickets, packets and peers, good and bad."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preload.engine.recipe import Recipe
from preload.protos import weight_cache_pb2 as pb

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon("--ticket-ttl-s", "30")


@pytest.fixture
def open_lease(stub_of: Callable[[Any], Any], raw_checkpoint: Path) -> Iterator[Callable[[Any], Any]]:
    """A lease whose ticket nobody has redeemed: the Attach call, and what it was told."""
    import queue

    opened = []

    def start(daemon: Any) -> tuple[Any, pb.Attached]:
        daemon.load(raw_checkpoint, model="raw")
        requests: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        selector = pb.Selector(checkpoint_path=str(raw_checkpoint), recipe=Recipe(model="raw").to_proto())
        requests.put(pb.AttachRequest(open=pb.AttachOpen(selector=selector, pid=os.getpid(), client="test")))
        call = stub_of(daemon).Attach(iter(requests.get, None))
        opened.append((requests, call))
        return call, next(call).attached

    yield start
    for requests, call in opened:
        requests.put(None)
        call.cancel()


def present(daemon: Any, packet: bytes) -> tuple[pb.HandoverResponse, list[int]]:
    """One exchange: what came back for a packet. The descriptors are closed already."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(str(daemon.runtime_dir / "segments.sock"))
        sock.send(packet)
        data, fds, _, _ = socket.recv_fds(sock, 65536, 253)
    sizes = [os.fstat(fd).st_size for fd in fds]
    for fd in fds:
        os.close(fd)
    return pb.HandoverResponse.FromString(data), sizes


def ticket_packet(ticket: bytes) -> bytes:
    return pb.HandoverRequest(ticket=ticket).SerializeToString()


@pytest.mark.by_descriptor
def test_a_ticket_gives_every_segment_once(daemon: Any, open_lease: Callable[[Any], Any]) -> None:
    _, attached = open_lease(daemon)
    answer, sizes = present(daemon, ticket_packet(attached.ticket))
    assert sizes == [segment.size_bytes for segment in attached.segments]
    assert answer.num_segments == len(sizes)
    again, nothing = present(daemon, ticket_packet(attached.ticket))
    assert again.error.reason == pb.BAD_TICKET
    assert nothing == []


@pytest.mark.host_only
def test_the_descriptors_cannot_be_written_or_resized(daemon: Any, open_lease: Callable[[Any], Any]) -> None:
    import mmap

    from preload.engine.client.mapping import fetch_descriptors

    _, attached = open_lease(daemon)
    (fd,) = fetch_descriptors(attached.handover_socket, attached.ticket, DEADLINE_S)
    try:
        for attempt in (
            lambda: os.pwrite(fd, b"x", 0),
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, 1 << 20),
            lambda: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
            lambda: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 0),
        ):
            with pytest.raises(PermissionError):
                attempt()
    finally:
        os.close(fd)


@pytest.mark.parametrize("ticket", [b"", b"x", bytes(32)])
def test_a_ticket_that_was_never_given_is_refused(daemon: Any, ticket: bytes) -> None:
    answer, sizes = present(daemon, ticket_packet(ticket) or b"\x0a\x00")
    assert answer.error.reason == pb.BAD_TICKET
    assert "attach again" in answer.error.message
    assert sizes == []


def test_a_packet_that_is_no_request_is_refused(daemon: Any) -> None:
    answer, sizes = present(daemon, b"\xff" * 64)
    assert answer.error.reason == pb.BAD_REQUEST
    assert sizes == []


@pytest.mark.by_descriptor
def test_a_packet_that_is_too_large_is_refused(daemon: Any, open_lease: Callable[[Any], Any]) -> None:
    """Also when it begins with a good ticket, which stays good."""
    _, attached = open_lease(daemon)
    packet = ticket_packet(attached.ticket)
    answer, sizes = present(daemon, packet + b"\x7a\xf0\x07" + bytes(1008))
    assert answer.error.reason == pb.BAD_REQUEST
    assert "at most 1024 bytes" in answer.error.message
    assert sizes == []
    assert present(daemon, packet)[1]


@pytest.mark.by_descriptor
def test_silent_and_vanishing_peers_block_nobody(
    make_daemon: Callable[..., Any], gate: Any, open_lease: Callable[[Any], Any]
) -> None:
    daemon = make_daemon(command=gate.command(handover_deadline_s=0.2))
    silent = []
    for index in range(20):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(DEADLINE_S)
        peer.connect(str(daemon.runtime_dir / "segments.sock"))
        if index % 2:
            silent.append(peer)
        else:
            peer.close()
    _, attached = open_lease(daemon)
    assert present(daemon, ticket_packet(attached.ticket))[1]
    for peer in silent:
        assert peer.recv(1) == b"", "the daemon hangs up on a peer that says nothing"
        peer.close()


def test_the_ticket_of_an_ended_lease_is_refused(
    daemon: Any, open_lease: Callable[[Any], Any], wait_for: Callable[..., Any]
) -> None:
    call, attached = open_lease(daemon)
    call.cancel()
    wait_for(lambda: not any(g.leases for g in daemon.generations()), "the lease to end")
    assert present(daemon, ticket_packet(attached.ticket))[0].error.reason == pb.BAD_TICKET


@pytest.mark.by_descriptor
def test_an_expired_ticket_is_refused_and_its_lease_lives_on(
    make_daemon: Callable[..., Any], open_lease: Callable[[Any], Any]
) -> None:
    daemon = make_daemon("--ticket-ttl-s", "0")
    _, attached = open_lease(daemon)
    answer, _ = present(daemon, ticket_packet(attached.ticket))
    assert answer.error.reason == pb.BAD_TICKET
    assert [lease.mapped for g in daemon.generations() for lease in g.leases] == [False]


AS_NOBODY = """
import contextlib, os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
with contextlib.suppress(BrokenPipeError):
    sock.send(bytes.fromhex(sys.argv[2]))
print("sent", flush=True)
data, fds, _, _ = socket.recv_fds(sock, 65536, 253)
print(data.hex(), len(fds))
"""


@pytest.mark.by_descriptor
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("is_allowed", [False, True])
def test_another_user_gets_descriptors_only_if_allowed(
    make_daemon: Callable[..., Any], open_lease: Callable[[Any], Any], is_allowed: bool
) -> None:
    daemon = make_daemon(*(["--allow-uids", "65534"] if is_allowed else []))
    _, attached = open_lease(daemon)
    socket_path = daemon.runtime_dir / "segments.sock"
    socket_path.chmod(0o666)
    for folder in [daemon.runtime_dir, *daemon.runtime_dir.parents]:
        if folder.owner() == "root" and folder != Path("/") and folder != Path("/tmp"):
            folder.chmod(0o755)
    words = [sys.executable, "-S", "-c", AS_NOBODY, str(socket_path), ticket_packet(attached.ticket).hex()]
    daemon.process.send_signal(signal.SIGSTOP)  # it finds the ticket sent already, the moment it accepts
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as nobody:
        assert nobody.stdout is not None
        assert nobody.stdout.readline() == "sent\n"
        daemon.process.send_signal(signal.SIGCONT)
        found = nobody.communicate(timeout=DEADLINE_S)[0].split()
    assert nobody.returncode == 0
    answer = pb.HandoverResponse.FromString(bytes.fromhex(found[0]))
    if is_allowed:
        assert (answer.num_segments, int(found[1])) == (1, 1)
    else:
        assert answer.error.reason == pb.NOT_ALLOWED
        assert "user 65534" in answer.error.message
        assert "--allow-uids" in answer.error.message
        assert int(found[1]) == 0
        assert present(daemon, ticket_packet(attached.ticket))[1], "the ticket is not spent"


def test_sockets_and_folder_belong_to_the_owner_alone(daemon: Any) -> None:
    assert daemon.runtime_dir.stat().st_mode & 0o777 == 0o700
    for name in ("daemon.sock", "segments.sock"):
        assert (daemon.runtime_dir / name).stat().st_mode & 0o777 == 0o600, name
