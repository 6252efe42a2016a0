"""The ASGI application: routes, keys, counting, and every refusal in OpenAI's shape."""

from __future__ import annotations

import os
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .chat import chat_completions
from .client_guard import send_in_time
from .completions import completions
from .errors import ApiError, MethodNotAllowedError, NotFoundError
from .http import CLIENT_GONE_STATUS, ClientGoneError, JsonResponse, error_response
from .metrics import CONTENT_TYPE
from .service import Service

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))


def build_app(service: Service) -> ASGIApp:
    """The application, ready for uvicorn."""
    routes = [
        Route("/health", _health, methods=["GET"]),
        Route("/ready", _ready, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),
        Route("/debug/cores", _cores, methods=["GET"]),
        Route("/v1/models", _models, methods=["GET"]),
        Route("/v1/models/{name:path}", _model, methods=["GET"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _refuse,
            HTTPException: _refuse_http,
            ClientGoneError: _client_gone,
            Exception: _internal_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return Gate(app, service)


class Gate:
    """Before the routes: keys are checked. After them: responses are counted."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.requests[_endpoint(path), str(message["status"])] += 1
            await send_in_time(scope, send, message, self._service.config.client_timeout_s)

        if path not in OPEN_PATHS:
            try:
                self._service.keys.check(_header(scope, b"authorization"))
            except ApiError as error:
                await error_response(error)(scope, receive, counting_send)
                return
        await self._app(scope, receive, counting_send)


_ENDPOINTS = OPEN_PATHS | {"/debug/cores", "/v1/models", "/v1/completions", "/v1/chat/completions"}


def _endpoint(path: str) -> str:
    # Only known paths become labels: a client must not grow the metrics by inventing paths.
    return path if path in _ENDPOINTS else "other"


def _header(scope: Scope, name: bytes) -> str | None:
    value = next((value for key, value in scope["headers"] if key == name), None)
    return None if value is None else value.decode("latin-1")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        message = f"{request.url.path} does not answer to {request.method}"
        return error_response(MethodNotAllowedError(message, code="method_not_allowed", headers=headers))
    return error_response(NotFoundError(f"there is no {request.url.path} here", code="not_found"))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)


async def _internal_error(request: Request, error: Exception) -> Response:
    return error_response(ApiError("the server hit a bug; its log says more", code="internal_error"))


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _health(request: Request) -> Response:
    return JsonResponse({"status": "ok"})


async def _ready(request: Request) -> Response:
    service = _service(request)
    reasons = service.supervisor.reasons()
    if service.draining:
        reasons = ["the server is shutting down", *reasons]
    if not reasons:
        return JsonResponse({"ready": True, "reasons": []})
    body = {"ready": False, "reasons": reasons, "last_core_output": service.supervisor.last_words}
    return JsonResponse(body, status_code=503, headers={"Retry-After": "1"})


async def _metrics(request: Request) -> Response:
    return Response(_service(request).metrics.render(), media_type=CONTENT_TYPE)


async def _cores(request: Request) -> Response:
    service = _service(request)
    phases = [phase.__dict__ for phase in service.timeline.phases]
    cores = await service.describe_cores()
    return JsonResponse({"frontend": {"pid": os.getpid(), "phases": phases}, "cores": cores})


def _describe_model(service: Service) -> dict[str, Any]:
    return {
        "id": service.config.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "preload",
        "root": service.current.config.checkpoint or service.current.config.generation,
    }


async def _models(request: Request) -> Response:
    return JsonResponse({"object": "list", "data": [_describe_model(_service(request))]})


async def _model(request: Request) -> Response:
    service = _service(request)
    service.check_model(request.path_params["name"])
    return JsonResponse(_describe_model(service))
