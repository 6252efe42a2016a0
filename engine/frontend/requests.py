"""Every request in flight, and which core works on it.

The frontend owns a sample from admission to its last token: prompt, sampling parameters, tokens so far. A core only
borrows it. When a core dies, its samples go to the next one with the tokens they have; a sample that was with two
cores that died is answered with an error, because it may be what killed them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from preload.protos import engine_core_pb2 as pb

from .errors import ApiError, CoreFailedError
from .metrics import Metrics
from .sampling import SamplingParams

MAX_CORE_DEATHS = 2


class Session(Protocol):
    """The open stream to one core; sending never blocks."""

    def send(self, request: pb.CoreRequest) -> None: ...


@dataclass(frozen=True)
class SampleEvent:
    """News of one sample: tokens, and why it ended if it did ("stop" means a stop id, the last token)."""

    index: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[pb.TokenLogprobs] = ()
    finish_reason: str | None = None
    error: ApiError | None = None


@dataclass(eq=False, kw_only=True)
class Sample:
    """One sequence being generated; several with one queue make up a request."""

    request_id: str
    index: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    events: asyncio.Queue[SampleEvent]
    output_ids: list[int] = field(default_factory=list)
    num_core_deaths: int = 0
    submitted_at: float = field(default_factory=time.monotonic)
    last_token_at: float | None = None

    def to_proto(self) -> pb.CoreRequest:
        return pb.CoreRequest(
            add=pb.AddRequest(
                request_id=self.request_id,
                prompt_ids=self.prompt_ids,
                output_ids=self.output_ids,
                sampling=self.sampling.to_proto(),
            )
        )


_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class InFlight:
    """All samples that have not ended. Used from one event loop; no method awaits."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: dict[str, Sample] = {}
        self._session: Session | None = None
        self._closed: ApiError | None = None
        self.on_first_token: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def submit(self, sample: Sample) -> None:
        """Takes a sample; it goes to the core at once, or to the next one as soon as there is one."""
        if self._closed is not None:
            sample.events.put_nowait(SampleEvent(sample.index, error=self._closed))
            return
        self._samples[sample.request_id] = sample
        self._metrics.in_flight.set(len(self._samples))
        self._metrics.prompt_tokens.inc(len(sample.prompt_ids))
        if self._session is not None:
            self._session.send(sample.to_proto())

    def abort(self, request_id: str) -> None:
        """Forgets a sample and tells the core; one that has ended already is no error."""
        if self._forget(request_id) and self._session is not None:
            self._session.send(pb.CoreRequest(abort=pb.AbortRequest(request_id=request_id)))

    def _forget(self, request_id: str) -> bool:
        known = self._samples.pop(request_id, None) is not None
        self._metrics.in_flight.set(len(self._samples))
        return known

    def attach(self, session: Session) -> None:
        """A core is ready: it gets every sample in flight."""
        self._session = session
        for sample in self._samples.values():
            if sample.num_core_deaths:
                self._metrics.resubmissions.inc()
            session.send(sample.to_proto())

    def detach(self, session: Session) -> None:
        """The core of `session` is gone: its samples wait for the next, but those it may have died of."""
        if self._session is not session:
            return
        self._session = None
        for sample in list(self._samples.values()):
            sample.num_core_deaths += 1
            if sample.num_core_deaths >= MAX_CORE_DEATHS:
                self._fail(sample, _died_repeatedly(sample))

    def close(self, error: ApiError) -> None:
        """Ends every sample, and each one submitted from now on, with `error`."""
        self._closed = error
        for sample in list(self._samples.values()):
            self.abort(sample.request_id)
            sample.events.put_nowait(SampleEvent(sample.index, error=error))

    def _fail(self, sample: Sample, error: ApiError) -> None:
        self._forget(sample.request_id)
        sample.events.put_nowait(SampleEvent(sample.index, error=error))

    def on_output(self, output: pb.RequestOutput) -> None:
        """News from the core. Samples that were aborted in the meantime are passed over."""
        sample = self._samples.get(output.request_id)
        if sample is None:
            return
        if output.token_ids:
            self._count_tokens(sample, len(output.token_ids))
        sample.output_ids.extend(output.token_ids)
        finish = output.finish_reason
        if finish not in (pb.FINISH_REASON_NONE, *_FINISH):
            self._fail(sample, _core_error(output))
            return
        if finish != pb.FINISH_REASON_NONE:
            self._forget(sample.request_id)
        event = SampleEvent(sample.index, output.token_ids, output.logprobs, _FINISH.get(finish))
        sample.events.put_nowait(event)

    def _count_tokens(self, sample: Sample, count: int) -> None:
        now = time.monotonic()
        self._metrics.output_tokens.inc(count)
        if sample.last_token_at is None:
            self._metrics.first_token_s.observe(now - sample.submitted_at)
        else:
            self._metrics.inter_token_s.observe((now - sample.last_token_at) / count)
        sample.last_token_at = now
        if self.on_first_token is not None:
            notify, self.on_first_token = self.on_first_token, None
            notify()


def _died_repeatedly(sample: Sample) -> CoreFailedError:
    return CoreFailedError(
        f"{sample.num_core_deaths} engine cores died while they worked on this request; it is not tried again",
        code="core_died_repeatedly",
    )


def _core_error(output: pb.RequestOutput) -> CoreFailedError:
    reason = output.error or f"it ended with {pb.FinishReason.Name(output.finish_reason)}"
    return CoreFailedError(f"the engine core failed this request: {reason}", code="core_error")
