"""Every metric, declared once, and the one log line of a request.

Prometheus text at `/metrics`. Gauges over the fleet are computed when they are scraped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.types import EngineId, Outcome
from failover.deadlines import Deadline

_log = logging.getLogger("pdgate.request")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

FleetGauges = Callable[[], Iterable[tuple[str, str, dict[str, str], float]]]
"""Gives (metric name, help, labels, value) at scrape time."""


class Metrics:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._requests = Counter(
            "pdgate_requests", "Requests by endpoint and final HTTP status", ["api", "status"], registry=registry
        )
        self._attempts = Counter("pdgate_attempts", "Attempts, by how they ended", ["result"], registry=registry)
        self._leg_failures = Counter(
            "pdgate_leg_failures", "Failed legs, by engine", ["engine", "leg", "kind", "stage"], registry=registry
        )
        self._deadlines = Counter(
            "pdgate_deadlines_passed", "Deadlines that passed, by stage", ["stage"], registry=registry
        )
        self._retries = Counter(
            "pdgate_retries",
            "Further attempts that could be made, by whether the budget of all requests allowed it",
            ["result"],
            registry=registry,
        )
        self._continued = Counter(
            "pdgate_continuations",
            "Broken streams, by how they went on, and whether they could",
            ["mode", "result"],
            registry=registry,
        )
        self._chat_routes = Counter(
            "pdgate_chat_streams", "Streamed chats, by how engines were asked for them", ["route"], registry=registry
        )
        self._own_faults = Counter(
            "pdgate_own_faults", "Engine answers that mean a fault of the gateway", registry=registry
        )
        self._first_output = Histogram(
            "pdgate_time_to_first_output_seconds", "Arrival to first output", registry=registry, buckets=_SECONDS
        )
        self._queue_wait = Histogram(
            "pdgate_queue_wait_seconds", "Arrival to decision", registry=registry, buckets=_SECONDS
        )
        self._release = Histogram(
            "pdgate_release_seconds",
            "Until both legs of an abandoned attempt ended",
            registry=registry,
            buckets=_SECONDS,
        )
        self._aborts = Counter("pdgate_aborts_posted", "Aborts posted to engines", registry=registry)
        self._hit_error = Gauge(
            "pdgate_prefix_hit_error_tokens",
            "Predicted minus reported cached tokens of the last request, by prefill",
            ["engine"],
            registry=registry,
        )
        self._cached = Counter("pdgate_cached_tokens", "Prompt tokens that engines found cached", registry=registry)
        self._prompt = Counter("pdgate_prompt_tokens", "Prompt tokens of whole answers", registry=registry)
        self._completion = Counter("pdgate_completion_tokens", "Output tokens of whole answers", registry=registry)

    def add_fleet(self, gauges: FleetGauges) -> None:
        """Let gauges over the fleet be computed at each scrape."""
        self._registry.register(_FleetCollector(gauges))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def decided(self, waited_s: float) -> None:
        self._queue_wait.observe(waited_s)

    def first_output(self, seconds: float) -> None:
        self._first_output.observe(seconds)

    def attempt(self, result: str) -> None:
        self._attempts.labels(result).inc()

    def deadline_passed(self, deadline: Deadline) -> None:
        self._deadlines.labels(deadline).inc()

    def retried(self, *, allowed: bool) -> None:
        self._retries.labels("allowed" if allowed else "refused").inc()

    def continued(self, mode: str, result: str) -> None:
        self._continued.labels(mode, result).inc()

    def chat_route(self, *, exact: bool) -> None:
        self._chat_routes.labels("exact" if exact else "plain").inc()

    def own_fault(self) -> None:
        self._own_faults.inc()

    def leg_failed(self, outcome: Outcome) -> None:
        self._leg_failures.labels(outcome.engine_id, outcome.leg, outcome.kind, outcome.stage).inc()

    def released(self, seconds: float, aborts: int) -> None:
        self._release.observe(seconds)
        self._aborts.inc(aborts)

    def hit(self, prefill: EngineId, predicted_tokens: int, reported_tokens: int) -> None:
        self._hit_error.labels(prefill).set(predicted_tokens - reported_tokens)
        self._cached.inc(reported_tokens)

    def answered(self, prompt_tokens: int, completion_tokens: int) -> None:
        self._prompt.inc(prompt_tokens)
        self._completion.inc(completion_tokens)

    def request(self, api: str, status: int) -> None:
        self._requests.labels(api, str(status)).inc()


def log_request(
    request_id: str, api: str, status: int, seconds: float, attempts: int, pair: tuple[str, str] | None, error: str
) -> None:
    """The one line of a request, as key=value; a warning when it is no fault of its client that it failed."""
    where = f" prefill={pair[0]} decode={pair[1]}" if pair else ""
    why = f" error={error!r}" if error else ""
    failed = bool(error) and (status >= 500 or status == 200)
    _log.log(
        logging.WARNING if failed else logging.INFO,
        "id=%s api=%s status=%d s=%.3f attempts=%d%s%s",
        request_id,
        api,
        status,
        seconds,
        attempts,
        where,
        why,
    )


class _FleetCollector(Collector):
    def __init__(self, gauges: FleetGauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, text, labels, value in self._gauges():
            family = families.setdefault(name, GaugeMetricFamily(name, text, labels=tuple(labels)))
            family.add_metric(tuple(labels.values()), value)
        yield from families.values()
