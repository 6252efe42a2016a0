"""A frontend's side of the template: ask for a core, and start a template when there is none.

Nothing here blocks the event loop, and nothing waits longer than `_ANSWER_S` for a template. The caller starts a
core of its own when a fork is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from preload.engine.errors import RequestError
from preload.engine.places import living_folder
from preload.protos import template_pb2 as pb

from .fingerprint import Place, fingerprint
from .wire import MAX_PACKET_BYTES, close_all, peer_of, receive_packet

_ANSWER_S = 2.0
_EXIT_REPORT_S = 1.0


class NoForkError(Exception):
    """Raised when a template forks no core, with the reason; the caller should start a process, and a template.

    `is_absent`: nobody listens, which is no news on a host's first start."""

    def __init__(self, message: str, *, is_absent: bool = False) -> None:
        super().__init__(message)
        self.is_absent = is_absent


class ForkedProcess:
    """A core that the template forked, and is the parent of. Owns its output, its pidfd and its life line."""

    def __init__(self, sock: socket.socket, pid: int, pidfd: int, output: int, life_line: int) -> None:
        self.pid = pid
        self.output = output
        self._sock = sock
        self._pidfd = pidfd
        self._life_line = life_line
        self._ended = False

    async def wait(self) -> int | None:
        """Waits for the end. Returns the exit code, negative for a signal; None if the template died before it."""
        await _readable(self._pidfd)
        self._ended = True
        try:
            return await asyncio.wait_for(self._exit_code(), _EXIT_REPORT_S)
        except TimeoutError:
            return None
        finally:
            self._sock.close()
            close_all((self._pidfd, self._life_line))

    async def _exit_code(self) -> int | None:
        await _readable(self._sock.fileno())
        with contextlib.suppress(OSError, RequestError, DecodeError):
            data, fds = receive_packet(self._sock)
            close_all(fds)
            answer = pb.Answer.FromString(data)
            return answer.exited.exit_code if answer.HasField("exited") else None
        return None

    def abandon(self) -> None:
        """Ends one that nobody waits for; whose `output` it is closes that."""
        self.send_signal(signal.SIGKILL)
        self._ended = True
        self._sock.close()
        close_all((self._pidfd, self._life_line))

    def send_signal(self, number: signal.Signals) -> None:
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


async def fork_core(place: Place, arguments: Sequence[str]) -> ForkedProcess:
    """A core with these arguments of `python -m preload.engine.core`. Raises NoForkError."""
    try:
        return await _fork_core(place, _packet(arguments))
    except TimeoutError as error:
        raise NoForkError(f"the template gave no answer within {_ANSWER_S:g} s") from error
    except OSError as error:  # files of the engine are gone, or no descriptor is left
        raise NoForkError(f"the template cannot be asked: {error}") from error


def _packet(arguments: Sequence[str]) -> bytes:
    """What the template is asked. Raises OSError, NoForkError."""
    request = pb.ForkRequest(
        fingerprint=fingerprint(),
        arguments=arguments,
        environment=[name + b"=" + value for name, value in os.environb.items()],
        working_directory=os.fsencode(living_folder()),
    )
    packet = request.SerializeToString()
    if len(packet) > MAX_PACKET_BYTES:
        raise NoForkError(f"the environment is too large to be sent: {len(packet)} of {MAX_PACKET_BYTES} bytes")
    return packet


async def _fork_core(place: Place, packet: bytes) -> ForkedProcess:
    """Raises OSError, NoForkError. A core that is forked all the same finds its life line cut, and ends."""
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(_connect(place))
        output_read, output_write = os.pipe2(os.O_CLOEXEC)
        undo.callback(os.close, output_read)
        with contextlib.ExitStack() as theirs:
            theirs.callback(os.close, output_write)
            liveness_read, life_line = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, life_line)
            theirs.callback(os.close, liveness_read)
            pid, pidfd = await asyncio.wait_for(_ask(sock, packet, (output_write, liveness_read)), _ANSWER_S)
        undo.pop_all()
        return ForkedProcess(sock, pid, pidfd, output_read, life_line)


async def start_template(place: Place) -> None:
    """Starts a detached template for the next core, and returns when it is on its way. Raises OSError."""
    words = ("-P", "-m", "preload.engine.template", "--runtime-dir", str(place.runtime_dir), "--detached")
    null = asyncio.subprocess.DEVNULL
    starter = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=null)
    await starter.wait()


def _connect(place: Place) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.connect(place.socket)
        _, uid = peer_of(sock)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        sock.close()
        raise NoForkError("no template serves", is_absent=True) from error
    except OSError as error:
        sock.close()
        raise NoForkError(f"the template at {place.socket} cannot be reached: {error.strerror}") from error
    if uid != os.geteuid():
        sock.close()
        raise NoForkError(f"the template at {place.socket} is user {uid}'s")
    return sock


async def _ask(sock: socket.socket, packet: bytes, fds: Sequence[int]) -> tuple[int, int]:
    """Pid and pidfd of the forked core."""
    try:
        socket.send_fds(sock, [packet], list(fds))
        await _readable(sock.fileno())
        data, received = receive_packet(sock)
        answer = pb.Answer.FromString(data)
    except (OSError, RequestError, DecodeError) as error:
        raise NoForkError(f"the template gives no answer: {error}") from error
    if answer.HasField("forked") and len(received) == 1:
        return answer.forked.pid, received[0]
    close_all(received)
    if answer.HasField("refused"):
        raise NoForkError(f"the template refuses: {answer.refused.message}")
    raise NoForkError("the template left without an answer")


async def _readable(fd: int) -> None:
    """Waits until `fd` is readable. asyncio may watch it for one waiter only."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if poller.poll(0):
        return
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, future.set_result, None)
    future.add_done_callback(lambda _: loop.remove_reader(fd))
    await future
