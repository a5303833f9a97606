"""What a replay measured: percentiles, goodput against objectives, prefix hits, errors; as JSON and as a table.

Pure. A request counts for the latencies only when it came to its whole answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LATENCIES = {"ttft_s": "first token", "tpot_s": "time per output token", "e2e_s": "whole answer"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it; all times count from the moment it was sent.

    `held_s`: how long it was sent after its time, for want of a free slot or of CPU. `error` is the kind of its
    failure, `detail` the text. `tpot_s` is None for answers of one token. `cached_tokens` is None where the server
    does not tell.
    """

    number: int
    held_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    prefill: str = ""
    decode: str = ""
    attempts: int | None = None
    error: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Slo:
    """The objectives that a good answer meets, in seconds; None is no objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met_by(self, sample: Sample) -> bool:
        if sample.error is not None:
            return False
        return _within(sample.ttft_s, self.ttft_s) and _within(sample.tpot_s, self.tpot_s)


def percentile(values: Sequence[float], quantile: float) -> float:
    """The value at `quantile` (0 to 1), linear between neighbours, as numpy's default; `values` need not be sorted."""
    ordered = sorted(values)
    at = quantile * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None of nothing."""
    if not values:
        return None
    quantiles = {name: percentile(values, quantile) for name, quantile in _QUANTILES.items()}
    return {"mean": sum(values) / len(values), **quantiles, "max": max(values)}


def summarise(samples: Sequence[Sample], slo: Slo, duration_s: float) -> dict[str, Any]:
    """The report as one JSON object; units are in its names. `duration_s` is the length of the whole run."""
    whole = [sample for sample in samples if sample.error is None]
    latencies = {name: spread(_known(getattr(sample, name) for sample in whole)) for name in _LATENCIES}
    return {
        "duration_s": duration_s,
        "requests": {
            "sent": len(samples),
            "completed": len(whole),
            "failed": len(samples) - len(whole),
            "completed_per_s": len(whole) / duration_s,
        },
        **latencies,
        "held_s": spread([sample.held_s for sample in samples]),
        "goodput": _goodput(samples, slo, duration_s),
        "tokens": _tokens(whole, duration_s),
        "errors": _errors(samples),
        "placement": {
            "prefill": _counts(sample.prefill for sample in samples),
            "decode": _counts(sample.decode for sample in samples),
            "attempts": _counts(str(sample.attempts or "") for sample in samples),
        },
    }


def table(report: dict[str, Any]) -> Table:
    """The report for a human; times in milliseconds."""
    requests, tokens, goodput = report["requests"], report["tokens"], report["goodput"]
    shown = Table(title=f"{requests['sent']} requests in {report['duration_s']:.1f} s", title_justify="left")
    shown.add_column("")
    for name in ("mean", *_QUANTILES, "max"):
        shown.add_column(name, justify="right")
    for name, title in _LATENCIES.items():
        if report[name] is not None:
            shown.add_row(f"{title}, ms", *(f"{value * 1e3:,.1f}" for value in report[name].values()))
    shown.add_section()
    shown.add_row("completed", f"{requests['completed']:,}", f"{requests['completed_per_s']:.2f}/s")
    shown.add_row("good", f"{goodput['requests']:,}", f"{goodput['requests_per_s']:.2f}/s", f"{goodput['ratio']:.1%}")
    shown.add_row("output tokens", f"{tokens['output']:,}", f"{tokens['output_per_s']:,.0f}/s")
    hits = "not told" if tokens["prefix_hit_ratio"] is None else f"{tokens['prefix_hit_ratio']:.1%}"
    shown.add_row("prefix hits", hits)
    _add_counts(shown, report)
    return shown


def _add_counts(shown: Table, report: dict[str, Any]) -> None:
    for role, counts in report["placement"].items():
        if counts:
            shown.add_section()
        for name, count in counts.items():
            shown.add_row(f"{role} {name}", f"{count:,}")
    if report["errors"]:
        shown.add_section()
    for error in report["errors"]:
        shown.add_row(f"error {error['kind']}: {error['example']}"[:70], f"{error['count']:,}")


def _goodput(samples: Sequence[Sample], slo: Slo, duration_s: float) -> dict[str, Any]:
    good = sum(slo.met_by(sample) for sample in samples)
    return {
        "slo_ttft_s": slo.ttft_s,
        "slo_tpot_s": slo.tpot_s,
        "requests": good,
        "requests_per_s": good / duration_s,
        "ratio": good / len(samples) if samples else 0.0,
    }


def _tokens(whole: Sequence[Sample], duration_s: float) -> dict[str, Any]:
    telling = [sample for sample in whole if sample.cached_tokens is not None]
    told_prompt = sum(sample.prompt_tokens for sample in telling)
    cached = sum(sample.cached_tokens or 0 for sample in telling)
    output = sum(sample.output_tokens for sample in whole)
    prompt = sum(sample.prompt_tokens for sample in whole)
    return {
        "prompt": prompt,
        "cached": cached,
        "output": output,
        "prompt_per_s": prompt / duration_s,
        "output_per_s": output / duration_s,
        "prefix_hit_ratio": cached / told_prompt if told_prompt else None,
    }


def _errors(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    counts = Counter(sample.error for sample in samples if sample.error is not None)
    examples = {sample.error: sample.detail for sample in reversed(samples)}
    return [{"kind": kind, "count": count, "example": examples[kind]} for kind, count in counts.most_common()]


def _counts(names: Any) -> dict[str, int]:
    return dict(sorted(Counter(name for name in names if name).items()))


def _known(values: Any) -> list[float]:
    return [value for value in values if value is not None]


def _within(value: float | None, objective: float | None) -> bool:
    return value is None or objective is None or value <= objective
