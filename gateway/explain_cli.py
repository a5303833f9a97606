"""`pdgate explain`: asks a running gateway why a request went where it went, and prints it."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

from rich import box
from rich.console import Console
from rich.table import Table

_TERMS = ("wait_s", "prefill_s", "prefix_gain_s", "transfer_s", "decode_s", "capacity_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `pdgate explain`."""
    parser.add_argument(
        "id", nargs="?", default="newest", help="the x-pdgate-request-id of an answer (default: the newest)"
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the gateway (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the gateway's own JSON")


def run(args: argparse.Namespace) -> int:
    """Print one request's decisions; 1 when the gateway does not know it, 2 when there is no gateway."""
    url = f"{args.url.rstrip('/')}/pdgate/explain/{quote(args.id, safe='')}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            record = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError) as error:
        if (words := _words_of_a_gateway(error)) is not None:
            print(f"pdgate explain: {words}", file=sys.stderr)
            return 1
        print(f"pdgate explain: no gateway answers at {args.url} (--url): {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        show(record, Console())
    return 0


def _words_of_a_gateway(error: Exception) -> str | None:
    """What a gateway says with a status of 400 or more; None when it was no gateway's answer."""
    if not isinstance(error, urllib.error.HTTPError):
        return None
    try:
        with error:
            return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return None


def show(record: dict[str, Any], console: Console) -> None:
    """One table an attempt: the pairs that were looked at, best first, with every term in milliseconds."""
    say = partial(console.print, markup=False, highlight=False)  # engines say things in brackets
    error = f": {record['error']}" if record["error"] else ""
    attempts = f"{len(record['attempts'])} attempt{'' if len(record['attempts']) == 1 else 's'}"
    say(
        f"request {record['request_id']} on {record['api']} (model {record['model'] or 'not named'}, "
        f"policy {record['policy']}): status {record['status']}, {attempts}{error}"
    )
    for number, attempt in enumerate(record["attempts"], start=1):
        console.print(_attempt_table(number, attempt))
        for outcome in attempt["outcomes"]:
            say(f"  {outcome['leg']} failed: {outcome['kind']} at {outcome['stage']}: {outcome['message']}")
        if attempt.get("pair_note"):
            say(f"  the pair: {attempt['pair_note']}")
        for reason in attempt.get("apart", ()):
            say(f"  {reason}")
        for dropped in attempt["dropped"]:
            say(f"  left out {dropped['engine']}: {dropped['reason']}")


def _attempt_table(number: int, attempt: dict[str, Any]) -> Table:
    reported = "nothing yet" if attempt["cached_tokens"] is None else attempt["cached_tokens"]
    title = (
        f"attempt {number}, choice {attempt['choice_index']}: about {attempt['prompt_tokens']} prompt tokens, "
        f"{attempt['hit_tokens']} expected in cache (reported: {reported}); times in ms"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "on", "then"):
        table.add_column(name, no_wrap=True)
    for name in ("hit", "wait", "prefill", "gain", "transfer", "decode", "cap.", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    short = _short_names(attempt["considered"])
    for candidate in attempt["considered"]:
        chosen = (candidate["prefill"], candidate["decode"]) == (attempt["prefill"], attempt["decode"])
        terms = [candidate["terms"][term] for term in _TERMS] + [candidate["total_s"]]
        table.add_row(
            ">" if chosen else "",
            short[candidate["prefill"]],
            short[candidate["decode"]],
            str(candidate["hit_tokens"]),
            *(f"{value * 1000:.1f}" for value in terms),
            style="bold" if chosen else None,
        )
    return table


def _short_names(candidates: list[dict[str, Any]]) -> dict[str, str]:
    """Engine names without what all of them share: scheme and, on one machine, the host."""
    names = {candidate[side] for candidate in candidates for side in ("prefill", "decode")}
    hosts = {urlsplit(name).hostname for name in names}
    return {name: f":{urlsplit(name).port}" if len(hosts) == 1 else urlsplit(name).netloc or name for name in names}
