"""POST /v1/chat/completions, streamed and not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .api import ChatRequest, parse_chat
from .choices import Delta, TokenEntry
from .deployment import Deployment
from .errors import BadRequestError
from .fields import parse_object
from .http import Answer, EventStream, read_body
from .logprobs import chat_logprobs, prompt_logprobs
from .service import Generation, Service
from .tool_calls import ToolCallScanner
from .tools import ToolChoice


async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    service: Service = request.app.state.service
    service.check_open()
    body = await read_body(request, service.config.max_body_bytes, service.config.client_timeout_s)
    asked = parse_chat(parse_object(body), service.tokenizer.vocab_size)
    service.check_model(asked.options.model)
    chat = Chat(service, asked)
    return EventStream(chat.events) if asked.options.stream else Answer(chat.answer)


class Chat:
    """One request of this endpoint."""

    def __init__(self, service: Service, asked: ChatRequest) -> None:
        self._service = service
        self._asked = asked
        self._created_s = int(time.time())
        self._began_s = asyncio.get_running_loop().time()

    async def _start(self, deployment: Deployment) -> Generation:
        template = deployment.chat_template
        if template is None:
            raise BadRequestError(
                "the model has no chat template; use /v1/completions, or start the server with --chat-template",
                param="messages",
                code="no_chat_template",
            )
        text = template.render(
            self._asked.messages,
            add_generation_prompt=self._asked.add_generation_prompt,
            arguments=self._asked.template_arguments,
            tools=self._asked.tools.definitions,
        )
        # Templates write the special tokens themselves.
        prompts = [await deployment.tokenizer.encode_async(text, add_special=False)]
        options = self._asked.options
        sampling = await deployment.sampling(options, prompts)
        return Generation(
            service=self._service,
            deployment=deployment,
            prompts=prompts,
            options=options,
            sampling=sampling,
            began_s=self._began_s,
        )

    async def answer(self) -> dict[str, Any]:
        """The response to a request that is not streamed."""
        async with self._service.deployment() as deployment:
            return await self._answer(await self._start(deployment))

    async def _answer(self, generation: Generation) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in generation.choices]
        entries: list[list[TokenEntry]] = [[] for _ in generation.choices]
        async with generation:
            async for delta in generation.deltas():
                texts[delta.index].append(delta.text)
                entries[delta.index].extend(delta.entries)
        choices = []
        for choice in generation.choices:
            message, finish_reason = self._message("".join(texts[choice.index]), choice.finish_reason)
            logprobs = self._logprobs(generation, entries[choice.index])
            choices.append(
                {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
            )
        answer = {**self._head(generation, "chat.completion"), "choices": choices, "usage": generation.usage()}
        num_top = self._asked.options.prompt_logprobs
        if num_top is not None:
            known = generation.choices[0].prompt_logprobs
            tokenizer = generation.deployment.tokenizer
            answer["prompt_logprobs"] = prompt_logprobs(tokenizer, generation.prompts[0], known, num_top)
        return answer

    def _message(self, text: str, finish_reason: str | None) -> tuple[dict[str, Any], str | None]:
        """The message of a whole answer, and why it ended."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._asked.tools.choice is ToolChoice.NONE:
            return message, finish_reason
        scanner = ToolCallScanner(self._asked.tools)
        content = scanner.add(text)[0] + scanner.finish()
        if scanner.calls:
            message["tool_calls"] = [call.to_json() for call in scanner.calls]
            content = content if content.strip() else ""
        message["content"] = content or None
        return message, scanner.finish_reason(finish_reason)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed response."""
        async with self._service.deployment() as deployment:
            async with aclosing(self._events(await self._start(deployment))) as events:
                async for event in events:
                    yield event

    async def _events(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        head = self._head(generation, "chat.completion.chunk")
        if self._asked.options.include_usage:
            head["usage"] = None
        scanners = None
        if self._asked.tools.choice is not ToolChoice.NONE:
            scanners = [ToolCallScanner(self._asked.tools) for _ in generation.choices]
        is_open = False
        async with generation:
            async for delta in generation.deltas():
                if not is_open:  # not before: what the core refuses is an error response
                    is_open = True
                    for choice in generation.choices:
                        opening = {"role": "assistant", "content": ""}
                        yield {**head, "choices": [_chunk(choice.index, opening, None, None)]}
                if scanners is not None:
                    for chunk in self._tool_chunks(generation, delta, scanners[delta.index]):
                        yield {**head, "choices": [chunk]}
                    continue
                for chunk in self._chunks(generation, delta):
                    yield {**head, "choices": [chunk]}
        if self._asked.options.include_usage:
            yield {**head, "choices": [], "usage": generation.usage()}

    def _chunks(self, generation: Generation, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.text or delta.entries:
            logprobs = self._logprobs(generation, delta.entries)
            chunks.append(_chunk(delta.index, {"content": delta.text}, logprobs, None))
        if delta.finish_reason:
            chunks.append(_chunk(delta.index, {}, None, delta.finish_reason))
        return chunks

    def _tool_chunks(self, generation: Generation, delta: Delta, scanner: ToolCallScanner) -> list[dict[str, Any]]:
        content, calls = scanner.add(delta.text)
        if delta.finish_reason:
            content += scanner.finish()
        news: dict[str, Any] = {
            **({"content": content} if content else {}),
            **({"tool_calls": calls} if calls else {}),
        }
        chunks = []
        if news or delta.entries:
            chunks.append(_chunk(delta.index, news, self._logprobs(generation, delta.entries), None))
        if delta.finish_reason:
            chunks.append(_chunk(delta.index, {}, None, scanner.finish_reason(delta.finish_reason)))
        return chunks

    def _head(self, generation: Generation, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{generation.id}",
            "object": kind,
            "created": self._created_s,
            "model": self._service.config.model_name,
        }

    def _logprobs(self, generation: Generation, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        options = self._asked.options
        if not options.logprobs:
            return None
        return chat_logprobs(generation.deployment.tokenizer, entries, options.num_top_logprobs)


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
