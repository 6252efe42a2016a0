"""How a core is told to speculate. Imports nothing heavy: the frontend and its command line share it."""

from __future__ import annotations

from preload.engine.errors import RequestError

METHODS = ("none", "ngram", "draft", "mtp")
VERIFICATIONS = ("coupled", "sampled", "block")
MAX_DRAFT_TOKENS = 31
NUM_DRAFT_TOKENS = {"none": 0, "ngram": 7, "draft": 4, "mtp": 1}
"""Of each method, where no number is given. Fewer are drafted where that is faster (adaptive.py)."""

HELP = {
    "speculate": "guess tokens and verify several in one step: ngram (what followed the same words before), "
    "draft (a smaller model with the same vocabulary, see --draft-model), mtp (the model's own prediction head)",
    "num_draft_tokens": "tokens to guess at once, at most; fewer where that is measured to be faster "
    "(0: 7 for ngram, 4 for draft, 1 for mtp)",
    "verification": "rule for sampled requests: coupled (the same tokens as without speculation), sampled or block "
    "(more of a draft model's tokens are kept; a request continued by another core goes on with other tokens)",
    "draft_quantization": "resident form of the draft model's weights",
}


def num_draft_tokens(method: str, asked: int) -> int:
    """The longest draft of a method; `asked`: 0 for its own."""
    return asked or NUM_DRAFT_TOKENS[method]


def check(speculate: str, num_draft_tokens: int, verification: str, has_draft_model: bool) -> None:
    """Raises RequestError on options that do not go together."""
    if speculate not in METHODS:
        raise RequestError(f"speculate is {speculate!r}; known are {', '.join(METHODS)}")
    if verification not in VERIFICATIONS:
        raise RequestError(f"verification is {verification!r}; known are {', '.join(VERIFICATIONS)}")
    if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise RequestError(f"num_draft_tokens is {num_draft_tokens}; it must be between 0 and {MAX_DRAFT_TOKENS}")
    if speculate == "draft" and not has_draft_model:
        raise RequestError("speculate=draft needs a draft model: name its checkpoint with draft_model")
    if has_draft_model and speculate != "draft":
        raise RequestError(f"a draft model is of no use with speculate={speculate}; say speculate=draft")
