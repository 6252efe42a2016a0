"""Verification: which drafts are kept, and what the next token is drawn from. Pure arithmetic on tensors.

Notation: p is the model's distribution, q the drafter's; row i of either is that of the token after i drafts. Drafts
of a request come in columns 0 … K−1; an id of −1 is always rejected, and what follows it too, which is how shorter
drafts are padded. `draft_log_probs` of None means that each draft was the only choice: q is 1 there and 0 elsewhere.
All results have the model's distribution exactly: a draft changes how fast tokens come, not which.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_equal(draft_ids: Tensor, token_ids: Tensor) -> Tensor:
    """How many drafts equal what was chosen in their place, up to the first that does not: int64[n].

    draft_ids, token_ids: int64[n, K]. With argmax this is greedy verification. With tokens drawn by noise that is a
    function of seed and position it is exact as well, and the tokens are those that would have been drawn without
    drafts (arXiv 2408.07978 calls this drafter-invariant)."""
    return (draft_ids == token_ids).long().cumprod(dim=-1).sum(dim=-1)


def count_sampled(log_probs: Tensor, draft_ids: Tensor, draft_log_probs: Tensor | None, uniforms: Tensor) -> Tensor:
    """Token by token: a draft is kept while log p > log u + log q. int64[n].

    log_probs: float32[n, K + 1, vocab]; draft_ids: int64[n, K]; draft_log_probs: float32[n, K, vocab] or none;
    uniforms: float32[n, K]. Source: arXiv 2211.17192, algorithm 1; 2302.01318."""
    p, q = _of_drafts(log_probs, draft_ids, draft_log_probs)
    return ((p > uniforms.log() + q) & (draft_ids >= 0)).long().cumprod(dim=-1).sum(dim=-1)


def count_block(
    log_probs: Tensor, draft_ids: Tensor, draft_log_probs: Tensor | None, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Block verification: the longest beginning that is kept as a whole. int64[n], and float32[n, K + 1]: p_i.

    p_0 = 1, p_i = min(p_{i−1} · p/q, 1); R_i = Σ max(p_i · p − q, 0) over the token after draft i;
    h_i = R_i / (R_i + 1 − p_i), and h = p_i for the last draft; kept is the last i with u_i ≤ h_i. Keeps at least as
    many tokens as `count_sampled` does in expectation. Arguments as there. Source: arXiv 2403.10444, algorithm 2."""
    p, q = _of_drafts(log_probs, draft_ids, draft_log_probs)
    num_drafts = (draft_ids >= 0).long().cumprod(dim=-1).sum(dim=-1)
    ratios = (p - q).exp()
    reach = torch.ones(p.shape[0], p.shape[1] + 1)
    kept = torch.zeros_like(num_drafts)
    for i in range(1, p.shape[1] + 1):
        reach[:, i] = (reach[:, i - 1] * ratios[:, i - 1]).clamp(max=1.0)
        chance = reach[:, i]
        if i < p.shape[1]:
            rest = _excess(reach[:, i], log_probs[:, i], draft_ids[:, i], _row(draft_log_probs, i)).sum(dim=-1)
            partly = rest / (rest + 1 - reach[:, i])
            chance = torch.where(num_drafts > i, partly.nan_to_num(1.0), chance)
        kept = torch.where((num_drafts >= i) & (uniforms[:, i - 1] <= chance), i, kept)
    return kept, reach


def residual_log_weights(
    log_probs: Tensor, draft_ids: Tensor, draft_log_probs: Tensor | None, reach: Tensor | None = None
) -> Tensor:
    """log max(reach · p − q, 0), not normalized: what the token in place of the first rejected draft is drawn from.

    log_probs: float32[n, vocab]; draft_ids: int64[n], −1 where no draft was there; draft_log_probs: float32[n, vocab]
    or none; reach: float32[n], p_i of block verification, or none for 1. Where rounding leaves nothing, p itself."""
    if reach is None:
        reach = torch.ones(log_probs.shape[0])
    weights = _excess(reach, log_probs, draft_ids, draft_log_probs)
    nothing = weights.sum(dim=-1, keepdim=True) <= 0
    return torch.where(nothing | (draft_ids < 0)[:, None], log_probs, weights.log())


def _excess(reach: Tensor, log_probs: Tensor, draft_ids: Tensor, draft_log_probs: Tensor | None) -> Tensor:
    """max(reach · p − q, 0): float32[n, vocab]. A draft of −1 has no q."""
    weights = reach[:, None] * log_probs.exp()
    has_draft = draft_ids >= 0
    if draft_log_probs is None:
        q = torch.zeros_like(weights).scatter_(1, draft_ids.clamp(min=0)[:, None], 1.0)
    else:
        q = draft_log_probs.exp()
    return torch.where(has_draft[:, None], weights - q, weights).clamp_(min=0.0)


def _of_drafts(log_probs: Tensor, draft_ids: Tensor, draft_log_probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """log p and log q of the drafts: float32[n, K] each; meaningless where the id is −1."""
    index = draft_ids.clamp(min=0)[:, :, None]
    p = log_probs[:, :-1].gather(2, index).squeeze(2)
    if draft_log_probs is None:
        return p, torch.zeros_like(p)
    return p, draft_log_probs.gather(2, index).squeeze(2)


def _row(draft_log_probs: Tensor | None, i: int) -> Tensor | None:
    return None if draft_log_probs is None else draft_log_probs[:, i]
