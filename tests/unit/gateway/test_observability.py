"""Metrics and the log line: each counted under its own name, gauges taken when asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engines.types import EngineId, FailureKind, Leg, Outcome, Stage
from failover.deadlines import Deadline
from gateway.observability import Metrics, log_request

Gauge = tuple[str, str, dict[str, str], float]
P = EngineId("http://p0")


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(metrics.text().decode())
    found = [each for family in families for each in family.samples]
    return {(each.name, tuple(sorted(each.labels.values()))): each.value for each in found}


def test_everything_told_is_counted() -> None:
    metrics = Metrics()
    metrics.request("/generate", 200)
    metrics.request("/generate", 200)
    metrics.request("/generate", 429)
    metrics.attempt("whole")
    metrics.own_fault()
    metrics.deadline_passed(Deadline.STALL)
    metrics.retried(allowed=True)
    metrics.retried(allowed=False)
    metrics.retried(allowed=False)
    metrics.leg_failed(Outcome(P, Leg.PREFILL, FailureKind.RESET, Stage.DISPATCHED, "x"))
    metrics.first_output(0.3)
    metrics.decided(0.002)
    metrics.released(0.1, 3)
    metrics.answered(100, 20)
    found = samples(metrics)
    assert found["pdgate_requests_total", ("/generate", "200")] == 2
    assert found["pdgate_requests_total", ("/generate", "429")] == 1
    assert found["pdgate_attempts_total", ("whole",)] == 1
    assert found["pdgate_own_faults_total", ()] == 1
    assert found["pdgate_deadlines_passed_total", ("stall",)] == 1
    assert found["pdgate_retries_total", ("allowed",)] == 1
    assert found["pdgate_retries_total", ("refused",)] == 2
    assert found["pdgate_leg_failures_total", ("dispatched", "http://p0", "prefill", "reset")] == 1
    assert found["pdgate_time_to_first_output_seconds_sum", ()] == 0.3
    assert found["pdgate_queue_wait_seconds_bucket", ("0.005",)] == 1
    assert (found["pdgate_release_seconds_count", ()], found["pdgate_aborts_posted_total", ()]) == (1, 3)
    assert (found["pdgate_prompt_tokens_total", ()], found["pdgate_completion_tokens_total", ()]) == (100, 20)


def test_the_error_of_a_predicted_hit_is_signed() -> None:
    metrics = Metrics()
    metrics.hit(P, 50, 80)
    found = samples(metrics)
    assert found["pdgate_prefix_hit_error_tokens", ("http://p0",)] == -30
    assert found["pdgate_cached_tokens_total", ()] == 80


def test_gauges_of_the_fleet_are_taken_at_each_scrape() -> None:
    value = 1.0

    def gauges() -> Iterable[Gauge]:
        yield "pdgate_a", "A", {"engine": "p0"}, value
        yield "pdgate_a", "A", {"engine": "p1"}, 7.0
        yield "pdgate_b", "B", {}, float("nan")

    metrics = Metrics()
    metrics.add_fleet(gauges)
    value = 2.0
    found = samples(metrics)
    assert (found["pdgate_a", ("p0",)], found["pdgate_a", ("p1",)]) == (2.0, 7.0)
    assert found["pdgate_b", ()] != found["pdgate_b", ()], "NaN means unknown"


def test_two_gateways_of_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.own_fault()
    assert samples(other)["pdgate_own_faults_total", ()] == 0


def test_a_request_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdgate.request"):
        log_request("r1", "/generate", 200, 1.23456, 2, ("p0", "d0"), "")
        log_request("r2", "/generate", 502, 0.1, 0, None, "two\nlines")
    assert caplog.messages == [
        "id=r1 api=/generate status=200 s=1.235 attempts=2 prefill=p0 decode=d0",
        "id=r2 api=/generate status=502 s=0.100 attempts=0 error='two\\nlines'",
    ]
