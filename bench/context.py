"""What a long context costs: the time of a decode step by tokens before it, and the memory of keys and values.

The real model and the real core, in this process. One text in growing pieces: each request shares the blocks of the
one before, so that its own part alone is computed before it decodes.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preload.engine.frontend.tokenizer_files import load_tokenizer

from .peers.prompts import PROSE
from .processes import BenchError, PrivateDaemon, tell
from .resident_model import attached, chosen_ops, make_decoder
from .statistics import machine

if TYPE_CHECKING:
    from preload.engine.core.core import EngineCore

CONTEXTS = (512, 1024, 2048, 4096, 6144, 8192)
NUM_STEPS = 32
BLOCK_SIZE = 16
TOKEN_BUDGET = 512


def run(checkpoint: str, contexts: Sequence[int] = CONTEXTS, num_threads: int = 2) -> dict[str, Any]:
    """`contexts`: a row each; `base_ms` and `ms_per_1000_tokens`: the straight line through them by least squares;
    `largest_deviation`: of a row from that line, as a part of it."""
    import torch

    torch.set_num_threads(num_threads)
    ids = load_tokenizer(checkpoint).encode(PROSE.read_text() * 4, add_special=True)
    if len(ids) < max(contexts):
        raise BenchError(f"the text has {len(ids)} tokens, not {max(contexts)}")
    with PrivateDaemon() as daemon, attached(daemon, checkpoint, "keep", "float32") as attachment:
        decoder = make_decoder(attachment, chosen_ops(daemon, "float32", num_threads))
        core = _make_core(decoder, max(contexts))
        core.warm_up(TOKEN_BUDGET)
        memory_before = _anonymous_bytes()
        rows = [_measure(core, ids, context, memory_before) for context in contexts]
        kernels = decoder.kernels
        del decoder, core
    base_ms, slope_ms, deviation = _straight_line([(row["context"], row["step_ms"]) for row in rows])
    return {
        "machine": machine(),
        "kernels": kernels,
        "contexts": rows,
        "base_ms": round(base_ms, 3),
        "ms_per_1000_tokens": round(slope_ms * 1000, 4),
        "largest_deviation": round(deviation, 4),
    }


def _make_core(decoder: Any, longest: int) -> EngineCore:
    from preload.engine.core.core import EngineCore

    return EngineCore(
        decoder,
        num_blocks=2 * (longest + NUM_STEPS) // BLOCK_SIZE + 2,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        token_budget=TOKEN_BUDGET,
        max_model_len=longest + NUM_STEPS,
    )


def _measure(core: EngineCore, ids: Sequence[int], context: int, memory_before: int) -> dict[str, Any]:
    """Half of the steps lie before `context` tokens and half behind them."""
    from preload.engine.core.request import Request, SamplingParams

    tell(f"{context} tokens")
    prompt = list(ids[: context - NUM_STEPS // 2])
    sampling = SamplingParams(max_tokens=NUM_STEPS + 1)
    core.add_request(Request(request_id=str(context), prompt_ids=prompt, sampling=sampling))
    begin_s = time.perf_counter()
    while not core.step():
        pass
    prompt_s, num_cached = time.perf_counter() - begin_s, core.scheduler.prefix_counters.num_hit_tokens
    steps = []
    while core.has_work:
        begin_s = time.perf_counter()
        core.step()
        steps.append(time.perf_counter() - begin_s)
    computed = core.cache.num_bytes // core.cache.num_blocks * -(-(context + NUM_STEPS // 2) // BLOCK_SIZE)
    return {
        "context": context,
        "step_ms": round(statistics.median(steps) * 1000, 3),
        "step_min_ms": round(min(steps) * 1000, 3),
        "prompt_s": round(prompt_s, 3),
        "hit_tokens_so_far": num_cached,
        "kv_bytes_computed": computed,
        "memory_growth_bytes": _anonymous_bytes() - memory_before,
    }


def _straight_line(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Intercept, slope, and the largest relative distance of a point."""
    slope, base = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return base, slope, max(abs(y / (base + slope * x) - 1) for x, y in points)


def _anonymous_bytes() -> int:
    """Memory of this process that belongs to no file: keys and values are in it, the weights are not."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise BenchError("/proc/self/status tells no RssAnon")
    return int(found[1]) * 1024
