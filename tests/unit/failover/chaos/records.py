"""A run in which all went well, for tests to spoil."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from failover.chaos.history import Ending, Error, Event, History, Ledger, Limits, Request
from failover.chaos.record import FaultRun, Instance, Mark, Planned, Record
from failover.chaos.scenario import Expectations, FaultPlan, Scenario
from tests.unit.failover.chaos.histories import Plan

PROMPT = tuple(range(20, 60))
LIMITS = Limits(max_tokens=12, ignore_eos=True)
WHOLE = Plan(PROMPT, (0,), LIMITS, name="r-whole").request()
RESUMED = Plan(PROMPT, (4, 0), LIMITS, name="r-resumed").request()
"""A stream that two attempts wrote, from 0 s to 2 s."""
BROKEN = Plan(PROMPT, (4,), LIMITS, name="r-broken", ending="broken").request()
REFUSED = replace(
    WHOLE,
    name="r-refused",
    choices=(),
    events=(Event(0.5, error=Error("no room", "rate_limit_error", "overloaded")),),
    status=503,
    again_s=2.0,
)
LOST = replace(Plan(PROMPT, (0,), LIMITS, name="r-lost").request(), events=(), status=None, ending=Ending.CUT)
LEFT = Plan(PROMPT, (4,), LIMITS, name="r-left", ending="left").request()
SCENARIO = Scenario("calm", "nothing much", "that all is well", faults=(FaultPlan("kill", "prefill0"),))


def expecting(**bounds: Any) -> Scenario:
    return replace(SCENARIO, expect=Expectations(**bounds))


def history(*requests: Request, **others: Any) -> History:
    ledgers = (Ledger("prefill0", {}), Ledger("decode0", {}))
    return History(requests, **{"ledgers": ledgers, "left_over": {"bookings": 0, "tasks": 0}, **others})


def record(*requests: Request, **others: Any) -> Record:
    """Prefill 0 was killed from 0.01 s to 0.6 s; everything was back after 0.2 s."""
    good = Record(
        scenario=SCENARIO,
        seed=3,
        long=False,
        version="1",
        planned=(Planned(0, "kill", "prefill0", 0.01, None),),
        faults=(FaultRun(0, 0.01, 0.6),),
        instances=(
            Instance("prefill0", "prefill", "http://p"),
            Instance("decode0", "decode", "http://d"),
            Instance("gateway0", "gateway", "http://g"),
        ),
        marks=(Mark(-1.0, "prefill0", "started"), Mark(0.01, "prefill0", "killed"), Mark(0.6, "prefill0", "started")),
        samples=(),
        history=history(*(requests or (WHOLE, RESUMED))),
        load_s=10.0,
        settled_s=0.2,
    )
    return replace(good, **others)
