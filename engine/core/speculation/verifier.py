"""Verification of a step's drafts: from logits to the tokens that each request gets.

Owns which randomness is used for what. With `coupled` verification (the default) a position's token is drawn as it
is without drafts, by noise that is a function of (seed, position, token), and a draft is kept if it is that token:
the answer is the same with any drafter, or none, and whenever another core takes the request over. `sampled` and
`block` are the rules of the literature. They keep more of what a draft model proposes, but what they draw depends
also on where the drafts of each step began: an answer is a function of the seed and of the course of the steps, and
another core goes on with other tokens of the same distribution. Greedy requests are verified alike by all three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from preload.engine.core.noise import derive_seeds, gumbel_noise, hash_tokens, uniform
from preload.engine.core.request import Request
from preload.engine.core.runner import StepInputs
from preload.engine.core.sampler import SampledToken, Sampler

from .acceptance import count_block, count_sampled, residual_log_weights
from .drafter import Draft
from .options import VERIFICATIONS

_FOR_ACCEPTANCE, _FOR_REPLACEMENT, _FOR_DRAFTS = range(3)
"""Purposes of derived randomness."""


@dataclass(frozen=True)
class _Rows:
    """The logit rows of one request: first … first + len(draft_ids)."""

    request: Request
    first: int
    draft_ids: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.draft_ids) + 1


class Verifier:
    """Chooses tokens for steps with drafts."""

    def __init__(self, sampler: Sampler, vocab_size: int, verification: str = "coupled") -> None:
        if verification not in VERIFICATIONS:
            raise ValueError(f"verification is one of {', '.join(VERIFICATIONS)}, not {verification!r}")
        self._sampler = sampler
        self._verification = verification
        self._token_hashes = hash_tokens(vocab_size)
        self._one_hash = hash_tokens(1)

    def verify(self, logits: Tensor, inputs: StepInputs, drafts: Mapping[str, Draft]) -> list[list[SampledToken]]:
        """The tokens of each request of `inputs.sampling`: the drafts that are kept, and one more.

        logits: float32[num_logit_rows, vocab_size], changed as by Sampler.sample. A token whose logits allow no
        choice comes alone, with its error."""
        if not any(inputs.num_drafts):
            return [[token] for token in self._sampler.sample(logits, inputs.sampling)]
        groups = _grouped(inputs)
        requests = [group.request for group in groups]
        positions = [request.num_tokens for request in requests]
        self._sampler.process(logits, [r.row for r in requests], positions, [group.first for group in groups])
        token_ids = [0] * logits.shape[0]
        coupled = [group for group in groups if self._is_coupled(group)]
        kept = {group.first: num_kept for group, num_kept in self._verify_coupled(logits, coupled, token_ids)}
        sampled = [group for group in groups if group.first not in kept]
        kept |= {
            group.first: num_kept for group, num_kept in self._verify_sampled(logits, sampled, drafts, token_ids)
        }
        rows = [group.request.row for group in groups for _ in range(group.first, group.end)]
        described = self._sampler.describe(logits, rows, token_ids)
        return [self._record(group, described[group.first : group.first + kept[group.first] + 1]) for group in groups]

    def _is_coupled(self, group: _Rows) -> bool:
        return self._verification == "coupled" or not group.draft_ids or self._sampler.is_greedy(group.request)

    def _verify_coupled(
        self, logits: Tensor, groups: Sequence[_Rows], token_ids: list[int]
    ) -> list[tuple[_Rows, int]]:
        """Fills in the tokens of the groups' rows; each group with the number of drafts it keeps."""
        if not groups:
            return []
        rows = [group.request.row for group in groups for _ in range(group.first, group.end)]
        positions = [group.request.num_tokens + i for group in groups for i in range(len(group.draft_ids) + 1)]
        indices = [row for group in groups for row in range(group.first, group.end)]
        x = logits if len(indices) == logits.shape[0] else logits[torch.tensor(indices)]
        chosen = self._sampler.choose_ids(x, torch.tensor(rows), torch.tensor(positions)).tolist()
        for index, token in zip(indices, chosen, strict=True):
            token_ids[index] = token
        return [(group, _num_equal(group.draft_ids, token_ids[group.first :])) for group in groups]

    def _verify_sampled(
        self, logits: Tensor, groups: Sequence[_Rows], drafts: Mapping[str, Draft], token_ids: list[int]
    ) -> list[tuple[_Rows, int]]:
        """As `_verify_coupled`, by the rules for tokens drawn from a drafter's distribution."""
        if not groups:
            return []
        n, width = len(groups), max(len(group.draft_ids) for group in groups)
        draft_ids = torch.tensor([group.draft_ids + [-1] * (width - len(group.draft_ids)) for group in groups])
        # Rows beyond a request's last are never looked at: its last one stands in for them.
        indices = torch.tensor([[min(group.first + i, group.end - 1) for i in range(width + 1)] for group in groups])
        rows = torch.tensor([group.request.row for group in groups])
        starts = torch.tensor([group.request.num_tokens for group in groups])
        x = self._sampler.scaled(logits[indices.flatten()].cpu(), rows.repeat_interleave(width + 1))
        log_probs = x.log_softmax(dim=-1).view(n, width + 1, -1)
        q = _stacked(groups, drafts, width)
        positions = starts[:, None] + torch.arange(width)
        seeds = derive_seeds(self._sampler.seeds(rows), _FOR_ACCEPTANCE, starts).repeat_interleave(width)
        uniforms = uniform(seeds, positions.flatten(), self._one_hash).view(n, width)
        reach = None
        if self._verification == "block":
            kept, all_reach = count_block(log_probs, draft_ids, q, uniforms)
            reach = all_reach.gather(1, kept[:, None]).squeeze(1)
        else:
            kept = count_sampled(log_probs, draft_ids, q, uniforms)
        each = torch.arange(n)
        rejected = torch.cat((draft_ids, draft_ids.new_full((n, 1), -1)), dim=1)[each, kept]
        q_there = None if q is None else q[each, kept.clamp(max=width - 1)]
        weights = residual_log_weights(log_probs[each, kept], rejected, q_there, reach)
        seeds = derive_seeds(self._sampler.seeds(rows), _FOR_REPLACEMENT, starts)
        weights += gumbel_noise(seeds, starts + kept, self._token_hashes)
        for group, num_kept, token in zip(groups, kept.tolist(), weights.argmax(dim=-1).tolist(), strict=True):
            token_ids[group.first : group.first + num_kept + 1] = [*group.draft_ids[:num_kept], token]
        return list(zip(groups, kept.tolist(), strict=True))

    def _record(self, group: _Rows, described: list[SampledToken]) -> list[SampledToken]:
        """The tokens up to one that is none; such a one is reported when it comes first."""
        good = next((i for i, token in enumerate(described) if token.error), len(described))
        tokens = described[: max(good, 1)]
        for token in tokens:
            self._sampler.record(group.request.row, token)
        return tokens

    def draw_drafts(
        self, logits: Tensor, rows: Tensor, positions: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A draft from each row of a drafter's logits, and the distributions they were drawn from, if verification
        needs them: int64[n], and float32[n, vocab_size] of log-probabilities.

        logits: float32[n, vocab_size]; rows: int64[n], the requests'; positions: int64[n], of the draft; starts:
        int64[n], of the request's first draft. An id is −1 where the logits allow no choice."""
        ids = self._sampler.choose_ids(logits, rows, positions)
        if self._verification == "coupled":
            return ids, None
        logits = logits.cpu()  # these rules compute on the host
        q = torch.zeros_like(logits)
        drawn = self._sampler.temperatures(rows).nonzero().flatten()
        if len(drawn):
            q[drawn] = self._sampler.scaled(logits[drawn], rows[drawn]).log_softmax(dim=-1)
            seeds = derive_seeds(self._sampler.seeds(rows[drawn]), _FOR_DRAFTS, starts[drawn])
            ids[drawn] = (q[drawn] + gumbel_noise(seeds, positions[drawn], self._token_hashes)).argmax(dim=-1)
            ids[drawn] = ids[drawn].masked_fill(q[drawn].logsumexp(dim=-1).isnan(), -1)
        return ids, q


def _grouped(inputs: StepInputs) -> list[_Rows]:
    groups, first = [], 0
    for request, num_drafts in zip(inputs.sampling, inputs.num_drafts, strict=True):
        groups.append(_Rows(request, first, request.draft_ids[:num_drafts]))
        first = groups[-1].end
    return groups


def _num_equal(draft_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """`count_equal` for one request."""
    return next((i for i, draft in enumerate(draft_ids) if draft != token_ids[i]), len(draft_ids))


def _stacked(groups: Sequence[_Rows], drafts: Mapping[str, Draft], width: int) -> Tensor | None:
    """The drafters' distributions: float32[n, width, vocab_size], or none if each draft was the only choice."""
    each = [drafts[group.request.request_id].log_probs for group in groups]
    present = [log_probs for log_probs in each if log_probs is not None]
    if not present:
        return None
    q = torch.zeros(len(groups), width, present[0].shape[-1])
    for i, log_probs in enumerate(each):
        if log_probs is None:
            raise AssertionError("drafts of one drafter are drawn from distributions all, or none of them")
        count = min(width, log_probs.shape[0])
        q[i, :count] = log_probs[:count]
    return q
