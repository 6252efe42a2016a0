"""The hand-over socket: a ticket comes in, the descriptors of its shard go out. One exchange per connection.

The kernel tells who the peer is (SO_PEERCRED); the peer cannot. A slow or silent peer costs one task and its
deadline, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct

from google.protobuf.message import DecodeError

from preload.protos import weight_cache_pb2 as pb

from . import wire
from .errors import BadRequestError, CacheError, NotAllowedError
from .leases import LeaseBook

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1024
_DEADLINE_S = 5.0
_BACKLOG = 128


class Handover:
    """Owns the listening SOCK_SEQPACKET socket at `path`."""

    def __init__(self, path: str, leases: LeaseBook, allow_uids: frozenset[int]) -> None:
        self._path = path
        self._leases = leases
        self._allow_uids = allow_uids
        self._peers: set[asyncio.Task[None]] = set()
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
            task = asyncio.create_task(self._serve_peer(peer))
            self._peers.add(task)
            task.add_done_callback(self._peers.discard)

    def close(self) -> None:
        for task in self._peers:
            task.cancel()
        self._socket.close()
        os.unlink(self._path)

    async def _serve_peer(self, peer: socket.socket) -> None:
        with peer:
            peer.setblocking(False)
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    # One byte more than allowed shows a longer packet, which the kernel would cut silently.
                    data = await asyncio.get_running_loop().sock_recv(peer, MAX_REQUEST_BYTES + 1)
                if data:
                    self._answer(peer, data)
            except TimeoutError:
                log.warning("hand-over: a peer was silent for %.0f s", _DEADLINE_S)
            except OSError as error:
                log.warning("hand-over: a peer left: %s", error)

    def _answer(self, peer: socket.socket, data: bytes) -> None:
        try:
            fds = self._redeem(peer, data)
        except CacheError as error:
            log.warning("hand-over refused: %s", error.message)
            answer = pb.HandoverResponse(error=wire.error_info(error))
            peer.send(answer.SerializeToString())
            return
        answer = pb.HandoverResponse(num_segments=len(fds))
        # A shard without bytes has no segment; an empty packet would read as the end.
        socket.send_fds(peer, [answer.SerializeToString() or b"\x08\x00"], fds)

    def _redeem(self, peer: socket.socket, data: bytes) -> list[int]:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid not in self._allow_uids:
            raise NotAllowedError(
                f"user {uid} (process {pid}) may not map weights; allow it with --allow-uids",
                {"uid": str(uid)},
            )
        if len(data) > MAX_REQUEST_BYTES:
            raise BadRequestError(f"a hand-over request has at most {MAX_REQUEST_BYTES} bytes")
        try:
            request = pb.HandoverRequest.FromString(data)
        except DecodeError as error:
            raise BadRequestError(f"not a hand-over request: {error}") from error
        lease = self._leases.redeem(request.ticket)
        return [segment.fd for segment in lease.generation.segments]
