"""The canary: a short greedy answer that a new core has to give before it gets requests.

When the weights are the same, it has to be the answer of the running core: the same tokens with the same
log-probabilities, within what another batch or another number of threads may change. Where the tokens differ, the two
must have been as good as equally likely. When the weights differ, any answer will do: the core itself refuses logits
that are not finite.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from dataclasses import dataclass

from .config import FrontendConfig
from .deployment import Deployment
from .errors import StartError
from .requests import Sample, SampleEvent
from .sampling import SamplingParams

PROMPT = "The quick brown fox jumps over the lazy dog. Then the dog"
NUM_TOKENS = 8
EXACT_TOLERANCE, ROUNDED_TOLERANCE = 0.01, 0.25
"""Of a log-probability, in nats: among cores that compute in float32, and where one rounds to bfloat16."""


@dataclass(frozen=True)
class CanaryToken:
    token_id: int
    logprob: float


async def check_canary(new: Deployment, running: Deployment | None) -> str:
    """Raises StartError when the new deployment fails; else says what was compared. `running` has its weights."""
    prompt_ids = await _prompt(new)
    answer = await _ask(new, prompt_ids)
    if not answer or not all(math.isfinite(token.logprob) for token in answer):
        raise StartError(f"the canary got no sensible answer: {answer}")
    if running is None:
        return f"{len(answer)} tokens"
    reference = await _ask(running, prompt_ids)
    compare(answer, reference, tolerance(new.config, running.config))
    return f"{len(answer)} tokens equal to the running core's"


def tolerance(*configs: FrontendConfig) -> float:
    """How much the answers of cores with these settings may differ."""
    exact = ("float32", "highest", "float32")
    for config in configs:
        cache_dtype = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else "float32"
        if (config.compute_dtype, config.matmul_precision, cache_dtype) != exact:
            return ROUNDED_TOLERANCE
    return EXACT_TOLERANCE


def compare(answer: list[CanaryToken], reference: list[CanaryToken], tolerance: float) -> None:
    """Raises StartError at the first token that differs by more than rounding."""
    for position, (new, old) in enumerate(zip(answer, reference, strict=False)):
        if abs(new.logprob - old.logprob) > tolerance:
            raise StartError(
                f"the canary's answer differs at token {position}: {new.token_id} with log-probability "
                f"{new.logprob:.4f}, and {old.token_id} with {old.logprob:.4f} from the running core"
            )
        if new.token_id != old.token_id:
            return  # a tie that rounding decided: what follows is another text
    if len(answer) != len(reference):
        raise StartError(f"the canary's answer has {len(answer)} tokens, the running core's {len(reference)}")


async def _prompt(deployment: Deployment) -> list[int]:
    ids = deployment.tokenizer.encode(PROMPT, add_special=True)
    limit = (await deployment.supervisor.model_stats()).max_model_len
    return ids[: max(1, limit - NUM_TOKENS)]


async def _ask(deployment: Deployment, prompt_ids: list[int]) -> list[CanaryToken]:
    """A greedy answer through the same path as every request's. Raises StartError."""
    events: asyncio.Queue[SampleEvent] = asyncio.Queue()
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=True)
    request_id = f"canary-{uuid.uuid4().hex}"
    sample = Sample(request_id=request_id, index=0, prompt_ids=prompt_ids, sampling=sampling, events=events)
    deployment.in_flight.submit(sample)
    tokens: list[CanaryToken] = []
    try:
        while True:
            event = await events.get()
            if event.error is not None:
                raise StartError(f"the canary was refused: {event.error.message}")
            tokens += [
                CanaryToken(token_id, entry.logprob)
                for token_id, entry in zip(event.token_ids, event.logprobs, strict=True)
            ]
            if event.finish_reason is not None:
                return tokens
    finally:
        sample.abort()
