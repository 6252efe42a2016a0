"""`Service`: what the endpoints share, and the main path of a request from prompt ids to text."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from preload.engine.timeline import Timeline

from .admission import Admission
from .api import GenerationOptions
from .auth import ApiKeys
from .chat_template import ChatTemplate
from .choices import Choice, Delta
from .config import FrontendConfig
from .errors import BadRequestError, NotFoundError, OverloadedError, TimeoutApiError
from .metrics import Metrics
from .requests import InFlight, Sample, SampleEvent
from .sampling import SamplingParams
from .supervisor import Supervisor
from .tokenizer import Tokenizer

_POLL_S = 0.25


@dataclass(kw_only=True)
class Service:
    """The parts of one frontend."""

    config: FrontendConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    keys: ApiKeys
    metrics: Metrics
    in_flight: InFlight
    supervisor: Supervisor
    admission: Admission
    timeline: Timeline
    created_s: int
    draining: bool = False

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError for another model's name; none at all means ours."""
        if name is not None and name != self.config.model_name:
            raise NotFoundError(
                f"the model {name!r} is not served here; {self.config.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def check_open(self) -> None:
        """Raises OverloadedError while no new request can be taken."""
        if self.draining:
            raise OverloadedError("the server is shutting down", code="shutting_down")
        if self.supervisor.failing:
            reason = "; ".join(self.supervisor.reasons())
            raise OverloadedError(f"no engine core can be started: {reason}", code="core_unavailable")

    async def max_model_len(self) -> int:
        """The longest sequence in tokens; waits for the first core. Raises OverloadedError if it fails."""
        stats = asyncio.ensure_future(self.supervisor.model_stats())
        try:
            while True:
                done, _ = await asyncio.wait((stats,), timeout=_POLL_S)
                if done:
                    return stats.result().max_model_len
                self.check_open()
        finally:
            stats.cancel()

    async def sampling(self, options: GenerationOptions, prompts: Sequence[Sequence[int]]) -> SamplingParams:
        """Sampling parameters that suit every prompt. Raises BadRequestError when a prompt is too long."""
        limit = await self.max_model_len()
        max_prompt = self.config.max_prompt_tokens or limit
        longest = max(len(ids) for ids in prompts)
        if not min(len(ids) for ids in prompts):
            raise BadRequestError("the prompt has no tokens", param="prompt", code="empty_prompt")
        wanted = options.max_tokens
        if longest > max_prompt or longest + (wanted or 1) > limit:
            asked = f" and {wanted} tokens of answer were asked for" if wanted else ""
            raise BadRequestError(
                f"the prompt has {longest} tokens{asked}; the model's limit is {limit} tokens, prompt and "
                f"answer together, and a prompt may have {min(max_prompt, limit)}",
                param="max_tokens" if longest < min(limit, max_prompt + 1) else "prompt",
                code="context_length_exceeded",
            )
        return self._sampling(options, wanted or limit - longest)

    def _sampling(self, options: GenerationOptions, max_tokens: int) -> SamplingParams:
        eos_ids = () if options.ignore_eos else self.tokenizer.eos_ids
        if options.min_tokens > max_tokens:
            raise BadRequestError(
                f"'min_tokens' is {options.min_tokens}; there is room for {max_tokens}",
                param="min_tokens",
                code="out_of_range",
            )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=options.logit_bias,
            seed=options.seed,
            min_tokens=options.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*eos_ids, *options.stop_token_ids))),
            logprobs=options.logprobs,
            num_top_logprobs=options.num_top_logprobs,
        )


@dataclass(kw_only=True)
class Generation:
    """All samples of one HTTP request: choice i is sample i % n of prompt i // n.

    `async with generation: async for delta in generation.deltas()`. Leaving aborts what has not ended.
    """

    service: Service
    prompts: Sequence[Sequence[int]]
    options: GenerationOptions
    sampling: SamplingParams
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    choices: list[Choice] = field(init=False, default_factory=list)
    _samples: list[Sample] = field(init=False, default_factory=list)
    _events: asyncio.Queue[SampleEvent] = field(init=False, default_factory=asyncio.Queue)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        n = self.options.n
        for index in range(len(self.prompts) * n):
            self.choices.append(Choice(index, self.service.tokenizer, self.options.stop, self.options.min_tokens))
            self._samples.append(
                Sample(
                    request_id=f"{self.id}-{index}",
                    index=index,
                    prompt_ids=self.prompts[index // n],
                    sampling=self.sampling.for_sample(index % n),
                    events=self._events,
                )
            )

    async def __aenter__(self) -> Generation:
        """Waits for admission and hands the samples to the core. Raises OverloadedError, TimeoutApiError."""
        timeout_s = self.service.config.request_timeout_s or None
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(timeout_s):
                await self.service.admission.acquire(len(self._samples))
        except TimeoutError as error:
            raise self._timed_out() from error
        if timeout_s is not None:
            # An event, not a cancellation: the reader may be anywhere, for instance sending to a slow client.
            expired = SampleEvent(0, error=self._timed_out())
            self._timer = loop.call_at(started + timeout_s, self._events.put_nowait, expired)
        for sample in self._samples:
            self.service.in_flight.submit(sample)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for sample in self._samples:
            self.service.in_flight.abort(sample.request_id)
        self.service.admission.release(len(self._samples))

    def _timed_out(self) -> TimeoutApiError:
        limit_s = self.service.config.request_timeout_s
        return TimeoutApiError(f"the request took longer than {limit_s:g} s", code="request_timeout")

    async def deltas(self) -> AsyncIterator[Delta]:
        """News of the choices in the order they come, until each has ended. Raises ApiError."""
        num_open = len(self.choices)
        while num_open:
            event = await self._events.get()
            if event.error is not None:
                raise event.error
            choice = self.choices[event.index]
            if choice.finish_reason is not None:
                continue
            delta = choice.add(event)
            if delta.finish_reason is not None:
                num_open -= 1
                self.service.in_flight.abort(self._samples[event.index].request_id)
            yield delta

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: each prompt counts once."""
        num_prompt = sum(len(ids) for ids in self.prompts)
        num_completion = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }
