"""`CoreProcess`: one core from its start to its death, and what there is to tell about it.

Owns the process, its socket path and the tail of its output. A core is forked from the template if there is one;
else it is started as a process, and a template is started for the next. Start it from the main thread: a process
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
from dataclasses import dataclass, field
from typing import Any

from preload.engine.core.config import EXIT_BAD_CONFIG
from preload.engine.timeline import Phase, now_ns

from .core_launch import CoreCommand, CoreHandle, TemplatedCommand, provide_template, start_forked, start_fresh
from .errors import StartError

__all__ = ["CoreCommand", "CoreLife", "CoreProcess"]

MAX_SOCKET_PATH_BYTES = 107
_TAIL_LINES = 40
_TAIL_LINE_CHARACTERS = 500
_PROBE_S = 0.005
_UNKNOWN_EXIT_CODE = 255


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
    is_forked: bool = False
    phases: list[Phase] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "phases": [phase.__dict__ for phase in self.phases]}


class CoreProcess:
    """One core. `await start()`, then `wait_listening`, and at the end always `kill`."""

    def __init__(self, serial: int, socket_dir: str, *, may_fork: bool = True) -> None:
        self._serial = serial
        self._may_fork = may_fork
        self.socket_path = os.path.join(socket_dir, f"core-{serial}.sock")
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH_BYTES:
            raise StartError(
                f"the socket path {self.socket_path} is longer than {MAX_SOCKET_PATH_BYTES} bytes; "
                "use a shorter --runtime-dir"
            )
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._handle: CoreHandle | None = None
        self._exit: asyncio.Task[int] | None = None
        self._missing: TemplatedCommand | None = None
        self._errands: set[asyncio.Task[None]] = set()
        self.life = CoreLife(serial=serial, pid=0, spawned_at_ns=now_ns())

    async def start(self, command: CoreCommand) -> None:
        """Starts the core in a session of its own, so that Ctrl-C reaches only the frontend. Raises StartError."""
        try:
            arguments = command(self.socket_path, self.life.spawned_at_ns)
        except OSError as error:  # a path is relative to a folder that is gone
            raise StartError(f"the engine core has no command line: {error}") from error
        if isinstance(command, TemplatedCommand) and self._may_fork:
            self._handle = await start_forked(arguments, command.place)
            self._missing = None if self._handle else command
        self.life.is_forked = self._handle is not None
        self._handle = self._handle or await start_fresh(arguments)
        self.life.pid = self._handle.pid
        pump = asyncio.create_task(self._pump_output(self._handle.output))
        self._exit = asyncio.create_task(self._record_exit(self._handle, pump))

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
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                    probe.setblocking(False)
                    probe.connect(self.socket_path)
            except OSError:  # nobody listens, or we have no descriptor left: either may pass
                await asyncio.sleep(_PROBE_S)
            else:
                break
        if self._missing is not None:  # only now: its imports would slow down those of the core
            errand = asyncio.create_task(provide_template(self._missing.place))
            self._errands.add(errand)
            errand.add_done_callback(self._errands.discard)
            self._missing = None

    @property
    def refused_configuration(self) -> bool:
        """It ended because what it was told is impossible, and so is for every other."""
        return self.life.exit_code == EXIT_BAD_CONFIG

    async def wait_exit(self) -> int:
        """Waits for the end of the process. Returns the exit code: negative for a signal, 255 if nobody knows it."""
        assert self._exit is not None
        return await asyncio.shield(self._exit)

    async def wait_exit_for(self, timeout_s: float) -> None:
        """Waits for the end of the process, but no longer than this."""
        assert self._exit is not None
        await asyncio.wait((self._exit,), timeout=timeout_s)

    async def _record_exit(self, handle: CoreHandle, pump: asyncio.Task[None]) -> int:
        code = await handle.wait()
        self.life.died_at_ns = now_ns()
        self.life.exit_code = code
        # Grandchildren may hold the pipe open; the last words are there by then or never.
        await asyncio.wait((pump,), timeout=0.2)
        pump.cancel()
        self.life.exit_reason = self._describe(code)
        self.life.state = "dead"
        return _UNKNOWN_EXIT_CODE if code is None else code

    def _describe(self, code: int | None) -> str:
        if code is None:
            return f"core {self.life.pid} ended; how, only its template knew, which has ended too"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        said = next((line for line in reversed(self._tail) if line.strip()), "") if code > 0 else ""
        return f"core {self.life.pid} {how}" + (f": {said}" if said else "")

    def signal(self, number: signal.Signals) -> None:
        if self._handle is not None:
            self._handle.send_signal(number)

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
        with contextlib.suppress(OSError):  # its name is never used again
            os.unlink(self.socket_path)
