"""Ownership of one gateway: the index and the store are told the same, whoever it came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engines.types import EngineFacts, EngineId, EngineSpec, EngineView, Health, Role
from gateway.owners import Owners
from routing.index import PrefixIndex
from routing.ownership import OwnershipListener, RowState, Run, Tier
from routing.ownership_memory import MemoryOwnership
from routing.types import RequestView
from tests.fakes import FACTS

P0 = EngineId("http://p0:1")
BLOCKS = tuple(bytes([number]) * 16 for number in range(1, 9))
BLOCK_TOKENS = 64


class Store(MemoryOwnership):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, ...]] = []
        self.listener: OwnershipListener | None = None

    def listen(self, listener: OwnershipListener) -> None:
        self.listener = listener

    def begin(self, engine_id: EngineId, epoch: int, fingerprint: str) -> None:
        self.told.append(("begin", engine_id, epoch, fingerprint))
        super().begin(engine_id, epoch, fingerprint)

    def drop_engine(self, engine_id: EngineId, epoch: int) -> None:
        self.told.append(("drop_engine", engine_id, epoch))
        super().drop_engine(engine_id, epoch)


def view(epoch: int = 1, facts: EngineFacts | None = FACTS, role: Role = Role.PREFILL) -> EngineView:
    return EngineView(EngineSpec(P0, str(P0), role), Health.READY, epoch, facts)


def request(blocks: tuple[bytes, ...] = BLOCKS) -> RequestView:
    return RequestView("r", "m", len(blocks) * BLOCK_TOKENS, blocks, BLOCK_TOKENS, 10, 10, 0.0, 10.0, 100)


def owners() -> tuple[Owners, Store]:
    store = Store()
    return Owners(PrefixIndex(), store, lambda model: BLOCK_TOKENS, lambda: 0.0), store


def held(at: Owners, blocks: tuple[bytes, ...] = BLOCKS) -> int:
    hit = at.match(request(blocks)).get(P0)
    return hit.held_blocks if hit is not None else 0


def keep(at: Owners, blocks: tuple[bytes, ...] = BLOCKS, predicted: int = 0, cached: int | None = None) -> None:
    claim = at.promise(view(), request(blocks), 0.0)
    at.kept(view(), request(blocks), claim, 0.0, predicted, cached)


def test_what_was_kept_is_in_the_index_and_in_the_store() -> None:
    at, store = owners()
    keep(at)
    assert held(at) == store.owners(BLOCKS, 0.0)[P0] == len(BLOCKS)


def test_a_broken_promise_leaves_nothing() -> None:
    at, store = owners()
    claim = at.promise(view(), request(), 0.0)
    assert at.match(request())[P0].pending_blocks == len(BLOCKS)
    at.broken(view(), request(), claim)
    assert at.match(request()) == {}
    assert list(store.snapshot(0.0)) == []


def test_a_boot_is_told_once_and_before_anything_is_written_for_it() -> None:
    at, store = owners()
    keep(at)
    keep(at)
    assert store.told == [("begin", P0, 1, FACTS.boot_fingerprint)]


def test_a_new_boot_holds_nothing_and_keeps_its_size() -> None:
    at, store = owners()
    keep(at)
    at.note(view(2, replace(FACTS, boot_fingerprint="b2")), 0.0)
    assert held(at) == 0
    assert store.owners(BLOCKS, 0.0) == {}
    assert not [told for told in store.told if told[0] == "drop_engine"], "others may know of it"
    at.index.add_held(P0, tuple(bytes([n // 250, n % 250]) + b"." * 14 for n in range(400)))
    assert at.index.held_blocks(P0) == FACTS.max_total_tokens // BLOCK_TOKENS


def test_what_others_learned_of_a_boot_before_us_outlives_our_noticing() -> None:
    at, _ = owners()
    seen: list[EngineId] = []
    at.on_restart_seen = seen.append
    keep(at)
    at.cleared(P0)
    at.restart_seen(P0)
    at.held(P0, Run(b"", BLOCKS[:3]), Tier.DEVICE)
    assert seen == [P0]
    at.note(view(2, replace(FACTS, boot_fingerprint="b2")), 0.0)
    assert held(at) == 3
    at.note(view(3, replace(FACTS, boot_fingerprint="b3")), 0.0)
    assert held(at) == 0, "that one we saw first"


def test_a_boot_that_was_doubted_and_is_still_there_is_told_again() -> None:
    at, store = owners()
    keep(at)
    at.restart_seen(P0)
    at.seen_again(view())
    assert store.told == [("begin", P0, 1, "boot")] * 2
    at.note(view(2, replace(FACTS, boot_fingerprint="b2")), 0.0)
    assert held(at) == 0, "nobody was ahead of us any more"


@pytest.mark.parametrize("facts", [None, FACTS])
def test_decodes_and_strangers_own_nothing(facts: EngineFacts | None) -> None:
    at, store = owners()
    at.note(view(facts=None), 0.0)
    at.note(view(facts=facts, role=Role.DECODE), 0.0)
    at.seen_again(view(facts=None))
    assert store.told == []


def test_a_clear_miss_is_told_to_the_store_as_well() -> None:
    at, store = owners()
    keep(at)
    claim = at.promise(view(), request(), 0.0)
    evicted: list[bytes] = []
    store.evict = lambda engine, epoch, blocks, tier=None: evicted.extend(blocks)  # type: ignore[method-assign]
    at.kept(view(), request(), claim, 0.0, len(BLOCKS) * BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    assert set(evicted) == set(BLOCKS[2:])
    assert held(at) == len(BLOCKS), "this request put them there anew"


def test_a_small_miss_forgets_nothing() -> None:
    at, _ = owners()
    old = tuple(b"o%d" % number + b"." * 14 for number in range(3))
    keep(at, old)
    keep(at)
    keep(at, predicted=len(BLOCKS) * BLOCK_TOKENS, cached=(len(BLOCKS) - 1) * BLOCK_TOKENS)
    assert held(at, old) == 3


def test_where_events_say_what_is_held_nothing_is_inferred() -> None:
    at, _ = owners()
    old = tuple(b"o%d" % number + b"." * 14 for number in range(3))
    keep(at, old)
    keep(at)
    at.events_live(P0, True)
    keep(at, predicted=len(BLOCKS) * BLOCK_TOKENS, cached=0)
    assert held(at, old) == 3
    at.note(view(), 0.0)
    many = tuple(bytes([n // 250, n % 250]) + b"." * 14 for n in range(400))
    at.engine_held(P0, 1, many, Tier.DEVICE)
    assert held(at, many) == 400, "its own events bound it, not our guess of its size"
    at.events_live(P0, False)
    at.note(view(), 0.0)
    assert at.index.held_blocks(P0) == FACTS.max_total_tokens // BLOCK_TOKENS


def test_what_came_before_the_evictions_that_made_room_for_it_is_kept() -> None:
    """Another gateway hears of the evictions: what it says reaches this one after what this one placed itself."""
    at, _ = owners()
    at.note(view(), 0.0)
    full = FACTS.max_total_tokens // BLOCK_TOKENS
    many = tuple(bytes([n // 250, n % 250]) + b"." * 14 for n in range(full))
    at.events_elsewhere(P0, True)
    at.note(view(), 0.0)
    at.held(P0, Run(b"", many), Tier.DEVICE)
    keep(at)
    assert (held(at), held(at, many)) == (len(BLOCKS), full)
    at.events_elsewhere(P0, False)
    at.note(view(), 0.0)
    assert at.index.held_blocks(P0) == full, "nobody says what it evicts: its size does"


def test_an_engines_own_word_goes_to_index_and_store() -> None:
    at, store = owners()
    at.note(view(), 0.0)
    at.engine_held(P0, 1, BLOCKS, Tier.DEVICE)
    assert held(at) == store.owners(BLOCKS, 0.0)[P0] == len(BLOCKS)
    at.engine_lost(P0, 1, BLOCKS[5:], Tier.DEVICE)
    assert held(at) == store.owners(BLOCKS, 0.0)[P0] == 5
    at.engine_cleared(P0, 1)
    assert held(at) == 0
    assert store.owners(BLOCKS, 0.0) == {}


def test_the_word_of_an_earlier_boot_counts_for_nothing() -> None:
    at, store = owners()
    at.note(view(2), 0.0)
    keep(at)
    at.note(view(2), 0.0)
    at.engine_held(P0, 1, BLOCKS, Tier.DEVICE)
    assert store.owners(BLOCKS, 0.0) == {}


def test_what_others_do_goes_to_the_index_alone() -> None:
    at, store = owners()
    at.note(view(), 0.0)
    at.held(P0, Run(b"", BLOCKS[:4]), Tier.DEVICE)
    at.held(P0, Run(BLOCKS[3], BLOCKS[4:]), Tier.DEVICE)
    assert held(at) == len(BLOCKS)
    at.lost(P0, BLOCKS[6:], Tier.DEVICE)
    assert held(at) == 6
    at.promised(P0, BLOCKS[6:])
    assert at.match(request())[P0].pending_blocks == len(BLOCKS)
    at.unpromised(P0, BLOCKS[6:])
    assert at.match(request())[P0].pending_blocks == 6
    assert list(store.snapshot(0.0)) == []


def test_while_an_engine_is_doubted_the_index_is_told_nothing_of_our_boot() -> None:
    at, _ = owners()
    keep(at)
    before = at.promise(view(), request(BLOCKS[:2]), 0.0)
    at.cleared(P0)
    at.restart_seen(P0)
    assert at.is_doubted(P0)
    under_way = at.promise(view(), request(), 0.0)
    keep(at, BLOCKS[:5])
    at.engine_held(P0, 1, BLOCKS, Tier.DEVICE)
    assert at.match(request()) == {}
    at.held(P0, Run(b"", BLOCKS[:3]), Tier.DEVICE)
    at.note(view(2, replace(FACTS, boot_fingerprint="b2")), 0.0)
    at.kept(view(), request(), under_way, 0.0, 0, None)
    at.broken(view(), request(BLOCKS[:2]), before)
    hit = at.match(request())[P0]
    assert (hit.held_blocks, hit.pending_blocks) == (3, 3)


def test_a_promise_of_before_a_flush_takes_nothing_from_one_after_it() -> None:
    at, _ = owners()
    old = at.promise(view(), request(), 0.0)
    at.engine_cleared(P0, 1)
    new = at.promise(view(), request(), 0.0)
    at.broken(view(), request(), old)
    assert at.match(request())[P0].pending_blocks == len(BLOCKS)
    at.broken(view(), request(), new)
    assert at.match(request()) == {}
    assert at._promised == {}


def test_what_was_dispatched_before_a_flush_is_not_held_after_it() -> None:
    at, store = owners()
    claim = at.promise(view(), request(), 0.0)
    at.engine_cleared(P0, 1)
    at.kept(view(), request(), claim, 0.0, 0, None)
    assert at.match(request()) == {}
    assert store.owners(BLOCKS, 0.0) == {}


def test_a_miss_tells_others_of_this_chain_alone() -> None:
    at, store = owners()
    old = tuple(b"o%d" % number + b"." * 14 for number in range(3))
    keep(at, old)
    keep(at)
    keep(at, predicted=len(BLOCKS) * BLOCK_TOKENS, cached=BLOCK_TOKENS)
    assert held(at, old) == 0, "it was used before what is gone"
    assert store.owners(old, 0.0) == {P0: 3}, "nobody saw that"


@pytest.mark.parametrize("here", [True, False])
def test_where_events_are_followed_a_miss_ends_this_chain_and_no_other(here: bool) -> None:
    at, store = owners()
    old = tuple(b"o%d" % number + b"." * 14 for number in range(3))
    keep(at, old)
    keep(at)
    (at.events_live if here else at.events_elsewhere)(P0, True)
    claim = at.promise(view(), request(), 0.0)
    told: list[bytes] = []
    at.index.add_held = lambda *_: None  # type: ignore[method-assign]
    store.evict = lambda engine, epoch, blocks, tier=None: told.extend(blocks)  # type: ignore[method-assign]
    at.kept(view(), request(), claim, 0.0, len(BLOCKS) * BLOCK_TOKENS, BLOCK_TOKENS)
    assert (held(at), held(at, old)) == (1, 3)
    assert told == list(BLOCKS[1:])


@pytest.mark.parametrize("here", [True, False])
def test_where_events_are_followed_they_alone_are_told_to_others(here: bool) -> None:
    """What a request left there may be evicted before that is written: only the events say it in their order."""
    at, store = owners()
    at.note(view(), 0.0)
    (at.events_live if here else at.events_elsewhere)(P0, True)
    keep(at)
    assert held(at) == len(BLOCKS), "this gateway need not wait for them"
    assert store.owners(BLOCKS, 0.0) == {}
    assert not list(store.snapshot(0.0)), "nor is it pending any more"
    at.engine_held(P0, 1, BLOCKS, Tier.DEVICE)
    (row,) = store.snapshot(0.0)
    claim = at.promise(view(), request(), 500.0)
    at.kept(view(), request(), claim, 500.0, 0, None)
    (later,) = [each for each in store.snapshot(500.0) if each.state is RowState.HELD]
    assert later.expires_s > row.expires_s, "a hit prolongs what they said"


def test_events_bound_every_tier() -> None:
    at, _ = owners()
    at.note(view(), 0.0)
    at.events_live(P0, True)
    at.note(view(), 0.0)
    many = tuple(number.to_bytes(16, "big") for number in range(1, 20_001))
    for tier in Tier:
        at.engine_held(P0, 1, many, tier)
        assert at.index.held_blocks(P0, tier) == 20_000
