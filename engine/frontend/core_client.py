"""`CoreSession`: the frontend's side of engine_core.proto, to one core.

Owns the channel and the one Generate stream. What the requests mean and what happens when the stream breaks is
decided elsewhere; a session is used once and never reconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from preload.protos import engine_core_pb2 as pb
from preload.protos import engine_core_pb2_grpc as pb_grpc

from .errors import StartError

T = TypeVar("T")

_OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class CoreCallError(Exception):
    """Raised when a call to a core came to nothing: it is gone, too busy to answer, or refuses; the message says."""


class CoreSession:
    """One connection to one core."""

    def __init__(self, socket_path: str) -> None:
        self._channel = grpc.aio.insecure_channel(f"unix:{socket_path}", options=_OPTIONS)
        # The generated class is typed for both flavours of channel, and mypy sees the synchronous one.
        self._stub: pb_grpc.EngineCoreAsyncStub = pb_grpc.EngineCoreStub(self._channel)
        self._outgoing: asyncio.Queue[pb.CoreRequest | None] = asyncio.Queue()

    async def wait_serving(self) -> None:
        """Returns when the core says SERVING. Raises StartError when it hangs up before."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        try:
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            raise StartError(f"the core hung up before it was ready: {error.details()}") from error
        finally:
            watch.cancel()
        raise StartError("the core ended its health stream before it was ready")

    def send(self, request: pb.CoreRequest) -> None:
        """Queues a request for the stream; never blocks."""
        self._outgoing.put_nowait(request)

    async def _requests(self) -> AsyncIterator[pb.CoreRequest]:
        while (request := await self._outgoing.get()) is not None:
            yield request

    async def run(self, on_output: Callable[[pb.RequestOutput], None]) -> str:
        """Reads outputs until the stream ends; returns why it did."""
        call = self._stub.Generate(self._requests())
        try:
            async for step in call:
                for output in step.outputs:
                    on_output(output)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
            self._outgoing.put_nowait(None)  # the generator ends by itself; gRPC leaves it to the garbage collector
        return "the core ended the stream"

    async def stats(self, timeout_s: float | None) -> pb.StatsResponse:
        """Raises CoreCallError. Without a limit, waits for the connection too."""
        return await _answer(
            lambda: self._stub.Stats(pb.StatsRequest(), timeout=timeout_s, wait_for_ready=timeout_s is None)
        )

    async def promote(self, timeout_s: float) -> int:
        """Makes a standby serve; returns the bytes of its KV cache. Raises CoreCallError."""
        answer = await _answer(lambda: self._stub.Promote(pb.PromoteRequest(), timeout=timeout_s))
        return answer.kv_cache_bytes

    async def drain(self, deadline_s: float) -> None:
        """Asks the core to finish and exit. Raises CoreCallError."""
        request = pb.DrainRequest(deadline_ms=int(deadline_s * 1000))
        await _answer(lambda: self._stub.Drain(request, timeout=1.0))

    async def close(self) -> None:
        await self._channel.close(None)


async def _answer(call: Callable[[], Awaitable[T]]) -> T:
    """Raises CoreCallError, also for a channel that others closed before the call or under it: gRPC shows the one as
    wrong use and the other as a cancellation, which must not be taken for one of the caller's task."""
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        raise CoreCallError(error.details() or error.code().name) from error
    except grpc.aio.UsageError as error:
        raise CoreCallError("its channel is closed") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise CoreCallError("its channel was closed") from error
