"""`WeightCache`: the daemon's domain, free of gRPC. Every rpc is one method here.

Single-threaded on the event loop: between two awaits nothing else runs, so there are no locks; after every await
the state of a generation is looked at again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from . import receipts
from .config import DaemonConfig
from .devices import Devices
from .disk import Disk
from .errors import (
    CacheError,
    CheckpointChangedError,
    CorruptedError,
    DrainingError,
    LoadFailedError,
    NotResidentError,
    RetiringError,
    StillLoadingError,
)
from .generations import Catalog, Generation, Progress, Rank, Recipe, Source, State
from .holders import Holders
from .leases import Event, Lease, LeaseBook
from .loads import Loads, VerifyResult
from .notify import Notifier
from .parking import Parking
from .residency import Residency
from .segments.closer import all_closed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selector:
    """By source on disk, by content digest with recipe and rank, or by generation id (or a prefix of it). `device`
    counts for the latter two; empty means any."""

    source: Source | None = None
    digest: str = ""
    recipe: Recipe | None = None
    rank: Rank | None = None
    generation_id: str = ""
    device: str = ""


@dataclass(frozen=True)
class Changed:
    """What a load found: these files are no longer those of the generation that was loaded from there."""

    generation_id: str
    paths: list[str]


class WeightCache:
    """Generations, leases and loads of one daemon life."""

    def __init__(self, config: DaemonConfig, notifier: Notifier, epoch: int) -> None:
        self.config = config
        self.started_s = time.monotonic()
        self.draining = False
        self.trouble = ""
        """Why nobody can come in, if so: holders of leases go on."""
        self.catalog = Catalog()
        self.leases = LeaseBook(config.ticket_ttl_s)
        holders = Holders(config.runtime_dir, is_kept=notifier.has_manager)
        self.devices = Devices(config.host_limit, config.device_limit, holders, config.device_memory)
        self.parking = Parking(notifier, self.catalog, self.leases, self.devices, epoch)
        self._disk = Disk()
        self.residency = Residency(
            self.catalog, self.leases, self.devices, self.parking, self._disk, frozenset(config.models)
        )
        self.loads = Loads(self.catalog, self.residency, self.devices, config)

    @property
    def hands_over(self) -> bool:
        """Whether a keeper holds the weights, so that leases go on in the next life."""
        return self.parking.is_kept

    @property
    def epoch(self) -> int:
        """Which life of the daemon this is."""
        return self.parking.epoch

    def restore(self, fds: dict[str, int]) -> None:
        """Takes in what the last life left with the keeper. Raises BadRequestError on an unknown catalog."""
        self.devices.holders.watch(self._lose)
        for revived in self.parking.restore(fds):
            self.residency.revive(revived)
        self.devices.holders.settle()
        self.parking.begin()

    def _lose(self, device: str, failure: CacheError) -> None:
        """The memory behind IPC handles of a device is gone, under whoever uses it or fills it."""
        self.loads.lose(device, failure)
        self.residency.lose(device, failure)

    def reconfigure(self, config: DaemonConfig) -> None:
        """Other limits, times and models from now on. Raises BadRequestError before anything is changed."""
        self.devices.limit(config.host_limit, config.device_limit)
        self.config = config
        self.loads.num_threads = config.loader_threads
        self.leases.ticket_ttl_s = config.ticket_ttl_s
        self.residency.configured = frozenset(config.models)

    async def load(self, source: Source, evict_lru: bool) -> AsyncGenerator[Progress | Changed | Generation, None]:
        """Yields progress until the source is resident, and its generation last. Raises CacheError."""
        self._require_serving()
        try:
            await self.devices.open(source.device)
            await self._disk.require_path(source.path)
        except CacheError as error:
            log.error("load refused: %s", error.message)
            raise
        if not self.loads.is_loading(source):
            async with aclosing(self._if_resident(source)) as looks:
                async for look in looks:
                    self._require_serving()
                    yield look
                    if isinstance(look, Generation):
                        return
            self._require_serving()
        async with aclosing(self.loads.join(source, evict_lru)) as steps:
            async for step in steps:
                yield step

    async def attach(
        self, selector: Selector, pid: int, client: str, reclaim_secret: bytes = b""
    ) -> tuple[Lease, bytes]:
        """A lease on a READY generation, or by id on a RETIRING one in use, and the ticket for its descriptors.

        Or the lease that the secret stands for, whatever became of its generation. Raises CacheError."""
        self._require_serving()
        claimed = self.leases.claim(reclaim_secret, pid, client) if reclaim_secret else None
        if claimed is not None:
            return claimed
        generation = await self.resolve(selector)
        self._require_serving()
        self.catalog.touch(generation)
        granted = self.leases.grant(generation, pid, client)
        self.parking.save()
        return granted

    def release(self, lease: Lease) -> None:
        """Ends a lease with its stream. One that ends because we hand over stays parked, for the next life."""
        if not (self.draining and self.hands_over):
            self.residency.release(lease)

    def release_unclaimed(self) -> None:
        """Ends the leases of an earlier life whose holders have not come back."""
        for lease in self.leases.all():
            if lease.unclaimed:
                log.info("nobody came back for lease %s of process %d", lease.id, lease.pid)
                self.residency.release(lease)

    async def resolve(self, selector: Selector) -> Generation:
        """The READY generation that a selector proves to mean, or names by id while it is RETIRING and in use. Raises
        CacheError saying why there is none."""
        self._require_serving()
        if selector.source is not None:
            await self._disk.require_path(selector.source.path)
            if self.loads.is_loading(selector.source):
                raise self._absence(selector.source)
            generation = await self._resident_at(selector.source)
        else:
            generation = self.find(selector)
            if self._goes_on(generation, selector):
                return generation
        return _require_ready(generation)

    def _goes_on(self, generation: Generation, selector: Selector) -> bool:
        """Whether a retiring generation that is still used may be used by more: a service asks by id for what it
        serves already, and its next process must not depend on what is at the path now."""
        named = bool(selector.generation_id) and generation.state is State.RETIRING
        return named and bool(self.leases.of(generation))

    async def _resident_at(self, source: Source) -> Generation:
        """The READY generation that a source is proved to hold now. Raises CacheError."""
        async with aclosing(self._resident(source)) as looks:
            async for look in looks:
                if isinstance(look, Generation):
                    return look
        raise self._absence(source)

    async def _if_resident(self, source: Source) -> AsyncGenerator[Progress | Changed | Generation, None]:
        """Files that cannot be hashed cannot be loaded either: the load says why, and leaves a FAILED generation."""
        try:
            async with aclosing(self._resident(source)) as looks:
                async for look in looks:
                    yield look
        except CheckpointChangedError as error:
            log.info("loading anew: %s", error.message)
            yield Changed(error.fields["generation"], error.fields["paths"].split("\n"))
        except CacheError as error:
            log.info("loading anew: %s", error.message)

    async def _resident(self, source: Source) -> AsyncGenerator[Progress | Generation, None]:
        """The READY generation that holds what is on disk at the source now, proved by receipts or by hashing; yields
        the progress of that, and nothing last if there is no such generation.

        Raises CheckpointChangedError if the source was bound to one, and holds something else now that is not
        resident."""
        bound = self.catalog.bound(source)
        if bound is not None and bound[0].state is State.READY:
            generation, known = bound
            unproved = await self._disk.stale(source.path, known) or receipts.blind(known)
            if not unproved:
                yield generation
                return
            log.info("receipts of %s prove nothing now (%s): hashing again", source.path, ", ".join(unproved))
        digested = None
        async with aclosing(self.loads.digest(source, self.catalog.outlines(source))) as steps:
            async for step in steps:
                if isinstance(step, Progress):
                    yield step
                else:
                    digested = step
        if digested is None:
            return
        found = self.catalog.twin(digested.generation_id, source.rank, source.device)
        if found is not None:
            self.residency.bind(source, found, digested.receipts)
            yield found
            return
        if bound is None or bound[0].state is not State.READY:
            return
        paths = receipts.changed(bound[1], digested.receipts)
        raise CheckpointChangedError(
            f"{', '.join(paths)} changed on disk since generation {bound[0].id[:12]} was loaded; load the "
            "checkpoint again, or restore the file",
            {"paths": "\n".join(paths), "generation": bound[0].id},
        )

    def _absence(self, source: Source) -> CacheError:
        attempt = self.catalog.attempt(source)
        if attempt is None:
            bound = self.catalog.bound(source)
            if bound is not None and bound[0].state is State.RETIRING:
                return RetiringError(f"generation {bound[0].id[:12]} of {source.path} is retiring; load it anew")
            if bound is not None and bound[0].failure is not None:
                return _load_failed(bound[0], source.path)
            elsewhere = self.catalog.elsewhere(source)
            where = f" on {source.device}, but on {', '.join(elsewhere)}" if elsewhere else ""
            return NotResidentError(
                f"{source.path} is not resident with quantization {source.recipe.quantization}{where}; load it first",
                {"path": source.path},
            )
        if attempt.state is State.LOADING:
            return StillLoadingError(f"{source.path} is still loading", {"path": source.path})
        return _load_failed(attempt, source.path)

    def find(self, selector: Selector) -> Generation:
        """The generation a selector names, in any state, without a look at the disk. Raises CacheError."""
        if selector.generation_id:
            return self.catalog.by_id(selector.generation_id, selector.rank, selector.device)
        if selector.digest:
            assert selector.recipe is not None
            assert selector.rank is not None
            return self.catalog.by_digest(selector.digest, selector.recipe, selector.rank, selector.device)
        assert selector.source is not None
        bound = self.catalog.bound(selector.source)
        generation = self.catalog.attempt(selector.source)
        if bound and (generation is None or (generation.state, bound[0].state) == (State.FAILED, State.READY)):
            generation = bound[0]
        if generation is None:
            raise NotResidentError(
                f"{selector.source.path} is not known here with this recipe", {"path": selector.source.path}
            )
        return generation

    async def evict(self, selector: Selector) -> tuple[Generation, bool]:
        """Ends a generation in whatever state; True if its memory is back already. Raises CacheError."""
        generation = self.find(selector)
        if generation.state is State.LOADING:
            task = self.loads.cancel(generation, "evicted")
            if task is not None:
                await asyncio.wait({task})
        if generation.state is State.FAILED:
            self.catalog.remove(generation)
            is_freed = True
        else:
            is_freed = self.residency.retire(generation)
        await all_closed()
        return generation, is_freed

    async def verify(self, selector: Selector) -> AsyncGenerator[Progress | VerifyResult, None]:
        """Re-hashes a READY generation; the last item is the result.

        Raises CorruptedError naming the tensors; the generation is FAILED then."""
        generation = _require_ready(self.find(selector))
        lease, _ = self.leases.grant(generation, 0, "verify", uid=os.geteuid())
        try:
            source = self.catalog.names(generation)[0]
            async with aclosing(self.loads.verify(generation, source)) as steps:
                async for step in steps:
                    if isinstance(step, VerifyResult) and step.corrupted:
                        raise self._corrupted(generation, step.corrupted)
                    yield step
        finally:
            self.residency.release(lease)

    def _corrupted(self, generation: Generation, names: list[str]) -> CorruptedError:
        failure = CorruptedError(
            f"generation {generation.id[:12]}: resident bytes differ from the manifest in {', '.join(names)}",
            {"tensors": "\n".join(names), "generation": generation.id},
        )
        self.leases.notify(generation, Event.RETIRING)
        self.residency.fail(generation, failure)
        return failure

    def note_failure(self, source: Source, failure: CacheError) -> None:
        """Keeps why a model of the configuration was not even begun, where every other failure is kept as well."""
        if self.catalog.attempt(source) is None and not self.draining:
            self.residency.fail(self.catalog.begin(source), failure)

    def missing_sources(self) -> list[Source]:
        """Models of the configuration whose generation is not READY."""
        bound = {source: self.catalog.bound(source) for source in self.config.models}
        return [source for source, found in bound.items() if found is None or found[0].state is not State.READY]

    def missing_models(self) -> list[str]:
        """Their paths."""
        return [source.path for source in self.missing_sources()]

    async def drain(self) -> None:
        """No new load or lease from now on; loads are cancelled and lease holders told."""
        self.draining = True
        for lease in self.leases.all():
            lease.events.put_nowait((Event.DRAINING, ""))
        await self.loads.cancel_all("ended because the daemon is stopping")

    def _require_serving(self) -> None:
        if self.draining:
            raise DrainingError("the daemon is stopping")


def _require_ready(generation: Generation) -> Generation:
    match generation.state:
        case State.READY:
            return generation
        case State.LOADING:
            raise StillLoadingError(f"generation {generation.name} is still loading")
        case State.RETIRING:
            raise RetiringError(f"generation {generation.id[:12]} is retiring; load it anew")
        case State.FAILED:
            raise _load_failed(generation, generation.id[:12] or generation.name)


def _load_failed(generation: Generation, name: str) -> LoadFailedError:
    cause = generation.failure
    assert cause is not None
    return LoadFailedError(f"{name} failed: {cause.message}", {**cause.fields, "cause": cause.reason})
