"""`Choice`: turns the tokens of one sample into the text a client sees.

Owns detokenization, stop strings and the reason a choice ended. Log-probabilities of a token are released with the
text the token belongs to, so that a token whose text is held back, or cut off by a stop string, is not shown early
or at all. The stop token itself has no text and no entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from preload.protos import engine_core_pb2 as pb

from .detokenizer import Detokenizer
from .requests import SampleEvent
from .stop_strings import StopScanner
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenEntry:
    """A token with its log-probabilities. `start` and `end` count characters of the choice's text.

    The first token of a prompt has no log-probabilities: nothing comes before it."""

    token_id: int
    logprobs: pb.TokenLogprobs | None
    start: int
    end: int


@dataclass(frozen=True)
class Delta:
    """What is new in one choice. `finish_reason` comes with the last one."""

    index: int
    text: str
    entries: Sequence[TokenEntry] = ()
    finish_reason: str | None = None


class Choice:
    """One sample on its way to the client."""

    def __init__(self, index: int, tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.prompt_logprobs: list[pb.TokenLogprobs] = []
        """Of the prompt's second token and those after it, when asked for; there with the first delta."""
        self._min_tokens = min_tokens
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stop)
        self._pending: deque[TokenEntry] = deque()
        self._num_decoded = 0
        self._num_shown = 0

    def add(self, event: SampleEvent) -> Delta:
        """The news of `event` as text. When it ends with a stop string, `finish_reason` is set though the core's
        is not: the caller then aborts the sample."""
        self.prompt_logprobs.extend(event.prompt_logprobs)
        pieces = []
        last = len(event.token_ids) - 1
        for i, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            if i == last and event.finish_reason == "stop":
                break
            logprobs = event.logprobs[i] if event.logprobs else None
            pieces.append(self._token(token_id, logprobs))
            if self._scanner.stopped:
                break
        if self._scanner.stopped:
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            pieces.append(self._rest())
        text = "".join(pieces)
        self._num_shown += len(text)
        return Delta(self.index, text, self._released(), self.finish_reason)

    def _token(self, token_id: int, logprobs: pb.TokenLogprobs | None) -> str:
        text = self._detokenizer.add(token_id)
        start = self._num_decoded
        self._num_decoded += len(text)
        if logprobs is not None:
            self._pending.append(TokenEntry(token_id, logprobs, start, self._num_decoded))
        return self._scanner.add(text, armed=self.num_tokens > self._min_tokens)

    def _rest(self) -> str:
        shown = self._scanner.add(self._detokenizer.finish(), armed=self.num_tokens > self._min_tokens)
        return shown + self._scanner.finish()

    def _released(self) -> list[TokenEntry]:
        """The entries whose text has been shown; at the end also those of a token cut in two."""
        released = []
        ended, cut = self.finish_reason is not None, self._scanner.stopped
        while self._pending:
            entry = self._pending[0]
            whole = entry.end <= self._num_shown
            if not (entry.start < self._num_shown or not cut if ended else whole):
                break
            released.append(self._pending.popleft())
        return released
