"""Attempts at one content wait for each other after a death, for a while, and are refused after two."""

from __future__ import annotations

import asyncio

import pytest

from engines.tasks import spawn
from engines.types import EngineId, Leg
from failover.poison import PoisonGuard
from failover.suspects import May, Victim
from gateway.errors import GatewayError
from gateway.suspects import TRIAL_S, ContentTrials
from tests.fakes import now_s, timeless

P0, P1, P2 = (Victim(Leg.PREFILL, EngineId(f"http://p{number}"), 1) for number in range(3))
CONTENT = b"what was asked"


def trials() -> ContentTrials:
    return ContentTrials(PoisonGuard())


async def lost(contents: ContentTrials, victim: Victim) -> None:
    """A server ends under an attempt."""
    async with contents.trial(CONTENT) as trial:
        assert trial.begins()
        trial.broke(victim)
        trial.found([victim])


@timeless
async def test_one_goes_others_wait_and_go_together_when_it_did_no_harm() -> None:
    contents, begun = trials(), list[str]()

    async def attempt(name: str, works_s: float) -> None:
        async with contents.trial(CONTENT) as trial:
            assert trial.begins()
            begun.append(name)
            await asyncio.sleep(works_s)
            trial.harmless()
            trial.harmless()

    await lost(contents, P0)
    running = [spawn(attempt(name, 1.0), name) for name in ("a", "b", "c")]
    await asyncio.sleep(0.5)
    assert begun == ["a"]
    await asyncio.sleep(0.6)
    assert begun == ["a", "b", "c"]
    await asyncio.gather(*running)
    assert not contents._waiting


@timeless
async def test_who_waits_is_refused_when_a_second_server_ends() -> None:
    contents = trials()
    await lost(contents, P0)

    async def asked() -> None:
        async with contents.trial(CONTENT):
            raise AssertionError("it may never begin")

    async with contents.trial(CONTENT) as trial:
        assert trial.begins()
        waiting = spawn(_error(asked()), "waiting")
        await asyncio.sleep(0.1)
        assert not waiting.done()
        trial.broke(P1)
        trial.found([P1])
        assert trial.deaths == 2
    error = await waiting
    assert (error.code, error.status, error.safe_to_retry) == ("poison_suspected", 502, False)
    assert (await _error(asked())).code == "poison_suspected"


async def _error(asking: object) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await asking  # type: ignore[misc]
    return caught.value


@timeless
async def test_who_had_its_turn_before_a_server_ended_asks_again() -> None:
    contents = trials()
    async with contents.trial(CONTENT) as early:
        async with contents.trial(CONTENT) as other:
            assert other.begins()
            other.broke(P0)
            assert not early.begins(), "it waited for a pair meanwhile"
            other.found([P0])
            assert not early.begins()
        assert early.begins(), "the other is over"


@timeless
async def test_a_silent_attempt_is_not_waited_for_longer_than_it_may_take() -> None:
    contents = trials()
    await lost(contents, P0)
    async with contents.trial(CONTENT) as silent:
        assert silent.begins()
        began_s = now_s()
        async with contents.trial(CONTENT) as other:
            assert now_s() - began_s == pytest.approx(TRIAL_S)
            assert other.begins()


@timeless
async def test_nobody_waits_beyond_the_deadline_of_the_request() -> None:
    contents = trials()
    await lost(contents, P0)
    async with contents.trial(CONTENT) as silent:
        assert silent.begins()
        deadline_s = now_s() + TRIAL_S / 4
        async with contents.trial(CONTENT, deadline_s):
            assert now_s() == pytest.approx(deadline_s)


@timeless
async def test_what_ends_after_the_first_output_tells_of_no_other() -> None:
    contents = trials()
    async with contents.trial(CONTENT) as trial:
        assert trial.begins()
        trial.harmless()
        for victim in (P0, P1, P2):
            trial.broke(victim)
            trial.found([victim])
        assert trial.deaths == 0
    assert len(contents.suspects) == 0


@timeless
async def test_what_others_refuse_is_refused_here() -> None:
    poison = PoisonGuard()
    contents = ContentTrials(poison)
    async with contents.trial(CONTENT) as trial:
        poison.hear(CONTENT, 60.0, now_s())
        assert not trial.begins()
    with pytest.raises(GatewayError):
        await contents.trial(CONTENT).__aenter__()


@timeless
async def test_who_broke_off_and_was_not_looked_at_is_no_victim() -> None:
    """Its client had left."""
    contents = trials()
    async with contents.trial(CONTENT) as trial:
        assert trial.begins()
        trial.broke(P0)
        trial.broke(P0)
        assert contents.suspects.may_try(CONTENT, now_s()) is May.WAIT
    assert len(contents.suspects) == 0


@timeless
async def test_only_what_broke_off_can_be_found_to_have_ended() -> None:
    contents = trials()
    async with contents.trial(CONTENT) as trial:
        assert trial.begins()
        trial.broke(P0)
        trial.found([P0, P1])
        assert trial.deaths == 1
