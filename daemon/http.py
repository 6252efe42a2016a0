"""Probes for Kubernetes and a scrape target for Prometheus, on the daemon's own event loop: an answer from /health
proves that the loop turns.

Imported when somebody asks first (see probes.py): it takes longer to import than all the rest of the daemon.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .cache import WeightCache
from .metrics import Metrics


def make_app(cache: WeightCache, metrics: Metrics) -> Starlette:
    async def health(request: Request) -> Response:
        # Alive also when its sockets are gone: who holds a lease needs it, and a probe must not end it.
        return JSONResponse({"status": "ok", "epoch": cache.epoch, **_trouble(cache)})

    async def ready(request: Request) -> Response:
        missing = cache.missing_models()
        is_ready = not missing and not cache.draining and not cache.trouble
        body = {
            "ready": is_ready,
            "draining": cache.draining,
            "missing": [_why(cache, path) for path in missing],
            **_trouble(cache),
        }
        return JSONResponse(body, status_code=200 if is_ready else 503)

    async def scrape(request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    return Starlette(routes=[Route("/health", health), Route("/ready", ready), Route("/metrics", scrape)])


def _trouble(cache: WeightCache) -> dict[str, str]:
    return {"trouble": cache.trouble} if cache.trouble else {}


def _why(cache: WeightCache, path: str) -> dict[str, str]:
    """A missing model's state, and the reason if its load failed."""
    for source in cache.config.models:
        attempt = cache.catalog.attempt(source) if source.path == path else None
        if attempt is not None:
            reason = attempt.failure.message if attempt.failure else ""
            return {"checkpoint": path, "state": attempt.state.value, "reason": reason}
    return {"checkpoint": path, "state": "ABSENT", "reason": ""}


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: signals are the daemon's."""

    def __init__(self, app: Starlette) -> None:
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", workers=1))

    async def serve_on(self, listener: socket.socket) -> None:
        """Serves until `should_exit`."""
        await self.serve(sockets=[listener])

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
