"""Percentiles, and what a figure was measured on."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summary_ms(seconds: Sequence[float]) -> dict[str, float | int]:
    """p50, p99, minimum and count of durations in seconds, in milliseconds."""
    return {
        "p50_ms": round(statistics.median(seconds) * 1000, 3),
        "p99_ms": round(percentile(seconds, 99) * 1000, 3),
        "min_ms": round(min(seconds) * 1000, 3),
        "n": len(seconds),
    }


def machine() -> dict[str, Any]:
    """The machine a figure belongs to."""
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
