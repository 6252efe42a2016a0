"""The life of a template process: one per user and installation; imports, freezes, listens, forks.

Started by an operator (`preload template`) or by a frontend that found none (`--detached`: it leaves its starter's
session, logs into the runtime folder, and ends when no daemon has served there for a while). It starts no thread,
no channel and no device context, and holds no weights: all it has is imports.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from preload.engine.errors import CoreError
from preload.engine.timeline import now_ns

from .fingerprint import Place, fingerprint, place_of

if TYPE_CHECKING:
    from .child import ForkedCore

log = logging.getLogger(__name__)

_DAEMON_SOCKET = "segments.sock"
_DAEMON_INTERVAL_S = 5.0
_MAX_LOG_BYTES = 1 << 20
_ORPHANED_S = 15.0
_LOG_FORMAT = "%(asctime)s preload-template %(levelname)s %(message)s"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m preload.engine.template`: what `preload template` does, or a detached template."""
    parser = argparse.ArgumentParser(prog="python -m preload.engine.template")
    parser.add_argument("--runtime-dir", default=None, help="folder of the daemon's sockets")
    parser.add_argument("--detached", action="store_true", help="go on in the background, in a session of its own")
    arguments = parser.parse_args(argv)
    place = place_of(arguments.runtime_dir)
    if arguments.detached and not _detach(place):
        return 0
    return run(place, detached=arguments.detached)


def run(place: Place, *, detached: bool) -> int:
    """Serves until SIGTERM, other code is asked for, or the folder is gone. In a fork: runs the core to its end.

    Returns the exit code. Raises CoreError if the runtime folder cannot be used."""
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    lock = _take_lock(place, wait=not detached)
    if lock is None:
        log.info("another template serves at %s", place.socket)
        return 0
    core = _serve(place, lock, detached)
    if core is None:
        log.info("the template ends")
        return 0
    return _run_core(core)


def _serve(place: Place, lock: int, detached: bool) -> ForkedCore | None:
    """None in the template, a ForkedCore in a fork; nothing of the server is open in either."""
    start_ns = now_ns()
    code = fingerprint()  # before the imports: what changes meanwhile makes it stale, not wrong
    from .imports import import_all, num_threads
    from .server import TemplateServer

    import_all()
    if num_threads() != 1:
        raise CoreError(f"the imports started {num_threads() - 1} threads; a fork would lose them")
    gc.collect()
    gc.freeze()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        server = TemplateServer(place.socket, lock, code, _orphaned(place) if detached else lambda: True)
        log.info("forks cores at %s, %.2f s after its start", place.socket, (now_ns() - start_ns) / 1e9)
        try:
            return server.serve(ours)
        finally:
            signal.set_wakeup_fd(-1)


def _run_core(core: ForkedCore) -> int:
    from preload.engine.core.process import main as core_main

    from .child import become

    become(core)
    return core_main(now_ns(), core.request.arguments, is_forked=True)


def _take_lock(place: Place, *, wait: bool) -> int | None:
    """The descriptor that makes this the one template here; None if there is another and we do not wait.

    An operator's template waits until a detached one has gone. Raises CoreError on a folder that cannot be used."""
    try:
        fd = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CoreError(f"cannot use {place.runtime_dir}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            os.close(fd)
            return None
        log.info("another template serves at %s; waiting for it to end", place.socket)
        fcntl.flock(fd, fcntl.LOCK_EX)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _orphaned(place: Place) -> Callable[[], bool]:
    """Whether to keep going: not when the daemon's socket has refused for a while, however often it is asked."""
    last_seen_s = last_asked_s = time.monotonic()

    def keep_going() -> bool:
        nonlocal last_seen_s, last_asked_s
        now_s = time.monotonic()
        if now_s - last_asked_s >= _DAEMON_INTERVAL_S:
            last_asked_s = now_s
            if _accepts(str(place.runtime_dir / _DAEMON_SOCKET)):
                last_seen_s = now_s
        return now_s - last_seen_s < _ORPHANED_S

    return keep_going


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(path) in (0, errno.EAGAIN)


def _detach(place: Place) -> bool:
    """Forks away from the starter, before anything is imported. False in the process that is to end."""
    if os.fork():
        os.wait()
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    null = os.open("/dev/null", os.O_RDONLY)
    out = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if os.fstat(out).st_size > _MAX_LOG_BYTES:
        os.ftruncate(out, 0)  # another template may be writing into it: it appends as well
    for place_fd, fd in ((0, null), (1, out), (2, out)):
        os.dup2(fd, place_fd)
    os.closerange(3, max(null, out) + 1)
    os.chdir("/")
    sys.stdout.flush()
    return True
