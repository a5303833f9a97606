"""Where answers go: a whole body when all is done, or events written straight to the connection. A shell.

The step loop calls `StreamReply.stepped` at every token, so it writes one frame to the transport and wakes nobody;
the handler's task sleeps until the stream ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engines.emulator.core import End
from engines.emulator.faults import Fault
from engines.emulator.formats import StreamFormat
from engines.emulator.live import Live
from engines.emulator.wire import DONE, stream_error

MAX_UNSENT_BYTES = 1 << 20
"""A client this far behind gets its tokens later, several to an event, as from a server whose writes block."""


class WholeReply:
    """Waits for the end of every choice of a request."""

    streaming = False

    def __init__(self, choices: int) -> None:
        self._open = choices
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stepped(self, live: Live) -> None:
        """Nothing: the body is written at the end."""

    def ended(self, live: Live, end: End) -> None:
        self._open -= 1
        if not self._open and not self.done.done():
            self.done.set_result(None)


class StreamReply:
    """Writes the events of one streamed request; `transport` is attached once the status line is out."""

    streaming = True

    def __init__(self, form: StreamFormat, lives: list[Live], fault: Fault | None, abort: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._form = form
        self._lives = lives
        self._fault = fault
        self._abort = abort
        self._begun: set[int] = set()
        self._open = 0
        self._unsent = bytearray()
        self._transport: asyncio.Transport | None = None
        self._silent = False
        self.first: asyncio.Future[None] = loop.create_future()
        """Done when the first event exists."""
        self.done: asyncio.Future[None] = loop.create_future()
        """Done when the last event was handed to the transport; cancelled when the stream must break off."""

    def expect(self, choices: int) -> None:
        """How many choices must end before the stream does."""
        self._open = choices

    def attach(self, transport: asyncio.Transport) -> None:
        """The headers are out: write what has come so far, and everything from now on."""
        self._transport = transport
        self._flush()

    def stepped(self, live: Live) -> None:
        if live.output.finish is not None:
            return  # the last token is written with the end, which follows at once
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return
        self._write(self._events(live))
        if (fault := self._due(live)) is not None:
            self._break_off(fault)

    def ended(self, live: Live, end: End) -> None:
        if end.status is None and (fault := self._due(live)) is not None:
            self._write(self._events(live))
            self._break_off(fault)
            return
        events = b"" if end.status is not None else self._events(live)
        self._open -= 1
        events += self._form.end(live, end)
        if not self._open:
            events += self._form.tail(self._lives)
        self._write(events)
        if not self._open and not self.done.done() and not self._silent:
            self.done.set_result(None)

    def _due(self, live: Live) -> Fault | None:
        """The fault of this stream, once it has the tokens the fault waits for."""
        due = self._fault is not None and len(live.output.ids) >= max(1, self._fault.after_tokens)
        return self._fault if due else None

    def detach(self) -> None:
        """The client is gone: write no more."""
        self._silent = True

    def _events(self, live: Live) -> bytes:
        if live.index in self._begun:
            return self._form.delta(live)
        self._begun.add(live.index)
        return self._form.first(live) + self._form.delta(live)

    def _write(self, events: bytes) -> None:
        if self._silent or not events:
            return
        transport = self._transport
        if transport is None:
            self._unsent += events
            if not self.first.done():
                self.first.set_result(None)
        else:
            transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    def _flush(self) -> None:
        if self._unsent and self._transport is not None:
            self._transport.write(b"%x\r\n%b\r\n" % (len(self._unsent), bytes(self._unsent)))
            self._unsent.clear()

    def _break_off(self, fault: Fault) -> None:
        """Go wrong in the middle of the stream, as the fault says."""
        if fault.name == "error_event":
            self._write(stream_error("Internal error injected by /emulator/fault") + DONE)
            if not self.done.done():
                self.done.set_result(None)
        elif fault.name == "truncate_stream" and not self.done.done():
            self.done.cancel()
        self._fault = None
        self._silent = True
        if not self.first.done():
            self.first.set_result(None)
        if fault.name != "stall":
            self._abort()
