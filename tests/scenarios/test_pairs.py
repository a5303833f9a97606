"""Pairs whose KV does not arrive though both servers are well: out of use at once, back when it arrives again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engines.emulator.process import EmulatedServer
from engines.tasks import spawn
from tests.machine import Stopwatch
from tests.scenarios.client import CHAT, Answer, ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import Cluster, eventually

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.alone]

WAITING_S, HEARTBEAT_S = 20.0, 200.0
"""Of decodes, by their own clock. They give a prefill up after 1 s (real ones after 300 s), and ask it so rarely how it
is that one which comes back has never been away for them."""
OUT_OF_USE_S = 1.5
"""Attempts on a broken link end after this; two of them, and it is quarantined."""


async def ask_some(cluster: Cluster, count: int) -> list[tuple[Answer, float]]:
    """So many chats one after the other, each checked to be whole, with the time it took."""
    answers = []
    for _ in range(count):
        prompt, watch = new_prompt(), Stopwatch()
        answer = await ask(cluster.http, cluster.url, chat(prompt, 20, stream=True), CHAT)
        answer.check_whole(expected_text(prompt, 20))
        answers.append((answer, watch.took_s()))
    return answers


async def ask_many(cluster: Cluster) -> list[tuple[Answer, float]]:
    """Chats at the same time, so that they spread."""
    groups = await asyncio.gather(*(ask_some(cluster, 2) for _ in range(6)))
    return [each for group in groups for each in group]


def served_by(answers: list[tuple[Answer, float]]) -> set[tuple[str, str]]:
    return {(answer.headers["x-pdgate-prefill"], answer.headers["x-pdgate-decode"]) for answer, _ in answers}


async def every_pair_serves(cluster: Cluster) -> set[tuple[str, str]]:
    """Ask until each pair has answered; all of them."""
    seen: set[tuple[str, str]] = set()
    every = {(prefill.url, decode.url) for prefill in cluster.prefills for decode in cluster.decodes}

    async def missing() -> str:
        seen.update(served_by(await ask_many(cluster)))
        return "" if seen == every else f"only {seen} have answered"

    await eventually(missing, 8.0)
    return every


async def rank_address(cluster: Cluster, prefill: EmulatedServer) -> str:
    """Where decodes send a prefill the addresses of their pages."""
    ranks = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    async with cluster.http.get(f"http://{prefill.host}:{prefill.bootstrap_port}/route?{ranks}") as reply:
        rank = await reply.json()
    return f"{rank['rank_ip']}:{rank['rank_port']}"


async def in_trouble(cluster: Cluster) -> list[dict[str, Any]]:
    return list((await cluster.get("/readyz"))["pairs_in_trouble"])


async def test_a_prefill_that_is_back_at_once_costs_nobody_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decodes keep its old addresses: what was sent to it would wait for the first output's deadline, in vain."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", str(WAITING_S))
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", str(HEARTBEAT_S))
    async with Cluster(2, 1) as cluster:
        victim = cluster.prefills[0]
        await every_pair_serves(cluster)
        stop = asyncio.Event()

        async def keep_asking() -> list[float]:
            times_s: list[float] = []
            while not stop.is_set():
                times_s += [took_s for _, took_s in await ask_some(cluster, 1)]
            return times_s

        asking = [spawn(keep_asking(), f"client {number}") for number in range(2)]
        await victim.restart()

        async def not_noticed() -> str:
            troubles = await in_trouble(cluster)
            found = [(trouble["prefill"], "old addresses" in trouble["reason"]) for trouble in troubles]
            return "" if found == [(victim.url, True)] else f"in trouble: {troubles}"

        await eventually(not_noticed, 5.0)
        await cluster.ready(within_s=10.0)
        stop.set()
        times_s = [each for group in await asyncio.gather(*asking) for each in group]
        assert max(times_s) < 3.0, "somebody waited for the prefill that was back"
        assert await cluster.metric("pdgate_canaries", result="failed") >= 1, "the decode had forgotten it by then"
        assert await in_trouble(cluster) == []
        await every_pair_serves(cluster)
        await cluster.settled()


async def test_a_broken_link_between_healthy_servers_takes_one_pair_out_of_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost = tmp_path / "lost"
    lost.touch()
    cluster = Cluster(2, 2, gateway=("--first-token-timeout-secs", str(OUT_OF_USE_S)))
    loses = {"PYTHONPATH": str(Path(__file__).with_name("broken_link")), "LOST_ADDRESSES": str(lost)}
    monkeypatch.setattr(cluster.decodes[0], "_environment", loses)
    async with cluster:
        prefill, pair = cluster.prefills[0], (cluster.prefills[0].url, cluster.decodes[0].url)
        every = await every_pair_serves(cluster)
        lost.write_text(await rank_address(cluster, prefill))

        async def not_out_of_use() -> str:
            await ask_many(cluster)  # whole all the same, some after another attempt
            troubles = await in_trouble(cluster)
            found = [(each["prefill"], each["decode"], each["state"]) for each in troubles]
            return "" if found in ([(*pair, "quarantined")], [(*pair, "proving")]) else f"in trouble: {troubles}"

        await eventually(not_out_of_use, 8.0)
        assert (await cluster.get("/readyz"))["pairs"] == 3
        for server in cluster.servers:
            assert await cluster.metric("pdgate_engine_ready", engine=server.url) == 1
        answers = await ask_many(cluster)
        assert served_by(answers) == every - {pair}
        assert {answer.attempts for answer, _ in answers} == {1}
        (line,) = (await cluster.last_attempt(answers[0][0].request_id))["pairs_in_trouble"]
        assert line.startswith(f"pair {pair[0]}, {pair[1]} is ")
        lost.write_text("")
        await cluster.ready(within_s=12.0)
        assert await in_trouble(cluster) == []
        await every_pair_serves(cluster)
        await cluster.settled()
