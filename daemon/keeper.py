"""`preload keeper`: holds the daemon's descriptors between two of its lives, where systemd does not.

A minimal supervisor that speaks the notify protocol of systemd to its child: FDSTORE, FDSTOREREMOVE, FDNAME, READY,
WATCHDOG; and hands everything back through LISTEN_FDS. It understands no descriptor and parses nothing else, imports
neither grpc nor protobuf, and is as small as an interpreter can be, because it must outlive everything.

If the keeper dies, the daemon goes on. The next keeper of the same folder adopts it, and the daemon parks again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import BadRequestError

log = logging.getLogger(__name__)

NOTIFY_SOCKET = "notify.sock"
MAX_STORED = 4096
_MAX_MESSAGE_BYTES = 4096
_MAX_DESCRIPTORS = 16
_CREDENTIALS = struct.Struct("3i")
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 10.0
_YOUNG_S = 5.0


@dataclass
class Child:
    """One life of the daemon, ours or adopted."""

    pid: int
    pidfd: int
    started_s: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    last_sign_s: float = field(default_factory=time.monotonic)


class Keeper:
    """Owns the notify socket, the stored descriptors and one child at a time."""

    def __init__(self, runtime_dir: Path, command: Sequence[str], watchdog_s: float, stop_timeout_s: float) -> None:
        self._runtime_dir = runtime_dir
        self._command = list(command)
        self._watchdog_s = watchdog_s
        self._stop_timeout_s = stop_timeout_s
        self._store: dict[str, int] = {}
        self._child: Child | None = None
        self._num_young = 0
        self._start_at_s = 0.0
        self._stopping = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Supervises until SIGTERM or SIGINT. Raises BadRequestError if another keeper has the folder."""
        os.umask(0o077)
        with self._locked(), self._notify_socket() as notify, self._signals() as signals:
            self._selector.register(notify, selectors.EVENT_READ, lambda: self._read_message(notify))
            self._selector.register(signals, selectors.EVENT_READ, lambda: self._read_signals(signals))
            self._adopt()
            while not self._stopping:
                self._start_if_due()
                for key, _ in self._selector.select(self._wait_s()):
                    key.data()
                self._check_watchdog()
            self._stop_child()
        for fd in self._store.values():
            os.close(fd)
        return 0

    @contextlib.contextmanager
    def _locked(self):  # type: ignore[no-untyped-def]
        self._runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._runtime_dir / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise BadRequestError(f"another keeper holds {self._runtime_dir}") from error
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _notify_socket(self):  # type: ignore[no-untyped-def]
        path = self._runtime_dir / NOTIFY_SOCKET
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            sock.bind(str(path))
            os.chmod(path, 0o600)
            yield sock
        path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _signals(self):  # type: ignore[no-untyped-def]
        """A socket that becomes readable with the number of every signal."""
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        yield ours
        signal.set_wakeup_fd(-1)

    def _read_signals(self, signals: socket.socket) -> None:
        for number in signals.recv(64):
            if number == signal.SIGHUP:
                log.info("restarting the daemon")
                self._kill(signal.SIGTERM)
            elif number in (signal.SIGTERM, signal.SIGINT):
                self._stopping = True

    def _read_message(self, notify: socket.socket) -> None:
        try:
            data, ancillary, _, _ = notify.recvmsg(
                _MAX_MESSAGE_BYTES,
                socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS) + socket.CMSG_SPACE(_CREDENTIALS.size),
                socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            return
        sender, fds = _split(ancillary)
        try:
            if self._child is None or sender != self._child.pid:
                log.warning("a message from process %d, which is not the daemon, is ignored", sender)
                return
            self._take(dict(line.partition("=")[::2] for line in data.decode(errors="replace").splitlines()), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _take(self, message: dict[str, str], fds: list[int]) -> None:
        """One message of the daemon. Takes the descriptors it keeps out of `fds`."""
        assert self._child is not None
        self._child.last_sign_s = time.monotonic()
        name = message.get("FDNAME", "stored")
        if message.get("FDSTOREREMOVE") == "1":
            fd = self._store.pop(name, None)
            if fd is not None:
                os.close(fd)
        elif message.get("FDSTORE") == "1":
            for fd in list(fds):
                if name not in self._store and len(self._store) >= MAX_STORED:
                    log.error("%d descriptors are stored; %s is refused", MAX_STORED, name)
                    return
                old = self._store.pop(name, None)
                if old is not None:
                    os.close(old)
                self._store[name] = fd
                fds.remove(fd)
        if message.get("READY") == "1":
            self._child.is_ready = True

    def _adopt(self) -> None:
        """Takes over a daemon that outlived its keeper: it holds the folder's lock and wrote its pid there."""
        with contextlib.suppress(FileNotFoundError), (self._runtime_dir / "daemon.lock").open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = int(lock.read() or "0")
                self._watch(Child(pid, os.pidfd_open(pid), is_ready=True))
                log.info("adopted daemon %d", pid)

    def _start_if_due(self) -> None:
        if self._child is not None or time.monotonic() < self._start_at_s:
            return
        names = list(self._store)
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(self._runtime_dir / NOTIFY_SOCKET),
            "WATCHDOG_USEC": str(int(self._watchdog_s * 1e6)),
            "LISTEN_FDS": str(len(names)),
            "LISTEN_FDNAMES": ":".join(names),
        }
        pid = os.fork()
        if pid == 0:
            try:
                _exec(self._command, environment, [self._store[name] for name in names])
            finally:
                os._exit(127)
        self._watch(Child(pid, os.pidfd_open(pid)))
        log.info("started daemon %d with %d stored descriptors", pid, len(names))

    def _watch(self, child: Child) -> None:
        self._child = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, self._on_death)

    def _on_death(self) -> None:
        child, self._child = self._child, None
        assert child is not None
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        status = "unknown: it was adopted"
        with contextlib.suppress(ChildProcessError):
            status = str(os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))
        is_young = time.monotonic() - child.started_s < _YOUNG_S
        self._num_young = self._num_young + 1 if is_young else 0
        excess = self._num_young - 3
        delay_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**excess) if excess >= 0 else 0.0
        self._start_at_s = time.monotonic() + delay_s
        log.warning("daemon %d ended (%s); %d descriptors are kept", child.pid, status, len(self._store))

    def _wait_s(self) -> float | None:
        if self._child is None:
            return max(0.0, self._start_at_s - time.monotonic())
        return self._watchdog_s / 4 if self._watchdog_s else None

    def _check_watchdog(self) -> None:
        child = self._child
        if child is None or not child.is_ready or not self._watchdog_s:
            return
        if time.monotonic() - child.last_sign_s > self._watchdog_s:
            log.error("daemon %d gave no sign of life for %.0f s", child.pid, self._watchdog_s)
            self._kill(signal.SIGKILL)
            child.is_ready = False

    def _kill(self, number: signal.Signals) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._child.pidfd, number)

    def _stop_child(self) -> None:
        """SIGTERM, then SIGKILL when the time is up; an adopted child is waited for like our own."""
        end_s = time.monotonic() + self._stop_timeout_s
        self._kill(signal.SIGTERM)
        while self._child is not None:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                self._kill(signal.SIGKILL)
            for key, _ in self._selector.select(max(left_s, 0.1)):
                key.data()


def _split(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, list[int]]:
    """The sender's pid, as the kernel knows it, and the descriptors of one message."""
    sender = 0
    fds: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            sender = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    return sender, fds


def _exec(command: Sequence[str], environment: dict[str, str], fds: Sequence[int]) -> None:
    """In the forked child: descriptors to 3, 4, …, everything else closed, signals as they were, then the command."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 3 + len(fds)) for fd in fds]
    for place, fd in enumerate(above, 3):
        os.dup2(fd, place)
    os.closerange(3 + len(fds), os.sysconf("SC_OPEN_MAX") if len(fds) > MAX_STORED else 3 + 3 * MAX_STORED)
    pid = str(os.getpid())
    os.execve(command[0], list(command), {**environment, "LISTEN_PID": pid, "WATCHDOG_PID": pid})
