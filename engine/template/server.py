"""The template's socket and its children. One thread, no blocking call: many forks and slow peers at once.

Owns the lock, the listening socket, the connections and the pidfds of running cores. `serve` returns in two kinds of
processes: in the template when it is to end, with None, and in every fork, with what the fork is to become.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

from preload.engine.errors import RequestError
from preload.protos import template_pb2 as pb

from .child import ForkedCore
from .wire import close_all, parse_request, peer_of, receive_packet, refusal, stop_reading

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
_BACKLOG = 128
_SILENCE_S = 5.0
_TICK_S = 1.0
_TROUBLE_S = 0.05


class Connection:
    """One frontend that wants, or has, one core."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.accepted_s = time.monotonic()
        self.core_pid: int | None = None


class TemplateServer:
    """Serves forks at `path` for as long as it holds `lock`, a descriptor that it takes over.

    `keep_going` is asked once a second, and ends the template when it says no."""

    def __init__(self, path: str, lock: int, fingerprint: str, keep_going: Callable[[], bool]) -> None:
        self._path = path
        self._lock = lock
        self._fingerprint = fingerprint
        self._keep_going = keep_going
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}
        self._cores: dict[int, Connection | None] = {}
        self._forked: ForkedCore | None = None
        self._stale = False
        self._ending = False
        self._listener = self._listen()
        self._inode = os.stat(path).st_ino

    def _listen(self) -> socket.socket:
        """Replaces the socket of a dead template: the caller holds the lock, so nobody serves there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        umask = os.umask(0o177)
        try:
            listener.bind(self._path)
        finally:
            os.umask(umask)
        os.chmod(self._path, 0o600)  # the umask left it the owner's alone, but with the x bit
        listener.listen(_BACKLOG)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return listener

    def serve(self, wakeup: socket.socket) -> ForkedCore | None:
        """Until `wakeup` becomes readable, the template is stale and childless, or this is a fork."""
        self._selector.register(wakeup, selectors.EVENT_READ, self._stop)
        tick_s = time.monotonic()
        while not self._ending:
            for key, _ in self._selector.select(_TICK_S):
                if key.fd in self._selector.get_map():  # an earlier event of this round may have closed it
                    key.data()
                if self._forked is not None:
                    self._leave_behind()
                    return self._forked
            if time.monotonic() - tick_s >= _TICK_S:
                tick_s = time.monotonic()
                self._tick()
            self._ending = self._ending or (self._stale and not self._cores)
        self._stop_listening()
        return None

    def _stop(self) -> None:
        self._ending = True

    def _tick(self) -> None:
        silent_before_s = time.monotonic() - _SILENCE_S
        for connection in list(self._connections.values()):
            if connection.core_pid is None and connection.accepted_s < silent_before_s:
                log.warning("a peer was silent for %.0f s", _SILENCE_S)
                self._close(connection)
        if not self._stale and not (self._owns_path() and self._keep_going()):
            self._ending = True

    def _owns_path(self) -> bool:
        """False once the runtime folder is gone, or another template's socket lies there."""
        try:
            return os.stat(self._path).st_ino == self._inode
        except OSError:
            return False

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, or a peer that left again
            log.warning("cannot accept: %s", error)
            time.sleep(_TROUBLE_S)
            return
        sock.setblocking(False)
        connection = Connection(sock)
        _, uid = peer_of(sock)
        if uid != os.geteuid():
            message = f"this template forks for user {os.geteuid()}, not for {uid}"
            stop_reading(sock)
            self._send(connection, refusal(pb.Refused.NOT_ALLOWED, message))
        elif len(self._connections) >= MAX_CONNECTIONS:
            stop_reading(sock)
            self._send(connection, refusal(pb.Refused.FAILED, f"{MAX_CONNECTIONS} connections are open"))
        else:
            self._connections[sock.fileno()] = connection
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(connection))
            return
        sock.close()

    def _read(self, connection: Connection) -> None:
        try:
            data, fds = receive_packet(connection.sock)
        except BlockingIOError:
            return
        except OSError as error:
            log.debug("a peer left: %s", error)
            self._close(connection)
            return
        except RequestError as error:
            self._refuse(connection, pb.Refused.BAD_REQUEST, error.message)
            return
        try:
            if not data or connection.core_pid is not None:  # it left, or says more than it has to
                self._close(connection)
            else:
                self._answer(connection, parse_request(data, fds), fds)
        except RequestError as error:
            self._refuse(connection, pb.Refused.BAD_REQUEST, error.message)
        finally:
            if self._forked is None:
                close_all(fds)

    def _answer(self, connection: Connection, request: pb.ForkRequest, fds: list[int]) -> None:
        if request.fingerprint != self._fingerprint:
            log.info("the engine's code has changed; another template takes over")
            self._stale = True
            self._stop_listening()
            self._refuse(connection, pb.Refused.STALE, "the template holds other code; it makes room for another")
            return
        frontend_pid, _ = peer_of(connection.sock)
        # Until the child has its own handlers it must not run ours, which write to the parent's socket.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            self._refuse(connection, pb.Refused.FAILED, f"the template cannot fork: {error.strerror}")
            return
        else:
            if pid == 0:
                self._forked = ForkedCore(request, (fds[0], fds[1]), frontend_pid)
                return
        finally:
            if self._forked is None:
                signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        self._watch(connection, pid)

    def _watch(self, connection: Connection, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:  # out of descriptors: a core that cannot be watched is none
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._refuse(connection, pb.Refused.FAILED, f"the template cannot watch a core: {error.strerror}")
            return
        connection.core_pid = pid
        self._cores[pidfd] = connection
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(pidfd, pid))
        self._send(connection, pb.Answer(forked=pb.Forked(pid=pid)), [pidfd])
        log.info("forked core %d", pid)

    def _reap(self, pidfd: int, pid: int) -> None:
        connection = self._cores.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        log.info("core %d ended with %d", pid, code)
        if connection is not None and connection.sock.fileno() >= 0:
            self._send(connection, pb.Answer(exited=pb.Exited(exit_code=code)))
            self._close(connection)

    def _refuse(self, connection: Connection, reason: pb.Refused.Reason.ValueType, message: str) -> None:
        log.warning("refused: %s", message)
        self._send(connection, refusal(reason, message))
        self._close(connection)

    def _send(self, connection: Connection, answer: pb.Answer, fds: list[int] | None = None) -> None:
        try:
            socket.send_fds(connection.sock, [answer.SerializeToString()], fds or [])
        except OSError as error:  # gone, or does not read: nothing is owed to it
            log.debug("a peer takes no answer: %s", error)

    def _close(self, connection: Connection) -> None:
        fd = connection.sock.fileno()
        if fd >= 0:
            self._selector.unregister(connection.sock)
            connection.sock.close()
            self._connections.pop(fd, None)

    def _stop_listening(self) -> None:
        """Makes room for another template."""
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
            if self._owns_path():
                os.unlink(self._path)
            os.close(self._lock)

    def _leave_behind(self) -> None:
        """In a fork: our sockets are closed, but the selector, which the template shares, is not touched."""
        self._listener.close()
        os.close(self._lock)
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._cores.clear()
        self._selector.close()
