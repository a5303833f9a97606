"""How long one attempt may be silent: the rules of `failover/deadlines.py` over what this gateway knows of its pair."""

from __future__ import annotations

import math
from typing import Protocol

from engines.timing import DecodeTiming, decode_step_s
from engines.types import EngineId, Leg
from failover import deadlines
from failover.deadlines import Bounds
from gateway.bookings import Booking
from gateway.limit_flags import DeadlineConfig
from routing.types import CostTerms


class Patience(Protocol):
    """How long silence since `since_s` may last, in seconds. Asked again when it has, as it may have grown."""

    def first_output_s(self, since_s: float) -> float:
        """From dispatch to hand-over, and from there to the first output."""

    def next_output_s(self, since_s: float, largest_gap_s: float, gaps: int) -> float:
        """Between two outputs of a stream that has paused so often, and so long at most."""

    def whole_answer_s(self, since_s: float) -> float:
        """From hand-over to an answer that is not streamed."""

    def silent_leg(self, waited_for: Leg, since_s: float) -> Leg:
        """The leg at fault, when the one that is waited for was silent too long."""


class FixedPatience:
    """As long as is configured, whatever is known of the servers."""

    def __init__(self, config: DeadlineConfig) -> None:
        self._config = config

    def first_output_s(self, since_s: float) -> float:
        return self._config.first_output_s

    def next_output_s(self, since_s: float, largest_gap_s: float, gaps: int) -> float:
        return self._config.stall_s

    def whole_answer_s(self, since_s: float) -> float:
        return math.inf

    def silent_leg(self, waited_for: Leg, since_s: float) -> Leg:
        return waited_for


class Measured(Protocol):
    """What was measured of servers (`gateway.learned.Learned`)."""

    def prefill_error(self, engine_id: EngineId) -> float | None:
        """Mean relative error of its predicted prefills; None before there is a measured timing."""

    def decode_error(self, engine_id: EngineId) -> float | None: ...

    def decode_timing(self, engine_id: EngineId) -> DecodeTiming: ...


class Heard(Protocol):
    """When servers were heard of last, on the loop's clock; 0 for never (`failover.monitor.Monitor`)."""

    def output_s(self, engine_id: EngineId) -> float:
        """An output or an answer, of any request."""

    def sign_s(self, engine_id: EngineId) -> float:
        """That, or a good probe."""


class Beside(Protocol):
    """What a decode has in its batch (`gateway.bookings.Bookings`)."""

    def beside(self, booking: Booking) -> tuple[int, int]: ...


class MeasuredPatience:
    """As long as this pair needs by what was measured of it, within what is configured.

    `buffers`: its servers may rightly hold output back (tools, reasoning), so that a stream has no pace of its own.
    """

    def __init__(
        self,
        config: DeadlineConfig,
        measured: Measured,
        heard: Heard,
        beside: Beside,
        booking: Booking,
        terms: CostTerms,
        *,
        buffers: bool = False,
    ) -> None:
        self._first = Bounds(config.first_output_floor_s, config.first_output_s)
        self._stall = Bounds(config.stall_floor_s, config.stall_s)
        self._measured = measured
        self._heard = heard
        self._beside = beside
        self._booking = booking
        self._predicted_s = terms.wait_s + terms.prefill_s + terms.prefix_gain_s + terms.transfer_s
        self._buffers = buffers

    def first_output_s(self, since_s: float) -> float:
        error_ratio = self._measured.prefill_error(self._booking.prefill)
        quiet_s = deadlines.first_output_quiet_s(self._first, self._predicted_s, error_ratio)
        both_s = min(self._heard.sign_s(self._booking.prefill), self._heard.sign_s(self._booking.decode))
        bound_s = min(self._first.bound_s, deadlines.BUSY_FACTOR * quiet_s)
        return deadlines.limit_s(quiet_s, since_s, both_s, bound_s)

    def next_output_s(self, since_s: float, largest_gap_s: float, gaps: int) -> float:
        quiet_s = self._stall_quiet_s(largest_gap_s, gaps)
        return deadlines.limit_s(quiet_s, since_s, self._heard.output_s(self._booking.decode), self._stall.bound_s)

    def whole_answer_s(self, since_s: float) -> float:
        quiet_s = deadlines.WHOLE_FLOORS * self._stall.floor_s
        return deadlines.limit_s(quiet_s, since_s, self._heard.sign_s(self._booking.decode), math.inf)

    def silent_leg(self, waited_for: Leg, since_s: float) -> Leg:
        prefill_s, decode_s = self._heard.sign_s(self._booking.prefill), self._heard.sign_s(self._booking.decode)
        return deadlines.silent_leg(waited_for, since_s, prefill_s, decode_s)

    def _stall_quiet_s(self, largest_gap_s: float, gaps: int) -> float:
        if self._buffers:
            return self._stall.bound_s
        step_s = None
        if self._measured.decode_error(self._booking.decode) is not None:
            running, kv_tokens = self._beside.beside(self._booking)
            step_s = decode_step_s(self._measured.decode_timing(self._booking.decode), running, kv_tokens)
        return deadlines.stall_quiet_s(self._stall, step_s, largest_gap_s, gaps)
