"""The invariants: what must hold in every run, each judged from its record alone. Pure.

To add one: a function with its sentence, and its name in INVARIANTS (`docs/chaos.md` has a recipe).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from failover.chaos.checker import Outcome
from failover.chaos.evidence import (
    ENGINES,
    Run,
    alive,
    applied,
    case_of,
    fault_at,
    heard_of_s,
    look_at,
    may_be_declared_dead,
    tries,
    violated,
)
from failover.chaos.history import Attempt, Request
from failover.chaos.record import SAMPLE_S, Record
from failover.chaos.verdict import Broken, Judgement, Verdict

_NO_END = "end"
"""The checker's rule of a request without a proper end."""
_FENCED = "gateway_fenced"
"""The code of what a gateway ends its requests with when others have declared it dead."""
_FOR_NOW = frozenset({429, 503})
"""Statuses of refusals that are nobody's fault."""
_STOPPED = "the run was stopped before its end"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one invariant says of a run: what it looked at in figures, what is wrong, or why nothing could be seen."""

    evidence: str = ""
    broken: tuple[Broken, ...] = ()
    unseen: str = ""


Rule = Callable[[Run], Finding]


def judge(record: Record) -> Judgement:
    """Every invariant over one run, and its figures. Equal records have equal judgements."""
    run = look_at(record)
    blind = tuple(Verdict(name, "", unseen=why) for name, why in record.unseen.items() if name not in INVARIANTS)
    return Judgement((*(_verdict(name, rule, run) for name, rule in INVARIANTS.items()), *blind), figures(run))


def _verdict(name: str, rule: Rule, run: Run) -> Verdict:
    if name in run.record.unseen:
        return Verdict(name, "", unseen=run.record.unseen[name])
    found = rule(run)
    return Verdict(name, found.evidence, found.broken, found.unseen)


def figures(run: Run) -> Mapping[str, float]:
    """The run in numbers; `settle_s` only where everything was given back."""
    counts = {how.value: float(len(run.ended(how))) for how in Outcome}
    settle_s = run.record.settled_s
    return {
        "requests": float(len(run.outcomes)),
        **counts,
        "attempts": float(sum(1 for request, _ in run.outcomes for _ in tries(request))),
        "faults": float(len(applied(run.record))),
        "deaths": float(len(run.deaths)),
        "longest_pause_s": max((each.length_s for each in run.pauses), default=0.0),
        "load_s": run.record.load_s,
        **({} if settle_s is None else {"settle_s": settle_s}),
    }


# -- the invariants ---------------------------------------------------------------------------------------------------


def whole_or_one_error(run: Run) -> Finding:
    """What a client read is the only true answer or a beginning of it, and ends whole or with one clear error."""
    wrong = [each for each in run.violations if each.rule != _NO_END]
    return Finding(f"{len(run.outcomes)} answers", tuple(violated(run, each) for each in wrong))


def one_end(run: Run) -> Finding:
    """Every request comes to its end, but for those whose own gateway was killed."""
    hung = [each for each in run.violations if each.rule == _NO_END]
    lost = len(run.ended(Outcome.LOST))
    evidence = f"{len(run.outcomes) - lost} of {len(run.outcomes)} requests ended, {lost - len(hung)} were killed"
    return Finding(evidence, tuple(violated(run, each) for each in hung))


def nothing_left_on_engines(run: Run) -> Finding:
    """No engine holds KV of any room when the run is over."""
    record = run.record
    ledgers = {ledger.engine: ledger for ledger in record.history.ledgers}
    expected = [each.name for each in record.instances if each.role in ENGINES and each.name in alive(record)]
    if record.stopped or not (ledgers or expected):
        return Finding(unseen=_STOPPED if record.stopped else "no engine was alive at the end")
    owners = _owners(record)
    wrong = [Broken(f"the ledger of {name} was not read") for name in expected if name not in ledgers]
    for name, ledger in ledgers.items():
        for room, tokens in ledger.by_room.items():
            what = f"{name} holds {tokens} tokens of KV for room {room}"
            known = room in owners
            wrong.append(case_of(record, what, *owners[room]) if known else Broken(f"{what}, which is nobody's"))
    return Finding(f"{len(ledgers)} engines' ledgers", tuple(wrong))


def _owners(record: Record) -> Mapping[str, tuple[Request, Attempt]]:
    return {str(each.room): (request, each) for request in record.history.requests for each in tries(request)}


def nothing_left_in_gateways(run: Run) -> Finding:
    """No booking, journal entry, task or socket is left when the run is over."""
    counts = run.record.history.left_over
    if run.record.stopped or not counts:
        return Finding(unseen=_STOPPED if run.record.stopped else "nothing was counted")
    wrong = (Broken(f"{count} left of {name}") for name, count in counts.items() if count)
    return Finding(f"{len(counts)} counts", tuple(wrong))


def dead_gateways_attempts_released(run: Run) -> Finding:
    """What a gateway that died had on engines is released within the scenario's time after its death."""
    record, bound_s = run.record, run.record.scenario.expect.reaped_s
    if not record.history.deaths:
        return Finding("no gateway died")
    looked_s = {sample.instance: sample.at_s for sample in record.samples}
    if max(death.at_s for death in record.history.deaths) > max(looked_s.values(), default=-math.inf):
        return Finding(unseen="no engine was looked at after the death of a gateway")
    longest_s = max((each.seen_s - each.died_s for each in record.orphans), default=0.0)
    left = f"{len(record.history.deaths)} dead gateways left {len(record.orphans)} attempts' KV on engines"
    late = [each for each in record.orphans if each.seen_s - each.died_s > bound_s]
    still = [each for each in record.orphans if each.seen_s >= looked_s.get(each.engine, math.inf)]
    if still and not late:
        return Finding(unseen=f"{left}, some of which was there when the run ended")
    owners = _owners(record)
    wrong = []
    for each in late:
        after_s, fault = each.seen_s - each.died_s, fault_at(record, each.died_s, each.died_s)
        what = f"{each.engine} holds KV for room {each.room} {after_s:.1f} s after the death of {each.gateway}"
        request, attempt = owners.get(each.room, (None, None))
        wrong.append(Broken(what, request.name if request else "", attempt.rid if attempt else "", fault))
    return Finding(f"{left}, the last was seen {longest_s:.1f} s after, at most {bound_s:g} s", tuple(wrong))


def no_live_attempt_aborted(run: Run) -> Finding:
    """Nothing that a gateway runs is aborted by others, nor is it declared dead, unless it stood still for long."""
    record, wrong, looked_at = run.record, [], 0
    for request, _ in run.outcomes:
        last_s = max((event.at_s for event in request.events), default=request.asked_s)
        if may_be_declared_dead(record, request.gateway, request.asked_s, last_s):
            continue
        made = list(tries(request))
        looked_at += len(made)
        wrong += [case_of(record, "aborted, not by its own gateway", request, each) for each in made if each.aborted]
        if any(event.error is not None and event.error.code == _FENCED for event in request.events):
            wrong.append(case_of(record, f"{request.gateway} was declared dead", request, *made[-1:]))
    return Finding(f"{looked_at} attempts of gateways that lived", tuple(wrong))


def let_go(run: Run) -> Finding:
    """What an attempt had on engines is released within the scenario's time after its end and the faults on its way."""
    record, bound_s, wrong, longest_s = run.record, run.record.scenario.expect.released_s, [], 0.0
    owners, looked = _owners(record), defaultdict[str, list[float]](list)
    for sample in record.samples:
        looked[sample.instance].append(sample.at_s)
    for held in (each for each in record.held if each.room in owners):
        request, attempt = owners[held.room]
        died = any(each.gateway == request.gateway and each.at_s >= attempt.began_s for each in record.history.deaths)
        if attempt.ended_s is None or died:  # what a dead gateway had is judged by itself
            continue
        longer_s = held.seen_s - held.since_s - (attempt.ended_s - attempt.began_s)
        heard_s = heard_of_s(record, request.gateway, attempt, attempt.ended_s, held.seen_s)
        late_s = min(longer_s, held.seen_s - heard_s)  # a gateway that takes a request late counts from then
        looks = bisect_right(looked[held.engine], held.seen_s) - bisect_right(looked[held.engine], held.seen_s - late_s)
        late_s = min(late_s, SAMPLE_S * looks)  # while the machine stands still nobody looks
        longest_s = max(longest_s, late_s)
        if late_s > bound_s:
            what = f"{held.engine} holds KV for room {held.room} {late_s:.1f} s after the attempt was over"
            wrong.append(case_of(record, what, request, attempt))
    ended = sum(attempt.ended_s is not None for _, attempt in owners.values())
    return Finding(
        f"{ended} attempts, the last was let go after {longest_s:.1f} s, at most {bound_s:g} s", tuple(wrong)
    )


def settled(run: Run) -> Finding:
    """All KV is back within the scenario's time after the load."""
    taken_s, bound_s = run.record.settled_s, run.record.scenario.expect.settle_s
    if taken_s is None and run.record.stopped:
        return Finding(unseen=_STOPPED)
    shown = "not everything came back" if taken_s is None else f"everything was back after {taken_s:.1f} s"
    late = taken_s is None or taken_s > bound_s
    wrong = (Broken(f"{shown}, not within {bound_s:g} s", fault=fault_at(run.record, math.inf, math.inf)),)
    return Finding(f"{shown}, at most {bound_s:g} s", wrong if late else ())


def refused(run: Run) -> Finding:
    """No more requests are refused than the scenario allows."""
    return _at_most(run, Outcome.REFUSED, run.record.scenario.expect.refused_ratio)


def broken(run: Run) -> Finding:
    """No more streams end with an error than the scenario allows."""
    return _at_most(run, Outcome.BROKEN, run.record.scenario.expect.broken_ratio)


def _at_most(run: Run, how: Outcome, bound: float) -> Finding:
    cases, total = run.ended(how), len(run.outcomes)
    evidence = f"{len(cases)} of {total} requests, at most {bound:.1%}"
    if len(cases) <= bound * total:
        return Finding(evidence)
    wrong = []
    for request in cases:
        said = next((event.error.message for event in request.events if event.error), "no error was read")
        wrong.append(
            case_of(run.record, f"{how.value}, status {request.status}: {said}", request, *[*tries(request)][-1:])
        )
    return Finding(evidence, tuple(wrong))


def recovery(run: Run) -> Finding:
    """No stream that goes on after a fault has paused for longer than the scenario allows."""
    bound_s = run.record.scenario.expect.recovery_s[run.record.long]
    longest_s = max((each.length_s for each in run.pauses), default=0.0)
    wrong = []
    for pause in run.pauses:
        if pause.length_s > bound_s:
            what = f"choice {pause.choice} paused for {pause.length_s:.1f} s at {pause.began_s:.1f} s"
            made = [each for each in pause.request.choices[pause.choice].attempts if each.began_s <= pause.ended_s]
            fault = fault_at(run.record, pause.began_s, pause.ended_s)
            wrong.append(Broken(what, pause.request.name, made[-1].rid if made else "", fault))
    return Finding(f"the longest of {len(run.pauses)} pauses: {longest_s:.1f} s, at most {bound_s:g} s", tuple(wrong))


def attempts(run: Run) -> Finding:
    """The engines are asked no more often for each sample or prompt of a request than the scenario allows."""
    choices = [(request, choice) for request, _ in run.outcomes for choice in request.choices]
    made, bound = sum(len(choice.attempts) for _, choice in choices), run.record.scenario.expect.attempts_ratio
    if not made:
        return Finding(unseen="no attempt is known")
    evidence = f"{made} attempts at {len(choices)} samples, at most {bound:g} each in the mean"
    many = [(request, choice.attempts) for request, choice in choices if len(choice.attempts) > bound]
    wrong = tuple(case_of(run.record, f"{len(tried)} attempts", request, tried[-1]) for request, tried in many)
    return Finding(evidence, wrong if made > bound * len(choices) else ())


def not_again(run: Run) -> Finding:
    """No attempt goes to an engine that has failed the same request since its client last got something of it."""
    wrong, looked_at = [], 0
    for request, choice in ((each, choice) for each, _ in run.outcomes for choice in each.choices):
        failed = set[str]()
        for attempt in choice.attempts:
            looked_at += bool(failed)
            for engine in sorted(failed & {attempt.prefill, attempt.decode}):
                wrong.append(case_of(run.record, f"{engine} has failed it, and is asked again", request, attempt))
            if attempt.had_output:
                failed.clear()
            failed |= {attempt.failed_on} - {""}
    return Finding(f"{looked_at} attempts after one that an engine failed", tuple(wrong))


def safe_to_ask_again(run: Run) -> Finding:
    """Who is refused for want of room or servers (429, 503) is told that asking again is safe, and when."""
    cases = [request for request in run.ended(Outcome.REFUSED) if request.status in _FOR_NOW]
    wrong = [request for request in cases if request.again_s is None]
    what = "refused, and not told when to ask again"
    return Finding(f"{len(cases)} requests", tuple(case_of(run.record, what, each) for each in wrong))


def errors(run: Run) -> Finding:
    """Clients were told every error that the scenario is about: else it has shown nothing of it."""
    told = Counter(event.error.code for request, _ in run.outcomes for event in request.events if event.error)
    wanted = run.record.scenario.expect.errors
    if run.record.stopped:
        return Finding(unseen=_STOPPED)
    missing = (Broken(f"nobody was told {code}") for code in wanted if not told[code])
    return Finding(", ".join(f"{told[code]} told {code}" for code in wanted) or "none is wanted", tuple(missing))


def deaths(run: Run) -> Finding:
    """No more engines end by themselves than the scenario allows, and nothing else does."""
    bound, roles = run.record.scenario.expect.deaths, {each.name: each.role for each in run.record.instances}
    engines = [mark for mark in run.deaths if roles.get(mark.instance) in ENGINES]
    others = [mark for mark in run.deaths if mark not in engines]
    wrong = [*others, *(engines if len(engines) > bound else ())]
    cases = (
        Broken(
            f"{mark.instance} ended by itself at {mark.at_s:.1f} s", fault=fault_at(run.record, mark.at_s, mark.at_s)
        )
        for mark in wrong
    )
    return Finding(f"{len(engines)} engines, at most {bound}; {len(others)} others", tuple(cases))


def faults_applied(run: Run) -> Finding:
    """Every planned fault was applied: a run that did not do its faults proves nothing."""
    record, wrong = run.record, []
    became = {each.number: each for each in record.faults}
    for plan in record.planned:
        problem = became[plan.number].problem if plan.number in became else ""
        missed = plan.number not in applied(record) and not record.stopped
        if problem or missed:
            wrong.append(Broken(f"not applied: {problem or 'its time did not come'}", fault=plan.number))
    return Finding(f"{len(applied(record))} of {len(record.planned)} faults", tuple(wrong))


def load_done(run: Run) -> Finding:
    """The load was asked to its end."""
    wrong = _STOPPED if run.record.stopped else "" if run.outcomes else "nothing was asked"
    evidence = f"{len(run.outcomes)} requests in {run.record.load_s:.1f} s"
    return Finding(evidence, (Broken(wrong),) if wrong else ())


INVARIANTS: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        whole_or_one_error,
        one_end,
        nothing_left_on_engines,
        nothing_left_in_gateways,
        dead_gateways_attempts_released,
        no_live_attempt_aborted,
        let_go,
        settled,
        refused,
        broken,
        recovery,
        attempts,
        not_again,
        safe_to_ask_again,
        errors,
        deaths,
        faults_applied,
        load_done,
    )
}
"""By name, in the order in which they are told."""
