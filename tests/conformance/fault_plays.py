"""Plays about failure: legs that never come, aborts and drops in each phase, frozen and killed servers."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from tests.conformance.plays import IDS, PATHS, SIX, Play, long
from tests.conformance.stage import Call, Stage


def _body(stage: Stage, path: str, tokens: int = 6, more: dict[str, Any] | None = None) -> dict[str, Any]:
    body = dict(PATHS[path])
    if path == "/generate":
        body["sampling_params"] = long(tokens)
    else:
        body["max_tokens"] = tokens
    return stage.with_room({**body, **(more or {})})


async def _running(stage: Stage, body: dict[str, Any], path: str = "/generate") -> tuple[Call, Call]:
    """Both legs of a request that decodes now."""
    prefill, decode = stage.both(path, body)
    await prefill.done()
    if body.get("stream"):
        await decode.first.wait()
    await stage.until(lambda: _decodes(stage), 5.0)
    return prefill, decode


async def _decodes(stage: Stage) -> bool:
    return bool((await stage.load("decode"))["num_running_reqs"])


def alone(leg: str, more: dict[str, Any] | None = None, path: str = "/generate") -> Play:
    """The other leg never comes: the time limit ends the request."""

    async def play(stage: Stage) -> None:
        await stage.ask(leg, path, _body(stage, path, more=more)).done()
        await stage.settled(leg)

    return play


def wrong_bootstrap(what: str) -> Play:
    """Nobody listens where the decode is sent."""

    async def play(stage: Stage) -> None:
        wrong: dict[str, Any] = {"bootstrap_port": 9} if what == "port" else {"bootstrap_host": "127.0.0.9"}
        await stage.ask("decode", "/generate", _body(stage, "/generate", more=wrong)).done()
        await stage.settled("decode")

    return play


async def prefill_without_host(stage: Stage) -> None:
    """A prefill needs no host; a decode dies of its absence."""
    body = stage.with_room(PATHS["/generate"])
    bare = {name: value for name, value in body.items() if name != "bootstrap_host"}
    prefill = stage.ask("prefill", "/generate", bare)
    await stage.ask("decode", "/generate", body).done()
    await prefill.done()


async def two_prompts(stage: Stage) -> None:
    """The legs get different prompts of one length: both answer 200, nobody notices."""
    body = stage.with_room(PATHS["/generate"])
    prefill = stage.ask("prefill", "/generate", body)
    await stage.ask("decode", "/generate", {**body, "input_ids": [each + 50 for each in IDS]}).done()
    await prefill.done()


async def duplicate_room(stage: Stage) -> None:
    """Two live requests in one room: not both decodes are answered."""
    body = _body(stage, "/generate")
    decodes = [stage.ask("decode", "/generate", {**body, "rid": f"twice-{at}"}, label=f"decode_{at}") for at in (1, 2)]
    await stage.waiting("decode", 2)
    prefills = [
        stage.ask("prefill", "/generate", {**body, "rid": f"twice-{at}"}, label=f"prefill_{at}") for at in (1, 2)
    ]
    for call in (*decodes, *prefills):
        await call.done()
    stage.facts["answered decodes"] = sum(call.reply["status"] == 200 for call in decodes)
    stage.facts["statuses of decodes"] = sorted(str(call.reply["status"]) for call in decodes)
    stage.facts["answered prefills"] = sum(call.reply["status"] == 200 for call in prefills)
    stage.calls.clear()
    await stage.settled()


async def duplicate_rid(stage: Stage) -> None:
    """A rid that is live is refused; afterwards it is free again."""
    rid = {"rid": "the-same-rid"}
    first = stage.ask("prefill", "/generate", _body(stage, "/generate", more=rid), label="first")
    await stage.waiting("prefill")
    await stage.ask("prefill", "/generate", _body(stage, "/generate", more=rid), label="second").done()
    stream = _body(stage, "/generate", more={**rid, "stream": True})
    await stage.ask("prefill", "/generate", stream, label="second_stream").done()
    chat = _body(stage, "/v1/chat/completions", more=rid)
    await stage.ask("prefill", "/v1/chat/completions", chat, label="chat").done()
    await stage.abort("prefill", "the-same-rid")
    await first.done()


def odd_room(room: int) -> Play:
    """A room that no gateway should use."""

    async def play(stage: Stage) -> None:
        stage.give_up_s = 4.0
        await stage.pair("/generate", stage.with_room({**PATHS["/generate"], "rid": stage.rid}, room))
        await stage.abort("decode", stage.rid)
        await stage.abort("prefill", stage.rid)

    return play


async def two_samples(stage: Stage) -> None:
    """n=2 in one room."""
    stage.give_up_s = 5.0
    body = _body(stage, "/generate")
    body["sampling_params"]["n"] = 2
    await stage.pair("/generate", body)
    await stage.quietly("decode", "/abort_request", {"abort_all": True})
    await stage.quietly("prefill", "/abort_request", {"abort_all": True})


async def many_top_logprobs(stage: Stage) -> None:
    """More top logprobs than the metadata row holds."""
    for call in await stage.pair("/generate", {**PATHS["/generate"], "return_logprob": True, "top_logprobs_num": 129}):
        call.untimed()
    await _survivors(stage)


def abort_alone(leg: str, more: dict[str, Any] | None = None, path: str = "/generate") -> Play:
    """Abort a request whose other leg never came."""

    async def play(stage: Stage) -> None:
        call = stage.ask(leg, path, _body(stage, path, more={"rid": stage.rid, **(more or {})}))
        await stage.waiting(leg)
        await asyncio.sleep(0.5)
        call.clock_from_now()
        await stage.abort(leg, stage.rid)
        await call.done()
        await stage.settled(leg)

    return play


async def abort_look_up(stage: Stage) -> None:
    """Abort a decode that still looks for its prefill."""
    body = _body(stage, "/generate", more={"rid": stage.rid, "bootstrap_port": 9})
    call = stage.ask("decode", "/generate", body)
    await stage.waiting("decode")
    await asyncio.sleep(1.2)
    await stage.abort("decode", stage.rid)
    await call.done()


def abort_running(more: dict[str, Any], path: str = "/generate") -> Play:
    """Abort a request that decodes: it ends as an answer cut short."""

    async def play(stage: Stage) -> None:
        _, decode = await _running(stage, _body(stage, path, 3000, {"rid": stage.rid, **more}), path)
        await stage.abort("decode", stage.rid)
        await stage.abort("prefill", stage.rid)
        await decode.done()
        decode.untimed()
        await stage.settled()

    return play


async def abort_all(stage: Stage) -> None:
    """Abort everything on one server."""
    bodies = [_body(stage, "/generate", 3000, {"input_ids": [400 + at, 500 + at]}) for at in (1, 2)]
    calls = [stage.both("/generate", body, str(at)) for at, body in enumerate(bodies)]
    for prefill, _ in calls:
        await prefill.done()
    await stage.until(lambda: _decodes(stage), 5.0)
    await stage.ask("decode", "/abort_request", {"rid": "", "abort_all": True}, label="abort").done()
    for _, decode in calls:
        await decode.done()
        decode.untimed()
    await stage.settled()


async def abort_prefix(stage: Stage) -> None:
    """An abort hits every rid that starts with a live one."""
    calls = {
        rid: stage.ask("prefill", "/generate", _body(stage, "/generate", more={"rid": rid}), label=rid)
        for rid in ("req-1", "req-10", "other")
    }
    await stage.waiting("prefill", 3)
    await stage.abort("prefill", "req-", "abort_no_live_rid")
    await asyncio.sleep(0.5)
    stage.facts["a prefix that is no live rid ends"] = sorted(rid for rid, call in calls.items() if call.ended())
    await stage.abort("prefill", "req-1", "abort_live_rid")
    await calls["req-10"].done()
    stage.facts["a live rid that is a prefix ends"] = sorted(rid for rid, call in calls.items() if call.ended())
    await stage.abort("prefill", "other", "abort_other")
    for call in calls.values():
        await call.done()
        call.untimed()


async def abort_after_hand_over(stage: Stage) -> None:
    """The prefill has answered: aborting there changes nothing."""
    _, decode = await _running(stage, _body(stage, "/generate", 300, {"rid": stage.rid, "stream": True}))
    await stage.abort("prefill", stage.rid)
    await decode.done()
    stage.in_order()


def drop_then_other(leg: str) -> Play:
    """One leg's client goes away while it waits; then the other leg comes."""

    async def play(stage: Stage) -> None:
        body = _body(stage, "/generate", more={"rid": stage.rid})
        other = "decode" if leg == "prefill" else "prefill"
        call = stage.ask(leg, "/generate", body)
        await stage.waiting(leg)
        await call.drop()
        await stage.settled(leg)
        await stage.ask(other, "/generate", body).done()

    return play


def drop_running(more: dict[str, Any]) -> Play:
    """The client of a running decode goes away."""

    async def play(stage: Stage) -> None:
        _, decode = await _running(stage, _body(stage, "/generate", 3900, more))
        await decode.drop()
        del stage.calls["decode"]
        await stage.settled()

    return play


def freeze(leg: str) -> Play:
    """A server stops for three seconds and goes on: nothing is lost."""

    async def play(stage: Stage) -> None:
        server = stage.prefill if leg == "prefill" else stage.decode
        body = _body(stage, "/generate", 60, {"stream": True})
        server.send_signal(signal.SIGSTOP)
        try:
            calls = stage.both("/generate", body)
            await asyncio.sleep(3.0)
            stage.facts["ended while frozen"] = sorted(call.leg for call in calls if call.ended())
        finally:
            server.send_signal(signal.SIGCONT)
        for call in calls:
            await call.done()
        await stage.settled()

    return play


async def terminate_decode(stage: Stage) -> None:
    """SIGTERM: unready at once, what runs and what comes is served, then the end."""
    stage.give_up_s = 60.0
    _, decode = await _running(stage, _body(stage, "/generate", 400, {"stream": True}))
    stage.decode.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.5)
    await stage.ask("decode", "/ready", method="GET", label="ready").done()
    await stage.ask("decode", "/health", method="GET", label="health").done()
    await stage.pair("/generate", _body(stage, "/generate"), "late")
    await decode.done()
    stage.facts["ended"] = await stage.until(lambda: _has_ended(stage), 40.0)


async def _survivors(stage: Stage) -> None:
    """Keep as a fact which servers are still there, when one that dies has had its time to."""

    async def gone() -> bool:
        return stage.prefill.returncode is not None

    await stage.until(gone, 10.0)
    for leg, server in (("prefill", stage.prefill), ("decode", stage.decode)):
        stage.facts[f"the {leg} lives"] = server.returncode is None


async def _has_ended(stage: Stage) -> bool:
    return stage.decode.returncode is not None


async def kill_decode_running(stage: Stage) -> None:
    """kill -9 of a decode: streams are cut, whole answers never come, the prefill is unharmed."""
    stream = stage.both("/generate", _body(stage, "/generate", 3900, {"stream": True}), "stream")
    whole = stage.both("/generate", _body(stage, "/generate", 3900, {"input_ids": [400, 401, 402]}), "whole")
    for prefill, _ in (stream, whole):
        await prefill.done()
    await stage.until(lambda: _has_tokens(stream[1]), 20.0)
    await stage.decode.kill()
    for call in (*stream, *whole):
        await call.done()
        call.untimed()
    await stage.settled("prefill")


async def _has_tokens(call: Call) -> bool:
    return call.tokens() > 2


async def kill_decode_waiting(stage: Stage) -> None:
    """kill -9 of a decode for which a prefill waits: the prefill finds out by its time limit."""
    await stage.decode.kill()
    prefill = stage.ask("prefill", "/generate", _body(stage, "/generate"))
    await stage.ask("decode", "/generate", _body(stage, "/generate")).done()
    await prefill.done()
    await stage.settled("prefill")


async def decode_without_host(stage: Stage) -> None:
    """A room without a host ends the whole decode server."""
    stage.give_up_s = 15.0
    body = stage.with_room(PATHS["/generate"])
    del body["bootstrap_host"]
    await stage.ask("decode", "/generate", body).done()
    stage.facts["the decode ended"] = await stage.until(lambda: _has_ended(stage), 15.0)
    await stage.ask("decode", "/ready", method="GET", label="after").done()


async def odd_ids(stage: Stage) -> None:
    """An id that the vocabulary does not have ends the prefill."""
    await stage.pair("/generate", {"input_ids": [5, 1_000_000], "sampling_params": SIX})
    await _survivors(stage)


async def room_beyond(stage: Stage) -> None:
    """A room that does not fit 63 bits ends the prefill when it has computed."""
    for call in await stage.pair("/generate", stage.with_room(PATHS["/generate"], 2**63)):
        call.untimed()
    await _survivors(stage)


async def page_sizes(stage: Stage) -> None:
    """A decode with another page size ends at its first request."""
    stage.give_up_s = 12.0
    await stage.other_decode("--page-size", "16")
    await stage.pair("/generate", PATHS["/generate"])
    stage.facts["the decode ended"] = await stage.until(lambda: _has_ended(stage), 15.0)


async def kill_prefill(stage: Stage) -> None:
    """kill -9 of a prefill: running decodes go on, waiting ones fail by heartbeat, new ones by look-up."""
    stage.give_up_s = 60.0
    _, running = await _running(stage, _body(stage, "/generate", 1200, {"stream": True}))
    waiting = stage.ask("decode", "/generate", _body(stage, "/generate"), label="decode_waiting")
    chat = _body(stage, "/v1/chat/completions", more={"stream": True})
    chat_waiting = stage.ask("decode", "/v1/chat/completions", chat, label="decode_waiting_chat")
    await stage.waiting("decode", 3)
    await stage.prefill.kill()
    for call in (waiting, chat_waiting):
        await call.done()
    later = stage.ask("decode", "/generate", _body(stage, "/generate"), label="decode_later")
    for call in (running, later):
        await call.done()
    running.untimed()
    stage.facts["the running stream is whole"] = running.tokens() == 1200
    await stage.settled("decode")


async def restart_prefill(stage: Stage) -> None:
    """A prefill that was away longer than the heartbeats allow is found again."""
    await stage.pair("/generate", PATHS["/generate"], "before")
    await stage.prefill.kill()
    await asyncio.sleep(7.0)
    await stage.prefill.start()
    await stage.pair("/generate", PATHS["/generate"], "after")
    await stage.settled()
