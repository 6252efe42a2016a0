"""One completion without a server: the same core, tokenizer and request path, and no socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from preload.engine.errors import CoreError, RequestError
from preload.engine.timeline import Timeline

from .api import parse_chat, parse_completion
from .chat import Chat
from .completions import Completion
from .config import FrontendConfig
from .errors import ApiError, BadRequestError
from .fields import Fields
from .server import make_core_command, running_service


async def complete(config: FrontendConfig, body: Mapping[str, Any], *, chat: bool) -> AsyncIterator[dict[str, Any]]:
    """Events of one streamed answer, as /v1/chat/completions or /v1/completions would send them.

    Raises RequestError or CoreError, with the refusal of the request or of the core as its message."""
    async with running_service(config, make_core_command, Timeline()) as service:
        vocab_size = service.tokenizer.vocab_size
        fields = Fields({**body, "stream": True})
        try:
            request = (
                Chat(service, parse_chat(fields, vocab_size))
                if chat
                else Completion(service, parse_completion(fields, vocab_size))
            )
            async for event in request.events():
                yield event
        except BadRequestError as error:
            raise RequestError(str(error)) from error
        except ApiError as error:
            raise CoreError(str(error)) from error
