"""What every endpoint needs of HTTP: bounded bodies, JSON, server-sent events, and the end of a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, BodyTooLargeError, SlowClientError

T = TypeVar("T")

CLIENT_GONE_STATUS = 499


class ClientGoneError(Exception):
    """Raised when the client hung up before its answer; there is nobody to tell."""


def to_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class JsonResponse(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return to_json(content)


def error_response(error: ApiError) -> Response:
    """OpenAI's error object with its status and headers."""
    return JsonResponse(error.body(), status_code=error.status, headers=error.headers)


async def read_body(request: Request, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to be over the limit, SlowClientError."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise BodyTooLargeError(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limit_bytes:
                    raise BodyTooLargeError(limit_bytes)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    except TimeoutError as error:
        raise SlowClientError(timeout_s) from error
    return bytes(body)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client hangs up first, cancels it and raises ClientGoneError."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answer(Response):
    """A response whose body is one JSON object that takes a while; given up when the client hangs up."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await until_disconnect(receive, self._work())
        await JsonResponse(answer)(scope, receive, send)


class EventStream(Response):
    """A response of server-sent events, ended by `data: [DONE]`.

    A refusal before the first event is an ordinary response; a later one is sent as an event. A client that hangs up
    in the middle of the stream has had its status: that is an end as good as any.
    """

    def __init__(self, events: Callable[[], AsyncGenerator[dict[str, Any], None]]) -> None:
        super().__init__()
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(send))
        except ClientGoneError:
            if not self._started:
                raise

    async def _run(self, send: Send) -> None:
        events = self._events()
        try:
            async for event in events:
                if not self._started:
                    await send(_STREAM_START)
                    self._started = True
                await send(_event(to_json(event)))
        except ApiError as error:
            if not self._started:
                raise
            await send(_event(to_json(error.body())))
        finally:
            await events.aclose()
        await send(_event(b"[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}


_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
