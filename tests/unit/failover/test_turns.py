"""Turns: so many tokens at a time, first come first served, and none is lost wherever one who waits is cancelled."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.tasks import spawn
from failover.turns import Turns
from tests.fakes import now_s, timeless


class Scene:
    """Those who take turns of a second each, by name."""

    def __init__(self, room_tokens: float = 100.0) -> None:
        self.room_tokens = room_tokens
        self.turns = Turns(lambda: self.room_tokens)
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def come(self, name: str, tokens: int, within_s: float = 100.0, works_s: float = 1.0) -> None:
        self.tasks[name] = spawn(self._work(name, tokens, now_s() + within_s, works_s), name)

    async def _work(self, name: str, tokens: int, deadline_s: float, works_s: float) -> None:
        async with self.turns.turn(tokens, deadline_s):
            self.begun.append(name)
            await asyncio.sleep(works_s)

    async def end(self) -> None:
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.check_empty()

    def check_empty(self) -> None:
        assert (self.turns.waiting, self.turns.under_way, self.turns.under_way_tokens) == (0, 0, 0)


async def let_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@timeless
async def test_as_many_as_have_room_and_the_rest_in_order() -> None:
    scene = Scene(100.0)
    for name, tokens in (("a", 60), ("b", 40), ("c", 10), ("d", 90), ("e", 10)):
        scene.come(name, tokens)
    await let_run()
    assert (scene.begun, scene.turns.waiting, scene.turns.under_way_tokens) == (["a", "b"], 3, 100)
    await asyncio.sleep(1.01)
    assert (scene.begun, scene.turns.under_way_tokens) == (["a", "b", "c", "d"], 100)
    await scene.end()
    assert scene.begun == list("abcde")


@timeless
async def test_one_that_is_longer_than_the_room_goes_alone() -> None:
    scene = Scene(100.0)
    scene.come("small", 1)
    scene.come("huge", 500)
    scene.come("next", 1)
    await let_run()
    assert scene.begun == ["small"]
    await asyncio.sleep(1.01)
    assert scene.begun == ["small", "huge"]
    await scene.end()
    assert scene.begun == ["small", "huge", "next"]


@timeless
async def test_without_any_room_they_go_one_by_one() -> None:
    scene = Scene(0.0)
    for name in "abc":
        scene.come(name, 10)
    for count in (1, 2, 3):
        await let_run()
        assert len(scene.begun) == count
        await asyncio.sleep(1.0)
    await scene.end()


@timeless
async def test_room_that_grows_is_used_at_the_next_change() -> None:
    scene = Scene(10.0)
    for name in "abcd":
        scene.come(name, 10)
    await let_run()
    scene.room_tokens = 30.0
    await asyncio.sleep(1.01)
    assert scene.begun == list("abcd")
    await scene.end()


@timeless
async def test_a_turn_is_over_at_hand_over_and_only_once() -> None:
    scene = Scene(10.0)
    async with scene.turns.turn(10, now_s() + 1.0) as turn:
        scene.come("b", 10)
        await let_run()
        assert scene.begun == []
        turn.over()
        turn.over()
        await let_run()
        assert scene.begun == ["b"]
    assert scene.turns.under_way == 1, "the end of the block takes nobody else's turn"
    await scene.end()


@timeless
async def test_who_waits_too_long_hears_so_and_leaves_nothing() -> None:
    scene = Scene(10.0)
    scene.come("a", 10, works_s=5.0)
    scene.come("late", 10, within_s=2.0)
    scene.come("b", 10)
    begun_s = now_s()
    with pytest.raises(TimeoutError):
        await scene.tasks["late"]
    assert now_s() - begun_s == pytest.approx(2.0)
    assert scene.turns.waiting == 1
    await scene.end()
    assert scene.begun == ["a", "b"]


@timeless
async def test_a_deadline_that_has_passed_takes_no_turn_that_must_be_waited_for() -> None:
    scene = Scene(10.0)
    scene.come("a", 10)
    await let_run()
    with pytest.raises(TimeoutError):
        async with scene.turns.turn(10, now_s() - 1.0):
            raise AssertionError("no turn")
    await scene.end()


@timeless
async def test_who_leaves_from_the_head_lets_those_behind_in() -> None:
    scene = Scene(100.0)
    scene.come("a", 60, works_s=50.0)
    scene.come("big", 90)
    scene.come("small", 30)
    await let_run()
    assert scene.begun == ["a"]
    scene.tasks["big"].cancel()
    await let_run()
    assert scene.begun == ["a", "small"]
    await scene.end()


@timeless
async def test_who_leaves_from_the_middle_is_waited_for_no_more() -> None:
    scene = Scene(100.0)
    for name, tokens in (("a", 60), ("first", 90), ("middle", 90), ("last", 90)):
        scene.come(name, tokens)
    await let_run()
    scene.tasks["middle"].cancel()
    await let_run()
    assert scene.turns.waiting == 2
    await scene.end()
    assert scene.begun == ["a", "first", "last"]


@timeless
async def test_a_failure_within_a_turn_ends_it() -> None:
    turns = Turns(lambda: 10.0)
    with pytest.raises(ValueError, match="boom"):
        async with turns.turn(10, now_s() + 1.0):
            raise ValueError("boom")
    assert turns.under_way == 0


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("freed", [False, True])
def test_cancelled_at_every_step_it_leaves_no_turn_taken(steps: int, freed: bool) -> None:
    """Also where the turn comes in the same step as the cancellation: before it, or after it."""

    @timeless
    async def runs() -> None:
        for cancel_first in (False, True):
            scene = Scene(10.0)
            async with scene.turns.turn(10, now_s() + 50.0) as holder:
                scene.come("b", 10)
                scene.come("c", 10)
                for _ in range(steps):
                    await asyncio.sleep(0)
                if not freed:
                    scene.tasks["b"].cancel()
                    await let_run()
                elif cancel_first:
                    scene.tasks["b"].cancel()
                    holder.over()
                else:
                    holder.over()
                    scene.tasks["b"].cancel()
                await let_run()
            await scene.end()
            assert scene.begun[-1:] == ["c"]
            assert scene.tasks["b"].cancelled()

    runs()


@timeless
async def test_a_deadline_and_a_turn_at_the_same_moment_lose_no_turn() -> None:
    for first in ("turn", "deadline"):
        scene = Scene(10.0)
        scene.come("a", 10, works_s=1.0 if first == "turn" else 1.0 + 1e-9)
        await asyncio.sleep(0)
        scene.come("b", 10, within_s=1.0 + (1e-9 if first == "turn" else 0.0))
        scene.come("c", 10)
        await scene.end()
        assert "c" in scene.begun


moves = st.lists(
    st.tuples(st.integers(1, 150), st.floats(0.0, 3.0), st.floats(0.1, 5.0), st.none() | st.floats(0.0, 4.0)),
    max_size=20,
)


@given(moves)
def test_nothing_is_lost_and_the_room_is_kept(moves: list[tuple[int, float, float, float | None]]) -> None:
    @timeless
    async def runs() -> None:
        scene = Scene(100.0)
        loop = asyncio.get_running_loop()
        for number, (tokens, comes_s, works_s, cancelled_s) in enumerate(moves):
            name = str(number)
            loop.call_later(comes_s, scene.come, name, tokens, 3.0, works_s)
            if cancelled_s is not None:
                loop.call_later(comes_s + cancelled_s, lambda name=name: scene.tasks[name].cancel())
        for _ in range(100):
            await asyncio.sleep(0.1)
            assert scene.turns.under_way_tokens <= 100 or scene.turns.under_way == 1
        await asyncio.sleep(60.0)
        await scene.end()

    runs()
