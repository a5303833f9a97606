"""What further attempts all requests of this gateway may make, and how many prompts may be computed again at once.

Joins `failover/budget.py` and `failover/turns.py` with the fleet and the bookings.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from random import Random

from engines.fleet import Fleet
from engines.types import EngineId, EngineView, Role
from failover.budget import BudgetConfig, RetryBudget, jittered_s
from failover.turns import Turn, Turns
from gateway.bookings import Bookings
from gateway.candidates import hit_tokens
from gateway.limit_flags import RetryConfig
from routing.index import NO_HIT, Match
from routing.types import RequestView


class Retries:
    """The budget and the turns of one gateway. Must be made on the event loop."""

    def __init__(self, config: RetryConfig, fleet: Fleet, bookings: Bookings, rng: Random) -> None:
        self._config = config
        self._fleet = fleet
        self._bookings = bookings
        self._rng = rng
        self._budget = RetryBudget(BudgetConfig(config.budget_ratio), _now_s())
        self.turns = Turns(self._room_tokens)

    def fresh(self, decode: EngineId) -> None:
        """The first attempt of a request was booked on this decode."""
        self._budget.fresh(self._streams(decode), _now_s())

    def may_retry(self, decode: EngineId) -> bool:
        """Whether one more attempt may be made after one on this decode; it is counted if so."""
        return self._budget.may_retry(self._streams(decode), _now_s())

    def delay_s(self, delay_s: float) -> float:
        """A pause before an attempt, spread so that those who failed together do not come back together."""
        return jittered_s(delay_s, self._rng)

    @property
    def budget_left(self) -> float:
        return self._budget.left

    @property
    def retry_after_s(self) -> float:
        """When one who was refused a further attempt may be given one."""
        return self._budget.retry_after_s()

    def turn(self, tokens: int, deadline_s: float) -> AbstractAsyncContextManager[Turn]:
        """A turn to have `tokens` computed again; it is over at hand-over, or with the block.

        Raises TimeoutError at `deadline_s` of the loop's clock.
        """
        return self.turns.turn(tokens, deadline_s)

    def tokens_to_compute(self, request: RequestView, match: Match) -> int:
        """What the prefill that holds most of this prompt, of those that take rooms, would have to compute of it."""
        held_blocks = max((match.get(view.engine_id, NO_HIT).held_blocks for view in self._prefills()), default=0)
        return max(1, request.prompt_tokens - hit_tokens(held_blocks, request, 1))

    def _room_tokens(self) -> float:
        return sum(self._config.prefill_chunks * view.facts.chunk_tokens for view in self._prefills() if view.facts)

    def _prefills(self) -> list[EngineView]:
        return [view for view in self._fleet.snapshot().with_role(Role.PREFILL) if view.takes_rooms]

    def _streams(self, decode: EngineId) -> int:
        return self._bookings.own(decode).decode_requests


def _now_s() -> float:
    return asyncio.get_running_loop().time()
