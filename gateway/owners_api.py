"""What this gateway believes of prefix ownership, for people and for comparing gateways: per engine and in all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from engines.types import EngineId
from gateway.context import Gateway
from routing.ownership import OwnerRow, RowState, StoreStatus

_ROWS_AT_ONCE = 64
"""Rows that are looked at before others get their turn on the loop."""


async def owners_json(gw: Gateway) -> dict[str, Any]:
    """The store's status, and of every engine the blocks it holds with a digest that does not depend on their order."""
    held: dict[EngineId, set[bytes]] = {}
    pending: dict[EngineId, int] = {}
    for number, row in enumerate(_rows(gw)):
        if row.state is RowState.HELD:
            held.setdefault(row.engine_id, set()).update(row.run.blocks)
        else:
            pending[row.engine_id] = pending.get(row.engine_id, 0) + len(row.run.blocks)
        if number % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
            await asyncio.sleep(0)
    engines = {}
    for engine_id in sorted({*held, *pending}):
        digest = await asyncio.to_thread(_digest, held.get(engine_id, set()))
        engines[str(engine_id)] = {
            "held_blocks": len(held.get(engine_id, ())),
            "pending_blocks": pending.get(engine_id, 0),
            "indexed_blocks": gw.decider.owners.index.held_blocks(engine_id),
            "digest": digest,
        }
    return {"replica": gw.shared.replica, "store": status_json(gw.shared.store.status()), "engines": engines}


def status_json(status: StoreStatus) -> Mapping[str, Any]:
    """A store's status; empty texts are null."""
    return {**asdict(status), "where": status.where or None, "trouble": status.trouble or None}


def _rows(gw: Gateway) -> Iterator[OwnerRow]:
    return gw.shared.store.snapshot(asyncio.get_running_loop().time())


def _digest(blocks: set[bytes]) -> str:
    return blake2b(b"".join(sorted(blocks)), digest_size=16).hexdigest()
