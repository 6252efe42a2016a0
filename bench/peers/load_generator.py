"""The load generator: streamed completions through the official `openai` client, and when each piece arrived.

The client makes the requests, keeps the connections and reads the streams. Its events are parsed here, as JSON and
no further: turning every event into the client's typed objects costs half as much again, on cores that the servers
need. The generator's own CPU time is part of each result.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from preload.bench.processes import BenchError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A prompt, its exact length, and how many tokens are to follow."""

    prompt: str
    num_prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """Monotonic seconds at which the request was sent and each piece of text arrived."""

    sent_s: float
    piece_times: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    text: str

    @property
    def first_token_s(self) -> float:
        return self.piece_times[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between a piece and the next; a piece is one token, unless a server sends several at once."""
        return [after - before for before, after in zip(self.piece_times, self.piece_times[1:], strict=False)]


class LoadGenerator:
    """One client of one server. A context manager, since the client keeps connections."""

    def __init__(self, base_url: str, model: str, timeout_s: float) -> None:
        self._base_url = base_url
        self._model = model
        self._timeout_s = timeout_s

    async def __aenter__(self) -> LoadGenerator:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self._client: AsyncOpenAI = AsyncOpenAI(
            base_url=self._base_url,
            api_key="none",
            max_retries=0,
            timeout=self._timeout_s,
            # A connection that is kept may be one that its server is closing, which fails the next request on it.
            default_headers={"Connection": "close"},
            http_client=DefaultAsyncHttpxClient(trust_env=False),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.close()

    async def ask(self, request: Request) -> Answer:
        """A greedy answer of exactly `max_tokens` tokens. Raises BenchError if the server counts otherwise."""
        sent_s = time.monotonic()
        times: list[float] = []
        texts: list[str] = []
        usage: dict[str, int] = {}
        async with self._client.completions.with_streaming_response.create(
            model=self._model,
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ) as response:
            async for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise BenchError(f"the stream ended with {event['error']}")
                usage = event.get("usage") or usage
                if event["choices"] and event["choices"][0]["text"]:
                    times.append(time.monotonic())
                    texts.append(event["choices"][0]["text"])
        answer = Answer(
            sent_s, tuple(times), usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), "".join(texts)
        )
        _check(request, answer)
        return answer

    async def ask_all(self, requests: Sequence[Request], concurrency: int) -> list[Answer]:
        """All answers, with `concurrency` requests on their way at any time as long as there are so many left."""
        waiting = iter(requests)
        answers: list[Answer] = []

        async def work() -> None:
            for request in waiting:
                answers.append(await self.ask(request))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(work())
        return answers

    async def ask_at(self, requests: Sequence[Request], arrivals_s: Sequence[float]) -> list[Answer]:
        """All answers; each request is sent at its time after now, however many are still on their way."""
        start_s = time.monotonic()

        async def later(request: Request, arrival_s: float) -> Answer:
            await asyncio.sleep(start_s + arrival_s - time.monotonic())
            return await self.ask(request)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(later(*pair)) for pair in zip(requests, arrivals_s, strict=True)]
        return [task.result() for task in tasks]


def transport_errors() -> tuple[type[Exception], ...]:
    """What a broken connection raises besides the client's own errors: its HTTP library's, whichever that is."""
    from openai import OpenAIError

    loaded = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return (OpenAIError, *(library.HTTPError for library in loaded))


def _check(request: Request, answer: Answer) -> None:
    if not answer.piece_times:
        raise BenchError("an answer had no text")
    asked = (request.num_prompt_tokens, request.max_tokens)
    counted = (answer.num_prompt_tokens, answer.num_output_tokens)
    if asked != counted:
        raise BenchError(f"the server counted {counted} tokens of prompt and answer; asked for were {asked}")


async def with_own_cost(work: Callable[[], Awaitable[T]]) -> tuple[T, float, float]:
    """The result of `work`, the seconds that it took, and the CPU seconds that this process spent on it."""
    start_s, start_cpu_s = time.monotonic(), _cpu_s()
    result = await work()
    return result, time.monotonic() - start_s, _cpu_s() - start_cpu_s


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
