"""Packets between a frontend and a template: bounded protobuf, with descriptors. See protos/template.proto."""

from __future__ import annotations

import array
import contextlib
import os
import re
import socket
import struct
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from preload.engine.errors import RequestError
from preload.protos import template_pb2 as pb

MAX_PACKET_BYTES = 128 * 1024
NUM_REQUEST_FDS = 2
_CREDENTIALS = struct.Struct("3i")
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_MAX_FDS = 8
"""More than any packet carries: too many are seen, and closed."""


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, from the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def receive_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One packet, and its descriptors, which the caller closes. b"" means that the peer is gone.

    Raises RequestError on a packet or a number of descriptors beyond the bounds, and closes what came with it;
    BlockingIOError and OSError as the socket does."""
    data, ancillary, flags, _ = sock.recvmsg(
        MAX_PACKET_BYTES, socket.CMSG_SPACE(4 * _MAX_FDS), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise RequestError(f"a packet has at most {MAX_PACKET_BYTES} bytes and {_MAX_FDS} descriptors")
    return data, list(fds)


def stop_reading(sock: socket.socket) -> None:
    """Before a refusal of a peer that was not read: the kernel resets a connection that is closed with a packet
    unread, and the reset outruns the answer."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)
        while sock.recv(1):
            pass


def parse_request(data: bytes, fds: Sequence[int]) -> pb.ForkRequest:
    """Raises RequestError on anything but a ForkRequest with its two descriptors."""
    try:
        request = pb.ForkRequest.FromString(data)
    except DecodeError as error:
        raise RequestError(f"not a fork request: {error}") from error
    if len(fds) != NUM_REQUEST_FDS:
        raise RequestError(f"a fork request carries {NUM_REQUEST_FDS} descriptors, not {len(fds)}")
    if not _FINGERPRINT.fullmatch(request.fingerprint):  # of another form: nonsense, and no news of other code
        raise RequestError("a fork request has the fingerprint of its code")
    if not all(b"=" in entry for entry in request.environment):
        raise RequestError("an environment has entries of the form NAME=value")
    return request


def refusal(reason: pb.Refused.Reason.ValueType, message: str) -> pb.Answer:
    return pb.Answer(refused=pb.Refused(reason=reason, message=message))


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
