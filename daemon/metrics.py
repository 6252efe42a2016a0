"""Prometheus metrics of the daemon. Residents and leases are read from the cache when scraped; events are counted."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from .cache import WeightCache
from .errors import CacheError
from .generations import State


class Metrics:
    """One registry per daemon, so that a test can run two."""

    def __init__(self, cache: WeightCache) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_CacheCollector(cache))
        self._loads = Counter("preload_loads", "Loads by result", ["result"], registry=self.registry)
        self._failures = Counter(
            "preload_load_failures", "Failed loads by reason", ["reason"], registry=self.registry
        )
        self._attach_s = Histogram(
            "preload_attach_seconds",
            "Time from an Attach request to its answer, in seconds",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 30),
            registry=self.registry,
        )
        self._attaches = Counter("preload_attaches", "Leases granted", registry=self.registry)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Counts its body as one load."""
        try:
            yield
        except CacheError as error:
            self._loads.labels("failed").inc()
            self._failures.labels(error.reason).inc()
            raise
        self._loads.labels("ok").inc()

    def attached(self, seconds: float) -> None:
        self._attaches.inc()
        self._attach_s.observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _CacheCollector:
    """Gauges of what is resident now."""

    def __init__(self, cache: WeightCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        cache = self._cache
        states = Tally(generation.state for generation in cache.catalog)
        generations = GaugeMetricFamily("preload_generations", "Generations by state", labels=["state"])
        for state in State:
            generations.add_metric([state.value], states[state])
        yield generations
        resident = GaugeMetricFamily(
            "preload_generation_bytes", "Resident bytes of a generation", labels=["generation", "path"]
        )
        for generation in cache.catalog:
            if generation.segments:
                path = min((s.path for s in cache.catalog.sources(generation)), default="")
                resident.add_metric([generation.id[:12], path], generation.resident_bytes)
        yield resident
        device = cache.ledger.device
        for name, value, text in (
            ("preload_device_capacity_bytes", cache.ledger.capacity_bytes, "Bytes allowed for weights"),
            ("preload_device_resident_bytes", cache.ledger.resident_bytes, "Bytes of weights resident"),
            (
                "preload_device_reserved_bytes",
                cache.ledger.reserved_bytes,
                "Bytes promised to loads under way",
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["device"])
            gauge.add_metric([device], value)
            yield gauge
        yield GaugeMetricFamily("preload_leases", "Live leases", value=len(cache.leases.all()))
        yield GaugeMetricFamily("preload_epoch", "Lives of the daemon so far", value=cache.epoch)
