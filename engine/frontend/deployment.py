"""`Deployment`: what is served at one time: weights, flags, tokenizer, the cores for them and their requests.

A rolling update makes a second one beside it, which takes the new requests; a request stays with the deployment it
began with, since another one's tokens mean something else. Only one with the same weights may take it over, and is
its `successor` then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from preload.engine.core.structured import FormError, check

from .api import GenerationOptions
from .bad_words import bad_word_ids
from .chat_template import ChatTemplate
from .config import FrontendConfig
from .constraints import Form
from .core_process import CoreProcess
from .errors import BadRequestError, OverloadedError
from .hold import WeightsHold
from .requests import InFlight
from .sampling import SamplingParams
from .supervisor import Supervisor
from .tokenizer import Tokenizer
from .vocabulary import Vocabulary

_POLL_S = 0.25
_check = lru_cache(maxsize=64)(check)
"""Clients ask for the same few forms again and again; refusals are not kept."""


@dataclass(kw_only=True, eq=False)
class Deployment:
    """Made idle; `start` it. `num_users` are HTTP requests that have begun with it, or were handed over to it, and
    have not ended."""

    config: FrontendConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    in_flight: InFlight
    supervisor: Supervisor
    hold: WeightsHold
    runner: asyncio.Task[None] | None = None
    successor: Deployment | None = None
    num_users: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    vocabulary: Vocabulary = field(init=False)
    _is_over: bool = False

    def __post_init__(self) -> None:
        self.unused.set()
        self.vocabulary = Vocabulary(self.tokenizer)

    def start(self, first: CoreProcess | None = None) -> asyncio.Task[None]:
        """Starts supervision, with a core that has been started already or with another."""
        self.hold.start()
        self.runner = asyncio.create_task(self.supervisor.run(first))
        return self.runner

    async def stop(self) -> None:
        """Ends the cores, then the leases. Requests that are left stay where they are. Idempotent."""
        if self.runner is not None:
            await self.supervisor.stop(self.runner)
        if not self._is_over:
            self._is_over = True
            await self.hold.release()

    @contextmanager
    def used(self) -> Iterator[Deployment]:
        """As long as its body runs, the deployment is not taken away."""
        self._add_users(1)
        try:
            yield self
        finally:
            self.latest()._add_users(-1)

    def _add_users(self, count: int) -> None:
        self.num_users += count
        if self.num_users:
            self.unused.clear()
        else:
            self.unused.set()

    async def can_take_over(self, other: Deployment) -> bool:
        """Whether every request of another one with the same weights fits here: the cores are asked."""
        mine, theirs = await self.supervisor.model_stats(), await other.supervisor.model_stats()
        capacity = mine.num_kv_blocks * mine.block_size
        wanted = min(theirs.max_model_len, theirs.num_kv_blocks * theirs.block_size)
        return mine.max_model_len >= theirs.max_model_len and capacity >= wanted

    def hand_over_to(self, other: Deployment) -> int:
        """Moves the samples in flight, those still to be submitted, and whoever waits for them; returns how many are
        in flight."""
        other._add_users(self.num_users)
        self._add_users(-self.num_users)
        self.successor = other
        return self.in_flight.move_to(other.in_flight)

    def latest(self) -> Deployment:
        """Where a sample of this deployment is to be submitted now."""
        deployment = self
        while deployment.successor is not None:
            deployment = deployment.successor
        return deployment

    def check_core(self) -> None:
        """Raises OverloadedError when cores die before they are ready, again and again."""
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
                self.check_core()
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
        if options.priority and self.config.scheduling_policy != "priority":
            raise BadRequestError(
                "'priority' needs a server started with --scheduling-policy priority",
                param="priority",
                code="unsupported_parameter",
            )
        if options.constraints.form is not None:
            await self._check_form(options.constraints.form)
        return self._sampling(options, wanted or limit - longest)

    async def _check_form(self, form: Form) -> None:
        """Raises BadRequestError naming what is wrong with it. The vocabulary is there afterwards."""
        try:
            await asyncio.to_thread(_check, form.output)
        except FormError as error:
            raise BadRequestError(
                f"'{form.param}' cannot be used: {error.message}", param=form.param, code="invalid_form"
            ) from error
        await self.vocabulary.make()

    def _sampling(self, options: GenerationOptions, max_tokens: int) -> SamplingParams:
        constraints = options.constraints
        # What has come to the end of its form can go on with nothing but the end of the sequence.
        eos_ids = () if options.ignore_eos and constraints.form is None else self.tokenizer.eos_ids
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
            bad_words=bad_word_ids(self.tokenizer, constraints.bad_words),
            allowed_token_ids=constraints.allowed_token_ids,
            prompt_logprobs=options.prompt_logprobs,
            structured_output=constraints.form.output if constraints.form else None,
            logits_processors=constraints.logits_processors,
        )
