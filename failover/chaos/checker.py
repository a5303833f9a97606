"""What is wrong with a recorded history: every request against its one proper end and its only true answer. Pure.

A request ends in exactly one way: whole, one clear error, or its client hung up. Only the death of the gateway itself
leaves one without an end; then nobody knows what became of it (it is indefinite), and what was read must still be true.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from failover.chaos.history import Ending, Event, History, Request
from failover.chaos.segments import Decode, Mismatch, Read, Whole, explain

DISTINCT_ROOMS_S = 700.0
"""A room may come again when no engine can remember it: twice SGLang's timeouts of 300 s, and a margin."""
_FIRST_ERROR_STATUS = 400


class Outcome(StrEnum):
    """How a request ended; `definite` where its client knows."""

    WHOLE = "whole"
    REFUSED = "refused"
    """An error with a real status, and nothing else."""
    BROKEN = "broken"
    """The beginning of a stream, and one error event."""
    LEFT = "left"
    LOST = "lost"
    """No end: the connection broke."""

    @property
    def definite(self) -> bool:
        return self is not Outcome.LOST


@dataclass(frozen=True, slots=True)
class Violation:
    """What no history may hold. `position` is a token of the answer, or an event of the stream, as `rule` says."""

    request: str
    rule: str
    expected: str
    got: str
    attempt: str = ""
    position: int | None = None

    def __str__(self) -> str:
        where = (f", attempt {self.attempt}" if self.attempt else "") + (
            f", at {self.position}" if self.position is not None else ""
        )
        return f"{self.request}{where}: {self.rule}: {self.got} instead of {self.expected}"


def check(history: History, decode: Decode) -> list[Violation]:
    """Everything that is wrong; empty for a good history. `decode` gives the text of the model's token ids."""
    found = [each for request in history.requests for each in _request(request, history, decode)]
    return [*found, *attempts(history), *_leaks(history)]


def outcome(request: Request) -> Outcome:
    """How `request` ended, judged by its end alone."""
    if request.ending is Ending.LEFT:
        return Outcome.LEFT
    if request.ending is Ending.CUT or request.status is None:
        return Outcome.LOST
    if request.status >= _FIRST_ERROR_STATUS:
        return Outcome.REFUSED
    return Outcome.BROKEN if any(event.error for event in request.events) else Outcome.WHOLE


def _request(request: Request, history: History, decode: Decode) -> Iterator[Violation]:
    ended = outcome(request)
    if ended is Outcome.LOST and not _gateway_died(request, history):
        yield Violation(request.name, "end", "one proper end", f"a connection that broke, status {request.status}")
    yield from _form(request, ended)
    yield from order(request)
    answers = [_answer(request, index, decode) for index in range(len(request.choices))]
    for violations, _ in answers:
        yield from violations
    if all(whole is not None for _, whole in answers):
        yield from _usage(request, ended, [whole for _, whole in answers if whole is not None])


def _gateway_died(request: Request, history: History) -> bool:
    return any(death.gateway == request.gateway and death.at_s >= request.asked_s for death in history.deaths)


def _form(request: Request, ended: Outcome) -> Iterator[Violation]:
    """The parts that each kind of end has: an error, a terminator, a finish for each choice, text."""
    errors, dones = (sum(map(kind, request.events)) for kind in (_error, _done))
    finishes = [sum(bool(e.finish) for e in request.events if e.index == at) for at in range(len(request.choices))]
    text = any(event.text or event.ids for event in request.events)
    expected: dict[str, tuple[object, object]] = {}
    if ended is Outcome.WHOLE:
        expected = {"errors": (0, errors), "terminators": (int(request.stream), dones)}
        expected |= {f"ends of choice {at}": (1, count) for at, count in enumerate(finishes)}
    elif ended is Outcome.REFUSED:
        expected = {"errors": (1, errors), "terminators": (0, dones), "text": (False, text)}
    elif ended is Outcome.BROKEN:
        expected = {"errors": (1, errors), "terminators": (0, dones), "text": (True, text)}
        expected |= {"stream": (True, request.stream), "after the end": (False, min(finishes, default=0) > 0)}
    else:
        expected = {"at most one error": (True, errors <= 1), "at most one terminator": (True, dones <= 1)}
    expected |= {f"at most one end of choice {at}": (True, count <= 1) for at, count in enumerate(finishes)}
    for rule, (wanted, got) in expected.items():
        if wanted != got:
            yield Violation(request.name, f"{ended.value}: {rule}", str(wanted), str(got))
    for event in request.events:
        if event.error and event.error.definite and text:
            yield Violation(request.name, "definite error", "no work done", "text was read")
        if event.error and not event.error.message:
            yield Violation(request.name, "clear error", "words", "none")


def _error(event: Event) -> bool:
    return event.error is not None


def _done(event: Event) -> bool:
    return event.done


def order(request: Request) -> Iterator[Violation]:
    """Nothing but what may follows an error, a terminator, or the finish of its choice; a role comes once, first."""
    over, finished, begun = "", set[int](), set[int]()
    for position, event in enumerate(request.events):
        if event.junk:
            yield Violation(request.name, "form", "an event", repr(event.junk), position=position)
        if over:
            yield Violation(request.name, f"after the {over}", "nothing", _shown(event), position=position)
        if event.index in finished and (event.text or event.ids):
            yield Violation(request.name, "after the finish", "no text", _shown(event), position=position)
        if event.role and event.index in begun:
            yield Violation(request.name, "role", "once, before all text", "again", position=position)
        if event.role or event.text or event.ids:
            begun.add(event.index)
        if event.finish:
            finished.add(event.index)
        if not 0 <= event.index < max(1, len(request.choices)):
            yield Violation(request.name, "index", f"below {len(request.choices)}", str(event.index), position=position)
        over = over or ("terminator" if event.done else "error" if event.error else "")
    for before, after in pairwise((request.asked_s, *(event.at_s for event in request.events))):
        if after < before:
            yield Violation(request.name, "time", f"not before {before}", str(after))


def _shown(event: Event) -> str:
    parts = (event.text, event.ids, event.finish, event.error, event.usage, event.junk, event.done)
    return ", ".join(repr(part) for part in parts if part) or "an empty event"


def _answer(request: Request, index: int, decode: Decode) -> tuple[list[Violation], Whole | None]:
    """Whether one choice read the only true answer, or a beginning of it, and told its end truly."""
    events = [event for event in request.events if event.index == index]
    choice, limits = request.choices[index], request.limits
    end = next((event for event in events if event.finish), None)
    ids = [token for event in events for token in event.ids] if request.ids_shown else None
    read = Read("".join(event.text for event in events), ids, end.finish if end else "")
    found = explain(choice, limits, read, decode)
    if isinstance(found, Mismatch):
        rid = choice.attempts[found.attempt].rid if choice.attempts else "none"
        rule = f"choice {index} is no answer of its attempts, from character {found.at_char} on"
        return [Violation(request.name, rule, repr(found.expected), repr(found.got), rid, found.position)], None
    wrong = []
    if end is not None and end.finish != found.finish:
        wrong.append(Violation(request.name, f"finish of choice {index}", found.finish, end.finish))
    elif end is not None and end.matched is not None and end.matched != found.matched:
        wrong.append(Violation(request.name, f"matched stop of choice {index}", f"{found.matched}", f"{end.matched}"))
    # A text that is cut at a space may have been: an engine shows words before half a character, whatever they begin.
    cut = end is None and not read.text.endswith(" ")
    if cut and any(read.text.endswith(part) for stop in limits.stop for part in _beginnings(stop)):
        wrong.append(Violation(request.name, f"stop string in choice {index}", "none of it", repr(read.text[-20:])))
    return wrong, found


def _beginnings(stop: str) -> Iterator[str]:
    return (stop[:length] for length in range(1, len(stop) + 1))


def _usage(request: Request, ended: Outcome, answers: Sequence[Whole]) -> Iterator[Violation]:
    """Usage is told once, where it is to be told, and counts what was really written."""
    told = [event.usage for event in request.events if event.usage]
    if ended is Outcome.WHOLE and len(told) != int(request.wants_usage):
        yield Violation(request.name, "usage events", str(int(request.wants_usage)), str(len(told)))
    prompt = sum(len(choice.prompt_ids) for choice in request.choices[:: request.samples])
    written = sum(len(answer.ids) for answer in answers)
    for usage in told if ended is Outcome.WHOLE else ():
        numbers = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        if numbers != (prompt, written, prompt + written):
            yield Violation(request.name, "usage", str((prompt, written, prompt + written)), str(numbers))
        if usage.cached_tokens is not None and not 0 <= usage.cached_tokens <= prompt:
            yield Violation(request.name, "cached tokens", f"at most {prompt}", str(usage.cached_tokens))


def attempts(history: History) -> Iterator[Violation]:
    """No room and no rid twice, no rid the beginning of another, and one live attempt at a time."""
    every = [(r, attempt) for r in history.requests for choice in r.choices for attempt in choice.attempts]
    by_rid = sorted(every, key=lambda each: each[1].rid)
    for (_, first), (request, second) in pairwise(by_rid):
        if second.rid.startswith(first.rid):
            yield Violation(request.name, "rid", "none that another begins with", first.rid, second.rid)
    by_room = sorted(every, key=lambda each: (each[1].room, each[1].began_s))
    for (_, first), (request, second) in pairwise(by_room):
        if second.room == first.room and second.began_s - first.began_s < DISTINCT_ROOMS_S:
            yield Violation(request.name, "room", f"none of {first.rid}", str(second.room), second.rid)
    for request, attempt in every:
        if attempt.room <= 0:
            yield Violation(request.name, "room", "above 0", str(attempt.room), attempt.rid)
    for request in history.requests:
        for choice in request.choices:
            for first, second in pairwise(choice.attempts):
                if first.ended_s is None or second.began_s < first.ended_s:
                    rule = f"a second live attempt beside {first.rid}"
                    yield Violation(request.name, rule, f"after {first.ended_s}", str(second.began_s), second.rid)


def _leaks(history: History) -> Iterator[Violation]:
    owners = {
        str(attempt.room): (request.name, attempt.rid)
        for request in history.requests
        for choice in request.choices
        for attempt in choice.attempts
    }
    for ledger in history.ledgers:
        for room, tokens in ledger.by_room.items():
            name, rid = owners.get(room, ("nobody's", ""))
            yield Violation(name, f"KV of room {room} on {ledger.engine}", "none", f"{tokens} tokens", rid)
    for what, count in history.left_over.items():
        if count:
            yield Violation("the run", f"left over: {what}", "0", str(count))
