"""A core without a model: random requests through the real scheduler, block by block, until all of them have ended.

What it watches:
- Every step with requests computes something: no deadlock.
- Every invariant between steps (invariants.py): no leak, no block of two owners.
- Keys and values stand for the tokens before them: each slot of the simulated cache holds a hash of the sequence it
  was computed for, and a request must find that of its own wherever it did not compute.
- No starvation: a request ends within a number of steps that follows from the work of those before it.

The bound. Under FCFS the oldest request of all, if it runs, is never preempted and computes a token in each step; if
it waits nobody younger has been admitted past it, so it runs at once. Hence no request takes more steps than the
tokens that it and those before it can have. With priorities a more urgent request may come at any time: then the
bound holds from one such arrival (or end) to the next, for all that were there in the meantime.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from preload.engine.core.invariants import check_scheduler
from preload.engine.core.kv_cache import BlockPool
from preload.engine.core.request import Request, SamplingParams
from preload.engine.core.scheduler import Policy, Schedule, ScheduledRequest, Scheduler, SchedulingOptions

BLOCK_SIZE = 4
NUM_BLOCKS = 33
MAX_NUM_SEQS = 8
MAX_ALIVE = 24
FAMILIES = [[f * 100 + i for i in range(48)] for f in range(6)]
"""Beginnings that requests share."""


@dataclass
class Life:
    """A request and what it met. `hashes[p]` stands for its tokens up to position p."""

    request: Request
    arrived_at: int
    work_before: int
    """Tokens that those before it can have, and itself."""
    num_more_urgent: int = 0
    work_met: int = 0
    hashes: list[int] = field(default_factory=list)

    @property
    def work(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


@dataclass
class Report:
    num_finished: int = 0
    num_cancelled: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_held: int = 0
    num_hit_tokens: int = 0
    worst_share_of_bound: float = 0.0


class Simulation:
    """`run` to the end; raises AssertionError as soon as something is wrong."""

    def __init__(self, num_arrivals: int, policy: Policy, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_to_come = num_arrivals
        self.report = Report()
        self.scheduler = Scheduler(
            BlockPool(NUM_BLOCKS, BLOCK_SIZE),
            max_num_seqs=MAX_NUM_SEQS,
            token_budget=20,
            max_model_len=64,
            options=SchedulingOptions(policy=policy, long_prefill_threshold=12),
        )
        self.scheduler.num_lookahead_tokens = 1
        self.alive: dict[str, Life] = {}
        self.kv: list[list[int]] = [[0] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]

    def run(self) -> Report:
        while self.num_to_come or self.alive:
            self._arrive()
            if self.alive and self.rng.random() < 0.02:
                self._end(self.rng.choice(list(self.alive.values())))
                self.report.num_cancelled += 1
            self._step()
        assert not self.scheduler.has_requests
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_usable
        self.report.num_preemptions = self.scheduler.num_preemptions
        self.report.num_hit_tokens = self.scheduler.prefix_counters.num_hit_tokens
        return self.report

    def _arrive(self) -> None:
        rng = self.rng
        while self.num_to_come and len(self.alive) < MAX_ALIVE and rng.random() < 0.75:
            self.num_to_come -= 1
            beginning = rng.choice(FAMILIES)[: rng.randrange(45)] if rng.random() < 0.6 else []
            prompt = beginning + [rng.randrange(600, 1000) for _ in range(rng.randrange(1, 8))]
            request = Request(
                request_id=str(self.num_to_come),
                prompt_ids=prompt,
                sampling=SamplingParams(max_tokens=rng.randrange(1, 13)),
                priority=rng.randrange(-1, 2),
                cache_salt=rng.choice(["", "", "", "salt"]),
            )
            self.scheduler.add(request)
            self._note_arrival(request)

    def _note_arrival(self, request: Request) -> None:
        life = Life(request, self.report.num_steps, 0)
        for other in self.alive.values():
            other.work_met += life.work
            other.num_more_urgent += self.scheduler.order(request) < self.scheduler.order(other.request)
        life.work_before = life.work + sum(other.work for other in self.alive.values())
        life.num_more_urgent = sum(
            self.scheduler.order(other.request) < self.scheduler.order(request) for other in self.alive.values()
        )
        self.alive[request.request_id] = life
        self._know_hashes(life)

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        assert bool(plan.scheduled) == self.scheduler.has_requests, "requests, and nothing to compute"
        assert sum(item.num_new_tokens for item in plan.scheduled) <= self.scheduler.token_budget
        assert {id(item.request) for item in plan.scheduled} == {id(r) for r in self.scheduler.running}
        self.report.num_steps += 1
        self.report.num_held += len(plan.held)
        for request in plan.started:
            self._check_found(self.alive[request.request_id])
        for item in plan.scheduled:
            self._compute(item)
        self._commit(plan)
        check_scheduler(self.scheduler)

    def _compute(self, item: ScheduledRequest) -> None:
        """Writes the keys and values of the item's tokens; drafts are written as what they are, wrong."""
        request, hashes = item.request, self.alive[item.request.request_id].hashes
        first = request.num_computed_tokens
        for position in range(first, first + item.num_new_tokens):
            block = request.block_ids[position // BLOCK_SIZE]
            self.kv[block][position % BLOCK_SIZE] = hashes[position] if position < len(hashes) else -1

    def _commit(self, plan: Schedule) -> None:
        for item in plan.scheduled:
            request, life = item.request, self.alive[item.request.request_id]
            if not item.samples:
                self.scheduler.advance(request, item.num_new_tokens)
                continue
            num_kept = self.rng.randrange(item.num_draft_tokens + 1)
            limit = request.sampling.max_tokens - len(request.output_ids)
            new = [*item.draft_ids[:num_kept], self.rng.randrange(1000)][:limit]
            request.output_ids += new
            self._know_hashes(life)
            first = request.num_computed_tokens
            num_computed = item.num_new_tokens - item.num_draft_tokens + len(new) - 1
            for position in range(first, first + num_computed):  # a kept draft was right, so its keys are
                self.kv[request.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE] = life.hashes[position]
            self.scheduler.advance(request, num_computed)
            request.draft_ids = [self.rng.randrange(1000) for _ in range(self.rng.randrange(3))]
            if len(request.output_ids) == request.sampling.max_tokens:
                self._check_found(life)
                self._check_bound(life)
                self._end(life)
                self.report.num_finished += 1

    def _know_hashes(self, life: Life) -> None:
        request, hashes = life.request, life.hashes
        for token_id in request.tokens_between(len(hashes), request.num_tokens):
            hashes.append(hash((hashes[-1] if hashes else request.cache_salt, token_id)))

    def _check_found(self, life: Life) -> None:
        request = life.request
        for position in range(request.num_computed_tokens):
            found = self.kv[request.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            assert found == life.hashes[position], f"{request.request_id} has another's keys at {position}"

    def _check_bound(self, life: Life) -> None:
        bound = life.work_before
        if self.scheduler.policy is Policy.PRIORITY:
            bound = (2 * life.num_more_urgent + 1) * (life.work_before + life.work_met)
        took = self.report.num_steps - life.arrived_at
        assert took <= bound, f"{life.request.request_id} took {took} steps, and may take {bound}"
        self.report.worst_share_of_bound = max(self.report.worst_share_of_bound, took / bound)

    def _end(self, life: Life) -> None:
        self.scheduler.finish(life.request)
        del self.alive[life.request.request_id]


def simulate(num_arrivals: int, policy: Policy, seed: int) -> Report:
    """Raises AssertionError as soon as something is wrong."""
    return Simulation(num_arrivals, policy, seed).run()
