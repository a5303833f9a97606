"""KV and control messages between servers, over real TCP. A shell: sockets only, no scheduling.

One listener per server (its rank port). Decodes send page addresses and aborts to a prefill's; prefills send KV to a
decode's, which acknowledges it as a transfer engine does. A frozen peer hence leaves its senders waiting.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from engines.tasks import spawn
from engines.token_rule import TOKEN_BYTES

_HEADER = struct.Struct("<BB16sIIIII")
"""The room takes 16 bytes: SGLang's own messages carry it as text, also where it exceeds 64 bits."""


class Kind(IntEnum):
    """What a frame says."""

    ADDRESSES = 1
    """D→P: pages for the room are reserved; the payload is D's own `host:port`."""
    ABORT = 2
    """D→P: the room is given up."""
    ABORT_ACK = 3
    """P→D: nothing of the room is on its way any more."""
    KV = 4
    """P→D: KV of `count` prompt tokens from `start`; the last frame carries the metadata row."""
    KV_ACK = 5
    """D→P: written."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message; the fields that a kind does not need are 0."""

    kind: Kind
    room: int
    start: int = 0
    count: int = 0
    first_token: int = 0
    cached_tokens: int = 0
    last: bool = False
    payload: bytes = b""


def encode_frame(frame: Frame) -> bytes:
    """The frame's bytes."""
    header = _HEADER.pack(
        frame.kind,
        frame.last,
        frame.room.to_bytes(16, "little", signed=True),
        frame.start,
        frame.count,
        frame.first_token,
        frame.cached_tokens,
        len(frame.payload),
    )
    return header + frame.payload


def kv_payload(packed: bytes, bytes_per_token: int) -> bytes:
    """KV of the packed ids: the ids themselves, then padding up to `bytes_per_token`."""
    return packed + bytes(len(packed) // TOKEN_BYTES * (bytes_per_token - TOKEN_BYTES))


def kv_tokens(frame: Frame) -> bytes:
    """The packed ids that a KV frame carries."""
    return frame.payload[: frame.count * TOKEN_BYTES]


class Peer(asyncio.Protocol):
    """One connection: splits what comes into frames, and says when it is lost."""

    def __init__(self, on_frame: Callable[[Peer, Frame], None], on_lost: Callable[[Peer], None] | None = None) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            kind, last, room, start, count, token, cached, size = _HEADER.unpack_from(self._buffer, at)
            end = at + _HEADER.size + size
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[at + _HEADER.size : end])
            at = end
            number = int.from_bytes(room, "little", signed=True)
            self._on_frame(self, Frame(Kind(kind), number, start, count, token, cached, bool(last), payload))
        del self._buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._on_lost is not None:
            self._on_lost(self)

    def send(self, frame: Frame) -> None:
        """Send if connected; lost otherwise, as a datagram would be."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(encode_frame(frame))


class Dialer:
    """Connections to other servers' rank ports by address, opened at first use.

    `on_lost(address)` is called when a connection could not be made or was lost; what was sent may be lost with it.
    """

    def __init__(self, on_frame: Callable[[Peer, Frame], None], on_lost: Callable[[str], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._peers: dict[str, Peer] = {}
        self._unsent: dict[str, list[Frame]] = {}

    def send(self, address: str, frame: Frame) -> None:
        """Send `frame` to `host:port`, connecting first if need be."""
        peer = self._peers.get(address)
        if peer is not None:
            peer.send(frame)
        elif address in self._unsent:
            self._unsent[address].append(frame)
        else:
            self._unsent[address] = [frame]
            spawn(self._connect(address), f"emulator-connect-{address}")

    async def _connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            _, peer = await loop.create_connection(
                lambda: Peer(self._on_frame, lambda _: self._lost(address)), host.strip("[]"), int(port)
            )
        except OSError:
            self._unsent.pop(address, None)
            self._on_lost(address)
            return
        self._peers[address] = peer
        for frame in self._unsent.pop(address, []):
            peer.send(frame)

    def _lost(self, address: str) -> None:
        self._peers.pop(address, None)
        self._on_lost(address)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            if peer.transport is not None:
                peer.transport.abort()
