"""What the clients of a scenario asked and read, recorded for the checker (`failover/chaos/checker.py`).

Every `ask` of a test is judged when its cluster heals or ends: whole by the token rule, or one clear error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from failover.chaos.history import Attempt, Choice, Death, Ending, Error, Event, History, Ledger, Limits, Request, Usage
from tests.scenarios.client import DONE, Answer, asked_answers

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
        events=tuple(_Events(asked, stream).of(answer.read)),
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


class _Events:
    """Reads one answer, of whichever route, as the checker's events."""

    def __init__(self, asked: parse.Request | None, stream: bool) -> None:
        self._asked, self._stream = asked, stream
        self._text: dict[int, str] = {}
        self._ids: dict[int, int] = {}
        self._usage: dict[int, Usage] = {}

    def of(self, read: Sequence[tuple[float, Any]]) -> Iterator[Event]:
        for at_s, what in read:
            if what == DONE:
                yield Event(at_s, done=True)
                continue
            try:
                yield from self._events(at_s, what)
            except (KeyError, TypeError, IndexError, AttributeError, ValueError):
                yield Event(at_s, junk=repr(what)[:200])

    def _events(self, at_s: float, what: Any) -> Iterator[Event]:
        if isinstance(what, dict) and "error" in what:
            error = what["error"]
            yield Event(at_s, error=Error(str(error["message"]), str(error.get("type")), str(error.get("code"))))
        elif self._asked is not None and self._asked.api is parse.Api.GENERATE:
            yield from self._generated(at_s, what if isinstance(what, list) else [what])
        else:
            choices = [self._choice(at_s, choice) for choice in what["choices"]]
            usage = _usage(what["usage"]) if what.get("usage") and (not self._stream or not choices) else None
            yield from choices
            if usage is not None:
                yield Event(at_s, usage=usage)

    def _choice(self, at_s: float, choice: Mapping[str, Any]) -> Event:
        owner = choice.get("delta") or choice.get("message")
        text = (owner.get("content") if owner is not None else choice.get("text")) or ""
        index = choice["index"]
        if index not in self._text and self._asked is not None and self._asked.echo:
            text = text.removeprefix(self._echo(index))
        self._text[index] = ""
        ids = choice.get("token_ids") or choice.get("response_token_ids") or ()
        finish = choice.get("finish_reason") or ""
        return Event(at_s, index, text, tuple(ids), finish, choice.get("matched_stop") if finish else None)

    def _echo(self, index: int) -> str:
        assert self._asked is not None
        item = self._asked.items[index]
        return item.text or decode(unpack(item.prompt))

    def _generated(self, at_s: float, objects: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        """Objects of `/generate`, each of which repeats what came before."""
        for place, body in enumerate(objects):
            index, meta = body.get("index", place), body["meta_info"]
            seen, had = self._text.get(index, ""), self._ids.get(index, 0)
            finish = meta["finish_reason"] or {}
            if not body["text"].startswith(seen):
                yield Event(at_s, index, junk=f"{body['text'][-40:]!r} after {seen[-40:]!r}")
            text, ids = body["text"][len(seen) :], tuple(body["output_ids"][had:])
            self._text[index], self._ids[index] = body["text"], len(body["output_ids"])
            yield Event(at_s, index, text, ids, finish.get("type", ""), finish.get("matched"))
            if finish:
                numbers = meta["prompt_tokens"], meta["completion_tokens"]
                self._usage[index] = Usage(*numbers, sum(numbers), meta["cached_tokens"])
                if self._asked is not None and len(self._usage) == len(self._asked.items):
                    yield Event(at_s, usage=self._total())

    def _total(self) -> Usage:
        assert self._asked is not None
        samples = self._asked.items[0].sampling.samples
        prompts = [self._usage[index] for index in sorted(self._usage)][::samples]
        prompt = sum(each.prompt_tokens for each in prompts)
        written = sum(each.completion_tokens for each in self._usage.values())
        return Usage(prompt, written, prompt + written, sum(each.cached_tokens or 0 for each in prompts))


def _usage(told: Mapping[str, Any]) -> Usage:
    details = told.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return Usage(told["prompt_tokens"], told["completion_tokens"], told["total_tokens"], cached)
