"""Answers: their stop rules, and their text as SGLang's detokenizer makes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines.emulator.output import Finish, Output, StopRule
from engines.emulator.tokens import WORDS, decode, encode
from engines.token_rule import EOS_TOKEN, FIRST_BYTE_TOKEN, FIRST_WORD_TOKEN, continue_greedily, pack, unpack

PROMPT = pack(range(3, 60))
ANSWER = continue_greedily(range(3, 60), 30)
AT = 9
"""Here are two words in `ANSWER`."""


def run(rule: StopRule) -> tuple[Output, list[str]]:
    output, deltas = Output(rule), []
    output.start(PROMPT)
    while not output.step():
        deltas.append("" if output.withheld else output.take_delta())
    deltas.append(output.take_delta())
    return output, deltas


def test_an_answer_ends_at_its_length() -> None:
    output, deltas = run(StopRule(max_new_tokens=5))
    assert output.ids == ANSWER[:5]
    assert output.finish == Finish("length")
    assert "".join(deltas) == output.text == decode(ANSWER[:5])


def test_an_answer_ends_at_a_stop_token_which_is_not_in_the_text() -> None:
    output, deltas = run(StopRule(max_new_tokens=30, stop_token_ids=frozenset({ANSWER[7]})))
    assert output.ids == ANSWER[:8]
    assert output.finish == Finish("stop", ANSWER[7])
    assert "".join(deltas) == output.text == decode(ANSWER[:7])


def test_a_stop_string_is_never_shown_not_even_in_part() -> None:
    stop = decode(ANSWER[AT : AT + 2])
    assert min(ANSWER[AT : AT + 2]) >= FIRST_WORD_TOKEN
    output, deltas = run(StopRule(max_new_tokens=30, stop=(stop,)))
    assert output.ids == ANSWER[: AT + 2]
    assert output.finish == Finish("stop", stop)
    assert "".join(deltas) == output.text == decode(ANSWER[:AT])
    kept, deltas = run(StopRule(max_new_tokens=30, stop=(stop,), no_stop_trim=True))
    assert "".join(deltas) == kept.text == decode(ANSWER[: AT + 2])


def test_a_stop_string_comes_before_a_stop_token_and_reads_special_tokens() -> None:
    """SGLang looks for stop strings first, in a text that shows special tokens."""
    stop, token = decode(ANSWER[AT : AT + 1]), ANSWER[AT]
    assert run(StopRule(30, stop=(stop,), stop_token_ids=frozenset({token})))[0].finish == Finish("stop", stop)
    output = Output(StopRule(30, stop=("<|im_end|>",)))
    output.start(PROMPT, first_token=EOS_TOKEN)
    assert output.step()
    assert (output.finish, output.take_delta()) == (Finish("stop", "<|im_end|>"), "")


def test_a_minimum_of_tokens_keeps_stop_tokens_away() -> None:
    output, _ = run(StopRule(max_new_tokens=30, min_new_tokens=9, stop_token_ids=frozenset(ANSWER)))
    assert len(output.ids) == 10


def test_ignoring_the_end_ignores_stop_tokens_too() -> None:
    output, _ = run(StopRule(max_new_tokens=20, ignore_eos=True, stop_token_ids=frozenset(ANSWER)))
    assert output.finish == Finish("length")


def test_the_first_token_may_come_from_elsewhere() -> None:
    output = Output(StopRule(max_new_tokens=3))
    output.start(PROMPT, first_token=ANSWER[0])
    while not output.step():
        pass
    assert output.ids == ANSWER[:3]


def test_the_end_token_ends_unless_ignored() -> None:
    output = Output(StopRule(max_new_tokens=3))
    output.start(PROMPT, first_token=EOS_TOKEN)
    assert output.step()
    assert output.finish == Finish("stop", EOS_TOKEN)
    ignoring = Output(StopRule(max_new_tokens=3, ignore_eos=True))
    ignoring.start(PROMPT, first_token=EOS_TOKEN)
    assert not ignoring.step()


class Script:
    """A context whose next tokens are known."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = iter(tokens)

    def append(self, token: int) -> None:
        pass

    def next_token(self, allow_eos: bool) -> int:
        return next(self._tokens)


@dataclass
class Detokenizer:
    """`DecodeStatus` and `_decode_batch_token_id_output` of SGLang 0.5.23, for one request."""

    decode_ids: list[int]
    read_offset: int
    surr_offset: int = 0
    decoded: str = ""
    sent: int = 0
    said: list[str] = field(default_factory=list)

    def add(self, ids: list[int], finish: Finish | None, no_stop_trim: bool, ended: bool) -> str:
        self.decode_ids += ids
        read_ids = self.decode_ids[self.surr_offset :]
        matched = finish.matched if finish else None
        if isinstance(matched, int) and not no_stop_trim:
            read_ids = read_ids[:-1]
        new = decode(read_ids)[len(decode(self.decode_ids[self.surr_offset : self.read_offset])) :]
        if not ended:
            pending = self.sent - len(self.decoded)
            if new and not new.endswith("�"):
                self.decoded += new
                self.surr_offset, self.read_offset = self.read_offset, len(self.decode_ids)
                self.sent = len(self.decoded)
                return new[pending:]
            printable = new[: new.rfind(" ") + 1]
            self.sent = len(self.decoded) + len(printable)
            return printable[pending:]
        whole = self.decoded + new
        if isinstance(matched, str) and (at := whole.find(matched)) >= 0:
            whole = whole[: at + len(matched)] if no_stop_trim else whole[:at]
        return whole[self.sent :]


CHARACTERS = ["é", "ÿ", "\U0001f600", "\U0001f63f"]
words = st.sampled_from([FIRST_WORD_TOKEN + at for at in range(0, 1700, 100)]).map(lambda token: [token])
characters = st.sampled_from(CHARACTERS).map(lambda each: unpack(encode(each)))
answers = st.lists(words | characters, min_size=1, max_size=12).map(lambda parts: [*chain(*parts)])
stops = st.sampled_from([(), ("é",), ("é ba",), ("\U0001f600", " b"), (WORDS[100],), ("�",)])


@settings(deadline=None)
@given(
    prompt=st.lists(words | characters, max_size=4).map(lambda parts: [*chain(*parts)]),
    cut=st.integers(0, 3),
    answer=answers,
    stop=stops,
    no_stop_trim=st.booleans(),
    ends=st.sampled_from(["length", "token", "aborted"]),
)
@example([], 0, [FIRST_WORD_TOKEN + 100, *unpack(encode("é")), FIRST_WORD_TOKEN], (WORDS[100] + "z",), False, "length")
@example([FIRST_BYTE_TOKEN + 0xF0], 0, [162, 155, 131, FIRST_WORD_TOKEN], (), False, "length")
def test_the_text_is_what_sglangs_detokenizer_makes(
    prompt: list[int], cut: int, answer: list[int], stop: tuple[str, ...], no_stop_trim: bool, ends: str
) -> None:
    """Chunk by chunk, also where prompt or answer end inside a character."""
    prompt = prompt[: max(0, len(prompt) - cut)]
    stop_tokens = frozenset(answer[-1:]) if ends == "token" else frozenset()
    rule = StopRule(len(answer) + (ends == "aborted"), 0, False, stop, stop_tokens, no_stop_trim)
    output, real, unsent, deltas = Output(rule), Detokenizer(prompt[-5:], len(prompt[-5:])), 0, []
    output.start(pack(prompt))
    output._context = Script(answer)  # type: ignore[assignment]
    for _ in answer:
        last = output.step()
        if last or (ends == "aborted" and len(output.ids) == len(answer)):
            break
        if not output.withheld:
            deltas.append(output.take_delta())
            assert deltas[-1] == real.add(output.ids[unsent:], None, no_stop_trim, False)
            unsent = len(output.ids)
    output.closed = True
    deltas.append(output.take_delta())
    assert deltas[-1] == real.add(output.ids[unsent:], output.finish, no_stop_trim, True)
    assert output.take_delta() == ""
    assert "".join(deltas) == output.text
    assert all("�" not in delta for delta in deltas[:-1])


def test_a_character_is_shown_when_it_is_whole_and_lost_where_the_prompt_ends_inside_it() -> None:
    smile, word = unpack(encode("\U0001f600")), FIRST_WORD_TOKEN
    for begun, shown in ((0, ["", "", "", "\U0001f600", WORDS[0]]), (2, ["", "", WORDS[0]])):
        output = Output(StopRule(9))
        output.start(pack([*range(3, 60), *smile[:begun]]))
        output._context = Script([*smile[begun:], word])  # type: ignore[assignment]
        deltas = []
        for _ in shown:
            output.step()
            deltas.append(output.take_delta())
        assert deltas == shown
