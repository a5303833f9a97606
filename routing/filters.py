"""Hard constraints: which engines may serve a request. Pure. Which may pair: `compatibility.py`.

Every engine left out carries its reason, in words for an operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engines.types import EngineFacts, EngineView, FleetSnapshot, Health, Role
from routing.types import Dropped, RequestView


def filter_engines(
    request: RequestView, views: Iterable[EngineView]
) -> tuple[tuple[EngineView, ...], tuple[Dropped, ...]]:
    """The engines that may serve `request`, in order, and the others with the first reason against each.

    A pair is excluded where either of its members may be what failed: while there are others of their role that have
    not, these are left out as well.
    """
    kept = []
    dropped = []
    for view in views:
        reason = objection(request, view)
        if reason is None:
            kept.append(view)
        else:
            dropped.append(Dropped(view.engine_id, reason))
    doubted = {engine_id for pair in request.excluded_pairs for engine_id in pair}
    free = {view.spec.role for view in kept if view.engine_id not in doubted}
    avoided = {view.engine_id for view in kept if view.engine_id in doubted and view.spec.role in free}
    dropped += [Dropped(engine_id, "this request has failed on a pair with it before") for engine_id in sorted(avoided)]
    return tuple(view for view in kept if view.engine_id not in avoided), tuple(dropped)


def objection(request: RequestView, view: EngineView) -> str | None:
    """Why `view` may not serve `request`, or None. A server whose restart is suspected has health SUSPECTED."""
    if view.draining:
        return "draining: an operator wants no new rooms on it"
    if not view.health.takes_rooms:
        return f"health is {view.health}" + (f": {view.reason}" if view.reason else "")
    if view.facts is None:
        return "not probed yet: model and limits are unknown"
    if view.engine_id in request.excluded_engines:
        return "this request has failed on it before"
    if view.facts.model != request.model:
        return f"serves model {view.facts.model}, not {request.model}"
    return _too_long(request, view.facts, view.spec.role)


def roles_in_panic(fleet: FleetSnapshot) -> frozenset[Role]:
    """The roles of which so many servers are only late with their answers that less than half remain.

    Then lateness says more of the load, or of this gateway, than of the servers, and the few that remain would be
    overrun: rooms go to the late ones too. One server alone is waited for. Servers about which anything harder is known
    are left out of the count. The idea, and half as its threshold, are Envoy's (`healthy_panic_threshold`, 50 %).
    """
    return frozenset(role for role in Role if _in_panic(fleet.with_role(role)))


def _in_panic(views: Sequence[EngineView]) -> bool:
    usable = sum(view.takes_rooms for view in views)
    late = sum(view.health is Health.SLOW and not view.draining for view in views)
    return late >= _LATE_TOGETHER and usable < late


_LATE_TOGETHER = 2


def _too_long(request: RequestView, facts: EngineFacts, role: Role) -> str | None:
    """Against the context with one token of output; against the pool with all KV this side must hold."""
    if request.prompt_tokens >= facts.context_tokens:
        return f"prompt of {request.prompt_tokens} tokens does not fit its context of {facts.context_tokens}"
    if role is Role.PREFILL and request.prompt_tokens > facts.max_total_tokens:
        return f"prompt of {request.prompt_tokens} tokens does not fit its KV pool of {facts.max_total_tokens}"
    if role is not Role.PREFILL and request.kv_tokens > facts.max_total_tokens:
        return (
            f"prompt of {request.prompt_tokens} + {request.expected_output_tokens} expected output tokens "
            f"do not fit its KV pool of {facts.max_total_tokens}"
        )
    return None
