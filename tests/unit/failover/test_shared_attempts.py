"""The journal of live attempts over a stand-in: batches, what is never written, trouble, a mark, another name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engines.tasks import running, spawn
from engines.types import EngineId
from failover import shared_attempts
from failover.journal import FailoverKeys, Server, unpack_attempt
from failover.reaper import ReplicaName
from failover.shared import LinkTrouble
from failover.shared_attempts import FLUSH_S, SharedAttempts
from tests.fakes import timeless

KEYS = FailoverKeys("pdgate", "f")
P, D = Server(EngineId("http://p0"), "boot p"), Server(EngineId("http://d0"), "boot d")


class Journals:
    """Does what `write_attempts.lua` does. `down`: calls fail; `deceptive`: they fail and are carried out."""

    def __init__(self) -> None:
        self.written: dict[bytes, dict[str, bytes]] = {}
        self.marked: set[bytes] = set()
        self.calls = 0
        self.down = self.deceptive = False

    async def run(self, script: str, keys: Sequence[bytes], args: Sequence[Any]) -> int:
        assert script == "write_attempts"
        await asyncio.sleep(0.001)
        self.calls += 1
        if self.down and not self.deceptive:
            raise LinkTrouble("down")
        if keys[1] in self.marked:
            return 0
        whole, _, over, *rest = args
        rows = {} if whole else self.written.setdefault(keys[0], {})
        for rid in rest[:over]:
            rows.pop(rid, None)
        rows.update(zip(rest[over::2], rest[over + 1 :: 2], strict=True))
        self.written[keys[0]] = rows
        if self.down:
            raise LinkTrouble("who knows")
        return 1

    def rids(self, name: str = "me") -> set[str]:
        return set(self.written.get(KEYS.attempts(name), {}))


@asynccontextmanager
async def started(journals: Journals, name: ReplicaName | None = None) -> AsyncIterator[SharedAttempts]:
    attempts = SharedAttempts(journals, KEYS, name or ReplicaName("me"), spawn)  # type: ignore[arg-type]
    await attempts.start()
    yield attempts
    await attempts.stop()
    assert "journal attempts" not in running()


@timeless
async def test_changes_of_one_moment_are_one_call() -> None:
    journals = Journals()
    async with started(journals) as attempts:
        for number in range(50):
            attempts.begin(f"r{number}", P, D)
            await asyncio.sleep(0.0005)
        assert journals.calls == 0, "nobody waits for it"
        await asyncio.sleep(2 * FLUSH_S)
        assert (journals.calls, len(journals.rids())) == (1, 50)
        assert unpack_attempt(journals.written[KEYS.attempts("me")]["r7"]) == (P, D)
        for number in range(49):
            attempts.end(f"r{number}")
        attempts.begin("new", P, D)
        await asyncio.sleep(2 * FLUSH_S)
        assert (journals.calls, journals.rids()) == (2, {"r49", "new"})
        await asyncio.sleep(60.0)
        assert journals.calls == 2, "an idle gateway writes nothing"


@timeless
async def test_what_is_over_before_it_is_written_never_is() -> None:
    journals = Journals()
    async with started(journals) as attempts:
        attempts.begin("r", P, D)
        attempts.end("r")
        attempts.end("r")
        attempts.end("never begun")
        await asyncio.sleep(1.0)
        assert (journals.calls, len(attempts)) == (0, 0)


@timeless
async def test_an_end_during_the_write_of_its_beginning_is_written_after_it() -> None:
    journals = Journals()
    async with started(journals) as attempts:
        attempts.begin("r", P, D)
        await asyncio.sleep(FLUSH_S + 0.0005)
        attempts.end("r")
        await asyncio.sleep(1.0)
        assert (journals.calls, journals.rids()) == (2, set())


@timeless
async def test_many_are_written_in_several_calls() -> None:
    journals = Journals()
    async with started(journals) as attempts:
        for number in range(2500):
            attempts.begin(f"r{number}", P, D)
        await asyncio.sleep(1.0)
        assert (journals.calls, len(journals.rids())) == (3, 2500)
        attempts.rewrite()
        for number in range(2499):
            attempts.end(f"r{number}")
        await asyncio.sleep(1.0)
        assert journals.rids() == {"r2499"}


@pytest.mark.parametrize("deceptive", [False, True])
def test_after_trouble_all_of_it_is_written(deceptive: bool) -> None:
    @timeless
    async def test() -> None:
        journals = Journals()
        async with started(journals) as attempts:
            attempts.begin("old", P, D)
            attempts.begin("ends", P, D)
            await asyncio.sleep(0.2)
            journals.down, journals.deceptive = True, deceptive
            attempts.begin("new", P, D)
            attempts.end("ends")
            await asyncio.sleep(2.0)
            journals.down = False
            if not deceptive:
                journals.written.clear()
            await asyncio.sleep(1.0)
            assert journals.rids() == {"old", "new"}

    test()


@timeless
async def test_a_mark_is_told_and_another_name_takes_all_along() -> None:
    journals, name = Journals(), ReplicaName("me")
    async with started(journals, name) as attempts:
        attempts.begin("r", P, D)
        await asyncio.sleep(0.2)
        journals.marked.add(KEYS.reaped("me"))
        attempts.begin("new", P, D)
        await asyncio.sleep(0.2)
        assert journals.rids() == {"r"}
        attempts.marked = lambda: (name.renew(), attempts.rewrite())  # type: ignore[func-returns-value]
        await asyncio.sleep(1.0)
        assert name.now == "me-2"
        assert journals.rids("me-2") == {"r", "new"}
        assert journals.rids() == {"r"}, "that is the reaper's now"


@timeless
async def test_there_is_a_bound() -> None:
    journals = Journals()
    async with started(journals) as attempts:
        for number in range(shared_attempts.MAX_ATTEMPTS + 5):
            attempts.begin(f"r{number}", P, D)
        assert (len(attempts), attempts.unwritten) == (shared_attempts.MAX_ATTEMPTS, 5)
        attempts.end(f"r{shared_attempts.MAX_ATTEMPTS + 1}")
        attempts.end("r0")
        assert len(attempts) == shared_attempts.MAX_ATTEMPTS - 1
