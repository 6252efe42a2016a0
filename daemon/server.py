"""The daemon's process: sockets up, models of the configuration loaded, signals obeyed, everything down again.

Read `run` top to bottom. The runtime folder is locked for the daemon's life, so a second one is refused and the
first unharmed; sockets of a dead predecessor are replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import aclosing, suppress
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from preload.protos import weight_cache_pb2, weight_cache_pb2_grpc

from . import runtime_folder
from .cache import WeightCache
from .config import DaemonConfig
from .doors import Doors
from .errors import CacheError
from .generations import Source
from .grpc_server import make_server
from .guard import Guard, raise_descriptor_limit
from .handover import Handover
from .metrics import Metrics
from .notify import Notifier, stored_descriptors, watchdog_interval_s
from .probes import Probes
from .reload import ReadConfig, Reloader
from .runtime_folder import DAEMON_LOCK, DAEMON_SOCKET, HANDOVER_SOCKET
from .service import WeightCacheService

log = logging.getLogger(__name__)

_KEEPER_INTERVAL_S = 1.0
_STOP_GRACE_S = 0.5
_DOORS_INTERVAL_S = 1.0
_SERVICE = weight_cache_pb2.DESCRIPTOR.services_by_name["WeightCache"].full_name


def run(config: DaemonConfig, reread: ReadConfig | None = None) -> int:
    """Serves until SIGTERM or SIGINT; SIGHUP applies the configuration that `reread` gives.

    Raises BadRequestError if the runtime folder or the probes' address is in use, or if the keeper holds a catalog of
    an unknown version."""
    os.umask(0o077)
    raise_descriptor_limit()
    for warning in config.warnings():
        log.warning("%s", warning)
    runtime_dir = runtime_folder.prepare(config.runtime_dir)
    with runtime_folder.locked(runtime_dir, DAEMON_LOCK, "another daemon serves in"):
        for name in (DAEMON_SOCKET, HANDOVER_SOCKET):
            (runtime_dir / name).unlink(missing_ok=True)
        asyncio.run(_serve(config, runtime_dir, reread or (lambda: config)))
    return 0


async def _serve(config: DaemonConfig, runtime_dir: Path, reread: ReadConfig) -> None:
    stop = _stop_asked()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload

    notifier = Notifier.from_environment()
    cache = WeightCache(config, notifier, runtime_folder.last_epoch(runtime_dir) + 1)
    cache.restore(stored_descriptors())
    runtime_folder.note_epoch(runtime_dir, cache.epoch)
    metrics = Metrics(cache)
    probes = Probes(config.http_host, config.http_port)
    doors = Doors(runtime_dir, [runtime_dir / name for name in (DAEMON_SOCKET, HANDOVER_SOCKET)])
    doors.allow(config.allow_uids, config.allow_gids)  # what cannot be allowed is found before anything serves
    handover = Handover(str(runtime_dir / HANDOVER_SOCKET), cache.leases, doors)
    health = HealthServicer()
    service = WeightCacheService(cache, metrics, probes.address, str(runtime_dir / HANDOVER_SOCKET))
    server = _make_server(service, health, runtime_dir / DAEMON_SOCKET)

    await server.start()
    doors.opened()
    doors.allow(config.allow_uids, config.allow_gids)  # until now the sockets were the owner's alone
    guard = Guard(str(runtime_dir / DAEMON_SOCKET), doors)
    duties = handover.serve(), _keep_in_touch(cache, notifier), _end_unclaimed_leases(cache)
    background = {asyncio.create_task(duty) for duty in (*duties, _watch_doors(cache, doors, guard))}

    def load(source: Source) -> None:
        task = asyncio.create_task(_load(cache, metrics, source))
        background.add(task)
        task.add_done_callback(background.discard)

    for source in config.models:
        load(source)
    reloader = Reloader(reread, cache, doors, notifier, load)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.reload)
    await health.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    notifier.ready("serving")
    log.info("epoch %d serves at %s with %s", cache.epoch, runtime_dir, _describe_limit(cache))
    stopped = asyncio.Event()
    probing = asyncio.create_task(probes.serve(cache, metrics, stopped))

    await stop.wait()
    log.info("draining")
    notifier.stopping()
    await _drain(cache, health, server)
    stopped.set()
    for task in background:
        task.cancel()
    await asyncio.gather(*background, probing, return_exceptions=True)
    handover.close()
    cache.devices.holders.close()
    probes.close()
    notifier.close()


def _make_server(service: WeightCacheService, health: HealthServicer, path: Path) -> grpc.aio.Server:
    server = make_server()
    weight_cache_pb2_grpc.add_WeightCacheServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_insecure_port(f"unix:{path}")
    return server


def _stop_asked() -> asyncio.Event:
    """Set by SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _drain(cache: WeightCache, health: HealthServicer, server: grpc.aio.Server) -> None:
    """Nothing new, then the end of what there is, then of the server."""
    await health.enter_graceful_shutdown()
    await cache.drain()
    if not cache.hands_over:
        await _holders_to_leave(cache)
    await server.stop(grace=_STOP_GRACE_S)


async def _holders_to_leave(cache: WeightCache) -> None:
    """Meanwhile the server goes on answering, if only with DRAINING: a closed door would tell a client nothing."""
    with suppress(TimeoutError):
        async with asyncio.timeout(cache.config.drain_timeout_s):
            while cache.leases.all():
                await asyncio.sleep(0.05)


async def _load(cache: WeightCache, metrics: Metrics, source: Source) -> None:
    """A model that fails is reported by /ready, and leaves the others alone."""
    try:
        with metrics.load():
            async with aclosing(cache.load(source, evict_lru=False)) as steps:
                async for _ in steps:
                    pass
    except CacheError as error:
        cache.note_failure(source, error)


async def _keep_in_touch(cache: WeightCache, notifier: Notifier) -> None:
    """Signs of life for the watchdog, which prove that this loop turns; and parks again with a keeper that is new."""
    if not notifier.has_manager:
        return
    interval_s = min(watchdog_interval_s() or _KEEPER_INTERVAL_S, _KEEPER_INTERVAL_S)
    while True:
        notifier.watchdog()
        if notifier.take_replaced():
            log.info("another keeper listens: parking everything with it")
            cache.parking.store_all()
            notifier.ready("serving")
        await asyncio.sleep(interval_s)


async def _watch_doors(cache: WeightCache, doors: Doors, guard: Guard) -> None:
    while True:
        guard.look()
        trouble = doors.trouble()
        if trouble and not cache.trouble:
            log.error("%s", trouble)
        cache.trouble = trouble
        await asyncio.sleep(_DOORS_INTERVAL_S)


async def _end_unclaimed_leases(cache: WeightCache) -> None:
    while (left_s := cache.started_s + cache.config.reclaim_timeout_s - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, 1.0))  # a reload may change how long
    cache.release_unclaimed()


def _describe_limit(cache: WeightCache) -> str:
    return f"{cache.devices.host.ledger.capacity_bytes:,} bytes for weights"
