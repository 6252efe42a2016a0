"""The frontend's metrics as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from .metrics import Histogram, Metrics


def render(metrics: Metrics) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        requests = CounterMetricFamily(
            "preload_frontend_requests",
            "HTTP requests answered, by endpoint and status",
            labels=["endpoint", "status"],
        )
        for labels, count in sorted(metrics.requests.items()):
            requests.add_metric(labels, count)
        yield requests
        for name, text, number in (
            ("prompt_tokens", "Prompt tokens", metrics.prompt_tokens),
            ("cached_prompt_tokens", "Of these, those found in a core's KV cache", metrics.cached_prompt_tokens),
            ("output_tokens", "Tokens sampled", metrics.output_tokens),
            ("core_restarts", "Cores started to replace a dead one", metrics.core_restarts),
            ("resubmissions", "Sequences handed to a core after another died", metrics.resubmissions),
        ):
            yield CounterMetricFamily(f"preload_frontend_{name}", text, value=number.value)
        for name, text, counts in (
            ("drafted_tokens", "Tokens guessed and verified, by position in their draft", metrics.drafted_tokens),
            ("accepted_tokens", "Of these, those that were kept", metrics.accepted_tokens),
        ):
            family = CounterMetricFamily(f"preload_frontend_{name}", text, labels=["position"])
            for position, count in sorted(counts.items()):
                family.add_metric([str(position)], count)
            yield family
        for name, text, number in (
            ("in_flight", "Sequences handed to the core or waiting for one", metrics.in_flight),
            ("queued", "Sequences that wait to be admitted", metrics.queued),
            ("core_ready", "Cores that serve: one, two during an update", metrics.core_ready),
        ):
            yield GaugeMetricFamily(f"preload_frontend_{name}", text, value=number.value)
        yield _histogram(
            "preload_frontend_first_token_seconds",
            "From the arrival of a request to the first token of each sequence",
            metrics.first_token_s,
        )
        yield _histogram(
            "preload_frontend_inter_token_seconds",
            "Between tokens of a sequence, pauses by dead cores included",
            metrics.inter_token_s,
        )


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.sum)
