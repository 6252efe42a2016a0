"""What happens to generations after their load: commit, failure, retirement, eviction, and the books behind them.

Every path on which memory comes or goes leads through here, so that ledgers, catalog and leases always agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from .devices import CUDA_IPC, Devices
from .disk import Disk
from .errors import CacheError, CheckpointNotFoundError
from .generations import Catalog, Generation, Manifest, Phase, Receipt, Source, State, generation_id
from .leases import Event, Lease, LeaseBook
from .parking import Parking, Revived
from .segments import Segment

log = logging.getLogger(__name__)


class Residency:
    """Moves generations through their states and keeps the ledgers true."""

    def __init__(
        self,
        catalog: Catalog,
        leases: LeaseBook,
        devices: Devices,
        parking: Parking,
        disk: Disk,
        configured: frozenset[Source],
    ) -> None:
        self._parking = parking
        self._disk = disk
        self._tasks: set[asyncio.Task[None]] = set()
        self._catalog = catalog
        self._leases = leases
        self._devices = devices
        self.configured = configured

    def commit(
        self,
        generation: Generation,
        source: Source,
        manifest: Manifest,
        segments: list[Segment],
        phases: list[Phase],
        receipts: list[Receipt],
    ) -> Generation:
        """LOADING → READY; a copy of what is READY already is dropped in favour of that one."""
        identity = generation_id(manifest.checkpoint_digest, manifest.resolved_recipe)
        twin = self._catalog.twin(identity, generation.rank, generation.device)
        if twin is None:
            generation.commit(manifest, segments, phases)
            self._parking.park(generation)
            log.info("generation %s is READY: %s", generation.id[:12], source.path)
        else:
            self._devices.of(generation.device).ledger.free(sum(s.size_bytes for s in segments))
            for segment in segments:
                segment.close()
            self._catalog.remove(generation)
            generation = twin
        self._catalog.touch(generation)
        self.bind(source, generation, receipts)
        return generation

    def bind(self, source: Source, generation: Generation, receipts: list[Receipt]) -> None:
        """Ties a source to its content; a generation that lost its last source this way retires."""
        previous = self._catalog.bind(source, generation, receipts)
        if previous is not None:
            self._supersede_if_nameless(previous, generation)
            if self._catalog.names(previous):
                task = asyncio.create_task(self._forget_dead_names(previous, generation))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._parking.save()

    def _supersede_if_nameless(self, previous: Generation, successor: Generation) -> None:
        if previous.state is State.READY and not self._catalog.names(previous):
            self._leases.notify(previous, Event.SUPERSEDED, successor.id)
            self.retire(previous)

    async def _forget_dead_names(self, previous: Generation, successor: Generation) -> None:
        """A generation that lost a name may live on under others, but not under those whose files are gone or
        changed as well: links of finished jobs would keep it for ever."""
        for source, proof in self._catalog.bindings(previous):
            with contextlib.suppress(CheckpointNotFoundError):  # a mount that hangs says nothing of its files
                if await self._disk.stale(source.path, proof):
                    self._catalog.unbind(source, previous)
        self._supersede_if_nameless(previous, successor)
        self._parking.save()

    def revive(self, revived: Revived) -> None:
        """Takes in what the last life parked: its leases wait for their holders to claim them."""
        generation = revived.generation
        self._catalog.adopt(generation)
        self._devices.of(generation.device).ledger.adopt(generation.resident_bytes)
        for source, receipts in revived.sources:
            self._catalog.bind(source, generation, receipts)
        for lease in revived.leases:
            self._leases.adopt(lease)
        log.info(
            "generation %s is %s again, with %d leases",
            generation.id[:12],
            generation.state.value,
            len(revived.leases),
        )
        self._free_if_unused(generation)

    def fail(self, generation: Generation, failure: CacheError) -> None:
        """→ FAILED(reason): memory back, once nobody maps it; kept in the catalog so that an operator sees why."""
        log.error("generation %s FAILED: %s", generation.name, failure.message)
        self._leases.revoke_tickets(generation)
        num_segments = len(generation.segments)
        generation.lingering_bytes = generation.fail(failure, is_leased=bool(self._leases.of(generation)))
        self._parking.drop(generation, num_segments)
        self._free_if_unused(generation)
        self._catalog.forget_old_failures()

    def lose(self, device: str, failure: CacheError) -> None:
        """Whatever a device's holder held is gone, leased or not: → FAILED, and everybody is told."""
        for generation in self._catalog:
            kinds = {segment.backend for segment in (*generation.segments, *generation.lingering)}
            if generation.device == device and CUDA_IPC in kinds:
                self._leases.notify(generation, Event.FAILED, failure.message)
                if generation.state is not State.FAILED:
                    self.fail(generation, failure)
                self._devices.of(device).ledger.free(generation.end_lingering())

    def retire(self, generation: Generation) -> bool:
        """READY → RETIRING. True if its memory went at once, for want of leases."""
        if generation.state is State.READY:
            generation.enter(State.RETIRING)
            self._leases.notify(generation, Event.RETIRING)
            self._parking.save()
        return self._free_if_unused(generation)

    def release(self, lease: Lease) -> None:
        """Ends a lease; the last one of a RETIRING generation takes the memory with it."""
        self._leases.release(lease)
        self._catalog.touch(lease.generation)
        self._parking.save()
        self._free_if_unused(lease.generation)

    def make_room(self, num_bytes: int, device: str) -> None:
        """Evicts unleased generations of a device, least recently used first, only if that will be enough."""
        ledger = self._devices.of(device).ledger
        if ledger.shortage(num_bytes) > self.evictable_bytes(device):
            return
        for generation in sorted(self._evictable(device), key=lambda g: g.last_used):
            if ledger.shortage(num_bytes) == 0:
                return
            log.info("evicting %s for %d bytes", generation.id[:12], num_bytes)
            self.retire(generation)

    def evictable_bytes(self, device: str) -> int:
        return sum(g.resident_bytes for g in self._evictable(device))

    def _evictable(self, device: str) -> list[Generation]:
        """Models of the configuration are not evicted for others."""
        return [
            g
            for g in self._catalog
            if g.state is State.READY
            and g.device == device
            and self.configured.isdisjoint(self._catalog.names(g))
            and not self._leases.of(g)
        ]

    def _free_if_unused(self, generation: Generation) -> bool:
        if self._leases.of(generation):
            return False
        if generation.state is State.FAILED and generation.lingering_bytes:
            self._devices.of(generation.device).ledger.free(generation.end_lingering())
        if generation.state is not State.RETIRING:
            return False
        num_segments = len(generation.segments)
        self._catalog.remove(generation)
        self._parking.drop(generation, num_segments)
        self._devices.of(generation.device).ledger.free(generation.free())
        log.info("generation %s is freed", generation.id[:12])
        return True
