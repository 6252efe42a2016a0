"""What the frontend counts, in Prometheus' format. Its own registry, so that nothing else mixes in."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """One instance per process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "preload_frontend_requests",
            "HTTP requests answered, by endpoint and status",
            ("endpoint", "status"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "preload_frontend_in_flight", "Sequences handed to the core or waiting for one", registry=registry
        )
        self.queued = Gauge("preload_frontend_queued", "Sequences that wait to be admitted", registry=registry)
        self.prompt_tokens = Counter("preload_frontend_prompt_tokens", "Prompt tokens", registry=registry)
        self.output_tokens = Counter("preload_frontend_output_tokens", "Tokens sampled", registry=registry)
        self.first_token_s = Histogram(
            "preload_frontend_first_token_seconds",
            "From the arrival of a request to the first token of each sequence",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.inter_token_s = Histogram(
            "preload_frontend_inter_token_seconds",
            "Between tokens of a sequence, pauses by dead cores included",
            buckets=_INTER_TOKEN_S,
            registry=registry,
        )
        self.core_restarts = Counter(
            "preload_frontend_core_restarts", "Cores started to replace a dead one", registry=registry
        )
        self.resubmissions = Counter(
            "preload_frontend_resubmissions", "Sequences handed to a core after another died", registry=registry
        )
        self.core_ready = Gauge(
            "preload_frontend_core_ready", "Cores that serve: one, two during an update", registry=registry
        )

    def render(self) -> bytes:
        """The text for /metrics."""
        return generate_latest(self._registry)
