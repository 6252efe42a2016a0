"""The two ways a core comes into being, behind one interface: a process of its own, or a fork of the template."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from preload.engine.places import living_folder
from preload.engine.template.client import ForkedProcess, NoForkError, fork_core, start_template
from preload.engine.template.fingerprint import Place

from .errors import StartError

CoreCommand = Callable[[str, int], Sequence[str]]
"""(socket path, spawned_at_ns) to the command line of a core."""

_CORE_MODULE = "preload.engine.core"


@dataclass(frozen=True)
class TemplatedCommand:
    """The command line of a core that may as well be forked from the template at `place`."""

    command: CoreCommand
    place: Place

    def __call__(self, socket_path: str, spawned_at_ns: int) -> Sequence[str]:
        return self.command(socket_path, spawned_at_ns)


class CoreHandle(Protocol):
    """A running core, whoever its parent is."""

    @property
    def pid(self) -> int: ...

    @property
    def output(self) -> asyncio.StreamReader: ...

    async def wait(self) -> int | None:
        """The exit code, negative for a signal; None if nobody knows it."""

    def send_signal(self, number: signal.Signals) -> None:
        """To the process, or to nobody when it has ended."""


class FreshCore:
    """A process that the frontend started. It dies with the frontend's main thread."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        assert process.stdout is not None
        self.output = process.stdout

    async def wait(self) -> int | None:
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class ForkedCore:
    """A process that the template forked. It dies with the frontend, not with the template."""

    def __init__(self, process: ForkedProcess, output: asyncio.StreamReader) -> None:
        self._process = process
        self.pid = process.pid
        self.output = output

    async def wait(self) -> int | None:
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


async def start_fresh(arguments: Sequence[str]) -> FreshCore:
    """In a session of its own, so that Ctrl-C reaches only the frontend. Raises StartError."""
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            cwd=living_folder(),
        )
    except OSError as error:
        raise StartError(f"the engine core cannot be started: {error}") from error
    return FreshCore(process)


async def start_forked(arguments: Sequence[str], place: Place) -> ForkedCore | None:
    """A core from the template; None, with a line that says why, if there is none to be had."""
    # What comes after the module's name is the core's; ValueError: the command is not our core's.
    own_words = arguments[arguments.index(_CORE_MODULE) + 1 :]
    try:
        process = await fork_core(place, own_words)
    except NoForkError as error:
        if not error.is_absent:
            _say(f"{error}; the core is started as a process")
        return None
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(process.output, "rb", 0)
    try:
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    except OSError as error:
        process.abandon()
        pipe.close()
        _say(f"the output of a forked core cannot be read: {error}; the core is started as a process")
        return None
    return ForkedCore(process, reader)


async def provide_template(place: Place) -> None:
    """Has a template for the next core. It is a convenience: a failure is told, and nothing more."""
    try:
        await start_template(place)
    except OSError as error:
        _say(f"no template can be started: {error}")


def _say(text: str) -> None:
    print(f"preload serve: {text}", file=sys.stderr, flush=True)
