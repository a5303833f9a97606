"""The quarantine matrix under any order of events, and the matching under any shape of fleet."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engines.types import EngineId
from failover.canary import diagonal, disjoint
from failover.pair_health import (
    CANARY,
    FORGOTTEN_AFTER_S,
    SETTLED_AFTER_S,
    Against,
    Pair,
    PairHealth,
    PairState,
)

PREFILLS = [EngineId(f"p{number}") for number in range(2)]
DECODES = [EngineId(f"d{number}") for number in range(2)]
a_pair = st.tuples(st.sampled_from(PREFILLS), st.sampled_from(DECODES))
ago_s = st.sampled_from([0.0, 0.5, 3.0, 40.0])
CLOSED = (PairState.QUARANTINED, PairState.PROVING)


class Matrix(RuleBasedStateMachine):
    """Every quarantine stays until KV was seen to arrive since, or its prefill came back from a long silence."""

    def __init__(self) -> None:
        super().__init__()
        self.at = PairHealth(Random(3))
        self.now_s = 1000.0
        self.ready_since_s: dict[EngineId, float] = {}
        self.closed: set[Pair] = set()

    def _note(self, *proved: Pair) -> None:
        for pair in list(self.closed):
            still = self.at.state(pair) in CLOSED
            assert still or pair in proved, f"{pair} was forgotten without a proof"
        self.closed = {pair for pair, record in self.at.records.items() if record.state in CLOSED}

    def _since_s(self, pair: Pair) -> float:
        """When the trouble of a pair began: what began before it proves nothing."""
        return self.at.records[pair].since_s if pair in self.at.records else 0.0

    def _garbles(self, pair: Pair) -> bool:
        return pair in self.at.records and self.at.records[pair].garbles

    @rule(seconds=st.sampled_from([0.1, 2.0, 6.0, 50.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        settled = [
            pair
            for pair, record in self.at.records.items()
            if record.settles and self.now_s - self.ready_since_s.get(pair[0], self.now_s) >= SETTLED_AFTER_S
        ]
        self.at.tick(self.ready_since_s.get, self.now_s)
        self._note(*settled)

    @rule(prefill=st.sampled_from(PREFILLS), ready=st.booleans())
    def readiness(self, prefill: EngineId, ready: bool) -> None:
        if ready:
            self.ready_since_s.setdefault(prefill, self.now_s)
        else:
            self.ready_since_s.pop(prefill, None)
        self._note()

    @rule(pair=a_pair, ago=ago_s)
    def request_arrives(self, pair: Pair, ago: float) -> None:
        began_s = self.now_s - ago
        proves = began_s >= self._since_s(pair) and not self._garbles(pair)
        self.at.handed_over(pair, began_s, self.now_s)
        self._note(*([pair] if proves else []))

    @rule(pair=a_pair, ago=ago_s)
    def request_fails(self, pair: Pair, ago: float) -> None:
        self.at.transfer_failed(pair, Against("transfer failed"), self.now_s - ago, self.now_s)
        self._note()

    @rule(pair=a_pair, trial=st.sampled_from([CANARY, "rid"]))
    def trial_begins(self, pair: Pair, trial: str) -> None:
        self.at.trial_began(pair, trial, self.now_s)
        self._note()

    @rule(pair=a_pair, trial=st.sampled_from([CANARY, "rid"]))
    def trial_says_nothing(self, pair: Pair, trial: str) -> None:
        self.at.trial_void(pair, trial, self.now_s)
        self._note()

    @rule(pair=a_pair, ago=ago_s, agrees=st.booleans())
    def canary_passes(self, pair: Pair, ago: float, agrees: bool) -> None:
        began_s = self.now_s - ago
        proves = began_s >= self._since_s(pair) and (agrees or not self._garbles(pair))
        self.at.canary_passed(pair, began_s, self.now_s, text_agrees=agrees)
        self._note(*([pair] if proves else []))

    @rule(pair=a_pair, ago=ago_s)
    def canary_fails(self, pair: Pair, ago: float) -> None:
        self.at.canary_failed(pair, Against("no answer"), self.now_s - ago, self.now_s)
        self._note()

    @rule(pair=a_pair)
    def canary_differs(self, pair: Pair) -> None:
        self.at.canary_differed(pair, "other text", self.now_s)
        self._note()

    @rule(prefill=st.sampled_from(PREFILLS), silent_s=st.sampled_from([None, 1.0, FORGOTTEN_AFTER_S]))
    def prefill_restarts(self, prefill: EngineId, silent_s: float | None) -> None:
        self.at.prefill_restarted(prefill, DECODES, silent_s, self.now_s)
        for decode in DECODES:
            assert self.at.state((prefill, decode)) is PairState.QUARANTINED
            assert self._since_s((prefill, decode)) == self.now_s
        self._note()

    @rule(decode=st.sampled_from(DECODES))
    def decode_restarts(self, decode: EngineId) -> None:
        self.at.decode_restarted(decode, self.now_s)
        self._note()

    @invariant()
    def only_pairs_in_trouble_are_kept(self) -> None:
        assert all(record.state is not PairState.OK for record in self.at.records.values())

    @invariant()
    def a_trial_is_known_while_a_pair_is_proving(self) -> None:
        for record in self.at.records.values():
            assert record.state is not PairState.PROVING or record.trial

    @invariant()
    def the_next_try_is_within_bounds(self) -> None:
        assert all(record.due_s <= self.now_s + 45.0 for record in self.at.records.values())


TestMatrix = Matrix.TestCase
sizes = st.integers(1, 12)


@given(sizes, sizes, st.integers(0, 1000))
def test_rounds_are_matchings_that_cover_the_fleet(prefills: int, decodes: int, first: int) -> None:
    ps, ds = (
        [EngineId(f"{side}{number}") for number in range(count)] for side, count in (("p", prefills), ("d", decodes))
    )
    seen: Counter[Pair] = Counter()
    for number in range(first, first + max(prefills, decodes)):
        pairs = list(diagonal(ps, ds, number))
        assert all(count == 1 for count in Counter(engine for pair in pairs for engine in pair).values())
        seen.update(pairs)
    assert seen == Counter((p, d) for p in ps for d in ds), "every pair once"


@given(st.lists(a_pair, max_size=12), st.sets(st.sampled_from([*PREFILLS, *DECODES])))
def test_what_is_chosen_shares_no_server(pairs: list[Pair], busy: set[EngineId]) -> None:
    chosen = disjoint(pairs, busy)
    servers = Counter(engine for pair in chosen for engine in pair)
    assert all(count == 1 for count in servers.values())
    assert busy.isdisjoint(servers)
    left = [pair for pair in pairs if {*busy, *servers}.isdisjoint(pair)]
    assert left == [], "nothing more would fit"
