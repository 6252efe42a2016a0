"""From the configured way to speculate to a Speculator."""

from __future__ import annotations

from preload.engine.core.core import EngineCore
from preload.engine.errors import RequestError
from preload.engine.models.decoder import Decoder

from . import options
from .draft_model import DraftModelDrafter
from .drafter import Drafter
from .mtp import MtpDrafter
from .ngram import NgramDrafter
from .speculator import Speculator
from .verifier import Verifier


def speculate(
    core: EngineCore,
    method: str,
    *,
    num_draft_tokens: int = 0,
    verification: str = "coupled",
    draft: Decoder | None = None,
    adaptive: bool = True,
) -> Speculator:
    """Has `core` speculate from now on. `draft`: the model of the method "draft".

    Raises RequestError if model and method do not go together."""
    count = options.num_draft_tokens(method, num_draft_tokens)
    vocab_size = core.runner.decoder.spec.vocab_size
    verifier = Verifier(core.sampler, vocab_size, verification)
    speculator = Speculator(
        _drafter(core, method, count, verifier, draft),
        verifier,
        core.sampler,
        num_draft_tokens=count,
        max_model_len=core.max_model_len,
        adaptive=adaptive,
    )
    core.speculate(speculator)
    return speculator


def check_vocabularies(target: Decoder, draft: Decoder) -> None:
    """Raises RequestError if the draft model's tokens cannot be the model's."""
    theirs, ours = draft.spec.vocab_size, target.spec.vocab_size
    if theirs != ours:
        raise RequestError(
            f"the draft model has a vocabulary of {theirs} tokens and the model one of {ours}; a draft model needs "
            "the same vocabulary: choose another one"
        )


def _drafter(core: EngineCore, method: str, count: int, verifier: Verifier, draft: Decoder | None) -> Drafter:
    batch, steps, empty = core.runner.batch, core.runner.on_device, core.placement.empty
    if method == "ngram":
        return NgramDrafter()
    if method == "mtp":
        return MtpDrafter(
            core.runner.decoder, batch, verifier.draw_drafts, num_draft_tokens=count, steps=steps, empty=empty
        )
    if method != "draft" or draft is None:
        raise AssertionError(f"{method} is no way to speculate, or its model is missing")
    check_vocabularies(core.runner.decoder, draft)
    return DraftModelDrafter(
        draft,
        batch,
        verifier.draw_drafts,
        num_draft_tokens=count,
        num_fed_at_once=core.scheduler.token_budget,
        # What was chosen last is fed after each step, and often the last draft, which it has not read either.
        steps=None if steps is None else steps.of_another(draft, num_draft_tokens=1),
        empty=empty,
    )
