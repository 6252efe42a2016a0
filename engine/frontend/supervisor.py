"""`Supervisor`: there is always a core, or one is being started.

Owns the core processes, one at a time, and their records. A dead core is replaced at once; one that keeps dying
young is replaced after a growing pause. The requests themselves are InFlight's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc.aio

from preload.engine.timeline import Phase, now_ns
from preload.protos import engine_core_pb2 as pb

from .core_client import CoreSession
from .core_process import CoreCommand, CoreLife, CoreProcess
from .errors import StartError
from .metrics import Metrics
from .requests import InFlight

MAX_BACKOFF_S = 30.0
_FIRST_BACKOFF_S = 0.5
_YOUNG_S = 10.0
_HISTORY = 64
_STOP_GRACE_S = 2.0
_STATS_TIMEOUT_S = 2.0


class Backoff:
    """How long to wait before the next core.

    A core is young if it dies before it was ready or within 10 s of it. One that was ready is replaced at once
    three times in a row, one that was not once; then the pause doubles from 0.5 s to 30 s.
    """

    def __init__(self) -> None:
        self.num_young = 0

    def after(self, life: CoreLife) -> float:
        """Seconds to wait after the death of `life`."""
        died_at_ns = life.died_at_ns or now_ns()
        was_ready = life.ready_at_ns is not None
        if life.ready_at_ns is not None and died_at_ns - life.ready_at_ns >= _YOUNG_S * 1e9:
            self.num_young = 0
            return 0.0
        self.num_young += 1
        excess = self.num_young - (3 if was_ready else 1)
        return 0.0 if excess <= 0 else min(MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (excess - 1))


class Supervisor:
    """Runs cores until it is stopped."""

    def __init__(
        self,
        *,
        command: CoreCommand,
        socket_dir: str,
        in_flight: InFlight,
        metrics: Metrics,
        ready_timeout_s: float,
    ) -> None:
        self._command = command
        self._socket_dir = socket_dir
        self._in_flight = in_flight
        self._metrics = metrics
        self._ready_timeout_s = ready_timeout_s
        self._backoff = Backoff()
        self._stopping = asyncio.Event()
        self._known_stats: asyncio.Future[pb.StatsResponse] = asyncio.get_running_loop().create_future()
        self._process: CoreProcess | None = None
        self._session: CoreSession | None = None
        self._last_words: list[str] = []
        self.lives: deque[CoreLife] = deque(maxlen=_HISTORY)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def serving(self) -> bool:
        return self._session is not None

    @property
    def failing(self) -> bool:
        """Cores die before they are ready, again and again: waiting would be in vain."""
        dead = [life for life in self.lives if life.state == "dead"]
        return self._backoff.num_young >= 2 and not self.serving and dead[-1].ready_at_ns is None

    def reasons(self) -> list[str]:
        """Why no core is serving; empty when one is."""
        if self.serving:
            return []
        now = "is being started" if self._process is not None else "will be started"
        reasons = [f"an engine core {now}"]
        dead = next((life for life in reversed(self.lives) if life.exit_reason), None)
        if dead is not None and dead.exit_reason is not None:
            reasons.append(dead.exit_reason)
        return reasons

    @property
    def last_words(self) -> list[str]:
        """The tail of what the last dead core wrote."""
        return self._last_words

    async def model_stats(self) -> pb.StatsResponse:
        """What the first core that was ready said of the model; waits for it."""
        return await asyncio.shield(self._known_stats)

    async def run(self, first: CoreProcess) -> None:
        """Serves with `first`, which has been started, and starts core after core until `stop`."""
        process = first
        while not self._stopping.is_set():
            life = await self._one_life(process)
            if self._stopping.is_set():
                return
            delay_s = self._backoff.after(life)
            try:
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            except TimeoutError:
                self._metrics.core_restarts.inc()
            process = CoreProcess(process.life.serial + 1, self._socket_dir)
            await process.start(self._command)

    async def _one_life(self, process: CoreProcess) -> CoreLife:
        self.lives.append(process.life)
        self._process = process
        exit_task = asyncio.create_task(process.wait_exit())
        serve_task = asyncio.create_task(self._serve(process))
        try:
            await asyncio.wait((exit_task, serve_task), return_when=asyncio.FIRST_COMPLETED)
            if serve_task.done():
                # A broken stream is mostly the first sign of a death: let the process say what it died of.
                await process.wait_exit_for(0.5)
        finally:
            serve_task.cancel()
            await asyncio.gather(serve_task, return_exceptions=True)
            await process.kill()
            exit_task.cancel()
            self._last_words = process.tail
            self._process = None
        if not serve_task.cancelled() and (error := serve_task.exception()) is not None:
            process.life.exit_reason = f"{process.life.exit_reason} ({error})"
        return process.life

    async def _serve(self, process: CoreProcess) -> None:
        session: CoreSession | None = None
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                await process.wait_listening()
                session = CoreSession(process.socket_path)
                await session.wait_serving()
            process.life.ready_at_ns = now_ns()
            process.life.state = "serving"
            stream = asyncio.create_task(session.run(self._in_flight.on_output))
            self._open(process, session)
            try:
                await self._record_stats(process.life, session, timeout_s=self._ready_timeout_s)
                raise StartError(await stream)
            finally:
                stream.cancel()
        except TimeoutError as error:
            raise StartError(f"the core was not ready after {self._ready_timeout_s:g} s") from error
        finally:
            if session is not None:
                self._close(session)
                await session.close()

    def _open(self, process: CoreProcess, session: CoreSession) -> None:
        self._session = session
        self._metrics.core_ready.set(1)
        self._in_flight.on_first_token = lambda: self._note_first_token(process.life, session)
        self._in_flight.attach(session)

    def _close(self, session: CoreSession) -> None:
        if self._session is session:
            self._session = None
            self._metrics.core_ready.set(0)
            self._in_flight.on_first_token = None
        self._in_flight.detach(session)

    def _note_first_token(self, life: CoreLife, session: CoreSession) -> None:
        life.first_token_at_ns = now_ns()
        task = asyncio.create_task(self._record_stats(life, session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _record_stats(
        self, life: CoreLife, session: CoreSession, *, timeout_s: float = _STATS_TIMEOUT_S
    ) -> None:
        try:
            stats = await session.stats(timeout_s)
        except grpc.aio.AioRpcError:
            # Busy or dying: its phases are asked for again, and its death is noticed elsewhere.
            return
        life.phases = [Phase(p.name, p.start_ns, p.end_ns) for p in stats.phases]
        if not self._known_stats.done():
            self._known_stats.set_result(stats)

    async def describe(self) -> list[dict[str, Any]]:
        """The record of every core, oldest first; phases of the current one are fresh."""
        if self._session is not None and self._process is not None:
            await self._record_stats(self._process.life, self._session)
        return [life.to_json() for life in self.lives]

    async def stop(self, runner: asyncio.Task[None]) -> None:
        """Ends the current core (drain, SIGTERM, SIGKILL) and then `runner`, the task of `run`."""
        self._stopping.set()
        process, session = self._process, self._session
        if process is not None:
            if session is not None:
                await session.drain(_STOP_GRACE_S)
                await process.wait_exit_for(_STOP_GRACE_S)
            await process.stop(_STOP_GRACE_S)
        await asyncio.wait((runner,), timeout=_STOP_GRACE_S)
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
        if not self._known_stats.done():
            self._known_stats.cancel()
