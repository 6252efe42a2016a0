"""One loader process: started, spoken to over its private socket, watched to its end.

The loader is engine code started as a command. Its socket carries packets of protos/loader.proto; memory and
tables travel beside them as descriptors. Its stderr is passed to our log, and the tail is kept for the reason of a
failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from google.protobuf.message import DecodeError

from preload.protos import loader_pb2 as pb

from .capacity import refusal
from .errors import InternalError, LoaderDiedError

log = logging.getLogger(__name__)

MAX_PACKET_BYTES = 64 * 1024
_MAX_DESCRIPTORS = 16
_MAX_STDERR_LINES = 40
_MAX_STDERR_LINE_CHARS = 500
_EXIT_DEADLINE_S = 30.0


class LoaderProcess:
    """Owns the child, its socket and its stderr reader. Close it with `stop`, whatever happened."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self._process = process
        self._socket = sock
        self._stderr: deque[str] = deque(maxlen=_MAX_STDERR_LINES)
        self._stderr_reader = asyncio.create_task(self._read_stderr())

    @staticmethod
    async def start(command: Sequence[str], job: pb.Job, fds: Sequence[int] = ()) -> LoaderProcess:
        """Starts `command --control-fd N` and sends it the job, with descriptors if it needs any.

        Raises CacheError if the command cannot be started."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise refusal(error, "a socket to a loader") from error
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--control-fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise refusal(error, "a loader process") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        loader = LoaderProcess(process, ours)
        try:
            loader.send(job, fds)
        except BaseException:
            await loader.stop()
            raise
        return loader

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: pb.Job | pb.Grant, fds: Sequence[int] = ()) -> None:
        """A loader that is gone already is not an error here: its end is seen by `updates`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [message.SerializeToString()], list(fds))

    async def updates(self) -> AsyncGenerator[tuple[pb.Update, list[int]]]:
        """Messages with the descriptors that came with them, which stay open until the next one is asked for; ends
        with the socket. Raises InternalError on a packet that is none of the protocol's."""
        while True:
            await self._readable()
            try:
                data, fds, flags, _ = socket.recv_fds(
                    self._socket, MAX_PACKET_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                continue
            except ConnectionResetError:
                return
            try:
                if not data:
                    return
                yield _parse(data, flags), fds
            finally:
                for fd in fds:
                    os.close(fd)

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._socket, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._socket)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        async for raw in _lines(self._process.stderr):
            line = raw.decode(errors="replace").rstrip()[:_MAX_STDERR_LINE_CHARS]
            self._stderr.append(line)
            log.warning("loader %d: %s", self.pid, line)

    async def exited(self) -> int:
        """Waits for the end of a loader that has said its last word. Raises LoaderDiedError if it lingers."""
        try:
            status = await asyncio.wait_for(self._process.wait(), _EXIT_DEADLINE_S)
        except TimeoutError as error:
            raise LoaderDiedError(
                f"loader {self.pid} did not exit within {_EXIT_DEADLINE_S:.0f} s of its commit"
            ) from error
        await self._stderr_reader
        return status

    async def death(self) -> LoaderDiedError:
        """The error of a loader that ended without a result, with its exit reason and last words."""
        status = await self.exited()
        tail = "\n".join(self._stderr)
        reason = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        if status == -signal.SIGKILL:
            reason += ", as the kernel does when memory runs out"
        message = f"loader {self.pid} {reason}" + (f"; its last words:\n{tail}" if tail else "")
        return LoaderDiedError(message, {"exit": reason, "stderr": tail})

    async def stop(self) -> None:
        """Kills the loader if it still lives, and reaps it. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._socket.close()
        await self._stderr_reader


def _parse(data: bytes, flags: int) -> pb.Update:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise InternalError(
            f"the loader sent a packet of more than {MAX_PACKET_BYTES} bytes or {_MAX_DESCRIPTORS} descriptors"
        )
    try:
        return pb.Update.FromString(data)
    except DecodeError as error:
        raise InternalError(f"the loader sent a packet that is not readable: {error}") from error


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines of a stream; one longer than the reader's limit comes in pieces, so it cannot stop the reading."""
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            line = error.partial
        except asyncio.LimitOverrunError as error:
            line = await stream.readexactly(error.consumed)
        if not line:
            return
        yield line
