"""Every request in flight of one deployment, and which core works on it.

The frontend owns a sample from admission to its last token: prompt, sampling parameters, tokens so far. A core only
borrows it. When a core dies, its samples go to the next one with the tokens they have.

One of them may be what kills cores, so deaths are counted, and who has to be suspected is tried apart:

- A sample's deaths count only as long as it makes no progress: with CLEARED_AFTER more tokens than at its last death
  it has passed the step that would have killed again, and starts at 0.
- After one death everybody is resubmitted. From its second on, a sample is suspected, and a trial begins: half of
  the most suspected go to the core; all others wait. When the core dies, the half is halved again; when
  the half is cleared, the rest is tried. So the guilty one is found in a logarithmic number of deaths.
- Only a sample that was alone with the core, or alone on trial, at a death that was not its first, is blamed: it is
  answered with an error and never submitted again; the others are cleared.

An innocent neighbour is thus never condemned for the company it had. Requests that kill only together are cleared
apart, and the supervisor's backoff bounds how fast they do it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from preload.protos import engine_core_pb2 as pb

from .errors import ApiError, BadRequestError, CoreFailedError
from .metrics import Metrics
from .sampling import SamplingParams

SUSPECTED_DEATHS = 2
CLEARED_AFTER = 4


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
    prompt_logprobs: Sequence[pb.TokenLogprobs] = ()


@dataclass(eq=False, kw_only=True)
class Sample:
    """One sequence being generated; several with one queue make up a request."""

    request_id: str
    index: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    events: asyncio.Queue[SampleEvent]
    priority: int = 0
    cache_salt: str = ""
    output_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Of the prompt, those whose keys and values the first core had."""
    vocabulary: pb.Vocabulary | None = None
    """What the core has to know before it gets this sample."""
    home: InFlight | None = None
    """Where it is in flight; None before that and when it has ended."""
    with_core: bool = False
    num_deaths: int = 0
    """Of cores that had it, without progress in between."""
    num_output_at_death: int = 0
    was_submitted: bool = False
    submitted_at: float = field(default_factory=time.monotonic)
    last_token_at: float | None = None

    def to_proto(self) -> pb.CoreRequest:
        add = pb.AddRequest(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            sampling=self.sampling.to_proto(),
            priority=self.priority,
            cache_salt=self.cache_salt,
        )
        if self.output_ids:  # the first of them brought these along
            add.sampling.ClearField("prompt_logprobs")
        return pb.CoreRequest(add=add)

    def note_death(self) -> None:
        self.with_core = False
        self.num_deaths += 1
        self.num_output_at_death = len(self.output_ids)

    def clear_if_advanced(self) -> None:
        if len(self.output_ids) >= self.num_output_at_death + CLEARED_AFTER:
            self.num_deaths = 0

    def abort(self) -> None:
        """Forgets it, wherever it is; one that has ended, or was never submitted, is no error."""
        if self.home is not None:
            self.home.abort(self.request_id)


_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class InFlight:
    """All samples that have not ended. Used from one event loop; no method awaits."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: dict[str, Sample] = {}
        self._session: Session | None = None
        self._vocabulary: pb.Vocabulary | None = None
        """What the session's core was told."""
        self._trial: set[Sample] = set()
        """The only ones that may be with the core; empty: everybody may."""
        self._closed: ApiError | None = None
        self.on_first_token: Callable[[], None] | None = None
        self.on_draining: Callable[[], None] | None = None
        """The core takes no more requests: whoever has it replaced sets this."""

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def core_has_work(self) -> bool:
        return any(sample.with_core for sample in self._samples.values())

    def submit(self, sample: Sample) -> None:
        """Takes a sample; it goes to the core at once, or to the next one as soon as there is one."""
        if self._closed is not None:
            sample.events.put_nowait(SampleEvent(sample.index, error=self._closed))
            return
        self._metrics.prompt_tokens.inc(len(sample.prompt_ids))
        self._take(sample)

    def _take(self, sample: Sample) -> None:
        self._samples[sample.request_id] = sample
        sample.home = self
        self._metrics.in_flight.inc()
        if self._session is not None and not self._trial:
            self._send(self._session, sample)

    def abort(self, request_id: str) -> None:
        """Forgets a sample and tells the core; one that has ended already is no error."""
        sample = self._samples.get(request_id)
        if sample is None:
            return
        if sample.with_core and self._session is not None:
            self._session.send(pb.CoreRequest(abort=pb.AbortRequest(request_id=request_id)))
        self._forget(sample)

    def move_to(self, other: InFlight) -> int:
        """Hands every sample, with its tokens so far, to the deployment of the same weights; returns how many."""
        samples = list(self._samples.values())
        for sample in samples:
            self.abort(sample.request_id)
            other._take(sample)
        return len(samples)

    def _forget(self, sample: Sample) -> None:
        del self._samples[sample.request_id]
        sample.home = None
        sample.with_core = False
        self._metrics.in_flight.dec()
        self._end_trial_of(sample)

    def attach(self, session: Session) -> None:
        """A core is ready: it gets every sample in flight, or those whose turn it is to be tried."""
        self._session, self._vocabulary = session, None
        self._start_next()

    def _start_next(self) -> None:
        """Chooses whom to try, if anybody has to be, and hands over all who may run and do not yet."""
        if self._session is None:
            return
        worst = max((sample.num_deaths for sample in self._samples.values()), default=0)
        self._trial = set()
        if worst >= SUSPECTED_DEATHS:
            suspects = [sample for sample in self._samples.values() if sample.num_deaths == worst]
            self._trial = set(suspects[: max(1, len(suspects) // 2)])
        for sample in self._trial or self._samples.values():
            if not sample.with_core:
                self._send(self._session, sample)

    def _send(self, session: Session, sample: Sample) -> None:
        if sample.was_submitted:
            self._metrics.resubmissions.inc()
        sample.was_submitted = sample.with_core = True
        if sample.vocabulary is not None and sample.vocabulary is not self._vocabulary:
            self._vocabulary = sample.vocabulary
            session.send(pb.CoreRequest(vocabulary=sample.vocabulary))
        session.send(sample.to_proto())

    def _end_trial_of(self, sample: Sample) -> None:
        if sample in self._trial:
            self._trial.remove(sample)
            if not self._trial:
                self._start_next()

    def detach(self, session: Session) -> None:
        """The core of `session` is gone: its samples wait for the next, but one it must have died of."""
        if self._session is not session:
            return
        victims = [sample for sample in self._samples.values() if sample.with_core]
        tried = list(self._trial) or victims  # beside those on trial run only some that have just been cleared
        self._session = None
        self._trial = set()
        for sample in victims:
            sample.note_death()
        if len(tried) == 1 and tried[0].num_deaths >= SUSPECTED_DEATHS:
            self._fail(tried[0], _died_repeatedly(tried[0]))
            for sample in self._samples.values():
                sample.num_deaths = 0

    def recall(self) -> None:
        """Takes every sample back from the core, which did nothing wrong; they wait for the next one."""
        session, self._session, self._trial = self._session, None, set()
        for sample in self._samples.values():
            if sample.with_core and session is not None:
                session.send(pb.CoreRequest(abort=pb.AbortRequest(request_id=sample.request_id)))
            sample.with_core = False

    def close(self, error: ApiError) -> None:
        """Ends every sample, and each one submitted from now on, with `error`."""
        self._closed = error
        for sample in list(self._samples.values()):
            self.abort(sample.request_id)
            sample.events.put_nowait(SampleEvent(sample.index, error=error))

    def _fail(self, sample: Sample, error: ApiError) -> None:
        self._forget(sample)
        sample.events.put_nowait(SampleEvent(sample.index, error=error))

    def on_output(self, output: pb.RequestOutput) -> None:
        """News from the core. Samples that were aborted in the meantime are passed over."""
        sample = self._samples.get(output.request_id)
        if sample is None:
            return
        if output.draining:
            sample.with_core = False
            if self.on_draining is not None:
                self.on_draining()
            return
        if output.token_ids:
            self._count_tokens(sample, len(output.token_ids))
        self._metrics.count_drafts(output.num_draft_tokens, output.num_accepted_tokens)
        if not sample.output_ids:
            sample.num_cached_tokens = output.num_cached_tokens
            self._metrics.cached_prompt_tokens.inc(output.num_cached_tokens)
        sample.output_ids.extend(output.token_ids)
        finish = output.finish_reason
        if finish not in (pb.FINISH_REASON_NONE, *_FINISH):
            self._fail(sample, _core_error(output))
            return
        if finish != pb.FINISH_REASON_NONE:
            self._forget(sample)
        elif sample.num_deaths:
            sample.clear_if_advanced()
            if not sample.num_deaths:
                self._end_trial_of(sample)
        event = SampleEvent(
            sample.index,
            output.token_ids,
            output.logprobs,
            _FINISH.get(finish),
            prompt_logprobs=output.prompt_logprobs,
        )
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
        f"{sample.num_deaths} engine cores died while they worked on this request, and no other can have caused it; "
        "it is not tried again",
        code="core_died_repeatedly",
    )


def _core_error(output: pb.RequestOutput) -> ApiError:
    if output.refused:
        return BadRequestError(output.error, param=output.param or None, code="invalid_value")
    reason = output.error or f"it ended with {pb.FinishReason.Name(output.finish_reason)}"
    return CoreFailedError(f"the engine core failed this request: {reason}", code="core_error")
