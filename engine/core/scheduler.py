"""Scheduler: which requests compute how many tokens in the next step.

Owns the queues, the blocks and the rows of requests. One token budget per step; prefill chunks and decodes are
mixed. Running requests come first, in the order of (priority, arrival). If blocks run out, the last of them is
preempted: its blocks are freed, it computes from its first token again, and it waits at the head of its
priority. Waiting requests are admitted only in a step without preemption, and only with blocks for all the
tokens they have; the first that does not fit stops admission, so no request is overtaken for ever.

Invariants: `running` is sorted by order; a request owns a row exactly while it runs, and blocks only then; the
first running request is never preempted, because a sequence that could outgrow the pool alone is refused.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from preload.engine.errors import RequestError

from .kv_cache import BlockPool
from .request import Request


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step: its tokens num_computed_tokens … + num_new_tokens − 1."""

    request: Request
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this step reaches the end of the sequence, so that its next token is sampled."""
        request = self.request
        return request.num_computed_tokens + self.num_new_tokens == request.num_tokens


@dataclass(kw_only=True)
class Schedule:
    """What one step does. `started` own a new row and all of their blocks; `grown` got blocks appended."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    grown: list[tuple[Request, list[int]]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Queues, blocks and rows. Not thread-safe: the step loop owns it."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, token_budget: int, max_model_len: int) -> None:
        if token_budget < max_num_seqs:
            raise ValueError(f"token_budget {token_budget} is less than max_num_seqs {max_num_seqs}")
        self.pool = pool
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrivals = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Puts a request into the waiting queue. Raises RequestError if its sequence can never fit the cache."""
        longest = min(len(request.prompt_ids) + request.sampling.max_tokens, self.max_model_len)
        if self.pool.blocks_for(longest) > self.pool.num_usable:
            raise RequestError(
                f"the sequence may grow to {longest} tokens, {self.pool.blocks_for(longest)} KV blocks of "
                f"{self.pool.block_size}; the cache has {self.pool.num_usable}"
            )
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        bisect.insort(self.waiting, request, key=_order)

    def schedule(self) -> Schedule:
        """Decides the next step. Empty if there is nothing to compute."""
        plan = Schedule()
        budget = self._schedule_running(plan, self.token_budget)
        if not plan.preempted:
            self._schedule_waiting(plan, budget)
        return plan

    def finish(self, request: Request) -> None:
        """Takes a request out of its queue, and its blocks and row back. It must be running or waiting."""
        if request.row >= 0:
            self._stop_running(request)
        else:
            self.waiting.remove(request)

    def _schedule_running(self, plan: Schedule, budget: int) -> int:
        """Gives running requests their tokens, each at least one; returns what is left of the budget."""
        position = 0
        while position < len(self.running):
            request = self.running[position]
            reserved = len(self.running) - position - 1  # a long prefill must not stall those behind it
            count = min(request.num_tokens - request.num_computed_tokens, budget - reserved)
            if not self._grow(plan, request, request.num_computed_tokens + count):
                break  # it was the last one and preempted itself
            plan.scheduled.append(ScheduledRequest(request, count))
            budget -= count
            position += 1
        return budget

    def _grow(self, plan: Schedule, request: Request, num_tokens: int) -> bool:
        """Makes blocks for num_tokens, preempting from the end; False if the request itself was preempted."""
        missing = self.pool.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            victim = self.running[-1]
            self._preempt(plan, victim)
            if victim is request:
                return False
        request.block_ids.extend(blocks)
        plan.grown.append((request, blocks))
        return True

    def _preempt(self, plan: Schedule, request: Request) -> None:
        self._stop_running(request)
        request.num_computed_tokens = 0
        bisect.insort_left(self.waiting, request, key=_order)
        plan.preempted.append(request)
        self.num_preemptions += 1

    def _schedule_waiting(self, plan: Schedule, budget: int) -> None:
        while self.waiting and budget > 0 and self._free_rows:
            request = self.waiting[0]
            blocks = self.pool.allocate(self.pool.blocks_for(request.num_tokens))
            if blocks is None:
                return
            self.waiting.pop(0)
            request.block_ids = blocks
            request.row = self._free_rows.pop()
            bisect.insort(self.running, request, key=_order)
            plan.started.append(request)
            count = min(request.num_tokens, budget)
            plan.scheduled.append(ScheduledRequest(request, count))
            budget -= count

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.block_ids)
        self._free_rows.append(request.row)
        request.block_ids = []
        request.row = -1


def _order(request: Request) -> tuple[int, int]:
    return request.order
