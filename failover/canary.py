"""Which pairs a canary is sent to next, and what its answers say beside each other. Pure.

In a round no server gets two canaries, so what one finds is of its pair alone and nobody has much to do. Rounds go
over the matrix on diagonals: all of M x N pairs have had their turn after max(M, N) of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from engines.types import EngineId
from failover.pair_health import Pair, PairRecord

OUTPUT_TOKENS = 4
"""The first token is the prefill's own work; those after it are made from the KV that arrived."""

WITNESSES = 4
"""So many pairs are asked at most beside one whose text is in doubt."""

Answer = tuple[int, ...] | str
"""The ids of an answer, or its text where the server tells no ids."""


def prompt(word: str) -> str:
    """The prompt of one round; `word` is new each time, so no cache holds it.

    Every model goes on counting, so that rounding in other batches does not make text differ; KV that is not what was
    sent does.
    """
    return f"{word}: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19"


def diagonal(prefills: Sequence[EngineId], decodes: Sequence[EngineId], number: int) -> Iterator[Pair]:
    """The pairs of round `number`: a matching, and all pairs within max(M, N) rounds in a row."""
    size = max(len(prefills), len(decodes))
    for at, prefill in enumerate(prefills):
        to = (at + number) % size
        if to < len(decodes):
            yield prefill, decodes[to]


def disjoint(pairs: Iterable[Pair], busy: Collection[EngineId] = ()) -> list[Pair]:
    """The pairs in order, without those that share a server with one before them, or with `busy`."""
    taken, chosen = set(busy), []
    for pair in pairs:
        if taken.isdisjoint(pair):
            taken.update(pair)
            chosen.append(pair)
    return chosen


def due(records: Mapping[Pair, PairRecord], now_s: float) -> list[Pair]:
    """The pairs in trouble whose next try is due, the longest due first."""
    waiting = (pair for pair, record in records.items() if record.due_s <= now_s and not record.trial)
    return sorted(waiting, key=lambda pair: (records[pair].due_s, pair))


class Rounds:
    """When idle pairs have their turn: one round every `interval_s`, none where that is 0."""

    def __init__(self, interval_s: float, first_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = first_s
        self._number = 0

    def is_due(self, now_s: float) -> bool:
        return self._interval_s > 0 and now_s >= self._next_s

    def pairs(
        self,
        prefills: Sequence[EngineId],
        decodes: Sequence[EngineId],
        proved_s: Callable[[Pair], float | None],
        now_s: float,
    ) -> list[Pair]:
        """The pairs of this round, if its time has come, without those that were proved since their last turn.

        `proved_s`: when KV last got from the one to the other.
        """
        if not self.is_due(now_s):
            return []
        self._next_s = now_s + self._interval_s
        self._number += 1
        fresh_s = now_s - self._interval_s * max(len(prefills), len(decodes))
        pairs = diagonal(prefills, decodes, self._number - 1)
        return [pair for pair in pairs if (at_s := proved_s(pair)) is None or at_s < fresh_s]


@dataclass
class Texts:
    """What the pairs answered to one prompt. Two equal answers of pairs that are trusted outweigh one that is not."""

    word: str
    answers: dict[Pair, Answer] = field(default_factory=dict)
    distrusted: set[Pair] = field(default_factory=set)
    rounds: int = 1
    told: set[Pair] = field(default_factory=set)

    def add(self, pair: Pair, answer: Answer, *, trusted: bool) -> None:
        """`trusted`: nothing is known against this pair's text."""
        self.answers[pair] = answer
        if not trusted:
            self.distrusted.add(pair)

    def agreed(self) -> Answer | None:
        """What more trusted pairs answered than anything else; None where there is no such answer."""
        votes: dict[Answer, int] = {}
        for pair, answer in self.answers.items():
            votes[answer] = votes.get(answer, 0) + (pair not in self.distrusted)
        ranked = sorted(votes.values(), reverse=True)
        if not ranked or ranked[0] == 0 or (len(ranked) > 1 and ranked[0] == ranked[1]):
            return None
        return max(votes, key=lambda answer: votes[answer])

    def wrong(self) -> list[Pair]:
        """The pairs that answered something else than was agreed."""
        agreed = self.agreed()
        return [] if agreed is None else [pair for pair, answer in self.answers.items() if answer != agreed]

    def newly_wrong(self) -> list[Pair]:
        """Those of them that no call before has named."""
        found = [pair for pair in self.wrong() if pair not in self.told]
        self.told.update(found)
        return found

    def confirmed(self, pair: Pair) -> bool:
        """Whether a trusted pair beside this one gave its answer."""
        others = (each for each, answer in self.answers.items() if answer == self.answers.get(pair))
        return any(each != pair and each not in self.distrusted for each in others)

    @property
    def disputed(self) -> bool:
        """Whether answers differ and nobody can say which is right: the same is asked of other pairs."""
        return len(set(self.answers.values())) > 1 and self.agreed() is None


def witnesses(
    garbled: Collection[Pair],
    prefills: Sequence[EngineId],
    decodes: Sequence[EngineId],
    usable: Callable[[Pair], bool],
    asked: Collection[Pair] = (),
) -> Iterator[Pair]:
    """Some pairs that nothing is known against, to be asked beside those whose text is in doubt, on other servers.

    Not those that were `asked` already.
    """
    doubtful = {engine_id for pair in garbled for engine_id in pair}
    every = (pair for number in range(max(len(prefills), len(decodes))) for pair in diagonal(prefills, decodes, number))
    fit = (pair for pair in every if doubtful.isdisjoint(pair) and pair not in asked and usable(pair))
    yield from islice(fit, WITNESSES)


def is_garbled(records: Mapping[Pair, PairRecord], pair: Pair) -> bool:
    record = records.get(pair)
    return record is not None and record.garbles
