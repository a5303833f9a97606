"""After a stream broke that its client has the beginning of: how it goes on, and what the next attempt asks for.

What may be done was planned when it began (`gateway/course.py`). Here it is done, or refused with one clear error.
"""

from __future__ import annotations

from engines.client_stream import Inexact
from failover import retry
from failover.recovery import Mode
from gateway.attempt import AttemptFailed
from gateway.context import Gateway
from gateway.course import Course
from gateway.decider import Decision
from gateway.errors import GatewayError
from gateway.story import Story
from gateway.verdict import final_error

_DONE = {Mode.RESUME: "resumes", Mode.REPLAY: "replays", Mode.RESUME_TEXT: "resumes by text"}


async def closed(gw: Gateway, story: Story, course: Course, decision: Decision) -> bool:
    """Whether its client has the last words already, so that only the end was missing: it is written now.

    To be asked first of all: no verdict on servers takes back an answer that was given.
    """
    if not course.lacks_its_end_only:
        return False
    await course.close(decision.rid)
    story.record.judged(decision, "closed")
    gw.metrics.continued("close", "whole")
    return True


async def go_on(gw: Gateway, story: Story, course: Course, failed: AttemptFailed) -> None:
    """Prepare the next attempt of a broken stream. Raises GatewayError where it cannot go on."""
    mode = course.plan.mode
    try:
        match mode:
            case Mode.RESUME:
                await course.resume()
            case Mode.REPLAY:
                course.replay()
            case Mode.RESUME_TEXT:
                course.resume_text()
            case _:
                raise Inexact(course.plan.reason)
    except Inexact as why:
        gw.metrics.continued(mode.value, "refused")
        raise broken_off(gw, course, failed, str(why)) from why
    gw.metrics.continued(mode.value, "begun")
    await story.reply.comment(f"pdgate {_DONE[mode]}: the {failed.outcome.leg} server failed ({failed.outcome.kind})")


def broken_off(gw: Gateway, course: Course, failed: AttemptFailed, why: str) -> GatewayError:
    """The error that ends a stream which cannot go on: what failed, why that is the end, that asking again is safe."""
    error = final_error(gw, course.unit, failed, retry.last_word(retry.classify(failed.outcome)), begun=True)
    again = "" if "asking again" in error.message else "; asking again is safe"
    return error.saying(f"{error.message}; the answer cannot be continued: {why}{again}")
