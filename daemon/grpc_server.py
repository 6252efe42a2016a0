"""The gRPC server of the daemon: grpc.aio's, with its limits, and with what a client must not be able to do to it.

In grpc.aio the name of an rpc that nobody registered is decoded in the loop that serves everybody, so that one client
with a name that is no UTF-8 would end the service for all (grpcio 1.85): such rpcs are answered here, name unseen.
And what grpc.aio has to say of clients that left in the middle of an answer is a line of the log, not a traceback.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from .interceptor import ErrorInterceptor

log = logging.getLogger(__name__)

_MAX_RPCS = 8192
_MAX_LOG_CHARS = 300
_OPTIONS = (
    ("grpc.max_receive_message_length", 1024 * 1024),
    ("grpc.max_send_message_length", 256 * 1024 * 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.so_reuseport", 0),
    # A client that says nothing, or leaves its connection unused, does not keep it.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_concurrent_streams", 100),
)


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """Answers every rpc that nobody registered itself, so that the loop that serves all never sees its name."""

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """The next rpc of a registered method; for the others, which are what None means, a future without end."""
        if method is None:
            return asyncio.get_running_loop().create_task(self._refuse_others())
        future: asyncio.Future[Any] = super()._make_request_call_future(method)
        return future

    async def _refuse_others(self) -> None:
        refusals: set[asyncio.Task[None]] = set()
        while True:
            rpc = await self._request_call()
            task = asyncio.get_running_loop().create_task(_refuse(rpc))
            refusals.add(task)
            task.add_done_callback(refusals.discard)


async def _refuse(rpc: Any) -> None:
    context = cygrpc._ServicerContext(rpc, None, None, asyncio.get_running_loop())
    try:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "this daemon has no such method; it may be an older version"
        )
    except grpc.aio.AbortError:
        return
    except cygrpc.ExecuteBatchError:
        log.debug("a client left before it was told that there is no such method")


class _InOneLine(logging.Filter):
    """Our own handlers log their bugs with a traceback; what is left to grpc.aio are its clients' ends."""

    def filter(self, record: logging.LogRecord) -> bool:
        cause = record.exc_info[1] if record.exc_info else None
        first, *more = record.getMessage().splitlines() or [""]
        words = [first, *more[-1:], *([str(cause)] if cause is not None else [])]
        record.msg, record.args = ": ".join(word[:_MAX_LOG_CHARS] for word in words), ()
        record.exc_info = record.exc_text = None
        return True


def make_server() -> grpc.aio.Server:
    """A server without services and ports. Call it in the loop that is to serve."""
    logger = logging.getLogger("grpc._cython.cygrpc")
    if not any(isinstance(found, _InOneLine) for found in logger.filters):
        logger.addFilter(_InOneLine())
    theirs = cygrpc.AioServer
    cygrpc.AioServer = _AioServer  # grpc.aio has no other way to be given one
    try:
        return grpc.aio.server(interceptors=[ErrorInterceptor()], options=_OPTIONS, maximum_concurrent_rpcs=_MAX_RPCS)
    finally:
        cygrpc.AioServer = theirs
