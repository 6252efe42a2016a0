"""Changes of logits that some requests ask for.

Order: bias, allowed tokens → penalties → bar on stop ids → bad words → grammar → custom processors. Owns the per-row
state of these; rows that ask for nothing are in none of its tables and pay nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .grammar import Grammar, apply_masks
from .processors import CustomProcessors, Processor
from .request import Request


class LogitsProcessor:
    """State by request row; `apply` changes the logits of the rows that have some."""

    def __init__(self, max_num_seqs: int, vocab_size: int, processors: Mapping[str, Processor]) -> None:
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._allowed: dict[int, Tensor] = {}
        self._barred: dict[int, tuple[int, Tensor]] = {}
        self._penalties: dict[int, tuple[float, float, float]] = {}
        self._bad_words: dict[int, Request] = {}
        self._grammars: dict[int, tuple[Grammar, Request]] = {}
        self._tables: tuple[dict[int, Any], ...] = (
            self._bias, self._allowed, self._barred, self._penalties, self._bad_words, self._grammars,
        )  # fmt: skip
        self.custom = CustomProcessors(processors)
        self._output_counts: Tensor | None = None
        self._in_prompt: Tensor | None = None

    def add(self, row: int, request: Request) -> None:
        """A request takes a row and overwrites all of its last owner's state."""
        for table in self._tables:
            table.pop(row, None)
        params = request.sampling
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias))
            self._bias[row] = ids, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        if params.allowed_token_ids:
            self._allowed[row] = torch.tensor(sorted(params.allowed_token_ids))
        if params.min_tokens > len(request.output_ids) and params.stop_token_ids:
            until = len(request.prompt_ids) + params.min_tokens
            self._barred[row] = until, torch.tensor(sorted(params.stop_token_ids))
        if params.has_penalties:
            self._penalties[row] = (
                params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
            )  # fmt: skip
            self._count(row, request)
        if params.bad_words:
            self._bad_words[row] = request
        if request.grammar is not None:
            self._grammars[row] = request.grammar, request
        self.custom.add(row, request)

    def apply(self, logits: Tensor, index_of: Mapping[int, int], positions: Mapping[int, int]) -> dict[int, str]:
        """Changes logits: float32[num_rows, vocab_size] in place.

        index_of: request row → logit row; positions: request row → position of the token to be sampled. Returns, by
        request row, why there are no logits for it, where something has failed.
        """
        failed: dict[int, str] = {}
        self._apply_bias(logits, index_of)
        self._apply_penalties(logits, index_of)
        for row, (until, ids) in self._barred.items():
            if row in index_of and positions[row] < until:
                logits[index_of[row], ids] = -math.inf
        for row, request in self._bad_words.items():
            if row in index_of:
                ends = completing(request.sampling.bad_words, request.output_ids)
                logits[index_of[row], ends] = -math.inf
        self._apply_grammars(logits, index_of, failed)
        self.custom.apply(logits, index_of, failed)
        return failed

    def changes(self, row: int, position: int) -> bool:
        """Whether `apply` would change the row's logits for this position: only others can be speculated, since what
        it does depends on the tokens before."""
        barred = row in self._barred and position < self._barred[row][0]
        asked = any(row in table for table in self._tables if table is not self._barred)
        return barred or asked or self.custom.changes(row)

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
        for row, ids in self._allowed.items():
            if row in index_of:
                kept = logits[index_of[row], ids]
                logits[index_of[row]] = -math.inf
                logits[index_of[row], ids] = kept

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

    def _apply_grammars(self, logits: Tensor, index_of: Mapping[int, int], failed: dict[int, str]) -> None:
        if not self._grammars:
            return
        present = {row: entry for row, entry in self._grammars.items() if row in index_of}
        apply_masks(
            logits,
            [(index_of[row], grammar) for row, (grammar, r) in present.items() if not grammar.follow(r.output_ids)],
        )
        failed |= {row: grammar.error for row, (grammar, _) in present.items() if grammar.error}

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


def completing(words: Sequence[tuple[int, ...]], output_ids: Sequence[int]) -> list[int]:
    """The tokens that would complete one of the words, each a sequence of tokens, at the end of the output."""
    ends = []
    for *begin, last in words:
        start = len(output_ids) - len(begin)
        if start >= 0 and list(output_ids[start:]) == begin:
            ends.append(last)
    return ends
