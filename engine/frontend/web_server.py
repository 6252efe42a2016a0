"""uvicorn around the application, and the drain on a signal.

SIGTERM or SIGINT: no new connection, requests in flight may finish within the drain time, then those that are left
are answered with an error. A second signal does not wait. SIGHUP: a fresh core takes over from the running one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from preload.engine.timeline import now_ns

from .activation import Manager
from .admin import admin_socket, restart_core
from .app import build_app
from .client_guard import make_protocol
from .errors import OverloadedError, StartError
from .service import Service

_DRAIN_SLACK_S = 5
_LAST_WORDS_S = 0.3
_KEEP_ALIVE_S = 60


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: it would raise the signal again after the drain."""

    is_ending = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(service: Service, listener: socket.socket, manager: Manager, outlives_us: bool) -> None:
    """Serves until a signal. `outlives_us`: the service manager holds the listening socket, and our successor
    answers whom we do not accept any more. Raises StartError when no core can ever start, or when their supervision
    ends by a bug."""
    server = _Server(_uvicorn_config(service))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, restart_core, service)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, service, server, manager, outlives_us)
    gc.freeze()
    gc.enable()
    service.crashed.add_done_callback(lambda _: setattr(server, "should_exit", True))
    notes = asyncio.create_task(_note_ready(service, manager))
    host, port = listener.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"serving {service.config.model_name} on http://{where}", file=sys.stderr, flush=True)
    try:
        async with admin_socket(service, f"http://{where}"):
            await server.serve(sockets=[listener])
    finally:
        notes.cancel()
    if service.crashed.done() and not service.draining:
        error = service.crashed.result()
        if isinstance(error, StartError):
            raise error
        raise StartError(f"the supervisor of the engine core ended: {error!r}") from error


def _uvicorn_config(service: Service) -> uvicorn.Config:
    config = service.config
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return uvicorn.Config(
        build_app(service),
        loop="asyncio",
        http=make_protocol(service.config.client_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=config.access_log,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.drain_timeout_s) + _DRAIN_SLACK_S,
    )


async def _note_ready(service: Service, manager: Manager) -> None:
    listening_ns = now_ns()
    service.timeline.add("listen", service.timeline.phases[-1].end_ns, listening_ns)
    await service.supervisor.model_stats()
    service.timeline.add("ready", listening_ns)
    manager.tell("READY=1")


def _end(service: Service, server: _Server, manager: Manager, outlives_us: bool) -> None:
    """The first signal begins the end, the second does not wait for it."""
    if server.is_ending:
        server.force_exit = True
        return
    server.is_ending = True
    manager.tell("STOPPING=1")
    if not outlives_us:
        _drain(service, server)
        return
    # Whoever connects from now on is our successor's. Who was accepted has a moment to say what it wants.
    for listening in server.servers:
        listening.close()
    asyncio.get_running_loop().call_later(_LAST_WORDS_S, _drain, service, server)


def _drain(service: Service, server: _Server) -> None:
    service.draining = True
    server.should_exit = True
    left_over = OverloadedError("the server shut down before the answer was complete", code="shutting_down")
    loop = asyncio.get_running_loop()
    loop.call_later(service.config.drain_timeout_s, service.close_requests, left_over)
