"""Sampler: from logits to one token per row.

Order: bias → penalties → bars → bad words → grammar → custom processors (logits.py) → log-probabilities →
temperature → min-p → top-k → top-p → Gumbel-max. Owns the sampling parameters of every request row; keeps no random
state (noise.py), so a row's token depends on its logits, its parameters, its seed and its position, never on its
neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from preload.engine.kernels.argmax import argmax_rows
from preload.engine.layers.ops import Choose

from .logits import LogitsProcessor
from .logprobs import token_logprobs
from .noise import gumbel_noise, hash_tokens, seed_to_int64
from .processors import Processor
from .request import Request, SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken as 0: dividing by them would leave nothing but the largest logit anyway."""

MAX_CANDIDATES = 1024
"""Truncation looks at this many of the largest logits first, and sorts the row only if they do not decide."""


@dataclass(slots=True)
class SampledToken:
    """One row's result. `error` is set, and the token meaningless, if its logits allow no choice."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""


class Sampler:
    """Sampling parameters by request row, and the choice of tokens."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        processors: Mapping[str, Processor] | None = None,
        choose: Choose | None = None,
    ) -> None:
        """`choose`: what chooses the same tokens as this class does in torch, sooner."""
        self._fast_choose = choose
        self._processor = LogitsProcessor(max_num_seqs, vocab_size, processors or {})
        self._failed: dict[int, str] = {}  # by request row, of what was processed last
        self._token_hashes = hash_tokens(vocab_size)
        self._temperature = torch.zeros(max_num_seqs)
        self._min_p = torch.zeros(max_num_seqs)
        self._top_k = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._top_p = torch.ones(max_num_seqs)
        self._seeds = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._num_logprobs = [-1] * max_num_seqs  # −1: none asked for

    def validate(self, params: SamplingParams) -> None:
        """Raises RequestError if custom processors are named that are not there, or that refuse."""
        self._processor.custom.validate(params.logits_processors)

    def add(self, row: int, request: Request) -> None:
        """A request takes a row and overwrites all of its last owner's state. Its parameters are valid."""
        params = request.sampling
        self._temperature[row] = params.temperature if params.temperature >= GREEDY_BELOW else 0.0
        self._min_p[row] = params.min_p
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._seeds[row] = seed_to_int64(params.seed)
        self._num_logprobs[row] = params.num_top_logprobs if params.logprobs else -1
        self._processor.add(row, request)

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """One token per request, at position `request.num_tokens`.

        logits: float32[num_rows, vocab_size], changed by bias, penalties and bars.
        """
        if not requests:
            return []
        rows, positions = [r.row for r in requests], [r.num_tokens for r in requests]
        self.process(logits, rows, positions, range(len(rows)))
        sampled = self.choose(logits, rows, positions)
        for row, token in zip(rows, sampled, strict=True):
            self.record(row, token)
        return sampled

    def process(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int], logit_rows: Sequence[int]
    ) -> None:
        """Changes that requests ask for, in place: of request row rows[i] to logits[logit_rows[i]], for positions[i].

        Where one fails, `describe` says so."""
        index_of = dict(zip(rows, logit_rows, strict=True))
        self._failed = self._processor.apply(logits, index_of, dict(zip(rows, positions, strict=True)))

    def choose(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> list[SampledToken]:
        """A token from each row of processed logits, which stay as they are; rows may name a request row twice."""
        largest, tokens = self._choose(logits, torch.tensor(rows), torch.tensor(positions))
        return self._described(rows, tokens.tolist(), logits, largest)

    def describe(self, logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[SampledToken]:
        """Tokens chosen from processed logits, with the log-probabilities that their requests asked for."""
        return self._described(rows, tokens, logits, logits.amax(dim=-1))

    def _described(
        self, rows: Sequence[int], tokens: Sequence[int], logits: Tensor, largest: Tensor
    ) -> list[SampledToken]:
        """largest: float32[num_rows], of each row of logits."""
        finite = largest.isfinite().tolist()
        logprobs = self._logprobs(logits, rows, tokens)
        return [
            SampledToken(token, logprobs.get(i), self._failed.get(rows[i], "" if finite[i] else _NOT_FINITE))
            for i, token in enumerate(tokens)
        ]

    def changes_logits(self, request: Request) -> bool:
        """Whether the running request's next token comes from other logits than the model's."""
        return self._processor.changes(request.row, request.num_tokens)

    def needs_host(self, request: Request) -> bool:
        """Whether more is done with its logits than to choose a token, which is done on the host."""
        return self._num_logprobs[request.row] >= 0 or self.changes_logits(request)

    def is_greedy(self, request: Request) -> bool:
        """Whether the running request's tokens are the most likely ones."""
        return not self._temperature[request.row]

    def temperatures(self, rows: Tensor) -> Tensor:
        """float32[num_rows], 0 for greedy ones."""
        return self._temperature[rows]

    def seeds(self, rows: Tensor) -> Tensor:
        """int64[num_rows], as noise.py takes them."""
        return self._seeds[rows]

    def record(self, row: int, sampled: SampledToken) -> None:
        """The row's request got this token."""
        if not sampled.error:
            self._processor.record(row, sampled.token_id)

    def scaled(self, logits: Tensor, rows: Tensor) -> Tensor:
        """What tokens are drawn from: processed logits over temperature, what truncation excludes at −inf.

        rows: int64[num_rows], request rows whose temperature is not 0. Returns float32[num_rows, vocab_size] with a
        maximum of 0 in each row; its softmax is the distribution of the row's token.
        """
        x = (logits - logits.amax(dim=-1, keepdim=True)) / self._temperature[rows, None]
        truncate(x, self._min_p[rows], self._top_k[rows], self._top_p[rows])
        return x

    def choose_ids(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The tokens that `choose` describes: int64[num_rows]. rows, positions: int64[num_rows]."""
        return self._choose(logits, rows, positions)[1]

    def _choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit of each row, float32[num_rows], and the token chosen."""
        if self._fast_choose is not None:
            return self._fast_choose(
                logits, temperature=self._temperature[rows], min_p=self._min_p[rows],
                top_k=self._top_k[rows], top_p=self._top_p[rows], seeds=self._seeds[rows],
                positions=positions, token_hashes=self._token_hashes,
            )  # fmt: skip
        logits = logits.cpu()  # from wherever they are: this is the host's way to choose
        tokens = argmax_rows(logits)
        largest = logits.gather(1, tokens[:, None]).flatten()
        temperature = self._temperature[rows]
        drawn = temperature.nonzero().flatten()
        if len(drawn):
            rows = rows[drawn]
            x = self.scaled(logits[drawn], rows)
            x += gumbel_noise(self._seeds[rows], positions[drawn], self._token_hashes)
            tokens[drawn] = argmax_rows(x)
        return largest, tokens

    def _logprobs(self, logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By logit row, for those that asked. Only the chosen and the largest logits are normalized."""
        asking = [i for i, row in enumerate(rows) if self._num_logprobs[row] >= 0]
        if not asking:
            return {}
        counts = [self._num_logprobs[rows[i]] for i in asking]
        return dict(zip(asking, token_logprobs(logits[asking], [tokens[i] for i in asking], counts), strict=True))


_NOT_FINITE = (
    "the logits have no finite maximum after bias and penalties: the parameters bar every token or overflow, "
    "or the weights are broken"
)


def truncate(x: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Min-p, then top-k, then top-p: sets what they exclude to −inf, in place.

    x: float32[num_rows, vocab_size], scaled by temperature, with a maximum of 0 in each row. min_p: float32,
    0 = off; top_k: int64, 0 = off; top_p: float32, 1 = off; each [num_rows]. Each works on what the one before
    left, renormalized. Logits equal to the last one kept are kept too, so the result does not depend on the
    order of equal ones. Sources: arXiv 2407.01082 (min-p), 1805.04833 (top-k), 1904.09751 (top-p).
    """
    if bool((min_p > 0).any()):
        x.masked_fill_(x < min_p.log()[:, None], -math.inf)
    needing = ((top_k > 0) | (top_p < 1)).nonzero().flatten()
    if len(needing):
        part = x[needing]
        floor = _truncation_floor(part, top_k[needing], top_p[needing])
        x[needing] = part.masked_fill_(part < floor[:, None], -math.inf)


def _truncation_floor(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit kept: float32[num_rows]. Decided among the largest; whole rows only where need be."""
    vocab_size = x.shape[1]
    top_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    width = min(vocab_size, MAX_CANDIDATES)
    floor, decided = _floor_among(x.topk(width, dim=-1).values, x, top_k, top_p)
    rest = (~decided).nonzero().flatten()
    if len(rest):
        ordered = x[rest].sort(dim=-1, descending=True).values
        floor[rest] = _floor_among(ordered, x[rest], top_k[rest], top_p[rest])[0]
    return floor


def _floor_among(largest: Tensor, x: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The floor given the largest logits of each row in order, and whether they were enough to know it."""
    width = largest.shape[1]
    within = top_k <= width
    kth = largest.gather(1, (top_k.clamp(max=width) - 1)[:, None])
    kth = torch.where(within[:, None], kth, -math.inf)
    total = torch.where(x >= kth, x, -math.inf).exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    mass = torch.where(largest >= kth, largest, -math.inf).double().exp() / total
    kept = (mass.cumsum(dim=-1) - mass < top_p[:, None]).sum(dim=-1).clamp(min=1)
    nucleus = largest.gather(1, (kept - 1)[:, None])
    floor = torch.where(top_p[:, None] < 1, torch.maximum(kth, nucleus), kth)
    has_top_p = top_p < 1
    decided = torch.where(has_top_p, (kept < width) & within, within)
    return floor.flatten(), decided
