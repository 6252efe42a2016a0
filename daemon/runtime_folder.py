"""The runtime folder: who may use it, and what outlives a process in it.

Owns its mode, the locks of daemon and keeper, and the count of lives. Imports nothing heavy: the keeper uses it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from .doors import is_open_to_some
from .errors import BadRequestError

DAEMON_SOCKET = "daemon.sock"
HANDOVER_SOCKET = "segments.sock"
NOTIFY_SOCKET = "notify.sock"
DAEMON_LOCK = "daemon.lock"
KEEPER_LOCK = "keeper.lock"
_MAX_SOCKET_PATH = 107


def default_runtime_dir() -> str:
    """/run/preload for root, the user's runtime folder otherwise."""
    if os.geteuid() == 0:
        return "/run/preload"
    return str(Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")) / "preload")


def prepare(path: str) -> Path:
    """Makes the folder with mode 0700; one that exists must be ours. Raises BadRequestError."""
    runtime_dir = Path(path).absolute()
    if len(os.fsencode(runtime_dir / HANDOVER_SOCKET)) > _MAX_SOCKET_PATH:
        raise BadRequestError(
            f"runtime folder {runtime_dir} is too long: a socket's path has at most {_MAX_SOCKET_PATH} bytes"
        )
    try:
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = runtime_dir.stat()
        if owner.st_uid != os.geteuid():
            raise BadRequestError(f"runtime folder {runtime_dir} belongs to user {owner.st_uid}")
        if not is_open_to_some(runtime_dir):  # a daemon that serves there may have let others in
            runtime_dir.chmod(0o700)
    except OSError as error:
        raise BadRequestError(f"runtime folder {runtime_dir}: {error.strerror}") from error
    return runtime_dir


@contextlib.contextmanager
def locked(runtime_dir: Path, name: str, refusal: str) -> Iterator[None]:
    """Holds a lock file of the folder. Raises BadRequestError(refusal) if it is taken."""
    fd = take_lock(runtime_dir, name, refusal)
    try:
        yield
    finally:
        os.close(fd)


def take_lock(runtime_dir: Path, name: str, refusal: str) -> int:
    """Locks a file of the folder, which its descriptor, ours to close, holds; writes our pid into it.

    Raises BadRequestError(refusal) if it is taken."""
    with _usable(runtime_dir):
        fd = os.open(runtime_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with _usable(runtime_dir):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadRequestError(f"{refusal} {runtime_dir}") from error
            os.pwrite(fd, _number(os.getpid()), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _usable(runtime_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadRequestError(f"runtime folder {runtime_dir} cannot be written to: {error.strerror}") from error


def _number(value: int) -> bytes:
    """Of one length, so that a number takes the place of another also on a disk that is full."""
    return f"{value:<20}\n".encode()


def is_locked(runtime_dir: Path, name: str) -> bool:
    """Whether a process holds this lock now."""
    try:
        fd = os.open(runtime_dir / name, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def open_holder(runtime_dir: Path, name: str) -> tuple[int, int] | None:
    """(pid, pidfd) of the process that holds this lock; None if it cannot be told now.

    The pid in the file may be that of an earlier holder, and may be another process's by now: only one through which
    the kernel holds the lock counts, and it is asked after its pidfd is taken."""
    path = runtime_dir / name
    try:
        pid = int(path.read_text() or "0")
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError):
        return None
    if _holds(pid, path):
        return pid, pidfd
    os.close(pidfd)
    return None


def _holds(pid: int, path: Path) -> bool:
    try:
        wanted = os.stat(path)
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                seen = entry.stat()
                is_this = (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino)
                if is_this and "FLOCK" in Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text():
                    return True
    except OSError:
        return False
    return False


def last_epoch(runtime_dir: Path) -> int:
    """The last life that served in this folder, 0 if none did. A parked catalog may know of more."""
    try:
        return int((runtime_dir / "epoch").read_text())
    except (FileNotFoundError, ValueError):
        return 0


def note_epoch(runtime_dir: Path, epoch: int) -> None:
    """Raises BadRequestError if it cannot be written; the last one is not lost then."""
    with _usable(runtime_dir):
        fd = os.open(runtime_dir / "epoch", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, _number(epoch), 0)
        finally:
            os.close(fd)
