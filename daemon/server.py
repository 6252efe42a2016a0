"""The daemon's process: sockets up, models of the configuration loaded, signals obeyed, everything down again.

Read `run` top to bottom. The runtime folder is locked for the daemon's life, so a second one is refused and the
first unharmed; sockets of a dead predecessor are replaced.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
from contextlib import aclosing, suppress
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from preload.protos import weight_cache_pb2, weight_cache_pb2_grpc

from .cache import WeightCache
from .config import DaemonConfig
from .errors import BadRequestError, CacheError
from .generations import Source
from .handover import Handover
from .http import HttpServer, make_app
from .interceptor import ErrorInterceptor
from .metrics import Metrics
from .notify import Notifier, stored_descriptors, watchdog_interval_s
from .service import WeightCacheService

log = logging.getLogger(__name__)

_MAX_SOCKET_PATH = 107
_STOP_GRACE_S = 0.5
_KEEPER_INTERVAL_S = 1.0
_SERVICE = weight_cache_pb2.DESCRIPTOR.services_by_name["WeightCache"].full_name
_GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", 1024 * 1024),
    ("grpc.max_send_message_length", 256 * 1024 * 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.so_reuseport", 0),
)


def run(config: DaemonConfig) -> int:
    """Serves until SIGTERM or SIGINT. Raises BadRequestError if the runtime folder is in use or unusable."""
    os.umask(0o077)
    runtime_dir = _prepare_runtime_dir(config.runtime_dir)
    with _lock(runtime_dir):
        return asyncio.run(_serve(config, runtime_dir))


async def _serve(config: DaemonConfig, runtime_dir: Path) -> int:
    """The exit code: 0 after a signal, 1 if the port of the probes is taken."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    notifier = Notifier.from_environment()
    cache = WeightCache(config, notifier, _last_epoch(runtime_dir) + 1)
    cache.restore(stored_descriptors())
    (runtime_dir / "epoch").write_text(str(cache.epoch))
    metrics = Metrics(cache)
    handover_path = str(runtime_dir / "segments.sock")
    handover = Handover(handover_path, cache.leases, frozenset({os.geteuid(), *config.allow_uids}))
    health = HealthServicer()
    http = HttpServer(make_app(cache, metrics), config.http_host, config.http_port)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_GRPC_OPTIONS)
    service = WeightCacheService(cache, metrics, http, handover_path)
    weight_cache_pb2_grpc.add_WeightCacheServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_insecure_port(f"unix:{runtime_dir / 'daemon.sock'}")

    await server.start()
    os.chmod(runtime_dir / "daemon.sock", 0o600)  # the umask left it the owner's alone, but with the x bit
    probes = asyncio.create_task(_serve_http(http, stop))
    background = [asyncio.create_task(handover.serve()), asyncio.create_task(_keep_in_touch(cache, notifier))]
    background.append(asyncio.create_task(_end_unclaimed_leases(cache)))
    background += [asyncio.create_task(_load_on_boot(cache, metrics, source)) for source in config.models]
    await health.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    notifier.ready()
    log.info("epoch %d serves at %s with %s", cache.epoch, runtime_dir, _describe_limit(cache))

    await stop.wait()
    log.info("draining")
    notifier.stopping()
    await health.enter_graceful_shutdown()
    await cache.drain()
    await _holders_to_leave(cache, config.drain_timeout_s)
    await server.stop(grace=_STOP_GRACE_S)
    http.should_exit = True
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    handover.close()
    return 0 if await probes else 1


async def _holders_to_leave(cache: WeightCache, timeout_s: float) -> None:
    """Meanwhile the server goes on answering, if only with DRAINING: a closed door would tell a client nothing."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while cache.leases.all():
                await asyncio.sleep(0.05)


async def _serve_http(http: HttpServer, stop: asyncio.Event) -> bool:
    """False if the port is taken, which ends the daemon: an operator who asked for probes must not go without."""
    try:
        await http.serve()
        return True
    except SystemExit:
        log.error("cannot listen on %s:%d; choose another --http-port", http.config.host, http.config.port)
        stop.set()
        return False


async def _load_on_boot(cache: WeightCache, metrics: Metrics, source: Source) -> None:
    """A model that fails is reported by /ready, and leaves the others alone."""
    with suppress(CacheError), metrics.load():
        async with aclosing(cache.load(source, "host", evict_lru=False)) as steps:
            async for _ in steps:
                pass


async def _keep_in_touch(cache: WeightCache, notifier: Notifier) -> None:
    """Signs of life for the watchdog, which prove that this loop turns; and parks again with a keeper that is new."""
    if not notifier.has_manager:
        return
    interval_s = min(watchdog_interval_s() or _KEEPER_INTERVAL_S, _KEEPER_INTERVAL_S)
    while True:
        was_connected = notifier.is_connected
        if notifier.watchdog() and not was_connected:
            log.info("a keeper listens again: parking everything with it")
            cache.parking.store_all()
            notifier.ready()
        await asyncio.sleep(interval_s)


async def _end_unclaimed_leases(cache: WeightCache) -> None:
    await asyncio.sleep(cache.config.reclaim_timeout_s)
    cache.release_unclaimed()


def _describe_limit(cache: WeightCache) -> str:
    return f"{cache.ledger.capacity_bytes:,} bytes for weights"


def _prepare_runtime_dir(path: str) -> Path:
    """Makes the folder with mode 0700; one that exists must be ours. Raises BadRequestError."""
    runtime_dir = Path(path).absolute()
    if len(os.fsencode(runtime_dir / "segments.sock")) > _MAX_SOCKET_PATH:
        raise BadRequestError(
            f"runtime folder {runtime_dir} is too long: a socket's path has at most {_MAX_SOCKET_PATH} bytes"
        )
    try:
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = runtime_dir.stat()
        if owner.st_uid != os.geteuid():
            raise BadRequestError(f"runtime folder {runtime_dir} belongs to user {owner.st_uid}")
        runtime_dir.chmod(0o700)
    except OSError as error:
        raise BadRequestError(f"runtime folder {runtime_dir}: {error.strerror}") from error
    return runtime_dir


class _lock:  # noqa: N801
    """Holds the folder's lock file, and clears the sockets that a dead predecessor left behind."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir

    def __enter__(self) -> None:
        self._fd = os.open(self._runtime_dir / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise BadRequestError(f"another daemon serves in {self._runtime_dir}") from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)  # for a keeper that finds us running
        for name in ("daemon.sock", "segments.sock"):
            (self._runtime_dir / name).unlink(missing_ok=True)

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)


def _last_epoch(runtime_dir: Path) -> int:
    """The last life that served in this folder, 0 if none did. A parked catalog may know of more."""
    try:
        return int((runtime_dir / "epoch").read_text())
    except (FileNotFoundError, ValueError):
        return 0
