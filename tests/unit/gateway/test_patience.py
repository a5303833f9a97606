"""How long an attempt may be silent, by what is known of its pair: learned, heard of, in its batch."""

from __future__ import annotations

import math

from engines.timing import DecodeTiming, PrefillWork
from engines.types import EngineId, Leg
from gateway.bookings import Booking
from gateway.config import DeadlineConfig
from gateway.patience import FixedPatience, MeasuredPatience
from routing.types import CostTerms

P, D = EngineId("http://p0"), EngineId("http://d0")
CONFIG = DeadlineConfig(first_output_floor_s=4.0, first_output_s=100.0, stall_floor_s=3.0, stall_s=50.0)
TERMS = CostTerms(wait_s=2.0, prefill_s=1.5, prefix_gain_s=-1.0, transfer_s=0.5, decode_s=70.0, capacity_s=80.0)
BOOKING = Booking("r", P, D, PrefillWork(100), 200, 1.0, 1000.0)
SINCE_S = 1000.0


class Known:
    """Measured, Heard and Beside in one."""

    def __init__(self) -> None:
        self.errors: dict[EngineId, float | None] = {P: 0.0, D: 0.0}
        self.outputs_s: dict[EngineId, float] = {}
        self.signs_s: dict[EngineId, float] = {}
        self.batch = (16, 1024)

    def prefill_error(self, engine_id: EngineId) -> float | None:
        assert engine_id == P
        return self.errors[P]

    def decode_error(self, engine_id: EngineId) -> float | None:
        assert engine_id == D
        return self.errors[D]

    def decode_timing(self, engine_id: EngineId) -> DecodeTiming:
        assert engine_id == D
        return DecodeTiming(base_s=0.125, per_request_s=1 / 128, per_kv_token_s=1 / 16384)

    def output_s(self, engine_id: EngineId) -> float:
        return self.outputs_s.get(engine_id, 0.0)

    def sign_s(self, engine_id: EngineId) -> float:
        return max(self.output_s(engine_id), self.signs_s.get(engine_id, 0.0))

    def beside(self, booking: Booking) -> tuple[int, int]:
        assert booking is BOOKING
        return self.batch


def patience(known: Known, *, buffers: bool = False) -> MeasuredPatience:
    return MeasuredPatience(CONFIG, known, known, known, BOOKING, TERMS, buffers=buffers)


def test_a_first_output_may_take_what_was_predicted_until_it_and_not_what_decoding_costs() -> None:
    assert patience(Known()).first_output_s(SINCE_S) == 4.0 + 5.0 * 3.0


def test_bad_predictions_are_given_more_time_and_none_all_of_it() -> None:
    known = Known()
    known.errors[P] = 0.2
    assert patience(known).first_output_s(SINCE_S) == 4.0 + 5.0 * 3.0 * 1.2
    known.errors[P] = None
    assert patience(known).first_output_s(SINCE_S) == 100.0


def test_a_pair_is_waited_for_longer_only_while_both_servers_are_heard_of() -> None:
    known = Known()
    for alone in (P, D):
        known.signs_s = {alone: SINCE_S + 18.0}
        assert patience(known).first_output_s(SINCE_S) == 19.0
    known.signs_s = {P: SINCE_S + 18.0, D: SINCE_S + 6.0}
    assert patience(known).first_output_s(SINCE_S) == 25.0
    known.signs_s = {P: SINCE_S + 500.0, D: SINCE_S + 500.0}
    assert patience(known).first_output_s(SINCE_S) == 4 * 19.0


def test_a_stall_is_measured_by_steps_over_the_batch_as_it_is_now() -> None:
    known = Known()
    assert patience(known).next_output_s(SINCE_S, 0.0, 0) == 30.0 * (0.125 + 0.125 + 0.0625)
    known.batch = (32, 1024)
    assert patience(known).next_output_s(SINCE_S, 0.0, 0) == 30.0 * (0.125 + 0.25 + 0.0625)
    assert patience(known).next_output_s(SINCE_S, 5.0, 1) == 20.0
    known.errors[D] = None
    assert patience(known).next_output_s(SINCE_S, 0.2, 3) == 50.0
    assert patience(known).next_output_s(SINCE_S, 0.2, 20) == 3.0


def test_a_decode_that_streams_to_others_has_not_stalled() -> None:
    known = Known()
    known.signs_s = {D: SINCE_S + 8.0}
    assert patience(known).next_output_s(SINCE_S, 0.0, 0) == 9.375, "a probe is no output"
    known.outputs_s = {D: SINCE_S + 8.0, P: SINCE_S + 30.0}
    assert patience(known).next_output_s(SINCE_S, 0.0, 0) == 17.375
    known.outputs_s = {D: SINCE_S + 500.0}
    assert patience(known).next_output_s(SINCE_S, 0.0, 0) == 50.0


def test_what_may_be_held_back_may_take_as_long_as_is_configured() -> None:
    assert patience(Known(), buffers=True).next_output_s(SINCE_S, 0.1, 50) == 50.0


def test_a_whole_answer_is_waited_for_as_long_as_its_decode_is_heard_of() -> None:
    known = Known()
    assert patience(known).whole_answer_s(SINCE_S) == 4 * 3.0
    known.signs_s = {D: SINCE_S + 700.0, P: SINCE_S + 900.0}
    assert patience(known).whole_answer_s(SINCE_S) == 712.0


def test_a_prefill_that_waits_for_a_dead_decode_is_not_blamed() -> None:
    known = Known()
    known.signs_s = {P: SINCE_S + 1.0, D: SINCE_S - 1.0}
    assert patience(known).silent_leg(Leg.PREFILL, SINCE_S) is Leg.DECODE
    known.signs_s = {P: SINCE_S - 1.0, D: SINCE_S + 1.0}
    assert patience(known).silent_leg(Leg.PREFILL, SINCE_S) is Leg.PREFILL
    assert patience(known).silent_leg(Leg.DECODE, SINCE_S) is Leg.DECODE


def test_without_knowledge_it_is_as_configured() -> None:
    fixed = FixedPatience(CONFIG)
    assert (fixed.first_output_s(0.0), fixed.next_output_s(0.0, 9.0, 9), fixed.whole_answer_s(0.0)) == (
        100.0,
        50.0,
        math.inf,
    )
    assert fixed.silent_leg(Leg.PREFILL, 0.0) is Leg.PREFILL
