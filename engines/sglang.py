"""SGLang servers: how to look at one, and how a request runs on a prefill and a decode of them.

A shell over `upstream.py`; what goes over the wire and what an answer means is decided in `sglang_wire.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import orjson

from engines import sglang_facts as about
from engines import sglang_merge as merge
from engines import sglang_wire as wire
from engines.base import Attempt, Call, Fault, Merge, Order, Probe
from engines.errors import UpstreamError
from engines.sglang_versions import row_of
from engines.sse_frames import FrameDecoder, data_of
from engines.types import EngineFacts, EngineId, EngineLoad, EngineSpec, EngineView, FailureKind, Leg, Role
from engines.upstream import Upstream

_log = logging.getLogger("pdgate.join")

_HEALTH_S = 25.0
"""SGLang gives its own `/health` 20 s (`HEALTH_CHECK_TIMEOUT`)."""
_STOOD_STILL_S = 0.1
"""A timeout that fires so much too late tells of this process, not of the server that was asked."""
_DEFAULT_BOOTSTRAP_PORT = 8998
"""SGLang's default of --disaggregation-bootstrap-port."""


class SglangStrategy:
    """Both legs at once, with the same rid and room. Pure.

    The prefill's answer is a completion signal, and the only source of prompt logprobs.
    """

    order = Order.PARALLEL

    def __init__(self, api_key: str | None = None) -> None:
        self._headers = engine_headers(api_key)

    def prefill_call(self, attempt: Attempt) -> Call:
        return self._call(attempt.prefill, attempt, attempt.prefill_rank)

    def decode_call(self, attempt: Attempt, prefill_answer: bytes | None) -> Call:
        return self._call(attempt.decode, attempt, attempt.decode_rank)

    def _call(self, view: EngineView, attempt: Attempt, rank: int | None) -> Call:
        spec = attempt.prefill.spec
        if spec.bootstrap_host is None:
            raise ValueError(f"prefill {spec.engine_id} has no bootstrap host")
        bootstrap = wire.Bootstrap(spec.bootstrap_host, spec.bootstrap_port or _DEFAULT_BOOTSTRAP_PORT, attempt.room)
        want_usage = attempt.stream and attempt.path != "/generate"
        ranks = wire.rank_fields(rank, attempt.prefill_rank)
        body = wire.generation_body({**attempt.body, **ranks}, attempt.rid, bootstrap, want_usage=want_usage)
        return Call(view.spec.url + attempt.path, body, {**attempt.headers, **self._headers})

    def abort_call(self, view: EngineView, rid: str) -> Call:
        return Call(view.spec.url + "/abort_request", wire.abort_body(rid), self._headers)

    def judge(self, leg: Leg, status: int, body: bytes) -> Fault | None:
        found = wire.judge_answer(status, body)
        return None if found is None else Fault(*found)

    def needs_prefill_answer(self, attempt: Attempt) -> bool:
        return merge.needs_prefill_answer(attempt.path, attempt.body)

    def merge(self, attempt: Attempt, prefill_answer: bytes) -> Merge | Fault:
        return merge.merge_of(attempt.path, prefill_answer)

    def cached_tokens(self, prefill_answer: bytes) -> int | None:
        if not prefill_answer.startswith(b"data:"):
            return wire.cached_tokens(prefill_answer)
        found = None
        for frame in FrameDecoder().feed(prefill_answer):
            found = wire.cached_tokens(data_of(frame)) if found is None else found
        return found

    def frame_fault(self, frame: bytes) -> Fault:
        message, code, aborted = wire.stream_error(data_of(frame))
        return Fault(FailureKind.ABORTED if aborted else FailureKind.STREAM_ERROR, message, code)


class SglangEngine:
    """Looks at single SGLang servers. Nothing raises but `post`: what went wrong is in the answer."""

    def __init__(self, upstream: Upstream, api_key: str | None = None) -> None:
        self._upstream = upstream
        self._headers = engine_headers(api_key)
        self._told: dict[EngineId, str] = {}
        """The boot that was last told of, by its fingerprint."""

    async def probe(self, spec: EngineSpec, timeout_s: float) -> Probe:
        """`/ready`, for a prefill its bootstrap server's `/route`, then server and model info.

        The last two need a round trip through the scheduler, which a busy server may not give in time: then it is
        ready all the same, and its facts stay as they were. What a new boot is, and what an operator could switch on,
        is logged once. A time that passed while this process stood still says nothing of the server: it is asked again.
        """
        loop = asyncio.get_running_loop()
        due_s = loop.time() + timeout_s
        seen = await self._probe_once(spec, timeout_s)
        if seen.timed_out and not seen.reachable and loop.time() - due_s >= _STOOD_STILL_S:
            return await self._probe_once(spec, timeout_s)
        return seen

    async def _probe_once(self, spec: EngineSpec, timeout_s: float) -> Probe:
        try:
            async with asyncio.timeout(timeout_s):
                status = await self._status(spec.url + "/ready", timeout_s)
                if status != 200:
                    return Probe(spec.engine_id, True, False, await self._why_not_ready(spec, status, timeout_s))
                route, ranks = await self._bootstrap(spec, timeout_s)
        except UpstreamError as error:
            return Probe(spec.engine_id, False, False, error.message, timed_out=error.kind is FailureKind.TIMEOUT)
        except TimeoutError:
            return Probe(spec.engine_id, False, False, f"no answer within {timeout_s:g} s", timed_out=True)
        except (ValueError, TypeError) as error:
            return Probe(spec.engine_id, True, False, str(error))
        try:
            return Probe(spec.engine_id, True, True, facts=await self._facts(spec, route, ranks, timeout_s))
        except (ValueError, TypeError) as error:
            return Probe(spec.engine_id, True, False, str(error))
        except UpstreamError as error:
            timed_out = error.kind is FailureKind.TIMEOUT
            return Probe(spec.engine_id, timed_out, timed_out, error.message, timed_out=timed_out)

    async def load(self, spec: EngineSpec, timeout_s: float) -> EngineLoad | None:
        try:
            return about.load_of(await self._json(spec.url + "/v1/loads", timeout_s))
        except (UpstreamError, ValueError, TypeError):
            return None

    async def rouse(self, spec: EngineSpec) -> None:
        """`/health`: one whose PD warm-up failed answers 503 to `/ready` until that has run a token."""
        try:
            await self._upstream.fetch("GET", spec.url + "/health", headers=self._headers, timeout_s=_HEALTH_S)
        except UpstreamError:
            return

    async def post(self, view: EngineView, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        reply = await self._upstream.fetch(
            "POST", view.spec.url + path, body=body, headers=self._headers, timeout_s=timeout_s
        )
        return reply.status, reply.body

    async def _why_not_ready(self, spec: EngineSpec, status: int, timeout_s: float) -> str:
        """A server that knows no `/ready` is asked for its version, by a name that the oldest ones know too."""
        if status == 404:
            url = spec.url + "/get_server_info"
            reply = await self._upstream.fetch("GET", url, headers=self._headers, timeout_s=timeout_s)
            if reply.status == 200:
                row_of(str(_object(reply.body, url).get("version") or ""))
        return f"/ready answers {status}"

    async def _bootstrap(self, spec: EngineSpec, timeout_s: float) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
        """What a prefill's bootstrap server tells decodes: of the prefill, and the address of each of its ranks.

        Raises ValueError while it is not ready. Other servers have none.
        """
        if spec.role is not Role.PREFILL:
            return None, ()
        base = f"http://{spec.bootstrap_host}:{spec.bootstrap_port or _DEFAULT_BOOTSTRAP_PORT}"
        try:
            reply = await self._upstream.fetch("GET", base + about.ROUTE_PROBE, timeout_s=timeout_s)
        except UpstreamError as error:
            error.message = f"its bootstrap server, {base} by --prefill URL PORT, does not answer: {error.message}"
            raise
        if reply.status != 200:
            raise ValueError(f"the bootstrap server {base} answers {reply.status} to /route")
        route = _object(reply.body, "/route")
        ranks = []
        for dp_rank in range(int(route.get("dp_size") or 1)):
            path = f"/route?prefill_dp_rank={dp_rank}&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
            rank = await self._upstream.fetch("GET", base + path, timeout_s=timeout_s)
            if rank.status != 200:
                raise ValueError(f"the bootstrap server {base} does not know DP rank {dp_rank} ({rank.status})")
            address = _object(rank.body, "/route")
            ranks.append(f"{address.get('rank_ip')}:{address.get('rank_port')}")
        return route, tuple(ranks)

    async def _facts(
        self, spec: EngineSpec, route: Mapping[str, Any] | None, ranks: tuple[str, ...], timeout_s: float
    ) -> EngineFacts:
        server_info = await self._json(spec.url + "/server_info", timeout_s)
        model_info = await self._json(spec.url + "/model_info", timeout_s)
        role = about.role_of(server_info, model_info)
        if role != spec.role.value:
            raise ValueError(f"it serves as {role}, not as {spec.role.value} (--disaggregation-mode, /pd_role_switch)")
        facts = about.facts_of(server_info, model_info, ranks, route)
        if self._told.get(spec.engine_id) != facts.boot_fingerprint:
            self._told[spec.engine_id] = facts.boot_fingerprint
            self._tell(spec, facts)
        return facts

    def _tell(self, spec: EngineSpec, facts: EngineFacts) -> None:
        is_what, advice = about.join_lines(spec.role, facts)
        level = logging.WARNING if about.needs_attention(facts) else logging.INFO
        _log.log(level, "%s %s joins: %s", spec.role, spec.engine_id, "; ".join((is_what, *advice)))

    async def _status(self, url: str, timeout_s: float) -> int:
        return (await self._upstream.fetch("GET", url, headers=self._headers, timeout_s=timeout_s)).status

    async def _json(self, url: str, timeout_s: float) -> Mapping[str, Any]:
        reply = await self._upstream.fetch("GET", url, headers=self._headers, timeout_s=timeout_s)
        if reply.status != 200:
            raise ValueError(f"{url} answers {reply.status}")
        return _object(reply.body, url)


def engine_headers(api_key: str | None) -> dict[str, str]:
    """The headers of every call to a server."""
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return headers


def _object(body: bytes, source: str) -> Mapping[str, Any]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{source} answers no JSON") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{source} answers no JSON object")
    return parsed
