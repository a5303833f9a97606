"""What can be seen of a run on a real fleet: answers, and what gateways that are pdgate tell when asked. A shell.

Gateways are read only. What nobody tells is said to be unseen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from engines import tasks
from failover.chaos.answer import Answer
from failover.chaos.client_checks import BY_PDGATE, NO_REFERENCE, TRUE_ANSWERS, UNSEEN
from failover.chaos.history import History, Request
from failover.chaos.leftovers import gauges
from failover.chaos.reading import Told
from failover.chaos.real_reading import request
from failover.chaos.real_world import RealWorld
from failover.chaos.record import Record
from failover.chaos.world import Unable

_HEALTH_S = 0.5
_POLL_S = 0.2
_LEFT_S = 1.0
"""A gateway has noticed by then that a client left."""
_ASKED_AT_ONCE = 4
_KEPT = ("rid", "room", "choice_index", "prefill", "decode", "decided_s", "ended_s", "outcomes")


class RealEyes:
    """`eyes.Eyes` on a real fleet. `wanted`: so many requests should have a reference, and `references` are theirs."""

    def __init__(self, world: RealWorld, references: Mapping[str, str], wanted: int) -> None:
        self._world, self._references, self._wanted = world, references, wanted
        self._requests: dict[int, Request] = {}
        self._unfinished: dict[int, Answer] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(_ASKED_AT_ONCE)
        self._health: dict[tuple[str, str], str] = {}
        self._busy = False
        """Gateways had something to do before the load began: others use them too."""
        self._left: dict[str, int] = {}

    async def before(self) -> None:
        self._busy = not await self._is_idle(_LEFT_S)

    async def watch(self) -> None:
        while True:
            await asyncio.gather(*map(self._look, self._world.pdgates))
            await asyncio.sleep(_HEALTH_S)

    async def _look(self, gateway: str) -> None:
        """What a gateway thinks of its engines; each change is marked."""
        try:
            _, told = await self._world.read(gateway, "/readyz")
            states = {self._world.name_of(each["id"]): str(each["health"]) for each in told["engines"]}
        except (Unable, TypeError, KeyError):
            return
        for engine, state in states.items():
            before, self._health[gateway, engine] = self._health.get((gateway, engine), "ready"), state
            if before != state:
                self._world.mark(engine, f"{state} for {gateway}")

    # ---- answers -------------------------------------------------------------------------------------------------

    def began(self, answer: Answer) -> None:
        """Nothing is asked about an answer that goes on."""

    def ended(self, answer: Answer) -> None:
        self._note(answer, None)
        if answer.gateway in self._world.pdgates:
            self._ask(self._explain(answer, _LEFT_S if answer.left else 0.0))

    def _ask(self, work: Coroutine[Any, Any, None]) -> None:
        asking = tasks.spawn(work, "chaos-explain")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _explain(self, answer: Answer, after_s: float = 0.0) -> None:
        """Learn of its attempts; of one that still runs, again at the end."""
        await asyncio.sleep(after_s)
        self._unfinished.pop(answer.asked.number, None)
        async with self._turns:
            try:
                _, told = await self._world.read(answer.gateway, f"/pdgate/explain/{answer.rid}")
                attempts = [{name: each[name] for name in _KEPT} for each in told["attempts"]]
            except (Unable, TypeError, KeyError):
                return
        if any(each["ended_s"] is None for each in attempts):
            self._unfinished[answer.asked.number] = answer
        self._note(answer, attempts)

    def _note(self, answer: Answer, told: Told | None) -> None:
        self._requests[answer.asked.number] = request(answer, told, self._world.name_of)

    # ---- the end -------------------------------------------------------------------------------------------------

    async def settle(self, within_s: float) -> float | None:
        began_s = self._world.now_s()
        settled = await self._is_idle(within_s)
        taken_s = self._world.now_s() - began_s
        while self._asking:
            await asyncio.gather(*self._asking)
        for answer in tuple(self._unfinished.values()):
            self._ask(self._explain(answer))
        while self._asking:
            await asyncio.gather(*self._asking)
        return taken_s if settled else None

    async def _is_idle(self, within_s: float) -> bool:
        """Wait until gateways count nothing any more; whether they do not within that time."""
        until_s = self._world.now_s() + within_s
        while True:
            await self._count()
            if not any(self._left.values()):
                return True
            if self._world.now_s() > until_s:
                return False
            await asyncio.sleep(_POLL_S)

    async def _count(self) -> None:
        left = {}
        for gateway in sorted(self._world.pdgates):
            try:
                _, text = await self._world.read(gateway, "/metrics")
            except Unable:
                left[f"gateways that do not answer: {gateway}"] = 1
                continue
            left |= {f"{name} of {gateway}": count for name, count in gauges(str(text)).items()}
        self._left = left

    async def close(self) -> None:
        for asking in tuple(self._asking):
            await tasks.stop(asking)

    def told(self, record: Record) -> Record:
        requests = tuple(self._requests[number] for number in sorted(self._requests))
        history = History(requests, left_over=self._left)
        references = {each.name: self._references[each.name] for each in requests if each.name in self._references}
        return replace(record, history=history, unseen=self._unseen(), fleet=self._world.fleet, references=references)

    def _unseen(self) -> dict[str, str]:
        unseen, gateways = dict(UNSEEN), self._world.names("gateway")
        if foreign := [name for name in gateways if name not in self._world.pdgates]:
            unseen |= {name: f"{why}, and {', '.join(foreign)} is something else" for name, why in BY_PDGATE.items()}
        elif self._busy:
            others = "the gateways had work before the load began: others use them too"
            unseen |= dict.fromkeys(("nothing_left_in_gateways", "settled"), others)
        missing = self._wanted - len(self._references)
        if not self._world.fleet.reference:
            unseen[TRUE_ANSWERS] = NO_REFERENCE
        elif missing:
            unseen[TRUE_ANSWERS] = f"{missing} of {self._wanted} greedy prompts were not answered before the faults"
        return unseen
