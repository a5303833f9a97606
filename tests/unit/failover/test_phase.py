"""The attempt table: total, and true to the rules it was written for."""

from itertools import product

import pytest

from failover.phase import NEEDING_PREFILL, TRANSITIONS, Action, Event, Phase, handed_over, step


def run(*events: Event) -> tuple[Phase, list[Action]]:
    phase, actions = Phase.DISPATCHED, []
    for event in events:
        phase, action = step(phase, event)
        actions.append(action)
    return phase, actions


def test_the_table_is_total() -> None:
    assert set(TRANSITIONS) == set(product(Phase, Event))


def test_the_usual_stream() -> None:
    phase, actions = run(Event.PREFILL_ANSWERED, Event.DECODE_OUTPUT, Event.DECODE_OUTPUT, Event.DECODE_ENDED)
    assert phase is Phase.DONE
    assert actions == [Action.HAND_OVER, Action.RELAY, Action.RELAY, Action.FINISH]


def test_first_output_is_held_for_the_prefills_answer() -> None:
    assert run(Event.DECODE_OUTPUT) == (Phase.HELD, [Action.HOLD])
    assert run(Event.DECODE_OUTPUT, Event.PREFILL_ANSWERED)[1][-1] is Action.RELAY
    assert run(Event.DECODE_OUTPUT, Event.HOLD_PASSED)[1][-1] is Action.RELAY


def test_a_prefill_that_answers_failure_while_output_is_held_ends_the_attempt() -> None:
    phase, actions = run(Event.DECODE_OUTPUT, Event.DECODE_OUTPUT, Event.PREFILL_FAILED)
    assert phase is Phase.FAILED
    assert Action.RELAY not in actions


@pytest.mark.parametrize("event", [Event.PREFILL_FAILED, Event.PREFILL_BROKE])
@pytest.mark.parametrize("before", [Phase.HANDED_OVER, Phase.STREAMING])
def test_after_hand_over_the_prefills_fate_changes_nothing(before: Phase, event: Event) -> None:
    assert step(before, event) == (before, Action.NOTE)


def test_a_broken_prefill_is_given_time_for_the_decodes_first_output() -> None:
    assert run(Event.PREFILL_BROKE) == (Phase.PREFILL_LOST, [Action.WAIT_GRACE])
    assert run(Event.PREFILL_BROKE, Event.DECODE_OUTPUT) == (Phase.STREAMING, [Action.WAIT_GRACE, Action.RELAY])
    assert run(Event.PREFILL_BROKE, Event.GRACE_PASSED) == (Phase.FAILED, [Action.WAIT_GRACE, Action.BLAME_PREFILL])


@pytest.mark.parametrize("phase", [p for p in Phase if p not in (Phase.DONE, Phase.FAILED, Phase.HELD_WHOLE)])
def test_a_failed_decode_always_ends_the_attempt(phase: Phase) -> None:
    assert step(phase, Event.DECODE_FAILED)[0] is Phase.FAILED


@pytest.mark.parametrize("phase", [Phase.DONE, Phase.FAILED])
@pytest.mark.parametrize("event", Event)
def test_ends_are_final(phase: Phase, event: Event) -> None:
    assert step(phase, event) == (phase, Action.NOTHING)


def test_a_failed_phase_always_names_who_is_at_fault() -> None:
    blames = {Action.BLAME_PREFILL, Action.BLAME_DECODE, Action.BLAME_SILENT}
    for (before, event), (after, action) in TRANSITIONS.items():
        if after is Phase.FAILED and before is not Phase.FAILED:
            assert action in blames, (before, event)


def test_nothing_is_relayed_before_the_hold_or_the_answer() -> None:
    for (before, event), (_, action) in TRANSITIONS.items():
        if action is Action.RELAY and before is Phase.DISPATCHED:
            pytest.fail(f"{event} relays at once")


def test_handed_over() -> None:
    assert {phase for phase in Phase if handed_over(phase)} == {Phase.HANDED_OVER, Phase.STREAMING, Phase.DONE}


# ---- where the client's answer needs the prefill's -------------------------------------------------------------------


def run_needing(*events: Event) -> tuple[Phase, list[Action]]:
    phase, actions = Phase.DISPATCHED, []
    for event in events:
        phase, action = step(phase, event, needs_prefill=True)
        actions.append(action)
    return phase, actions


@pytest.mark.parametrize("first", list(product(Event, repeat=2)))
def test_nothing_is_passed_on_without_an_answer_that_is_needed(first: tuple[Event, ...]) -> None:
    if Event.PREFILL_ANSWERED in first:
        return
    phase, actions = run_needing(*first, Event.DECODE_OUTPUT, Event.DECODE_ENDED)
    assert phase in (Phase.HELD_WHOLE, Phase.FAILED)
    assert not {Action.RELAY, Action.FINISH, Action.HAND_OVER, Action.HOLD, Action.WAIT_GRACE} & set(actions)


@pytest.mark.parametrize("event", [Event.PREFILL_BROKE, Event.PREFILL_FAILED, Event.DEADLINE_PASSED])
@pytest.mark.parametrize("before", [(), (Event.DECODE_OUTPUT,), (Event.DECODE_ENDED,)])
def test_a_needed_answer_that_does_not_come_ends_the_attempt(before: tuple[Event, ...], event: Event) -> None:
    phase, actions = run_needing(*before, event)
    assert phase is Phase.FAILED
    assert actions[-1] is (Action.BLAME_SILENT if event is Event.DEADLINE_PASSED else Action.BLAME_PREFILL)


@pytest.mark.parametrize("phase", [Phase.HANDED_OVER, Phase.STREAMING, Phase.DONE, Phase.FAILED])
@pytest.mark.parametrize("event", Event)
def test_once_the_needed_answer_is_there_all_is_as_always(phase: Phase, event: Event) -> None:
    assert step(phase, event, needs_prefill=True) == step(phase, event)


def test_what_is_otherwise_is_otherwise() -> None:
    assert all(TRANSITIONS[key] != value for key, value in NEEDING_PREFILL.items())
