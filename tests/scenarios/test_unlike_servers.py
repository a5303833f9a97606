"""Servers that must not exchange KV: they are never paired, which would end the decode, and everybody is told why."""

from __future__ import annotations

from typing import Any

from engines.emulator.process import EmulatedServer
from engines.types import Role
from tests.scenarios.client import CHAT, chat, expected_text, new_prompt
from tests.scenarios.cluster import READY_S, SPEED, Cluster, eventually

PAGE = ("--page-size", "16")
REASON = "page_size_tokens differs: 1 / 16 (--page-size)"


class Unlike(Cluster):
    """A fleet whose first decode stores KV in other pages than the prefill."""

    def __init__(self, decodes: int) -> None:
        super().__init__(1, decodes)
        self.decodes[0] = EmulatedServer(Role.DECODE, speed=SPEED, arguments=PAGE, port=self.odd.port)

    @property
    def odd(self) -> EmulatedServer:
        return self.decodes[0]

    async def ready(self, pairs: int | None = None, within_s: float = READY_S) -> None:
        """All servers are up; those that fit make the pairs."""

        async def missing() -> str:
            engines = (await self.get("/readyz"))["engines"]
            return "" if all(engine["health"] == "ready" for engine in engines) else str(engines)

        await super().ready(len(self.decodes) - 1)
        await eventually(missing, within_s)

    async def ask(self, prompt: str, tokens: int = 5) -> tuple[int, Any]:
        async with self.http.post(self.url + CHAT, json=chat(prompt, tokens)) as reply:
            return reply.status, await reply.json()


async def test_a_fleet_without_a_pair_says_why_and_lives() -> None:
    async with Unlike(decodes=1) as fleet:
        status, body = await fleet.ask(new_prompt())
        assert status == 503
        assert REASON in body["error"]["message"]
        ready = await fleet.get("/readyz")
        assert (ready["ready"], ready["pairs"]) == (False, 0)
        assert ready["apart"] == [
            {
                "fit": "refused",
                "reason": REASON,
                "pairs": 1,
                "prefill": fleet.name(fleet.prefills[0]),
                "decode": fleet.name(fleet.odd),
            }
        ]
        told = [line for line in fleet.gateway.log.read_text().splitlines() if "pdgate.pairs" in line]
        assert len(told) == 1
        assert REASON in told[0]
        assert fleet.odd.returncode is None
        assert not (await fleet.requests(fleet.odd))["recent"]


async def test_a_decode_that_fits_takes_all() -> None:
    async with Unlike(decodes=2) as fleet:
        for _ in range(4):
            prompt = new_prompt()
            status, body = await fleet.ask(prompt)
            assert (status, body["choices"][0]["message"]["content"]) == (200, expected_text(prompt, 5))
            assert (await fleet.last_attempt())["decode"] == fleet.name(fleet.decodes[1])
        assert fleet.odd.returncode is None
        assert not (await fleet.requests(fleet.odd))["recent"]
