"""`pdgate redis inspect`: shows what gateways share in Redis: owners, boots, sizes, sequence numbers, lag."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from engines.tasks import spawn
from gateway import redis_flags
from gateway.config import OwnershipStoreConfig
from gateway.shared_state import KEY_PREFIX
from routing import redis_url
from routing.ownership import Keys
from routing.ownership_inspect import Inspection, inspect
from routing.redis_link import Link, RedisTrouble, Trouble

_TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `pdgate redis`."""
    parser.add_argument("action", choices=("inspect",), help="what to do")
    parser.add_argument(
        "--redis-url", type=redis_flags.redis_url, help="the Redis (default: the private one of the gateway at --url)"
    )
    parser.add_argument(
        "--redis-namespace",
        type=redis_flags.namespace,
        default=OwnershipStoreConfig().namespace,
        help="the fleet within it (default %(default)s)",
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="a gateway on this machine (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="write the JSON object to this file as well")


def run(args: argparse.Namespace) -> int:
    """Print what is there; 1 when Redis does not give it, 2 when it is not clear which Redis is meant."""
    if args.out is not None and not args.out.parent.is_dir():
        print(f"pdgate redis: error: --out: there is no folder {args.out.parent}", file=sys.stderr)
        return 2
    try:
        url = args.redis_url or _redis_of(args.url)
        found = asyncio.run(_look(url, args.redis_namespace))
    except (ValueError, OSError) as error:
        print(f"pdgate redis: error: {error}", file=sys.stderr)
        return 2
    except RedisTrouble as trouble:
        place = redis_url.parse(url).where
        print(f"pdgate redis: {place}: {trouble.kind.replace('_', ' ')} ({trouble.message})", file=sys.stderr)
        return 1
    report = as_json(found)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(found, Console())
    return 0


def _redis_of(gateway_url: str) -> str:
    """The private Redis of a gateway; ValueError where it has none, or one that needs a URL with secrets."""
    try:
        with urllib.request.urlopen(f"{gateway_url.rstrip('/')}/readyz", timeout=_TIMEOUT_S) as answer:
            body = json.load(answer)
    except urllib.error.HTTPError as error:  # not ready, which it says with the same body
        body = json.load(error)
    except (OSError, ValueError) as error:
        raise ValueError(f"no gateway answers at {gateway_url} (--url), and no --redis-url is given: {error}") from None
    if not isinstance(body, dict) or "ownership" not in body:
        raise ValueError(f"what answers at {gateway_url} (--url) is no pdgate gateway")
    where = (body.get("ownership") or {}).get("where")
    if not where:
        raise ValueError(f"the gateway at {gateway_url} keeps ownership in memory: there is no Redis to look into")
    if not str(where).startswith("unix://"):
        raise ValueError(f"the gateway at {gateway_url} uses {where}: give its whole --redis-url")
    return str(where)


async def _look(url: str, namespace: str) -> Inspection:
    link = Link(url, spawn, lambda _: None, timeout_s=_TIMEOUT_S)
    await link.start()
    try:
        if (trouble := link.state.trouble) is not None:
            if link.is_trying:
                raise RedisTrouble(Trouble.SLOW, f"no answer within {_TIMEOUT_S:g} s: frozen, or TLS where none is?")
            raise RedisTrouble(trouble, link.state.message)
        return await inspect(link, Keys(KEY_PREFIX, namespace))
    finally:
        await link.stop()


def as_json(found: Inspection) -> dict[str, Any]:
    """All of it as plain data, with sums."""
    blocks, size = sum(each.blocks for each in found.engines), sum(each.bytes for each in found.engines)
    log_bytes = sum(each.log_bytes for each in found.shards)
    return {
        "blocks": blocks,
        "bytes": size,
        "log_bytes": log_bytes,
        "bytes_per_block": (size + log_bytes) / blocks if blocks else None,
        "engines": [{**asdict(each), "bytes_per_block": each.bytes_per_block} for each in found.engines],
        "shards": [asdict(each) for each in found.shards],
        "replicas": [{**asdict(each), "lag_entries": each.lag_entries} for each in found.replicas],
    }


def show(found: Inspection, console: Console) -> None:
    """Three tables and a line of sums."""
    engines = _table("engine", "shard", "boot", "runs", "blocks", "pending", "bytes", "B/block")
    for engine in found.engines:
        counts = (engine.shard, engine.number, engine.runs, engine.blocks, engine.pending, engine.bytes)
        engines.add_row(str(engine.engine_id), *map(str, counts), f"{engine.bytes_per_block:.1f}")
    shards = _table("shard", "seq", "data set", "log entries", "log bytes")
    for shard in found.shards:
        if shard.seq:
            told = (shard.shard, shard.seq, shard.db_epoch, shard.log_entries, shard.log_bytes)
            shards.add_row(*map(str, told))
    replicas = _table("gateway", "last seen", "entries behind", "shards behind")
    for replica in found.replicas:
        behind = [str(shard) for shard, lag in enumerate(replica.lag_by_shard) if lag]
        replicas.add_row(
            replica.replica, f"{replica.age_s:.1f} s ago", str(replica.lag_entries), ", ".join(behind) or "none"
        )
    report = as_json(found)
    for table in (engines, shards, replicas):
        console.print(table)
    if not found.replicas and not found.engines:
        console.print("nothing is kept here: is this the --redis-namespace of the fleet?")
    each = f", {report['bytes_per_block']:.1f} bytes a block with the log" if report["blocks"] else ""
    console.print(f"{report['blocks']} blocks in {report['bytes']} bytes, {report['log_bytes']} bytes of log{each}")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        first = number == 0
        table.add_column(column, justify="left" if first else "right", overflow="fold", no_wrap=not first)
    return table
