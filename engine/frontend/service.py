"""`Service`: what the endpoints share, and the main path of a request from prompt ids to text."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from preload.engine.timeline import Timeline

from .admission import Admission
from .api import GenerationOptions
from .auth import ApiKeys
from .choices import Choice, Delta
from .config import FrontendConfig
from .core_records import CoreRecords
from .deployment import Deployment
from .deployment_factory import DeploymentFactory
from .errors import ApiError, NotFoundError, OverloadedError, StartError, TimeoutApiError
from .metrics import Metrics
from .requests import Sample, SampleEvent
from .sampling import SamplingParams
from .supervisor import Supervisor
from .tokenizer import Tokenizer


@dataclass(kw_only=True, eq=False)
class Service:
    """The parts of one frontend. `deployments` are those with cores: the current one, and others during an update."""

    config: FrontendConfig
    socket_dir: str
    keys: ApiKeys
    metrics: Metrics
    admission: Admission
    factory: DeploymentFactory
    records: CoreRecords
    current: Deployment
    timeline: Timeline
    created_s: int
    draining: bool = False
    deployments: list[Deployment] = field(init=False)
    crashed: asyncio.Future[BaseException | None] = field(init=False)
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: ApiError | None = None
    _updates: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.deployments = [self.current]
        self.crashed = asyncio.get_running_loop().create_future()
        self._open.set()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.current.tokenizer

    @property
    def supervisor(self) -> Supervisor:
        return self.current.supervisor

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
        if self._open.is_set():
            self.current.check_core()

    def hold_requests(self) -> None:
        """New requests wait until `release_requests`, for an update that has no room for two cores."""
        self._open.clear()

    def release_requests(self) -> None:
        self._open.set()

    @asynccontextmanager
    async def deployment(self) -> AsyncIterator[Deployment]:
        """What a request that begins now is served by, from its tokenization to its end.

        Raises OverloadedError, TimeoutApiError, or what `close_requests` was told."""
        if not self._open.is_set():
            await self._wait_open()
        with self.current.used() as deployment:
            yield deployment

    async def _wait_open(self) -> None:
        try:
            with self.admission.outside():
                async with asyncio.timeout(self.config.request_timeout_s or None):
                    while not self._open.is_set():  # another update may have closed it again
                        await self._open.wait()
        except TimeoutError as error:
            raise self.timed_out() from error
        if self._closed is not None:
            raise self._closed

    def timed_out(self) -> TimeoutApiError:
        limit_s = self.config.request_timeout_s
        return TimeoutApiError(f"the request took longer than {limit_s:g} s", code="request_timeout")

    def watch(self, runner: asyncio.Task[None]) -> None:
        """A supervisor that ends by itself has a bug: the service ends with it, and is restarted."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None and not self.crashed.done():
                self.crashed.set_result(error)

        runner.add_done_callback(ended)

    def watch_first(self, supervisor: Supervisor) -> None:
        """A first core that refuses its configuration would be followed by others like it: the service ends."""

        def died(reason: asyncio.Future[str]) -> None:
            if supervisor.refused_configuration and not self.crashed.done():
                self.crashed.set_result(StartError(reason.result()))

        supervisor.first_death.add_done_callback(died)

    def close_requests(self, error: ApiError) -> None:
        """Ends every request in flight, and each one submitted from now on, with `error`."""
        self._closed = error
        self._open.set()
        for deployment in self.deployments:
            deployment.in_flight.close(error)

    def start_update(self, update: Coroutine[Any, Any, None]) -> None:
        """Runs an update in the background: it goes on although whoever asked for it has gone."""
        task = asyncio.create_task(update)
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)

    async def stop(self) -> None:
        """Ends every update and every core."""
        updates = list(self._updates)
        for task in updates:
            task.cancel()
        await asyncio.gather(*updates, return_exceptions=True)
        await asyncio.gather(*(deployment.stop() for deployment in self.deployments))

    async def describe_cores(self) -> list[dict[str, Any]]:
        """The record of every core, oldest first; phases of the current ones are fresh."""
        for deployment in self.deployments:
            await deployment.supervisor.current_stats()
        return [life.to_json() for life in self.records.lives]


@dataclass(kw_only=True)
class Generation:
    """All samples of one HTTP request: choice i is sample i % n of prompt i // n.

    `async with generation: async for delta in generation.deltas()`. Leaving aborts what has not ended.
    """

    service: Service
    deployment: Deployment
    prompts: Sequence[Sequence[int]]
    options: GenerationOptions
    sampling: SamplingParams
    began_s: float
    """When the request began, on the event loop's clock."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    choices: list[Choice] = field(init=False, default_factory=list)
    _samples: list[Sample] = field(init=False, default_factory=list)
    _events: asyncio.Queue[SampleEvent] = field(init=False, default_factory=asyncio.Queue)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        n = self.options.n
        for index in range(len(self.prompts) * n):
            self.choices.append(Choice(index, self.deployment.tokenizer, self.options.stop, self.options.min_tokens))
            self._samples.append(
                Sample(
                    request_id=f"{self.id}-{index}",
                    index=index,
                    prompt_ids=self.prompts[index // n],
                    sampling=self.sampling.for_sample(index % n),
                    events=self._events,
                    priority=self.options.priority,
                    cache_salt=self.options.cache_salt,
                    vocabulary=self.deployment.vocabulary.message if self.sampling.structured_output else None,
                )
            )

    async def __aenter__(self) -> Generation:
        """Waits for admission and hands the samples to the core. Raises OverloadedError, TimeoutApiError."""
        timeout_s = self.service.config.request_timeout_s or None
        deadline_s = None if timeout_s is None else self.began_s + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                await self.service.admission.acquire(len(self._samples))
        except TimeoutError as error:
            raise self.service.timed_out() from error
        if deadline_s is not None:
            # An event, not a cancellation: the reader may be anywhere, for instance sending to a slow client.
            expired = SampleEvent(0, error=self.service.timed_out())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(deadline_s, self._events.put_nowait, expired)
        in_flight = self.deployment.latest().in_flight
        for sample in self._samples:
            in_flight.submit(sample)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for sample in self._samples:
            sample.abort()
        self.service.admission.release(len(self._samples))

    def prompt_of(self, index: int) -> Sequence[int]:
        """The prompt of a choice."""
        return self.prompts[index // self.options.n]

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
                self._samples[event.index].abort()
            yield delta

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: each prompt counts once."""
        num_prompt = sum(len(ids) for ids in self.prompts)
        num_completion = sum(choice.num_tokens for choice in self.choices)
        num_cached = sum(sample.num_cached_tokens for sample in self._samples[:: self.options.n])
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
