"""What the core's step calls of speculation: verify the drafts of this step, propose those of the next.

Owns the drafts between two steps, the counters of what was kept by position, and the choice of how many to ask for.
A request whose logits are changed by what came before (bias, penalties, barred stop ids, a grammar, custom
processors) gets no drafts, and is computed as without speculation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from preload.engine.core.memory import is_out_of_memory
from preload.engine.core.request import Request
from preload.engine.core.runner import StepInputs
from preload.engine.core.sampler import SampledToken, Sampler
from preload.engine.core.scheduler import Schedule

from .adaptive import DraftLength
from .drafter import Computed, Draft, Drafter, Task
from .verifier import Verifier

log = logging.getLogger(__name__)


@dataclass
class Acceptance:
    """By position in a draft, from the first: how many drafts reached so far, and how many were kept."""

    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)

    def count(self, num_drafts: int, num_kept: int) -> None:
        missing = num_drafts - len(self.num_drafted)
        self.num_drafted += [0] * missing
        self.num_accepted += [0] * missing
        for i in range(num_drafts):
            self.num_drafted[i] += 1
            self.num_accepted[i] += i < num_kept


class Speculator:
    """Drafter and verifier around the core's steps. `adaptive`: drafts as many as pay off, else always all."""

    def __init__(
        self,
        drafter: Drafter,
        verifier: Verifier,
        sampler: Sampler,
        *,
        num_draft_tokens: int,
        max_model_len: int,
        adaptive: bool = True,
    ) -> None:
        self.drafter = drafter
        self.acceptance = Acceptance()
        self.lengths = DraftLength(num_draft_tokens)
        self._verifier = verifier
        self._sampler = sampler
        self._num_draft_tokens = num_draft_tokens
        self._max_model_len = max_model_len
        self._adaptive = adaptive
        self._drafts: dict[str, Draft] = {}
        self._num_tokens = 0  # of the step that was verified last

    def describe(self) -> str:
        return f"{self.drafter.describe()}, at most {self._num_draft_tokens} at a time"

    def observe(self, plan: Schedule) -> None:
        """Takes note of rows and blocks that change hands. Comes before anything else in a step."""
        for request in (*plan.preempted, *plan.held):
            request.draft_ids = []
        self.drafter.observe(plan)

    def verify(self, logits: Tensor, inputs: StepInputs) -> list[list[SampledToken]]:
        """The tokens of each request that sampled in this step. logits: float32[num_logit_rows, vocab_size]."""
        tokens = self._verifier.verify(logits, inputs, self._drafts)
        for num_drafts, kept in zip(inputs.num_drafts, tokens, strict=True):
            self.acceptance.count(num_drafts, len(kept) - 1)
        self._num_tokens = sum(len(kept) for kept in tokens)
        return tokens

    def propose(self, plan: Schedule, inputs: StepInputs, hidden: Tensor, started_s: float) -> None:
        """Drafts for the next step, after the tokens of this one were appended and finished requests left.

        hidden: the model's states of this step's tokens; started_s: time.perf_counter() when this step began."""
        self._drafts.clear()
        for item in plan.scheduled:
            item.request.draft_ids = []
        running = [item.request for item in plan.scheduled if item.request.row >= 0]
        length = self.lengths.choose(len(running)) if self._adaptive else self._num_draft_tokens
        tasks = [Task(request, min(length, self._num_wanted(request))) for request in running]
        if not self.drafter.keeps_up:
            tasks = [task for task in tasks if task.num_wanted > 0]
        if tasks and (length or self.drafter.never_rests):
            for task, draft in zip(tasks, self._propose(tasks, _computed(plan, inputs, hidden)), strict=True):
                if draft.token_ids:
                    task.request.draft_ids = draft.token_ids
                    self._drafts[task.request.request_id] = draft
        self._measure(plan, inputs, started_s)

    def _propose(self, tasks: Sequence[Task], computed: Computed) -> Sequence[Draft]:
        """What the drafter guesses. Where memory does not suffice: nothing, and it is fed anew the next time."""
        try:
            return self.drafter.propose(tasks, computed)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("no drafts after this step, there was not enough memory for them: %s", error)
            for task in tasks:
                self.drafter.forget(task.request)
            return [Draft()] * len(tasks)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._drafts.pop(request.request_id, None)
        self.drafter.forget(request)

    def _num_wanted(self, request: Request) -> int:
        """As many as can become output beside the token that every step gives anyway."""
        if request.num_computed_tokens < request.num_tokens - 1 or self._sampler.changes_logits(request):
            return 0
        left = request.sampling.max_tokens - len(request.output_ids)
        return max(0, min(left, self._max_model_len - request.num_tokens) - 1)

    def _measure(self, plan: Schedule, inputs: StepInputs, started_s: float) -> None:
        if inputs.sampling and all(s.num_new_tokens - s.num_draft_tokens == 1 for s in plan.scheduled):
            seconds = time.perf_counter() - started_s
            self.lengths.measure(len(inputs.sampling), max(inputs.num_drafts), self._num_tokens, seconds)


def _computed(plan: Schedule, inputs: StepInputs, hidden: Tensor) -> Computed:
    in_order = sorted(plan.scheduled, key=lambda s: s.num_new_tokens > 1)
    return Computed(hidden=hidden, scheduled=in_order, query_start_loc=inputs.attention.query_start_loc)
