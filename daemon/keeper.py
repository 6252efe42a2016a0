"""`preload keeper`: holds the daemon's descriptors between two of its lives, where systemd does not.

A minimal supervisor that speaks the notify protocol of systemd to its child: FDSTORE, FDSTOREREMOVE, FDNAME, READY,
WATCHDOG; and hands everything back through LISTEN_FDS. It understands no descriptor and parses nothing else, imports
neither grpc nor protobuf, and is as small as an interpreter can be, because it must outlive everything.

If the keeper dies, the daemon goes on. The next keeper of the same folder adopts it, and the daemon parks again.
Whatever the system refuses meanwhile (a process, a descriptor, memory) is tried again: nothing of it ends the keeper.
SIGHUP replaces the daemon by a new life of it; SIGTERM ends both.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import runtime_folder
from .errors import BadRequestError
from .keeper_place import Place
from .keeper_store import Store, receive
from .runtime_folder import DAEMON_LOCK, NOTIFY_SOCKET

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 10.0
_YOUNG_S = 5.0
_START_TIMEOUT_S = 90.0
_LOOK_AGAIN_S = 0.1
_LOOK_AROUND_S = 1.0
_WRONG_ARGUMENTS = 2


@dataclass
class Child:
    """One life of the daemon, ours or adopted. Not watched before it has said that it is ready."""

    pid: int
    pidfd: int
    adopted: bool = False
    started_s: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    last_sign_s: float = field(default_factory=time.monotonic)
    end_s: float | None = None
    """When it must have ended, if it was told to."""


class Keeper:
    """Owns the notify socket, the stored descriptors and one child at a time."""

    def __init__(self, runtime_dir: Path, command: Sequence[str], watchdog_s: float, stop_timeout_s: float) -> None:
        self._runtime_dir = runtime_dir
        self._command = list(command)
        self._watchdog_s = watchdog_s
        self._stop_timeout_s = stop_timeout_s
        self._store = Store()
        self._child: Child | None = None
        self._num_young = 0
        self._start_at_s = 0.0
        self._stopping = False
        self._ever_ready = False
        self._exit_code = 0
        self._selector = selectors.DefaultSelector()
        self._place = Place(runtime_dir)
        self._notify: socket.socket | None = None
        self._displaced = ""

    def run(self) -> int:
        """Supervises until SIGTERM or SIGINT, or until the first daemon of all refuses its arguments.

        Returns the exit code. Raises BadRequestError if another keeper has the folder."""
        os.umask(0o077)
        _allow_many_descriptors()
        try:
            self._place.take()
            with self._signals() as signals:
                self._selector.register(signals, selectors.EVENT_READ, lambda: self._read_signals(signals))
                while self._child is not None or not self._stopping:
                    self._turn()
        finally:
            self._place.leave()
        self._store.close()
        return self._exit_code

    def _turn(self) -> None:
        """One wait for whatever comes next. What the system refuses is tried again in the next turn."""
        try:
            if self._has_place():
                self._start_if_due()
            for key, _ in self._selector.select(self._wait_s()):
                key.data()
            self._check_deadlines()
        except (OSError, MemoryError) as error:
            log.error("the keeper goes on after: %r", error)
            time.sleep(_LOOK_AGAIN_S)

    def _has_place(self) -> bool:
        """Whether folder, lock and socket are ours; what somebody removed is made anew. A daemon that spoke to the
        old socket finds that it is gone, and parks again at the new one."""
        try:
            if not self._place.is_whole():
                self._place.take()
            if self._displaced:
                log.info("folder, lock and socket are ours again")
                self._displaced = ""
        except (BadRequestError, OSError) as error:
            if str(error) != self._displaced:
                log.error("no daemon is started: %s", error)
            self._displaced = str(error)
        if self._notify is not self._place.socket:
            self._listen_anew()
        return not self._displaced

    def _listen_anew(self) -> None:
        assert self._place.socket is not None
        self._selector.register(self._place.socket, selectors.EVENT_READ, self._read_messages)
        old = self._notify
        if old is not None:
            log.warning("%s was removed: listening anew", self._runtime_dir / NOTIFY_SOCKET)
            self._read_messages()
            self._selector.unregister(old)
            old.close()
        self._notify = self._place.socket

    @contextlib.contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """A socket that becomes readable with the number of every signal."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            signal.set_wakeup_fd(theirs.fileno())
            for number in _SIGNALS:
                signal.signal(number, lambda *_: None)
            yield ours
            signal.set_wakeup_fd(-1)

    def _read_signals(self, signals: socket.socket) -> None:
        for number in signals.recv(64):
            if number == signal.SIGHUP:
                log.info("restarting the daemon")
                self._end_child()
            elif number in (signal.SIGTERM, signal.SIGINT):
                self._stopping = True
                self._end_child()

    def _read_messages(self) -> None:
        """Takes in what has arrived. Only the daemon is listened to."""
        while self._notify is not None and (message := receive(self._notify)) is not None:
            try:
                if self._child is not None and message.sender == self._child.pid:
                    self._child.last_sign_s = time.monotonic()
                    self._child.is_ready |= message.fields.get("READY") == "1"
                    self._ever_ready |= self._child.is_ready
                    self._store.apply(message)
                else:
                    log.warning("a message from process %d, which is not the daemon, is ignored", message.sender)
            finally:
                message.close()

    def _start_if_due(self) -> None:
        if self._child is not None or self._stopping or time.monotonic() < self._start_at_s:
            return
        try:
            self._start()
        except (OSError, MemoryError) as error:
            self._num_young += 1
            pause_s = _pause_s(self._num_young)
            self._start_at_s = time.monotonic() + pause_s
            log.error("cannot start a daemon: %r; trying again in %.1f s", error, pause_s)

    def _start(self) -> None:
        if runtime_folder.is_locked(self._runtime_dir, DAEMON_LOCK):
            self._adopt()
            return
        names, fds = self._store.items()
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(self._runtime_dir / NOTIFY_SOCKET),
            "WATCHDOG_USEC": str(int(self._watchdog_s * 1e6)),
            "LISTEN_FDS": str(len(names)),
            "LISTEN_FDNAMES": ":".join(names),
        }
        pid = os.fork()
        if pid == 0:
            _exec(self._command, environment, fds)
        try:
            self._watch(Child(pid, os.pidfd_open(pid)))
        except BaseException:  # one that nobody watches
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        log.info("started daemon %d with %d stored descriptors", pid, len(names))

    def _adopt(self) -> None:
        """Takes over a daemon that outlived its keeper. One that was started without a keeper parks nothing and gives
        no sign of life: it is left alone until it ends."""
        holder = runtime_folder.open_holder(self._runtime_dir, DAEMON_LOCK)
        if holder is None:  # between its lock and its first words, or just ending
            self._start_at_s = time.monotonic() + _LOOK_AGAIN_S
            return
        self._watch(Child(*holder, adopted=True))
        log.info("adopted daemon %d", holder[0])

    def _watch(self, child: Child) -> None:
        try:
            self._selector.register(child.pidfd, selectors.EVENT_READ, self._on_death)
        except BaseException:
            os.close(child.pidfd)
            raise
        self._child = child

    def _on_death(self) -> None:
        self._read_messages()  # its last ones: what it said it parked is parked
        child, self._child = self._child, None
        assert child is not None
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        status = "unknown: it was adopted"
        with contextlib.suppress(ChildProcessError):
            status = str(os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))
        if status == str(_WRONG_ARGUMENTS) and not self._ever_ready and not len(self._store):
            log.error("daemon %d does not take its arguments; nothing is kept that could be lost", child.pid)
            self._stopping, self._exit_code = True, _WRONG_ARGUMENTS
            return
        self._start_at_s = time.monotonic() + self._backoff_s(child)
        log.warning("daemon %d ended (%s); %d descriptors are kept", child.pid, status, len(self._store))

    def _backoff_s(self, child: Child) -> float:
        """A daemon that dies young is replaced at once three times in a row, then after longer and longer pauses."""
        is_young = time.monotonic() - child.started_s < _YOUNG_S
        self._num_young = self._num_young + 1 if is_young and child.end_s is None else 0
        return _pause_s(self._num_young - 4) if self._num_young >= 4 else 0.0

    def _wait_s(self) -> float:
        """Until the next deadline, and not for ever: whoever removes our socket does not wake us."""
        child, now_s = self._child, time.monotonic()
        if child is None:
            wait_s = _LOOK_AROUND_S if self._displaced else max(0.0, self._start_at_s - now_s)
            return 0.0 if self._stopping else min(_LOOK_AROUND_S, wait_s)
        deadline_s = self._deadline_s(child)
        left_s = _LOOK_AROUND_S if deadline_s is None else max(0.0, deadline_s - now_s) + 0.01
        return min(_LOOK_AROUND_S, left_s)

    def _deadline_s(self, child: Child) -> float | None:
        """When the child is killed unless something happens."""
        if child.end_s is not None:
            return child.end_s
        if child.is_ready:
            return child.last_sign_s + self._watchdog_s if self._watchdog_s else None
        return None if child.adopted else child.started_s + _START_TIMEOUT_S

    def _check_deadlines(self) -> None:
        child = self._child
        deadline_s = self._deadline_s(child) if child is not None else None
        if child is None or deadline_s is None or time.monotonic() <= deadline_s:
            return
        silent_s = time.monotonic() - child.last_sign_s
        log.error("daemon %d is killed: no sign of life for %.1f s, or it would not end", child.pid, silent_s)
        self._kill(signal.SIGKILL)
        child.end_s = time.monotonic() + _MAX_BACKOFF_S

    def _end_child(self) -> None:
        """SIGTERM now, SIGKILL when the time is up."""
        if self._child is not None and self._child.end_s is None:
            self._child.end_s = time.monotonic() + self._stop_timeout_s
            self._kill(signal.SIGTERM)

    def _kill(self, number: signal.Signals) -> None:
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._child.pidfd, number)


def _pause_s(num_failures: int) -> float:
    return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(num_failures, 10))


def _allow_many_descriptors() -> None:
    """Each segment is a descriptor here and in the daemon, which inherits the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _exec(command: Sequence[str], environment: dict[str, str], fds: Sequence[int]) -> None:
    """In the forked child: descriptors to 3, 4, …, everything else closed, signals as they were, then the command."""
    try:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        first_free = 3 + len(fds)
        above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first_free) for fd in fds]
        for place, fd in enumerate(above, 3):
            os.dup2(fd, place)
        for name in os.listdir("/proc/self/fd"):
            if int(name) >= first_free:
                with contextlib.suppress(OSError):  # that of the listing itself is gone by now
                    os.set_inheritable(int(name), False)
        pid = str(os.getpid())
        os.execve(command[0], list(command), {**environment, "LISTEN_PID": pid, "WATCHDOG_PID": pid})
    except OSError as error:
        log.error("cannot start %s: %s", command[0], error)
    finally:
        os._exit(127)
