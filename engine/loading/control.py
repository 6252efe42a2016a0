"""The loader's end of the pipe to the daemon: protobuf packets, with descriptors attached.

Owns framing, size limits and memfds: whatever a file makes an error say, its packet has less than 64 KiB. A closed
socket means that the daemon is gone or no longer interested: `DaemonGoneError`, upon which the loader ends at once.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Sequence

from preload.engine.cuda.mapping import CUDA_IPC, CUDA_VMM, Shared
from preload.engine.errors import PreloadError, RequestError
from preload.protos import loader_pb2, weight_cache_pb2

MAX_PACKET_BYTES = 64 << 10
MAX_FDS = 253  # the kernel's limit for one message
MAX_MESSAGE_BYTES = 16 << 10
MAX_FIELDS = 8
MAX_FIELD_BYTES = 1 << 10


class DaemonGoneError(Exception):
    """Raised when the daemon closed its end; the loader should exit without a word."""


class Control:
    """Sends updates, receives the job and the grant."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)

    def receive_job(self) -> tuple[loader_pb2.Job, list[int]]:
        data, fds = self._receive()
        return loader_pb2.Job.FromString(data), fds

    def receive_grant(self, segment_bytes: Sequence[int], *, is_host: bool = True) -> Shared:
        """One descriptor per segment, or one IPC handle. Raises RequestError if they are not what was planned.

        A descriptor of device memory tells no size: one that is too small cannot be mapped."""
        data, fds = self._receive()
        handles = list(loader_pb2.Grant.FromString(data).handles)
        sizes = [os.fstat(fd).st_size for fd in fds]
        if not is_host:
            sizes = list(segment_bytes[: len(fds) + len(handles)])
        if sizes != list(segment_bytes):
            raise RequestError(f"the daemon granted segments of {sizes} bytes; {list(segment_bytes)} were planned")
        return Shared(sizes, fds, handles, CUDA_IPC if handles else CUDA_VMM)

    def send(self, update: loader_pb2.Update, fds: Sequence[int] = ()) -> None:
        """One packet. Raises DaemonGoneError."""
        try:
            socket.send_fds(self._socket, [update.SerializeToString()], fds)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise DaemonGoneError from error

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        progress = weight_cache_pb2.Progress(phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)
        self.send(loader_pb2.Update(progress=progress))

    def fail(self, error: PreloadError) -> None:
        """Says why there is no result, cut to what a packet holds."""
        self.send(loader_pb2.Update(failed=bounded(error)))

    def verified(self, result: loader_pb2.VerifyResult) -> None:
        """The end of a verification; names of tensors are cut to what a packet holds."""
        names = [_cut(name, MAX_FIELD_BYTES) for name in result.corrupted]
        del result.corrupted[:]
        result.corrupted.extend(names)
        self.send(loader_pb2.Update(verified=result))

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            data, fds, flags, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, MAX_FDS)
        except ConnectionResetError as error:
            raise DaemonGoneError from error
        if not data and not fds:
            # A Grant without content is an empty packet, but it always brings descriptors.
            raise DaemonGoneError
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise RequestError(f"the daemon sent a packet over {MAX_PACKET_BYTES} bytes or {MAX_FDS} descriptors")
        return data, fds


def bounded(error: PreloadError) -> weight_cache_pb2.ErrorInfo:
    """The error as a message: its texts are valid, and short enough for one packet whatever they quote."""
    fields = list(error.fields.items())[:MAX_FIELDS]
    return weight_cache_pb2.ErrorInfo(
        reason=error.reason,
        message=_cut(error.message, MAX_MESSAGE_BYTES),
        fields={_cut(key, MAX_FIELD_BYTES): _cut(value, MAX_FIELD_BYTES) for key, value in fields},
    )


def _cut(text: str, limit_bytes: int) -> str:
    """Keeps both ends: the start names the thing, the end tells what to do. Lone surrogates become question marks."""
    data = text.encode(errors="replace")
    if len(data) <= limit_bytes:
        return data.decode()
    half = (limit_bytes - len(_ELLIPSIS.encode())) // 2
    return data[:half].decode(errors="ignore") + _ELLIPSIS + data[-half:].decode(errors="ignore")


_ELLIPSIS = " … "


def make_memfd(name: str, data: bytes) -> int:
    """A sealed memfd that holds `data`."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], done)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
