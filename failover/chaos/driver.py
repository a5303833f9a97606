"""The clients of a run: they ask gateways from outside, each at its time, and note all they read and when. A shell.

Every request has a connection of its own. One that a gateway refuses goes to the next, as a client library with
several addresses would send it; one that has begun is never sent twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import orjson

from engines import tasks
from failover.chaos.answer import Answer
from failover.chaos.history import Ending
from failover.chaos.load import Asked

_AGAIN_S = 0.1
"""Before a client asks again that every gateway has refused."""
_HASTY_S = 0.03
"""When a client leaves that wants no event: its request is out by then."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How clients ask: `at_once` of them at the same time, those that come then wait for one to end.

    `headers`: sent with every request, by the gateway that is asked. `names`: each request is given a name (`rid`) of
    its own, by which a gateway can be asked about it.
    """

    at_once: int = 2_000
    headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    names: bool = True


PLAIN = Manners()


class Driver:
    """Asks everything of a load. `gateways`: their names, and where clients find them.

    `began` is told of the first that comes of each stream, `ended` of each answer when it is over. `broken` says
    whether the network itself broke all that a gateway was asked between two times: as if those clients had hung up.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        gateways: Sequence[tuple[str, str]],
        now_s: Callable[[], float],
        ended: Callable[[Answer], None],
        began: Callable[[Answer], None] = lambda answer: None,
        broken: Callable[[str, float, float], bool] = lambda gateway, from_s, to_s: False,
        manners: Manners = PLAIN,
    ) -> None:
        self._http, self._gateways, self._now_s = http, gateways, now_s
        self._began, self._ended, self._broken = began, ended, broken
        self._clients: dict[asyncio.Task[None], Answer] = {}
        self._manners, self._room = manners, asyncio.Semaphore(manners.at_once)
        self.asked = 0

    @property
    def live(self) -> int:
        """Clients that have no end yet."""
        return len(self._clients)

    async def play(self, load: Sequence[Asked]) -> None:
        """Ask everything at its time; returns when all is asked."""
        for asked in load:
            await asyncio.sleep(max(0.0, asked.at_s - self._now_s()))
            await self._room.acquire()
            answer = Answer(asked)
            client = tasks.spawn(self._client(answer), f"chaos-client-{asked.number}")
            self._clients[client] = answer
            client.add_done_callback(self._gone)
            self.asked += 1

    async def finish(self, within_s: float) -> int:
        """Wait for the end of every client; how many were given up, as nothing came to any of them for so long."""
        before = -1
        while self._clients and before != (before := self._progress()):
            await asyncio.wait(tuple(self._clients), timeout=within_s)
        hanging = dict(self._clients)
        for client, answer in hanging.items():
            answer.hung = True
            client.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        return len(hanging)

    def _progress(self) -> int:
        """A number that grows while clients read, and when one comes to its end."""
        return self.asked - len(self._clients) + sum(len(answer.read) for answer in self._clients.values())

    async def stop(self) -> None:
        """Every client hangs up at once."""
        for client, answer in self._clients.items():
            answer.left = True
            client.cancel()
        await asyncio.gather(*tuple(self._clients), return_exceptions=True)

    def _gone(self, client: asyncio.Task[None]) -> None:
        self._clients.pop(client, None)
        self._room.release()

    # ---- one client ----------------------------------------------------------------------------------------------

    async def _client(self, answer: Answer) -> None:
        try:
            await self._ask(answer)
        finally:
            answer.over_s = self._now_s()
            if answer.ending is Ending.CUT and self._broken(answer.gateway, answer.sent_s, answer.over_s):
                answer.left = True
            self._ended(answer)

    async def _ask(self, answer: Answer) -> None:
        """Find a gateway that takes it, and read all; round by round while all refuse."""
        own_name = {"rid": answer.rid} if self._manners.names else {}
        data = orjson.dumps({**answer.asked.body, **own_name})
        turn = answer.asked.number
        while True:
            answer.gateway, url = self._gateways[turn % len(self._gateways)]
            answer.sent_s, turn = self._now_s(), turn + 1
            try:
                await self._until_it_leaves(answer, url, data)
                return
            except aiohttp.ClientConnectorError as error:  # nobody was asked
                answer.error = str(error)
            except (aiohttp.ClientError, OSError) as error:
                answer.error = f"{type(error).__name__}: {error}"
                return
            if (turn - answer.asked.number) % len(self._gateways) == 0:
                await asyncio.sleep(_AGAIN_S)

    async def _until_it_leaves(self, answer: Answer, url: str, data: bytes) -> None:
        hasty = asyncio.timeout(_HASTY_S if answer.asked.leaves_after == 0 else None)
        try:
            async with hasty:
                await self._read(answer, url, data)
        except TimeoutError:
            if not hasty.expired():
                raise
        answer.left = not answer.ended

    async def _read(self, answer: Answer, url: str, data: bytes) -> None:
        of_gateway = self._manners.headers.get(answer.gateway, {})
        headers = {"content-type": "application/json", **of_gateway, **answer.asked.headers}
        path = url + answer.asked.path
        async with self._http.post(path, data=data, headers=headers, allow_redirects=False) as reply:
            answer.status, answer.headers = reply.status, reply.headers
            if not answer.is_stream:
                answer.take_body(self._now_s(), await reply.read())
                return
            async for chunk in reply.content.iter_any():
                if not answer.read:
                    self._began(answer)
                answer.take(self._now_s(), chunk)
                if answer.has_enough:
                    return
            answer.take_end(self._now_s())
