"""Exit codes, one for each cause, so that a script need not read messages.

 0  done                              16  checkpoint's files are wrong
 1  unexpected: a bug, with traceback 17  checkpoint changed on disk
 2  wrong arguments                   18  not enough memory
10  no daemon answers                 19  loader died
11  not resident                      20  resident bytes are corrupted
12  still loading                     21  not allowed
13  its load failed                   22  daemon is stopping
14  retiring                          23  load cancelled or evicted
15  checkpoint missing or unreadable  24  ticket refused
                                      25  engine core could not start or go on
                                      26  too many leases, loads or connections
                                      27  a GPU cannot be used: no driver, no such device, it failed, or its
                                          memory cannot be shared with this process
                                      70  daemon hit a bug

130 and 143: ended by SIGINT and SIGTERM. With --json a failure is also one object on stdout, {"error": {"reason",
"message", "exit_code"}}: the reason is that of the contract (protos/weight_cache.proto, ErrorReason), or NO_DAEMON or
CORE_FAILED, which no daemon says.
"""

from __future__ import annotations

from typing import Any

from preload.daemon.errors import CacheError
from preload.engine import errors
from preload.protos import weight_cache_pb2 as pb

UNEXPECTED = 1

_BY_ERROR: tuple[tuple[type[Exception], int], ...] = (
    (errors.RequestError, 2),
    (errors.DaemonUnreachableError, 10),
    (errors.NotResidentError, 11),
    (errors.StillLoadingError, 12),
    (errors.LoadFailedError, 13),
    (errors.RetiringError, 14),
    (errors.CheckpointNotFoundError, 15),
    (errors.CheckpointChangedError, 17),
    (errors.CheckpointError, 16),
    (errors.ManifestError, 16),
    (errors.NoMemoryError, 18),
    (errors.LoaderDiedError, 19),
    (errors.CorruptedError, 20),
    (errors.NotAllowedError, 21),
    (errors.DrainingError, 22),
    (errors.EvictedError, 23),
    (errors.BadTicketError, 24),
    (errors.CoreError, 25),
    (errors.TooManyError, 26),
    (errors.DeviceError, 27),
    (errors.PreloadError, 70),
    (CacheError, 2),  # raised in this process only by `preload daemon`, for what it was told
)


def reason_of(error: Exception) -> str:
    """What a script may compare, beside the exit code."""
    match error:
        case errors.DaemonUnreachableError():
            return "NO_DAEMON"
        case errors.CoreError():
            return "CORE_FAILED"
        case errors.PreloadError():
            return pb.ErrorReason.Name(error.reason)
        case CacheError():
            return error.reason
    return pb.ErrorReason.Name(pb.INTERNAL)


def describe(error: Exception) -> dict[str, Any]:
    """An error as `--json` shows it."""
    return {"reason": reason_of(error), "message": str(error), "exit_code": code_of(error) or UNEXPECTED}


def code_of(error: Exception) -> int | None:
    """The exit code of an error of ours; None if it is none, so that it shows its traceback."""
    for cls, code in _BY_ERROR:
        if isinstance(error, cls):
            return code
    return None
