"""What is learned of servers and traffic: from the profile at first, from observation then, anew after a restart."""

from __future__ import annotations

import pytest

from engines.timing import TINY, decode_step_s, prefill_s
from engines.types import EngineId
from gateway import learned as module
from gateway.learned import Learned

P, OTHER = EngineId("p"), EngineId("other")


def test_everything_starts_from_the_profile() -> None:
    learned = Learned(TINY)
    assert learned.decode_timing(P) == TINY.decode
    timing = learned.prefill_timing(P, 512)
    assert (timing.base_s, timing.per_token_s, timing.chunk_tokens) == (
        TINY.prefill.base_s,
        TINY.prefill.per_token_s,
        512,
    )
    assert learned.prompt_tokens("m", 400) == 100
    assert learned.output_tokens("m", 200) == 200
    assert learned.output_tokens("m", 10_000) == 350


def test_a_slower_prefill_is_believed_after_some_observations() -> None:
    learned = Learned(TINY)
    predicted_s = prefill_s(learned.prefill_timing(P, 2048), 1000)
    for _ in range(30):
        learned.saw_prefill(P, 2048, 1000, 0, 2 * predicted_s)
    assert prefill_s(learned.prefill_timing(P, 2048), 1000) == pytest.approx(2 * predicted_s, rel=0.05)


def test_a_server_that_is_not_known_is_taken_for_one_like_the_others() -> None:
    """Else one that has just restarted looks slower than all others where these are faster than their profile."""
    learned = Learned(TINY)
    for engine_id, factor in (("a", 0.2), ("b", 0.3), ("c", 2.0)):
        for _ in range(30):
            learned.saw_decode(EngineId(engine_id), 4, 4000, factor * decode_step_s(TINY.decode, 4, 4000))
    assert learned.decode_timing(OTHER).base_s == pytest.approx(0.3 * TINY.decode.base_s, rel=0.05)
    learned.saw_decode(OTHER, 4, 4000, 9.0)
    assert learned.decode_timing(OTHER).base_s == pytest.approx(0.3 * TINY.decode.base_s, rel=0.05)
    learned.forget_engine(EngineId("a"))
    assert learned.decode_timing(EngineId("a")).base_s == learned.decode_timing(OTHER).base_s
    assert learned.prefill_timing(OTHER, 512).base_s == TINY.prefill.base_s


def test_a_slower_decode_is_believed_too() -> None:
    learned = Learned(TINY)
    step_s = decode_step_s(TINY.decode, 4, 4000)
    for _ in range(30):
        learned.saw_decode(P, 4, 4000, 3 * step_s)
    assert decode_step_s(learned.decode_timing(P), 4, 4000) == pytest.approx(3 * step_s, rel=0.05)


def test_bytes_per_token_are_learned_per_model() -> None:
    learned = Learned(TINY)
    for _ in range(5):
        learned.saw_prompt("dense", 200, 100)
    assert learned.bytes_per_token("dense") == pytest.approx(2.0)
    assert learned.prompt_tokens("dense", 200) == 100
    assert learned.bytes_per_token("other") == 4.0
    assert learned.prompt_tokens("other", 0) == 1


def test_output_lengths_are_learned_and_stay_within_what_is_asked() -> None:
    learned = Learned(TINY)
    for _ in range(300):
        learned.saw_output("m", 50)
    assert learned.output_tokens("m", 10_000) == pytest.approx(50, rel=0.3)
    assert learned.output_tokens("m", 7) == 7
    assert learned.output_tokens("m", 1) == 1


def test_every_observation_is_a_new_version() -> None:
    learned = Learned(TINY)
    learned.saw_prefill(P, 2048, 10, 0, 1.0)
    learned.saw_decode(P, 1, 10, 1.0)
    learned.saw_prompt("m", 10, 2)
    learned.saw_output("m", 3)
    assert learned.version == 4


def test_a_restarted_server_is_learned_anew() -> None:
    learned = Learned(TINY)
    for engine in (P, OTHER):
        learned.saw_prefill(engine, 2048, 10, 0, 1.0)
    learned.saw_decode(P, 1, 10, 1.0)
    assert set(learned.errors()) == {("prefill", P), ("prefill", OTHER), ("decode", P)}
    learned.forget_engine(P)
    assert set(learned.errors()) == {("prefill", OTHER)}


def test_prediction_errors_are_told() -> None:
    learned = Learned(TINY)
    learned.saw_prefill(P, 2048, 1000, 0, 2 * prefill_s(learned.prefill_timing(P, 2048), 1000))
    assert learned.errors()["prefill", P] == pytest.approx(1.0)


def test_models_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_MODELS", 3)
    learned = Learned(TINY)
    for number in range(10):
        learned.saw_prompt(f"m{number}", 200, 100)
        learned.saw_output(f"m{number}", 5)
    assert list(learned._bytes_per_token) == list(learned._output) == ["m7", "m8", "m9"]
