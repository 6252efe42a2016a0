"""POST /v1/completions, streamed and not."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .api import CompletionRequest, parse_completion
from .choices import TokenEntry
from .fields import parse_object
from .http import Answer, EventStream, read_body
from .logprobs import completion_logprobs
from .service import Generation, Service


async def completions(request: Request) -> Response:
    """Completes one or several prompts."""
    service: Service = request.app.state.service
    service.check_open()
    body = await read_body(request, service.config.max_body_bytes)
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

    async def _start(self) -> tuple[Generation, list[str]]:
        """The generation, and what each choice's text begins with."""
        tokenizer = self._service.tokenizer
        prompts = [
            await tokenizer.encode_async(prompt, add_special=True) if isinstance(prompt, str) else prompt
            for prompt in self._asked.prompts
        ]
        options = self._asked.options
        sampling = await self._service.sampling(options, prompts)
        generation = Generation(service=self._service, prompts=prompts, options=options, sampling=sampling)
        return generation, [self._echo(index // options.n) for index in range(len(generation.choices))]

    def _echo(self, prompt_index: int) -> str:
        if not self._asked.echo:
            return ""
        prompt = self._asked.prompts[prompt_index]
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(prompt)

    async def answer(self) -> dict[str, Any]:
        """The response to a request that is not streamed."""
        generation, echoes = await self._start()
        texts = [[echo] for echo in echoes]
        entries: list[list[TokenEntry]] = [[] for _ in echoes]
        async with generation:
            async for delta in generation.deltas():
                texts[delta.index].append(delta.text)
                entries[delta.index].extend(delta.entries)
        choices = [
            self._choice(choice.index, "".join(texts[choice.index]), entries[choice.index], choice.finish_reason)
            for choice in generation.choices
        ]
        return {**self._head(generation), "choices": choices, "usage": generation.usage()}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed response."""
        options = self._asked.options
        generation, echoes = await self._start()
        head = self._head(generation)
        if options.include_usage:
            head["usage"] = None
        async with generation:
            if self._asked.echo:
                for index, echo in enumerate(echoes):
                    yield {**head, "choices": [self._choice(index, echo, (), None)]}
            async for delta in generation.deltas():
                if delta.text or delta.entries or delta.finish_reason:
                    choice = self._choice(delta.index, delta.text, delta.entries, delta.finish_reason)
                    yield {**head, "choices": [choice]}
        if options.include_usage:
            yield {**head, "choices": [], "usage": generation.usage()}

    def _head(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": self._created_s,
            "model": self._service.config.model_name,
        }

    def _choice(
        self, index: int, text: str, entries: Sequence[TokenEntry], finish_reason: str | None
    ) -> dict[str, Any]:
        options = self._asked.options
        logprobs = None
        if options.logprobs:
            logprobs = completion_logprobs(self._service.tokenizer, entries, options.num_top_logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
