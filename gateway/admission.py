"""Whether a request may come in: what no engine serves, what ends engines, what has ended some before."""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from engines.sglang_wire import MAX_DEPTH, poison, too_deep
from engines.types import Stage
from gateway import openai_api
from gateway.context import Gateway
from gateway.errors import bad_request, upstream_failed
from gateway.openai_api import ParsedRequest, Unit


def admit(gw: Gateway, request: ParsedRequest) -> tuple[Unit, ...]:
    """The engine requests of this request; refuses what no engine serves or survives."""
    if too_deep(request.body):
        raise bad_request(f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_json")
    if models := gw.fleet.models():
        openai_api.served(request.model, models)
    units = openai_api.expand(request)
    for unit in units if request.batched else units[:1]:
        if (found := poison(unit.body)) is not None:
            raise bad_request(f"{found[0]}: {found[1]}", param=found[0], code="unsupported_field")
        if gw.poison.is_refused(fingerprint(unit), asyncio.get_running_loop().time()):
            raise upstream_failed(
                "two servers ended while they worked on this request; it is refused for some minutes",
                code="poison_suspected",
                stage=Stage.ADMISSION,
                definite=True,
                retry=False,
            )
    return units


def fingerprint(unit: Unit) -> bytes:
    """What names the content of a request for the poison guard."""
    return blake2b(unit.prompt_bytes, digest_size=16).digest()
