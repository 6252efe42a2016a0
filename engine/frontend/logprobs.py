"""Log-probabilities in the shapes of OpenAI's two endpoints.

A token is shown as its text, or, when its bytes are not whole characters, as `bytes:\\x..`; a special token as it is
spelled. Minus infinity, which JSON cannot say, is shown as -9999.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from preload.protos import engine_core_pb2 as pb

from .choices import TokenEntry
from .detokenizer import Detokenizer
from .tokenizer import Tokenizer

_LOWEST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry], num_top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = []
    for entry in entries:
        assert entry.logprobs is not None, "a chat shows no tokens of its prompt"
        top = [_chat_token(tokenizer, token_id, value) for token_id, value in _top(entry, num_top)]
        own = _chat_token(tokenizer, entry.token_id, entry.logprobs.logprob)
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry], num_top: int) -> dict[str, Any]:
    """`logprobs` of a completion choice; the sampled token is among its `top_logprobs`."""
    tops: list[dict[str, float] | None] | None = [] if num_top else None
    for entry in entries:
        if tops is not None and entry.logprobs is None:
            tops.append(None)
        elif tops is not None and entry.logprobs is not None:
            top = {token_text(tokenizer, token_id): value for token_id, value in _top(entry, num_top)}
            top.setdefault(token_text(tokenizer, entry.token_id), _finite(entry.logprobs.logprob))
            tops.append(top)
    return {
        "text_offset": [entry.start for entry in entries],
        "token_logprobs": [entry.logprobs and _finite(entry.logprobs.logprob) for entry in entries],
        "tokens": [token_text(tokenizer, entry.token_id) for entry in entries],
        "top_logprobs": tops,
    }


def prompt_entries(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]
) -> list[TokenEntry]:
    """The tokens of a prompt as entries of a text that begins with it. `logprobs`: of all but the first."""
    detokenizer, position = Detokenizer(tokenizer), 0
    entries = []
    for index, token_id in enumerate(prompt_ids):
        start, position = position, position + len(detokenizer.add(token_id))
        known = logprobs[index - 1] if index else None
        entries.append(TokenEntry(token_id, known, start, position))
    return entries


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt, by id, the most likely ones and itself."""
    positions: list[dict[str, Any] | None] = [None]
    for token_id, known in zip(prompt_ids[1:], logprobs, strict=True):
        ranked = dict(enumerate(zip(known.top_ids[:num_top], known.top_logprobs[:num_top], strict=True), 1))
        here = {top_id: (value, rank) for rank, (top_id, value) in ranked.items()}
        here.setdefault(token_id, (known.logprob, known.rank))
        positions.append(
            {
                str(i): {"logprob": _finite(value), "rank": rank, "decoded_token": token_text(tokenizer, i)}
                for i, (value, rank) in here.items()
            }
        )
    return positions


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """How one token is written down."""
    data = tokenizer.bytes_of(token_id, skip_special=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_token(tokenizer: Tokenizer, token_id: int, value: float) -> dict[str, Any]:
    data = tokenizer.bytes_of(token_id, skip_special=False)
    return {"token": token_text(tokenizer, token_id), "logprob": _finite(value), "bytes": list(data)}


def _top(entry: TokenEntry, num_top: int) -> Iterator[tuple[int, float]]:
    assert entry.logprobs is not None
    pairs = zip(entry.logprobs.top_ids[:num_top], entry.logprobs.top_logprobs[:num_top], strict=True)
    return ((token_id, _finite(value)) for token_id, value in pairs)


def _finite(value: float) -> float:
    return max(value, _LOWEST) if not math.isnan(value) else _LOWEST
