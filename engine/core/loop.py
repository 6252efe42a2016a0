"""The step loop: feeds the core from an inbox, and its stream from the core.

Owns the core: the gRPC threads only put into the inbox and take from the stream's queue. Idle, it blocks on the
inbox. It ends when it is told to drain and has nothing left, or the drain's deadline has passed.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from preload.engine.errors import CoreError, RequestError
from preload.engine.timeline import Timeline, now_ns
from preload.protos import engine_core_pb2 as pb

from .core import EngineCore
from .request import FinishReason, RequestOutput
from .wire import request_from_proto, step_to_proto, vocabulary_from_proto

_IDLE_S = 1.0
_STEPS_PER_GRAPH = 32
"""While a core is busy, one graph that is missing is captured every so many steps."""


class OutputStream:
    """The outgoing half of one Generate stream."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[pb.StepOutput | None] = queue.SimpleQueue()

    def send(self, outputs: list[RequestOutput]) -> None:
        self._steps.put(step_to_proto(outputs))

    def end(self) -> None:
        self._steps.put(None)

    def __iter__(self) -> Iterator[pb.StepOutput]:
        return iter(self._steps.get, None)


@dataclass(frozen=True)
class StreamOpened:
    stream: OutputStream


@dataclass(frozen=True)
class RequestArrived:
    message: pb.CoreRequest
    at_ns: int = field(default_factory=now_ns)


@dataclass(frozen=True)
class RequestsEnded:
    """The client sends no more; its stream ends when what it sent is finished."""


@dataclass(frozen=True)
class StreamClosed:
    """Nobody reads any more."""


@dataclass(frozen=True)
class DrainAsked:
    deadline_ns: int


@dataclass(frozen=True)
class PromotionAsked:
    """`done` gets the bytes of the KV cache, or the CoreError that says why there is none."""

    done: Future[int] = field(default_factory=Future)


Event = StreamOpened | RequestArrived | RequestsEnded | StreamClosed | DrainAsked | PromotionAsked


class StepLoop:
    """Runs in the main thread. `on_first_token` is called once, after the phase "first_token" is recorded.

    `allocate_kv` makes the loop a standby's: it is called when the core is promoted, and may raise CoreError."""

    def __init__(
        self,
        core: EngineCore,
        timeline: Timeline,
        on_first_token: Callable[[], None] = lambda: None,
        allocate_kv: Callable[[], None] | None = None,
    ) -> None:
        self.core = core
        self._allocate_kv = allocate_kv
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._timeline = timeline
        self._on_first_token = on_first_token
        self._first_token_pending = True
        self._arrivals: dict[str, int] = {}  # of requests without a token, until there is a first one
        self._stream: OutputStream | None = None
        self._requests_ended = False
        self._drain_deadline_ns: int | None = None

    @property
    def standby(self) -> bool:
        return self._allocate_kv is not None

    def run(self) -> None:
        """Steps until drained. The stream, if one is open, is ended."""
        while True:
            self._take_inbox()
            if self._drained():
                break
            outputs = self.core.step() if self.core.has_work else []
            if outputs and self._stream is not None:
                self._stream.send(outputs)
            if self.core.num_missing_graphs and self.core.counters.num_steps % _STEPS_PER_GRAPH == 0:
                self.core.capture_graph()
            if self._first_token_pending:
                self._note_first_token(outputs)
            self._end_finished_stream()
        if self._stream is not None:
            self._stream.end()

    def _take_inbox(self) -> None:
        """Handles what has arrived; waits for something if there is nothing else to do."""
        if not self.core.has_work and self._drain_deadline_ns is None:
            if self.core.num_missing_graphs and self.inbox.empty():
                self.core.capture_graph()  # one at a time, so that whoever comes waits for one at most
            elif self.standby or not self.inbox.empty() or not self.core.populate_ahead():
                self._handle(self._wait())
        while not self.inbox.empty():
            self._handle(self.inbox.get())

    def _wait(self) -> Event:
        """What arrives next. A core that has had nothing to do for a while checks its bookkeeping meanwhile: whatever
        is wrong in it ends the process while nobody depends on it."""
        try:
            return self.inbox.get(timeout=_IDLE_S)
        except queue.Empty:
            self.core.check_invariants()
            return self.inbox.get()

    def _handle(self, event: Event) -> None:
        match event:
            case StreamOpened(stream):
                self._stream, self._requests_ended = stream, False
            case RequestArrived(message, at_ns):
                self._handle_request(message, at_ns)
            case RequestsEnded():
                self._requests_ended = True
                self._end_finished_stream()
            case StreamClosed():
                self.core.drop_all()
                self._stream = None
                self._arrivals.clear()
            case DrainAsked(deadline_ns):
                self._drain_deadline_ns = deadline_ns
            case PromotionAsked(done):
                self._promote(done)

    def _promote(self, done: Future[int]) -> None:
        try:
            self._allocate()
        except (CoreError, RequestError) as error:
            done.set_exception(error)
        else:
            done.set_result(self.core.kv_cache_bytes)

    def _allocate(self) -> None:
        """A standby's KV memory; nothing happens if it has it."""
        if self._allocate_kv is not None:
            with self._timeline.phase("promote"):
                self._allocate_kv()
            self._allocate_kv = None

    def _handle_request(self, message: pb.CoreRequest, at_ns: int) -> None:
        if message.HasField("abort"):
            self.core.abort_request(message.abort.request_id)
        elif message.HasField("add"):
            if self._drain_deadline_ns is not None:
                self._refuse(message.add.request_id, "the engine core is draining; send it to another", draining=True)
                return
            if self._first_token_pending:
                self._arrivals[message.add.request_id] = at_ns
            try:
                self.core.add_request(request_from_proto(message.add))
            except RequestError as error:
                self._arrivals.pop(message.add.request_id, None)
                self._refuse(message.add.request_id, error.message, refused=True)
        elif message.HasField("vocabulary"):
            self.core.grammars.set_vocabulary(vocabulary_from_proto(message.vocabulary))

    def _refuse(self, request_id: str, error: str, *, refused: bool = False, draining: bool = False) -> None:
        if self._stream is not None:
            output = RequestOutput(
                request_id=request_id,
                finish_reason=FinishReason.ERROR,
                error=error,
                refused=refused,
                draining=draining,
            )
            self._stream.send([output])

    def _drained(self) -> bool:
        if self._drain_deadline_ns is None:
            return False
        return not self.core.has_work or now_ns() >= self._drain_deadline_ns

    def _end_finished_stream(self) -> None:
        if self._requests_ended and not self.core.has_work and self._stream is not None:
            self._stream.end()
            self._stream = None

    def _note_first_token(self, outputs: list[RequestOutput]) -> None:
        """Records the time from the arrival of the request that gets the first token until then."""
        for output in outputs:
            at_ns = self._arrivals.pop(output.request_id, None)
            if at_ns is not None and output.token_ids:
                self._timeline.add("first_token", at_ns)
                self._first_token_pending = False
                self._arrivals.clear()
                self._on_first_token()
                return
