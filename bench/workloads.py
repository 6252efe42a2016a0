"""What a server is asked to do, and what is made of its answers. Every prompt is another one, in every round too.

`WORKLOADS` names them in the order in which they run; each is a function of a load generator, the prompts and a seed,
and returns its figures. Throughput counts output tokens from the first request sent to the last token received, so
the prompts' time is in it. `NEEDS` tells how many requests run at once and how long they get, for servers that have
to be told.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .peers.load_generator import Answer, LoadGenerator, Request, with_own_cost
from .peers.prompts import Prompts
from .statistics import percentile

Figures = dict[str, float]
SHORT_TOKENS = 128
_REQUESTS_AT = {1: 3, 8: 16, 64: 64}
_PREFIX_TOKENS, _SUFFIX_TOKENS = 1500, 64
_MIX_PER_S, _MIX_REQUESTS = 0.5, 20
_MIX_IN, _MIX_OUT = (32, 384), (16, 96)


@dataclass(frozen=True)
class Need:
    """Requests at once, and tokens of each, prompt and answer."""

    slots: int
    context: int


@dataclass(frozen=True)
class Workload:
    """`measure` makes the figures; the first of `figures` is what a comparison is about."""

    name: str
    title: str
    need: Need
    measure: Callable[[LoadGenerator, Prompts, str], Awaitable[Figures]]


async def warm_up(generator: LoadGenerator, prompts: Prompts, seed: str) -> None:
    """What a server does at its first request only is done afterwards."""
    await generator.ask(_request(prompts, SHORT_TOKENS, 8, f"{seed} warm-up"))


def _at(concurrency: int) -> Callable[[LoadGenerator, Prompts, str], Awaitable[Figures]]:
    async def measure(generator: LoadGenerator, prompts: Prompts, seed: str) -> Figures:
        requests = [
            _request(prompts, SHORT_TOKENS, SHORT_TOKENS, f"{seed} {index}")
            for index in range(_REQUESTS_AT[concurrency])
        ]
        answers, elapsed_s, cpu_s = await with_own_cost(lambda: generator.ask_all(requests, concurrency))
        return {**_throughput(answers), **_latencies(answers), **_own_cost(answers, elapsed_s, cpu_s)}

    return measure


async def _prompts_of_512(generator: LoadGenerator, prompts: Prompts, seed: str) -> Figures:
    """One after another: the rate at which a prompt is computed, up to its first token."""
    answers = [await generator.ask(_request(prompts, 512, 1, f"{seed} {index}")) for index in range(5)]
    first_s = percentile([answer.first_token_s for answer in answers], 50)
    return {"prompt_tokens_per_s": 512 / first_s, "first_token_p50_ms": first_s * 1000}


async def _prompts_of_2000(generator: LoadGenerator, prompts: Prompts, seed: str) -> Figures:
    answers = [await generator.ask(_request(prompts, 2000, 32, f"{seed} {index}")) for index in range(3)]
    first_s = percentile([answer.first_token_s for answer in answers], 50)
    return {"prompt_tokens_per_s": 2000 / first_s, **_latencies(answers)}


async def _shared_prefix(generator: LoadGenerator, prompts: Prompts, seed: str) -> Figures:
    """Two prefixes of 1,500 tokens; four prompts go on from each, one after another. The first is the miss."""
    misses: list[float] = []
    hits: list[float] = []
    for number in range(2):
        prefix = prompts.text(_PREFIX_TOKENS, f"{seed} prefix {number}")
        total = _PREFIX_TOKENS + _SUFFIX_TOKENS
        for suffix in range(4):
            text = prompts.text(total, f"{seed} suffix {number} {suffix}", after=prefix)
            answer = await generator.ask(Request(text, total, 8))
            (hits if suffix else misses).append(answer.first_token_s)
    miss_s, hit_s = percentile(misses, 50), percentile(hits, 50)
    return {"miss_over_hit": miss_s / hit_s, "miss_ms": miss_s * 1000, "hit_ms": hit_s * 1000}


async def _mix(generator: LoadGenerator, prompts: Prompts, seed: str) -> Figures:
    """Arrivals by a Poisson process, with prompts and answers of any length: the same for every server of a round."""
    chance = random.Random(seed)
    requests, arrivals_s, now_s = [], [], 0.0
    for index in range(_MIX_REQUESTS):
        requests.append(
            _request(prompts, chance.randint(*_MIX_IN), chance.randint(*_MIX_OUT), f"{seed} {index}"),
        )
        arrivals_s.append(now_s)
        now_s += chance.expovariate(_MIX_PER_S)
    answers, elapsed_s, cpu_s = await with_own_cost(lambda: generator.ask_at(requests, arrivals_s))
    return {**_latencies(answers), **_throughput(answers), **_own_cost(answers, elapsed_s, cpu_s)}


WORKLOADS = (
    Workload("concurrency_1", "1 at a time, 128 in, 128 out", Need(1, 288), _at(1)),
    Workload("prompts_512", "prompts of 512 tokens", Need(1, 2304), _prompts_of_512),
    Workload("prompts_2000", "prompts of 2,000 tokens", Need(1, 2304), _prompts_of_2000),
    Workload("shared_prefix", "a shared prefix of 1,500 tokens", Need(1, 2304), _shared_prefix),
    Workload("concurrency_8", "8 at a time, 128 in, 128 out", Need(8, 288), _at(8)),
    Workload("mix", f"Poisson arrivals, {_MIX_PER_S:g} a second", Need(32, 512), _mix),
    Workload("concurrency_64", "64 at a time, 128 in, 128 out", Need(64, 288), _at(64)),
)


def _request(prompts: Prompts, num_tokens: int, max_tokens: int, seed: str) -> Request:
    return Request(prompts.text(num_tokens, seed), num_tokens, max_tokens)


def _throughput(answers: Sequence[Answer]) -> Figures:
    start_s = min(answer.sent_s for answer in answers)
    end_s = max(answer.piece_times[-1] for answer in answers)
    return {"output_tokens_per_s": sum(answer.num_output_tokens for answer in answers) / (end_s - start_s)}


def _latencies(answers: Sequence[Answer]) -> Figures:
    first = [answer.first_token_s for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    return {
        "first_token_p50_ms": percentile(first, 50) * 1000,
        "first_token_p99_ms": percentile(first, 99) * 1000,
        "between_p50_ms": percentile(gaps, 50) * 1000,
        "between_p99_ms": percentile(gaps, 99) * 1000,
    }


def _own_cost(answers: Sequence[Answer], elapsed_s: float, cpu_s: float) -> Figures:
    """What the load generator took from the machine: part of one core, and CPU time for each token."""
    num_tokens = sum(answer.num_output_tokens for answer in answers)
    return {"client_core_share": cpu_s / elapsed_s, "client_us_per_token": cpu_s / num_tokens * 1e6}


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Four significant digits: more are noise."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}
