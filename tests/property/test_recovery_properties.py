"""The table of modes is total, and never promises what a feature forbids."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from failover.features import CHAT, COMPLETIONS, GENERATE, PATHS, Feature, Sampling, features, sampling
from failover.recovery import (
    REPLAY_WHY_NOT,
    RESUME_TEXT_WHY_NOT,
    RESUME_WHY_NOT,
    Determinism,
    Mode,
    Traits,
    choose,
    parse_wanted,
)
from failover.resume_text import Impossible, body_after_text

TRAITS = st.builds(
    Traits,
    st.sampled_from(PATHS),
    st.booleans(),
    st.sampled_from(Sampling),
    st.sampled_from(Determinism),
    st.frozensets(st.sampled_from(Feature), max_size=3),
    st.sampled_from(["", "ids are not known"]),
)
MODES = st.lists(st.sampled_from(Mode), max_size=6)
PER_ROUTE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "hello"},
    GENERATE: {"text": "hello"},
}


@given(TRAITS, MODES)
def test_choose_is_total_and_keeps_its_promises(traits: Traits, allowed: list[Mode]) -> None:
    plan = choose(traits, allowed)
    assert plan.reason
    assert (plan.mode is Mode.RETRY) is not traits.stream
    assert plan.mode in (Mode.RETRY, Mode.ERROR, *allowed)
    if plan.mode is Mode.RESUME:
        assert not traits.inexact
        assert not traits.features & RESUME_WHY_NOT.keys()
        assert not {Feature.ECHO, Feature.IDS_PROMPT} <= traits.features
    if plan.mode is Mode.REPLAY:
        assert traits.determinism is not Determinism.NONE
        assert traits.determinism is Determinism.ENGINE or traits.sampling is not Sampling.SAMPLED
        assert not traits.features & REPLAY_WHY_NOT.keys()
    if plan.mode is Mode.RESUME_TEXT:
        assert not traits.features & RESUME_TEXT_WHY_NOT.keys()


@given(TRAITS, MODES)
def test_an_error_only_where_nothing_that_is_allowed_works(traits: Traits, allowed: list[Mode]) -> None:
    if choose(traits, allowed).mode is Mode.ERROR:
        tried = allowed[: allowed.index(Mode.ERROR)] if Mode.ERROR in allowed else allowed
        assert all(choose(traits, [mode]).mode is Mode.ERROR for mode in tried)


@given(MODES, MODES)
def test_a_client_never_gets_more_than_the_operator_allows(allowed: list[Mode], named: list[Mode]) -> None:
    try:
        wanted = parse_wanted(", ".join(named), allowed)
    except ValueError:
        assert not named or set(named) - {*allowed, Mode.ERROR} or Mode.RETRY in named
    else:
        assert wanted == tuple(dict.fromkeys(named))
        assert set(wanted) <= {*allowed, Mode.ERROR} - {Mode.RETRY}


NAMES = """
    temperature top_k seed n best_of stop regex tools messages prompt text input_ids sampling_params response_format
    logprobs return_logprob logprob_start_len frequency_penalty repetition_penalty min_tokens beam_width thinking
    chat_template_kwargs echo content role type custom_params"""
FIELDS = st.sampled_from(NAMES.split())
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, 1.0, 0.5, float("nan")])
    | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(FIELDS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=2 * settings().max_examples)
@given(st.sampled_from(PATHS), st.dictionaries(FIELDS, JSON, min_size=1, max_size=6))
def test_any_body_can_be_read(path: str, body: dict[str, Any]) -> None:
    assert features(path, body) <= set(Feature)
    assert sampling(path, body) in Sampling


@given(st.sampled_from(PATHS), st.text(max_size=4), st.text(max_size=4), st.integers(0, 200))
def test_text_can_be_cut_anywhere(path: str, head: str, tail: str, tokens: int) -> None:
    """Going on after a text in two steps is going on after all of it."""
    body = PER_ROUTE[path]
    try:
        once = body_after_text(path, body, head + tail, tokens + 1)
    except Impossible:
        return
    assert body_after_text(path, body_after_text(path, body, head, 1), tail, tokens) == once
