"""The inner loop of drafters that compute: one token after the other, each fed back, for many requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from preload.engine.core.request import Request

from .drafter import Draft

Draw = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Verifier.draw_drafts."""

Advance = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(active: int64[n], token_ids: int64[n], positions: int64[n]) → float32[n, vocab_size]: logits after one token more
of each active request, which is an index among those that guess. Positions are those of the tokens."""


@dataclass(frozen=True)
class Wish:
    """A request that gets drafts, at least one."""

    request: Request
    count: int


def guess(wishes: Sequence[Wish], logits: Tensor, draw: Draw, advance: Advance) -> list[Draft]:
    """A draft for each wish. logits: float32[len(wishes), vocab_size], of the first token of each."""
    rows = torch.tensor([wish.request.row for wish in wishes])
    starts = torch.tensor([wish.request.num_tokens for wish in wishes])
    counts = torch.tensor([wish.count for wish in wishes])
    active = torch.arange(len(wishes))
    ids: list[list[int]] = [[] for _ in wishes]
    log_probs: list[list[Tensor]] = [[] for _ in wishes]
    step = 0
    while True:
        tokens, q = draw(logits, rows[active], starts[active] + step, starts[active])
        for i, (index, token) in enumerate(zip(active.tolist(), tokens.tolist(), strict=True)):
            ids[index].append(token)
            if q is not None:
                log_probs[index].append(q[i])
        step += 1
        going_on = counts[active] > step
        if not bool(going_on.any()):
            break
        active, tokens = active[going_on], tokens[going_on]
        logits = advance(active, tokens.clamp(min=0), starts[active] + step - 1)
    return [Draft(i, torch.stack(q) if q else None) for i, q in zip(ids, log_probs, strict=True)]
