"""One case on one side: requests sent, what came back kept as JSON. A shell: HTTP only, it judges nothing."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import orjson

from engines.server_process import ServerProcess
from engines.tasks import spawn
from engines.types import Role

Make = Callable[[Role, Sequence[str], int | None], ServerProcess]
"""Makes a server of a role with further flags; the port is that of the bootstrap server it belongs to."""

GIVE_UP_S = 25.0
SETTLED_S = 12.0
_JSON = {"Content-Type": "application/json"}
_KEPT_HEADERS = ("content-type", "connection", "transfer-encoding", "content-length", "allow", "server")
_rooms = itertools.count(secrets.randbits(40) << 10, 100)


class Call:
    """One request on its way; `reply` is what has come of it so far."""

    def __init__(self, stage: Stage, leg: str, method: str, url: str, body: bytes, headers: dict[str, str]) -> None:
        self.leg = leg
        self.reply: dict[str, Any] = {"status": None, "headers": {}, "body": "", "end": "silent"}
        self.first = asyncio.Event()
        """Set with the first byte of the body."""
        self._stage = stage
        self._data = bytearray()
        self._request = (method, url, body, headers)
        self._started_s = asyncio.get_running_loop().time()
        self._task = spawn(self._run(), f"conformance-{leg}")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        method, url, body, headers = self._request
        try:
            async with (
                asyncio.timeout(self._stage.give_up_s),
                self._stage.http.request(method, url, data=body or None, headers=headers) as answer,
            ):
                kept = {name.lower(): value for name, value in answer.headers.items()}
                self.reply["headers"] = {name: value for name, value in kept.items() if name in _KEPT_HEADERS}
                self.reply["status"] = answer.status
                async for chunk in answer.content.iter_any():
                    self._data += chunk
                    self.first.set()
                self.reply["end"] = "whole"
        except TimeoutError:
            pass
        except aiohttp.ClientConnectorError:
            self.reply["end"] = "refused"
        except (aiohttp.ClientError, OSError):
            self.reply["end"] = "cut"
        except asyncio.CancelledError:
            self.reply["end"] = "dropped"
            raise
        finally:
            self.reply["elapsed_s"] = round(loop.time() - self._started_s, 3)
            self.reply["body"] = self._data.decode("utf-8", "replace")
            self._stage.ended.append((self.leg, loop.time()))
            self.first.set()

    async def done(self) -> Call:
        """Wait for the end."""
        await asyncio.wait([self._task])
        return self

    def ended(self) -> bool:
        return self._task.done()

    def clock_from_now(self) -> None:
        """Count its time from here."""
        self._started_s = asyncio.get_running_loop().time()

    def untimed(self) -> None:
        """How long it took depends on what else happened: it is not compared."""
        self.reply["untimed"] = True

    async def drop(self) -> None:
        """Close the connection."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def json(self) -> Any:
        return orjson.loads(self.reply["body"])

    def tokens(self) -> int:
        """How many output tokens have come of a `/generate` stream."""
        events = [part for part in bytes(self._data).split(b"\n\n") if part.startswith(b"data: {")]
        return len(orjson.loads(events[-1][6:]).get("output_ids", ())) if events else 0


class Stage:
    """Where a case acts: a pair of servers, a client, and the record of what happened.

    `names` holds the texts that differ between two runs (rooms, ports) and what they are called in a comparison.
    """

    def __init__(self, prefill: ServerProcess, decode: ServerProcess, http: aiohttp.ClientSession, make: Make) -> None:
        self.prefill = prefill
        self.decode = decode
        self.http = http
        self._make = make
        self._spare: ServerProcess | None = None
        self.give_up_s = GIVE_UP_S
        self.rid = uuid.uuid4().hex
        self.calls: dict[str, Call] = {}
        self.facts: dict[str, Any] = {}
        self.ended: list[tuple[str, float]] = []
        self.order: list[str] = []
        self.names = {
            str(prefill.port): "PREFILL_PORT",
            str(prefill.bootstrap_port): "BOOTSTRAP_PORT",
            str(decode.port): "DECODE_PORT",
        }

    def room(self) -> int:
        """A room never used before; it and the next few have names."""
        first = next(_rooms)
        number = sum(name.startswith("ROOM") for name in self.names.values()) // 8 + 1
        self.names |= {str(first + at): f"ROOM{number}+{at}" for at in range(8)}
        return first

    def with_room(self, body: dict[str, Any], room: Any = None) -> dict[str, Any]:
        """`body` with the pair's bootstrap fields; those it has already stay."""
        fields = {"bootstrap_host": self.prefill.host, "bootstrap_port": self.prefill.bootstrap_port}
        return {**fields, "bootstrap_room": self.room() if room is None else room, **body}

    def ask(
        self,
        leg: str,
        path: str,
        body: Any = b"",
        *,
        method: str = "POST",
        label: str = "",
        headers: dict[str, str] | None = None,
    ) -> Call:
        """Send one request to `leg` (prefill, decode, bootstrap) and go on; its reply is kept under `label`."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        ports = {"prefill": self.prefill.port, "decode": self.decode.port, "bootstrap": self.prefill.bootstrap_port}
        url = f"http://{self.prefill.host}:{ports[leg]}{path}"
        call = Call(self, label or leg, method, url, data, _JSON if headers is None else headers)
        assert (label or leg) not in self.calls, f"two calls named {label or leg}"
        self.calls[label or leg] = call
        return call

    def both(self, path: str, body: dict[str, Any], label: str = "") -> tuple[Call, Call]:
        """Send the same request to both legs and go on."""
        tail = f"_{label}" if label else ""
        return (
            self.ask("prefill", path, body, label="prefill" + tail),
            self.ask("decode", path, body, label="decode" + tail),
        )

    async def pair(self, path: str, body: dict[str, Any], label: str = "") -> tuple[Call, Call]:
        """Send the same request to both legs, in a fresh room unless it has one, and wait for both."""
        prefill, decode = self.both(path, self.with_room(body), label)
        await asyncio.gather(prefill.done(), decode.done())
        return prefill, decode

    async def quietly(self, leg: str, path: str, body: Any = b"", method: str = "POST") -> tuple[int, bytes]:
        """A request that is no part of the observation: status and body."""
        port = self.prefill.port if leg == "prefill" else self.decode.port
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        url = f"http://{self.prefill.host}:{port}{path}"
        async with self.http.request(method, url, data=data or None, headers=_JSON) as answer:
            return answer.status, await answer.read()

    async def abort(self, leg: str, rid: str, label: str = "") -> None:
        """Abort `rid` on one leg."""
        await self.ask(leg, "/abort_request", {"rid": rid}, label=label or f"abort_{leg}").done()

    async def load(self, leg: str) -> dict[str, Any]:
        """The leg's `/v1/loads` entry."""
        loads: dict[str, Any] = orjson.loads((await self.quietly(leg, "/v1/loads", method="GET"))[1])["loads"][0]
        return loads

    async def settled(self, *legs: str) -> None:
        """Wait until the legs hold nothing, and keep as a fact whether they did in time."""
        for leg in legs or ("prefill", "decode"):

            async def idle(leg: str = leg) -> bool:
                load = await self.load(leg)
                return not (load["num_running_reqs"] or load["num_waiting_reqs"] or load["num_used_tokens"])

            self.facts[f"{leg} gives back its KV"] = await self.until(idle, SETTLED_S)

    async def until(self, condition: Callable[[], Awaitable[bool]], within_s: float) -> bool:
        """Poll until `condition` holds; whether it did in time."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while loop.time() < until_s:
            if await condition():
                return True
            await asyncio.sleep(0.1)
        return False

    async def waiting(self, leg: str, count: int = 1) -> bool:
        """Wait until `leg` has `count` requests in a queue or running."""

        async def there() -> bool:
            load = await self.load(leg)
            return int(load["num_waiting_reqs"] + load["num_running_reqs"]) >= count

        return await self.until(there, 6.0)

    def in_order(self) -> None:
        """Keep in which order the legs ended, ends that lie close together as one."""
        groups: list[list[str]] = []
        last_s = 0.0
        for leg, at_s in sorted(self.ended, key=lambda each: each[1]):
            if leg not in ("prefill", "decode"):
                continue
            if groups and at_s - last_s < 0.3:
                groups[-1].append(leg)
            else:
                groups.append([leg])
            last_s = at_s
        self.order = [" and ".join(sorted(group)) for group in groups]

    async def other_decode(self, *arguments: str) -> None:
        """Put a decode with further flags in the place of this one, for the rest of the case."""
        await self.decode.kill()
        self._spare = self.decode = self._make(Role.DECODE, arguments, self.prefill.bootstrap_port)
        self.names[str(self.decode.port)] = "DECODE_PORT"
        await self.decode.start()

    async def close(self) -> None:
        """End what the case started, and its open calls."""
        for call in self.calls.values():
            if not call.ended():
                await call.drop()
        if self._spare is not None:
            await self._spare.stop()

    async def observation(self) -> dict[str, Any]:
        """Everything that happened; calls still open are given up."""
        for call in self.calls.values():
            if not call.ended():
                await call.drop()
                call.reply["end"] = "silent"
        replies = {label: call.reply for label, call in self.calls.items()}
        return {"names": self.names, "replies": replies, "facts": self.facts, "order": self.order}
