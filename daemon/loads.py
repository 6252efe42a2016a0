"""Loads under way: one loader for each source, joined by as many callers as ask for it.

Owns the path from a source to a READY generation: spawn, reserve, allocate, grant, commit. A load that ends in any
other way leaves a FAILED generation with its reason, no segment and no reservation.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from preload.protos import loader_pb2 as pb

from . import wire
from .config import DaemonConfig
from .devices import HOST, Device, Devices
from .errors import BadRequestError, CacheError, EvictedError, InternalError, TooManyError
from .generations import Catalog, Generation, Phase, Progress, Receipt, Source, generation_id
from .loader_process import LoaderProcess
from .residency import Residency
from .segments import Segment, descriptors, handles
from .segments.closer import all_closed

log = logging.getLogger(__name__)

_MAX_SEGMENTS = 128
_MAX_TABLE_BYTES = 256 * 1024 * 1024
_PROGRESS_INTERVAL_S = 0.05
_MAX_OUTLINES = 512
"""In a job, which is one packet; with more than that, nothing is ruled out beforehand."""
_MAX_QUEUED = 64
"""Jobs of loaders, those that run included: loads, digests and verifications."""


@dataclass(frozen=True)
class VerifyResult:
    """What a loader found when it hashed resident memory; `corrupted` names tensors."""

    num_tensors: int
    num_bytes: int
    corrupted: list[str]


@dataclass(eq=False)
class _Load:
    """One loader's way to a generation. `cancel_reason` says who ended it, if somebody did."""

    source: Source
    generation: Generation
    device: Device
    evict_lru: bool
    task: asyncio.Task[Generation] = field(init=False)
    num_callers: int = 0
    is_running: bool = False
    cancel_reason: str = ""
    failure: CacheError | None = None
    """What ended it, if nobody did."""
    reserved_bytes: int = 0
    segments: list[Segment] = field(default_factory=list)
    tables: tuple[bytes, bytes] | None = None

    @property
    def unfilled_bytes(self) -> int:
        """Reserved and, as far as its progress tells, not yet taken from the kernel."""
        progress = self.generation.progress
        share = progress.done_bytes / progress.total_bytes if progress.total_bytes else 0.0
        return int(self.reserved_bytes * (1 - min(share, 1.0)))

    phases: list[Phase] = field(default_factory=list)


@dataclass(frozen=True)
class Digested:
    """What is on disk at a source: the generation that it would be, or "" if its headers tell that it is not resident
    (receipts of weights have no content digest then)."""

    generation_id: str
    receipts: list[Receipt]


@dataclass(eq=False)
class _Digest:
    """One loader that hashes a source's files for as many callers as wait for it."""

    task: asyncio.Task[Digested] = field(init=False)
    progress: Progress = field(default_factory=lambda: Progress("digest"))
    num_callers: int = 0


class Loads:
    """Starts, joins and cancels loads; also runs the loader's other two modes, digest and verify."""

    def __init__(self, catalog: Catalog, residency: Residency, devices: Devices, config: DaemonConfig) -> None:
        self._catalog = catalog
        self._residency = residency
        self._devices = devices
        self._loader_command = config.loader_command
        self._kernel_cache_dir = os.path.join(config.runtime_dir, "kernels")
        self.num_threads = config.loader_threads
        self._loads: dict[Source, _Load] = {}
        self._digests: dict[tuple[Source, frozenset[bytes]], _Digest] = {}
        self._loaders = asyncio.Semaphore(config.max_loaders)
        self._num_verifying = 0

    async def join(self, source: Source, evict_lru: bool) -> AsyncGenerator[Progress | Generation, None]:
        """Progress of the source's load, which is started if there is none; the last item is its generation. The
        caller has opened its device.

        Raises what the load failed with. When the last caller leaves, the load is cancelled."""
        while (load := self._loads.get(source)) and load.cancel_reason:
            await asyncio.wait({load.task})  # others gave it up: we wait for its end and begin anew
        load = load or self._start(source, evict_lru)
        load.num_callers += 1
        load.evict_lru |= evict_lru
        try:
            while not load.task.done():
                yield replace(load.generation.progress)
                await asyncio.wait({load.task}, timeout=_PROGRESS_INTERVAL_S)
            generation = load.task.result()
            yield replace(load.generation.progress)
            yield generation
        finally:
            load.num_callers -= 1
            if load.num_callers == 0:
                self._cancel(load, "cancelled by its last caller")

    def _require_room(self) -> None:
        """Raises TooManyError when more jobs wait for a loader than anybody could mean."""
        num_jobs = len(self._loads) + len(self._digests) + self._num_verifying
        if num_jobs >= _MAX_QUEUED:
            raise TooManyError(f"{num_jobs} jobs wait for a loader; try again when they are done")

    def is_loading(self, source: Source) -> bool:
        return source in self._loads

    def cancel(self, generation: Generation, reason: str) -> asyncio.Task[Generation] | None:
        """Ends the load of a LOADING generation; the task returned is done when nothing of it is left."""
        for load in self._loads.values():
            if load.generation is generation:
                self._cancel(load, reason)
                return load.task
        return None

    async def cancel_all(self, reason: str) -> None:
        loads = list(self._loads.values())
        for load in loads:
            self._cancel(load, reason)
        await asyncio.gather(*(load.task for load in loads), return_exceptions=True)

    def lose(self, device: str, failure: CacheError) -> None:
        """Ends loads into memory that a holder has taken with it."""
        for load in list(self._loads.values()):
            if load.source.device == device and handles(load.segments) and not load.cancel_reason:
                load.failure = failure
                self._cancel(load, "ended with its memory")

    def _start(self, source: Source, evict_lru: bool) -> _Load:
        self._require_room()
        device = self._devices.of(source.device)
        load = _Load(source, self._catalog.begin(source), device, evict_lru)
        self._loads[source] = load
        load.task = asyncio.create_task(self._run(load))
        # Callers may all be gone when it fails; the failure is kept in the generation.
        load.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return load

    def _cancel(self, load: _Load, reason: str) -> None:
        if not load.task.done() and not load.cancel_reason:
            load.cancel_reason = reason
            if load.is_running:  # a task cancelled before its first step would never reach its own clean-up
                load.task.cancel()

    async def _run(self, load: _Load) -> Generation:
        """The whole life of one load. Raises CacheError."""
        load.is_running = True
        try:
            if load.cancel_reason:
                raise asyncio.CancelledError
            async with self._loaders:
                await self._run_loader(load)
            return self._commit(load)
        except asyncio.CancelledError:
            failure: CacheError = load.failure or EvictedError(
                f"the load of {load.source.path} was {load.cancel_reason}"
            )
        except CacheError as error:
            failure = error
        except Exception as error:
            log.exception("a load of %s hit a bug", load.source.path)
            failure = InternalError(f"cannot load {load.source.path}: {error}")
        finally:
            self._loads.pop(load.source, None)
            for segment in load.segments:
                segment.close()
            load.device.ledger.release(load.reserved_bytes)
        self._residency.fail(load.generation, failure)
        raise failure

    async def _run_loader(self, load: _Load) -> None:
        job = wire.job(pb.MODE_LOAD, load.source, self.num_threads)
        job.granularity_bytes = load.device.granularity_bytes
        if load.source.device == HOST:  # kernels for the host's processors
            job.kernel_cache_dir = self._kernel_cache_dir
        loader = await LoaderProcess.start(self._loader_command, job)
        try:
            async with aclosing(loader.updates()) as updates:
                async for update, fds in updates:
                    if update.WhichOneof("update") == "plan" and load.evict_lru:
                        self._residency.make_room(sum(update.plan.segment_bytes), load.source.device)
                        await all_closed()
                    await self._on_update(load, loader, update, fds)
            if load.tables is None:
                raise await loader.death()
            # Its writable mappings end with the process: only then is the memory nobody's to write.
            if await loader.exited() != 0:
                raise await loader.death()
        finally:
            await loader.stop()

    async def _on_update(self, load: _Load, loader: LoaderProcess, update: pb.Update, fds: list[int]) -> None:
        match update.WhichOneof("update"):
            case "plan":
                await self._allocate(load, update.plan.segment_bytes)
                grant = pb.Grant(granted=True, handles=handles(load.segments))
                loader.send(grant, descriptors(load.segments))
            case "progress":
                load.generation.progress = wire.progress(update.progress)
            case "committed":
                manifest, receipts = _read_tables(fds, 2)
                load.tables = (manifest, receipts)
                load.phases = wire.phases(update.committed.phases)
            case "failed":
                raise wire.error(update.failed)
            case other:
                raise InternalError(f"the loader sent {other} during a load")

    async def _allocate(self, load: _Load, segment_bytes: Sequence[int]) -> None:
        """Reserves and creates what the loader asks for. Raises NoMemoryError, BadRequestError, DeviceError."""
        if load.segments:
            raise InternalError("the loader sent a second plan")
        if len(segment_bytes) > _MAX_SEGMENTS:
            raise BadRequestError(f"{len(segment_bytes)} segments; a shard has at most {_MAX_SEGMENTS}")
        total = sum(segment_bytes)
        if any(size % load.device.granularity_bytes for size in segment_bytes):
            raise InternalError(f"the loader's segments are no multiples of {load.device.granularity_bytes} bytes")
        load.device.ledger.reserve(total, self._residency.evictable_bytes(load.source.device))
        load.reserved_bytes = total
        others = [other for other in self._loads.values() if other is not load and other.device is load.device]
        load.device.check_has(total, promised_bytes=sum(other.unfilled_bytes for other in others))
        for index, size in enumerate(segment_bytes):
            segment = await load.device.allocate(size, f"{index}:{os.path.basename(load.source.path)}")
            load.segments.append(segment)

    def _commit(self, load: _Load) -> Generation:
        """LOADING → READY in one turn of the event loop, or → the generation that already holds this."""
        assert load.tables is not None
        manifest = wire.manifest(load.tables[0], [s.size_bytes for s in load.segments])
        receipts = wire.receipts(load.tables[1])
        for segment in load.segments:
            segment.seal()
        segments, load.segments = load.segments, []
        reserved, load.reserved_bytes = load.reserved_bytes, 0
        load.device.ledger.commit(reserved)
        return self._residency.commit(load.generation, load.source, manifest, segments, load.phases, receipts)

    async def digest(self, source: Source, outlines: frozenset[bytes]) -> AsyncGenerator[Progress | Digested, None]:
        """Looks at the files of a source, and hashes them if their outline is among these; yields progress, and the
        result last. None at all if there are no outlines. Shared by callers; ended with the last of them.

        Raises CacheError."""
        if not outlines:
            return
        key = (source, outlines)
        digest = self._digests.get(key)
        if digest is None:
            self._require_room()
            digest = self._digests[key] = _Digest()
            digest.task = asyncio.create_task(self._run_digest(digest, source, outlines))
            digest.task.add_done_callback(lambda done: done.cancelled() or done.exception())
        digest.num_callers += 1
        try:
            while not digest.task.done():
                yield digest.progress
                await asyncio.wait({digest.task}, timeout=_PROGRESS_INTERVAL_S)
            yield digest.task.result()
        finally:
            digest.num_callers -= 1
            if digest.num_callers == 0:
                digest.task.cancel()
                if self._digests.get(key) is digest:
                    del self._digests[key]

    async def _run_digest(self, digest: _Digest, source: Source, outlines: frozenset[bytes]) -> Digested:
        job = wire.job(pb.MODE_DIGEST, source, self.num_threads)
        if b"" not in outlines and len(outlines) <= _MAX_OUTLINES:
            job.outlines.extend(sorted(outlines))
        async with self._loaders:
            loader = await LoaderProcess.start(self._loader_command, job)
            try:
                async with aclosing(loader.updates()) as updates:
                    async for update, fds in updates:
                        match update.WhichOneof("update"):
                            case "progress":
                                digest.progress = wire.progress(update.progress)
                            case "digested":
                                return _digested(update.digested, fds)
                            case "failed":
                                raise wire.error(update.failed)
                raise await loader.death()
            finally:
                await loader.stop()

    async def verify(self, generation: Generation, source: Source) -> AsyncGenerator[Progress | VerifyResult, None]:
        """Re-hashes what is resident; the last item is the result. Raises CacheError if the loader dies."""
        self._require_room()
        self._num_verifying += 1
        try:
            async with self._loaders, aclosing(self._run_verify(generation, source)) as steps:
                async for step in steps:
                    yield step
        finally:
            self._num_verifying -= 1

    async def _run_verify(
        self, generation: Generation, source: Source
    ) -> AsyncGenerator[Progress | VerifyResult, None]:
        assert generation.manifest is not None
        table = os.memfd_create("preload:manifest", os.MFD_CLOEXEC)
        try:
            os.write(table, generation.manifest.serialized)
            os.lseek(table, 0, os.SEEK_SET)
            job = wire.job(pb.MODE_VERIFY, source, self.num_threads)
            job.device = generation.device
            job.handles.extend(handles(generation.segments))
            fds = [table, *descriptors(generation.segments)]
            loader = await LoaderProcess.start(self._loader_command, job, fds)
        finally:
            os.close(table)
        try:
            async with aclosing(loader.updates()) as updates:
                async for update, _ in updates:
                    match update.WhichOneof("update"):
                        case "progress":
                            yield wire.progress(update.progress)
                        case "verified":
                            found = update.verified
                            yield VerifyResult(found.num_tensors, found.num_bytes, list(found.corrupted))
                            return
                        case "failed":
                            raise wire.error(update.failed)
            raise await loader.death()
        finally:
            await loader.stop()


def _digested(message: pb.Digested, fds: list[int]) -> Digested:
    (table,) = _read_tables(fds, 1)
    identity = generation_id(message.checkpoint_digest, message.resolved_recipe) if message.matches else ""
    return Digested(identity, wire.receipts(table))


def _read_tables(fds: list[int], expected: int) -> list[bytes]:
    """Contents of the memfds that came with a message. Raises InternalError."""
    if len(fds) != expected:
        raise InternalError(f"the loader sent {len(fds)} tables instead of {expected}")
    sizes = [os.fstat(fd).st_size for fd in fds]
    if max(sizes) > _MAX_TABLE_BYTES:
        raise InternalError(f"the loader sent a table of {max(sizes):,} bytes")
    return [os.pread(fd, size, 0) for fd, size in zip(fds, sizes, strict=True)]
