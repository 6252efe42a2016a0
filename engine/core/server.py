"""The core's gRPC service: converts and delegates to the step loop; computes nothing.

Owns the socket and the rule of one Generate stream at a time. Requests go into the loop's inbox from a thread per
stream; outputs come back through the stream's queue.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from preload.engine.errors import CoreError, RequestError
from preload.engine.timeline import Timeline, now_ns
from preload.protos import engine_core_pb2 as pb
from preload.protos import engine_core_pb2_grpc as pb_grpc

from .core import EngineCore
from .loop import (
    DrainAsked,
    OutputStream,
    PromotionAsked,
    RequestArrived,
    RequestsEnded,
    StepLoop,
    StreamClosed,
    StreamOpened,
)
from .memory import MemoryProfile

MAX_MESSAGE_BYTES = 64 << 20
MAX_SOCKET_PATH_BYTES = 107
SERVICE = "preload.engine_core.v1.EngineCore"
_NUM_THREADS = 8  # one Generate, some Health.Watch, and short rpcs
_STOP_GRACE_S = 5.0
_PROMOTION_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What the core serves, for Stats."""

    generation_id: str
    weights_bytes: int
    kernels: str = ""


class CoreService(pb_grpc.EngineCoreServicer):
    """Handlers of engine_core.proto."""

    def __init__(self, loop: StepLoop, timeline: Timeline, identity: Identity) -> None:
        self._loop = loop
        self._timeline = timeline
        self._identity = identity
        self._lock = threading.Lock()
        self._stream: OutputStream | None = None
        self._draining = False
        self.on_promoted: Callable[[], None] = lambda: None

    @property
    def standby(self) -> bool:
        return self._loop.standby

    def Generate(  # noqa: N802
        self, request_iterator: Iterator[pb.CoreRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StepOutput]:
        stream = OutputStream()
        with self._lock:
            refusal = self._refusal()
            if not refusal:
                self._stream = stream
        if refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        self._loop.inbox.put(StreamOpened(stream))
        if not context.add_callback(lambda: self._close(stream)):
            self._close(stream)
        reading = (request_iterator, stream, context)
        threading.Thread(target=self._read, args=reading, name="core-requests", daemon=True).start()
        return iter(stream)

    def Promote(self, request: pb.PromoteRequest, context: grpc.ServicerContext) -> pb.PromoteResponse:  # noqa: N802
        asked = PromotionAsked()
        self._loop.inbox.put(asked)
        try:
            kv_cache_bytes = asked.done.result(_PROMOTION_S)
        except (CoreError, RequestError) as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        except FutureTimeoutError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the step loop has ended or does not turn; use another core")
        self.on_promoted()
        return pb.PromoteResponse(kv_cache_bytes=kv_cache_bytes)

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:  # noqa: N802
        num_running = self._loop.core.num_requests
        self.drain(request.deadline_ms)
        return pb.DrainResponse(num_running=num_running)

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsResponse:  # noqa: N802
        answer = stats(self._loop.core, self._timeline, self._identity)
        answer.standby = self.standby
        return answer

    def drain(self, deadline_ms: int) -> None:
        """Refuses streams from now on, and tells the loop. Also called from a signal handler: takes no lock."""
        self._draining = True
        self._loop.inbox.put(DrainAsked(now_ns() + deadline_ms * 1_000_000))

    def _refusal(self) -> str:
        if self._draining:
            return "the engine core is draining; use another"
        if self.standby:
            return "the engine core is a standby; promote it first"
        return "a Generate stream is open already; the core serves one frontend" if self._stream else ""

    def _read(
        self,
        request_iterator: Iterator[pb.CoreRequest | _Malformed],
        stream: OutputStream,
        context: grpc.ServicerContext,
    ) -> None:
        try:
            for message in request_iterator:
                if isinstance(message, _Malformed):
                    context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
                    context.set_details(f"not a CoreRequest: {message.why}")
                    self._close(stream)
                    return
                self._loop.inbox.put(RequestArrived(message))
        except grpc.RpcError:
            return  # the stream broke; its callback tells the loop
        self._loop.inbox.put(RequestsEnded())

    def _close(self, stream: OutputStream) -> None:
        with self._lock:
            if self._stream is not stream:
                return
            stream.end()
            self._loop.inbox.put(StreamClosed())
            self._stream = None


def stats(core: EngineCore, timeline: Timeline, identity: Identity) -> pb.StatsResponse:
    """A snapshot; counters of a step under way may be half updated, which harms nothing."""
    scheduler, counters, speculator = core.scheduler, core.counters, core.speculator
    return pb.StatsResponse(
        generation_id=identity.generation_id,
        pid=os.getpid(),
        num_running=len(scheduler.running),
        num_holding=len(scheduler.kv_holding_waiting),
        num_deferred=len(scheduler.deferred_waiting),
        memory=_memory_to_proto(core.memory) if core.memory else None,
        num_waiting=len(scheduler.waiting),
        num_kv_blocks=scheduler.pool.num_usable,
        num_free_kv_blocks=scheduler.pool.num_free,
        block_size=scheduler.pool.block_size,
        kv_cache_bytes=core.kv_cache_bytes,
        num_steps=counters.num_steps,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_output_tokens=counters.num_output_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_prefix_queried_tokens=scheduler.prefix_counters.num_queried_tokens,
        num_prefix_hit_tokens=scheduler.prefix_counters.num_hit_tokens,
        max_model_len=core.max_model_len,
        max_num_seqs=core.max_num_seqs,
        phases=timeline.to_proto(),
        weights_bytes=identity.weights_bytes,
        kernels=identity.kernels,
        speculation=speculator.describe() if speculator else "",
        num_drafted_tokens=speculator.acceptance.num_drafted if speculator else (),
        num_accepted_tokens=speculator.acceptance.num_accepted if speculator else (),
    )


def _memory_to_proto(memory: MemoryProfile) -> pb.MemoryProfile:
    return pb.MemoryProfile(
        total_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        core_bytes=memory.core_bytes,
        peak_bytes=memory.peak_bytes or 0,
        has_peak=memory.peak_bytes is not None,
    )


@dataclass(frozen=True)
class _Malformed:
    """In place of a message that is none."""

    why: str


class _LenientStreams(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """A stream in which a message fails to parse would never call back in gRPC, and so never be over for us."""

    def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = continuation(handler_call_details)
        if handler is None or not (handler.request_streaming and handler.response_streaming):
            return handler
        return handler._replace(request_deserializer=partial(_parse, handler.request_deserializer))


def _parse(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserialize(data)
    except DecodeError as error:
        return _Malformed(str(error))


class CoreServer:
    """A listening gRPC server around a CoreService; SERVING from `serve`, or a standby's promotion, until `stop`."""

    def __init__(self, service: CoreService, socket_path: str) -> None:
        self._health = health.HealthServicer()
        self._server = grpc.server(
            ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="core-grpc"),
            interceptors=[_LenientStreams()],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ],
        )
        pb_grpc.add_EngineCoreServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._bind(socket_path)
        self._standby = service.standby
        service.on_promoted = self._set_serving
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def serve(self) -> None:
        self._server.start()
        if not self._standby:
            self._set_serving()

    def _set_serving(self) -> None:
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> None:
        """Takes no more rpcs, lets streams deliver what they hold, and returns."""
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._server.stop(_STOP_GRACE_S).wait()

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE):
            self._health.set(service, status)

    def _bind(self, socket_path: str) -> None:
        """Binds with mode 0600: gRPC makes the socket with whatever the umask leaves."""
        if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
            raise CoreError(
                f"socket path {socket_path} has {len(os.fsencode(socket_path))} bytes; "
                f"Linux allows {MAX_SOCKET_PATH_BYTES}, so use a shorter folder"
            )
        umask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{socket_path}")
        except RuntimeError as error:
            raise CoreError(f"cannot listen on {socket_path}: {error}") from error
        finally:
            os.umask(umask)
