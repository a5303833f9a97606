"""Streams as SGLang 0.5.23 writes them, continued by a second run: what leaves, event by event."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from failover import replay
from failover.features import CHAT, COMPLETIONS, GENERATE
from failover.replay import Diverged, Replay

Event = dict[str, Any]


def chunk(rid: str = "new", *, finish: str | None = None, logprobs: Any = None, **delta: Any) -> Event:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish, "matched_stop": None}
    return {"id": rid, "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


ROLE = chunk(role="assistant", content="", reasoning_content=None)
STOP = chunk(reasoning_content=None, finish="stop")
USAGE = {"id": "new", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}


def call(index: int, rid: str | None, name: str | None, arguments: str) -> Event:
    function = {"name": name, "arguments": arguments}
    return chunk(tool_calls=[{"id": rid, "index": index, "type": "function", "function": function}])


def deltas(events: list[Event]) -> list[Event]:
    return [event["choices"][0]["delta"] for event in events]


def entries(*tokens: str, logprob: float = -1.0) -> Event:
    return {"content": [{"token": token, "logprob": logprob, "top_logprobs": []} for token in tokens]}


def completion(text: str, *, finish: str | None = None, **more: Any) -> Event:
    return {"id": "new", "choices": [{"index": 0, "text": text, "finish_reason": finish, **more}], "usage": None}


def generated(text: str, *ids: int, count: int | None = None, finish: Any = None, **meta: Any) -> Event:
    count = len(ids) if count is None else count
    return {
        "text": text,
        "output_ids": list(ids),
        "meta_info": {"id": "new", "finish_reason": finish, "completion_tokens": count, **meta},
    }


class TestChat:
    def test_the_role_comes_once_and_the_chunk_at_the_border_is_cut(self) -> None:
        run = Replay(CHAT, [ROLE, chunk(content="Hel")])
        assert run.feed(ROLE) == []
        assert run.feed(chunk(content="He")) == []
        assert not run.caught_up
        assert run.feed(chunk(content="llo")) == [chunk(content="lo")]
        assert run.passing
        new = chunk(content=" you", finish="stop")
        assert run.feed(new) == [new]
        assert run.finished
        assert run.feed(USAGE) == [USAGE]

    def test_what_passes_is_not_looked_through(self) -> None:
        run = Replay(CHAT, [ROLE, chunk(content="a")])
        assert [run.feed(ROLE), run.feed(chunk(content="a"))] == [[], []]
        assert run.passing
        assert run.feed(chunk(reasoning_content=None)) == [chunk(reasoning_content=None)]

    def test_only_the_role_was_sent(self) -> None:
        run = Replay(CHAT, [ROLE])
        assert not run.passing
        assert run.feed(ROLE) == []
        assert run.feed(chunk(content="a")) == [chunk(content="a")]

    def test_reasoning_and_content_in_one_chunk_are_cut_apart(self) -> None:
        run = Replay(CHAT, [ROLE, chunk(reasoning_content="think", content=None)])
        run.feed(ROLE)
        left = run.feed(chunk(reasoning_content="think", content="so"))
        assert deltas(left) == [{"reasoning_content": None, "content": "so"}]

    def test_a_part_that_is_ahead_waits_for_the_others(self) -> None:
        run = Replay(CHAT, [ROLE, chunk(content="I look"), call(0, "c1", "find", "")])
        run.feed(ROLE)
        assert run.feed(chunk(content="I look it")) == []
        assert run.feed(chunk(content=" up.")) == []
        assert not run.caught_up
        left = run.feed(call(0, "c2", "find", ""))
        assert deltas(left) == [{"content": " it"}, {"content": " up."}]

    def test_a_part_that_never_comes_is_found_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay, "MAX_HELD_EVENTS", 2)
        run = Replay(CHAT, [ROLE, chunk(content="a"), call(0, "c1", "find", "")])
        run.feed(chunk(content="ab"))
        run.feed(chunk(content="c"))
        with pytest.raises(Diverged, match="does not come again"):
            run.feed(chunk(content="d"))

    def test_a_tool_call_that_had_begun_keeps_its_id(self) -> None:
        run = Replay(CHAT, [ROLE, call(0, "c1", "find", ""), call(0, None, None, '{"a')])
        run.feed(ROLE)
        assert run.feed(call(0, "c2", "find", "")) == []
        assert run.feed(call(0, None, None, '{"a": 1}')) == [call(0, None, None, '": 1}')]
        assert not run.passing  # some engines repeat the id
        assert run.feed(call(0, "c2", None, "}")) == [call(0, None, None, "}")]

    def test_a_tool_call_that_is_new_has_its_own_id(self) -> None:
        run = Replay(CHAT, [ROLE, call(0, "c1", "find", "{}")])
        run.feed(ROLE)
        run.feed(call(0, "c2", "find", "{}"))
        assert run.feed(call(1, "c3", "read", "")) == [call(1, "c3", "read", "")]
        assert run.feed(call(1, None, None, "{}")) == [call(1, None, None, "{}")]

    def test_two_tool_calls_in_one_chunk(self) -> None:
        both = chunk(
            tool_calls=[
                {"id": "c2", "index": 0, "function": {"name": "find", "arguments": "{}"}},
                {"id": "c3", "index": 1, "function": {"name": "read", "arguments": "{"}},
            ]
        )
        run = Replay(CHAT, [ROLE, call(0, "c1", "find", "{}")])
        run.feed(ROLE)
        (left,) = deltas(run.feed(both))
        assert [each["id"] for each in left["tool_calls"]] == ["c3"]

    @pytest.mark.parametrize(
        "other",
        [
            chunk(content="Hal"),
            chunk(content="Help"),
            chunk(content="Hello", finish="length"),
            chunk(content="Hel", finish="stop"),
            chunk(content="Hello!"),
        ],
    )
    def test_another_answer_is_found(self, other: Event) -> None:
        run = Replay(CHAT, [ROLE, chunk(content="Hello"), STOP])
        with pytest.raises(Diverged):
            deque(map(run.feed, (other, STOP)), maxlen=0)

    def test_another_tool_call_is_found(self) -> None:
        with pytest.raises(Diverged, match=r"tool call.*name.*'read' came where the client has 'find'"):
            Replay(CHAT, [ROLE, call(0, "c1", "find", "")]).feed(call(0, "c2", "read", ""))

    def test_after_the_finish_only_the_usage_is_missing(self) -> None:
        run = Replay(CHAT, [ROLE, chunk(content="Hello"), STOP])
        assert [run.feed(event) for event in (ROLE, chunk(content="Hello"))] == [[], []]
        before_the_end = run.caught_up
        assert run.feed(STOP) == []
        assert (before_the_end, run.caught_up) == (False, True)
        assert run.feed(USAGE) == [USAGE]

    def test_a_usage_that_was_sent_is_not_sent_again(self) -> None:
        run = Replay(CHAT, [ROLE, chunk(content="Hello"), STOP, USAGE])
        assert [run.feed(event) for event in (ROLE, chunk(content="Hello"), STOP, USAGE)] == [[], [], [], []]

    def test_events_without_a_choice_are_told_apart(self) -> None:
        extra = {"id": "new", "choices": [], "sglext": {"cached_tokens_details": {"device": 1}}}
        run = Replay(CHAT, [ROLE, chunk(content="Hello"), STOP, extra])
        for event in (ROLE, chunk(content="Hello"), STOP, extra):
            assert run.feed(event) == []
        assert run.feed(USAGE) == [USAGE]
        run = Replay(CHAT, [ROLE, chunk(content="Hello"), STOP, extra, USAGE])
        for event in (ROLE, chunk(content="Hello"), STOP, extra, USAGE):
            assert run.feed(event) == []

    def test_hidden_states_come_once(self) -> None:
        hidden = chunk(hidden_states=[[0.5]])
        run = Replay(CHAT, [ROLE, chunk(content="a"), STOP, hidden])
        assert [run.feed(event) for event in (ROLE, chunk(content="a"), STOP, hidden)] == [[], [], [], []]
        late = Replay(CHAT, [ROLE, chunk(content="a"), STOP])
        assert [late.feed(event) for event in (ROLE, chunk(content="a"), STOP, hidden)] == [[], [], [], [hidden]]

    def test_parts_that_are_no_text_are_compared_whole(self) -> None:
        run = Replay(CHAT, [ROLE, chunk(audio={"data": "x"})])
        run.feed(ROLE)
        assert run.feed(chunk(audio={"data": "x"})) == []
        assert run.feed(chunk(audio={"data": "y"})) == [chunk(audio={"data": "y"})]
        with pytest.raises(Diverged):
            Replay(CHAT, [ROLE, chunk(audio={"data": "x"})]).feed(chunk(audio={"data": "z"}))

    def test_logprobs_are_cut_by_their_tokens_and_keep_their_values(self) -> None:
        run = Replay(CHAT, [ROLE, chunk(content="ab", logprobs=entries("a", "b"))])
        run.feed(ROLE)
        (left,) = run.feed(chunk(content="abc", logprobs=entries("a", "b", "c", logprob=-2.0)))
        assert left["choices"][0]["logprobs"] == entries("c", logprob=-2.0)
        assert left["choices"][0]["delta"] == {"content": "c"}

    def test_logprobs_that_came_before_their_text_do_not_come_again(self) -> None:
        run = Replay(CHAT, [ROLE, chunk(content="a", logprobs=entries("a", "b"))])
        run.feed(ROLE)
        assert run.feed(chunk(content="ab", logprobs=entries("a", "b"))) == [chunk(content="b")]

    def test_logprobs_that_cannot_be_joined_diverge(self) -> None:
        run = Replay(CHAT, [ROLE, chunk(content="é", logprobs=entries("\\xa9"))])
        with pytest.raises(Diverged, match="logprobs"):
            run.feed(chunk(content="é", logprobs=entries("\\xc3", "\\xa9")))


class TestCompletions:
    def test_text_ids_and_logprobs_are_cut(self) -> None:
        def values(*tokens: str) -> Event:
            return {
                "tokens": list(tokens),
                "token_logprobs": [-1.0 for _ in tokens],
                "text_offset": [-1 for _ in tokens],
                "top_logprobs": [],
            }

        run = Replay(COMPLETIONS, [completion("ab", token_ids=[1, 2], prompt_token_ids=[9], logprobs=values("a", "b"))])
        event = completion("abc", token_ids=[1, 2, 3], prompt_token_ids=[9], logprobs=values("a", "b", "c"))
        left = completion("c", token_ids=[3], prompt_token_ids=None, logprobs=values("c"))
        assert run.feed(event) == [left]
        assert run.passing

    def test_the_last_text_comes_with_the_finish(self) -> None:
        run = Replay(COMPLETIONS, [completion("ab")])
        assert run.feed(completion("abc", finish="stop", matched_stop=2)) == [
            completion("c", finish="stop", matched_stop=2)
        ]
        assert run.finished

    def test_other_ids_under_the_same_text_are_found(self) -> None:
        with pytest.raises(Diverged, match="token_ids"):
            Replay(COMPLETIONS, [completion("ab", token_ids=[1, 2])]).feed(completion("ab", token_ids=[3]))

    def test_token_ids_whose_text_is_withheld_pass(self) -> None:
        run = Replay(COMPLETIONS, [completion("a", token_ids=[1])])
        run.feed(completion("a", token_ids=[1]))
        assert run.feed(completion("", token_ids=[2])) == [completion("", token_ids=[2])]


class TestGenerate:
    def test_whole_events_pass_as_they_are_once_they_hold_more(self) -> None:
        run = Replay(GENERATE, [generated("a", 1), generated("ab", 1, 2)])
        assert run.feed(generated("a", 1)) == []
        assert run.feed(generated("ab", 1, 2)) == []
        longer = generated("abc", 1, 2, 3)
        assert run.feed(longer) == [longer]
        with pytest.raises(Diverged):
            Replay(GENERATE, [generated("ab", 1, 2)]).feed(generated("ac", 1, 3))

    def test_only_the_finish_is_new(self) -> None:
        run = Replay(GENERATE, [generated("ab", 1, 2)])
        last = generated("ab", 1, 2, finish={"type": "length", "length": 2})
        assert run.feed(last) == [last]
        assert run.finished

    def test_a_whole_event_that_waits_is_replaced_by_the_next(self) -> None:
        run = Replay(GENERATE, [generated("a", 1, output_token_logprobs=[[-1.0, 1, None]])])
        assert run.feed(generated("ab", 1, 2)) == []
        both = generated("abc", 1, 2, 3, output_token_logprobs=[[-1.0, 1, None], [-1.0, 2, None], [-1.0, 3, None]])
        assert run.feed(both) == [both]

    def test_increments_are_cut(self) -> None:
        sent = [generated("a", 1, count=1), generated("b", 2, count=2)]
        run = Replay(GENERATE, sent)
        values = [[-1.0, token, None] for token in (1, 2, 3)]
        coalesced = generated("abc", 1, 2, 3, count=3, input_token_logprobs=[[-1.0, 9, None]])
        assert run.feed(coalesced) == [generated("c", 3, count=3, input_token_logprobs=[[-1.0, 9, None]])]
        with_values = generated("d", 4, count=4, output_token_logprobs=values[:1])
        assert run.feed(with_values) == [with_values]

    def test_logprobs_of_increments_are_cut(self) -> None:
        values = [[-1.0, token, None] for token in (1, 2)]
        run = Replay(GENERATE, [generated("a", 1, output_token_logprobs=values[:1])], incremental=True)
        event = generated("ab", 1, 2, output_token_logprobs=values, output_top_logprobs=[["x"], ["y"]])
        left = generated("b", 2, count=2, output_token_logprobs=values[1:], output_top_logprobs=[["y"]])
        assert run.feed(event) == [left]

    def test_the_form_is_told_where_one_event_cannot_show_it(self) -> None:
        ab, abc = generated("ab", 1, 2), generated("abc", 1, 2, 3)
        assert Replay(GENERATE, [ab]).feed(abc) == [abc]
        assert Replay(GENERATE, [ab], incremental=True).feed(abc) == [generated("c", 3, count=3)]

    def test_two_forms_cannot_be_joined(self) -> None:
        run = Replay(GENERATE, [generated("a", 1), generated("ab", 1, 2)])
        run.feed(generated("a", 1))
        with pytest.raises(Diverged, match="another form"):
            run.feed(generated("b", 2, count=2))
        run = Replay(GENERATE, [generated("a", 1), generated("b", 2, count=2)])
        run.feed(generated("a", 1))
        with pytest.raises(Diverged, match="another form"):
            run.feed(generated("ab", 1, 2))


def test_nothing_is_changed_in_place() -> None:
    event = call(0, "c2", "find", '{"a": 1}')
    before = repr(event)
    Replay(CHAT, [call(0, "c1", "find", '{"a')]).feed(event)
    assert repr(event) == before
