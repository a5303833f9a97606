"""A small Redis in this process for replicas of the ownership store, under a clock that jumps.

What the scripts of `routing/lua` do is said once more here, in Python; the contract tests hold the real ones to the
same behaviour. Latency and trouble are made up.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from routing import ownership_log as log
from routing.redis_link import Entry, LinkState, RedisTrouble, ScriptCall, Trouble

T = TypeVar("T")
_MAX_MISSING = 2
"""Tails that a reply names; few, so that it happens that there are more."""


class _Selector(selectors.DefaultSelector):
    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for ever"
        self.now_s += timeout
        return super().select(0) if not timeout else []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer whenever nothing else is to do."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def do(self, call: Callable[..., T], *args: Any) -> T:
        """Call something that expects to be called in a running loop."""

        async def called() -> T:
            return call(*args)

        return self.run_until_complete(called())

    def pass_s(self, seconds: float) -> None:
        """Let that much time pass."""
        self.run_until_complete(asyncio.sleep(seconds))


class FakeRedis:
    """One data set, and who waits for entries in it. Keys hold dictionaries; streams hold lists of entries."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.keys: dict[bytes, Any] = {}
        self.entries = 0
        self.waiting: set[asyncio.Future[None]] = set()

    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    def flush(self) -> None:
        self.keys.clear()

    def trim(self) -> None:
        for key in [key for key in self.keys if key.endswith(b":log")]:
            self.keys[key] = []

    def saved(self) -> dict[bytes, Any]:
        return deepcopy(self.keys)

    def restore(self, saved: dict[bytes, Any]) -> None:
        self.keys = deepcopy(saved)

    def wake(self) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(None)
        self.waiting.clear()

    def command(self, name: str, key: bytes, *rest: Any) -> Any:
        if name == "HGET":
            return self.keys.get(key, {}).get(rest[0])
        if name == "HDEL":
            return self.keys.get(key, {}).pop(rest[0], None)
        assert name == "UNLINK"
        for each in (key, *rest):
            self.keys.pop(each, None)
        return None

    def read(self, after: Mapping[bytes, bytes], count: int) -> dict[bytes, list[Entry]]:
        found = {}
        for key, last in after.items():
            if entries := [entry for entry in self.keys.get(key, ()) if _order(entry[0]) > _order(last)][:count]:
                found[key] = entries
        return found

    def script(self, call: ScriptCall) -> Any:
        return getattr(self, call.script.name)(call.keys, call.args)

    def report(self, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        return 1

    def heads(self, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        head = self.keys.get(keys[0], {})
        boots = self.keys.get(keys[1], {})
        flat = [part for name, number in boots.items() if isinstance(name, str) for part in (name.encode(), number)]
        return [head.get("seq", 0), head.get("db_epoch", b""), head.get("last", b""), *(flat if args[0] else ())]

    def snapshot(self, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        runs, expiry, pending = (self.keys.get(key, {}) for key in keys)
        now, reply = self.now_ms(), [b"0", self.now_ms()]
        fields = sorted(runs)
        begin = int(args[0])
        for field in fields[begin : begin + 3]:
            expires = (pending if field.startswith(b"p") else expiry).get(field, 0)
            if expires > now:
                reply += [field, runs[field], expires]
        reply[0] = b"%d" % (begin + 3) if begin + 3 < len(fields) else b"0"
        return reply

    def boot(self, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        engine, fingerprint, hint, force = args
        epochs = self.keys.setdefault(keys[0], {})
        current = epochs.get(engine, 0)
        known = epochs.setdefault((engine,), {}).get(fingerprint)
        if known is not None and known == current:
            return [1, current, 0]
        if force or (known is None and not hint):
            number = max(current + 1, self.now_ms(), hint)
        elif known is None and hint > current:
            number = hint
        else:
            return [0, current]
        epochs[engine] = epochs[engine,][fingerprint] = number
        return [1, number, current]

    def write(self, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        _, _, db_epoch, count, most, *rest = args
        batches = int(count)
        after = dict(zip(keys[6 * batches :], rest[3 * batches :], strict=True))
        read = [
            [key, [[entry_id, [word for pair in fields.items() for word in pair]] for entry_id, fields in new]]
            for key, new in self.read(after, int(most)).items()
        ]
        written = [
            self._write(keys[6 * at : 6 * at + 6], db_epoch, *rest[3 * at : 3 * at + 3]) for at in range(batches)
        ]
        return [read or None, *written]

    def _write(self, keys: Sequence[bytes], db_epoch: bytes, name: bytes, _tidy: bytes, ops: bytes) -> Any:
        head_key, log_key, epochs_key, *row_keys = keys
        _, _, number_text, engine = name.decode().split(" ", 3)
        current, number = self.keys.get(epochs_key, {}).get(engine, 0), int(number_text)
        if current != number:
            return [0 if current > number else -1, current]
        head = self.keys.setdefault(head_key, {"db_epoch": db_epoch})
        head["seq"] = head.get("seq", 0) + 1
        rows = _Rows(self.now_ms(), *(self.keys.setdefault(key, {}) for key in row_keys))
        void = [index for index, op in enumerate(log.unpack_ops(ops)) if not rows.apply(op)]
        self.entries += 1
        entry_id = b"%d-%d" % (self.now_ms(), self.entries)
        before = head.get("last", b"")
        fields = {b"h": b"%d %s %s %s" % (head["seq"], head["db_epoch"], before or b"-", name), b"o": ops}
        void_text = " ".join(map(str, void)).encode()
        if void:
            fields[b"x"] = void_text
        head["last"] = entry_id
        self.keys.setdefault(log_key, []).append((entry_id, fields))
        place = (head["seq"], head["db_epoch"], entry_id, before, void_text)
        return [1, current, *place, rows.lost_cuts, *rows.missing]


class _Rows:
    def __init__(self, now: int, runs: dict[bytes, bytes], expiry: dict[bytes, int], pending: dict[bytes, int]) -> None:
        self.now, self.runs, self.expiry, self.pending = now, runs, expiry, pending
        self.missing: list[bytes] = []
        self.lost_cuts = 0
        for times in (expiry, pending):
            for field in [field for field, until in times.items() if until <= now]:
                del times[field], runs[field]

    def hold(self, field: bytes, packed: bytes, until: int) -> None:
        if len(self.runs.get(field, b"")) < len(packed):
            self.runs[field] = packed
        self.expiry[field] = max(until, self.expiry.get(field, 0))

    def apply(self, op: log.Op) -> bool:
        field, until = op.place + op.tail, self.now + op.ttl_ms
        if op.kind == log.CLAIM:
            self.runs[field] = max(self.runs.get(field, b""), op.data, key=len)
            self.pending[field] = until
        elif op.kind == log.HOLD:
            self.hold(field, op.data, until)
        elif op.kind == log.PROMOTE:
            self.pending.pop(b"p" + op.tail, None)
            size = log.BLOCK_BYTES * (op.promoted_blocks + 1)
            packed = self.runs.pop(b"p" + op.tail, b"")
            if len(packed) == size or (field in self.expiry and len(self.runs[field]) >= size):
                self.hold(field, packed if len(packed) == size else b"", until)
            else:
                self.miss(op.tail)
                return False
        elif op.kind == log.DROP:
            self.runs.pop(field, None)
            return self.pending.pop(field, None) is not None
        elif op.kind == log.TOUCH:
            tails = log.split_blocks(op.data)
            there = [tail for tail in tails if op.place + tail in self.expiry]
            for tail in there:
                self.hold(op.place + tail, b"", until)
            for tail in tails:
                if tail not in there:
                    self.miss(tail)
            return bool(there)
        elif op.kind == log.CUT:
            return self.cut(field, op)
        else:
            for rows in (self.runs, self.expiry, self.pending):
                rows.clear()
        return True

    def miss(self, tail: bytes) -> None:
        if len(self.missing) <= _MAX_MISSING:
            self.missing.append(tail if len(self.missing) < _MAX_MISSING else b"")

    def cut(self, field: bytes, op: log.Op) -> bool:
        if field not in self.expiry:
            self.lost_cuts += 1
            return False
        until, blocks = self.expiry.pop(field), log.split_blocks(self.runs.pop(field))
        first = op.data[log.BLOCK_BYTES :]
        at = blocks.index(first, 1) if first in blocks[1:] else 0
        if at > 1:
            self.hold(op.place + blocks[at - 1], b"".join(blocks[:at]), until)
        return True


def _order(entry_id: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split(b"-")))


class FakeLink:
    """A `RedisLink` of one replica. `down`: nothing arrives; `deaf`: things are done, and the replies are lost."""

    is_cluster = False
    where = "fake"

    def __init__(self, server: FakeRedis, latency_s: float = 0.001) -> None:
        self._server = server
        self._latency_s = latency_s
        self.down = False
        self.deaf = False

    @property
    def state(self) -> LinkState:
        return LinkState(Trouble.DOWN if self.down or self.deaf else None, "", 0.0)

    async def run(self, call: ScriptCall) -> Any:
        [reply] = await self.run_all([call])
        if isinstance(reply, RedisTrouble):
            raise reply
        return reply

    async def run_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        await asyncio.sleep(self._latency_s)
        if self.down:
            return [RedisTrouble(Trouble.DOWN, "cut") for _ in calls]
        replies = [self._server.script(call) for call in calls]
        self._server.wake()
        await asyncio.sleep(self._latency_s)
        return [RedisTrouble(Trouble.SLOW, "deaf", maybe_done=True) for _ in calls] if self.deaf else replies

    async def command(self, *words: Any) -> Any:
        await asyncio.sleep(self._latency_s)
        if self.down or self.deaf:
            raise RedisTrouble(Trouble.DOWN, "cut")
        return self._server.command(*words)

    async def read(self, after: Mapping[bytes, bytes], block_s: float, count: int = 256) -> Mapping[bytes, list[Entry]]:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + block_s
        while True:
            await asyncio.sleep(self._latency_s)
            if self.down or self.deaf:
                raise RedisTrouble(Trouble.DOWN, "cut")
            if (found := self._server.read(after, count)) or loop.time() >= until_s:
                return found
            future = loop.create_future()
            self._server.waiting.add(future)
            await asyncio.wait([future], timeout=until_s - loop.time())
            self._server.waiting.discard(future)
