"""What a step costs beside the forward pass: scheduling, preparing, sampling and committing.

The model is a stand-in that returns the same logits at once, of a real vocabulary's size; everything around it is the
real core, in this process. Every request decodes greedily, with `context` tokens before it.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from .statistics import machine

if TYPE_CHECKING:
    from preload.engine.core.core import EngineCore

VOCAB_SIZE = 49152
BLOCK_SIZE = 16
TOKEN_BUDGET = 8192
NUM_STEPS = 120
NUM_SETTLING = 20
PHASES = ("schedule", "prepare", "forward", "sample", "commit")


def run(requests: Sequence[int] = (1, 8, 64, 256), contexts: Sequence[int] = (128, 8192)) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    steps = [measure(count, context) for context in contexts for count in requests]
    return {"machine": machine(), "vocab_size": VOCAB_SIZE, "steps": steps}


def measure(num_requests: int, context: int) -> dict[str, Any]:
    """Medians over decode steps of `num_requests` at once, in milliseconds; `overhead_ms` is all but the forward."""
    core = make_core(num_requests, context)
    fill(core, num_requests, context)
    spent = {
        "schedule": timed(core.scheduler, "schedule"),
        "prepare": timed(core.runner, "prepare"),
        "forward": timed(core.runner, "forward"),
        "sample": timed(core.sampler, "sample"),
        "commit": timed(core, "_commit"),
    }
    totals = []
    for _ in range(NUM_STEPS):
        begin_s = time.perf_counter()
        outputs = core.step()
        totals.append(time.perf_counter() - begin_s)
        assert len(outputs) == num_requests
    overhead = [total - forward for total, forward in zip(totals, spent["forward"], strict=True)]
    return {
        "num_requests": num_requests,
        "context": context,
        "overhead_ms": _median_ms(overhead),
        **{f"{phase}_ms": _median_ms(spent[phase]) for phase in PHASES},
    }


def make_core(num_requests: int, context: int) -> EngineCore:
    """A core whose decoder takes no time."""
    import torch

    from preload.engine.core.core import EngineCore
    from preload.engine.models.spec import ModelSpec

    class Decoder:
        spec = ModelSpec(
            family="llama", vocab_size=VOCAB_SIZE, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=1,
            num_kv_heads=1, head_dim=1, rms_norm_eps=1e-5, max_position_embeddings=1 << 20, tie_word_embeddings=True,
        )  # fmt: skip
        dtype = torch.float32
        kernels = "none"
        choose = _chooser()
        logits = torch.randn(num_requests, VOCAB_SIZE)

        def forward(self, input_ids: Any, *_: Any) -> Any:
            return input_ids[:, None]

        def compute_logits(self, hidden: Any) -> Any:
            return self.logits[: len(hidden)]

    # Who was first decodes while the prompts of the others are computed.
    longest = context + num_requests * context // TOKEN_BUDGET + num_requests + NUM_STEPS + NUM_SETTLING
    decoder: Any = Decoder()
    return EngineCore(
        decoder,
        num_blocks=num_requests * (longest // BLOCK_SIZE + 1) + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_requests,
        token_budget=TOKEN_BUDGET,
        max_model_len=longest,
    )


@cache
def _chooser() -> Any:
    """What a core on this machine chooses tokens with."""
    import torch

    from preload.engine.core.kernels import choose_ops

    with tempfile.TemporaryDirectory(prefix="preload-steps-") as folder:
        return choose_ops(folder, torch.float32, len(os.sched_getaffinity(0))).choose


def fill(core: EngineCore, num_requests: int, context: int) -> None:
    """Requests with different prompts, stepped until all of them decode, and a little more for caches to settle."""
    from preload.engine.core.request import Request, SamplingParams

    rng = random.Random(0)
    for number in range(num_requests):
        request = Request(
            request_id=str(number),
            prompt_ids=[rng.randrange(VOCAB_SIZE) for _ in range(context)],
            sampling=SamplingParams(max_tokens=core.max_model_len),
        )
        core.add_request(request)
    num_settled = 0
    while num_settled < NUM_SETTLING:
        num_settled += len(core.step()) == num_requests


def timed(owner: Any, name: str) -> list[float]:
    """From now on, the seconds that each call of the method takes."""
    spent: list[float] = []
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        begin_s = time.perf_counter()
        result = method(*arguments, **named)
        spent.append(time.perf_counter() - begin_s)
        return result

    setattr(owner, name, call)
    return spent


def _median_ms(values: Sequence[float]) -> float:
    return round(statistics.median(values) * 1000, 4)
