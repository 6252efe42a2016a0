"""What the daemon counts about itself. Plain numbers: how Prometheus wants them written is exposition.py's, which is
imported when somebody asks first, because a daemon must be back before anybody scrapes it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .cache import WeightCache
from .errors import CacheError

ATTACH_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 30)


class Metrics:
    """Counts events; what is resident now is read from the cache when it is asked for."""

    def __init__(self, cache: WeightCache) -> None:
        self.cache = cache
        self.loads: Counter[str] = Counter()
        self.load_failures: Counter[str] = Counter()
        self.num_attaches = 0
        self.attach_s = 0.0
        self.attach_buckets = [0] * (len(ATTACH_BUCKETS_S) + 1)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Counts its body as one load."""
        try:
            yield
        except CacheError as error:
            self.loads["failed"] += 1
            self.load_failures[error.reason] += 1
            raise
        self.loads["ok"] += 1

    def attached(self, seconds: float) -> None:
        self.num_attaches += 1
        self.attach_s += seconds
        self.attach_buckets[bisect_left(ATTACH_BUCKETS_S, seconds)] += 1

    def render(self) -> bytes:
        from .exposition import render

        return render(self)
