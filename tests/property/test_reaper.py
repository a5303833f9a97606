"""No sequence of looks and probes makes a replica dead while one of the four conditions is missing.

The sequences are drawn; the conditions are worked out anew from all of what happened, by another way than the rule's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from failover.reaper import FAILED_PROBES, GAP_S, WATCHED_S, Look, Verdict, Watch

A, B, C, D = "a", "b", "c", "d"
OBSERVER = B


@dataclass(frozen=True)
class Step:
    """Something that the observer does: a look, one that fails, or a probe that ends."""

    kind: str
    after_s: float
    takes_s: float = 0.0
    data_set: str = "1 x"
    a_is_there: bool = False
    live: frozenset[str] = frozenset()
    agree: frozenset[str] = frozenset()
    answered: str | None = None
    late: bool = False
    """A probe that began in an absence before the present one."""


looks = st.builds(
    Step,
    st.just("look"),
    st.sampled_from((0.3, 0.5, 1.0, 1.0, 1.0, 2.0, GAP_S - 0.5, GAP_S - 0.1, GAP_S + 0.1, 10.0)),
    st.sampled_from((0.0, 0.0, 0.2)),
    st.sampled_from(("1 x",) * 12 + ("2 x", "1 y")),
    st.sampled_from((False,) * 9 + (True,)),
    st.sampled_from((frozenset(), frozenset({C}), frozenset({C, D}))),
    st.sampled_from((frozenset({B}), frozenset({B, C}), frozenset({C, D}), frozenset({B, D}), frozenset())),
)
failures = st.builds(Step, st.just("failure"), st.sampled_from((0.3, 1.0)))
probes = st.builds(
    Step,
    st.just("probe"),
    st.sampled_from((0.1, 0.5)),
    answered=st.sampled_from((None, None, None, None, C, A)),
    late=st.sampled_from((False,) * 5 + (True,)),
)
steps = st.lists(st.one_of(looks, looks, looks, looks, probes, probes, probes, failures), min_size=1, max_size=40)


@dataclass
class Story:
    """All that happened, for the second opinion."""

    row: list[Look] = field(default_factory=list)
    """The unbroken row of looks at one data set in which A was gone, up to now."""
    failed: int = 0
    """Of the probes since the row began, so many at its end failed."""


def dead_by_hand(story: Story) -> bool:
    if not story.row:
        return False
    last = story.row[-1]
    voters = [name for name in last.verdicts.get(A, ()) if name in last.live]
    return (
        last.sent_s - story.row[0].answered_s >= WATCHED_S
        and story.failed >= FAILED_PROBES
        and len(voters) > len(last.live) / 2
    )


def play(sequence: list[Step]) -> list[tuple[Verdict | None, bool, Story]]:
    """After each look the rule's verdict of A, whether it should be death, and the story so far."""
    watch, story, now_s, told = Watch(), Story(), 1000.0, []
    previous: Look | None = None
    for step in sequence:
        now_s += step.after_s
        if step.kind == "failure":
            watch, story, previous = Watch(), Story(), None
        elif step.kind == "probe":
            absence = watch.absences.get(A)
            since_s = absence.since_s if absence is not None else now_s
            watch = watch.probed(A, since_s - 1.0 if step.late else since_s, step.answered)
            if story.row and not step.late:
                story.failed = 0 if step.answered == A else story.failed + 1
        else:
            live = frozenset({OBSERVER, *step.live, *([A] if step.a_is_there else [])})
            addresses = {name: f"http://{name}" for name in (A, B, C, D)}
            sent_s, now_s = now_s, now_s + step.takes_s
            look = Look(sent_s, now_s, step.data_set, live, addresses, {A: step.agree})
            watch = watch.looked(look)
            broken = previous is None or previous.data_set != look.data_set or look.answered_s - previous.sent_s > GAP_S
            if broken or step.a_is_there:
                story = Story()
            if not step.a_is_there:
                story.row.append(look)
            previous = look
            verdict = dict(watch.verdicts(look)).get(A)
            told.append((verdict, dead_by_hand(story), Story(list(story.row), story.failed)))
    return told


@settings(max_examples=5 * settings().max_examples)
@given(steps)
def test_dead_is_who_fulfils_all_four_conditions_and_nobody_else(sequence: list[Step]) -> None:
    for verdict, dead, story in play(sequence):
        assert (verdict is Verdict.DEAD) == dead, story


def test_the_sequences_reach_death() -> None:
    """Else the property would say nothing."""
    agree = frozenset({B})
    gone = [Step("look", 1.0, agree=agree) for _ in range(8)]
    sequence = [gone[0], Step("probe", 0.1), Step("probe", 0.1), *gone[1:]]
    assert play(sequence)[-1][:2] == (Verdict.DEAD, True)
    assert play(sequence[:-3])[-1][:2] == (Verdict.ABSENT, False)
