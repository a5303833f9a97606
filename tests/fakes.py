"""Stand-ins for the tests: an upstream without sockets, a fleet that is up, a decider over it, a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from heapq import heappop
from itertools import count
from random import Random
from typing import Any
from unittest.mock import patch

import orjson

from engines.base import Attempt
from engines.errors import UpstreamError
from engines.fleet import Fleet
from engines.sglang_wire import RID_CHARS
from engines.timing import TINY
from engines.types import (
    CacheFormat,
    EngineFacts,
    EngineId,
    EngineLoad,
    EngineSpec,
    EngineView,
    FailureKind,
    Health,
    Role,
)
from engines.upstream import Reply
from gateway import app
from gateway.candidates import BLOCK_BYTES
from gateway.config import Config, FleetConfig, OwnershipStoreConfig, RoutingConfig
from gateway.context import Gateway
from gateway.decider import Decider
from gateway.learned import Learned
from gateway.owners import Owners
from routing.index import PrefixIndex
from routing.ownership_memory import MemoryOwnership
from routing.policies import make_policy
from routing.queueing import QueueLimits, WaitingQueue
from routing.types import RequestView

FACTS = EngineFacts(
    model="tiny",
    weight_version="default",
    cache_format=CacheFormat(1, "auto", "early", "mooncake"),
    max_total_tokens=10_000,
    context_tokens=8_000,
    chunk_tokens=2048,
    dp_size=1,
    boot_fingerprint="boot",
)
DONE = b"data: [DONE]\n\n"
RID = "ab" * (RID_CHARS // 2)


# ---- the time --------------------------------------------------------------------------------------------------------


class TimelessLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when nothing else is to do: deadlines pass exactly, and at once."""

    _now_s = 1000.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            self._timer_cancelled_count -= 1
            heappop(self._scheduled)._scheduled = False
        if not self._ready:
            assert self._scheduled, "nothing will ever happen again"
            self._now_s = max(self._now_s, self._scheduled[0].when())
        super()._run_once()


def timeless(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a TimelessLoop."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=TimelessLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def now_s() -> float:
    return asyncio.get_running_loop().time()


# ---- the network -----------------------------------------------------------------------------------------------------


class FakeExchange:
    """An answer that a test writes piece by piece: `send`, then `end` or `break_off`."""

    def __init__(self, status: int = 200, *sent: bytes, whole: bool = False) -> None:
        self.status = status
        self.headers: Mapping[str, str] = {"content-type": "text/event-stream"}
        self.closed = False
        self.taken = 0
        self._pieces: asyncio.Queue[bytes | UpstreamError | None] = asyncio.Queue()
        self.send(*sent)
        if whole:
            self.end()

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._pieces.put_nowait(piece)

    def end(self) -> None:
        self._pieces.put_nowait(None)

    def break_off(self, kind: FailureKind = FailureKind.RESET) -> None:
        self._pieces.put_nowait(UpstreamError(kind, "connection lost"))

    async def chunks(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, UpstreamError):
                raise piece
            self.taken += 1
            yield piece

    async def read(self, limit_bytes: int) -> bytes:
        return b"".join([piece async for piece in self.chunks()])

    def close(self) -> None:
        self.closed = True


Answer = FakeExchange | UpstreamError
Call = tuple[str, str, bytes | None, Mapping[str, str]]


class FakeUpstream:
    """Answers every generation call by `answer(url, body)`, and every probe as a healthy SGLang server would."""

    def __init__(self, answer: Callable[[str, bytes], Answer] = lambda url, body: FakeExchange()) -> None:
        self.answer = answer
        self.opened: list[Call] = []
        self.fetched: list[Call] = []
        self.aborted: Callable[[str, str], None] = lambda url, rid: None
        self.down: set[str] = set()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def open(
        self, method: str, url: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> FakeExchange:
        self.opened.append((method, url, body, headers or {}))
        answer = self.answer(url, body or b"")
        if isinstance(answer, UpstreamError):
            raise answer
        return answer

    async def fetch(
        self, method: str, url: str, *, timeout_s: float, body: bytes | None = None, headers: Any = None, **_: Any
    ) -> Reply:
        self.fetched.append((method, url, body, headers or {}))
        if any(url.startswith(base) for base in self.down):
            raise UpstreamError(FailureKind.CONNECT, f"{url}: refused", definite=True)
        if url.endswith("/abort_request"):
            self.aborted(url, orjson.loads(body or b"")["rid"])
            return Reply(200, {}, b"")
        return Reply(200, {}, orjson.dumps(probe_answer(url)))


def probe_answer(url: str) -> dict[str, Any]:
    """What a healthy server answers to a probe; servers whose URL holds `http://p` are prefills."""
    if "prefill_dp_rank=-1" in url:
        return {"dp_size": 1}
    if "/route" in url:
        return {"rank_ip": "10.0.0.1", "rank_port": 7}
    if url.endswith("/server_info"):
        return server_info(disaggregation_mode="prefill" if url.startswith("http://p") else "decode")
    if url.endswith("/model_info"):
        return {"served_model_name": "tiny", "weight_version": "default"}
    if url.endswith("/v1/loads"):
        return {"loads": [{"timestamp": 1.0}]}
    return {}


def server_info(**changes: Any) -> dict[str, Any]:
    base = {
        "disaggregation_mode": "prefill",
        "page_size": 1,
        "max_total_num_tokens": 10_000,
        "max_req_input_len": 7_994,
        "chunked_prefill_size": 2048,
        "startup_time": {"load": 1.25},
        "random_seed": 7,
        "launch_command": "sglang serve",
        "disaggregation_transfer_backend": "mooncake",
    }
    return {**base, **changes}


# ---- the fleet -------------------------------------------------------------------------------------------------------


def spec(name: str) -> EngineSpec:
    """A prefill when `name` begins with p, else a decode."""
    url = f"http://{name}"
    if name.startswith("p"):
        return EngineSpec(EngineId(url), url, Role.PREFILL, "10.0.0.1", 8998)
    return EngineSpec(EngineId(url), url, Role.DECODE)


def view(name: str, load: EngineLoad | None = None, **changes: Any) -> EngineView:
    return EngineView(spec(name), Health.READY, 1, replace(FACTS, **changes), load)


def up(*names: str, **changes: Any) -> Fleet:
    """A fleet of servers that are ready; `changes` are to their facts."""
    fleet = Fleet([spec(name) for name in names])
    for name in names:
        fleet.set_facts(EngineId(f"http://{name}"), replace(FACTS, **changes))
        fleet.set_health(EngineId(f"http://{name}"), Health.READY)
    return fleet


def attempt(path: str = "/v1/chat/completions", *, stream: bool = True, rid: str = RID, **body: Any) -> Attempt:
    return Attempt(rid, 77, view("p0"), view("d0"), path, stream, {"model": "tiny", "stream": stream, **body})


# ---- the decider -----------------------------------------------------------------------------------------------------


def rids() -> Iterator[str]:
    return (f"{number:0{RID_CHARS}x}" for number in count(1))


def decider(
    fleet: Fleet,
    *,
    limits: QueueLimits | None = None,
    is_stale: Callable[[EngineId], bool] = lambda engine_id: False,
) -> Decider:
    names = rids()
    learned = Learned(TINY)
    return Decider(
        fleet,
        make_policy(),
        Owners(PrefixIndex(), MemoryOwnership(), lambda model: BLOCK_BYTES / learned.bytes_per_token(model), now_s),
        learned,
        WaitingQueue(limits),
        Random(7),
        new_rid=lambda: next(names),
        is_stale=is_stale,
    )


def gateway(upstream: FakeUpstream, *names: str, **sections: Any) -> Gateway:
    """A whole gateway over `upstream`, as `app.py` builds it, with nothing started. Must run on a loop."""
    specs = [spec(name) for name in names or ("p0", "p1", "d0", "d1")]
    fleet = FleetConfig(
        tuple(each for each in specs if each.role is Role.PREFILL),
        tuple(each for each in specs if each.role is Role.DECODE),
    )
    routing, ownership = RoutingConfig(seed=1, profile=TINY), OwnershipStoreConfig("memory")
    config = Config(fleet=fleet, **{"routing": routing, "ownership": ownership, **sections})
    with patch("gateway.app.Upstream", lambda: upstream):
        return app.build(config)


async def probed(gw: Gateway) -> Gateway:
    """`gw` after one look at every server."""
    for each in gw.fleet.views():
        await gw.monitor.probe_now(each.engine_id)
    return gw


_serial = count()


def request(**changes: Any) -> RequestView:
    """A request that arrives now. Must run on a loop."""
    now_s = asyncio.get_running_loop().time()
    base: dict[str, Any] = {
        "request_id": f"r{next(_serial)}",
        "model": "tiny",
        "prompt_tokens": 1000,
        "blocks": (),
        "block_tokens": 64.0,
        "expected_output_tokens": 100,
        "max_output_tokens": 200,
        "arrival_s": now_s,
        "deadline_s": now_s + 10.0,
        "body_bytes": 4000,
    }
    return RequestView(**{**base, **changes})


# ---- the client ------------------------------------------------------------------------------------------------------


class FakeClient:
    """Remembers what it was sent, call by call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    async def begin(self, status: int, headers: Mapping[str, str], first: bytes) -> None:
        self.calls.append("begin")
        self.status, self.headers, self.body = status, dict(headers), first

    async def write(self, data: bytes) -> None:
        self.calls.append("write")
        self.body += data

    async def end(self) -> None:
        self.calls.append("end")

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.calls.append("whole")
        self.status, self.headers, self.body = status, dict(headers), body


# ---- what engines say ------------------------------------------------------------------------------------------------


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def chat_event(text: str | None, rid: str = RID, finish: str | None = None, **more: Any) -> bytes:
    """One chunk of a chat; a text of None is the role chunk."""
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event({"id": rid, "object": "chat.completion.chunk", "created": 1700000000, "choices": [choice], **more})


def usage_event(prompt: int = 10, completion: int = 3, rid: str = RID, cached: int | None = None) -> bytes:
    return event({"id": rid, "created": 1700000000, "choices": [], "usage": usage(prompt, completion, cached)})


def usage(prompt: int = 10, completion: int = 3, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    total = prompt + completion
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "prompt_tokens_details": details,
    }


def chat_answer(text: str = "hi", rid: str = RID, finish: str = "stop", **counts: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return orjson.dumps({"id": rid, "created": 1700000000, "choices": [choice], "usage": usage(**counts)})
