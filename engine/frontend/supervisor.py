"""`Supervisor`: there is always a core for one deployment, or one is being started.

Owns the deployment's cores: one that serves, and its standbys. When the serving core dies or hangs, a standby is
promoted at once, or else another core is started; one that keeps dying young is replaced after a growing pause. The
requests themselves are InFlight's.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from preload.engine.timeline import now_ns
from preload.protos import engine_core_pb2 as pb

from .backoff import Backoff
from .core_process import CoreCommand, CoreLife, CoreProcess
from .core_records import CoreRecords
from .errors import StartError
from .managed_core import ManagedCore
from .metrics import Metrics
from .requests import InFlight
from .standbys import Standbys

_STOP_GRACE_S = 2.0
_EXIT_SEEN_S = 0.5
_NO_PROCESS_S = 0.5
_CALM_S = 2.0
"""After a core has begun to serve, until its first token or for so long, no standby is started beside it."""


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    """How the cores of one deployment are started and watched."""

    command: CoreCommand
    standby_command: CoreCommand
    num_standbys: int
    ready_timeout_s: float
    step_timeout_s: float


class Supervisor:
    """Runs cores until it is stopped. Used from one event loop."""

    def __init__(
        self, *, options: SupervisorOptions, records: CoreRecords, in_flight: InFlight, metrics: Metrics
    ) -> None:
        self._options = options
        self._records = records
        self._in_flight = in_flight
        self._metrics = metrics
        self._backoff = Backoff()
        self._stopping = asyncio.Event()
        self._standbys = Standbys(
            options.num_standbys,
            self._start_standby,
            ready_timeout_s=options.ready_timeout_s,
            step_timeout_s=options.step_timeout_s,
        )
        loop = asyncio.get_running_loop()
        self._known_stats: asyncio.Future[pb.StatsResponse] = loop.create_future()
        self.first_death: asyncio.Future[str] = loop.create_future()
        self._core: ManagedCore | None = None
        self._serving = asyncio.Event()
        self.refused_configuration = False
        """Of the last core that died."""
        self._last_death: CoreLife | None = None
        self._last_words: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def serving(self) -> bool:
        return self._serving.is_set()

    @property
    def serving_pid(self) -> int:
        """0 if none serves."""
        return self._core.life.pid if self._core is not None and self.serving else 0

    @property
    def num_warm_standbys(self) -> int:
        return self._standbys.num_warm

    @property
    def failing(self) -> bool:
        """Cores die before they are ready, again and again: waiting would be in vain."""
        dead = self._last_death
        return self._backoff.num_young >= 2 and not self.serving and dead is not None and dead.ready_at_ns is None

    def reasons(self) -> list[str]:
        """Why no core is serving; empty when one is."""
        if self.serving:
            return []
        now = "is being started" if self._core is not None else "will be started"
        reasons = [f"an engine core {now}"]
        if self._last_death is not None and self._last_death.exit_reason is not None:
            reasons.append(self._last_death.exit_reason)
        return reasons

    @property
    def last_words(self) -> list[str]:
        """The tail of what the last dead core wrote."""
        return self._last_words

    async def model_stats(self) -> pb.StatsResponse:
        """What the first core that was ready said of the model; waits for it."""
        return await asyncio.shield(self._known_stats)

    async def wait_serving(self) -> None:
        """Returns when a core serves. Raises StartError with the reason when one dies before."""
        serving = asyncio.create_task(self._serving.wait())
        try:
            await asyncio.wait((serving, self.first_death), return_when=asyncio.FIRST_COMPLETED)
            if self.first_death.done():
                raise StartError(self.first_death.result())
        finally:
            serving.cancel()

    async def run(self, first: CoreProcess | None = None) -> None:
        """Serves with `first`, if it has been started already, and with core after core until `stop`."""
        standbys = asyncio.create_task(self._standbys.run())
        try:
            core = ManagedCore(self._records, first) if first is not None else await self._start_core()
            while True:
                await self._one_life(core)
                successor = None if self._stopping.is_set() else await self._successor(core)
                if successor is None:
                    return
                core = successor
        finally:
            standbys.cancel()
            await asyncio.gather(standbys, *self._tasks, return_exceptions=True)

    async def _start_core(self) -> ManagedCore:
        """A new process. One that cannot be had, for want of memory or descriptors, may be had later."""
        while True:
            try:
                return await ManagedCore.start(self._records, self._options.command)
            except StartError as error:
                life = self._records.lives[-1]
                self._last_death = life
                print(f"preload serve: {error}", file=sys.stderr, flush=True)
                await self._pause(max(_NO_PROCESS_S, self._backoff.after(life)))

    async def _start_standby(self) -> ManagedCore:
        return await ManagedCore.start(self._records, self._options.standby_command, standby=True)

    async def _one_life(self, core: ManagedCore) -> None:
        """From wherever it is in its start to its death; its requests wait for the next one then."""
        self._core = core
        self._standbys.hold()
        why = ""
        try:
            if not core.is_open:
                await core.open(self._options.ready_timeout_s)
            why = await self._serve(core)
        except StartError as error:
            why = str(error)
        finally:
            self._core = None
            self._background(self._bury(core, why))

    async def _serve(self, core: ManagedCore) -> str:
        session = core.session
        self._serving.set()
        self._metrics.core_ready.inc()
        print(f"preload serve: engine core {core.life.pid} serves", file=sys.stderr, flush=True)
        self._in_flight.on_first_token = lambda: self._note_first_token(core)
        self._in_flight.on_draining = core.note_draining
        self._in_flight.attach(session)
        self._background(self._learn_stats(core))
        calm = asyncio.get_running_loop().call_later(_CALM_S, self._standbys.release)
        try:
            return await core.serve(
                self._in_flight.on_output, lambda: self._in_flight.core_has_work, self._options.step_timeout_s
            )
        finally:
            calm.cancel()
            self._standbys.hold()
            self._serving.clear()
            self._metrics.core_ready.dec()
            self._in_flight.on_first_token = self._in_flight.on_draining = None
            if core.draining:
                self._in_flight.recall()
            self._in_flight.detach(session)

    async def _bury(self, core: ManagedCore, why: str) -> None:
        await core.bury(why)
        if not self._stopping.is_set():
            print(f"preload serve: {core.life.exit_reason or why}", file=sys.stderr, flush=True)
        self.refused_configuration = core.process.refused_configuration
        self._last_death = core.life
        self._last_words = core.process.tail
        if not self.first_death.done():
            self.first_death.set_result(core.life.exit_reason or why)

    async def _pause(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _successor(self, dead: ManagedCore) -> ManagedCore | None:
        """A promoted standby, or a core that has been started; None when told to stop. Requests wait meanwhile."""
        if delay_s := self._backoff.after(dead.life):
            await self._pause(delay_s)
        if self._stopping.is_set():
            return None
        self._metrics.core_restarts.inc()
        while (standby := await self._standbys.take()) is not None:
            try:
                await standby.promote()
            except StartError as error:
                self._background(self._bury(standby, str(error)))
            else:
                return standby
        await dead.process.wait_exit_for(_EXIT_SEEN_S)  # its memory should be back before another takes some
        return await self._start_core()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _note_first_token(self, core: ManagedCore) -> None:
        core.life.first_token_at_ns = now_ns()
        self._standbys.release()
        self._background(self._learn_stats(core))

    async def _learn_stats(self, core: ManagedCore) -> None:
        await core.refresh_stats(self._options.ready_timeout_s)
        if core.stats is not None and not self._known_stats.done():
            self._known_stats.set_result(core.stats)

    async def current_stats(self) -> pb.StatsResponse | None:
        """Fresh counters of the core that serves; None if none does."""
        core = self._core
        if core is None or not self.serving:
            return None
        await core.refresh_stats()
        return core.stats

    async def stop(self, runner: asyncio.Task[None]) -> None:
        """Ends the cores (drain, SIGTERM, SIGKILL) and then `runner`, the task of `run`."""
        self._stopping.set()
        if self._core is not None:
            await self._core.drain(_STOP_GRACE_S)
        await asyncio.wait((runner,), timeout=_STOP_GRACE_S)
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
        if not self._known_stats.done():
            self._known_stats.cancel()
