"""After a failed attempt: whether the request is tried again, and what its client is told if not."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

from engines.types import Leg, Outcome, Stage
from failover import deadlines, retry
from failover.deadlines import Deadline
from failover.retry import Fault, Verdict
from gateway.admission import fingerprint
from gateway.attempt import AttemptFailed
from gateway.context import Gateway
from gateway.decider import Decision
from gateway.engine_errors import engine_error_to_openai
from gateway.errors import GatewayError, upstream_failed
from gateway.openai_api import Unit
from gateway.suspects import Trial, victim


@dataclass(slots=True)
class Tries:
    """What one engine request has been through."""

    attempts: int = 0
    """Since the client last got something new."""
    continuations: int = 0
    deaths: Counter[Leg] = field(default_factory=Counter)
    """Of servers of each role: a request that ends servers ends those of one role."""
    own_faults: int = 0
    last: tuple[AttemptFailed, retry.Decision] | None = None


async def judge(
    gw: Gateway,
    tries: Tries,
    decision: Decision,
    failed: AttemptFailed,
    trial: Trial,
    *,
    committed: bool,
    progressed: bool,
    deadline_s: float,
) -> retry.Decision:
    """Whether the request is tried again, or goes on, after this failure.

    `trial`: the attempt's own, not over yet. `committed`: its client has some of the answer; `progressed`: it got some
    in this attempt.
    """
    if failed.deadline is not None:
        gw.metrics.deadline_passed(failed.deadline)
    tries.attempts = 1 if progressed else tries.attempts + 1
    if (leg := await _died(gw, trial, decision, failed)) is not None:
        tries.deaths[leg] += 1
    tries.own_faults += retry.classify(failed.outcome) is Fault.OURS
    history = retry.History(
        tries.attempts,
        gw.config.retry.max_attempts,
        committed,
        max([*tries.deaths.values(), trial.deaths]),
        tries.own_faults,
        deadline_s - asyncio.get_running_loop().time(),
        tries.continuations,
    )
    verdict = retry.decide(failed.outcome, decision.pair, history)
    if verdict.verdict not in (Verdict.RETRY, Verdict.CONTINUE):
        return verdict
    # A death, or a break after some progress, leads to one attempt more for each request that ran there: turns smooth
    # that, and nothing multiplies. The budget is for what fails again and again.
    allowed = leg is not None or progressed or gw.retries.may_retry(decision.decode.engine_id)
    gw.metrics.retried(allowed=allowed)
    if not allowed:
        return replace(verdict, verdict=Verdict.OVER_BUDGET)
    tries.continuations += verdict.verdict is Verdict.CONTINUE
    return replace(verdict, delay_s=gw.retries.delay_s(verdict.delay_s))


async def _died(gw: Gateway, trial: Trial, decision: Decision, failed: AttemptFailed) -> Leg | None:
    """The leg whose server ended under this attempt: its connection broke, and it is gone or another process now."""
    broken = [each for each in failed.outcomes if retry.may_be_a_death(each)]
    if not broken:
        return None
    ended = [each for each in broken if not await gw.monitor.probe_now(each.engine_id)]
    trial.found([victim(decision, each) for each in ended])
    return ended[0].leg if ended else None


def final_error(
    gw: Gateway, unit: Unit, failed: AttemptFailed, verdict: retry.Decision, *, begun: bool = False
) -> GatewayError:
    """The answer after the last attempt. `begun`: the client has a part of the answer, if of an earlier one."""
    outcome = failed.outcome
    if verdict.fault is Fault.OURS:
        gw.metrics.own_fault()
    match verdict.verdict:
        case Verdict.TO_CLIENT:
            error = engine_error_to_openai(outcome.status or 400, outcome.message.encode())
            error.stage = outcome.stage
            return error
        case Verdict.POISON_SUSPECTED:
            gw.poison.refuse(fingerprint(unit), asyncio.get_running_loop().time())
            code, status, text = "poison_suspected", 502, "two servers ended while they worked on this request"
        case Verdict.GIVE_UP | Verdict.OUT_OF_TIME if failed.deadline is not None:
            return _too_late(failed, failed.deadline, begun=begun)
        case Verdict.OVER_BUDGET:
            return _over_budget(gw, outcome)
        case Verdict.OUT_OF_TIME:
            code, status, text = "deadline_exceeded", 504, f"out of time: {outcome.message}"
        case _ if verdict.fault is Fault.OPERATOR:
            code, status, text = "engine_misconfigured", 502, f"the {outcome.leg} server refused the gateway's call"
        case _:
            code, status = "engine_failed", 502
            text = f"the {outcome.leg} server failed ({outcome.kind}, {outcome.stage}): {outcome.message}"
    return upstream_failed(
        text,
        code=code,
        stage=outcome.stage,
        definite=outcome.definite,
        status=status,
        retry=verdict.verdict is not Verdict.POISON_SUSPECTED,
    )


def _over_budget(gw: Gateway, outcome: Outcome) -> GatewayError:
    error = upstream_failed(
        "servers are failing, and the gateway tries too many other requests again already; asking again later is safe. "
        f"The {outcome.leg} server failed: {outcome.message}",
        code="retry_budget_exhausted",
        stage=outcome.stage,
        definite=outcome.definite,
        status=503,
    )
    error.retry_after_s = gw.retries.retry_after_s
    return error


def _too_late(failed: AttemptFailed, deadline: Deadline, *, begun: bool) -> GatewayError:
    rule, outcome = deadlines.RULES[deadline], failed.outcome
    return upstream_failed(
        f"{outcome.message}; {deadlines.advice(deadline, begun=begun or outcome.stage is Stage.STREAMING)}",
        code=rule.code,
        stage=outcome.stage,
        definite=False,
        status=rule.status,
        retry=rule.safe_to_retry,
    )
