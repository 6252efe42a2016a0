"""`CoreProcess`: one core subprocess from its spawn to its death, and what there is to tell about it.

Owns the subprocess, its socket path and the tail of its output. It must be started from the main thread: the core
dies with the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from preload.engine.timeline import Phase, now_ns

from .errors import StartError

MAX_SOCKET_PATH_BYTES = 107
_TAIL_LINES = 40
_TAIL_LINE_CHARACTERS = 500
_PROBE_S = 0.005

CoreCommand = Callable[[str, int], Sequence[str]]
"""(socket path, spawned_at_ns) to the command line of a core."""


@dataclass(kw_only=True)
class CoreLife:
    """The record of one core. Times are CLOCK_MONOTONIC nanoseconds."""

    serial: int
    pid: int
    spawned_at_ns: int
    state: str = "starting"
    warm_at_ns: int | None = None  # a standby: ready to be promoted
    ready_at_ns: int | None = None
    first_token_at_ns: int | None = None
    died_at_ns: int | None = None
    exit_code: int | None = None
    exit_reason: str | None = None
    phases: list[Phase] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "phases": [phase.__dict__ for phase in self.phases]}


class CoreProcess:
    """One core. `await start()`, then `wait_listening`, and at the end always `kill`."""

    def __init__(self, serial: int, socket_dir: str) -> None:
        self._serial = serial
        self.socket_path = os.path.join(socket_dir, f"core-{serial}.sock")
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH_BYTES:
            raise StartError(
                f"the socket path {self.socket_path} is longer than {MAX_SOCKET_PATH_BYTES} bytes; "
                "use a shorter --runtime-dir"
            )
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._exit: asyncio.Task[int] | None = None
        self.life = CoreLife(serial=serial, pid=0, spawned_at_ns=now_ns())

    async def start(self, command: CoreCommand) -> None:
        """Spawns the core in a session of its own, so that Ctrl-C reaches only the frontend."""
        arguments = command(self.socket_path, self.life.spawned_at_ns)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"the engine core cannot be started: {error}") from error
        self.life.pid = self._process.pid
        assert self._process.stdout is not None
        pump = asyncio.create_task(self._pump_output(self._process.stdout))
        self._exit = asyncio.create_task(self._record_exit(self._process, pump))

    @property
    def tail(self) -> list[str]:
        """The last lines the core wrote."""
        return list(self._tail)

    async def _pump_output(self, stream: asyncio.StreamReader) -> None:
        pending = b""
        while data := await stream.read(65536):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._pass_on(line)
            if len(pending) > 65536:
                self._pass_on(pending)
                pending = b""
        if pending:
            self._pass_on(pending)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self._tail.append(text[:_TAIL_LINE_CHARACTERS])
        print(f"core[{self.life.pid}] {text}", file=sys.stderr, flush=True)

    async def wait_listening(self) -> None:
        """Returns when something accepts connections at the socket path.

        gRPC waits longer and longer between attempts; a plain connect costs nothing and finds the moment.
        """
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(self.socket_path)
                except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    await asyncio.sleep(_PROBE_S)
                else:
                    return

    async def wait_exit(self) -> int:
        """Waits for the end of the process. Returns the exit code, negative for a signal."""
        assert self._exit is not None
        return await asyncio.shield(self._exit)

    async def wait_exit_for(self, timeout_s: float) -> None:
        """Waits for the end of the process, but no longer than this."""
        assert self._exit is not None
        await asyncio.wait((self._exit,), timeout=timeout_s)

    async def _record_exit(self, process: asyncio.subprocess.Process, pump: asyncio.Task[None]) -> int:
        code = await process.wait()
        self.life.died_at_ns = now_ns()
        self.life.exit_code = code
        # Grandchildren may hold the pipe open; the last words are there by then or never.
        await asyncio.wait((pump,), timeout=0.2)
        pump.cancel()
        self.life.exit_reason = self._describe(code)
        self.life.state = "dead"
        return code

    def _describe(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        said = next((line for line in reversed(self._tail) if line.strip()), "") if code else ""
        return f"core {self.life.pid} {how}" + (f": {said}" if said else "")

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; waits for the end either way."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait_exit(), grace_s)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, and waits for the end; returns at once when the process has ended already."""
        self.signal(signal.SIGKILL)
        await self.wait_exit()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_path)
