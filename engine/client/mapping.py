"""Segments mapped into this process: each once, read-only, straight from its descriptor. Host memory by mmap, device
memory by the driver: see engine/cuda."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

from preload.engine.cuda.mapping import CUDA_VMM, Shared
from preload.engine.cuda.views import DeviceSegments
from preload.engine.errors import DaemonError, DaemonUnreachableError, ManifestError, NotAllowedError, from_proto
from preload.engine.huge_pages import map_shared
from preload.protos import weight_cache_pb2 as pb

_MAX_RESPONSE_BYTES = 64 * 1024
_MAX_DESCRIPTORS = 253
"""The kernel's SCM_MAX_FD."""


def fetch_descriptors(handover_socket: str, ticket: bytes, timeout_s: float) -> list[int]:
    """Redeems a ticket for the descriptors of its shard, which the caller closes. Raises DaemonError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(timeout_s)
            sock.connect(handover_socket)
            with contextlib.suppress(BrokenPipeError):  # refused at the door: the answer is there all the same
                sock.send(pb.HandoverRequest(ticket=ticket).SerializeToString())
            data, fds, _, _ = socket.recv_fds(sock, _MAX_RESPONSE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except PermissionError as error:
        raise NotAllowedError(f"user {os.geteuid()} may not use the hand-over socket {handover_socket}") from error
    except OSError as error:
        raise DaemonUnreachableError(f"hand-over socket {handover_socket}: {error}") from error
    if not data:
        raise DaemonUnreachableError(f"hand-over socket {handover_socket}: the daemon hung up; attach again")
    answer = pb.HandoverResponse.FromString(data)
    if answer.HasField("error"):
        raise from_proto(answer.error)
    if answer.num_segments != len(fds):
        _close_all(fds)
        raise DaemonError(f"hand-over gave {len(fds)} descriptors for {answer.num_segments} segments")
    return fds


Mapped = list[memoryview] | DeviceSegments
"""A shard's segments: the host's, or a device's."""


def sizes_of(segments: Mapped) -> list[int]:
    """In bytes."""
    return [len(segment) for segment in segments] if isinstance(segments, list) else segments.sizes


def map_by_handles(segments: Sequence[pb.Segment]) -> Mapped:
    """Segments of a device by the handles that came with the daemon's answer: no descriptor is needed.

    Raises DeviceError, NoMemoryError."""
    sizes, handles = [segment.size_bytes for segment in segments], [segment.handle for segment in segments]
    return DeviceSegments(segments[0].device, Shared(sizes, handles=handles, backend=segments[0].backend))


def map_segments(fds: Sequence[int], segments: Sequence[pb.Segment]) -> Mapped:
    """One read-only shared mapping per segment; takes the descriptors over and closes them.

    Raises ManifestError if a descriptor is not the segment the daemon spoke of, DeviceError or NoMemoryError if a
    device's cannot be mapped."""
    try:
        if len(fds) != len(segments):
            raise ManifestError(f"{len(fds)} descriptors for {len(segments)} segments")
        if segments and segments[0].backend == CUDA_VMM:
            return DeviceSegments(segments[0].device, Shared([segment.size_bytes for segment in segments], fds))
        for fd, segment in zip(fds, segments, strict=True):
            size = os.fstat(fd).st_size
            if segment.backend != "host" or size != segment.size_bytes:
                raise ManifestError(
                    f"segment {segment.index} is {segment.backend!r} of {size:,} bytes; "
                    f"'host' of {segment.size_bytes:,} was announced"
                )
        return [map_shared(fd, segment.size_bytes) for fd, segment in zip(fds, segments, strict=True)]
    finally:
        _close_all(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
