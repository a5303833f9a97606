"""A broken stream that is run again from its start: what its client has already must come again, and is not sent twice.

The shell between raw events and `failover/replay.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from engines.client_stream import Frames
from engines.sse_frames import EventKind, data_of, event_kind
from engines.types import Stage
from failover.replay import Diverged, Replay
from gateway.errors import upstream_failed

_NO_JSON = (EventKind.DONE, EventKind.COMMENT)


class ReplayFilter:
    """What a client lacks of a new run of its request. `sent` are the events that it has, as raw frames."""

    def __init__(self, path: str, sent: Iterable[bytes], *, incremental: bool) -> None:
        self._replay = Replay(path, map(_parsed, sent), incremental=incremental)

    def frames(self, frames: Frames) -> Frames:
        """Of these events what the client lacks. Raises GatewayError `replay_diverged`."""
        if self._replay.passing:
            return frames
        left: list[tuple[EventKind, bytes]] = []
        try:
            for kind, frame in frames:
                if kind not in _NO_JSON:
                    events = map(_frame, self._replay.feed(_parsed(frame)))
                    left += [(event_kind(event), event) for event in events]
                elif kind is EventKind.DONE and not self._replay.caught_up:
                    raise Diverged("it ends before what the client has")
                else:
                    left.append((kind, frame))
        except Diverged as why:
            raise upstream_failed(
                f"the answer was generated again and is another one: {why}; asking again is safe",
                code="replay_diverged",
                stage=Stage.STREAMING,
                definite=False,
            ) from why
        return left


def _parsed(frame: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(data_of(frame))
    except orjson.JSONDecodeError:
        event = None
    return event if isinstance(event, dict) else {}


def _frame(event: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"
