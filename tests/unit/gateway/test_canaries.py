"""Canaries over links that a test makes and breaks: where they go, what they cost, what follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import orjson
import pytest

from engines.emulator.core import Timeouts
from engines.errors import UpstreamError
from engines.tasks import running
from engines.types import EngineId, EngineLoad, FailureKind, Health
from failover.pair_health import FORGOTTEN_AFTER_S, Against, Pair, PairState
from gateway.canaries import CANARY_S, PATIENCE_S
from gateway.config import FleetConfig
from gateway.context import Gateway
from gateway.errors import GatewayError
from tests.fakes import Answer, FakeExchange, FakeUpstream, gateway, now_s, probed, request, timeless

P0, P1, D0, D1 = (EngineId(f"http://{name}") for name in ("p0", "p1", "d0", "d1"))
ABORTED = b'{"object":"error","message":"Decode transfer failed with exception KVTransferError(1): Aborted","code":500}'
GAVE_UP = (
    b'{"object":"error","message":"KVTransferError(1): timed out after 300s in KVPoll.WaitingForInput","code":500}'
)


@dataclass
class Links:
    """What becomes of the KV between each two servers. `broken`: it never arrives; `garbled`: it arrives as other."""

    broken: set[Pair] = field(default_factory=set)
    garbled: set[Pair] = field(default_factory=set)
    status: dict[EngineId, int] = field(default_factory=dict)
    down: set[EngineId] = field(default_factory=set)
    sent: list[tuple[float, Pair]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    most_at_once: int = 0
    slow_s: float = 0.01
    _legs: dict[int, dict[str, FakeExchange]] = field(default_factory=dict)
    _of_rid: dict[tuple[str, str], FakeExchange] = field(default_factory=dict)
    _busy: dict[EngineId, int] = field(default_factory=dict)

    def answer(self, url: str, body: bytes) -> Answer:
        engine, sent = EngineId(url.removesuffix("/generate")), orjson.loads(body)
        if engine in self.down:
            return UpstreamError(FailureKind.CONNECT, "refused", definite=True)
        if status := self.status.get(engine):
            return FakeExchange(status, b'{"message":"no"}', whole=True)
        exchange = FakeExchange()
        exchange.headers = {"content-type": "application/json"}
        self._of_rid[engine, sent["rid"]] = exchange
        legs = self._legs.setdefault(sent["bootstrap_room"], {})
        legs[engine] = exchange
        if len(legs) == 2:
            pair = (EngineId(max(legs)), EngineId(min(legs)))
            self.sent.append((now_s(), pair))
            self.prompts.append(sent["text"])
            for each in pair:
                self._busy[each] = self._busy.get(each, 0) + 1
            self.most_at_once = max(self.most_at_once, *self._busy.values())
            asyncio.get_running_loop().call_later(self.slow_s, self._arrive, pair, legs)
        return exchange

    def _arrive(self, pair: Pair, legs: dict[str, FakeExchange]) -> None:
        if pair in self.broken:
            return
        ids = [9, 9, 9, 9] if pair in self.garbled else [9, 8, 7, 6]
        for engine, exchange in legs.items():
            self._busy[EngineId(engine)] -= 1
            exchange.send(orjson.dumps({"text": "x", "output_ids": ids, "meta_info": {"finish_reason": None}}))
            exchange.end()

    def aborted(self, url: str, rid: str) -> None:
        engine = EngineId(url.removesuffix("/abort_request"))
        self.end(engine, rid, ABORTED)

    def end(self, engine: EngineId, rid: str, body: bytes) -> None:
        exchange = self._of_rid.pop((engine, rid), None)
        if exchange is not None:
            self._busy[engine] -= 1
            exchange.status = 500
            exchange.send(body)
            exchange.end()

    def open_on(self, engine: EngineId) -> list[str]:
        return [rid for (each, rid), exchange in self._of_rid.items() if each == engine and not exchange.closed]

    def pairs(self) -> list[Pair]:
        return [pair for _, pair in self.sent]


@asynccontextmanager
async def flying(
    links: Links, monkeypatch: pytest.MonkeyPatch, *names: str, interval_s: float = 0.0
) -> AsyncIterator[Gateway]:
    upstream = FakeUpstream(links.answer)
    upstream.aborted = links.aborted
    gw = gateway(upstream, *names)
    monkeypatch.setattr(gw.canaries, "_interval_s", interval_s)
    for owner, name in ((gw.monitor, "is_stale"), (gw.decider, "_is_stale")):
        monkeypatch.setattr(owner, name, lambda engine_id: False)
    await probed(gw)
    gw.canaries.start()
    try:
        yield gw
        assert gw.decider.bookings.live() == len(gw.canaries._waiting) + len(gw.canaries._flying)
    finally:
        await gw.canaries.stop()
        await gw.releaser.drained(10.0)
    assert gw.decider.bookings.live() == 0
    assert [name for name in running() if "canar" in name or "heartbeat" in name] == []


def restart(gw: Gateway, engine_id: EngineId) -> None:
    """A server is another process from now on."""
    facts = gw.fleet.view(engine_id).facts
    assert facts is not None
    gw.fleet.set_facts(engine_id, replace(facts, boot_fingerprint=f"boot at {now_s()}"))
    gw.decider.restarted(engine_id)


def states(gw: Gateway) -> dict[Pair, PairState]:
    return {pair: record.state for pair, record in gw.decider.pairs.health.records.items()}


async def until_ok(gw: Gateway, within_s: float = 60.0) -> float:
    """Wait until no pair is in trouble; how long that took."""
    began_s = now_s()
    while gw.decider.pairs.health.records:
        assert now_s() < began_s + within_s, states(gw)
        await asyncio.sleep(0.01)
    return now_s() - began_s


@timeless
async def test_what_is_under_way_is_told_until_it_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken pairs get canaries that are not answered: booked at first, then released, then gone."""
    links = Links(broken={(P0, D0), (P0, D1)})
    async with flying(links, monkeypatch) as gw:
        assert gw.canaries.under_way() == []
        restart(gw, P0)
        await asyncio.sleep(CANARY_S / 2)
        told = gw.canaries.under_way()
        assert len(told) == len(gw.canaries._flying) == gw.decider.bookings.live() > 0
        rooms = {str(room) for room in links._legs}
        for each in told:
            assert (each["prefill"], each["decode"]) in links.broken
            assert each["room"] in rooms
            booked = gw.decider.bookings.own(P0).uncached_tokens
            assert booked == sum(int(canary["uncached_tokens"]) for canary in told)
        await asyncio.sleep(CANARY_S * 0.6)
        still = {each["rid"] for each in told} & {each["rid"] for each in gw.canaries.under_way()}
        assert still, "one is left to wait on its decode"
        links.broken.clear()
        await until_ok(gw, PATIENCE_S + 60.0)
        await asyncio.sleep(10.0)
        assert {str(each["rid"]) for each in gw.canaries.under_way()}.isdisjoint(still)
        assert len(gw.canaries._sent) <= 8, "it remembers no more than it must"


# ---- in trouble ----------------------------------------------------------------------------------------------------


@timeless
async def test_every_pair_of_a_restarted_prefill_gets_a_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    async with flying(links, monkeypatch) as gw:
        restart(gw, P0)
        assert set(states(gw).values()) == {PairState.QUARANTINED}
        assert await until_ok(gw) < 1.0
        assert sorted(links.pairs()) == [(P0, D0), (P0, D1)]
        assert links.most_at_once == 1, "one at a time on each server"
        assert gw.canaries.counts == {"passed": 2, "failed": 0, "differed": 0, "void": 0}
        assert len(set(links.prompts)) == 2
        await asyncio.sleep(120.0)
        assert len(links.sent) == 2, "nothing is in trouble, and no idle pairs have a turn"


@timeless
async def test_a_request_waits_for_the_canary_of_its_only_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(slow_s=0.5)
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        restart(gw, P0)
        decision = await gw.decider.submit(request())
        assert decision.waited_s >= 0.5
        assert states(gw) == {}
        gw.decider.finished(decision)


@timeless
async def test_a_canary_is_booked_while_it_flies(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(slow_s=1.0)
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        restart(gw, P0)
        await asyncio.sleep(0.5)
        bookings = gw.decider.bookings
        assert (bookings.prefill_requests(P0), bookings.decode_requests(D0)) == (1, 1)
        assert bookings.decode_kv_tokens(D0) > len(links.prompts[0])
        await until_ok(gw)
        assert bookings.live() == 0


@timeless
async def test_a_broken_link_is_tried_ever_more_rarely_until_it_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(broken={(P0, D0)})
    async with flying(links, monkeypatch) as gw:
        restart(gw, P0)
        await asyncio.sleep(200.0)  # the longest pauses, by chance, sum up to 158 s before the first of full length
        assert set(states(gw)) == {(P0, D0)}
        times_s = [at_s for at_s, pair in links.sent if pair == (P0, D0)]
        gaps_s = [later - sooner for sooner, later in pairwise(times_s)]
        assert 5 <= len(times_s) <= 12
        assert gaps_s[0] < CANARY_S + 2.0
        assert gaps_s[-1] > 25.0
        assert gw.canaries.counts["failed"] in (len(times_s) - 1, len(times_s)), "one may be on its way"
        links.broken.clear()
        assert await until_ok(gw) < 50.0


@timeless
async def test_one_canary_is_left_to_make_the_decode_forget_an_old_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode drops it only when a request has waited in vain, however many were aborted before."""
    links = Links(broken={(P0, D0)})
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        restart(gw, P0)
        await asyncio.sleep(100.0)
        for _ in range(60):  # another canary may be on its way just now
            if links.open_on(P0):
                await asyncio.sleep(0.1)
        assert links.open_on(P0) == [], "the prefill is free"
        assert len(links.sent) > 4
        (rid,) = links.open_on(D0)
        assert gw.decider.bookings.decode_requests(D0) == 1, "what it holds is explained"
        assert gw.decider.bookings.prefill_requests(P0) in (0, 1)
        tried = len(links.sent)
        links.broken.clear()
        links.end(D0, rid, GAVE_UP)
        assert await until_ok(gw) < 0.5, "it is tried at once"
        assert len(links.sent) == tried + 1


@timeless
async def test_what_was_left_is_let_go_of_when_another_canary_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(broken={(P0, D0)})
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        restart(gw, P0)
        await asyncio.sleep(20.0)
        assert links.open_on(D0)
        links.broken.clear()
        await until_ok(gw)
        await asyncio.sleep(1.0)
        assert links.open_on(D0) == []
        assert gw.decider.bookings.live() == 0


@timeless
async def test_a_decode_that_says_nothing_at_all_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(broken={(P0, D0)})
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        restart(gw, P0)
        await asyncio.sleep(20.0)
        first = links.open_on(D0)[0]
        await asyncio.sleep(PATIENCE_S + 20.0)
        assert first not in links.open_on(D0)


@timeless
async def test_a_suspected_pair_is_cleared_by_one_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    async with flying(links, monkeypatch) as gw:
        gw.decider.pairs.health.transfer_failed((P1, D1), Against("lost"), now_s(), now_s())
        assert await until_ok(gw) < 1.0
        assert links.pairs() == [(P1, D1)]


@timeless
async def test_a_server_that_is_not_up_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        gw.fleet.set_health(D0, Health.SUSPECTED)
        restart(gw, P0)
        await asyncio.sleep(30.0)
        assert links.sent == []
        gw.fleet.set_health(D0, Health.READY)
        assert await until_ok(gw) < 1.0


@timeless
async def test_a_full_decode_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        facts = gw.fleet.view(D0).facts
        assert facts is not None
        gw.fleet.set_load(D0, EngineLoad(1.0, 1, 0, 0, 0, facts.max_total_tokens, facts.max_total_tokens))
        restart(gw, P0)
        await asyncio.sleep(30.0)
        assert links.sent == []


@timeless
async def test_what_a_server_is_at_fault_for_says_nothing_of_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair stays closed; after some canaries that say nothing one request at a time may look."""
    links = Links(status={P0: 400, D0: 400})
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        restart(gw, P0)
        await asyncio.sleep(30.0)
        assert gw.canaries.counts["failed"] == 0
        assert gw.canaries.counts["void"] >= 3
        assert gw.decider.pairs.health.records[P0, D0].failures == 0
        decision = await gw.decider.submit(request())
        assert decision.waited_s < 1.0
        gw.decider.handed_over(decision)
        gw.decider.finished(decision)
        assert states(gw) == {}


@timeless
async def test_a_dead_server_is_the_monitors_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(down={D0})
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        restart(gw, P0)
        await asyncio.sleep(1.0)
        assert not gw.fleet.view(D0).takes_rooms
        assert gw.fleet.view(P0).takes_rooms
        assert gw.decider.pairs.health.records[P0, D0].failures == 0


@timeless
async def test_a_lost_transfer_speaks_against_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(broken={(P0, D0)})
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        restart(gw, P0)
        await asyncio.sleep(60.0)
        assert gw.fleet.view(P0).takes_rooms
        assert gw.fleet.view(D0).takes_rooms


@timeless
async def test_all_pairs_closed_one_request_at_a_time_tries_the_least_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(broken={(P0, D0)})
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        restart(gw, P0)
        await asyncio.sleep(CANARY_S + 0.3)
        first = await gw.decider.submit(request())
        assert first.waited_s < CANARY_S
        second = asyncio.ensure_future(gw.decider.submit(request(deadline_s=now_s() + 100.0)))
        await asyncio.sleep(1.0)
        assert not second.done()
        assert any("is proving" in line for line in first.pairs_in_trouble) or first.pairs_in_trouble
        gw.decider.handed_over(first)
        decided = await second
        for each in (first, decided):
            gw.decider.finished(each)


# ---- text ----------------------------------------------------------------------------------------------------------


@timeless
async def test_text_that_differs_from_other_pairs_closes_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers that differ prove nothing: the same is asked of the other diagonal before anybody is blamed."""
    links = Links(garbled={(P0, D1)})
    async with flying(links, monkeypatch, interval_s=30.0) as gw:
        await asyncio.sleep(100.0)
        assert set(states(gw)) == {(P0, D1)}
        assert "other text" in gw.decider.pairs.health.records[P0, D1].reason
        assert gw.canaries.counts["differed"] >= 1
        decision = await gw.decider.submit(request())
        assert decision.pair != (P0, D1)
        assert any("other text" in line for line in decision.pairs_in_trouble)
        gw.decider.finished(decision)
        links.garbled.clear()
        assert await until_ok(gw) < 50.0


@timeless
async def test_pairs_that_agree_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    async with flying(links, monkeypatch, interval_s=30.0) as gw:
        await asyncio.sleep(200.0)
        assert (states(gw), gw.canaries.counts["differed"]) == ({}, 0)


# ---- idle ----------------------------------------------------------------------------------------------------------


@timeless
async def test_idle_pairs_have_their_turn_one_canary_a_server_and_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    async with flying(links, monkeypatch, "p0", "p1", "p2", "d0", "d1", interval_s=30.0):
        await asyncio.sleep(3 * 30.0 + 29.0)
        assert len(set(links.pairs())) == 6, "all pairs in max(M, N) rounds"
        assert len(links.sent) <= 8
        await asyncio.sleep(3 * 30.0)
        assert min(links.pairs().count(pair) for pair in set(links.pairs())) >= 2, "its own canary earns it no leave"
        for name in (P0, P1, D0, D1):
            times_s = [at_s for at_s, pair in links.sent if name in pair]
            assert all(later - sooner > 29.0 for sooner, later in pairwise(times_s))


@timeless
async def test_pairs_that_requests_prove_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    async with flying(links, monkeypatch, "p0", "d0", interval_s=30.0) as gw:
        for _ in range(12):
            decision = await gw.decider.submit(request())
            gw.decider.handed_over(decision)
            gw.decider.finished(decision)
            await asyncio.sleep(15.0)
        assert links.sent == []
        await asyncio.sleep(70.0)
        assert links.pairs()[0] == (P0, D0), "it is idle now"


# ---- how long a prefill was away -----------------------------------------------------------------------------------


@timeless
async def test_the_silence_of_a_bootstrap_server_is_measured_while_its_prefill_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = Links(broken={(P0, D0), (P0, D1)})
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        upstream = gw.upstream
        assert isinstance(upstream, FakeUpstream)
        upstream.down.add("http://10.0.0.1:8998/health")
        gw.fleet.set_health(P0, Health.SUSPECTED)
        await asyncio.sleep(FORGOTTEN_AFTER_S + 2.0)
        restart(gw, P0)
        assert gw.decider.pairs.health.records[P0, D0].settles
        upstream.down.clear()
        await asyncio.sleep(1.5)
        gw.fleet.set_health(P0, Health.READY)


@timeless
async def test_a_bootstrap_server_that_answers_has_not_been_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(broken={(P0, D0)})
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        gw.fleet.set_health(P0, Health.SUSPECTED)
        await asyncio.sleep(2 * FORGOTTEN_AFTER_S)
        restart(gw, P0)
        assert not gw.decider.pairs.health.records[P0, D0].settles


def test_the_interval_is_a_knob() -> None:
    assert FleetConfig().canary_interval_s == 30.0


def test_one_canary_is_left_longer_than_a_decode_waits() -> None:
    assert Timeouts().waiting_s < PATIENCE_S


@timeless
async def test_a_fleet_whose_pairs_are_all_closed_is_an_outage_and_no_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(broken={(P0, D0)})
    async with flying(links, monkeypatch, "p0", "d0") as gw:
        restart(gw, P0)
        with pytest.raises(GatewayError) as error:
            await gw.decider.submit(request(deadline_s=now_s() + 1.0))
        assert error.value.status == 503
        assert "old addresses" in error.value.message


@timeless
async def test_what_is_told_of_pairs_is_on_every_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(broken={(P0, D0), (P0, D1)})
    async with flying(links, monkeypatch) as gw:
        decision = await gw.decider.submit(request())
        assert decision.pairs_in_trouble == ()
        gw.decider.finished(decision)
        restart(gw, P0)
        decision = await gw.decider.submit(request())
        assert [line.startswith(f"pair {P0}, ") for line in decision.pairs_in_trouble] == [True, True]
        assert decision.pair[0] == P1
        gw.decider.finished(decision)
        text = gw.metrics.text().decode()
        assert 'pdgate_pairs{state="ok"} 2.0' in text
        assert 'pdgate_canaries{result="passed"} 0.0' in text
