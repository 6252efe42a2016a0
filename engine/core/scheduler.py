"""Scheduler: which requests compute how many tokens in the next step.

Owns the queues, the blocks and the rows of requests. One token budget per step; prefill chunks and decodes are
mixed. Running requests come first, in order: of arrival (FCFS), or of (priority, arrival). Then those that hold
blocks and wait for a row, then those that have nothing. Admission needs blocks for all the tokens a request has,
less those found in the cache by their content.

If blocks run out, those of requests that hold them without running are taken, the last one's first, then the last
running request is preempted: it computes again from its first token, or from what is left of its prefix. Nobody
without blocks is admitted in a step with preemption, and the first that does not fit stops admission, so no request
is overtaken for ever. Where rows run out, a more urgent request displaces the last running one, which keeps its
blocks and goes on when a row is free (policy PRIORITY only).

Invariants (invariants.py checks them): queues are sorted by order; a request owns a row exactly while it runs, and
blocks only while it runs or holds them; holders are visited before requests without blocks, so that one of these
at the head never strands the blocks of others; the first running request is never preempted, because a sequence
that could outgrow the pool alone is refused.
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass, field

from preload.engine.errors import RequestError

from .kv_cache import BlockPool
from .prefix import content_after, root
from .request import Request


class Policy(enum.StrEnum):
    """In what order requests run. Under FCFS their priorities mean nothing."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: its tokens num_computed_tokens … + num_new_tokens − 1. The last
    num_draft_tokens of them are not its own yet but the first of its drafts."""

    request: Request
    num_new_tokens: int
    num_draft_tokens: int = 0

    @property
    def draft_ids(self) -> list[int]:
        """The drafts that are computed."""
        return self.request.draft_ids[: self.num_draft_tokens]

    @property
    def samples(self) -> bool:
        """Whether this step reaches the end of the sequence, so that its next token is sampled."""
        request = self.request
        return request.num_computed_tokens + self.num_new_tokens - self.num_draft_tokens == request.num_tokens


@dataclass(kw_only=True)
class Schedule:
    """What one step does. `started` own a new row and all of their blocks, some of which may be computed already
    (num_computed_tokens); `grown` got blocks appended; `held` lost their row and kept their blocks."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    grown: list[tuple[Request, list[int]]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)


@dataclass(kw_only=True)
class PrefixCounters:
    """Tokens of requests when they were first admitted: all, and those whose keys and values were there."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Choices that change no result but who waits for whom."""

    policy: Policy = Policy.FCFS
    max_num_active_seqs: int = 0
    """How many of the max_num_seqs rows are used; 0 = all."""
    long_prefill_threshold: int = 0
    """Tokens of one prompt in a step while other requests are there; 0 = as many as fit."""
    prefix_caching: bool = True


class Scheduler:
    """Queues, blocks and rows. Not thread-safe: the step loop owns it."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        options: SchedulingOptions | None = None,
    ) -> None:
        if token_budget < max_num_seqs:
            raise ValueError(f"token_budget {token_budget} is less than max_num_seqs {max_num_seqs}")
        options = options or SchedulingOptions()
        self.pool = pool
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.max_num_active_seqs = min(options.max_num_active_seqs or max_num_seqs, max_num_seqs)
        self.policy = options.policy
        self.prefix_caching = options.prefix_caching
        self.running: list[Request] = []
        self.kv_holding_waiting: list[Request] = []
        self.waiting: list[Request] = []
        self.deferred_waiting: list[Request] = []
        """Those the last step had a row and tokens for, and no blocks."""
        self.num_lookahead_tokens = 0
        """How far beyond a request's drafts its blocks should reach; whoever drafts sets it."""
        self.num_preemptions = 0
        self.prefix_counters = PrefixCounters()
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._long_prefill_threshold = options.long_prefill_threshold
        self._share_limit = token_budget
        self._num_arrivals = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self.waiting or self.kv_holding_waiting)

    def order(self, request: Request) -> tuple[int, int]:
        """Requests run in this order, and are preempted in its reverse."""
        return (request.priority if self.policy is Policy.PRIORITY else 0), request.arrival

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
        bisect.insort(self.waiting, request, key=self.order)

    def schedule(self) -> Schedule:
        """Decides the next step. Empty if there is nothing to compute."""
        plan = Schedule()
        self.deferred_waiting = []
        num_requests = len(self.running) + len(self.kv_holding_waiting) + len(self.waiting)
        limited = self._long_prefill_threshold and num_requests > 1
        self._share_limit = self._long_prefill_threshold if limited else self.token_budget
        self._displace(plan)
        budget = self._schedule_running(plan, self.token_budget)
        if not plan.preempted:
            budget = self._schedule_holding(plan, budget)
        if not plan.preempted:
            self._schedule_waiting(plan, budget)
        return plan

    def advance(self, request: Request, num_tokens: int) -> None:
        """`num_tokens` more of a request are computed: what they filled can be shared from now on."""
        first = request.num_computed_tokens // self.pool.block_size
        request.num_computed_tokens += num_tokens
        end = request.num_computed_tokens // self.pool.block_size
        if self.prefix_caching and end > first:
            self._know_contents(request, end)
            for index in range(first, end):
                self.pool.publish(request.block_ids[index], request.block_contents[index])

    def hold(self, request: Request) -> None:
        """A running request gives up its row and keeps its blocks, and with them what it has computed."""
        self._leave_row(request)
        bisect.insort(self.kv_holding_waiting, request, key=self.order)

    def finish(self, request: Request) -> None:
        """Takes a request out of its queue, and its blocks and row back. It must be in one."""
        if request.row < 0 and not request.block_ids:
            self.waiting.remove(request)
        else:
            self._take_back(request)

    @property
    def _has_room(self) -> bool:
        """Whether one more may run."""
        return len(self.running) < self.max_num_active_seqs

    def _displace(self, plan: Schedule) -> None:
        """Where a row is all it lacks, a request that is more urgent than the last running one takes its place."""
        if self.policy is not Policy.PRIORITY or self._has_room or not self.waiting:
            return
        newcomer, victim = self.waiting[0], self.running[-1]
        if newcomer.priority < victim.priority and self._missing_blocks(newcomer) <= self.pool.num_free:
            self.hold(victim)
            plan.held.append(victim)

    def _schedule_running(self, plan: Schedule, budget: int) -> int:
        """Gives running requests their tokens, each at least one; returns what is left of the budget."""
        position = 0
        while position < len(self.running):
            request = self.running[position]
            reserved = len(self.running) - position - 1  # a long prefill must not stall those behind it
            count = self._share(request, budget - reserved)
            if not self._grow(plan, request, request.num_computed_tokens + count):
                break  # it was the last one and preempted itself
            num_drafts = self._admit_drafts(plan, request, count, budget - reserved)
            plan.scheduled.append(ScheduledRequest(request, count + num_drafts, num_drafts))
            budget -= count + num_drafts
            position += 1
        return budget

    def _admit_drafts(self, plan: Schedule, request: Request, count: int, budget: int) -> int:
        """How many of the request's drafts this step computes: those that budget and blocks are left for. A guess
        preempts nobody, and leaves a free block to every running request."""
        end = request.num_computed_tokens + count
        if end < request.num_tokens:
            return 0
        num_drafts = min(len(request.draft_ids), budget - count)
        wanted = min(end + num_drafts + self.num_lookahead_tokens, self.max_model_len)
        missing = self.pool.blocks_for(wanted) - len(request.block_ids)
        if missing > 0 and self.pool.num_free - missing >= len(self.running):
            blocks = self.pool.allocate(missing)
            if blocks:
                request.block_ids.extend(blocks)
                plan.grown.append((request, blocks))
        return min(num_drafts, len(request.block_ids) * self.pool.block_size - end)

    def _share(self, request: Request, budget: int) -> int:
        return min(request.num_tokens - request.num_computed_tokens, self._share_limit, budget)

    def _grow(self, plan: Schedule, request: Request, num_tokens: int) -> bool:
        """Makes blocks for num_tokens, preempting from the end; False if the request itself was preempted."""
        missing = self.pool.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            victim = (self.kv_holding_waiting or self.running)[-1]
            self._preempt(plan, victim)
            if victim is request:
                return False
        request.block_ids.extend(blocks)
        plan.grown.append((request, blocks))
        return True

    def _preempt(self, plan: Schedule, request: Request) -> None:
        self._take_back(request)
        request.num_computed_tokens = 0
        bisect.insort_left(self.waiting, request, key=self.order)
        plan.preempted.append(request)
        self.num_preemptions += 1

    def _schedule_holding(self, plan: Schedule, budget: int) -> int:
        """Lets holders go on, each that can; returns what is left of the budget."""
        for request in list(self.kv_holding_waiting):
            if budget <= 0 or not self._has_room:
                break
            if request in plan.held or request in plan.preempted:
                continue
            missing = self.pool.blocks_for(request.num_tokens) - len(request.block_ids)
            while (blocks := self.pool.allocate(missing)) is None and not (self.running or plan.held):
                self._preempt(plan, self.kv_holding_waiting[-1])  # or holders would wait for each other's blocks
            if blocks is None:
                self.deferred_waiting.append(request)
                continue
            self.kv_holding_waiting.remove(request)
            request.block_ids.extend(blocks)
            budget -= self._start(plan, request, budget)
        return budget

    def _schedule_waiting(self, plan: Schedule, budget: int) -> None:
        while self.waiting and budget > 0 and self._has_room:
            request = self.waiting[0]
            cached = self._cached_blocks(request)
            blocks = self.pool.allocate(self.pool.blocks_for(request.num_tokens) - len(cached), cached)
            if blocks is None:
                self.deferred_waiting.append(request)
                return
            self.waiting.pop(0)
            request.block_ids = cached + blocks
            request.num_computed_tokens = len(cached) * self.pool.block_size
            self._count_hits(request)
            budget -= self._start(plan, request, budget)

    def _start(self, plan: Schedule, request: Request, budget: int) -> int:
        """Gives a request that has its blocks a row and tokens; returns how many."""
        request.row = self.free_rows.pop()
        bisect.insort(self.running, request, key=self.order)
        plan.started.append(request)
        count = self._share(request, budget)
        plan.scheduled.append(ScheduledRequest(request, count))
        return count

    def _cached_blocks(self, request: Request) -> list[int]:
        """Computed blocks it begins with. At least one token is left to compute: its logits are needed."""
        if not self.prefix_caching or request.needs_prompt_logits:
            return []
        count = (request.num_tokens - 1) // self.pool.block_size
        self._know_contents(request, count)
        return self.pool.match(request.block_contents[:count])

    def _missing_blocks(self, request: Request) -> int:
        """Free blocks that a waiting request needs; cached ones that are free count, since they are taken too."""
        cached = self._cached_blocks(request)
        return self.pool.blocks_for(request.num_tokens) - sum(self.pool.is_referenced(block) for block in cached)

    def _know_contents(self, request: Request, num_blocks: int) -> None:
        """Extends the request's chain of contents to its first num_blocks blocks, whose tokens are all there."""
        contents, size = request.block_contents, self.pool.block_size
        for index in range(len(contents), num_blocks):
            parent = contents[-1].hash if contents else root(request.cache_salt)
            contents.append(content_after(parent, request.tokens_between(index * size, (index + 1) * size)))

    def _count_hits(self, request: Request) -> None:
        """A preempted request that comes back finds its own blocks: that is no hit."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_counters.num_queried_tokens += request.num_tokens
            self.prefix_counters.num_hit_tokens += request.num_computed_tokens

    def _take_back(self, request: Request) -> None:
        """Blocks, and a row if it has one, of a request that runs or holds."""
        if request.row >= 0:
            self._leave_row(request)
        else:
            self.kv_holding_waiting.remove(request)
        self.pool.release(request.block_ids)
        request.block_ids = []

    def _leave_row(self, request: Request) -> None:
        self.running.remove(request)
        self.free_rows.append(request.row)
        request.row = -1
        request.draft_ids = []
