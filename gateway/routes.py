"""By which route an engine is asked for a client's request, and what is done should its stream break.

Decided once for each engine request, before it is dispatched.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from engines.client_stream import ClientStream
from engines.completion_stream import CompletionStream
from engines.exact_chat import ExactChatStream
from engines.exact_chat_rules import sampling_defaults, why_not
from engines.generate_stream import GenerateStream
from engines.plain_stream import PlainStream
from engines.types import Role
from failover import features, recovery
from failover.recovery import Determinism, Mode, Plan, Traits
from gateway.context import Gateway
from gateway.errors import bad_request
from gateway.openai_api import Api, Unit
from gateway.prompt import Prompt
from gateway.story import Story
from routing.prefix import BlockKind


def wanted_modes(gw: Gateway, headers: Mapping[str, str]) -> tuple[Mode, ...]:
    """The ways on that this client wants, of those the operator allows. Raises GatewayError."""
    allowed = gw.config.failover.on_failure
    if (wanted := headers.get(recovery.WANTED_HEADER)) is None:
        return allowed
    try:
        return recovery.parse_wanted(wanted, allowed)
    except ValueError as error:
        raise bad_request(str(error), param=recovery.WANTED_HEADER) from None


def plan(gw: Gateway, story: Story, unit: Unit, prompt: Prompt) -> tuple[str, Plan]:
    """Why a chat is asked for as its client did ("" where it is asked for with ids), and what a break would lead to."""
    request = story.request
    path = request.api.value
    why_plain = ""
    if request.stream and request.api is Api.CHAT:
        why_plain = _why_plain(gw, story, unit, prompt)
        gw.metrics.chat_route(exact=not why_plain)
    traits = Traits(
        path,
        request.stream,
        features.sampling(path, unit.body),
        _determinism(gw, story.model),
        features.features(path, unit.body),
        why_plain,
    )
    return why_plain, recovery.choose(traits, story.on_failure)


def open_stream(gw: Gateway, story: Story, unit: Unit, prompt: Prompt, why_plain: str, mode: Mode) -> ClientStream:
    """The client's stream, of the kind that its way on needs."""
    api = story.request.api
    if mode is not Mode.RESUME:
        why = why_plain or "it was not to be resumed"
        repeats = api is Api.GENERATE and not streams_increments(gw, story.model)
        return PlainStream(api.value, unit.body, why, keep=mode is not Mode.ERROR, repeats=repeats)
    if api is Api.COMPLETIONS:
        return CompletionStream(unit.body)
    if api is Api.GENERATE:
        return GenerateStream(unit.body, incremental=streams_increments(gw, story.model))
    assert prompt.ids is not None  # `_why_plain` has seen to it
    assert gw.tokenizer is not None
    sampling = _sampling_defaults(gw, story.model)
    text_of = partial(gw.tokenizer.text_of, skip_special_tokens=False)
    return ExactChatStream(unit.body, prompt.ids, sampling, lambda token: text_of([token]))


def streams_increments(gw: Gateway, model: str) -> bool:
    """Whether events of this model's `/generate` streams hold what is new only."""
    return any(facts.incremental_streaming for facts in gw.kinds.of(model, Role.DECODE))


def _why_plain(gw: Gateway, story: Story, unit: Unit, prompt: Prompt) -> str:
    """Why this chat goes the plain way: by flag or header, for want of its ids, or as it would be another request."""
    if not gw.config.failover.exact_chat:
        return "--no-exact-chat is given"
    if Mode.RESUME not in story.on_failure:
        return "it is not to be resumed"
    if prompt.kind is not BlockKind.IDS or prompt.ids is None or gw.tokenizer is None:
        return f"its token ids are not known: {prompt.why_text}"
    decodes = gw.kinds.of(story.model, Role.DECODE)
    if len({each.sampling_defaults for each in decodes}) > 1:
        return "engines of its model have unlike sampling defaults"
    config = gw.tokenizer.generation_config
    found = (why_not(unit.body, each, config, token_texts=True) for each in decodes or (None,))
    return next(filter(None, found), "") or _why_not_resumed(unit, _sampling_defaults(gw, story.model))


def _sampling_defaults(gw: Gateway, model: str) -> Mapping[str, Any]:
    """What engines apply where a chat names no sampling parameters."""
    config = gw.tokenizer.generation_config if gw.tokenizer is not None else None
    return sampling_defaults(gw.kinds.of(model, Role.DECODE)[0], config)


def _why_not_resumed(unit: Unit, sampling: Mapping[str, Any]) -> str:
    """A penalty that the model's own configuration adds cannot be seen in the client's body."""
    default = sampling["repetition_penalty"]
    if unit.body.get("repetition_penalty") is not None or default == 1:
        return ""
    return f"the model's own repetition_penalty of {default:g} would begin anew"


def _determinism(gw: Gateway, model: str) -> Determinism:
    known = [*gw.kinds.of(model, Role.DECODE), *gw.kinds.of(model, Role.PREFILL)]
    if known and all(each.deterministic for each in known):
        return Determinism.ENGINE
    return Determinism.DECLARED if gw.config.failover.deterministic else Determinism.NONE
