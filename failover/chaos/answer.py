"""What one client of a run has read, noted as it came. Pure.

Nothing is judged here: what cannot be read as an event is kept as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from failover.chaos.history import Ending
from failover.chaos.load import Asked

DONE = "[DONE]"
REQUEST_ID = "x-pdgate-request-id"
_SHOWN_BYTES = 200


@dataclass(slots=True, eq=False)
class Answer:
    """What was asked, and what came. Times are those of the client's clock.

    `read`: events as JSON values, DONE, a whole body, or bytes that are neither. `sent_s`: when the gateway that took
    it was asked. `ended`: the body came to its proper end; `left`: the client hung up; `hung`: it was given up;
    `error`: why its connection broke, or could not be made.
    """

    asked: Asked
    gateway: str = ""
    sent_s: float = 0.0
    over_s: float = 0.0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    read: list[tuple[float, Any]] = field(default_factory=list)
    comments: list[tuple[float, str]] = field(default_factory=list)
    ended: bool = False
    left: bool = False
    hung: bool = False
    error: str = ""
    _pending: bytes = b""

    @property
    def rid(self) -> str:
        """The name under which a gateway can be asked about it, whatever became of it."""
        return str(self.asked.body.get("rid") or f"chaos-{self.asked.number:07d}")

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def ending(self) -> Ending:
        return Ending.WHOLE if self.ended else Ending.LEFT if self.left else Ending.CUT

    @property
    def has_enough(self) -> bool:
        """Whether its client hangs up now."""
        return bool(self.asked.leaves_after) and len(self.read) >= (self.asked.leaves_after or 0)

    def take_body(self, at_s: float, body: bytes) -> None:
        """The whole body has come."""
        self.read.append((at_s, _parsed(body)))
        self.ended = True

    def take(self, at_s: float, data: bytes) -> None:
        """More of a stream has come: of events that come at once, only those its client waits for are read."""
        *frames, self._pending = (self._pending + data).split(b"\n\n")
        for frame in frames:
            if not self.has_enough:
                self._take_frame(at_s, frame)

    def take_end(self, at_s: float) -> None:
        """The stream came to its proper end."""
        if self._pending:
            self.read.append((at_s, self._pending[:_SHOWN_BYTES]))
        self.ended = True

    def _take_frame(self, at_s: float, frame: bytes) -> None:
        payload = frame.removeprefix(b"data: ")
        if frame.startswith(b":"):
            self.comments.append((at_s, frame[1:].decode(errors="replace").strip()))
        elif payload == frame:
            self.read.append((at_s, frame[:_SHOWN_BYTES]))
        else:
            self.read.append((at_s, DONE if payload == DONE.encode() else _parsed(payload)))


def _parsed(data: bytes) -> Any:
    """JSON, or the beginning of bytes that are none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return data[:_SHOWN_BYTES]
