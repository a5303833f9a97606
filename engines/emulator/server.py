"""The HTTP face of one emulated server: SGLang's API routes over an `Engine`. A shell.

Requests are checked, registered after a small delay (an abort that comes earlier is lost), and answered whole or as a
stream. What only reports lies in `info`, what only tests use in `admin`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from engines.emulator import wire
from engines.emulator.core import End, EndKind, Job
from engines.emulator.draw import MODEL_DEFAULTS
from engines.emulator.engine import Engine
from engines.emulator.faults import STREAM_FAULTS, Fault
from engines.emulator.format_generate import GenerateStream, generate_object
from engines.emulator.formats import Answering, ChatStream, CompletionStream, StreamFormat, chat_body, completion_body
from engines.emulator.live import Live
from engines.emulator.output import Output, StopRule
from engines.emulator.parse import Api, BadRequest, Item, Limits, Request, parse_request
from engines.emulator.rank import crash
from engines.emulator.replies import StreamReply, WholeReply
from engines.emulator.tokens import contains
from engines.types import Role

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GenerationServer:
    """Answers the generation routes of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        options = engine.options
        defaults = MODEL_DEFAULTS if options.sampling_defaults == "model" else {}
        self._limits = Limits(options.context_length, options.max_total_tokens, defaults)

    def add_routes(self, add: Callable[[str, str, Handler], None]) -> None:
        """Register the routes through `add(method, path, handler)`."""
        for api in Api:
            add("POST", api.value, self._handler(api))
            if api is Api.GENERATE:
                add("PUT", api.value, self._handler(api))
        add("POST", "/abort_request", self._abort_request)

    def _handler(self, api: Api) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._generate(api, request)

        return handle

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await read_json("/abort_request", request)
        self._engine.abort(str(body.get("rid") or ""), bool(body.get("abort_all")))
        return web.Response(headers=wire.PLAIN_HEADERS)

    async def _generate(self, api: Api, http: web.Request) -> web.StreamResponse:
        engine = self._engine
        received_s = engine.now_s
        fault = engine.faults.take("status", "drop_connection", *STREAM_FAULTS)
        body = await read_json(api.value, http)
        try:
            request = parse_request(api, body, self._limits)
        except BadRequest as error:
            if api is Api.GENERATE and body.get("stream") is True and isinstance(error.body.get("error"), dict):
                return await _refused_in_stream(http, error)
            raise
        answering = Answering(
            request,
            engine.options.role,
            engine.wall_s(received_s),
            engine.options.enable_cache_report,
            engine.wall_offset_s,
            engine.options.incremental_streaming_output,
        )
        if fault is not None and fault.name == "drop_connection":
            assert http.transport is not None
            http.transport.abort()
        if fault is not None and fault.name == "status":
            return json_response(wire.internal_error("Injected by /emulator/fault", fault.status), fault.status)
        rids = request.rids or [uuid.uuid4().hex for _ in request.items]
        fault = fault or next(filter(None, (engine.faults.take(*STREAM_FAULTS, rid=rid) for rid in rids)), None)
        await asyncio.sleep(engine.timeouts.register_s)
        if request.stream:
            return await self._stream(http, answering, rids, received_s, fault)
        return await self._whole(http, answering, rids, received_s)

    async def _whole(
        self, http: web.Request, answering: Answering, rids: list[str], received_s: float
    ) -> web.StreamResponse:
        request = answering.request
        reply = WholeReply(len(request.items))
        lives = [
            self._live(item, rid, at, reply, received_s)
            for at, (item, rid) in enumerate(zip(request.items, rids, strict=True))
        ]
        self._submit(request, lives)
        try:
            await reply.done
        except asyncio.CancelledError:
            self._abort_at_next_poll(lives)
            raise
        for live in lives:
            if live.end is not None and live.end.status is not None:
                return json_response(_failure_body(request.api, live), live.end.status)
        if request.api is Api.CHAT:
            return json_response(chat_body(answering, lives))
        if request.api is Api.COMPLETIONS:
            return json_response(completion_body(answering, lives))
        objects = [generate_object(answering, live, live.end) for live in lives]
        return json_response(objects if request.batch else objects[0])

    async def _stream(
        self, http: web.Request, answering: Answering, rids: list[str], received_s: float, fault: Fault | None
    ) -> web.StreamResponse:
        request = answering.request
        lives: list[Live] = []
        form, holds = _stream_format(answering, rids[0]), self._engine.holds
        reply = StreamReply(form, lives, fault, holds, lambda: self._abort(lives))
        reply.expect(len(request.items))
        lives += [
            self._live(item, rid, at, reply, received_s)
            for at, (item, rid) in enumerate(zip(request.items, rids, strict=True))
        ]
        response = web.StreamResponse(headers=wire.SSE_HEADERS)
        response.enable_chunked_encoding()
        try:
            self._submit(request, lives)
        except BadRequest as error:
            if request.api is not Api.GENERATE:
                raise
            return await _refused_in_stream(http, error)
        try:
            if request.api is not Api.GENERATE:
                await reply.first
            await self._relay(http, response, reply)
        except asyncio.CancelledError:
            reply.detach()
            self._abort(lives)
            raise
        finally:
            # SGLang's clean-up after every stream, which also hits a new request with the same rid.
            self._engine.loop.call_later(self._engine.timeouts.second_abort_s, self._abort, lives)
        return response

    async def _relay(self, http: web.Request, response: web.StreamResponse, reply: StreamReply) -> None:
        """Write the status line, let the step loop write the events, and end the body."""
        writer = await response.prepare(http)
        assert writer is not None
        writer.send_headers()
        transport = http.transport
        if transport is None:
            raise asyncio.CancelledError
        reply.attach(transport)
        await asyncio.wait([reply.done])
        if reply.done.cancelled():
            transport.close()

    def _live(self, item: Item, rid: str, index: int, reply: WholeReply | StreamReply, received_s: float) -> Live:
        rule = item.sampling.rule
        if self._engine.options.role is Role.PREFILL:
            rule = StopRule(max_new_tokens=1, ignore_eos=rule.ignore_eos, min_new_tokens=rule.min_new_tokens)
        output = Output(rule)
        options = self._engine.options
        port = item.bootstrap_port if item.bootstrap_port is not None else options.bootstrap_port
        peer = f"{item.bootstrap_host}:{port}" if item.bootstrap_host is not None else ""
        job = Job(
            rid,
            item.room,
            item.prompt,
            item.prompt_tokens,
            rule.max_new_tokens,
            output,
            peer,
            item.namespace,
            item.disagg_prefill_dp_rank,
            item.reusable_tokens,
        )
        return Live(rid, item, index, job, output, reply, received_s)

    def _submit(self, request: Request, lives: list[Live]) -> None:
        """Register and schedule all choices of a request; BadRequest if any is refused."""
        engine, api, dp_size = self._engine, request.api, self._engine.options.dp_size
        for fault in engine.faults.standing("poison"):
            if any(contains(live.item.prompt, fault.word) for live in lives):
                crash(f"a prompt with {fault.word!r} in it")
        for live in lives:
            asked = live.item.routed_dp_rank
            if asked is not None and not 0 <= asked < dp_size:
                raise BadRequest(wire.value_error(api.value, wire.rank_out_of_range(asked, dp_size)))
            if live.rid in engine.live:
                raise BadRequest(wire.value_error(api.value, wire.duplicate_rid(live.rid)))
            if engine.options.role is not Role.PLAIN and live.item.room is None:
                if engine.options.role is Role.PREFILL and dp_size > 1 and asked is None:
                    crash("req.bootstrap_room should not be None. Do not send requests directly")
                continue
            if live.job.prompt_tokens > engine.options.max_total_tokens:
                text = wire.exceeds_pool(live.rid, live.job.prompt_tokens, engine.options.max_total_tokens)
                raise BadRequest(wire.value_error(api.value, text))
        for live in lives:
            if engine.options.role is not Role.PLAIN and live.item.room is None:
                self._refuse(live, wire.missing_room(live.rid))
                continue
            if engine.options.role is Role.DECODE and not live.job.peer:
                crash(f"room {live.job.room} without a bootstrap_host")
            if live.item.sampling.prompt_logprobs_from > live.item.prompt_tokens:
                start = live.item.sampling.prompt_logprobs_from
                self._refuse(live, wire.start_beyond_prompt(start, live.item.prompt_tokens), "BadRequestError")
            else:
                engine.submit(live)

    def _refuse(self, live: Live, message: str, err_type: str | None = None) -> None:
        """What only SGLang's scheduler checks: the request ends before it has begun."""
        live.finished_s = live.dispatched_s = self._engine.now_s
        live.end = End(EndKind.FAILED, message, 400, err_type)
        live.sink.ended(live, live.end)

    def _abort(self, lives: list[Live]) -> None:
        for live in lives:
            self._engine.abort(live.rid)

    def _abort_at_next_poll(self, lives: list[Live]) -> None:
        """A whole answer's client is gone: SGLang notices at the next of its polls."""
        poll_s = self._engine.timeouts.disconnect_poll_s
        waited_s = self._engine.now_s - lives[0].received_s
        self._engine.loop.call_later(poll_s - waited_s % poll_s, self._abort, lives)


def _failure_body(api: Api, live: Live) -> dict[str, Any]:
    assert live.end is not None
    if live.end.status == 400:
        return wire.value_error(api.value, live.end.message)
    return wire.internal_error(live.end.message, live.end.status or 500)


def _stream_format(answering: Answering, rid: str) -> StreamFormat:
    if answering.request.api is Api.CHAT:
        return ChatStream(answering, rid)
    if answering.request.api is Api.COMPLETIONS:
        return CompletionStream(answering, rid)
    return GenerateStream(answering)


async def _refused_in_stream(http: web.Request, error: BadRequest) -> web.StreamResponse:
    """What SGLang checks after its own `/generate` stream has begun: 200, and one event with the error."""
    response = web.StreamResponse(headers=wire.SSE_HEADERS)
    response.enable_chunked_encoding()
    await response.prepare(http)
    await response.write(wire.generate_stream_error(str(error.body["error"]["message"])) + wire.DONE)
    return response


def json_response(body: Any, status: int = 200) -> web.Response:
    """A JSON reply with SGLang's headers."""
    return web.Response(body=orjson.dumps(body), status=status, headers=wire.JSON_HEADERS)


async def read_json(route: str, request: web.Request) -> dict[str, Any]:
    """The request's JSON object; BadRequest in FastAPI's words for anything else."""
    data = await request.read()
    if not data:
        raise BadRequest(wire.no_body(route))
    if "Content-Type" in request.headers and request.content_type != "application/json":
        raise BadRequest(wire.not_json(route, data))
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(wire.bad_json(route, error)) from error
    if not isinstance(body, dict):
        raise BadRequest(wire.union_type_error(route, "body", "dict", body))
    return body
