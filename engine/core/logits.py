"""Changes of logits that some requests ask for: bias, then penalties, then the bar on stop ids.

Owns the per-row state of these; rows that ask for nothing are in none of its tables and pay nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .request import Request


class LogitsProcessor:
    """State by request row; `apply` changes the logits of the rows that have some."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._barred: dict[int, tuple[int, Tensor]] = {}
        self._penalties: dict[int, tuple[float, float, float]] = {}
        self._output_counts: Tensor | None = None
        self._in_prompt: Tensor | None = None

    def add(self, row: int, request: Request) -> None:
        """A request takes a row and overwrites all of its last owner's state."""
        for table in (self._bias, self._barred, self._penalties):
            table.pop(row, None)
        params = request.sampling
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias))
            self._bias[row] = ids, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        if params.min_tokens > len(request.output_ids) and params.stop_token_ids:
            until = len(request.prompt_ids) + params.min_tokens
            self._barred[row] = until, torch.tensor(sorted(params.stop_token_ids))
        if params.has_penalties:
            self._penalties[row] = (
                params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
            )  # fmt: skip
            self._count(row, request)

    def apply(self, logits: Tensor, index_of: Mapping[int, int], positions: Mapping[int, int]) -> None:
        """Changes logits: float32[num_rows, vocab_size] in place.

        index_of: request row → logit row; positions: request row → position of the token to be sampled.
        """
        self._apply_bias(logits, index_of)
        self._apply_penalties(logits, index_of)
        for row, (until, ids) in self._barred.items():
            if row in index_of and positions[row] < until:
                logits[index_of[row], ids] = -math.inf

    def changes(self, row: int, position: int) -> bool:
        """Whether `apply` would change the row's logits for this position: only others can be speculated, since what
        it does depends on the tokens before."""
        barred = row in self._barred and position < self._barred[row][0]
        return barred or row in self._bias or row in self._penalties

    def record(self, row: int, token_id: int) -> None:
        """The row's request got a token."""
        if row in self._penalties and self._output_counts is not None:
            self._output_counts[row, token_id] += 1

    def _apply_bias(self, logits: Tensor, index_of: Mapping[int, int]) -> None:
        biased = [(index_of[row], *bias) for row, bias in self._bias.items() if row in index_of]
        if biased:
            rows = torch.cat([torch.full_like(ids, index) for index, ids, _ in biased])
            ids = torch.cat([ids for _, ids, _ in biased])
            logits.index_put_((rows, ids), torch.cat([values for _, _, values in biased]), accumulate=True)

    def _apply_penalties(self, logits: Tensor, index_of: Mapping[int, int]) -> None:
        """Repetition: positive logits of tokens seen are divided, others multiplied (arXiv 1909.05858, section
        4.1, as Hugging Face does it). Presence and frequency: subtracted, once and per occurrence in the output."""
        rows = [row for row in self._penalties if row in index_of]
        if not rows or self._output_counts is None or self._in_prompt is None:
            return
        parameters = torch.tensor([self._penalties[row] for row in rows], dtype=torch.float32)
        repetition, presence, frequency = parameters[:, :, None].unbind(1)
        indices = torch.tensor([index_of[row] for row in rows])
        counts = self._output_counts[rows]
        x = logits[indices]
        seen = self._in_prompt[rows] | (counts > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        logits[indices] = x - presence * (counts > 0) - frequency * counts

    def _count(self, row: int, request: Request) -> None:
        """Counts the tokens a request comes with. Tables are made when the first request needs them."""
        if self._output_counts is None or self._in_prompt is None:
            shape = (self._max_num_seqs, self._vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool)
        output = torch.tensor(request.output_ids, dtype=torch.int64)
        self._output_counts[row] = torch.bincount(output, minlength=self._vocab_size)
        self._in_prompt[row] = False
        self._in_prompt[row, torch.tensor(request.prompt_ids)] = True
