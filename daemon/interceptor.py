"""The one place where a domain error becomes a gRPC status with a typed trailer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from preload.protos import weight_cache_pb2

from . import wire
from .capacity import refusal
from .errors import BadRequestError, CacheError, InternalError

log = logging.getLogger(__name__)

_OUR_METHODS = f"/{weight_cache_pb2.DESCRIPTOR.services_by_name['WeightCache'].full_name}/"
ERROR_TRAILER = "preload-error-bin"
_MAX_MESSAGE_BYTES = 1800
_MAX_FIELD_BYTES = 1000
_MAX_STATUS_BYTES = 900
"""Trailers travel as HTTP/2 headers, of which we allow 16 KiB in sum: the error as it is, and the status's own text,
in which every byte beyond ASCII takes three."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps every handler of ours; those of grpc.health are of another kind. A CacheError is an answer; anything
    else is a bug, logged with its traceback."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        if not str(handler_call_details.method).startswith(_OUR_METHODS):
            return handler._replace(request_deserializer=_forgiving(handler.request_deserializer))
        handler = handler._replace(request_deserializer=_lenient(handler.request_deserializer))
        if handler.unary_unary:
            return handler._replace(unary_unary=_guard_unary(handler.unary_unary))
        if handler.unary_stream:
            return handler._replace(unary_stream=_guard_stream(handler.unary_stream, takes_stream=False))
        if handler.stream_stream:
            return handler._replace(stream_stream=_guard_stream(handler.stream_stream, takes_stream=True))
        return handler


def _guard_unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(_checked(request), context)
        except CacheError as error:
            await _abort(context, error)
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:  # noqa: BLE001
            await _abort(context, _unexpected(error))

    return guarded


def _guard_stream(behavior: Callable[..., Any], takes_stream: bool) -> Callable[..., Any]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        responses = None
        try:
            responses = behavior(_checked_stream(request) if takes_stream else _checked(request), context)
            async for response in responses:
                yield response
        except CacheError as error:
            await _abort(context, error)
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:  # noqa: BLE001
            await _abort(context, _unexpected(error))
        finally:
            if responses is not None:
                await responses.aclose()

    return guarded


def _unexpected(error: Exception) -> CacheError:
    """The system has run out of something, or else this is a bug. Called while `error` is handled."""
    if isinstance(error, OSError) and not isinstance(told := refusal(error, "what this takes"), InternalError):
        return told
    log.exception("a request hit a bug")
    return InternalError(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class _Malformed:
    """In place of a message that is none."""

    why: str


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """grpc.aio takes an exception here for a bug of ours, and tells the client nothing."""

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return parse


def _forgiving(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Takes nonsense for an empty message: whoever asks how we are in a strange way is told how we are."""

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return deserialize(b"")

    return parse


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise BadRequestError(f"the request is not a message of this contract: {request.why}")
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: CacheError) -> NoReturn:
    info = shortened(error)
    trailer = ((ERROR_TRAILER, info.SerializeToString()),)
    status = grpc.StatusCode[error.status]
    await context.abort(status, _shorten(info.message, _MAX_STATUS_BYTES), trailing_metadata=trailer)
    raise AssertionError("abort raises")


def shortened(error: CacheError) -> weight_cache_pb2.ErrorInfo:
    """An error as it fits into a trailer."""
    info = wire.error_info(error)
    info.message = _shorten(info.message, _MAX_MESSAGE_BYTES)
    for key, value in list(info.fields.items()):  # who changes a map of protobuf under its iterator passes some over
        info.fields[key] = _shorten(value, _MAX_FIELD_BYTES)
    return info


def _shorten(text: str, limit_bytes: int) -> str:
    """Keeps both ends: the start names the thing, the end holds a process's last words."""
    data = text.encode()
    if len(data) <= limit_bytes:
        return text
    head, tail = data[: limit_bytes // 2], data[-limit_bytes // 2 :]
    return f"{head.decode(errors='ignore')} … {tail.decode(errors='ignore')}"
