"""The hand-over socket: a ticket comes in, the descriptors of its shard go out. One exchange per connection.

The kernel tells who the peer is (SO_PEERCRED); the peer cannot. A slow or silent peer costs one task and its
deadline, nothing else; one process has few of them, another user at most half, and all together not many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter

from google.protobuf.message import DecodeError

from preload.protos import weight_cache_pb2 as pb

from . import wire
from .doors import Doors, Peer, is_owner, peer_of
from .errors import BadRequestError, CacheError, NotAllowedError, TooManyError
from .leases import LeaseBook
from .segments import descriptors

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1024
_DEADLINE_S = 5.0
_MAX_PEERS = 256
_MAX_PER_PROCESS = 64
_BACKLOG = 128


class Handover:
    """Owns the listening SOCK_SEQPACKET socket at `path`."""

    def __init__(self, path: str, leases: LeaseBook, doors: Doors) -> None:
        self._path = path
        self._leases = leases
        self._doors = doors
        self._peers: set[asyncio.Task[None]] = set()
        self._per_process: Counter[int] = Counter()
        self._per_user: Counter[int] = Counter()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(path)
        os.chmod(path, 0o600)
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)

    async def serve(self) -> None:
        """Accepts until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # out of descriptors, or a peer that left again: go on with the next
                log.warning("hand-over: cannot accept: %s", error)
                await asyncio.sleep(0.1)
                continue
            self._receive(peer)

    def close(self) -> None:
        for task in self._peers:
            task.cancel()
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _receive(self, sock: socket.socket) -> None:
        """Starts the exchange with a peer, or tells it that there are too many."""
        sock.setblocking(False)
        try:
            peer = peer_of(sock)
            self._admit(peer)
        except CacheError as error:
            _stop_reading(sock)
            _refuse(sock, error)
            sock.close()
        except OSError as error:
            log.warning("hand-over: a peer left: %s", error)
            sock.close()
        else:
            self._count(peer, 1)
            task = asyncio.create_task(self._serve_peer(sock, peer))
            self._peers.add(task)
            task.add_done_callback(self._peers.discard)

    def _admit(self, peer: Peer) -> None:
        if not self._doors.admits(peer):
            raise NotAllowedError(
                f"user {peer.uid} (process {peer.pid}) may not map weights; "
                "allow it with --allow-uids or --allow-gids",
                {"uid": str(peer.uid)},
            )
        if self._per_process[peer.pid] >= _MAX_PER_PROCESS:
            raise TooManyError(f"process {peer.pid} has {_MAX_PER_PROCESS} hand-overs open; finish one first")
        if not is_owner(peer.uid) and (count := self._per_user[peer.uid]) >= _MAX_PEERS // 2:
            raise TooManyError(f"user {peer.uid} has {count} hand-overs open; finish one first")
        if len(self._peers) >= _MAX_PEERS:
            raise TooManyError(f"{_MAX_PEERS} hand-overs are open; try again")

    def _count(self, peer: Peer, change: int) -> None:
        for counter, key in ((self._per_process, peer.pid), (self._per_user, peer.uid)):
            if counter is self._per_process and not peer.pid:
                continue  # many processes, of whom only the user is known
            counter[key] += change
            if not counter[key]:
                del counter[key]

    async def _serve_peer(self, sock: socket.socket, peer: Peer) -> None:
        with sock:
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    # One byte more than allowed shows a longer packet, which the kernel would cut silently.
                    data = await asyncio.get_running_loop().sock_recv(sock, MAX_REQUEST_BYTES + 1)
                if data:
                    self._answer(sock, data, peer)
            except TimeoutError:
                log.warning("hand-over: a peer was silent for %.0f s", _DEADLINE_S)
            except OSError as error:
                log.warning("hand-over: a peer left: %s", error)
            finally:
                self._count(peer, -1)

    def _answer(self, sock: socket.socket, data: bytes, peer: Peer) -> None:
        try:
            fds = self._redeem(data, peer)
        except CacheError as error:
            _refuse(sock, error)
            return
        answer = pb.HandoverResponse(num_segments=len(fds))
        # A shard without bytes has no segment; an empty packet would read as the end.
        socket.send_fds(sock, [answer.SerializeToString() or b"\x08\x00"], fds)

    def _redeem(self, data: bytes, peer: Peer) -> list[int]:
        if len(data) > MAX_REQUEST_BYTES:
            raise BadRequestError(f"a hand-over request has at most {MAX_REQUEST_BYTES} bytes")
        try:
            request = pb.HandoverRequest.FromString(data)
        except DecodeError as error:
            raise BadRequestError(f"not a hand-over request: {error}") from error
        lease = self._leases.redeem(request.ticket, peer.uid)
        return descriptors(lease.generation.segments)


def _stop_reading(sock: socket.socket) -> None:
    """Whoever is refused before it was read must still get its answer: the kernel resets a connection that is closed
    with a packet unread, and the reset outruns what was sent."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)
        while sock.recv(1):
            pass


def _refuse(sock: socket.socket, error: CacheError) -> None:
    log.warning("hand-over refused: %s", error.message)
    with contextlib.suppress(OSError):
        sock.send(pb.HandoverResponse(error=wire.error_info(error)).SerializeToString())
