"""What those who guess tokens have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from preload.engine.core.graphs import DecodeGraphs
from preload.engine.core.request import Request
from preload.engine.core.scheduler import Schedule, ScheduledRequest


@dataclass(frozen=True)
class Task:
    """A running request after a step. `num_wanted` tokens are to be guessed that follow its last one, at most; 0
    lets a drafter with a state of its own keep up."""

    request: Request
    num_wanted: int


@dataclass(frozen=True)
class Draft:
    """Guesses for one request, in order. An id of −1 is a guess that is always rejected."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: Tensor | None = None
    """float32[len(token_ids), vocab_size]: the distributions they were drawn from, normalized; None if each was the
    only choice there was."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What the step before computed: `hidden`: dtype[num_tokens, hidden_size], the model's states after its last
    norm; `scheduled`: its requests in the order of these; `query_start_loc`: int32[num_reqs + 1], as in a batch."""

    hidden: Tensor
    scheduled: Sequence[ScheduledRequest]
    query_start_loc: Tensor


class Drafter(Protocol):
    """Guesses tokens. Called by one loop."""

    keeps_up: bool
    """Whether it wants a task for every running request, also for those that are not to be speculated."""
    never_rests: bool
    """Whether it wants that after every step, also while nothing is to be speculated."""
    num_lookahead_tokens: int
    """How far beyond a request's last token it writes into KV blocks of its own storage."""
    bytes_per_block: int
    """Of its own storage, for each KV block of the model's."""

    def observe(self, plan: Schedule) -> None:
        """Takes note of rows and blocks that change hands in a step."""

    def propose(self, tasks: Sequence[Task], computed: Computed) -> list[Draft]:
        """One draft per task, at most as long as wanted."""

    def forget(self, request: Request) -> None:
        """The request has ended, or begins anew. One that is not known is no error."""

    def allocate_kv(self, num_blocks: int) -> None:
        """Replaces its storage by one of num_blocks blocks; no request is running."""

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Those of a decoder of its own, on a device; None if it has none, or before `use_graphs`."""

    def use_graphs(self, token_budget: int) -> None:
        """From now on it has some for its present storage, if it has a decoder of its own on a device."""

    def warm_up(self) -> None:
        """Touches what the first proposal would touch."""

    def describe(self) -> str:
        """One line for a human."""
