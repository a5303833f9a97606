"""However requests with one content overlap, it ends no more servers than it may, and nobody waits for nothing.

Each request asks for a turn, has a server work on it, and comes to its end there; what kills, kills whoever works on
it. The order of everything is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.types import EngineId, Leg
from failover.retry import MAX_DEATHS
from failover.suspects import May, Suspects, Victim

SERVERS = 8
CONTENT = b"x"


@dataclass
class Client:
    """`works_on`: the server that has its attempt; `broke`: that server has ended, and this is being looked into."""

    works_on: Victim | None = None
    broke: bool = False
    over: bool = False


def _server(number: int) -> Victim:
    return Victim(Leg.PREFILL, EngineId(f"http://p{number}"), 1)


class World:
    """Servers and clients of one content. Those that are there at the first death are counted."""

    def __init__(self, clients: int, kills: bool) -> None:
        self.suspects, self.kills = Suspects(), kills
        self.clients = [Client() for _ in range(clients)]
        self.dead: set[Victim] = set()
        self.exposed = 0

    def step(self, client: Client, number: int) -> None:
        if client.over:
            return
        if client.works_on is None:
            self._begin(client, number)
        elif not client.broke:
            self._come_to_something(client)
        else:
            self._look(client)

    def _begin(self, client: Client, number: int) -> None:
        may = self.suspects.may_try(CONTENT, 0.0)
        alive = [_server(each) for each in range(SERVERS) if _server(each) not in self.dead]
        if may is May.NEVER or not alive:
            client.over = True
        elif may is May.GO:
            client.works_on = alive[number % len(alive)]
            self.suspects.begins(CONTENT)

    def _come_to_something(self, client: Client) -> None:
        assert client.works_on is not None
        if not self.kills and client.works_on not in self.dead:
            self.suspects.harmless(CONTENT)
            self._end(client)
            return
        if self.kills and not self.dead:
            self.exposed = len({each.works_on for each in self.clients if each.works_on is not None})
        self.dead.add(client.works_on)
        self.suspects.broke(CONTENT, [client.works_on], 0.0)
        client.broke = True

    def _look(self, client: Client) -> None:
        assert client.works_on is not None
        self.suspects.found(CONTENT, [client.works_on], [client.works_on])
        self.suspects.ends(CONTENT)
        client.works_on, client.broke = None, False
        client.over = self.suspects.deaths(CONTENT, 0.0) >= MAX_DEATHS

    def _end(self, client: Client) -> None:
        self.suspects.ends(CONTENT)
        client.works_on, client.over = None, True


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, SERVERS - 1)), max_size=80)


@settings(max_examples=4 * settings().max_examples)
@given(STEPS)
def test_a_content_that_kills_ends_two_servers_or_those_that_had_it_together(steps: list[tuple[int, int]]) -> None:
    world = World(6, kills=True)
    for who, number in steps:
        world.step(world.clients[who], number)
    assert len(world.dead) <= max(MAX_DEATHS, world.exposed)


@settings(max_examples=4 * settings().max_examples)
@given(STEPS, st.sets(st.integers(0, SERVERS - 1), max_size=SERVERS - 1))
def test_nobody_waits_for_ever(steps: list[tuple[int, int]], killed: set[int]) -> None:
    """Servers end by themselves under a content that does no harm, once each."""
    world = World(6, kills=False)
    for at, (who, number) in enumerate(steps):
        if at % 7 == 3:
            world.dead |= {_server(each) for each in sorted(killed)[: at // 7]}
        world.step(world.clients[who], number)
    for _ in range(60):
        for client in world.clients:
            world.step(client, 0)
    assert all(client.over for client in world.clients)
    assert not world.suspects._at_risk
