"""A lease: the right to use a generation, as long as its stream is open.

When the stream breaks because the daemon went away, the mappings stay valid and the holder goes on; a thread asks
the daemon for a new lease on the same generation until one answers. Memory behind IPC handles is mapped by leave of
the daemon: if the lease itself is not had again, somebody may have freed it, and that is the end.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from preload.engine.cuda.mapping import CUDA_IPC
from preload.engine.errors import (
    DaemonError,
    DaemonUnreachableError,
    LoadFailedError,
    NotResidentError,
    PreloadError,
    RetiringError,
)
from preload.engine.timeline import Phase
from preload.protos import weight_cache_pb2 as pb
from preload.protos import weight_cache_pb2_grpc as pb_grpc

from .channel import forget_frames, open_channel, raise_typed

log = logging.getLogger(__name__)

_FIRST_RECLAIM_S = 0.02
_MAX_RECLAIM_S = 0.25
_MAX_REFUSED_S = 5.0
_RECLAIM_ANSWER_S = 30.0
_GONE = (NotResidentError, LoadFailedError, RetiringError)


@dataclass(frozen=True)
class LeaseEvent:
    """`kind` is "retiring", "superseded", "draining", "lost" (no daemon), "reclaimed", or "refused" (the daemon is
    back and does not have the generation; `detail` says why, and the lease goes on asking), "failed" (the memory is
    gone, or may be, as `detail` says: no tensor may be used any more). `detail` of "superseded" is the successor's
    id, of "reclaimed" the daemon's epoch."""

    kind: str
    detail: str = ""


class _Stream:
    """One Attach rpc: requests go in through a queue, which ends it when closed."""

    def __init__(self, runtime_dir: str, opening: pb.AttachOpen) -> None:
        self._requests: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._requests.put(pb.AttachRequest(open=opening))
        self._channel = open_channel(runtime_dir)
        # The call object is an iterator and an rpc at once, which its type does not say.
        self.responses: Any = pb_grpc.WeightCacheStub(self._channel).Attach(iter(self._requests.get, None))

    def first(self, timeout_s: float) -> pb.Attached | None:
        """The daemon's answer; None if it was silent for too long, or the stream was closed meanwhile.

        A stream has no deadline of its own, so a timer ends one that stays silent. Raises grpc.RpcError."""
        timer = threading.Timer(timeout_s, self.responses.cancel)
        timer.daemon = True
        timer.start()
        try:
            event: pb.AttachEvent = next(self.responses)
            return event.attached
        except StopIteration:
            return None
        except grpc.RpcError as error:
            if _code(error) is grpc.StatusCode.CANCELLED:
                forget_frames(error)
                return None
            raise
        finally:
            timer.cancel()

    def send(self, request: pb.AttachRequest) -> None:
        self._requests.put(request)

    def close(self) -> None:
        self._requests.put(None)
        self.responses.cancel()
        self._channel.close()


class Lease:
    """Holds an Attach stream open in the background, and reclaims it from the daemon's successor."""

    def __init__(self, runtime_dir: str, opening: pb.AttachOpen, timeout_s: float) -> None:
        self._runtime_dir = runtime_dir
        self._opening = opening
        self._closed = threading.Event()
        self._events: queue.SimpleQueue[LeaseEvent | None] = queue.SimpleQueue()
        self._listeners: list[Callable[[LeaseEvent], None]] = []
        self._phases: list[Phase] = []
        self._stream = _Stream(runtime_dir, opening)
        self.attached = self._first(timeout_s)
        self._reader = threading.Thread(target=self._read, name="preload-lease", daemon=True)
        self._reader.start()

    @property
    def id(self) -> str:
        return self.attached.lease_id

    def events(self) -> Iterator[LeaseEvent]:
        """Events as they come; ends when the lease is closed."""
        return iter(self._events.get, None)

    def on_event(self, listener: Callable[[LeaseEvent], None]) -> None:
        """Calls `listener` from the lease's own thread for every later event."""
        self._listeners.append(listener)

    def report_phases(self, phases: Sequence[Phase]) -> None:
        """Tells the daemon the phases of this process, for `preload status`."""
        self._phases = list(phases)
        self._stream.send(self._report())

    def close(self) -> None:
        """Gives the lease back. Mappings stay valid until they are closed themselves. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._stream.close()
            if threading.current_thread() is not self._reader:  # the last tensor may go in any thread
                self._reader.join()
            self._events.put(None)

    def _report(self) -> pb.AttachRequest:
        phases = [pb.Phase(name=p.name, start_ns=p.start_ns, end_ns=p.end_ns) for p in self._phases]
        return pb.AttachRequest(phases=pb.PhaseReport(phases=phases))

    def _first(self, timeout_s: float) -> pb.Attached:
        try:
            attached = self._stream.first(timeout_s)
        except grpc.RpcError as error:
            self._stream.close()
            raise_typed(error, self._runtime_dir)
        if attached is None:
            self._stream.close()
            raise DaemonUnreachableError(f"the daemon in {self._runtime_dir} did not answer within {timeout_s:g} s")
        return attached

    def _read(self) -> None:
        while True:
            try:
                for event in self._stream.responses:
                    self._emit(_to_event(event))
            except grpc.RpcError as error:
                log.debug("lease stream ended: %s", error)
                forget_frames(error)
            if self._closed.is_set():
                return
            self._emit(LeaseEvent("lost"))
            if not self._reclaim():
                return

    def _reclaim(self) -> bool:
        """Asks by generation id until a daemon that has the generation answers. False if the lease is closed."""
        wait_s = _FIRST_RECLAIM_S
        last_refusal = ""
        while not self._closed.wait(wait_s):
            wait_s = min(2 * wait_s, _MAX_REFUSED_S if last_refusal else _MAX_RECLAIM_S)
            try:
                attached = self._ask_again()
            except PreloadError as refusal:
                if self._lives_by_lease and isinstance(refusal, _GONE):
                    return self._end(refusal.message)
                if refusal.message != last_refusal:
                    log.warning("the daemon is back without this generation: %s", refusal.message)
                    self._emit(LeaseEvent("refused", refusal.message))
                last_refusal = refusal.message
                continue
            if attached is None:
                continue
            if self._lives_by_lease and attached.lease_id != self.attached.lease_id:
                return self._end("the daemon is back without this lease, and may have freed its memory: attach again")
            self.attached = attached
            self._stream.send(self._report())
            self._emit(LeaseEvent("reclaimed", str(attached.epoch)))
            return True
        return False

    @property
    def _lives_by_lease(self) -> bool:
        """Whether the memory is that of a holder, freed when no lease is on it."""
        return any(segment.backend == CUDA_IPC for segment in self.attached.segments)

    def _end(self, reason: str) -> bool:
        self._stream.close()
        self._emit(LeaseEvent("failed", reason))
        return False

    def _ask_again(self) -> pb.Attached | None:
        """One attempt, on a stream that `close` can end at any time. Raises PreloadError if the daemon refuses."""
        opening = pb.AttachOpen()
        opening.CopyFrom(self._opening)
        rank = self._opening.selector.rank
        device = self.attached.segments[0].device if self.attached.segments else self._opening.selector.device
        opening.selector.CopyFrom(pb.Selector(generation_id=self.attached.generation_id, rank=rank, device=device))
        opening.reclaim_secret = self.attached.reclaim_secret
        try:
            stream = _Stream(self._runtime_dir, opening)
        except DaemonUnreachableError:
            return None
        self._stream.close()
        self._stream = stream
        if self._closed.is_set():  # `close` may have missed this stream, and waits for our end
            stream.close()
            return None
        try:
            return stream.first(_RECLAIM_ANSWER_S)
        except grpc.RpcError as error:
            if _code(error) is grpc.StatusCode.UNAVAILABLE:  # also one that is about to end: its successor is asked
                forget_frames(error)
                return None
            raise_typed(error, self._runtime_dir)

    def _emit(self, event: LeaseEvent) -> None:
        self._events.put(event)
        for listener in self._listeners:
            listener(event)


def _to_event(message: pb.AttachEvent) -> LeaseEvent:
    kind = message.WhichOneof("event")
    if kind is None:
        raise DaemonError("the daemon sent an event of an unknown kind")
    details = {"superseded": message.superseded.generation_id, "failed": message.failed.error.message}
    return LeaseEvent(kind, details.get(kind, ""))


def _code(error: Any) -> grpc.StatusCode:
    """The status of a failed rpc: grpc.RpcError is its Call as well, which its type does not say."""
    code: grpc.StatusCode = error.code()
    return code
