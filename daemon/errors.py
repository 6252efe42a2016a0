"""Errors of the daemon. Each knows its gRPC status and its reason on the wire.

CacheError
├── BadRequestError            INVALID_ARGUMENT
├── NotResidentError           NOT_FOUND
├── StillLoadingError          FAILED_PRECONDITION
├── LoadFailedError            FAILED_PRECONDITION
├── RetiringError              FAILED_PRECONDITION
├── CheckpointNotFoundError    NOT_FOUND
├── BadCheckpointError         INVALID_ARGUMENT
├── CheckpointChangedError     FAILED_PRECONDITION
├── NoMemoryError              RESOURCE_EXHAUSTED
├── LoaderDiedError            ABORTED
├── CorruptedError             DATA_LOSS
├── NotAllowedError            PERMISSION_DENIED
├── BadTicketError             PERMISSION_DENIED
├── DrainingError              UNAVAILABLE
├── EvictedError               ABORTED
├── TooManyError               RESOURCE_EXHAUSTED
├── DeviceError                FAILED_PRECONDITION
└── InternalError              INTERNAL
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class CacheError(Exception):
    """Root of the daemon's refusals. `status` is the name of its gRPC status, `reason` that of the ErrorReason on the
    wire: names, so that the keeper can refuse without importing grpc."""

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fields = dict(fields or {})


class BadRequestError(CacheError):
    """Raised when the request itself is wrong; the caller should correct it."""

    status = "INVALID_ARGUMENT"
    reason = "BAD_REQUEST"


class NotResidentError(CacheError):
    """Raised when no generation answers the selector; the caller should load it."""

    status = "NOT_FOUND"
    reason = "NOT_RESIDENT"


class StillLoadingError(CacheError):
    """Raised when the generation is not READY yet; the caller should join the load or come back."""

    status = "FAILED_PRECONDITION"
    reason = "STILL_LOADING"


class LoadFailedError(CacheError):
    """Raised when the generation's load failed; the caller should read why and load again."""

    status = "FAILED_PRECONDITION"
    reason = "LOAD_FAILED"


class RetiringError(CacheError):
    """Raised when the generation takes no new lease; the caller should load it anew."""

    status = "FAILED_PRECONDITION"
    reason = "RETIRING"


class CheckpointNotFoundError(CacheError):
    """Raised when a checkpoint's path cannot be read; the caller should fix the path or its permissions."""

    status = "NOT_FOUND"
    reason = "CHECKPOINT_NOT_FOUND"


class BadCheckpointError(CacheError):
    """Raised when a checkpoint's files are wrong; the caller should replace the named file."""

    status = "INVALID_ARGUMENT"
    reason = "BAD_CHECKPOINT"


class CheckpointChangedError(CacheError):
    """Raised when files differ from what is resident; the caller should load them anew or restore them."""

    status = "FAILED_PRECONDITION"
    reason = "CHECKPOINT_CHANGED"


class NoMemoryError(CacheError):
    """Raised when a load does not fit; the caller should evict, allow eviction or raise the limit."""

    status = "RESOURCE_EXHAUSTED"
    reason = "NO_MEMORY"


class LoaderDiedError(CacheError):
    """Raised when a loader ended without a result; the message holds its last words."""

    status = "ABORTED"
    reason = "LOADER_DIED"


class CorruptedError(CacheError):
    """Raised when resident bytes differ from the manifest; the caller should load the generation anew."""

    status = "DATA_LOSS"
    reason = "CORRUPTED"


class NotAllowedError(CacheError):
    """Raised when the peer's user may not do this; the caller should ask the operator."""

    status = "PERMISSION_DENIED"
    reason = "NOT_ALLOWED"


class BadTicketError(CacheError):
    """Raised when a ticket is unknown, used or expired; the caller should attach again."""

    status = "PERMISSION_DENIED"
    reason = "BAD_TICKET"


class DrainingError(CacheError):
    """Raised when the daemon is stopping; the caller should try again at its successor."""

    status = "UNAVAILABLE"
    reason = "DRAINING"


class EvictedError(CacheError):
    """Raised when a load was cancelled by an eviction or by its last caller; the caller should load again."""

    status = "ABORTED"
    reason = "EVICTED"


class TooManyError(CacheError):
    """Raised when a limit on clients is reached; the caller should give something back, or try again later."""

    status = "RESOURCE_EXHAUSTED"
    reason = "TOO_MANY"


class DeviceError(CacheError):
    """Raised when a GPU cannot be used: no driver, no such device, or a call that failed. The caller should use
    another device, or fix this one; what is resident elsewhere is not touched."""

    status = "FAILED_PRECONDITION"
    reason = "NO_DEVICE"


class InternalError(CacheError):
    """Raised when the daemon or its loader hit a bug; the log has the traceback."""


BY_REASON: dict[str, type[CacheError]] = {cls.reason: cls for cls in CacheError.__subclasses__()}
"""The one table from reasons, as a loader sends them, back to errors."""
