"""Hangs: a core that has work and makes no step, or that does not answer at all.

A look at the counters a few times per deadline. Steps advance while a long prompt is computed too, since a step is
bounded by the token budget; so the deadline has to allow for one step only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .core_client import CoreCallError, CoreSession

_MAX_INTERVAL_S = 2.0
_LATE_S = 1.0


async def watch(session: CoreSession, has_work: Callable[[], bool], timeout_s: float) -> str:
    """Returns, with the reason, when `timeout_s` have passed without a sign of progress; else it goes on for ever.

    A sign is an answer by a core that has no work, or by one whose steps have grown."""
    interval_s = min(_MAX_INTERVAL_S, timeout_s / 4)
    num_steps = -1
    last_sign = time.monotonic()
    while True:
        asleep = time.monotonic()
        await asyncio.sleep(interval_s)
        if time.monotonic() - asleep > interval_s + _LATE_S:
            last_sign = time.monotonic()  # it was this process that stood still
        try:
            stats = await session.stats(interval_s)
        except CoreCallError:
            answered = False
        else:
            answered = True
            if stats.num_steps != num_steps or not has_work():
                num_steps = stats.num_steps
                last_sign = time.monotonic()
        if time.monotonic() - last_sign > timeout_s:
            return f"it made no step in {timeout_s:g} s" if answered else f"it did not answer for {timeout_s:g} s"
