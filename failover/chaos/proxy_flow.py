"""One connection through a proxy: two flows of bytes, each by a rule that may change at any moment. A shell.

Nothing in a flow waits: every event of a socket, timer or change of rules lets it take a step, which does what can be
done now and says what comes next. The end of a side, and that it broke, travel behind what it has sent, so that whoever
is behind a silent direction sees nothing of either.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from failover.chaos.world import PLAIN, LinkRule

PIECE_BYTES = 64 << 10
MAX_HELD_BYTES = 1 << 20
"""What a flow holds at most; beyond it nothing is read, so that the sender's own buffers fill."""
_MAX_PIECES = 4096
"""Nor more pieces than this, however small."""
_SLICE_S = 0.02
"""With a bandwidth, so much of it passes at once."""
_LINGER_S = 2.0
"""How long both ends may take to close a connection that was cut."""
_ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER on, 0 s: closing sends RST."""


@dataclass(slots=True, eq=False)
class Direction:
    """One direction of the link: its rule, its bytes, and from when on its bandwidth is free."""

    rule: LinkRule = PLAIN
    free_s: float = 0.0
    bytes: int = 0


@dataclass(slots=True, eq=False)
class _Side:
    """One end of a connection; `broken`: it is gone without a proper end."""

    socket: socket.socket
    broken: bool = False


@dataclass(slots=True, eq=False)
class _Piece:
    """What was read at once; no data: the end. `luck` is its share of the jitter."""

    data: memoryview
    read_s: float
    luck: float


class Connection:
    """One connection through the proxy. `closed` is told when it is over."""

    def __init__(
        self,
        client: socket.socket,
        target: socket.socket,
        forth: Direction,
        back: Direction,
        rng: Random,
        closed: Callable[[Connection], None],
    ) -> None:
        self.over = False
        self._closed = closed
        self._sides = one, other = _Side(client), _Side(target)
        self._flows = _Flow(self, forth, one, other, rng), _Flow(self, back, other, one, rng)
        self._cut = False
        self._open: set[socket.socket] = set()
        """After a cut: who has not closed yet."""
        self._timer: asyncio.TimerHandle | None = None

    def change(self) -> None:
        for flow in self._flows:
            flow.change()

    def cut(self) -> None:
        self._cut = True
        for flow in self._flows:
            flow.cut()

    def reset(self) -> None:
        for side in self._sides:
            abort_when_closed(side.socket)
        self.close()

    def broke(self, side: _Side) -> None:
        """A side takes nothing any more: what comes from it ends with that news."""
        side.broken = True
        if all(each.broken for each in self._sides):
            self.close()
        for flow in self._flows:
            flow.source_broke(side)

    def break_off(self, side: _Side) -> None:
        """The news that the other side broke has come to this one."""
        abort_when_closed(side.socket)
        self.close()

    def flow_done(self) -> None:
        """Close when both directions have ended."""
        if self.over or not all(flow.done for flow in self._flows) or any(side.broken for side in self._sides):
            return
        if self._cut and not self._open:
            self._linger()
        elif not self._cut:
            self.close()

    def _linger(self) -> None:
        """Closing while a side still sends would tell it RST: throw away what comes until both have closed."""
        loop = asyncio.get_running_loop()
        for flow in self._flows:
            flow.rest()
        self._open = {side.socket for side in self._sides}
        self._timer = loop.call_later(_LINGER_S, self.close)
        for each in self._open:
            loop.add_reader(each, self._drop, each)

    def _drop(self, source: socket.socket) -> None:
        try:
            if source.recv(PIECE_BYTES):
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # closed as well
        asyncio.get_running_loop().remove_reader(source)
        self._open.discard(source)
        if not self._open:
            self.close()

    def close(self) -> None:
        """Close both sides now; twice is once."""
        if self.over:
            return
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        for flow in self._flows:
            flow.rest()
        for side in self._sides:
            side.socket.close()
        self._closed(self)


class _Flow:
    """One direction of one connection, from `source` to `sink`."""

    def __init__(self, connection: Connection, direction: Direction, source: _Side, sink: _Side, rng: Random) -> None:
        self._connection, self._direction, self._source, self._sink = connection, direction, source, sink
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[_Piece] = deque()
        self._held_bytes = 0
        self._left_bytes: int | None = None
        """So much more is read before the end; None: as much as comes."""
        self._read_all = False
        self._turn_s: float | None = None
        """When the next slice may pass, where the bandwidth is limited."""
        self._timer: asyncio.TimerHandle | None = None
        self._reading = self._writing = False
        self.done = False
        """The end was passed on, or there is nobody to take it."""

    def step(self) -> None:
        """Do what can be done now, and wait for what comes next."""
        if self._connection.over or self.done:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._readable:
            self._read()
        blocked = not self._direction.rule.silent and self._write()
        if not self._connection.over:
            self._watch(reading=self._readable, writing=blocked)

    def change(self) -> None:
        """Other rules hold from now on."""
        self._turn_s = None
        self.step()

    def cut(self) -> None:
        """End behind what has come until now."""
        if not self._connection.over and not self._read_all and self._left_bytes is None:
            waiting = fcntl.ioctl(self._source.socket, termios.FIONREAD, bytes(4))
            self._left_bytes = int.from_bytes(waiting, "little")
            self.step()

    def source_broke(self, side: _Side) -> None:
        """If that is the source, the sink learns it in the end, also where an end was passed on already."""
        if side is self._source and not self._sink.broken:
            if self.done:
                self.done = False
                self._end()
            self.step()

    def rest(self) -> None:
        """Wait for nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._watch(reading=False, writing=False)

    def _watch(self, *, reading: bool, writing: bool) -> None:
        """Step again when the source has something, or the sink takes something."""
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._loop.add_reader(self._source.socket, self.step)
            else:
                self._loop.remove_reader(self._source.socket)
        if writing != self._writing:
            self._writing = writing
            if writing:
                self._loop.add_writer(self._sink.socket, self.step)
            else:
                self._loop.remove_writer(self._sink.socket)

    @property
    def _readable(self) -> bool:
        room = self._held_bytes < MAX_HELD_BYTES and len(self._pieces) < _MAX_PIECES
        return room and not self._read_all and not self._direction.rule.silent

    def _read(self) -> None:
        size = PIECE_BYTES if self._left_bytes is None else min(PIECE_BYTES, self._left_bytes)
        try:
            data = self._source.socket.recv(size)
        except BlockingIOError:
            return
        except OSError:
            self._source.broken, data = True, b""
        if data:
            self._hold(data)
            if self._left_bytes is not None:
                self._left_bytes -= len(data)
        if not data or self._left_bytes == 0:
            self._end()

    def _end(self) -> None:
        self._read_all = True
        self._hold(b"")

    def _hold(self, data: bytes) -> None:
        self._held_bytes += len(data)
        self._pieces.append(_Piece(memoryview(data), self._loop.time(), self._rng.random()))

    def _write(self) -> bool:
        """Pass on what is due; whether the sink takes no more now."""
        while self._pieces:
            piece, rule, now_s = self._pieces[0], self._direction.rule, self._loop.time()
            due_s = piece.read_s + rule.delay_s + piece.luck * rule.jitter_s
            data = piece.data
            if piece.data and rule.bytes_per_s is not None and due_s <= now_s:
                data = piece.data[: max(1, int(rule.bytes_per_s * _SLICE_S))]
                due_s = self._take_turn(len(data) / rule.bytes_per_s, now_s)
            if due_s > now_s:
                self._timer = self._loop.call_at(due_s, self.step)
                return False
            if not data:
                self._pass_end()
                return False
            try:
                sent = self._sink.socket.send(data)
            except BlockingIOError:
                return True
            except OSError:
                self._give_up()
                return False
            self._turn_s = None
            self._held_bytes -= sent
            self._direction.bytes += sent
            piece.data = piece.data[sent:]
            if not piece.data:
                self._pieces.popleft()
        return False

    def _take_turn(self, takes_s: float, now_s: float) -> float:
        """When a slice that takes so long may pass: behind those of the other connections that came first."""
        if self._turn_s is None:
            self._turn_s = max(now_s, self._direction.free_s)
            self._direction.free_s = self._turn_s + takes_s
        return self._turn_s

    def _pass_end(self) -> None:
        self._pieces.popleft()
        self.done = True
        if self._source.broken:
            self._connection.break_off(self._sink)
            return
        try:
            self._sink.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._connection.broke(self._sink)
        self._connection.flow_done()

    def _give_up(self) -> None:
        """The sink is gone; the source learns it by the other flow."""
        self._pieces.clear()
        self._held_bytes, self._read_all, self.done = 0, True, True
        self._connection.broke(self._sink)


def abort_when_closed(each: socket.socket) -> None:
    """Closing will say RST."""
    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
