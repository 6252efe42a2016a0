"""`ManagedCore`: one core as its supervisor uses it: process, session and record together.

`open` until it can serve or be promoted, `promote` if it is a standby, `serve` until it is dead, and at the end
always `bury`. Which requests it works on is InFlight's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any, Protocol

from preload.engine.timeline import Phase, now_ns
from preload.protos import engine_core_pb2 as pb

from .core_client import CoreCallError, CoreSession
from .core_process import CoreCommand, CoreLife, CoreProcess
from .errors import StartError
from .watchdog import watch

STATS_TIMEOUT_S = 2.0
_PROMOTE_TIMEOUT_S = 5.0
_LAST_WORDS_S = 0.5


class CoreSource(Protocol):
    """Where processes for cores come from, and where they are remembered."""

    def new_process(self) -> CoreProcess: ...

    def note_unready(self, life: CoreLife) -> None: ...


class ManagedCore:
    """One core. Used from one event loop."""

    def __init__(self, source: CoreSource, process: CoreProcess, *, standby: bool = False) -> None:
        self._source = source
        self.process = process
        self.standby = standby
        self.stats: pb.StatsResponse | None = None
        self._session: CoreSession | None = None
        self._draining = asyncio.Event()

    @staticmethod
    async def start(source: CoreSource, command: CoreCommand, *, standby: bool = False) -> ManagedCore:
        """Spawns a core. Raises StartError."""
        process = source.new_process()
        try:
            await process.start(command)
        except StartError as error:
            process.life.state, process.life.exit_reason = "dead", str(error)
            raise
        except asyncio.CancelledError:
            if process.life.pid:
                await process.kill()
            raise
        return ManagedCore(source, process, standby=standby)

    @property
    def life(self) -> CoreLife:
        return self.process.life

    @property
    def session(self) -> CoreSession:
        assert self._session is not None, "the core is not open"
        return self._session

    @property
    def is_open(self) -> bool:
        return self._session is not None

    async def open(self, timeout_s: float) -> None:
        """Connects, and returns when the core is SERVING, or a standby warm. Raises StartError, also on its death."""
        opening = asyncio.create_task(self._open())
        exited = asyncio.create_task(self.process.wait_exit())
        try:
            await asyncio.wait((opening, exited), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                return opening.result()
            if exited.done():
                raise StartError("it ended before it was ready")
            raise StartError(f"the core was not ready after {timeout_s:g} s")
        except StartError:
            self._source.note_unready(self.life)
            raise
        finally:
            for task in (opening, exited):
                task.cancel()
            await asyncio.gather(opening, exited, return_exceptions=True)

    async def _open(self) -> None:
        await self.process.wait_listening()
        session = CoreSession(self.process.socket_path)
        try:
            if self.standby:
                await self._take_stats(session, None)
            else:
                await session.wait_serving()
        except CoreCallError as error:
            await session.close()
            raise StartError(f"the standby hung up before it was warm: {error}") from error
        except BaseException:
            await session.close()
            raise
        self._session = session
        if self.standby:
            self.life.warm_at_ns = now_ns()
            self.life.state = "standby"
        else:
            self._note_ready()

    @property
    def draining(self) -> bool:
        """Whether it takes no more requests, because somebody told it to end."""
        return self._draining.is_set()

    def note_draining(self) -> None:
        self._draining.set()

    async def promote(self) -> None:
        """Makes an open standby serve. Raises StartError."""
        try:
            await self.session.promote(_PROMOTE_TIMEOUT_S)
        except CoreCallError as error:
            raise StartError(f"the standby could not be promoted: {error}") from error
        self.standby = False
        self._note_ready()

    def _note_ready(self) -> None:
        self.life.ready_at_ns = now_ns()
        self.life.state = "serving"

    async def serve(
        self, on_output: Callable[[pb.RequestOutput], None], has_work: Callable[[], bool], step_timeout_s: float
    ) -> str:
        """Until the stream breaks, the process ends, hangs or drains, whichever shows first; returns the reason."""
        stream = asyncio.create_task(self.session.run(on_output))
        return await self._until_over(stream, has_work, step_timeout_s)

    async def wait_over(self, step_timeout_s: float) -> str:
        """The same for a standby, which has no stream."""
        return await self._until_over(None, lambda: False, step_timeout_s)

    async def _until_over(
        self, stream: asyncio.Task[str] | None, has_work: Callable[[], bool], step_timeout_s: float
    ) -> str:
        exited = asyncio.create_task(self.process.wait_exit())
        hung = asyncio.create_task(watch(self.session, has_work, step_timeout_s))
        draining = asyncio.create_task(self._draining.wait())
        tasks: list[asyncio.Task[Any]] = [exited, hung, draining, *((stream,) if stream else ())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if hung.done():
                self.process.signal(signal.SIGKILL)
                return hung.result()
            if draining.done():
                return "it was told to end, and takes no more requests"
            return stream.result() if stream is not None and stream.done() else ""
        finally:
            for task in tasks:
                task.cancel()

    async def refresh_stats(self, timeout_s: float = STATS_TIMEOUT_S) -> None:
        """Asks for counters and phases; keeps the old ones of a core that is busy or dying."""
        if self._session is not None:
            with contextlib.suppress(CoreCallError):
                await self._take_stats(self._session, timeout_s)

    async def _take_stats(self, session: CoreSession, timeout_s: float | None) -> None:
        self.stats = await session.stats(timeout_s)
        self.life.phases = [Phase(p.name, p.start_ns, p.end_ns) for p in self.stats.phases]

    async def drain(self, grace_s: float) -> None:
        """Lets it finish and exit by itself, asks it to, and kills it, each after `grace_s`."""
        if self._session is not None:
            with contextlib.suppress(CoreCallError):  # one that is gone has drained already
                await self._session.drain(grace_s)
            await self.process.wait_exit_for(grace_s)
        await self.process.stop(grace_s)

    async def bury(self, why: str = "") -> None:
        """The end of a core that is of no more use; what it died of becomes part of its record."""
        # A broken stream is mostly the first sign of a death: let the process say what it died of.
        await self.process.wait_exit_for(_LAST_WORDS_S)
        await self.process.kill()
        if why:
            self.life.exit_reason = f"{self.life.exit_reason} ({why})"
        if self._session is not None:
            await self._session.close()
