"""What the clients of a scenario asked and read, recorded for the checker (`failover/chaos/checker.py`).

Every `ask` of a test is judged when its cluster heals or ends: whole by the token rule, or one clear error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from engines.emulator import parse
from engines.emulator.draw import MODEL_DEFAULTS
from engines.emulator.tokens import decode
from engines.timing import PROFILES
from engines.token_rule import unpack
from failover.chaos.checker import check
from failover.chaos.history import Attempt, Choice, Death, Ending, History, Ledger, Limits, Request
from failover.chaos.reading import Events
from tests.scenarios.client import Answer, asked_answers

if TYPE_CHECKING:
    from tests.scenarios.cluster import Cluster

_PROFILE = PROFILES["tiny"]
_SERVER = parse.Limits(_PROFILE.context_tokens, _PROFILE.max_total_tokens, MODEL_DEFAULTS)
_unknown = count(1)


async def judge(cluster: Cluster, with_ledgers: bool = False) -> None:
    """Nothing is wrong with what was asked of this cluster since the last time. The answers are judged once."""
    answers = taken(cluster)
    history = await recorded(cluster, answers, with_ledgers)
    problems = check(history, decode)
    assert not problems, "\n".join(map(str, problems))


def taken(cluster: Cluster) -> list[Answer]:
    """What was asked of this cluster and not judged yet."""
    urls = {gateway.url for gateway in cluster.gateways}
    mine = [answer for answer in asked_answers if answer.url in urls]
    asked_answers[:] = [answer for answer in asked_answers if answer.url not in urls]
    return mine


async def recorded(cluster: Cluster, answers: Sequence[Answer], with_ledgers: bool = False) -> History:
    """The history of these answers; with ledgers only when the cluster has settled."""
    deaths = tuple(Death(url, math.inf) for url in cluster.killed_gateways())
    requests = [await _request(cluster, answer) for answer in answers if answer.path in list(parse.Api)]
    live = [server for server in cluster.servers if server.returncode is None] if with_ledgers else []
    ledgers = [Ledger(cluster.name(server), (await cluster.ledger(server))["by_room"]) for server in live]
    return History(tuple(requests), tuple(ledgers), deaths)


async def _request(cluster: Cluster, answer: Answer) -> Request:
    asked, attempts = _parsed(answer), await _attempts(cluster, answer)
    choices, limits = [], Limits(1)
    for index, item in enumerate(asked.items if asked is not None and answer.status < 400 else ()):
        rule, draw = item.sampling.rule, item.sampling.draw
        stops = (rule.stop, tuple(sorted(rule.stop_token_ids)), rule.no_stop_trim)
        limits = Limits(rule.max_new_tokens, rule.min_new_tokens, rule.ignore_eos, *stops)
        made = [_attempt(cluster, answer, each, draw) for each in attempts if each["choice_index"] == index]
        choices.append(Choice(tuple(unpack(item.prompt)), tuple(made) or (_untold(answer, draw),)))
    stream = answer.is_stream
    ending = Ending.WHOLE if answer.ended else Ending.CUT if answer.over else Ending.LEFT
    ids_shown = asked is not None and (asked.api is parse.Api.GENERATE or asked.return_token_ids)
    return Request(
        name=f"{answer.path} {answer.headers.get('x-pdgate-request-id', '')}",
        asked_s=answer.asked_s,
        choices=tuple(choices),
        limits=limits,
        events=tuple(Events(asked, stream).of(answer.read)),
        status=answer.status or None,
        ending=ending,
        stream=stream,
        ids_shown=ids_shown,
        wants_usage=asked is not None and (not stream or asked.include_usage or asked.api is parse.Api.GENERATE),
        samples=asked.items[0].sampling.samples if asked is not None else 1,
        gateway=answer.url,
    )


def _parsed(answer: Answer) -> parse.Request | None:
    """The request as an engine reads it; None where it would refuse it."""
    try:
        body = orjson.loads(answer.asked) if isinstance(answer.asked, bytes) else answer.asked
        return parse.parse_request(parse.Api(answer.path), body, _SERVER)
    except (parse.BadRequest, ValueError, TypeError, KeyError, AttributeError):
        return None


async def _attempts(cluster: Cluster, answer: Answer) -> list[Mapping[str, Any]]:
    """What the gateway says of the request's attempts; nothing where it has ended since, or never took it."""
    request_id = answer.headers.get("x-pdgate-request-id")
    if not request_id:
        return []
    try:
        async with cluster.http.get(f"{answer.url}/pdgate/explain/{request_id}") as reply:
            return list((await reply.json())["attempts"]) if reply.status == 200 else []
    except aiohttp.ClientError:
        return []


def _attempt(cluster: Cluster, answer: Answer, told: Mapping[str, Any], draw: Any) -> Attempt:
    began_s = answer.asked_s + told["decided_s"]
    ended_s = None if told["ended_s"] is None else answer.asked_s + told["ended_s"]
    keys = [_key(cluster, told[leg], told["rid"], began_s, draw) for leg in ("prefill", "decode")]
    return Attempt(told["rid"], int(told["room"]), told["prefill"], told["decode"], began_s, ended_s, *keys)


def _key(cluster: Cluster, server: str, rid: str, at_s: float, draw: Any) -> bytes:
    known = [each for each in cluster.secrets if each.server == server]
    then = [each for each in known if each.from_s <= at_s] or known[:1]
    assert then or draw.greedy, f"the secret of {server} is not known"
    return bytes(draw.key(then[-1].secret if then else b"", rid, then[-1].deterministic if then else False))


def _untold(answer: Answer, draw: Any) -> Attempt:
    """Some attempt of a greedy request that nobody tells of."""
    assert draw.greedy, "nobody tells of the attempts of a sampled answer"
    serial = next(_unknown)
    return Attempt(f"untold-{serial:06d}", 2**62 + serial, "", "", answer.asked_s, None)
