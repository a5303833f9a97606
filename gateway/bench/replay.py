"""`pdgate replay`: sends a trace to a server with the OpenAI chat wire, and reports what its clients saw.

Shell: reads the trace, shows progress on standard error, prints the report on standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engines.errors import UpstreamError
from engines.upstream import Upstream
from gateway.bench.load import LoadPlan, replay
from gateway.bench.prompts import PromptScale
from gateway.bench.report import Sample, Slo, summarise, table
from gateway.bench.trace import TraceError, TraceRequest, read_trace

_HELD_WORTH_A_WARNING_S = 0.1


class UsageError(Exception):
    """The command cannot be run as given; the message names the flag and the fix."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `pdgate replay`."""
    above_zero, count = _number(float), _number(int)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="Mooncake JSON lines or Azure CSV")
    parser.add_argument("--url", type=_base_url, required=True, help="the server, as in http://127.0.0.1:30000")
    parser.add_argument("--model", help="name of the model (default: the first that the server lists)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--limit", type=count, metavar="N", help="replay the first N requests only")
    parser.add_argument("--rate-scale", type=above_zero, default=1.0, metavar="X", help="send X times as fast")
    parser.add_argument(
        "--text-scale", type=above_zero, default=1.0, metavar="X", help="make all texts X times as long"
    )
    parser.add_argument(
        "--bytes-per-token",
        type=above_zero,
        default=1.0,
        metavar="X",
        help="length of a prompt token: 1 for emulated servers (default), about 4 for real ones",
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other prompts, hence cold caches")
    parser.add_argument("--max-in-flight", type=count, default=4096, metavar="N", help="hold back more than N at once")
    parser.add_argument("--timeout-s", type=above_zero, default=600.0, metavar="S", help="for each whole answer")
    parser.add_argument("--slo-ttft-s", type=above_zero, metavar="S", help="a good answer's first token comes by then")
    parser.add_argument("--slo-tpot-s", type=above_zero, metavar="S", help="a good answer's tokens follow within this")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON report to FILE as well")


def run(args: argparse.Namespace) -> int:
    """Replay and report: 0 when every request completed, 1 when some failed, 2 when it could not be run."""
    try:
        scale = _scale(args)
        trace = _read(args.trace, args.limit)
        _check_writable(args.out)
        report = asyncio.run(_replay(args, scale, trace))
    except (UsageError, TraceError) as error:
        print(f"pdgate replay: error: {error}", file=sys.stderr)
        return 2
    _write(report, args)
    return 1 if report["errors"] else 0


async def _replay(args: argparse.Namespace, scale: PromptScale, trace: list[TraceRequest]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    model = args.model or await _first_model(args.url, headers)
    plan = LoadPlan(args.url, model, headers, scale, args.rate_scale, args.max_in_flight, args.timeout_s)
    with _progress() as bar:
        task = bar.add_task("replay", total=len(trace), failed=0)
        failed = 0

        def on_end(sample: Sample) -> None:
            nonlocal failed
            failed += sample.error is not None
            bar.update(task, advance=1, failed=failed)

        samples, duration_s = await replay(trace, plan, on_end)
    settings = {
        "trace": str(args.trace),
        "url": args.url,
        "model": model,
        "rate_scale": args.rate_scale,
        "text_scale": args.text_scale,
        "bytes_per_token": args.bytes_per_token,
        "seed": args.seed,
        "max_in_flight": args.max_in_flight,
    }
    slo = Slo(args.slo_ttft_s, args.slo_tpot_s)
    return {"settings": settings, **summarise(samples, slo, duration_s)}


async def _first_model(base_url: str, headers: dict[str, str]) -> str:
    upstream = Upstream()
    await upstream.start()
    try:
        reply = await upstream.fetch("GET", f"{base_url}/v1/models", headers=headers, timeout_s=10)
        return str(orjson.loads(reply.body)["data"][0]["id"])
    except UpstreamError as error:
        raise UsageError(f"--url: no server answers: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"--model: {base_url}/v1/models names none (status {reply.status}): give one") from error
    finally:
        await upstream.close()


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def _write(report: dict[str, Any], args: argparse.Namespace) -> None:
    text = json.dumps(report, indent=2)
    if args.out is not None:
        args.out.write_text(f"{text}\n", encoding="utf-8")
    if args.json:
        print(text)
    else:
        Console().print(table(report))
    if report["held_s"]["p99"] > _HELD_WORTH_A_WARNING_S:
        print(
            f"pdgate replay: 1 % of the requests went out {report['held_s']['p99']:.2f} s late or later: "
            "raise --max-in-flight or lower --rate-scale",
            file=sys.stderr,
        )


def _scale(args: argparse.Namespace) -> PromptScale:
    try:
        return PromptScale(args.text_scale, args.bytes_per_token, args.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _read(path: Path, limit: int | None) -> list[TraceRequest]:
    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(lines, str(path), limit)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace: {path}: {error}") from error


def _check_writable(path: Path | None) -> None:
    # Before the run: a long one must not end with nowhere to write to.
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"--out: {path.parent} is not a directory: make it first")


def _base_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"expected http://host:port, got {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def _number(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
        return value

    return parse
