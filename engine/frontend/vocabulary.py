"""The vocabulary as bytes, which a core needs for structured outputs; made when the first of them is asked for."""

from __future__ import annotations

import asyncio

from preload.protos import engine_core_pb2 as pb

from .errors import BadRequestError
from .tokenizer import Tokenizer


class Vocabulary:
    """The message for the cores of one tokenizer, None until it is made."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.message: pb.Vocabulary | None = None
        self._tokenizer = tokenizer
        self._making: asyncio.Future[pb.Vocabulary] | None = None

    async def make(self) -> None:
        """Makes it once, in a thread: it takes a tenth of a second and more.

        Raises BadRequestError where an answer could not be told to be complete."""
        if not self._tokenizer.eos_ids:
            raise BadRequestError(
                "the tokenizer has no end-of-sequence token, without which no structured output ends",
                code="unsupported_parameter",
            )
        if self._making is None:
            self._making = asyncio.ensure_future(asyncio.to_thread(spelled, self._tokenizer))
        self.message = await asyncio.shield(self._making)


def spelled(tokenizer: Tokenizer) -> pb.Vocabulary:
    """What every id spells, from a vocabulary of any origin."""
    return pb.Vocabulary(
        tokens=[tokenizer.bytes_of(token_id, skip_special=False) for token_id in range(tokenizer.vocab_size)],
        special_ids=sorted(tokenizer.special_ids),
        eos_ids=tokenizer.eos_ids,
    )
