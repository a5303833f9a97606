"""From one engine request to what routing may know of it: prompt tokens, block chain, expected output.

The index is of kind `text`: blocks of canonical bytes, in a namespace of everything that must be equal before KV may be
shared. Token counts are estimates until an answer says better.
"""

from __future__ import annotations

from itertools import count
from math import ceil

from engines.types import EngineFacts, Role
from gateway.candidates import BLOCK_BYTES
from gateway.context import Gateway
from gateway.openai_api import Api, ParsedRequest, Unit
from routing.prefix import Namespace, root_hash, text_blocks
from routing.types import RequestView

_BYTES_PER_ID = 4
_serial = count()


def request_view(
    gw: Gateway, request: ParsedRequest, unit: Unit, model: str, arrival_s: float, deadline_s: float
) -> RequestView:
    """One engine request as routing sees it."""
    facts = _facts(gw, model)
    exact = unit.prompt_token_ids is not None
    bytes_per_token = _BYTES_PER_ID if exact else gw.decider.learned.bytes_per_token(model)
    prompt_tokens = unit.prompt_token_ids or gw.decider.learned.prompt_tokens(model, len(unit.prompt_bytes))
    context_tokens = facts.context_tokens if facts is not None else prompt_tokens + 1
    if not exact:
        # An estimate must not refuse what the engine would take: it counts tokens itself, and says so.
        prompt_tokens = min(prompt_tokens, max(1, context_tokens - 1))
    left_tokens = max(1, context_tokens - prompt_tokens)
    max_output_tokens = min(request.max_output_tokens or left_tokens, left_tokens)
    return RequestView(
        request_id=f"{arrival_s:.6f}-{next(_serial)}",
        model=model,
        prompt_tokens=prompt_tokens,
        blocks=text_blocks(
            root_hash(_namespace(request.api, unit, model, facts, exact)), unit.prompt_bytes, BLOCK_BYTES
        ),
        block_tokens=BLOCK_BYTES / bytes_per_token,
        expected_output_tokens=gw.decider.learned.output_tokens(model, max_output_tokens),
        max_output_tokens=max_output_tokens,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        body_bytes=ceil(request.body_bytes / (request.prompts * request.samples)),
    )


def _facts(gw: Gateway, model: str) -> EngineFacts | None:
    """What the first known prefill of this model says of itself."""
    for view in gw.fleet.views():
        if view.spec.role is Role.PREFILL and view.facts is not None and view.facts.model == model:
            return view.facts
    return None


def _namespace(api: Api, unit: Unit, model: str, facts: EngineFacts | None, exact: bool) -> Namespace:
    salts = [str(unit.body.get(name) or "") for name in ("cache_salt", "extra_key")]
    cache_format = facts.cache_format if facts is not None else None
    return Namespace(
        tenant_or_salt="".join(f"{len(salt)}:{salt}" for salt in salts) if any(salts) else "",
        model=model,
        weight_version=facts.weight_version if facts is not None else "",
        tokenizer="token ids" if exact else "template" if api is Api.CHAT else "plain",
        lora=str(unit.body.get("lora_path") or ""),
        kv_dtype=cache_format.kv_cache_dtype if cache_format is not None else "",
        page_size_tokens=cache_format.page_size_tokens if cache_format is not None else 1,
        layout=cache_format.kv_layout if cache_format is not None else "",
    )
