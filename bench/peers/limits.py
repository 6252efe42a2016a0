"""What the machine can do at most: bytes read and products computed in a second, by all cores.

    python -m preload.bench.peers.limits WEIGHT_BYTES

A process of its own, so that torch and its threads are not in the load generator. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MEMORY_BYTES = 2 << 30
"""More than a cache holds: some have half a gigabyte."""
_PRODUCT = 1024
_BUDGET_S = 1.0


def measure(weight_bytes: int) -> dict[str, Any]:
    """`memory_bytes_per_s` of a buffer that no cache holds, `weights_bytes_per_s` of one that is as large as the
    weights, read again and again as decoding does, and `flops_per_s` of a float32 product."""
    words = [sys.executable, "-P", "-m", "preload.bench.peers.limits", str(weight_bytes)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    import torch

    num_threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    figures: dict[str, Any] = {"num_threads": num_threads}
    for name, num_bytes in (("memory", MEMORY_BYTES), ("weights", int(sys.argv[1]))):
        buffer = torch.ones(num_bytes // 8, dtype=torch.int64)
        figures[f"{name}_bytes_per_s"] = round(buffer.nbytes / _shortest_s(buffer.sum))
        del buffer
    x, y = torch.ones(_PRODUCT, _PRODUCT), torch.ones(_PRODUCT, _PRODUCT)
    figures["flops_per_s"] = round(2 * _PRODUCT**3 / _shortest_s(lambda: x @ y))
    print(json.dumps(figures))
    return 0


def _shortest_s(call: Callable[[], object]) -> float:
    """Of a second of calls, and at least two: the first may have something to set up."""
    best, deadline_s, count = float("inf"), time.perf_counter() + _BUDGET_S, 0
    while count < 2 or time.perf_counter() < deadline_s:
        start_s = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start_s)
        count += 1
    return best


if __name__ == "__main__":
    raise SystemExit(main())
