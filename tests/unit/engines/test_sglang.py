"""SGLang servers: what is sent to both legs of a pair, and what a look at a server finds; it never raises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from engines.errors import UpstreamError
from engines.sglang import SglangEngine, SglangStrategy
from engines.types import FailureKind, Leg
from engines.upstream import Reply
from tests.fakes import RID, FakeUpstream, attempt, chat_event, now_s, probe_answer, server_info, spec, timeless, view

Patch = Callable[[str], tuple[int, Any] | Exception | None]


class Scripted(FakeUpstream):
    """Answers probes as a healthy server, save where `patch` says otherwise."""

    def __init__(self, patch: Patch = lambda url: None) -> None:
        super().__init__()
        self.patch = patch

    async def fetch(self, method: str, url: str, **options: Any) -> Reply:
        await super().fetch(method, url, **options)
        patched = self.patch(url)
        if isinstance(patched, Exception):
            raise patched
        status, answer = patched or (200, probe_answer(url))
        return Reply(status, {}, answer if isinstance(answer, bytes) else orjson.dumps(answer))


def on(part: str, status: int, answer: Any) -> Patch:
    return lambda url: (status, answer) if part in url else None


# ---- the strategy ----------------------------------------------------------------------------------------------------


def test_both_legs_get_the_same_body() -> None:
    strategy, one = SglangStrategy(), attempt()
    prefill, decode = strategy.prefill_call(one), strategy.decode_call(one, None)
    assert prefill.body == decode.body
    assert (prefill.url, decode.url) == ("http://p0/v1/chat/completions", "http://d0/v1/chat/completions")
    sent = orjson.loads(prefill.body)
    assert (sent["rid"], sent["bootstrap_room"], sent["bootstrap_host"]) == (RID, 77, "10.0.0.1")


def test_a_prefill_without_a_port_has_the_default_one() -> None:
    bare = replace(view("p0"), spec=replace(spec("p0"), bootstrap_port=None))
    sent = orjson.loads(SglangStrategy().decode_call(replace(attempt(), prefill=bare), None).body)
    assert sent["bootstrap_port"] == 8998


def test_a_prefill_without_a_bootstrap_host_is_refused() -> None:
    """A room without a host ends a decode server."""
    bare = replace(view("p0"), spec=replace(spec("p0"), bootstrap_host=None))
    with pytest.raises(ValueError, match="no bootstrap host"):
        SglangStrategy().decode_call(replace(attempt(), prefill=bare), None)


@pytest.mark.parametrize(
    ("path", "stream", "asked"),
    [("/v1/chat/completions", True, True), ("/v1/chat/completions", False, False), ("/generate", True, False)],
)
def test_usage_is_asked_for_in_openai_streams(path: str, stream: bool, asked: bool) -> None:
    sent = orjson.loads(SglangStrategy().prefill_call(attempt(path, stream=stream)).body)
    assert ("stream_options" in sent) is asked


def test_the_engines_key_and_the_trace_go_along() -> None:
    call = SglangStrategy("secret").prefill_call(replace(attempt(), headers={"traceparent": "t", "authorization": "x"}))
    assert call.headers == {"traceparent": "t", "content-type": "application/json", "authorization": "Bearer secret"}
    assert "authorization" not in SglangStrategy().prefill_call(attempt()).headers
    assert SglangStrategy("secret").abort_call(view("d0"), RID).headers["authorization"] == "Bearer secret"


def test_an_abort_goes_to_the_leg_it_is_for() -> None:
    call = SglangStrategy().abort_call(view("d0"), RID)
    assert (call.url, orjson.loads(call.body)) == ("http://d0/abort_request", {"rid": RID})


def test_faults_of_streams_and_of_whole_answers() -> None:
    strategy = SglangStrategy()
    error = strategy.frame_fault(b'data: {"error": {"message": "m", "code": 500}}\n\n')
    assert (error.kind, error.message, error.status) == (FailureKind.STREAM_ERROR, "m", 500)
    assert strategy.frame_fault(chat_event("", finish="abort")).kind is FailureKind.ABORTED
    assert strategy.judge(Leg.DECODE, 200, b'{"choices": [{"finish_reason": "stop"}]}') is None
    fault = strategy.judge(Leg.PREFILL, 503, b'{"error": "busy"}')
    assert fault is not None
    assert (fault.kind, fault.message, fault.status) == (FailureKind.STATUS, "busy", 503)


# ---- probes ----------------------------------------------------------------------------------------------------------


async def test_a_healthy_prefill_is_ready_with_facts() -> None:
    upstream = Scripted()
    seen = await SglangEngine(upstream, "key").probe(spec("p0"), 1.0)
    assert (seen.reachable, seen.ready, seen.reason) == (True, True, "")
    assert seen.facts is not None
    assert seen.facts.model == "tiny"
    assert upstream.fetched[0][1] == "http://p0/ready"
    to_servers = [call for call in upstream.fetched if call[1].startswith("http://p0")]
    assert all(call[3]["authorization"] == "Bearer key" for call in to_servers)


async def test_the_rank_addresses_of_a_prefill_are_part_of_its_boot() -> None:
    ports = iter([1, 2])
    upstream = Scripted(lambda url: (200, {"rank_port": next(ports)}) if "dp_rank=0" in url else None)
    engine = SglangEngine(upstream)
    first, second = [(await engine.probe(spec("p0"), 1.0)).facts for _ in range(2)]
    assert first is not None
    assert second is not None
    assert first.boot_fingerprint != second.boot_fingerprint


async def test_every_dp_rank_is_asked() -> None:
    upstream = Scripted(on("dp_rank=-1", 200, {"dp_size": 3}))
    await SglangEngine(upstream).probe(spec("p0"), 1.0)
    asked = [url.partition("prefill_dp_rank=")[2].split("&")[0] for _, url, _, _ in upstream.fetched if "/route" in url]
    assert asked == ["-1", "0", "1", "2"]


async def test_a_decode_has_no_bootstrap_server() -> None:
    upstream = Scripted()
    assert (await SglangEngine(upstream).probe(spec("d0"), 1.0)).ready
    assert not any("/route" in call[1] for call in upstream.fetched)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (on("/ready", 503, {}), "/ready answers 503"),
        (on("dp_rank=-1", 503, {}), "answers 503 to /route"),
        (on("dp_rank=0", 404, {}), "does not know DP rank 0"),
        (on("/route", 200, b"oops"), "/route answers no JSON"),
        (on("/server_info", 500, {}), "/server_info answers 500"),
        (on("/server_info", 200, [1]), "answers no JSON object"),
        (on("/server_info", 200, server_info(disaggregation_mode="decode")), "it serves as decode, not as prefill"),
        (on("/server_info", 200, server_info(max_total_num_tokens="x")), "server_info.max_total_num_tokens"),
        (on("dp_rank=-1", 200, {"dp_size": {"a": 1}}), "int()"),
        (on("/model_info", 200, b"\xff"), "answers no JSON"),
    ],
)
async def test_what_is_reachable_and_not_ready_says_why(patch: Patch, said: str) -> None:
    seen = await SglangEngine(Scripted(patch)).probe(spec("p0"), 1.0)
    assert (seen.reachable, seen.ready, seen.facts) == (True, False, None)
    assert said in seen.reason


@pytest.mark.parametrize("path", ["/ready", "/route", "/server_info", "/model_info"])
async def test_a_lost_connection_is_unreachable(path: str) -> None:
    error = UpstreamError(FailureKind.RESET, "lost")
    seen = await SglangEngine(Scripted(lambda url: error if path in url else None)).probe(spec("p0"), 1.0)
    assert (seen.reachable, seen.ready) == (False, False)
    assert seen.reason.endswith("lost")
    assert ("bootstrap server" in seen.reason) == (path == "/route")


async def test_a_server_that_says_nothing_is_unreachable_in_time() -> None:
    class Silent(FakeUpstream):
        async def fetch(self, method: str, url: str, **_: Any) -> Reply:
            await asyncio.Event().wait()
            raise AssertionError

    seen = await SglangEngine(Silent()).probe(spec("d0"), 0.002)
    assert (seen.reachable, seen.reason) == (False, "no answer within 0.002 s")


@timeless
async def test_a_time_that_passed_while_the_gateway_stood_still_is_asked_for_again() -> None:
    asked_s: list[float] = []

    class Lost(FakeUpstream):
        async def fetch(self, method: str, url: str, **_: Any) -> Reply:
            asked_s.append(now_s())
            if len(asked_s) == 1 or not well:
                await asyncio.Event().wait()
            return Reply(200, {}, orjson.dumps(probe_answer(url)))

    async def stand_still() -> None:
        await asyncio.sleep(1.0)
        asyncio.get_running_loop()._now_s += 10.0  # type: ignore[attr-defined]

    for well in (True, False):
        asked_s.clear()
        frozen = asyncio.create_task(stand_still())
        seen = await SglangEngine(Lost()).probe(spec("d0"), 2.0)
        await frozen
        assert seen.ready is well
        assert asked_s[1] == asked_s[0] + 11.0
        assert well or len(asked_s) == 2


@timeless
async def test_a_time_that_passed_otherwise_is_not() -> None:
    asked: list[str] = []

    class Silent(FakeUpstream):
        async def fetch(self, method: str, url: str, **_: Any) -> Reply:
            asked.append(url)
            await asyncio.Event().wait()
            raise AssertionError

    assert not (await SglangEngine(Silent()).probe(spec("d0"), 2.0)).reachable
    assert len(asked) == 1


def old(version: str) -> Patch:
    """A server from before `/ready` and `/server_info`."""

    def answer(url: str) -> tuple[int, Any] | None:
        if url.endswith("/get_server_info"):
            return 200, {"version": version}
        return (404, {}) if url.endswith(("/ready", "/server_info")) else None

    return answer


async def test_a_server_that_is_too_old_is_refused_by_name() -> None:
    seen = await SglangEngine(Scripted(old("0.4.9.post1"))).probe(spec("d0"), 1.0)
    assert (seen.reachable, seen.ready, seen.facts) == (True, False, None)
    assert seen.reason.startswith("SGLang 0.4.9.post1 is not served: 0.5.20 or newer is needed")


async def test_what_has_no_ready_and_is_not_old_is_not_ready() -> None:
    for patch in (old("0.5.23"), on("/ready", 404, {}), on("ready", 404, b"x")):
        seen = await SglangEngine(Scripted(patch)).probe(spec("d0"), 1.0)
        assert (seen.ready, seen.reason) == (False, "/ready answers 404")


async def test_what_a_prefill_tells_decodes_is_among_its_facts() -> None:
    told = {"dp_size": 1, "kv_cache_dtype": "fp8_e4m3", "new_field": 1}
    seen = await SglangEngine(Scripted(on("dp_rank=-1", 200, told))).probe(spec("p0"), 1.0)
    assert seen.facts is not None
    assert seen.facts.handshake_fields == frozenset(told)
    assert seen.facts.cache_format.kv_cache_dtype == "fp8_e4m3"


async def test_every_boot_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    seed = iter((1, 1, 2))
    patch: Patch = lambda url: (200, server_info(random_seed=next(seed))) if "/server_info" in url else None  # noqa: E731
    engine = SglangEngine(Scripted(patch))
    with caplog.at_level("INFO", "pdgate.join"):
        for _ in range(3):
            assert (await engine.probe(spec("p0"), 1.0)).ready
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, "a version that is not told is not known"
    assert "prefill http://p0 joins: SGLang (no version told), model tiny" in caplog.text
    assert "--enable-cache-report" in caplog.text


async def test_a_known_server_joins_quietly(caplog: pytest.LogCaptureFixture) -> None:
    known = server_info(disaggregation_mode="decode", version="0.5.23", frontend="python")
    with caplog.at_level("INFO", "pdgate.join"):
        await SglangEngine(Scripted(on("/server_info", 200, known))).probe(spec("d0"), 1.0)
    assert [record.levelname for record in caplog.records] == ["INFO"]


# ---- loads and relayed calls -----------------------------------------------------------------------------------------


async def test_a_load_is_read() -> None:
    load = await SglangEngine(Scripted(on("/v1/loads", 200, {"loads": [{"num_used_tokens": 5}]}))).load(spec("d0"), 1.0)
    assert load is not None
    assert load.used_tokens == 5


@pytest.mark.parametrize(
    "patch",
    [
        on("/v1/loads", 404, {}),
        on("/v1/loads", 200, b"oops"),
        on("/v1/loads", 200, [1]),
        on("/v1/loads", 200, {"loads": []}),
        on("/v1/loads", 200, {"loads": 5}),
        on("/v1/loads", 200, {"loads": [{"num_used_tokens": "many"}]}),
        on("/v1/loads", 200, {"loads": [{"timestamp": [1]}]}),
        lambda url: UpstreamError(FailureKind.TIMEOUT, "late"),
    ],
)
async def test_no_load_is_none_whatever_the_server_says(patch: Patch) -> None:
    assert await SglangEngine(Scripted(patch)).load(spec("d0"), 1.0) is None


async def test_a_server_is_roused_by_its_health_and_what_it_says_is_nobodys_concern() -> None:
    for patch in (on("/health", 503, {}), lambda url: UpstreamError(FailureKind.TIMEOUT, "late")):
        upstream = Scripted(patch)
        await SglangEngine(upstream).rouse(spec("d0"))
        assert [call[1] for call in upstream.fetched] == ["http://d0/health"]


async def test_a_relayed_call_comes_back_as_it_is() -> None:
    upstream = Scripted(on("/tokenize", 418, b"tea"))
    assert await SglangEngine(upstream, "key").post(view("p0"), "/tokenize", b"{}", 1.0) == (418, b"tea")
    method, url, body, headers = upstream.fetched[-1]
    assert (method, url, body) == ("POST", "http://p0/tokenize", b"{}")
    assert headers["authorization"] == "Bearer key"
