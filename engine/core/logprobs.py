"""Log-probabilities: of given tokens and of the most likely ones, of outputs and of prompts.

The largest logits are found first, and only they and the given tokens are normalized.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from preload.engine.models.decoder import Decoder

from .request import Request, TokenLogprobs
from .scheduler import ScheduledRequest

_ROWS_AT_ONCE = 32
"""Rows of logits of a prompt that are there at a time: a prompt's are many, and each is as long as the vocabulary."""


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int], *, ranked: bool = False
) -> list[TokenLogprobs]:
    """Of each row's token, and of its num_top most likely ones. logits: float32[num_rows, vocab_size].

    `ranked` also finds each token's rank: 1 + the number of tokens that are more likely."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, torch.tensor(token_ids)[:, None])
    top = logits.topk(min(max(num_top), logits.shape[1]), dim=-1)
    top_logprobs, top_ids = (top.values - total).tolist(), top.indices.tolist()
    ranks = ((logits > own).sum(dim=-1) + 1).tolist() if ranked else [0] * len(num_top)
    return [
        TokenLogprobs(logprob=value, top_ids=top_ids[i][:count], top_logprobs=top_logprobs[i][:count], rank=ranks[i])
        for i, (value, count) in enumerate(zip((own - total).flatten().tolist(), num_top, strict=True))
    ]


def collect_prompt_logprobs(decoder: Decoder, hidden: Tensor, scheduled: Sequence[ScheduledRequest]) -> None:
    """Takes what this step has computed of prompts whose log-probabilities are asked for, before it is committed.

    hidden: dtype[num_tokens, hidden_size], the tokens of `scheduled`, one request after the other."""
    start = 0
    for item in scheduled:
        if item.request.needs_prompt_logits:
            _collect(decoder, hidden[start : start + item.num_new_tokens], item.request)
        start += item.num_new_tokens


def _collect(decoder: Decoder, hidden: Tensor, request: Request) -> None:
    """hidden: of the request's tokens from num_computed_tokens on. A token's states tell of the one after it."""
    first, count = request.num_computed_tokens, request.sampling.prompt_logprobs or 0
    following = request.prompt_ids[first + 1 : first + 1 + hidden.shape[0]]
    del request.prompt_logprobs[first:]  # computed before a preemption
    for i in range(0, len(following), _ROWS_AT_ONCE):
        ids = following[i : i + _ROWS_AT_ONCE]
        logits = decoder.compute_logits(hidden[i : i + len(ids)]).cpu()
        request.prompt_logprobs += token_logprobs(logits, ids, [count] * len(ids), ranked=True)
