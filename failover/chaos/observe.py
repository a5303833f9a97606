"""What is seen of a run while it goes on: answers with their attempts, KV of the engines, health. A shell.

Gateways remember their latest requests only, and a dead one nothing: each is asked about a request as soon as that is
over, and where gateways may die, already when its stream begins.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from engines import tasks
from engines.emulator.config import add_server_arguments, options_from
from engines.emulator.draw import MODEL_DEFAULTS
from engines.emulator.parse import Limits
from engines.types import Role
from failover.chaos.answer import Answer
from failover.chaos.children import Child
from failover.chaos.history import Death, Request
from failover.chaos.holdings import Holdings
from failover.chaos.orphans import Orphans
from failover.chaos.processes import ENGINES, Processes
from failover.chaos.reading import Secret, Told, Truth, is_sampled, request
from failover.chaos.record import SAMPLE_S, Held, Orphan, Sample
from failover.chaos.scenario import FleetPlan
from failover.chaos.world import Unable

MAX_SAMPLES = 200_000
_HEALTH_S = 0.5
_LEFT_S = 1.0
"""A gateway has noticed by then that a client left."""
_ASKED_AT_ONCE = 16
_QUICK_S = 1.0
_REFUSED = 400
T = TypeVar("T")
_KEPT = ("rid", "room", "choice_index", "prefill", "decode", "decided_s", "first_output_s", "ended_s", "outcomes")


class Observer:
    """Sees one run. `early`: gateways may die, so they are asked about a stream as soon as it begins."""

    def __init__(self, world: Processes, *, early: bool) -> None:
        self._world, self._early = world, early
        self._truth = Truth(limits_of(world.plan), world.links.names)
        self._told: dict[int, Told] = {}
        """What gateways told of the attempts of requests that are under way."""
        self._requests: dict[int, Request] = {}
        self._unfinished: dict[int, Answer] = {}
        """Of which an attempt had not ended when it was asked about."""
        self._asking: set[asyncio.Task[None]] = set()
        self._closed = False
        self._turns = asyncio.Semaphore(_ASKED_AT_ONCE)
        self._unexplained: dict[int, Answer] = {}
        """Of which no gateway could be asked, or it knew nothing."""
        self.samples: list[Sample] = []
        self._health: dict[tuple[str, str], str] = {}
        self._orphans, self._holdings = Orphans(), Holdings()
        world.on_start = self._learn

    # ---- engines -------------------------------------------------------------------------------------------------

    async def _learn(self, engine: Child) -> None:
        """Ask a process that was just started what its sampling keys are made of."""
        if engine.role not in ENGINES:
            return
        told = await self._world.admin(engine.name, "GET", "/emulator/secret")
        self._truth.secrets[engine.name] = Secret(bytes.fromhex(told["secret"]), told["deterministic"])

    async def watch(self) -> None:
        """Sample ledgers and health until cancelled; the load begins now."""
        engines, gateways = self._world.of(*ENGINES), self._world.of("gateway")
        await asyncio.gather(
            *(self._every(SAMPLE_S, self._sample, engine) for engine in engines),
            *(self._every(_HEALTH_S, self._look, gateway) for gateway in gateways),
        )

    async def _every(self, period_s: float, look: Callable[[Child], Coroutine[Any, Any, None]], child: Child) -> None:
        while True:
            if child.running and not child.frozen:
                try:
                    async with asyncio.timeout(_QUICK_S):
                        await look(child)
                except (Unable, TimeoutError):
                    pass
            await asyncio.sleep(period_s)

    async def _sample(self, engine: Child) -> None:
        asked_s = self._world.now_s()
        ledger = await self._world.admin(engine.name, "GET", "/emulator/ledger")
        self._holdings.look(asked_s, engine.name, ledger["by_room"])
        used = sum(ledger["by_room"].values())
        if len(self.samples) < MAX_SAMPLES:
            sizes = used, ledger["cache_tokens"], ledger["total_tokens"]
            self.samples.append(Sample(self._world.now_s(), engine.name, *sizes))
        deaths = {each.name: each.deaths_s for each in self._world.of("gateway")}
        self._orphans.look(asyncio.get_running_loop().time(), engine.name, ledger["by_room"], deaths)

    async def _look(self, gateway: Child) -> None:
        """What a gateway thinks of the engines; each change is marked. And what its rooms begin with."""
        begun_s = gateway.launched_s
        told = await self._world.told(gateway.name, "/readyz")
        process_id = (told["replicas"] or {}).get("process_id")
        if process_id is not None and gateway.launched_s == begun_s:
            self._orphans.learn(gateway.name, begun_s, process_id)
        for each in told["engines"]:
            key = (gateway.name, self._world.name_of(each["id"]))
            before, self._health[key] = self._health.get(key, "ready"), each["health"]
            if before != each["health"]:
                self._world.mark(key[1], f"{each['health']} for {gateway.name}")

    # ---- answers -------------------------------------------------------------------------------------------------

    def began(self, answer: Answer) -> None:
        """The first of a stream has come."""
        if self._early and is_sampled(answer, self._truth.limits):
            self._ask(self._asked_early(answer))

    def ended(self, answer: Answer) -> None:
        """An answer is over."""
        self._ask(self._asked_at_its_end(answer))

    async def finish(self) -> None:
        """Everything that can still be learned of what was asked."""
        while self._asking:
            await asyncio.gather(*self._asking)
        unexplained = {number: answer for number, answer in self._unexplained.items() if self._lives(answer)}
        for answer in {**self._unfinished, **unexplained}.values():
            self._ask(self._asked_again(answer))
        self._unfinished.clear()
        while self._asking:
            await asyncio.gather(*self._asking)

    @property
    def requests(self) -> tuple[Request, ...]:
        return tuple(self._requests[number] for number in sorted(self._requests))

    @property
    def unexplained(self) -> int:
        """Requests of which a gateway knows nothing, though it is still the process that was asked."""
        return sum(map(self._lives, self._unexplained.values()))

    @property
    def untold(self) -> int:
        """Answers that cannot be judged: their gateway died before it told of their attempts."""
        return len(self._unexplained.keys() - self._requests.keys())

    @property
    def orphans(self) -> tuple[Orphan, ...]:
        """What gateways that died left on engines."""
        zero_s = self._world.zero_s
        found = self._orphans.found
        return tuple(replace(each, died_s=each.died_s - zero_s, seen_s=each.seen_s - zero_s) for each in found)

    @property
    def held(self) -> tuple[Held, ...]:
        """What engines held of attempts that were over."""
        return self._holdings.after_their_end(self._requests.values())

    @property
    def roomless(self) -> int:
        """Gateways that died of whose rooms nothing is known."""
        dead = ((each.name, died_s) for each in self._world.of("gateway") for died_s in each.deaths_s)
        return sum(not self._orphans.knows(*each) for each in dead)

    def deaths(self) -> tuple[Death, ...]:
        """The gateways that were killed, or ended though nobody had told them to, and when they were gone."""
        zero_s = self._world.zero_s
        return tuple(Death(each.name, at_s - zero_s) for each in self._world.of("gateway") for at_s in each.deaths_s)

    async def close(self) -> None:
        """Ask nothing any more: the gateways go next."""
        self._closed = True
        asking = tuple(self._asking)
        for each in asking:  # all at once: who is told to hurry may not get to the second
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def _ask(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            work.close()
            return
        asking = tasks.spawn(work, "chaos-explain")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _asked_early(self, answer: Answer) -> None:
        told = await self._explained(answer)
        if told is not None and answer.asked.number not in self._requests:
            self._told[answer.asked.number] = told

    async def _asked_at_its_end(self, answer: Answer) -> None:
        if answer.left:
            await asyncio.sleep(_LEFT_S)
        told = await self._explained(answer)
        early = self._told.pop(answer.asked.number, None)
        if told is None and answer.status is not None and answer.status < _REFUSED:  # no attempt was made for it
            self._unexplained[answer.asked.number] = answer
        self._note(answer, early if told is None else told)
        if told is not None and any(each["ended_s"] is None for each in told):
            self._unfinished[answer.asked.number] = answer

    async def _asked_again(self, answer: Answer) -> None:
        told = await self._explained(answer)
        if told is not None:
            self._unexplained.pop(answer.asked.number, None)
            self._note(answer, told)

    def _note(self, answer: Answer, told: Told | None) -> None:
        if (read := request(answer, told, self._truth)) is not None:
            self._requests[answer.asked.number] = read

    def _lives(self, answer: Answer) -> bool:
        """Whether its gateway is still the process that was asked."""
        child = self._world.children.get(answer.gateway)
        if child is None or child.launched_s - self._world.zero_s > answer.sent_s:
            return False
        ends = (death for death in self.deaths() if death.gateway == answer.gateway)
        return not any(death.at_s >= answer.sent_s for death in ends)

    async def _explained(self, answer: Answer) -> Told | None:
        """What its gateway says of a request's attempts; None where it has died since, or never took it."""
        if not answer.gateway:
            return None
        async with self._turns:
            try:
                told = await self._world.told(answer.gateway, f"/pdgate/explain/{answer.rid}")
            except Unable:
                return None
        if "attempts" not in told:
            return None
        return [{name: each[name] for name in _KEPT} for each in told["attempts"]]


def limits_of(plan: FleetPlan) -> Limits:
    """What a prompt and its answer must fit in on the decodes of a fleet, by their flags."""
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    args, _ = parser.parse_known_args(["--profile", plan.profile, *plan.engine_flags, *plan.decode_flags])
    options = options_from(args, Role.DECODE, 0, 0, "")
    defaults = MODEL_DEFAULTS if options.sampling_defaults == "model" else {}
    return Limits(options.context_length, options.max_total_tokens, defaults)
