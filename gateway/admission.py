"""Whether a request may come in: what no engine serves, what ends engines, what has ended some before.

Everything here runs on the event loop in one go, so its cost must stay linear in the body.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

import orjson

from engines.sglang_wire import MAX_DEPTH, poisonous_field, poisonous_ids, poisonous_integer, too_deep
from engines.types import Stage
from gateway import openai_api
from gateway.context import Gateway
from gateway.errors import bad_request
from gateway.live import fenced
from gateway.openai_api import ParsedRequest, Unit
from gateway.prompt import vocabulary_tokens
from gateway.suspects import poison_suspected

MAX_FIELDS = 1000
"""A body is copied for every prompt of a batch."""
MAX_SHARED_BYTES = 256 * 1024 * 1024
"""What the engine requests of one batch may repeat of its body in all."""


def admit(gw: Gateway, request: ParsedRequest) -> tuple[Unit, ...]:
    """The engine requests of this request; refuses what no engine serves or survives, and everything while fenced."""
    if gw.replicas is not None and gw.replicas.is_fenced:
        raise fenced(Stage.ADMISSION)
    if too_deep(request.body):
        raise bad_request(f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_json")
    if models := gw.fleet.models():
        openai_api.served(request.model, models)
    if len(request.body) > MAX_FIELDS:
        raise bad_request(f"the body has more than {MAX_FIELDS} fields", code="invalid_json")
    units = openai_api.expand(request)
    if request.batched and (shared_bytes := _shared_bytes(request)) * len(units) > MAX_SHARED_BYTES:
        text = (
            f"{len(units)} engine requests that repeat {shared_bytes} bytes are too much at once; send several requests"
        )
        raise bad_request(text, param="prompt")
    vocabulary = vocabulary_tokens(gw, request.model or next(iter(models), ""))
    found = poisonous_integer(request.body) or poisonous_ids(request.body, vocabulary)
    for unit in units if request.batched else units[:1]:
        if (found := found or poisonous_field(unit.body)) is not None:
            raise bad_request(f"{found[0]}: {found[1]}", param=found[0], code="unsupported_field")
        if gw.poison.is_refused(fingerprint(unit), asyncio.get_running_loop().time()):
            raise poison_suspected(definite=True)
    return units


def _shared_bytes(request: ParsedRequest) -> int:
    """What every engine request of a batch repeats: the body without its prompts."""
    prompts = ("prompt", "text", "input_ids")
    return len(orjson.dumps({name: value for name, value in request.body.items() if name not in prompts}))


def fingerprint(unit: Unit) -> bytes:
    """What names the content of a request for the poison guard."""
    return blake2b(unit.prompt_bytes, digest_size=16).digest()
