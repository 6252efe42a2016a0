"""POST /v1/completions, streamed and not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .api import CompletionRequest, parse_completion
from .choices import Choice, TokenEntry
from .deployment import Deployment
from .fields import parse_object
from .http import Answer, EventStream, read_body
from .logprobs import completion_logprobs, prompt_entries, prompt_logprobs
from .service import Generation, Service
from .tokenizer import Tokenizer


async def completions(request: Request) -> Response:
    """Completes one or several prompts."""
    service: Service = request.app.state.service
    service.check_open()
    body = await read_body(request, service.config.max_body_bytes, service.config.client_timeout_s)
    asked = parse_completion(parse_object(body), service.tokenizer.vocab_size)
    service.check_model(asked.options.model)
    completion = Completion(service, asked)
    return EventStream(completion.events) if asked.options.stream else Answer(completion.answer)


class Completion:
    """One request of this endpoint."""

    def __init__(self, service: Service, asked: CompletionRequest) -> None:
        self._service = service
        self._asked = asked
        self._created_s = int(time.time())
        self._began_s = asyncio.get_running_loop().time()

    async def _start(self, deployment: Deployment) -> tuple[Generation, list[str]]:
        """The generation, and what each choice's text begins with."""
        tokenizer = deployment.tokenizer
        prompts = [
            await tokenizer.encode_async(prompt, add_special=True) if isinstance(prompt, str) else prompt
            for prompt in self._asked.prompts
        ]
        options = self._asked.options
        sampling = await deployment.sampling(options, prompts)
        generation = Generation(
            service=self._service,
            deployment=deployment,
            prompts=prompts,
            options=options,
            sampling=sampling,
            began_s=self._began_s,
        )
        echoes = [self._echo(tokenizer, index // options.n) for index in range(len(generation.choices))]
        return generation, echoes

    def _echo(self, tokenizer: Tokenizer, prompt_index: int) -> str:
        if not self._asked.echo:
            return ""
        prompt = self._asked.prompts[prompt_index]
        return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)

    async def answer(self) -> dict[str, Any]:
        """The response to a request that is not streamed."""
        async with self._service.deployment() as deployment:
            return await self._answer(*await self._start(deployment))

    async def _answer(self, generation: Generation, echoes: Sequence[str]) -> dict[str, Any]:
        texts = [[echo] for echo in echoes]
        entries: list[list[TokenEntry]] = [[] for _ in echoes]
        async with generation:
            async for delta in generation.deltas():
                texts[delta.index].append(delta.text)
                entries[delta.index].extend(self._shifted(delta.entries, echoes[delta.index]))
        choices = [
            {
                **self._choice(
                    generation,
                    choice.index,
                    "".join(texts[choice.index]),
                    [*self._echoed(generation, choice.index), *entries[choice.index]],
                    choice.finish_reason,
                ),
                **self._prompt_logprobs(generation, choice),
            }
            for choice in generation.choices
        ]
        return {**self._head(generation), "choices": choices, "usage": generation.usage()}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed response."""
        async with self._service.deployment() as deployment:
            async with aclosing(self._events(*await self._start(deployment))) as events:
                async for event in events:
                    yield event

    async def _events(self, generation: Generation, echoes: Sequence[str]) -> AsyncGenerator[dict[str, Any], None]:
        options = self._asked.options
        head = self._head(generation)
        if options.include_usage:
            head["usage"] = None
        to_echo = set(range(len(echoes))) if self._asked.echo else set()
        async with generation:
            async for delta in generation.deltas():
                if delta.index in to_echo:
                    to_echo.remove(delta.index)
                    echoed = self._echoed(generation, delta.index)
                    yield {
                        **head,
                        "choices": [self._choice(generation, delta.index, echoes[delta.index], echoed, None)],
                    }
                if delta.text or delta.entries or delta.finish_reason:
                    entries = self._shifted(delta.entries, echoes[delta.index])
                    choice = self._choice(generation, delta.index, delta.text, entries, delta.finish_reason)
                    yield {**head, "choices": [choice]}
        if options.include_usage:
            yield {**head, "choices": [], "usage": generation.usage()}

    def _echoed(self, generation: Generation, index: int) -> list[TokenEntry]:
        """What is shown of the prompt's log-probabilities as part of the text."""
        if not (self._asked.echo and self._asked.options.logprobs):
            return []
        prompt_ids = generation.prompt_of(index)
        return prompt_entries(generation.deployment.tokenizer, prompt_ids, generation.choices[index].prompt_logprobs)

    @staticmethod
    def _shifted(entries: Sequence[TokenEntry], echo: str) -> Sequence[TokenEntry]:
        """Entries of what comes after the echo, with their places in the whole text."""
        if not (echo and entries):
            return entries
        return [replace(entry, start=entry.start + len(echo), end=entry.end + len(echo)) for entry in entries]

    def _prompt_logprobs(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        num_top = self._asked.prompt_logprobs
        if num_top is None:
            return {}
        prompt_ids, tokenizer = generation.prompt_of(choice.index), generation.deployment.tokenizer
        return {"prompt_logprobs": prompt_logprobs(tokenizer, prompt_ids, choice.prompt_logprobs, num_top)}

    def _head(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": self._created_s,
            "model": self._service.config.model_name,
        }

    def _choice(
        self,
        generation: Generation,
        index: int,
        text: str,
        entries: Sequence[TokenEntry],
        finish_reason: str | None,
    ) -> dict[str, Any]:
        options = self._asked.options
        logprobs = None
        if options.logprobs:
            logprobs = completion_logprobs(generation.deployment.tokenizer, entries, options.num_top_logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
