"""Errors of the engine, and the table that maps the daemon's refusals onto them.

PreloadError
├── RequestError             the request itself is wrong
├── CheckpointError          the files on disk cannot be used (names file and tensor)
│   ├── CheckpointNotFoundError
│   └── CheckpointChangedError
├── DaemonError              the daemon answered no
│   ├── DaemonUnreachableError
│   ├── NotResidentError
│   ├── StillLoadingError
│   ├── LoadFailedError
│   ├── RetiringError
│   ├── NoMemoryError
│   ├── LoaderDiedError
│   ├── CorruptedError
│   ├── NotAllowedError
│   ├── BadTicketError
│   ├── DrainingError
│   ├── EvictedError
│   ├── TooManyError
│   └── InternalDaemonError
├── DeviceError              a GPU cannot be used: here, or by the daemon
├── ManifestError            resident tensors are not what this engine expects
└── CoreError                the engine core cannot go on
"""

from __future__ import annotations

from collections.abc import Mapping

from preload.protos import weight_cache_pb2 as pb


class PreloadError(Exception):
    """Root of every error of ours. `fields` names the things the message speaks of."""

    reason: pb.ErrorReason.ValueType = pb.INTERNAL

    def __init__(self, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fields = dict(fields or {})

    def to_proto(self) -> pb.ErrorInfo:
        return pb.ErrorInfo(reason=self.reason, message=self.message, fields=self.fields)


class RequestError(PreloadError):
    """Raised when an argument is impossible; the caller should correct it."""

    reason = pb.BAD_REQUEST


class CheckpointError(PreloadError):
    """Raised when a checkpoint's files are there but wrong; the caller should replace the named file."""

    reason = pb.BAD_CHECKPOINT


class CheckpointNotFoundError(CheckpointError):
    """Raised when a path, a file or a configuration is missing or unreadable; fix the path."""

    reason = pb.CHECKPOINT_NOT_FOUND


class CheckpointChangedError(CheckpointError):
    """Raised when files differ from what was read; the caller should load them anew or restore them."""

    reason = pb.CHECKPOINT_CHANGED


class DaemonError(PreloadError):
    """Raised when the daemon refuses; the subclass says why."""


class DaemonUnreachableError(DaemonError):
    """Raised when no daemon answers at the socket; the caller should start one or name its runtime folder."""

    reason = pb.INTERNAL


class NotResidentError(DaemonError):
    """Raised when no generation answers the selector; the caller should load it."""

    reason = pb.NOT_RESIDENT


class StillLoadingError(DaemonError):
    """Raised when the generation is not READY yet; wait, for instance by joining the load."""

    reason = pb.STILL_LOADING


class LoadFailedError(DaemonError):
    """Raised when the generation's load failed; the caller should read the reason and load again."""

    reason = pb.LOAD_FAILED


class RetiringError(DaemonError):
    """Raised when the generation takes no new lease; the caller should load it anew."""

    reason = pb.RETIRING


class NoMemoryError(DaemonError):
    """Raised when a load does not fit; the message has the numbers. Evict, or raise the limit."""

    reason = pb.NO_MEMORY


class LoaderDiedError(DaemonError):
    """Raised when a loader process ended without a result; the message has its last words."""

    reason = pb.LOADER_DIED


class CorruptedError(DaemonError):
    """Raised when resident bytes differ from the manifest; the caller should load the generation anew."""

    reason = pb.CORRUPTED


class NotAllowedError(DaemonError):
    """Raised when this user may not do this; the caller should ask the operator."""

    reason = pb.NOT_ALLOWED


class BadTicketError(DaemonError):
    """Raised when a ticket is unknown, used or expired; the caller should attach again."""

    reason = pb.BAD_TICKET


class DrainingError(DaemonError):
    """Raised when the daemon is stopping; the caller should try again at its successor."""

    reason = pb.DRAINING


class EvictedError(DaemonError):
    """Raised when a load was cancelled by an eviction or by its last caller; the caller should load again."""

    reason = pb.EVICTED


class TooManyError(DaemonError):
    """Raised when the daemon has as many leases, loads or connections as it takes; give one back or try later."""

    reason = pb.TOO_MANY


class InternalDaemonError(DaemonError):
    """Raised when the daemon hit a bug; the caller should report it."""

    reason = pb.INTERNAL


class DeviceError(PreloadError):
    """Raised when a GPU cannot be used: no driver, no such device, or a call that failed. The caller should use
    another device, or fix this one."""

    reason = pb.NO_DEVICE


class ManifestError(PreloadError):
    """Raised when resident tensors are not what this engine expects; names the tensor."""

    reason = pb.BAD_CHECKPOINT


class CoreError(PreloadError):
    """Raised when the engine core cannot go on; its supervisor should start another."""


_BY_REASON: dict[int, type[PreloadError]] = {
    cls.reason: cls
    for cls in (
        RequestError, CheckpointError, CheckpointNotFoundError, CheckpointChangedError, NotResidentError,
        StillLoadingError, LoadFailedError, RetiringError, NoMemoryError, LoaderDiedError, CorruptedError,
        NotAllowedError, BadTicketError, DrainingError, EvictedError, TooManyError, DeviceError, InternalDaemonError,
    )
}  # fmt: skip


def from_proto(info: pb.ErrorInfo) -> PreloadError:
    """The typed error that an `ErrorInfo` stands for."""
    cls = _BY_REASON.get(info.reason, InternalDaemonError)
    return cls(info.message, dict(info.fields))
