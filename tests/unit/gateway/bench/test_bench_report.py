"""The numbers of a report, against known values."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gateway.bench.report import Sample, Slo, percentile, spread, summarise, table

GOOD = Sample(
    0, 0.0, ttft_s=0.1, tpot_s=0.01, e2e_s=0.2, prompt_tokens=100, cached_tokens=60, output_tokens=11,
    prefill="http://p0", decode="http://d0", attempts=1,
)  # fmt: skip
SLOW = Sample(
    1, 0.5, ttft_s=0.3, tpot_s=0.03, e2e_s=0.8, prompt_tokens=300, cached_tokens=0, output_tokens=9,
    prefill="http://p0", decode="http://d1", attempts=2,
)  # fmt: skip
LOST = Sample(2, 0.0, ttft_s=0.01, output_tokens=5, error="reset", detail="connection lost")
SLO = Slo(ttft_s=0.2, tpot_s=0.02)


def test_percentiles_of_a_hundred() -> None:
    values = [float(value) for value in range(100, -1, -1)]
    assert [percentile(values, quantile) for quantile in (0.0, 0.5, 0.9, 0.99, 1.0)] == [0.0, 50.0, 90.0, 99.0, 100.0]


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentile(values, 0.5) == pytest.approx(statistics.median(values))
    for quantile in (0.5, 0.9, 0.99):
        assert percentile(values, quantile) == pytest.approx(cuts[round(quantile * 100) - 1])


def test_spread() -> None:
    assert spread([]) is None
    assert spread([2.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}


def test_summary() -> None:
    report = summarise([GOOD, SLOW, LOST], SLO, duration_s=2.0)
    assert report["requests"] == {"sent": 3, "completed": 2, "failed": 1, "completed_per_s": 1.0}
    assert report["ttft_s"]["mean"] == pytest.approx(0.2)
    assert report["e2e_s"]["max"] == 0.8
    assert report["held_s"]["max"] == 0.5
    assert report["goodput"] == {
        "slo_ttft_s": 0.2,
        "slo_tpot_s": 0.02,
        "requests": 1,
        "requests_per_s": 0.5,
        "ratio": pytest.approx(1 / 3),
    }
    assert report["tokens"] == {
        "prompt": 400,
        "cached": 60,
        "output": 20,
        "prompt_per_s": 200.0,
        "output_per_s": 10.0,
        "prefix_hit_ratio": 0.15,
    }
    assert report["errors"] == [{"kind": "reset", "count": 1, "example": "connection lost"}]
    assert report["placement"] == {
        "prefill": {"http://p0": 2},
        "decode": {"http://d0": 1, "http://d1": 1},
        "attempts": {"1": 1, "2": 1},
    }


def test_hit_ratio_only_of_those_who_tell() -> None:
    silent = Sample(3, 0.0, prompt_tokens=1000)
    assert summarise([GOOD, silent], SLO, 1.0)["tokens"]["prefix_hit_ratio"] == 0.6
    assert summarise([silent], SLO, 1.0)["tokens"]["prefix_hit_ratio"] is None


def test_without_objectives_every_whole_answer_is_good() -> None:
    assert summarise([GOOD, SLOW, LOST], Slo(), 1.0)["goodput"]["requests"] == 2


def test_nothing_completed() -> None:
    report = summarise([LOST], SLO, 1.0)
    assert report["ttft_s"] is None
    assert report["goodput"]["ratio"] == 0.0
    assert shown(report)


def test_one_example_an_error_kind_the_first() -> None:
    other = Sample(4, 0.0, error="status_503", detail="down")
    again = Sample(5, 0.0, error="reset", detail="later")
    assert summarise([LOST, other, again], SLO, 1.0)["errors"] == [
        {"kind": "reset", "count": 2, "example": "connection lost"},
        {"kind": "status_503", "count": 1, "example": "down"},
    ]


def test_table() -> None:
    text = shown(summarise([GOOD, SLOW, LOST], SLO, 2.0))
    for part in ("3 requests in 2.0 s", "first token, ms", "200.0", "prefix hits", "15.0%", "http://d1", "reset"):
        assert part in text


def shown(report: dict) -> str:
    console = Console(width=120, record=True, quiet=True)
    console.print(table(report))
    with console.capture() as capture:
        console.quiet = False
        console.print(table(report))
    return capture.get()
