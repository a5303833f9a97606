"""Where answers go: a whole body when all is done, or events written straight to the connection. A shell.

The step loop calls `StreamReply.stepped` at every token, so it writes one frame to the transport and wakes nobody;
the handler's task sleeps until the stream ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from engines.emulator.core import End
from engines.emulator.faults import FINISH_CHUNK, ROLE_CHUNK, Fault, Holds
from engines.emulator.formats import StreamFormat
from engines.emulator.live import Live
from engines.emulator.wire import DONE, stream_error

MAX_UNSENT_BYTES = 1 << 20
"""A client this far behind gets its tokens later, several to an event, as from a server whose writes block."""
_FLUSH_S = 0.002
"""The loop writes to sockets at the end of its turn."""


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

    def __init__(
        self, form: StreamFormat, lives: list[Live], fault: Fault | None, holds: Holds, abort: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self._form = form
        self._lives = lives
        self._fault = fault
        self._holds = holds
        self._abort = abort
        self._begun: set[int] = set()
        self._open = 0
        self._unsent = bytearray()
        self._transport: asyncio.Transport | None = None
        self._silent = False
        self._held: bytearray | None = None
        """What a hold keeps from being written."""
        self._dying = False
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
        if self._unsent:
            transport.write(b"%x\r\n%b\r\n" % (len(self._unsent), bytes(self._unsent)))
            self._unsent.clear()
        if self._dying:
            self._die()

    def detach(self) -> None:
        """The client is gone: write no more."""
        self._silent = True

    def stepped(self, live: Live) -> None:
        if live.output.finish is not None:
            return  # the last token is written with the end, which follows at once
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return
        if not live.output.withheld:
            self._write(self._events(live))
        self._go_wrong_if_due(live)

    def ended(self, live: Live, end: End) -> None:
        live.output.closed = True
        events = b""
        if end.status is None:
            events = self._events(live)
            if self._is_due(live):
                self._write(events)
                self._go_wrong_if_due(live)
                return
        self._open -= 1
        events += self._form.end(live, end)
        if not self._open:
            events = self._pass(live, FINISH_CHUNK, events) + self._form.tail(self._lives)
        self._write(events)
        self._finish()

    def _events(self, live: Live) -> bytes:
        if live.index in self._begun:
            return self._form.delta(live)
        self._begun.add(live.index)
        return self._pass(live, ROLE_CHUNK, self._form.first(live)) + self._form.delta(live)

    def _pass(self, live: Live, place: str, events: bytes) -> bytes:
        """Behind `events` the stream may be held, or go wrong; what of them is still to be written."""
        if self._fault is None and not self._holds.armed:
            return events
        self._write(events)
        if self._fault is not None and self._fault.at == place:
            self._go_wrong(self._fault)
        hold = self._holds.catch(live.job, place)
        if hold is not None:
            hold.resume = self._resume
            self._held = bytearray()
        return b""

    def _resume(self) -> None:
        held, self._held = self._held, None
        self._write(bytes(held or b""))
        self._finish()

    def _finish(self) -> None:
        if not self._open and self._held is None and not self._silent and not self.done.done():
            self.done.set_result(None)

    def _write(self, events: bytes) -> None:
        if self._silent or not events:
            return
        if self._held is not None:
            self._held += events
        elif self._transport is None:
            self._unsent += events
            if not self.first.done():
                self.first.set_result(None)
        elif not self._transport.is_closing():  # uvloop raises, and who pumps would drop what is others'
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    def _is_due(self, live: Live) -> bool:
        """Whether the stream has the tokens that its fault waits for."""
        fault = self._fault
        return fault is not None and fault.at == "token" and len(live.output.ids) >= max(1, fault.after_tokens)

    def _go_wrong_if_due(self, live: Live) -> None:
        if self._fault is not None and self._is_due(live):
            self._go_wrong(self._fault)

    def _go_wrong(self, fault: Fault) -> None:
        """Go wrong in the middle of the stream, as the fault says."""
        if fault.name == "error_event":
            self._write(stream_error("Internal error injected by /emulator/fault") + DONE)
            if not self.done.done():
                self.done.set_result(None)
        elif fault.name == "truncate_stream" and not self.done.done():
            self.done.cancel()
        elif fault.name == "die":
            self._dying = True
            if self._transport is not None:
                self._die()
        self._fault = None
        self._silent = True
        if not self.first.done():
            self.first.set_result(None)
        if fault.name not in ("stall", "die"):
            self._abort()

    def _die(self) -> None:
        """End the process as kill -9 does, when the loop has handed over what was written."""
        asyncio.get_running_loop().call_later(_FLUSH_S, os.kill, os.getpid(), signal.SIGKILL)
