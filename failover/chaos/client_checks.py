"""What can be judged from what clients of a real fleet read, and why the rest cannot be seen. Pure.

The tokens of a real model follow from no rule that is known here. So an answer is judged by its form, its ends, its own
counts, and where each greedy prompt was asked once before the faults, by what was answered then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from failover.chaos.checker import Outcome, Violation, attempts, order, outcome
from failover.chaos.history import Event, History, Request

ENDS = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
"""Reasons for which a choice may be whole; an engine that was made to stop says `abort`."""
TRUE_ANSWERS = "true_answers"
"""What a record says of the words of answers, where nothing is known that they could be compared with."""
UNSEEN: Mapping[str, str] = {
    "nothing_left_on_engines": "real engines do not tell whose KV they hold",
    "dead_gateways_attempts_released": "real engines do not tell whose KV they hold",
    "let_go": "real engines do not tell whose KV they hold",
    "not_again": "what real engines answered is not read",
    "safe_to_ask_again": "gateways of others have other ways to refuse",
    "deaths": "the processes of a real fleet are not ours to watch",
}
"""What cannot be seen of any real fleet."""
BY_PDGATE: Mapping[str, str] = {
    "nothing_left_in_gateways": "only pdgate tells what it still counts",
    "settled": "only pdgate tells when all is given back",
    "attempts": "only pdgate tells of its attempts",
    "no_live_attempt_aborted": "only pdgate tells of its attempts",
}
"""What cannot be seen where a gateway is none of pdgate's."""
NO_REFERENCE = (
    "nobody knows what a real model must answer; with `reference = true` each greedy prompt is asked before the faults"
)
BATCHES = "a difference may be due to the batch that an engine computed it in; run it without faults to see"
"""Real engines need not give the same greedy text twice."""


def check(history: History, references: Mapping[str, str]) -> list[Violation]:
    """Everything that is wrong; `references`: the true text of some requests by their names."""
    found = [each for request in history.requests for each in _request(request, references.get(request.name))]
    return [*found, *attempts(history)]


def _request(request: Request, reference: str | None) -> Iterator[Violation]:
    ended = outcome(request)
    shown = replace(request, events=tuple(_without_end_of_error(request.events)))
    yield from _end(shown, ended)
    yield from order(shown)
    for index in range(len(request.choices)):
        yield from _counts(shown, index)
        if reference is not None:
            yield from _text(shown, ended, index, reference)
    yield from _usage(shown, ended)


def _without_end_of_error(events: tuple[Event, ...]) -> Iterator[Event]:
    """SGLang, and routers that pass it on, write `[DONE]` behind an error event: that is no second end."""
    errors = 0
    for event in events:
        if not (event.done and errors == 1):
            yield event
        errors += event.error is not None


def _end(request: Request, ended: Outcome) -> Iterator[Violation]:
    """Exactly one end: a finish of each choice and the terminator, or one clear error."""
    errors, dones = sum(e.error is not None for e in request.events), sum(e.done for e in request.events)
    finishes = [sum(bool(e.finish) for e in request.events if e.index == at) for at in range(len(request.choices))]
    parts: dict[str, tuple[object, object]] = {}
    if ended is Outcome.LOST:
        parts = {"end": ("one proper end", f"a connection that broke, status {request.status}")}
    elif ended is Outcome.WHOLE:
        parts = {"status": (200, request.status), "errors": (0, errors), "terminators": (int(request.stream), dones)}
        parts |= {f"ends of choice {at}": (1, count) for at, count in enumerate(finishes)}
    elif ended is Outcome.REFUSED:
        parts = {"errors": (1, errors), "terminators": (0, dones), "ends of choices": (0, sum(finishes))}
    elif ended is Outcome.BROKEN:
        parts = {"errors": (1, errors), "terminators": (0, dones), "stream": (True, request.stream)}
        parts |= {"an error behind the end": (False, min(finishes, default=0) > 0)}
    parts |= {f"at most one end of choice {at}": (True, count <= 1) for at, count in enumerate(finishes)}
    for rule, (wanted, got) in parts.items():
        if wanted != got:
            yield Violation(request.name, rule if rule == "end" else f"{ended.value}: {rule}", str(wanted), str(got))
    for event in request.events:
        if event.error and not event.error.message:
            yield Violation(request.name, "clear error", "words", "none")
        if event.finish and event.finish not in ENDS:
            yield Violation(request.name, f"finish of choice {event.index}", " or ".join(sorted(ENDS)), event.finish)


def _counts(request: Request, index: int) -> Iterator[Violation]:
    """Never more than was asked for, nor less where it says so; no stop string."""
    events, most = [event for event in request.events if event.index == index], request.limits.max_tokens
    ids, finish = sum(len(event.ids) for event in events), next((e.finish for e in events if e.finish), "")
    if ids > most or (request.ids_shown and finish == "length" and ids != most):
        yield Violation(request.name, f"tokens of choice {index}", str(most), str(ids))
    pieces = sum(bool(event.text) for event in events)
    if request.stream and pieces > most + 1:  # one token each at least; what was withheld may come with the finish
        yield Violation(request.name, f"pieces of choice {index}", f"at most {most} tokens", str(pieces))
    text = "".join(event.text for event in events)
    for stop in request.limits.stop:
        if stop in text:
            yield Violation(request.name, f"stop string in choice {index}", f"no {stop!r}", repr(text[-20:]))


def _text(request: Request, ended: Outcome, index: int, reference: str) -> Iterator[Violation]:
    text = "".join(event.text for event in request.events if event.index == index)
    finished = any(event.finish for event in request.events if event.index == index)
    if (text == reference) if ended is Outcome.WHOLE or finished else reference.startswith(text):
        return
    at = next((n for n, (one, other) in enumerate(zip(text, reference, strict=False)) if one != other), len(text))
    at = min(at, len(reference))
    rule = f"choice {index} is not what was answered before the faults, from character {at} on ({BATCHES})"
    yield Violation(request.name, rule, repr(reference[at : at + 20]), repr(text[at : at + 20]), position=at)


def _usage(request: Request, ended: Outcome) -> Iterator[Violation]:
    """Usage is told once, where it was asked for, and fits what was asked and read."""
    told = [event.usage for event in request.events if event.usage]
    if ended is not Outcome.WHOLE:
        return
    if len(told) != int(request.wants_usage):
        yield Violation(request.name, "usage events", str(int(request.wants_usage)), str(len(told)))
    most = request.limits.max_tokens * len(request.choices)
    ids = sum(len(event.ids) for event in request.events)
    all_used = all(event.finish == "length" for event in request.events if event.finish)
    exact = ids if request.ids_shown else most if all_used else None
    for usage in told:
        prompt, written = usage.prompt_tokens, usage.completion_tokens
        if usage.total_tokens != prompt + written or prompt < 1:
            numbers = f"{prompt}, {written}, {usage.total_tokens}"
            yield Violation(request.name, "usage", "a prompt, an answer, and their sum", numbers)
        if written > most or exact not in (None, written):
            yield Violation(request.name, "completion tokens", str(most if exact is None else exact), str(written))
        if usage.cached_tokens is not None and not 0 <= usage.cached_tokens <= prompt:
            yield Violation(request.name, "cached tokens", f"at most {prompt}", str(usage.cached_tokens))
