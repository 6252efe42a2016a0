"""What the frontend counts. Prometheus' library only writes the text, and is imported when somebody asks for it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Number:
    """A counter, or a gauge."""

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        self.value -= amount

    def set(self, value: float) -> None:
        self.value = value


class Histogram:
    """How many observations were at most each of `bounds`, and above the last one; and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """One instance per process. What each is called and means stands in exposition.py."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """By endpoint and status."""
        self.in_flight = Number()
        self.queued = Number()
        self.prompt_tokens = Number()
        self.cached_prompt_tokens = Number()
        self.output_tokens = Number()
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        self.inter_token_s = Histogram(_INTER_TOKEN_S)
        self.drafted_tokens: Counter[int] = Counter()
        self.accepted_tokens: Counter[int] = Counter()
        """Both by position in a draft, from 0."""
        self.core_restarts = Number()
        self.resubmissions = Number()
        self.core_ready = Number()

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """A core has verified so many guesses of a sequence, and kept the first of them."""
        for position in range(num_drafted):
            self.drafted_tokens[position] += 1
            self.accepted_tokens[position] += position < num_accepted

    def render(self) -> bytes:
        """The text for /metrics."""
        from .exposition import render

        return render(self)
