"""A rolling update of one service: another core, with other flags or other weights, takes over; no request is lost.

    load → start → canary → switch → drain → retire

Up to the switch, a failure leaves everything as it was. After it, new requests go to the new core; the old ones
finish on the old core, or move to the new one after the drain time if the weights are the same.

With `evict_first` there is never more than one core, for hosts without room for two: new requests wait, the old ones
finish, the old core ends and its generation is evicted before the new one is loaded. With the same weights, what has
not finished after the drain time waits as well. When the new core fails, the old one is loaded and started again. The
service pauses meanwhile, but refuses nobody for whom there is room in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from preload.engine.errors import CheckpointNotFoundError, CoreError, PreloadError, RequestError
from preload.protos import engine_core_pb2 as pb

from .canary import check_canary
from .config import FrontendConfig
from .deployment import Deployment
from .deployment_factory import TextSide, load_text_side
from .errors import StartError
from .hold import WeightsHold
from .residency import Loaded, let_go, load
from .service import Service
from .update import Update, changes_text, changes_weights, updated_config

Report = Callable[[dict[str, Any]], None]
_PROGRESS_S = 0.25


class Rollout:
    """One update. `run` it once; only one at a time runs in a service."""

    def __init__(self, service: Service, update: Update, report: Report) -> None:
        self._service = service
        self._update = update
        self._report = report
        self._started = time.monotonic()
        self._last_progress_s, self._last_progress = 0.0, ""

    async def run(self) -> None:
        """Reports each step. Raises PreloadError: nothing has changed then, or the message says what has."""
        if self._service.draining:
            raise RequestError("the service is shutting down")
        if self._service.updating.locked():
            raise RequestError("another update of this service is under way; wait for it")
        async with self._service.updating:
            old = self._service.current
            if self._update.to and not os.path.exists(self._update.to):
                raise CheckpointNotFoundError(f"{self._update.to}: no such file or folder; nothing has changed")
            config = updated_config(old.config, self._update)
            try:
                text_side = TextSide(tokenizer=old.tokenizer, chat_template=old.chat_template)
                if changes_text(self._update):
                    text_side = await asyncio.to_thread(load_text_side, config)
                self._service.factory.make(config, text_side)  # an impossible configuration is found out now
                if self._update.evict_first:
                    await self._one_after_the_other(old, config, text_side)
                else:
                    await self._side_by_side(old, config, text_side)
            except StartError as error:
                raise CoreError(f"{error}; nothing has changed") from error
            self._say("done", "the update is complete", generation=self._service.current.config.generation)

    async def _side_by_side(self, old: Deployment, config: FrontendConfig, text_side: TextSide) -> None:
        loaded = await self._load(config)
        if loaded is not None:
            config = replace(config, generation=loaded.generation_id)
        same_weights = config.generation == old.config.generation
        try:
            running = old if same_weights else None
            new = await self._bring_up(config, text_side, running, None if loaded is not None else old.hold)
        except StartError as error:
            if loaded is not None and not loaded.was_resident:
                self._say("rollback", await let_go(config.runtime_dir, loaded.generation_id))
            raise CoreError(f"rolled back: {error}; the service goes on as it was") from error
        await self._announce_memory(old, new, same_weights)
        self._service.current = new
        self._say("switch", "new requests go to the new core", pid=self._pid(new))
        await self._drain(old, new, same_weights)
        await self._end(old)
        if not same_weights:
            await self._retire(old)

    async def _one_after_the_other(self, old: Deployment, config: FrontendConfig, text_side: TextSide) -> None:
        same_weights = not changes_weights(self._update)
        if not (same_weights or old.config.checkpoint):
            raise RequestError("the running weights could not be loaded again without their checkpoint")
        hold = old.hold.share() if same_weights else None  # between the cores, nobody else has a lease on them
        self._service.hold_requests()
        try:
            await self._finish(old, same_weights)
            try:
                loaded = await self._load(config)
                if loaded is not None:
                    config = replace(config, generation=loaded.generation_id)
                new = await self._bring_up(config, text_side, None, hold)
            except PreloadError as error:
                outcome = await self._restore(old, hold)
                raise CoreError(f"rolled back: {error}; {outcome}") from error
            self._replace(old, new, same_weights)
            self._say("switch", "the new core takes the requests that waited", pid=self._pid(new))
        finally:
            self._service.release_requests()
            if hold is not None:
                await hold.release()

    async def _finish(self, old: Deployment, same_weights: bool) -> None:
        """Ends the only core. What is left of its requests waits in flight, if the next one can go on with them."""
        self._say("hold", f"new requests wait; {old.num_users} finish on the old core", requests=old.num_users)
        if same_weights:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(old.unused.wait(), self._drain_s(old))
            if old.num_users:
                self._say("hold", f"{old.num_users} more wait, and go on with the new core", requests=old.num_users)
            old.in_flight.recall()
        else:
            await old.unused.wait()
        await old.stop()  # it stays among the deployments: its requests may have to be ended
        if not same_weights:
            await self._retire(old)

    def _replace(self, old: Deployment, new: Deployment, same_weights: bool) -> None:
        """After `_finish`: the new deployment takes what waits."""
        self._service.current = new
        if same_weights:
            old.hand_over_to(new)
        self._service.deployments.remove(old)

    async def _load(self, config: FrontendConfig) -> Loaded | None:
        """Makes the wanted weights resident; None when others were not asked for."""
        if not changes_weights(self._update):
            return None
        self._say("load", f"loading {config.checkpoint}")
        loaded = await load(config, self._on_progress)
        how = "was resident" if loaded.was_resident else "is loaded"
        self._say("load", f"generation {loaded.generation_id[:12]} {how}", resident_bytes=loaded.resident_bytes)
        return loaded

    def _on_progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if not total_bytes or now - self._last_progress_s < _PROGRESS_S:
            return
        text = f"{phase} {done_bytes / total_bytes:.0%}"
        if text != self._last_progress:
            self._last_progress_s, self._last_progress = now, text
            self._say("load", text, done_bytes=done_bytes, total_bytes=total_bytes)

    async def _bring_up(
        self, config: FrontendConfig, text_side: TextSide, running: Deployment | None, hold: WeightsHold | None
    ) -> Deployment:
        """A deployment that serves and has passed its canary. Raises StartError; nothing is left of it then."""
        new = self._make(config, text_side, hold)
        self._service.deployments.append(new)
        self._service.watch(new.start())
        try:
            self._say("start", "a new core is being started")
            await new.supervisor.wait_serving()
            self._say("start", "the new core is ready", pid=self._pid(new))
            reference = running if running is not None and running.supervisor.serving else None
            self._say("canary", await self._pass_canary(new, reference))
        except BaseException:
            await self._end(new)
            raise
        return new

    async def _pass_canary(self, new: Deployment, running: Deployment | None) -> str:
        """The core has to live through it, and within the time it may take to become ready."""
        canary = asyncio.create_task(check_canary(new, running))
        death = new.supervisor.first_death
        try:
            limit_s = new.config.core_ready_timeout_s
            await asyncio.wait((canary, death), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if canary.done():
                return canary.result()
            raise StartError(f"the canary: {death.result() if death.done() else f'no answer within {limit_s:g} s'}")
        finally:
            canary.cancel()
            await asyncio.gather(canary, return_exceptions=True)

    async def _announce_memory(self, old: Deployment, new: Deployment, same_weights: bool) -> None:
        memory = Memory.of(await old.supervisor.current_stats(), await new.supervisor.current_stats(), same_weights)
        self._say("memory", memory.text(), **memory.to_json())

    async def _drain(self, old: Deployment, new: Deployment, same_weights: bool) -> None:
        self._say("drain", f"{old.num_users} requests finish on the old core", requests=old.num_users)
        if same_weights:
            try:
                await asyncio.wait_for(old.unused.wait(), self._drain_s(old))
            except TimeoutError:
                if await new.can_take_over(old):
                    num_moved = old.hand_over_to(new)
                    self._say("drain", f"{num_moved} sequences move to the new core", moved=num_moved)
                    return
                self._say("drain", f"{old.num_users} requests are too long for the new core, and finish on the old")
        await old.unused.wait()

    async def _end(self, deployment: Deployment) -> None:
        await deployment.stop()
        if deployment in self._service.deployments:
            self._service.deployments.remove(deployment)

    async def _retire(self, old: Deployment) -> None:
        if not old.config.generation:
            return
        try:
            self._say("retire", await let_go(old.config.runtime_dir, old.config.generation))
        except PreloadError as error:
            self._say("retire", f"the old generation stays: {error.message}")

    async def _restore(self, old: Deployment, hold: WeightsHold | None) -> str:
        """Loads and starts again what served before an update that had no room to keep it; says what serves now.

        The files may have changed under the old weights, as when a link was switched: then nothing brings those back,
        and what is there now is served as what it is."""
        self._say("rollback", "the old core is started again")
        config, text_side = old.config, TextSide(tokenizer=old.tokenizer, chat_template=old.chat_template)
        outcome = "the old core serves again"
        try:
            if changes_weights(self._update):
                found = (await load(config, self._on_progress)).generation_id
                if found != config.generation:
                    text_side = await asyncio.to_thread(load_text_side, config)
                    outcome = (
                        f"{config.checkpoint} does not hold generation {config.generation[:12]} any more, so that "
                        f"generation {found[:12]}, which it holds now, serves instead"
                    )
                    self._say("rollback", outcome, generation=found)
                config = replace(config, generation=found)
        except PreloadError as error:  # its core fails as well, but then clients hear why
            outcome = f"the old weights cannot be had again either: {error}"
        restored = self._make(config, text_side, hold)
        self._service.deployments.append(restored)
        self._service.watch(restored.start())
        self._replace(old, restored, not changes_weights(self._update))
        return outcome

    def _make(self, config: FrontendConfig, text_side: TextSide, hold: WeightsHold | None) -> Deployment:
        """Idle, with a share of a hold on the same weights."""
        fits = hold is not None and hold.suits(config)
        return self._service.factory.make(config, text_side, hold.share() if hold is not None and fits else None)

    def _drain_s(self, old: Deployment) -> float:
        return old.config.drain_timeout_s if self._update.drain_s is None else self._update.drain_s

    @staticmethod
    def _pid(deployment: Deployment) -> int:
        return deployment.supervisor.serving_pid

    def _say(self, step: str, message: str, **details: Any) -> None:
        self._report({"step": step, "message": message, "s": round(time.monotonic() - self._started, 3), **details})


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What an update holds at its peak, while two cores serve. Weights that are the same are held once."""

    weights_bytes: int
    new_weights_bytes: int
    kv_cache_bytes: int
    new_kv_cache_bytes: int

    @staticmethod
    def of(old: pb.StatsResponse | None, new: pb.StatsResponse | None, same_weights: bool) -> Memory:
        """From the counters of both cores; one that does not answer counts as nothing."""
        old, new = old or pb.StatsResponse(), new or pb.StatsResponse()
        return Memory(
            weights_bytes=old.weights_bytes,
            new_weights_bytes=0 if same_weights else new.weights_bytes,
            kv_cache_bytes=old.kv_cache_bytes,
            new_kv_cache_bytes=new.kv_cache_bytes,
        )

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.new_weights_bytes + self.kv_cache_bytes + self.new_kv_cache_bytes

    def text(self) -> str:
        return (
            f"at most {self.peak_bytes:,} bytes: weights {self.weights_bytes:,} + {self.new_weights_bytes:,}, "
            f"KV caches {self.kv_cache_bytes:,} + {self.new_kv_cache_bytes:,}"
        )

    def to_json(self) -> dict[str, int]:
        return {**self.__dict__, "peak_bytes": self.peak_bytes}
