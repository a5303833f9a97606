"""A replay continues a run that repeats itself exactly, whatever its chunks, and never one that does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from failover.features import CHAT, COMPLETIONS, GENERATE
from failover.replay import Diverged, Replay

Event = dict[str, Any]


@dataclass(frozen=True)
class Token:
    """One token of the model: its text, and which part of the answer a parser counts it to."""

    id: int
    text: str
    part: str = "content"


@dataclass(frozen=True)
class Answer:
    tokens: tuple[Token, ...]
    reason: str = "stop"
    logprobs: bool = False


Cuts = Sequence[int]


def steps(answer: Answer, cuts: Cuts) -> Iterator[tuple[Token, ...]]:
    """The tokens as they come in steps: each number is the size of one, the rest comes in one."""
    begin = 0
    for size in cuts:
        if begin + size >= len(answer.tokens):
            break
        yield answer.tokens[begin : begin + size]
        begin += size
    yield answer.tokens[begin:]


def chat(answer: Answer, cuts: Cuts, rid: str) -> list[Event]:
    """As SGLang: of each step the reasoning, the content, then the tool calls, each in a chunk of its own."""
    deltas: list[tuple[Event, Any]] = [({"role": "assistant", "content": ""}, None)]
    named: set[str] = set()
    for step in steps(answer, cuts):
        chunks: list[Event] = []
        for name, part in (("reasoning_content", "reasoning"), ("content", "content")):
            if text := "".join(token.text for token in step if token.part == part):
                chunks.append({name: text})
        for token in step:
            if not token.part.startswith("tool"):
                continue
            index = int(token.part[4:])
            first = token.part not in named
            named.add(token.part)
            function = {"name": token.text, "arguments": ""} if first else {"name": None, "arguments": token.text}
            call_id = f"call_{rid}_{index}" if first else None
            chunks.append({"tool_calls": [{"id": call_id, "index": index, "type": "function", "function": function}]})
        entries = [{"token": token.text, "logprob": float(token.id), "top_logprobs": []} for token in step]
        logprobs = {"content": entries} if answer.logprobs else None
        deltas += [(chunk, None if at else logprobs) for at, chunk in enumerate(chunks)]
    choices = [{"index": 0, "delta": delta, "logprobs": values, "finish_reason": None} for delta, values in deltas]
    choices.append({"index": 0, "delta": {"reasoning_content": None}, "finish_reason": answer.reason})
    events: list[Event] = [{"id": rid, "created": len(rid), "choices": [choice]} for choice in choices]
    return [*events, {"id": rid, "created": len(rid), "choices": [], "usage": {"completion_tokens": 9}}]


def completion(answer: Answer, cuts: Cuts, rid: str) -> list[Event]:
    events: list[Event] = []
    for step in steps(answer, cuts):
        logprobs = {
            "text_offset": [-1 for _ in step],
            "tokens": [token.text for token in step],
            "token_logprobs": [float(token.id) for token in step],
            "top_logprobs": [{token.text: float(token.id)} for token in step],
        }
        choice = {"index": 0, "text": text_of(step), "token_ids": ids_of(step), "finish_reason": None}
        events.append({"id": rid, "choices": [{**choice, "logprobs": logprobs if answer.logprobs else None}]})
    events[-1]["choices"][0]["finish_reason"] = answer.reason
    return [*events, {"id": rid, "choices": [], "usage": {"completion_tokens": 9}}]


def generate(answer: Answer, cuts: Cuts, rid: str, whole: bool = True) -> list[Event]:
    events: list[Event] = []
    so_far: tuple[Token, ...] = ()
    for step in steps(answer, cuts):
        so_far = (*so_far, *step)
        shown = so_far if whole else step
        meta: Event = {"id": rid, "finish_reason": None, "completion_tokens": len(so_far)}
        if answer.logprobs:
            meta["output_token_logprobs"] = [[float(token.id), token.id, None] for token in shown]
            meta["output_top_logprobs"] = [[[float(token.id), token.id, None]] for token in shown]
        events.append({"text": text_of(shown), "output_ids": ids_of(shown), "meta_info": meta})
    events[-1]["meta_info"]["finish_reason"] = {"type": answer.reason}
    return events


def increments(answer: Answer, cuts: Cuts, rid: str) -> list[Event]:
    return generate(answer, cuts, rid, whole=False)


def text_of(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def ids_of(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


# ---- what a client makes of it ---------------------------------------------------------------------------------------


def openai_client(events: Sequence[Event]) -> Event:
    """All parts put together by plain addition, as client libraries do."""
    got: Event = {"usages": 0, "reasons": [], "roles": 0, "calls": {}, "logprobs": []}
    for event in events:
        got["usages"] += not event["choices"]
        for choice in event["choices"]:
            got["reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            delta = choice.get("delta", choice)
            got["roles"] += delta.get("role") is not None
            for name in ("content", "reasoning_content", "text", "token_ids"):
                if delta.get(name):
                    got[name] = got[name] + delta[name] if name in got else delta[name]
            for call in delta.get("tool_calls") or ():
                made = got["calls"].setdefault(call["index"], {"ids": [], "name": "", "arguments": ""})
                made["ids"] += [call["id"]] if call["id"] else []
                made["name"] += call["function"]["name"] or ""
                made["arguments"] += call["function"]["arguments"] or ""
            values = choice.get("logprobs") or {}
            got["logprobs"] += [(entry["token"], entry["logprob"]) for entry in values.get("content", ())]
            assert len({len(each) for each in values.values()}) <= 1
            got["logprobs"] += list(zip(values.get("tokens", ()), values.get("token_logprobs", ()), strict=True))
    return got


def whole_client(events: Sequence[Event]) -> Event:
    """The last event is all; no event may hold less than one before."""
    sizes = [len(event["output_ids"]) for event in events]
    assert sizes == sorted(sizes)
    reasons = [event["meta_info"]["finish_reason"] for event in events if event["meta_info"]["finish_reason"]]
    last = copy.deepcopy(events[-1])
    last["meta_info"].pop("id")
    return {**last, "reasons": reasons}


def increments_client(events: Sequence[Event]) -> Event:
    metas = [event["meta_info"] for event in events]
    return {
        "text": "".join(event["text"] for event in events),
        "ids": [each for event in events for each in event["output_ids"]],
        "reasons": [meta["finish_reason"] for meta in metas if meta["finish_reason"]],
        "logprobs": [each for meta in metas for each in meta.get("output_token_logprobs", ())],
        "top": [each for meta in metas for each in meta.get("output_top_logprobs", ())],
    }


Streams = Callable[[Answer, Cuts, str], list[Event]]
WIRES: dict[str, tuple[str, Streams, Callable[[Sequence[Event]], Event]]] = {
    "chat": (CHAT, chat, openai_client),
    "completions": (COMPLETIONS, completion, openai_client),
    "generate": (GENERATE, generate, whole_client),
    "incremental": (GENERATE, increments, increments_client),
}

TEXTS = st.text(alphabet='ab{"é', min_size=1, max_size=3)
TOKENS = st.builds(Token, st.integers(0, 9), TEXTS, st.sampled_from(["reasoning", "content", "tool0", "tool1"]))
ANSWERS = st.builds(
    Answer,
    st.lists(TOKENS, min_size=1, max_size=12).map(tuple),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.booleans(),
)
CUTS = st.lists(st.integers(1, 4), max_size=12)


def without_ids(got: Event) -> Event:
    """What both runs must agree on: all but the ids of tool calls."""
    calls = {index: {**call, "ids": len(call["ids"])} for index, call in got.get("calls", {}).items()}
    return {**got, "calls": calls}


def begun(wire: str, sent: Sequence[Event]) -> Replay:
    return Replay(WIRES[wire][0], sent, incremental=wire == "incremental")


def fed(replay: Replay, events: Sequence[Event]) -> list[Event]:
    return [left for event in events for left in replay.feed(event)]


@pytest.mark.parametrize("wire", WIRES)
@given(ANSWERS, CUTS, CUTS, st.integers(0, 999))
def test_the_same_answer_goes_on_exactly(wire: str, answer: Answer, cuts: Cuts, again: Cuts, end: int) -> None:
    _, stream, client = WIRES[wire]
    first, second = stream(answer, cuts, "first"), stream(answer, again, "second run")
    sent = first[: 1 + end % len(first)]
    before = copy.deepcopy(second)
    replay = begun(wire, sent)
    rest = fed(replay, second)
    assert replay.finished
    assert replay.caught_up
    assert second == before
    got, truth = client([*sent, *rest]), client(first)
    assert without_ids(got) == without_ids(truth)
    for index, call in client(sent).get("calls", {}).items():
        assert got["calls"][index]["ids"] == call["ids"]


def parts_of(got: Event) -> dict[Any, Any]:
    """What a client adds up, part by part."""
    parts = {name: value for name, value in got.items() if isinstance(value, str | list)}
    return parts | {(index, name): call[name] for index, call in got.get("calls", {}).items() for name in PARTS_OF_CALL}


PARTS_OF_CALL = ("name", "arguments")


@pytest.mark.parametrize("wire", WIRES)
@given(ANSWERS, CUTS, CUTS, st.integers(0, 999))
def test_nothing_leaves_before_all_has_come_again(wire: str, answer: Answer, cuts: Cuts, again: Cuts, end: int) -> None:
    _, stream, client = WIRES[wire]
    first, second = stream(answer, cuts, "first"), stream(answer, again, "second run")
    sent = first[: 1 + end % len(first)]
    had = parts_of(client(sent))
    replay = begun(wire, sent)
    for count, event in enumerate(second, 1):
        passing = replay.passing
        left = replay.feed(event)
        assert not passing or left == [event]
        if left:
            has_now = parts_of(client(second[:count]))
            assert {name: has_now[name][: len(value)] for name, value in had.items()} == had
            assert replay.caught_up


def changed(answer: Answer, at: int, how: str) -> Answer:
    token = answer.tokens[at]
    other = replace(token, text="x" + token.text[1:]) if how == "text" else replace(token, id=token.id + 10)
    return replace(answer, tokens=(*answer.tokens[:at], other, *answer.tokens[at + 1 :]))


@pytest.mark.parametrize("wire", WIRES)
@given(ANSWERS, CUTS, CUTS, st.data())
def test_a_change_of_what_was_sent_is_found(
    wire: str, answer: Answer, cuts: Cuts, again: Cuts, data: st.DataObject
) -> None:
    """One character or one id, anywhere in what the client has."""
    _, stream, _ = WIRES[wire]
    at = data.draw(st.integers(0, len(answer.tokens) - 1))
    how = data.draw(st.sampled_from(["text"] if wire == "chat" else ["text", "id"]))
    first = stream(answer, cuts, "first")
    count = next(  # the shortest beginning that the change would show in
        n for n in range(1, len(first) + 1) if first[:n] != stream(changed(answer, at, how), cuts, "first")[:n]
    )
    sent = first[: data.draw(st.integers(count, len(first)))]
    with pytest.raises(Diverged):
        fed(begun(wire, sent), stream(changed(answer, at, how), again, "second run"))


@pytest.mark.parametrize("wire", WIRES)
@given(ANSWERS, CUTS, CUTS, st.data())
def test_another_length_is_found(wire: str, answer: Answer, cuts: Cuts, again: Cuts, data: st.DataObject) -> None:
    """A run that ends earlier than what was sent, and one that goes on after an end that was sent."""
    _, stream, _ = WIRES[wire]
    assume(len(answer.tokens) > 1)
    shorter = replace(answer, tokens=answer.tokens[: data.draw(st.integers(1, len(answer.tokens) - 1))])
    with pytest.raises(Diverged):
        fed(begun(wire, stream(answer, cuts, "first")), stream(shorter, again, "second run"))
    with pytest.raises(Diverged):
        fed(begun(wire, stream(shorter, cuts, "first")), stream(answer, again, "second run"))


@pytest.mark.parametrize("wire", WIRES)
@given(ANSWERS, CUTS, CUTS)
def test_another_end_is_found(wire: str, answer: Answer, cuts: Cuts, again: Cuts) -> None:
    _, stream, _ = WIRES[wire]
    other = replace(answer, reason="abort")
    with pytest.raises(Diverged, match="ends with"):
        fed(begun(wire, stream(answer, cuts, "first")), stream(other, again, "second run"))
