"""What the figures of several rounds say: medians, ratios to the others, and what bounds each step."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preload.cli.render import table
from preload.engine.loading.checkpoint import open_checkpoint

OURS = "preload"


@dataclass(frozen=True)
class Headline:
    """A figure that is compared. `more_is_better` decides which way round the ratio is: above 1 is ours ahead."""

    workload: str
    figure: str
    title: str
    more_is_better: bool = False

    def of(self, figures: Mapping[str, Any]) -> float | None:
        value = figures.get(self.workload, {}).get(self.figure)
        return None if value is None else float(value)


HEADLINES = (
    Headline("start", "first_token_s", "start to first token, s"),
    Headline("concurrency_1", "output_tokens_per_s", "1 at a time, tokens/s", True),
    Headline("concurrency_8", "output_tokens_per_s", "8 at a time, tokens/s", True),
    Headline("concurrency_64", "output_tokens_per_s", "64 at a time, tokens/s", True),
    Headline("concurrency_1", "between_p50_ms", "1 at a time, between tokens p50, ms"),
    Headline("concurrency_64", "first_token_p50_ms", "64 at a time, first token p50, ms"),
    Headline("prompts_512", "prompt_tokens_per_s", "prompts of 512, tokens/s", True),
    Headline("prompts_2000", "prompt_tokens_per_s", "prompts of 2,000, tokens/s", True),
    Headline("prompts_2000", "between_p50_ms", "between tokens after 2,000 p50, ms"),
    Headline("shared_prefix", "miss_ms", "shared prefix, first token, miss, ms"),
    Headline("shared_prefix", "hit_ms", "shared prefix, first token, hit, ms"),
    Headline("shared_prefix", "miss_over_hit", "shared prefix, miss over hit", True),
    Headline("mix", "first_token_p50_ms", "mix, first token p50, ms"),
    Headline("mix", "first_token_p99_ms", "mix, first token p99, ms"),
    Headline("mix", "between_p50_ms", "mix, between tokens p50, ms"),
    Headline("mix", "between_p99_ms", "mix, between tokens p99, ms"),
)


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of every figure, over the rounds that have it. A workload that failed in any round says so instead."""
    found: dict[str, Any] = {}
    for target, workload in _pairs(rounds):
        parts = [r["figures"].get(target, {}).get(workload) for r in rounds]
        parts = [part for part in parts if part is not None]
        failed = [part["failed"] for part in parts if "failed" in part]
        names = [name for name in parts[0] if all(name in part for part in parts)]
        summary = {name: statistics.median(part[name] for part in parts) for name in names}
        found.setdefault(target, {})[workload] = {"failed": failed[0]} if failed else summary
    return found


def _pairs(rounds: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], None]:
    return {(target, name): None for r in rounds for target, figures in r["figures"].items() for name in figures}


def ratios(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """How many times better ours is, by peer ("llama.cpp"; "vllm" is the best of its settings) and headline; with
    another setting of ours, "llama.cpp, preload-medium"."""
    peers = {"llama.cpp": ["llama.cpp"], "vllm": [name for name in found if name.startswith("vllm")]}
    answer: dict[str, dict[str, float]] = {}
    for ours in (name for name in found if name.startswith(OURS)):
        for headline in HEADLINES:
            value = headline.of(found[ours])
            for peer, names in peers.items():
                theirs = [other for name in names if (other := headline.of(found.get(name, {}))) is not None]
                if not value or not theirs:
                    continue
                best = max(theirs) if headline.more_is_better else min(theirs)
                ratio = value / best if headline.more_is_better else best / value
                label = peer if ours == OURS else f"{peer}, {ours}"
                answer.setdefault(label, {})[f"{headline.workload}.{headline.figure}"] = round(ratio, 3)
    return answer


def model_sizes(checkpoint: str) -> dict[str, int]:
    """Bytes of the weights that every step reads, and multiplications of one token (those of its matrices)."""
    opened = open_checkpoint(checkpoint)
    try:
        matrices = [tensor for tensor in opened.tensors if len(tensor.shape) == 2]
        return {
            "weight_bytes": sum(tensor.num_bytes for tensor in matrices),
            "multiplications_per_token": sum(tensor.shape[0] * tensor.shape[1] for tensor in matrices),
        }
    finally:
        opened.close()


def text(result: Mapping[str, Any]) -> str:
    """The table, failures, and what bounds our decoding."""
    found = result["medians"]
    names = list(found)
    peers = list(result["ratios"])
    rows = []
    for headline in HEADLINES:
        values = [headline.of(found[name]) for name in names]
        if any(value is not None for value in values):
            key = f"{headline.workload}.{headline.figure}"
            ratio_cells = [_cell(result["ratios"][peer].get(key)) for peer in peers]
            rows.append([headline.title, *(_cell(value) for value in values), *ratio_cells])
    header = (f"medians of {len(result['rounds'])}", *names, *(f"times {peer}" for peer in peers))
    return "\n".join([table(header, rows), *_failures(found), *_bounds(result)])


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _failures(found: Mapping[str, Any]) -> list[str]:
    return [
        f"failed: {target}, {workload}: {figures['failed'].splitlines()[0]}"
        for target, workloads in found.items()
        for workload, figures in workloads.items()
        if "failed" in figures
    ]


def _bounds(result: Mapping[str, Any]) -> list[str]:
    """A step reads all weights once and multiplies once per request: how far each is from what the machine can."""
    limits, model = result["limits"], result["model"]
    lines = [
        "",
        f"the machine, {limits['num_threads']} threads: {limits['memory_bytes_per_s'] / 1e9:.1f} GB/s from memory, "
        f"{limits['weights_bytes_per_s'] / 1e9:.1f} GB/s of a buffer as large as the weights, "
        f"{limits['flops_per_s'] / 1e9:.0f} GFLOP/s in float32",
    ]
    read_ms = model["weight_bytes"] / limits["weights_bytes_per_s"] * 1000
    multiply_ms = 2 * model["multiplications_per_token"] / limits["flops_per_s"] * 1000
    for concurrency in (1, 8, 64):
        step_ms = result["medians"].get(OURS, {}).get(f"concurrency_{concurrency}", {}).get("between_p50_ms")
        if step_ms:
            lines.append(
                f"{concurrency} at a time: {model['weight_bytes'] / concurrency / 1e6:.1f} MB of weights a token; "
                f"a step takes {step_ms:.1f} ms, reading them {read_ms:.1f} ms ({read_ms / step_ms:.0%}), "
                f"multiplying in float32 {multiply_ms * concurrency:.1f} ms "
                f"({multiply_ms * concurrency / step_ms:.0%})"
            )
    return lines
