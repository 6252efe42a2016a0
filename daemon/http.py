"""Probes for Kubernetes and a scrape target for Prometheus, on the daemon's own event loop: an answer from /health
proves that the loop turns.

Imported when somebody asks first (see probes.py): it takes longer to import than all the rest of the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from .cache import WeightCache
from .generations import Source
from .metrics import Metrics

_MAX_CONNECTIONS = 64
_CONNECTION_S = 60.0


def make_app(cache: WeightCache, metrics: Metrics) -> Starlette:
    async def health(request: Request) -> Response:
        # Alive also when its sockets are gone: who holds a lease needs it, and a probe must not end it.
        return JSONResponse({"status": "ok", "epoch": cache.epoch, **_trouble(cache)})

    async def ready(request: Request) -> Response:
        missing = cache.missing_sources()
        is_ready = not missing and not cache.draining and not cache.trouble
        body = {
            "ready": is_ready,
            "draining": cache.draining,
            "missing": [_why(cache, source) for source in missing],
            **_trouble(cache),
        }
        return JSONResponse(body, status_code=200 if is_ready else 503)

    async def scrape(request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    return Starlette(routes=[Route("/health", health), Route("/ready", ready), Route("/metrics", scrape)])


def _trouble(cache: WeightCache) -> dict[str, str]:
    return {"trouble": cache.trouble} if cache.trouble else {}


def _why(cache: WeightCache, source: Source) -> dict[str, str]:
    """A missing model's recipe, its state, and the reason if its load failed."""
    attempt = cache.catalog.attempt(source)
    return {
        "checkpoint": source.path,
        "model": source.recipe.model,
        "quantization": source.recipe.quantization,
        "compute_dtype": source.recipe.compute_dtype,
        "config_overrides": source.recipe.config_overrides,
        "state": attempt.state.value if attempt else "ABSENT",
        "reason": attempt.failure.message if attempt and attempt.failure else "",
    }


class _ProbesProtocol(H11Protocol):
    """A connection is short, few are open at a time, and what comes after an answer began harms nobody."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()
        else:
            self._end = self.loop.call_later(_CONNECTION_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "_end"):
            self._end.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Also when the nonsense is in the body of a request that is being answered: that answer is given up."""
        if self.cycle is None or self.cycle.response_complete:
            super().send_400_response(msg)
            return
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self.transport.abort()


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: signals are the daemon's."""

    def __init__(self, app: Starlette) -> None:
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        super().__init__(
            uvicorn.Config(app, http=_ProbesProtocol, log_config=None, access_log=False, lifespan="off", workers=1)
        )

    async def serve_on(self, listener: socket.socket) -> None:
        """Serves until `should_exit`."""
        await self.serve(sockets=[listener])

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
