"""What a client is told when a deadline passed: each stage its own code and words, and whether to ask again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engines.types import EngineId, FailureKind, Leg, Outcome, Stage
from failover import retry
from failover.deadlines import Deadline, silence_text
from failover.poison import PoisonGuard
from failover.retry import Fault, Verdict
from gateway.attempt import AttemptFailed
from gateway.errors import GatewayError
from gateway.suspects import ContentTrials, Trial, victim
from gateway.verdict import Tries, final_error, judge
from tests.fakes import now_s, timeless

P, D = EngineId("http://p0"), EngineId("http://d0")


class Counts:
    """The metrics that are asked for here."""

    def __init__(self) -> None:
        self.deadlines: list[Deadline] = []

    def deadline_passed(self, deadline: Deadline) -> None:
        self.deadlines.append(deadline)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


DECISION = SimpleNamespace(
    pair=(P, D), prefill=SimpleNamespace(engine_id=P, epoch=1), decode=SimpleNamespace(engine_id=D, epoch=1)
)


def gateway() -> Any:
    retries = SimpleNamespace(may_retry=lambda _: True, delay_s=lambda delay_s: delay_s, retry_after_s=1.0)
    config = SimpleNamespace(retry=SimpleNamespace(max_attempts=3))
    return SimpleNamespace(metrics=Counts(), retries=retries, config=config)


def trial() -> Trial:
    return ContentTrials(PoisonGuard()).trial(b"what was asked")


def silent(deadline: Deadline | None, stage: Stage, leg: Leg = Leg.DECODE) -> AttemptFailed:
    text = silence_text(deadline, leg, D, 4.0) if deadline is not None else "connection lost"
    outcome = Outcome(D, leg, FailureKind.TIMEOUT, stage, text)
    return AttemptFailed(outcome, (outcome,), deadline)


def told(deadline: Deadline | None, stage: Stage, verdict: Verdict = Verdict.GIVE_UP) -> GatewayError:
    return final_error(gateway(), None, silent(deadline, stage), retry.Decision(verdict, Fault.ENGINE))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("deadline", "stage", "code", "retries", "words"),
    [
        (Deadline.FIRST_TOKEN, Stage.DISPATCHED, "first_token_timeout", True, "nothing of the answer was sent"),
        (Deadline.FIRST_TOKEN, Stage.HANDED_OVER, "first_token_timeout", True, "no first token in time"),
        (Deadline.STALL, Stage.HANDED_OVER, "stall_timeout", True, "nothing of the answer was sent"),
        (Deadline.STALL, Stage.STREAMING, "stall_timeout", True, "begins the answer anew"),
        (Deadline.TOTAL, Stage.STREAMING, "deadline_exceeded", False, "may take as long and begins the answer anew"),
        (Deadline.TOTAL, Stage.DISPATCHED, "deadline_exceeded", False, "may take as long"),
    ],
)
def test_each_deadline_has_its_own_error(
    deadline: Deadline, stage: Stage, code: str, retries: bool, words: str
) -> None:
    for verdict in (Verdict.GIVE_UP, Verdict.OUT_OF_TIME):
        error = told(deadline, stage, verdict)
        assert (error.status, error.code, error.stage, error.safe_to_retry) == (504, code, stage, retries)
        assert (error.retry_after_s is not None) == retries
        assert words in error.message
        assert "asking again is safe" in error.message
        assert "decode server http://d0" in error.message
        assert "4.0 s" in error.message


@timeless
async def test_a_late_first_token_of_a_resumed_stream_does_not_say_that_nothing_was_sent() -> None:
    failed = silent(Deadline.FIRST_TOKEN, Stage.DISPATCHED)
    verdict = retry.Decision(Verdict.GIVE_UP, Fault.ENGINE)
    first, resumed = (final_error(gateway(), None, failed, verdict, begun=begun) for begun in (False, True))  # type: ignore[arg-type]
    assert "nothing of the answer was sent" in first.message
    assert "nothing of the answer was sent" not in resumed.message


def test_other_failures_keep_their_errors() -> None:
    assert told(None, Stage.STREAMING).code == "engine_failed"
    assert told(None, Stage.STREAMING, Verdict.OUT_OF_TIME).code == "deadline_exceeded"


@timeless
async def test_over_budget_it_ends_with_when_to_ask_again() -> None:
    gw = gateway()
    asked: list[EngineId] = []
    gw.retries = SimpleNamespace(
        may_retry=lambda decode: bool(asked.append(decode)), retry_after_s=7.5, delay_s=lambda seconds: seconds
    )
    decision: Any = DECISION
    for committed in (False, True):
        failed, tries = silent(Deadline.STALL, Stage.STREAMING), Tries()
        verdict = await judge(
            gw, tries, decision, failed, trial(), committed=committed, progressed=False, deadline_s=now_s() + 9.0
        )
        assert (verdict.verdict, tries.continuations) == (Verdict.OVER_BUDGET, 0)
        error = final_error(gw, None, failed, verdict)  # type: ignore[arg-type]
        assert (error.status, error.code, error.retry_after_s) == (503, "retry_budget_exhausted", 7.5)
        assert error.safe_to_retry
    assert asked == [D, D]
    late = await judge(gw, Tries(), decision, failed, trial(), committed=False, progressed=False, deadline_s=now_s())
    assert late.verdict is Verdict.OUT_OF_TIME
    assert len(asked) == 2, "what cannot be tried again anyway costs nothing of the budget"
    goes_on = await judge(
        gw, Tries(), decision, failed, trial(), committed=True, progressed=True, deadline_s=now_s() + 9.0
    )
    assert goes_on.verdict is Verdict.CONTINUE, "its client had got something: that costs nothing of the budget"
    assert len(asked) == 2


@timeless
async def test_a_deadline_is_counted_by_its_stage_and_only_that() -> None:
    gw = gateway()
    decision: Any = DECISION
    for failed in (silent(Deadline.STALL, Stage.HANDED_OVER), silent(None, Stage.HANDED_OVER)):
        verdict = await judge(
            gw, Tries(), decision, failed, trial(), committed=False, progressed=False, deadline_s=now_s() + 9.0
        )
        assert (verdict.verdict, verdict.excluded_engine) == (Verdict.RETRY, D)
    assert gw.metrics.deadlines == [Deadline.STALL]
    verdict = await judge(
        gw,
        Tries(),
        decision,
        silent(Deadline.TOTAL, Stage.HANDED_OVER),
        trial(),
        committed=False,
        progressed=False,
        deadline_s=now_s(),
    )
    assert verdict.verdict is Verdict.OUT_OF_TIME


@timeless
async def test_two_deaths_of_one_role_make_a_suspect_and_one_of_each_does_not() -> None:
    gw = gateway()

    async def dead(engine_id: EngineId) -> bool:
        return False

    gw.monitor = SimpleNamespace(probe_now=dead)
    gw.retries = SimpleNamespace(may_retry=lambda decode: True, delay_s=lambda seconds: seconds)
    decision: Any = DECISION
    tries, verdicts = Tries(), []
    for engine_id, leg in ((D, Leg.DECODE), (P, Leg.PREFILL), (D, Leg.DECODE)):
        broke = Outcome(engine_id, leg, FailureKind.RESET, Stage.STREAMING, "connection lost")
        failed = AttemptFailed(broke, (broke,))
        told = await judge(
            gw, tries, decision, failed, trial(), committed=True, progressed=True, deadline_s=now_s() + 9.0
        )
        verdicts.append(told.verdict)
    assert verdicts == [Verdict.CONTINUE, Verdict.CONTINUE, Verdict.POISON_SUSPECTED]


@timeless
@pytest.mark.parametrize("shown", [False, True], ids=["before its first output", "after it"])
@pytest.mark.parametrize("epoch", [1, 2])
async def test_what_ends_servers_of_several_requests_is_a_suspect_of_all(shown: bool, epoch: int) -> None:
    """The same process counts once; and who had its first output from it says nothing of the others."""
    gw, contents = gateway(), ContentTrials(PoisonGuard())

    async def dead(engine_id: EngineId) -> bool:
        return False

    gw.monitor = SimpleNamespace(probe_now=dead)
    verdicts = []
    async with contents.trial(b"x") as first, contents.trial(b"x") as second:
        assert first.begins()
        assert second.begins()
        if shown:
            second.harmless()
        for each, of in ((first, 1), (second, epoch)):
            view = SimpleNamespace(engine_id=D, epoch=of)
            decision: Any = SimpleNamespace(pair=(P, D), prefill=DECISION.prefill, decode=view)
            broke = Outcome(D, Leg.DECODE, FailureKind.RESET, Stage.DISPATCHED, "connection lost")
            each.broke(victim(decision, broke))
            told = await judge(
                gw,
                Tries(),
                decision,
                AttemptFailed(broke, (broke,)),
                each,
                committed=False,
                progressed=False,
                deadline_s=now_s() + 9.0,
            )
            verdicts.append(told.verdict)
    last = Verdict.POISON_SUSPECTED if epoch == 2 and not shown else Verdict.RETRY
    assert verdicts == [Verdict.RETRY, last]
