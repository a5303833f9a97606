"""From one engine request to what routing may know of it: prompt tokens, block chain, expected output.

The index is of kind `ids` where the model's own tokenizer is here and its engines agree with it: blocks of token ids,
exact counts. Else it is of kind `text`: blocks of canonical bytes, and counts that are estimates until an answer says
better. Either is in a namespace of everything that must be equal before KV may be shared; the kinds never mix.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import ceil
from typing import Any

from engines.types import EngineFacts, Role
from gateway.candidates import BLOCK_BYTES
from gateway.context import Gateway
from gateway.join_probe import Join, JoinProbe
from gateway.learned import Learned
from gateway.openai_api import Api, ParsedRequest, Unit
from gateway.tokenizer import AT_ONCE_BYTES, Tokenizer, Untokenized
from routing.prefix import BlockKind, Namespace, id_blocks, root_hash, text_blocks
from routing.types import RequestView

ID_BLOCK_TOKENS = 64
"""About so many tokens are one block of the `ids` index, in whole pages."""

_BYTES_PER_ID = 4
_MAX_BYTES_PER_TOKEN = 32
"""A prompt with more than this for every token of the context will be refused: not worth a thread's time."""
_serial = count()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of one prompt: shared by its samples, kept no longer than its request.

    `ids` are the exact ids (unsigned 32-bit), None where only text is known; `tokens` is their count, else an estimate.
    `given`: the client sent the ids itself. `why_text` says why the prompt is not in the index of ids.
    """

    tokens: int
    blocks: tuple[bytes, ...]
    block_tokens: float
    kind: BlockKind
    ids: array[int] | None = None
    given: bool = False
    why_text: str = ""


async def identify(gw: Gateway, api: Api, unit: Unit, model: str) -> Prompt:
    """The prompt of one engine request; what cannot be tokenized here is known as text."""
    join = gw.joins.of(model)
    why_text = join.reason
    if join.kind is BlockKind.IDS and gw.tokenizer is not None:
        facts = _facts(gw, model)
        if told := [name for name in join.text_fields if unit.body.get(name)]:
            why_text = f"the engines do not tokenize {', '.join(told)} as we do"
        elif facts is not None and len(unit.prompt_bytes) > facts.context_tokens * _MAX_BYTES_PER_TOKEN:
            why_text = "it is far longer than the context"
        else:
            namespace = _unit_namespace(gw, api, unit, model, join)
            work = partial(_by_ids, gw.tokenizer, api, unit, root_hash(namespace), id_block_tokens(join.page_tokens))
            try:
                return await gw.tokenizer.run(_size_bytes(unit), work)
            except Untokenized as error:
                why_text = str(error)
    return _by_text(gw, api, unit, model, replace(join, kind=BlockKind.TEXT, reason=why_text))


def _size_bytes(unit: Unit) -> int:
    """What there is to render and tokenize; only whether it is more than AT_ONCE_BYTES is sure.

    The canonical prompt is not all of it: a template is shown `chat_template_kwargs` too, and parts that count there by
    their hash. So the body's texts, names and values are counted, as far as is needed.
    """
    seen, left = 0, [unit.body]
    while left and seen <= AT_ONCE_BYTES:
        value: Any = left.pop()
        if isinstance(value, str | list | dict):
            seen += len(value)
        if isinstance(value, list | dict) and seen <= AT_ONCE_BYTES:
            left += value if isinstance(value, list) else [*value, *value.values()]
    return max(seen, len(unit.prompt_bytes))


def _by_ids(tokenizer: Tokenizer, api: Api, unit: Unit, root: bytes, block_tokens: int) -> Prompt:
    given = _given_ids(unit)
    ids = tokenizer.ids(api, unit.body) if given is None else given
    blocks = id_blocks(root, ids, block_tokens)
    return Prompt(len(ids), blocks, float(block_tokens), BlockKind.IDS, ids, given is not None)


def _by_text(gw: Gateway, api: Api, unit: Unit, model: str, join: Join) -> Prompt:
    ids, learned = _given_ids(unit), gw.decider.learned
    bytes_per_token = _BYTES_PER_ID if ids is not None else learned.bytes_per_token(model)
    return Prompt(
        len(ids) if ids is not None else learned.prompt_tokens(model, len(unit.prompt_bytes)),
        text_blocks(root_hash(_unit_namespace(gw, api, unit, model, join)), unit.prompt_bytes, BLOCK_BYTES),
        BLOCK_BYTES / bytes_per_token,
        BlockKind.TEXT,
        ids,
        ids is not None,
        join.reason,
    )


def continued(gw: Gateway, api: Api, unit: Unit, model: str, prompt: Prompt, ids: array[int]) -> Prompt:
    """The prompt of an attempt that goes on: `ids` are those of `prompt`, and of the output that it has led to."""
    join = gw.joins.of(model)
    if prompt.kind is not BlockKind.IDS or join.kind is not BlockKind.IDS:
        return replace(prompt, tokens=len(ids), ids=ids, given=True)
    block_tokens = id_block_tokens(join.page_tokens)
    blocks = id_blocks(root_hash(_unit_namespace(gw, api, unit, model, join)), ids, block_tokens)
    return replace(prompt, tokens=len(ids), blocks=blocks, block_tokens=float(block_tokens), ids=ids, given=True)


def _given_ids(unit: Unit) -> array[int] | None:
    """The ids that the client sent in place of a text."""
    if unit.prompt_token_ids is None:
        return None
    ids = array("I", unit.prompt_bytes)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def request_view(
    gw: Gateway,
    request: ParsedRequest,
    unit: Unit,
    model: str,
    prompt: Prompt,
    arrival_s: float,
    deadline_s: float,
    emitted_tokens: int = 0,
) -> RequestView:
    """One engine request as routing sees it; its prompt ends with so many tokens of its own output."""
    facts = _facts(gw, model)
    prompt_tokens = prompt.tokens
    context_tokens = facts.context_tokens if facts is not None else prompt_tokens + 1
    if not prompt.given:
        # What we count must not refuse what the engine would take: it counts tokens itself, and says so.
        prompt_tokens = min(prompt_tokens, max(1, context_tokens - 1))
    left_tokens = max(1, context_tokens - prompt_tokens)
    asked_tokens = left_tokens if request.max_output_tokens is None else request.max_output_tokens - emitted_tokens
    max_output_tokens = max(1, min(asked_tokens, left_tokens))
    return RequestView(
        request_id=f"{arrival_s:.6f}-{next(_serial)}",
        model=model,
        prompt_tokens=prompt_tokens,
        blocks=prompt.blocks,
        block_tokens=prompt.block_tokens,
        expected_output_tokens=gw.decider.learned.output_tokens(model, max_output_tokens),
        max_output_tokens=max_output_tokens,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        body_bytes=ceil(request.body_bytes / (request.prompts * request.candidates)),
    )


def vocabulary_tokens(gw: Gateway, model: str) -> int | None:
    """How many token ids this model has; None unless its engines were found to use the tokenizer that is here."""
    proven = gw.joins.of(model).kind is BlockKind.IDS
    return gw.tokenizer.vocabulary_tokens if proven and gw.tokenizer is not None else None


# ---- blocks and namespaces -------------------------------------------------------------------------------------------


def id_block_tokens(page_tokens: int) -> int:
    """Tokens of a block of ids, about 64: whole multiples of what the pages of all servers share."""
    return page_tokens * max(1, round(ID_BLOCK_TOKENS / page_tokens))


def block_tokens(model: str, joins: JoinProbe, learned: Learned) -> float:
    """Tokens that one block of this model's prompts stands for now; for `text` a learned mean."""
    join = joins.of(model)
    if join.kind is BlockKind.IDS:
        return float(id_block_tokens(join.page_tokens))
    return BLOCK_BYTES / learned.bytes_per_token(model)


def _facts(gw: Gateway, model: str) -> EngineFacts | None:
    """What the first known prefill of this model says of itself."""
    for view in gw.fleet.views():
        if view.spec.role is Role.PREFILL and view.facts is not None and view.facts.model == model:
            return view.facts
    return None


def chain_root(gw: Gateway, model: str, salt: str | None, lora: str | None) -> bytes:
    """Where the chains of ids of a model begin, by what its KV events say: they do not tell an `extra_key`."""
    return root_hash(_namespace(gw, model, gw.joins.of(model), (salt or "", ""), lora or "", _ids_of(gw)))


def _unit_namespace(gw: Gateway, api: Api, unit: Unit, model: str, join: Join) -> Namespace:
    if join.kind is BlockKind.IDS and gw.tokenizer is not None:
        tokenizer = _ids_of(gw)
    elif unit.prompt_token_ids is not None:
        tokenizer = "token ids"
    else:
        tokenizer = "template" if api is Api.CHAT else "plain"
    salts = tuple(str(unit.body.get(name) or "") for name in ("cache_salt", "extra_key"))
    return _namespace(gw, model, join, salts, str(unit.body.get("lora_path") or ""), tokenizer)


def _ids_of(gw: Gateway) -> str:
    """Names the tokenizer of ids: they are the same ids whichever API they came by."""
    return gw.tokenizer.fingerprint if gw.tokenizer is not None else ""


def _namespace(gw: Gateway, model: str, join: Join, salts: tuple[str, ...], lora: str, tokenizer: str) -> Namespace:
    """All that must be equal."""
    facts = _facts(gw, model)
    cache_format = facts.cache_format if facts is not None else None
    page_tokens = cache_format.page_size_tokens if cache_format is not None else 1
    return Namespace(
        tenant_or_salt="".join(f"{len(salt)}:{salt}" for salt in salts) if any(salts) else "",
        model=model,
        weight_version=facts.weight_version if facts is not None else "",
        tokenizer=tokenizer,
        lora=lora,
        kv_dtype=cache_format.kv_cache_dtype if cache_format is not None else "",
        page_size_tokens=join.page_tokens if join.kind is BlockKind.IDS else page_tokens,
        layout=cache_format.kv_layout if cache_format is not None else "",
        kind=join.kind,
    )
