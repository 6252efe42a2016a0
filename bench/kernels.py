"""How long products take: native kernels and torch, per layout and number of tokens, beside the memory's speed.

    python -m preload.bench.kernels [--layouts gguf.q4_1,…] [--tokens 1,8,64] [--threads N]

Every measured product reads another of the weights, which together are larger than any cache, so one token's
product is a matter of reading memory. Times are the shortest of many, because other processes disturb some.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preload.engine.layers.weights import Weight

ROWS, COLS = 1536, 768
TOTAL_BYTES = 128 << 20
BUDGET_S = 0.4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m preload.bench.kernels", description=__doc__)
    parser.add_argument("--layouts", default="", help="layouts to measure; all if empty")
    parser.add_argument("--tokens", default="1,3,8,33,128", help="numbers of tokens")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    import torch

    from preload.engine.kernels.native.build import find_or_build
    from preload.engine.kernels.native.library import LAYOUT_IDS, NativeLibrary
    from preload.engine.layers.linear import Linear, product
    from preload.engine.layers.native_ops import native_ops

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="preload-kernels-") as folder:
        ops = native_ops(NativeLibrary(find_or_build(Path(folder)), options.threads), torch.float32)
    bandwidth = read_bandwidth()
    print(ops.describe())
    print(f"memory is read at {bandwidth / 1e9:.1f} GB/s by torch on {options.threads} threads")
    print(f"{'layout':18} {'tokens':>6} {'native µs':>10} {'torch µs':>10} {'ratio':>6} {'GB/s':>6} {'of memory':>9}")
    for layout in options.layouts.split(",") if options.layouts else LAYOUT_IDS:
        weights = make_weights(layout)
        num_bytes = sum(part.nbytes for part in weights[0].parts.values())
        projections = [ops.projection([Linear(weight)]) for weight in weights]
        for num_tokens in map(int, options.tokens.split(",")):
            x = torch.randn(num_tokens, COLS)
            native = shortest([partial(project, x) for project in projections])
            plain = shortest([partial(product, x, weight) for weight in weights])
            rate = num_bytes / native
            print(
                f"{layout:18} {num_tokens:6} {native * 1e6:10.0f} {plain * 1e6:10.0f} {plain / native:6.1f} "
                f"{rate / 1e9:6.1f} {rate / bandwidth:9.0%}",
                flush=True,
            )
    return 0


def make_weights(layout: str) -> list[Weight]:
    """Weights of random bytes, more than the caches hold."""
    import torch

    from preload.engine.layers.weights import Weight
    from preload.engine.loading.gguf_types import BLOCK_TYPES
    from preload.engine.quantization import int4_group32, int8_per_channel

    if layout.startswith("gguf."):
        kind = BLOCK_TYPES[layout.removeprefix("gguf.")]
        row_bytes = COLS // kind.block_size * kind.block_bytes
        parts = {"weight": torch.randint(0, 60, (ROWS, row_bytes), dtype=torch.uint8)}  # halves stay finite
    elif layout.startswith("dense."):
        parts = {"weight": torch.randn(ROWS, COLS).to(getattr(torch, layout.removeprefix("dense.")))}
        layout = "dense"
    else:
        module = {"int8_per_channel": int8_per_channel, "int4_group32": int4_group32}[layout]
        parts = module.quantize(torch.randn(ROWS, COLS))
    count = -(-TOTAL_BYTES // sum(part.nbytes for part in parts.values()))
    return [Weight("w", layout, {name: part.clone() for name, part in parts.items()}) for _ in range(count)]


def shortest(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of the fastest call, going round until the time is used up, and at least once."""
    best, deadline = float("inf"), time.perf_counter() + BUDGET_S
    for _ in range(1000):
        for call in calls:
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
            if time.perf_counter() > deadline:
                return best
    return best


def read_bandwidth() -> float:
    """Bytes per second of a sum over more memory than the caches hold."""
    import torch

    memory = torch.zeros(TOTAL_BYTES // 2)
    return memory.nbytes / shortest([memory.sum])


if __name__ == "__main__":
    raise SystemExit(main())
