"""Which mode a broken request gets, and the header that asks for one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from failover.features import CHAT, Feature, Sampling
from failover.recovery import DEFAULT_MODES, Determinism, Mode, Traits, choose, parse_wanted

PLAIN = Traits(CHAT, True, Sampling.GREEDY, Determinism.NONE, frozenset())
TOOLS = replace(PLAIN, features=frozenset({Feature.TOOLS}))
ALL = (Mode.RESUME, Mode.REPLAY, Mode.RESUME_TEXT, Mode.ERROR)


def mode(traits: Traits, *allowed: Mode) -> Mode:
    return choose(traits, allowed or DEFAULT_MODES).mode


def test_a_plain_stream_is_resumed_however_it_is_sampled() -> None:
    assert {mode(replace(PLAIN, sampling=way)) for way in Sampling} == {Mode.RESUME}


def test_what_is_no_stream_is_tried_again() -> None:
    assert mode(replace(TOOLS, stream=False), Mode.ERROR) is Mode.RETRY


def test_unknown_ids_forbid_a_resume_only() -> None:
    unknown = replace(PLAIN, inexact="the tokenizer does not agree with the engine")
    plan = choose(unknown, DEFAULT_MODES)
    assert plan.mode is Mode.ERROR
    assert plan.reason == (
        "no resume: the tokenizer does not agree with the engine; "
        "no replay: nobody says that the same request gives the same tokens again"
    )
    assert mode(replace(unknown, determinism=Determinism.ENGINE)) is Mode.REPLAY


@pytest.mark.parametrize(
    ("determinism", "way", "wanted"),
    [
        (Determinism.ENGINE, Sampling.GREEDY, Mode.REPLAY),
        (Determinism.ENGINE, Sampling.SEEDED, Mode.REPLAY),
        (Determinism.ENGINE, Sampling.SAMPLED, Mode.REPLAY),
        (Determinism.DECLARED, Sampling.GREEDY, Mode.REPLAY),
        (Determinism.DECLARED, Sampling.SEEDED, Mode.REPLAY),
        (Determinism.DECLARED, Sampling.SAMPLED, Mode.ERROR),
        (Determinism.NONE, Sampling.GREEDY, Mode.ERROR),
        (Determinism.NONE, Sampling.SEEDED, Mode.ERROR),
    ],
)
def test_a_replay_needs_that_tokens_come_again(determinism: Determinism, way: Sampling, wanted: Mode) -> None:
    assert mode(replace(TOOLS, determinism=determinism, sampling=way)) is wanted


def test_an_echo_of_token_ids_forbids_a_resume() -> None:
    assert mode(replace(PLAIN, features=frozenset({Feature.ECHO}))) is Mode.RESUME
    assert mode(replace(PLAIN, features=frozenset({Feature.IDS_PROMPT}))) is Mode.RESUME
    assert mode(replace(PLAIN, features=frozenset({Feature.ECHO, Feature.IDS_PROMPT}))) is Mode.ERROR


def test_text_is_put_behind_the_prompt_only_where_that_is_allowed() -> None:
    penalties = replace(PLAIN, features=frozenset({Feature.PENALTIES}))
    assert mode(penalties) is Mode.ERROR
    assert mode(penalties, *ALL) is Mode.RESUME_TEXT
    assert mode(TOOLS, *ALL) is Mode.ERROR
    assert mode(replace(penalties, features=frozenset({Feature.IDS_PROMPT, Feature.PENALTIES})), *ALL) is Mode.ERROR


def test_the_order_of_what_is_allowed_counts_and_error_ends_it() -> None:
    sure = replace(PLAIN, determinism=Determinism.ENGINE)
    assert mode(sure, Mode.REPLAY, Mode.RESUME) is Mode.REPLAY
    assert mode(sure, Mode.RESUME, Mode.REPLAY) is Mode.RESUME
    assert mode(sure, Mode.ERROR, Mode.RESUME) is Mode.ERROR
    assert choose(sure, ()).reason == "nothing else is allowed"


def test_a_seed_that_is_not_obeyed_is_said() -> None:
    seeded = replace(PLAIN, sampling=Sampling.SEEDED)
    assert "do not obey the seed" in choose(seeded, DEFAULT_MODES).reason
    assert "seed" not in choose(replace(seeded, determinism=Determinism.ENGINE), DEFAULT_MODES).reason


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("error", (Mode.ERROR,)),
        ("resume", (Mode.RESUME,)),
        (" Replay , RESUME,resume ", (Mode.REPLAY, Mode.RESUME)),
        ("resume,error", (Mode.RESUME, Mode.ERROR)),
    ],
)
def test_the_header(text: str, wanted: tuple[Mode, ...]) -> None:
    assert parse_wanted(text, DEFAULT_MODES) == wanted


@pytest.mark.parametrize("text", ["resume_text", "retry", "", "resume,", "resume;replay", "whatever"])
def test_a_header_that_asks_for_more_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"^x-pdgate-on-failure: '.*' is not allowed here; .*resume, replay, error,"):
        parse_wanted(text, DEFAULT_MODES)


def test_error_is_always_allowed_and_a_long_value_is_clipped() -> None:
    assert parse_wanted("error", ()) == (Mode.ERROR,)
    with pytest.raises(ValueError, match=r"send one or more of error,") as refused:
        parse_wanted("x" * 10_000, ())
    assert len(str(refused.value)) < 200
