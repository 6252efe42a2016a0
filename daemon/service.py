"""The WeightCache service: converts and delegates, nothing else."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import cache
from typing import Any

import grpc.aio

from preload.protos import weight_cache_pb2 as pb
from preload.protos import weight_cache_pb2_grpc as pb_grpc

from . import wire
from .cache import Changed, Selector, WeightCache
from .devices import checked_name
from .errors import BadRequestError, CacheError
from .generations import Generation, Progress
from .leases import Lease
from .metrics import Metrics

Context = grpc.aio.ServicerContext[Any, Any]

_OPEN_DEADLINE_S = 10.0


class WeightCacheService(pb_grpc.WeightCacheServicer):
    """Contract: see protos/weight_cache.proto. `handover_socket` is told to lease holders."""

    def __init__(self, cache: WeightCache, metrics: Metrics, http_address: str, handover_socket: str) -> None:
        self._cache = cache
        self._metrics = metrics
        self._handover_socket = handover_socket
        self._http_address = http_address

    async def Load(self, request: pb.LoadRequest, context: Context) -> AsyncIterator[pb.LoadEvent]:  # noqa: N802
        source = wire.source(request.checkpoint_path, request.recipe, request.rank, request.device)
        evict_lru = request.evict == pb.EVICT_POLICY_LRU
        with self._metrics.load():
            async with aclosing(self._cache.load(source, evict_lru)) as steps:
                async for step in steps:
                    if isinstance(step, Progress):
                        yield pb.LoadEvent(progress=wire.progress_message(step))
                    elif isinstance(step, Changed):
                        yield pb.LoadEvent(changed=pb.Changed(generation_id=step.generation_id, paths=step.paths))
                    else:
                        yield pb.LoadEvent(loaded=self._describe(step))

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context
    ) -> AsyncIterator[pb.AttachEvent]:
        opening = await _first(request_iterator)
        started_s = time.monotonic()
        selector = _selector(opening.selector, opening.device)
        lease, ticket = await self._cache.attach(
            selector, opening.pid, wire.client_name(opening.client), opening.reclaim_secret
        )
        reports = asyncio.create_task(_read_reports(request_iterator, lease))
        reports.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else may look
        try:
            self._metrics.attached(time.monotonic() - started_s)
            yield self._attached(lease, ticket)
            async for event in _events(lease, until=reports):
                yield event
                if event.WhichOneof("event") == "draining" and self._cache.hands_over:
                    return  # the lease goes on in our successor, which comes the sooner
            if isinstance(failure := reports.exception(), CacheError):
                raise failure
        finally:
            reports.cancel()
            self._cache.release(lease)

    def _attached(self, lease: Lease, ticket: bytes) -> pb.AttachEvent:
        generation = lease.generation
        assert generation.manifest is not None
        return pb.AttachEvent(
            attached=pb.Attached(
                lease_id=lease.id,
                generation_id=generation.id,
                epoch=self._cache.epoch,
                manifest=generation.manifest.serialized,
                segments=wire.segment_messages(generation),
                ticket=ticket,
                handover_socket=self._handover_socket,
                reclaim_secret=lease.secret,
            )
        )

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:  # noqa: N802
        return pb.ListResponse(
            generations=[self._describe(generation) for generation in self._cache.catalog],
            devices=[
                pb.Device(
                    name=ledger.device,
                    capacity_bytes=ledger.capacity_bytes,
                    resident_bytes=ledger.resident_bytes,
                    reserved_bytes=ledger.reserved_bytes,
                    holder_pid=self._cache.devices.holders.pid(ledger.device),
                )
                for ledger in (device.ledger for device in self._cache.devices)
            ],
            epoch=self._cache.epoch,
            pid=os.getpid(),
            version=_version(),
            uptime_ms=int((time.monotonic() - self._cache.started_s) * 1000),
            missing_models=self._cache.missing_models(),
            http_address=self._http_address,
            pid_namespace=_namespace("pid"),
            ipc_namespace=_namespace("ipc"),
        )

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:  # noqa: N802
        generation = self._cache.find(_selector(request.selector))
        return pb.DescribeResponse(
            generation=self._describe(generation),
            manifest=generation.manifest.serialized if generation.manifest else b"",
            receipts=[wire.receipt_message(r) for r in self._cache.catalog.receipts(generation)],
        )

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:  # noqa: N802
        generation, freed = await self._cache.evict(_selector(request.selector))
        return pb.EvictResponse(generation=self._describe(generation), freed=freed)

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> AsyncIterator[pb.VerifyEvent]:  # noqa: N802
        selector = _selector(request.selector)
        generation = self._cache.find(selector)
        async with aclosing(self._cache.verify(selector)) as steps:
            async for step in steps:
                if isinstance(step, Progress):
                    yield pb.VerifyEvent(progress=wire.progress_message(step))
                else:
                    yield pb.VerifyEvent(
                        verified=pb.Verified(
                            generation_id=generation.id,
                            num_tensors=generation.manifest.num_tensors if generation.manifest else 0,
                            num_bytes=step.num_bytes,
                        )
                    )

    async def Check(self, request: pb.CheckRequest, context: Context) -> pb.CheckResponse:  # noqa: N802
        try:
            generation = await self._cache.resolve(_selector(request.selector, request.device))
        except CacheError as error:
            return pb.CheckResponse(failure=wire.error_info(error))
        return pb.CheckResponse(ok=True, generation_id=generation.id)

    def _describe(self, generation: Generation) -> pb.Generation:
        sources = self._cache.catalog.sources(generation)
        return wire.generation_message(generation, sources, self._cache.leases.of(generation))


@cache
def _namespace(kind: str) -> int:
    """The inode number by which processes tell whether they share one; 0 without /proc."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


@cache
def _version() -> str:
    from importlib.metadata import version  # takes a tenth of the daemon's start to import

    return version("preload-llm")


def _selector(message: pb.Selector, device: str = "") -> Selector:
    """`device` counts if the message names none."""
    device = message.device or device
    if device:
        checked_name(device)
    match message.WhichOneof("by"):
        case "checkpoint_path":
            return Selector(source=wire.source(message.checkpoint_path, message.recipe, message.rank, device))
        case "checkpoint_digest" if message.checkpoint_digest:
            return Selector(
                digest=message.checkpoint_digest,
                recipe=wire.recipe(message.recipe),
                rank=wire.rank(message.rank),
                device=device,
            )
        case "generation_id" if message.generation_id:
            rank = wire.rank(message.rank) if message.HasField("rank") else None
            return Selector(generation_id=message.generation_id, rank=rank, device=device)
    raise BadRequestError("the selector names neither a checkpoint nor a generation")


async def _first(requests: AsyncIterator[pb.AttachRequest]) -> pb.AttachOpen:
    try:
        async with asyncio.timeout(_OPEN_DEADLINE_S):
            request = await anext(requests)
    except TimeoutError as error:
        raise BadRequestError(f"no request came within {_OPEN_DEADLINE_S:.0f} s") from error
    except StopAsyncIteration as error:
        raise BadRequestError("the stream ended before its first request") from error
    if request.WhichOneof("request") != "open":
        raise BadRequestError("the first request of an Attach stream must be `open`")
    return request.open


async def _read_reports(requests: AsyncIterator[pb.AttachRequest], lease: Lease) -> None:
    """Takes in the holder's phases until it closes its side."""
    async for request in requests:
        if request.WhichOneof("request") == "phases":
            lease.phases = wire.phases(request.phases.phases)


async def _events(lease: Lease, until: asyncio.Task[None]) -> AsyncIterator[pb.AttachEvent]:
    while not until.done():
        pending = asyncio.create_task(lease.events.get())
        try:
            await asyncio.wait({pending, until}, return_when=asyncio.FIRST_COMPLETED)
            if pending.done():
                yield wire.event_message(*pending.result())
        finally:
            pending.cancel()
