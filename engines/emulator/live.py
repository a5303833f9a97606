"""One live request of a server, from its registration to its answer: what engine and reply share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engines.emulator.core import End, Job
from engines.emulator.output import Output
from engines.emulator.parse import Item


class Sink(Protocol):
    """Where a live request's progress goes."""

    streaming: bool
    """Whether `stepped` wants to be called at every token."""

    def stepped(self, live: Live) -> None:
        """One more token is in `live.output`."""

    def ended(self, live: Live, end: End) -> None:
        """The request has ended; nothing more will come."""


@dataclass(slots=True, eq=False)
class Live:
    """A registered request. Times are the loop's clock, in seconds."""

    rid: str
    item: Item
    index: int
    job: Job
    output: Output
    sink: Sink
    received_s: float
    dispatched_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    fault: str = ""
    dp_rank: int | None = None
    """The rank that runs it, on a server that has several."""
    end: End | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """What is remembered of an ended request, for `GET /emulator/requests`."""

    rid: str
    room: int | None
    stage: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    end: str
    message: str = ""
    dp_rank: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The sampling parameters in force, defaults included."""


def finished(live: Live) -> Finished:
    """The record of `live` as it stands."""
    end = live.end
    kind = "live" if end is None else end.kind.value
    if end is not None and live.output.finish is not None and kind == "finished":
        kind = live.output.finish.kind
    job = live.job
    return Finished(
        live.rid,
        job.room,
        job.stage.value,
        job.prompt_tokens,
        job.cached_tokens,
        len(live.output.ids),
        kind,
        end.message if end else "",
        live.dp_rank,
        live.item.sampling.draw.parameters,
    )
