"""The daemon's metrics as Prometheus reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from .generations import State
from .metrics import ATTACH_BUCKETS_S, Metrics


def render(metrics: Metrics) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._events()
        yield from self._generations()
        yield from self._device()
        cache = self._metrics.cache
        yield GaugeMetricFamily("preload_leases", "Live leases", value=len(cache.leases.all()))
        yield GaugeMetricFamily("preload_epoch", "Lives of the daemon so far", value=cache.epoch)

    def _events(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _counter("preload_loads", "Loads by result", "result", metrics.loads)
        yield _counter("preload_load_failures", "Failed loads by reason", "reason", metrics.load_failures)
        bounds = [*(str(float(bound)) for bound in ATTACH_BUCKETS_S), "+Inf"]
        yield HistogramMetricFamily(
            "preload_attach_seconds",
            "Time from an Attach request to its answer, in seconds",
            buckets=list(zip(bounds, accumulate(metrics.attach_buckets), strict=True)),
            sum_value=metrics.attach_s,
        )
        yield CounterMetricFamily("preload_attaches", "Leases granted", value=metrics.num_attaches)

    def _generations(self) -> Iterator[Metric]:
        catalog = self._metrics.cache.catalog
        states = Counter(generation.state for generation in catalog)
        generations = GaugeMetricFamily("preload_generations", "Generations by state", labels=["state"])
        for state in State:
            generations.add_metric([state.value], states[state])
        yield generations
        resident = GaugeMetricFamily(
            "preload_generation_bytes", "Resident bytes of a generation", labels=["generation", "path"]
        )
        for generation in catalog:
            if generation.segments:
                path = min((s.path for s in catalog.sources(generation)), default="")
                resident.add_metric([generation.id[:12], path], generation.resident_bytes)
        yield resident

    def _device(self) -> Iterator[Metric]:
        ledgers = [device.ledger for device in self._metrics.cache.devices]
        for what, text in (
            ("capacity_bytes", "Bytes allowed for weights"),
            ("resident_bytes", "Bytes of weights resident"),
            ("reserved_bytes", "Bytes promised to loads under way"),
        ):
            gauge = GaugeMetricFamily(f"preload_device_{what}", text, labels=["device"])
            for ledger in ledgers:
                gauge.add_metric([ledger.device], getattr(ledger, what))
            yield gauge


def _counter(name: str, text: str, label: str, counts: Counter[str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
