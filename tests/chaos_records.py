"""Runs of the chaos harness as they might have been, made by a seed: for what reads records and not for the checker.

Texts are words, not tokens of the token rule: the times, the attempts and what befell the instances fit together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from failover.chaos.history import Attempt, Choice, Ending, Error, Event, History, Ledger, Limits, Request, Usage
from failover.chaos.record import FaultRun, Instance, Mark, Planned, Record, Sample
from failover.chaos.scenario import Expectations, FaultPlan, FleetPlan, LoadPlan, Scenario
from failover.chaos.verdict import Broken, Judgement, Verdict

WORDS = ("the", "river", "ran", "past", "old", "mills", "and", "new", "boats", "under", "a", "very", "pale", "sky")
POOL_TOKENS = 24_000
PLANNED = (
    Planned(0, "kill", "decode1", 2.4, 3.0, "decode_step:3"),
    Planned(1, "freeze", "prefill0", 4.2, 1.8),
    Planned(2, "slow_link", "gateway0>decode2", 5.2, 2.6, params={"delay_s": 0.05, "jitter_s": 0.02}),
    Planned(3, "flush", "redis", 7.6, 0.3),
    Planned(4, "abort_in_200", "prefill2", 8.3, 0.9),
)
DOWN = (("decode1", 2.46, 5.46), ("prefill0", 4.2, 6.0))
"""Which instance did no work, from when, until when."""
INVARIANTS = (
    ("one_end_each", "{requests} requests, {requests} ends"),
    ("tokens_exact", "38,412 tokens of {requests} answers equal the model's own"),
    ("KV_given_back", "6 ledgers, 0 tokens held 1.3 s after the load"),
    ("nothing_left_over", "bookings, rooms, journal entries, tasks, sockets: 0"),
    ("rooms_distinct", "{attempts} attempts, {attempts} rooms"),
    ("one_live_attempt", "{attempts} attempts, no two of a choice at once"),
    ("refusals_in_bound", "{refused} of {requests}; at most 2 %"),
    ("breaks_in_bound", "{broken} of {requests}; at most 2 %"),
    ("recovery_in_bound", "longest pause 0.84 s; at most 10 s"),
    ("attempts_in_bound", "{ratio} for each request; at most 3"),
    ("deaths_in_bound", "1 death, 1 by a fault"),
)


@dataclass(frozen=True)
class Shape:
    """How large a run is; `attempts` 0: as many as the faults cause."""

    requests: int = 240
    load_s: float = 10.0
    attempts: int = 0
    words: tuple[int, int] = (12, 60)


def scenario() -> Scenario:
    return Scenario(
        "kill-decode-streaming",
        "A decode is killed amid streams, a prefill freezes, and a link and Redis misbehave.",
        "Every stream that a killed decode was writing goes on elsewhere, token for token, and all KV comes back.",
        FleetPlan(3, 3, 2, redis=True),
        LoadPlan((10.0, 60.0), 24.0, {"stream": 3.0, "whole": 1.0}, leave_ratio=0.04),
        tuple(FaultPlan(p.fault, p.target, p.at_s, for_s=p.for_s, phase=p.phase, params=p.params) for p in PLANNED),
        Expectations(refused_ratio=0.02, broken_ratio=0.02),
    )


def run(seed: int = 7, shape: Shape | None = None, *, passed: bool = True) -> tuple[Record, Judgement]:
    """A whole run with everything in it; one that did not pass has broken cases of two invariants."""
    shape, chance = shape or Shape(), Random(seed)
    fleet = [(f"{role}{at}", role) for role in ("prefill", "decode") for at in range(3)]
    fleet += [("gateway0", "gateway"), ("gateway1", "gateway"), ("redis", "redis")]
    instances = tuple(Instance(name, role, f"127.0.0.1:{30000 + at}") for at, (name, role) in enumerate(fleet))
    requests = tuple(_request(chance, number, shape) for number in range(shape.requests))
    record = Record(
        scenario(),
        seed,
        False,
        "0.1.0",
        PLANNED,
        tuple(_applied(planned) for planned in PLANNED),
        instances,
        _marks(),
        tuple(_samples(chance, requests, instances, shape.load_s)),
        History(requests, tuple(Ledger(each.name, {}) for each in instances[:6]), (), {"bookings": 0, "tasks": 0}),
        shape.load_s,
        1.3,
        {"disk_in_bound": "the logs were not watched"},
    )
    return record, judgement(record, passed=passed)


def empty(seed: int = 1) -> tuple[Record, Judgement]:
    """A run of which nothing is known but that it was stopped."""
    record = Record(Scenario("nothing", "", ""), seed, True, "0.1.0", (), (), (), (), (), History(()), 0.0, None)
    return replace(record, stopped=True), Judgement((), {})


def judgement(record: Record, *, passed: bool) -> Judgement:
    """Verdicts in the words that a judge might use."""
    requests = record.history.requests
    attempts = sum(len(choice.attempts) for request in requests for choice in request.choices)
    figures = {
        "requests": float(len(requests)),
        "whole": float(sum(r.ending is Ending.WHOLE and r.status == 200 and not _error(r) for r in requests)),
        "refused": float(sum(r.status == 503 for r in requests)),
        "broken": float(sum(r.status == 200 and _error(r) for r in requests)),
        "left": float(sum(r.ending is Ending.LEFT for r in requests)),
        "attempts": float(attempts),
        "attempts_ratio": attempts / max(1, len(requests)),
        "longest_pause_s": 0.84,
        "settle_s": record.settled_s or 0.0,
    }
    words = {name: f"{value:,.0f}" for name, value in figures.items()} | {"ratio": f"{figures['attempts_ratio']:.2f}"}
    verdicts = [Verdict(name, evidence.format(**words)) for name, evidence in INVARIANTS]
    if not passed:
        retried = [r for r in requests if len(r.choices[0].attempts) > 1][:3] or list(requests[:3])
        cases = [Broken("token 14 is 'mills' where the model says 'boats'", retried[0].name, _last(retried[0]).rid, 0)]
        cases += [Broken("12 tokens were read twice", each.name, _last(each).rid, 0) for each in retried[1:]]
        verdicts[1] = replace(verdicts[1], broken=tuple(cases))
        held = f"512 tokens of room {_last(retried[0]).room} on prefill0, 15 s after the load"
        verdicts[2] = replace(verdicts[2], broken=(Broken(held, retried[0].name, fault=1),))
    verdicts += [Verdict(name, "", unseen=why) for name, why in record.unseen.items()]
    return Judgement(tuple(verdicts), figures)


def _error(request: Request) -> bool:
    return any(event.error for event in request.events)


def _last(request: Request) -> Attempt:
    return request.choices[0].attempts[-1]


def _applied(planned: Planned) -> FaultRun:
    if planned.fault == "flush":
        return FaultRun(planned.number, None, None, problem="Redis did not answer within 1 s")
    begun_s = planned.at_s + 0.06
    note = "held until its third decode step" if planned.phase else ""
    return FaultRun(planned.number, begun_s, begun_s + planned.for_s if planned.for_s else None, note)


def _marks() -> tuple[Mark, ...]:
    told = (
        (2.46, "decode1", "killed"),
        (2.55, "decode1", "suspected for gateway0"),
        (2.9, "decode1", "broken for gateway0"),
        (5.46, "decode1", "started"),
        (5.5, "decode1", "not_ready for gateway0"),
        (5.9, "decode1", "probation for gateway0"),
        (6.5, "decode1", "ready for gateway0"),
        (4.26, "prefill0", "frozen"),
        (4.7, "prefill0", "slow for gateway0"),
        (4.8, "prefill0", "suspected for gateway1"),
        (5.2, "prefill0", "suspected for gateway0"),
        (6.06, "prefill0", "thawed"),
        (6.3, "prefill0", "ready for gateway1"),
        (6.4, "prefill0", "ready for gateway0"),
        (8.5, "prefill2", "broken for gateway0"),
        (9.3, "prefill2", "probation for gateway0"),
        (9.7, "prefill2", "ready for gateway0"),
    )
    return tuple(Mark(*each) for each in sorted(told))


def _free(chance: Random, role: str, at_s: float) -> str:
    dead = {name for name, since_s, until_s in DOWN if since_s + 0.1 < at_s < until_s + 0.5}
    return chance.choice([name for name in (f"{role}0", f"{role}1", f"{role}2") if name not in dead])


def _ends(name: str, since_s: float, until_s: float) -> float | None:
    """When an attempt on that instance is ended by what befalls it."""
    return next((from_s for of, from_s, to_s in DOWN if of == name and since_s < from_s < until_s), None)


def _request(chance: Random, number: int, shape: Shape) -> Request:
    asked_s = shape.load_s * (number + chance.random()) / shape.requests
    stream = chance.random() < 0.75
    words = chance.randint(*shape.words)
    step_s = chance.uniform(0.01, 0.045)
    name = f"{'stream' if stream else 'whole'}-{number:04d}"
    attempts, events = list[Attempt](), list[Event]()
    now_s, read, sampled, failed = asked_s + chance.uniform(0.001, 0.03), 0, chance.random() < 0.5, False
    for tried in range(4):
        prefill, decode = _free(chance, "prefill", now_s), _free(chance, "decode", now_s)
        first_s = now_s + chance.uniform(0.04, 0.25)
        whole_s = first_s + step_s * (words - read)
        cut_s = min(filter(None, (_ends(prefill, now_s, first_s), _ends(decode, now_s, whole_s))), default=None)
        if shape.attempts and tried + 1 < shape.attempts:
            cut_s = now_s + 0.6 * (whole_s - now_s)
        rid, keys = f"{number:08x}{tried:02d}{chance.getrandbits(48):012x}", (b"p", b"d") if sampled else (b"", b"")
        over_s = cut_s if cut_s is not None else whole_s
        attempts.append(Attempt(rid, chance.getrandbits(62) + 1, prefill, decode, now_s, over_s + 0.004, *keys))
        begun, shown_s = read, first_s
        while stream and read < words and shown_s < over_s:
            events.append(Event(shown_s, text=WORDS[(number + read) % len(WORDS)] + " "))
            read += 1
            shown_s = first_s + step_s * (read - begun)
        if cut_s is None or (failed := tried == 3):
            break
        now_s = cut_s + chance.uniform(0.05, 0.5)
    return _ended(chance, _Told(name, asked_s, stream, words, attempts, events, failed))


@dataclass
class _Told:
    name: str
    asked_s: float
    stream: bool
    words: int
    attempts: list[Attempt]
    events: list[Event]
    failed: bool


def _ended(chance: Random, told: _Told) -> Request:
    """The request with one of the ends there are."""
    attempts, events, lot, status, ending = told.attempts, told.events, chance.random(), 200, Ending.WHOLE
    over_s = max(attempts[-1].ended_s or 0.0, events[-1].at_s if events else 0.0)
    usage = Usage(80, told.words, 80 + told.words, 16)
    if lot < 0.008 and len(attempts) == 1:
        status, events = (
            503,
            [Event(told.asked_s + 0.02, error=Error("no server is free", "server_error", "busy", True))],
        )
        attempts = []
    elif events and (told.failed or lot < 0.015):
        kept = events[: max(1, len(events) // 2)]
        gone = Error("decode1 ended while it wrote this answer", "server_error", "stream_broken", definite=False)
        events = [*kept, Event(kept[-1].at_s + 0.1, error=gone)]
        attempts = [*attempts[:-1], replace(attempts[-1], ended_s=max(attempts[-1].began_s, events[-1].at_s))]
    elif events and lot < 0.055:
        ending, events = Ending.LEFT, events[: max(1, len(events) // 2)]
        attempts = [*attempts[:-1], replace(attempts[-1], ended_s=max(attempts[-1].began_s, events[-1].at_s) + 0.02)]
    elif told.stream:
        events[-1] = replace(events[-1], finish="stop", matched=2)
        events += [Event(over_s + 0.002, usage=usage), Event(over_s + 0.002, done=True)]
    else:
        text = " ".join(WORDS[at % len(WORDS)] for at in range(told.words))
        events = [Event(over_s + 0.002, text=text, finish="length", usage=usage)]
    choice = Choice(tuple(range(300, 300 + 80)), tuple(attempts))
    limits = Limits(told.words, stop=("\n\n",) if lot > 0.9 else ())
    asked = (told.name, told.asked_s, (choice,), limits, tuple(events), status, ending, told.stream, False, True)
    return Request(*asked, 1, f"gateway{chance.randint(0, 1)}")


def _samples(
    chance: Random, requests: tuple[Request, ...], instances: tuple[Instance, ...], load_s: float
) -> list[Sample]:
    """KV every quarter of a second: prompts and half of each answer, of those attempts that live."""
    found = []
    times = range(int((load_s + 2) * 4))
    held = {instance.name: [0] * len(times) for instance in instances}
    for attempt in (a for request in requests for choice in request.choices for a in choice.attempts):
        for name in (attempt.prefill, attempt.decode):
            for tick in range(int(attempt.began_s * 4) + 1, min(len(times), int((attempt.ended_s or load_s) * 4) + 1)):
                held[name][tick] += 80 * 12
    for instance in instances[:6]:
        cached = 0.0
        for tick in times:
            at_s = tick / 4
            if any(name == instance.name and since_s <= at_s < until_s for name, since_s, until_s in DOWN[:1]):
                cached = 0.0
                continue
            cached = min(POOL_TOKENS * 0.55, cached + chance.uniform(0, 700))
            live = min(held[instance.name][tick], POOL_TOKENS)
            found.append(Sample(at_s, instance.name, live, int(min(cached, POOL_TOKENS - live)), POOL_TOKENS))
    return found
