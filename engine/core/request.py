"""Requests, their sampling parameters and their outputs, as the core sees them.

Owns validation: a request that gets past `validate` cannot break a step. Knows no protobuf (see wire.py) and no
tensor.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from preload.engine.errors import RequestError

from .prefix import BlockContent
from .structured import StructuredOutput

if TYPE_CHECKING:
    from .grammar import Grammar

MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 512
MAX_BAD_WORD_TOKENS = 64


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Meanings and defaults: engine_core.proto."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 1
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    num_top_logprobs: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: frozenset[int] = frozenset()
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    logits_processors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> None:
        """Raises RequestError naming the parameter, its value and its bounds."""
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise RequestError(f"{name} is {value}; it must be between {low:g} and {high:g}")
        if self.top_p <= 0 or self.repetition_penalty <= 0:
            raise RequestError("top_p and repetition_penalty must be greater than 0")
        _check_size("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        _check_size("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _check_ids("logit_bias", self.logit_bias, vocab_size)
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise RequestError(f"logit_bias of token {token} is {bias}; it must be finite")
        self._validate_words(vocab_size)

    def _validate_words(self, vocab_size: int) -> None:
        _check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _check_size("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        for word in self.bad_words:
            _check_size("a word of bad_words", len(word), MAX_BAD_WORD_TOKENS)
            _check_ids("bad_words", word, vocab_size)
            if not word:
                raise RequestError("bad_words has a word without tokens")
        if self.prompt_logprobs is not None and self.prompt_logprobs > MAX_TOP_LOGPROBS:
            raise RequestError(f"prompt_logprobs is {self.prompt_logprobs}; at most {MAX_TOP_LOGPROBS} are allowed")


_BOUNDS = (
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 1e6),
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("max_tokens", 1, math.inf),
    ("num_top_logprobs", 0, MAX_TOP_LOGPROBS),
)


def _check_size(name: str, size: int, limit: int) -> None:
    if size > limit:
        raise RequestError(f"{name} has {size} entries; at most {limit} are allowed")


def _check_ids(name: str, ids: object, vocab_size: int) -> None:
    largest = max(ids, default=0)  # type: ignore[call-overload]
    if largest >= vocab_size:
        raise RequestError(f"{name} has the token id {largest}; the vocabulary ends at {vocab_size - 1}")


@dataclass(eq=False, kw_only=True)
class Request:
    """One request and how far it got. The scheduler owns its blocks and its row."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    priority: int = 0
    arrival: int = 0
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    row: int = -1
    cache_salt: str = ""
    """Keys and values are shared only among requests with the same one."""
    block_contents: list[BlockContent] = field(default_factory=list)
    """Of the full blocks from the sequence's beginning, as far as the scheduler had to know them."""
    num_cached_tokens: int | None = None
    """Whose keys and values were there when the request was first admitted; None before that."""
    draft_ids: list[int] = field(default_factory=list)
    """Tokens that are guessed to come next (speculation); a step may compute some of them beside the last token."""
    grammar: Grammar | None = None
    """Where its output is in the form it must have; there before the request is scheduled, if it has one."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's second token and those after it, as far as they are computed and not given out."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether every token of the prompt has to be computed, so that nothing of it may come from the cache."""
        return self.sampling.prompt_logprobs is not None and not self.output_ids

    def take_prompt_logprobs(self) -> list[TokenLogprobs]:
        """What is there of them, for the request's next output."""
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        return taken

    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    def tokens_between(self, start: int, end: int) -> list[int]:
        """The tokens start … end − 1 of the sequence, without making a list of all."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:] + self.output_ids[max(0, start - num_prompt) : end - num_prompt]

    def validate(self, vocab_size: int, max_model_len: int) -> None:
        """Raises RequestError if the request can never run."""
        if not self.prompt_ids:
            raise RequestError("the prompt has no tokens")
        if len(self.prompt_ids) >= max_model_len:
            raise RequestError(
                f"the prompt has {len(self.prompt_ids)} tokens; with one token of output the model's length "
                f"of {max_model_len} allows {max_model_len - 1}"
            )
        _check_ids("the prompt", self.prompt_ids, vocab_size)
        _check_ids("output_ids", self.output_ids, vocab_size)
        self.sampling.validate(vocab_size)

    def finish_reason(self, max_model_len: int) -> FinishReason:
        """Whether the tokens so far end the request. Stop ids before `min_tokens` cannot have been sampled."""
        params, num_output = self.sampling, len(self.output_ids)
        if num_output > params.min_tokens and self.output_ids[-1] in params.stop_token_ids:
            return FinishReason.STOP
        if num_output >= params.max_tokens or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return FinishReason.NONE


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms over the vocabulary, before temperature and truncation, after all that comes before these.

    `rank` of the token, from 1, is known of the prompt's tokens only, whose logits nothing has changed."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    rank: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What one step did for one request."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    error: str = ""
    refused: bool = False
    """With an error: the request is wrong, and would be anywhere; `param` is the parameter, if it is a single one."""
    param: str = ""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_draft_tokens: int = 0
    """Guesses that were verified in this step."""
    num_accepted_tokens: int = 0
    """Of these, how many were right."""
    num_cached_tokens: int = 0
    """With the first token: those of the sequence whose keys and values were there."""
    draining: bool = False
    """With an error: the core takes no more requests; another may take this one."""
