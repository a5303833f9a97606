"""The gauges of /metrics: how fleet, queue, bookings, ownership and other gateways are at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Iterator

from engines.types import EngineId, Health, Role
from failover.reaper import Verdict
from gateway.context import Gateway
from gateway.drain import DrainState, drain_state
from gateway.kv_engine_feed import FeedMode, FeedStats
from gateway.replicas import ReplicasStatus
from routing.ownership import StoreState, StoreStatus
from routing.prefix import BlockKind

Gauge = tuple[str, str, dict[str, str], float]
"""Name, help, labels, value."""


def gauges(gw: Gateway) -> Iterator[Gauge]:
    """All of them, as they are now."""
    bookings, decider = gw.decider.bookings, gw.decider
    for view in gw.fleet.views():
        labels = {"engine": str(view.engine_id), "role": str(view.spec.role)}
        yield "pdgate_engine_ready", "1 when new rooms may go to it", labels, float(view.takes_rooms)
        for health in Health:
            state = {**labels, "health": str(health)}
            yield "pdgate_engine_health", "1 for what is thought of it", state, float(view.health is health)
        draining = drain_state(gw, view)
        yield "pdgate_engine_draining", "1 while an operator wants no new rooms on it", labels, float(view.draining)
        yield (
            "pdgate_engine_drained",
            "1 when it may be restarted or removed",
            labels,
            float(draining is DrainState.DRAINED),
        )
        pinned = float(gw.releaser.on_engine(view.engine_id))
        yield "pdgate_pinned_requests", "Abandoned requests that it is not known to have dropped", labels, pinned
        yield "pdgate_engine_epoch", "Grows with every noticed restart", labels, float(view.epoch)
        unaccounted = decider.unaccounted_tokens(view)
        yield (
            "pdgate_kv_unaccounted_tokens",
            "KV tokens in use that no live attempt explains; NaN when unknown",
            labels,
            float("nan") if unaccounted is None else float(unaccounted),
        )
        own, of_all = bookings.own(view.engine_id), bookings.uncached_tokens(view.engine_id)
        if view.spec.role is Role.PREFILL:
            yield (
                "pdgate_booked_uncached_tokens",
                "Prompt tokens promised to a prefill",
                labels,
                float(own.uncached_tokens),
            )
            elsewhere = of_all - own.uncached_tokens
            held = decider.owners.index.held_blocks(view.engine_id)
            yield "pdgate_owned_blocks", "Prefix blocks an instance is thought to hold", labels, float(held)
        else:
            yield "pdgate_booked_kv_tokens", "KV tokens promised to a decode", labels, float(own.decode_kv_tokens)
            elsewhere = bookings.decode_kv_tokens(view.engine_id) - own.decode_kv_tokens
        yield "pdgate_booked_elsewhere_tokens", "The same, promised by other gateways", labels, float(elsewhere)
    for (engine_id, before, after, event), count in gw.monitor.transitions.items():
        step = {"engine": str(engine_id), "before": str(before), "after": str(after), "event": event.value}
        yield "pdgate_health_transitions", "Changes of health, since the start", step, float(count)
    panic = decider.panic.roles(gw.fleet.snapshot())
    for role in (Role.PREFILL, Role.DECODE):
        labels = {"role": str(role)}
        yield "pdgate_panic", "1 while late servers of a role get rooms all the same", labels, float(role in panic)
    for pair_state, pairs in decider.pairs.states(gw.fleet.snapshot()).items():
        yield "pdgate_pairs", "Pairs that can exchange KV, by state", {"state": str(pair_state)}, float(pairs)
    for result, canaries in gw.canaries.counts.items():
        yield "pdgate_canaries", "Canaries by how they ended, since the start", {"result": result}, float(canaries)
    yield "pdgate_queue_requests", "Requests that wait for a pair", {}, float(len(decider.queue))
    budget_left, turns = gw.retries.budget_left, gw.retries.turns
    yield "pdgate_retry_budget", "Further attempts that all requests may make now", {}, budget_left
    yield "pdgate_prefill_turns_waiting", "Requests that wait to have a prompt computed again", {}, float(turns.waiting)
    yield "pdgate_queue_bytes", "Bytes of bodies that wait", {}, float(decider.queue.body_bytes)
    yield "pdgate_live_bookings", "Attempts whose bookings are not released", {}, float(bookings.live())
    yield "pdgate_releases_pending", "Abandoned attempts not known to be free", {}, float(gw.releaser.pending)
    index_bytes = decider.owners.index.memory_bytes() + decider.owners.ranks.memory_bytes()
    yield "pdgate_index_bytes", "Memory of the prefix index", {}, float(index_bytes)
    yield from _ownership_gauges(gw.shared.store.status())
    for model, join in gw.joins.models().items():
        labels = {"model": model}
        exact = float(join.kind is BlockKind.IDS)
        yield "pdgate_index_exact", "1 while a model's prompts are hashed as token ids", labels, exact
    for engine_id, stats in gw.feed.stats().items():
        yield from _feed_gauges(engine_id, stats)
    if gw.replicas is not None:
        yield from _replica_gauges(gw.replicas.status())
    for (side, engine_id), error in decider.learned.errors().items():
        labels = {"engine": str(engine_id), "side": side}
        yield "pdgate_prediction_error_ratio", "Mean relative error of predicted times", labels, error


def _ownership_gauges(status: StoreStatus) -> Iterator[Gauge]:
    for state in StoreState:
        labels = {"store": status.kind, "state": str(state)}
        yield "pdgate_ownership_state", "1 for the state that it is in", labels, float(state is status.state)
    yield "pdgate_ownership_blocks", "Prefix blocks in the store, of all engines", {}, float(status.blocks)
    yield "pdgate_ownership_queued_bytes", "Changes that wait to be written", {}, float(status.queued_bytes)
    yield "pdgate_ownership_dropped", "Changes given up for want of room, since the start", {}, float(status.dropped)
    yield "pdgate_ownership_refused", "Changes that named an old boot, since the start", {}, float(status.refused)
    yield "pdgate_ownership_resyncs", "Shards that were read anew, since the start", {}, float(status.resyncs)


def _replica_gauges(status: ReplicasStatus) -> Iterator[Gauge]:
    yield "pdgate_replicas_booking", "Other gateways that have promised anything", {}, float(status.booked_elsewhere)
    yield "pdgate_leases_held", "Leases that this gateway holds", {}, float(status.leases_held)
    yield "pdgate_leases_alone", "1 while it acts on all leases, Redis being away", {}, float(status.alone)
    yield "pdgate_replicas_live", "Gateways of the fleet that are there, this one included", {}, float(status.live)
    for verdict in set(Verdict) - {Verdict.PRESENT}:
        labels = {"verdict": str(verdict)}
        gone = sum(each is verdict for each in status.absent.values())
        yield "pdgate_replicas_absent", "Gateways that are gone, by what is thought of them", labels, float(gone)
    yield "pdgate_attempts_journaled", "Live attempts that others could release", {}, float(status.journaled)
    yield "pdgate_replicas_reaped", "Dead gateways whose attempts were released here", {}, float(status.reaped)
    yield "pdgate_attempts_reaped", "Attempts released for dead gateways", {}, float(status.released)
    yield "pdgate_fencings", "How often others have declared this gateway dead", {}, float(status.fencings)
    yield "pdgate_fenced", "1 while it takes nothing new, having been declared dead", {}, float(status.fenced)
    counts = (
        ("sent", status.suspicions_sent),
        ("heard", status.suspicions_heard),
        ("acted", status.suspicions_acted),
        ("dropped", status.suspicions_dropped),
    )
    for what, count in counts:
        labels = {"what": what}
        yield "pdgate_suspicions", "Suspicions of servers, since the start", labels, float(count)


def _feed_gauges(engine_id: EngineId, stats: FeedStats) -> Iterator[Gauge]:
    labels = {"engine": str(engine_id)}
    for mode in FeedMode:
        here = float(mode is stats.mode)
        yield "pdgate_kv_events_mode", "1 for how this gateway follows a cache", {**labels, "mode": str(mode)}, here
    yield "pdgate_kv_events_batches", "Batches of KV events, since its start", labels, float(stats.batches)
    yield "pdgate_kv_events_gaps", "Holes in its KV events, filled or not", labels, float(stats.gaps)
    yield "pdgate_kv_events_lost", "Batches of KV events that never came", labels, float(stats.lost)
    yield "pdgate_kv_events_malformed", "Batches that could not be read", labels, float(stats.malformed)
    yield "pdgate_kv_events_bytes", "Memory of what is known of its pages", labels, float(stats.pages_bytes)
