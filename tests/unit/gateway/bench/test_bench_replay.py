"""`pdgate replay` against a small server with the OpenAI chat wire."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engines import tasks
from gateway.bench import replay as command
from gateway.bench.load import LoadPlan, replay
from gateway.bench.prompts import PromptScale, prompt_of
from gateway.bench.trace import TraceRequest

DATA = Path(__file__).parents[3] / "data"
MOONCAKE = DATA / "replay_mooncake.jsonl"

Answer = Callable[["Stub", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Stub:
    """A server whose answer a test may replace; it runs on its own thread, as `run` has its own loop."""

    answer: Answer
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.tokens.append(request.headers.get("Authorization"))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.answer(self, request, body)
        finally:
            self.in_flight -= 1

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "served", "object": "model"}]})


def event(choices: list[dict], **more: object) -> bytes:
    head = {"id": "0", "object": "chat.completion.chunk", "created": 1795955382, "model": "served"}
    return b"data: " + json.dumps({**head, "choices": choices, **more}, separators=(",", ":")).encode() + b"\n\n"


def delta(reason: str | None = None, **values: object) -> bytes:
    return event([{"index": 0, "delta": values, "finish_reason": reason}])


async def begin(request: web.Request) -> web.StreamResponse:
    placed = {"x-pdgate-prefill": "http://p0", "x-pdgate-decode": "http://d0", "x-pdgate-attempts": "1"}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **placed})
    await response.prepare(request)
    return response


async def whole(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    await response.write(delta(role="assistant", content=""))
    for _ in range(body["max_tokens"]):
        await response.write(delta(content="ab"))
    await response.write(delta("length"))
    prompt_tokens = len(body["messages"][0]["content"])
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2},
    }
    await response.write(event([], usage=usage) + b"data: [DONE]\n\n")
    return response


async def refuse(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "overloaded"}}, status=429)


async def cut(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    await response.write(delta(content="ab"))
    return response


async def reset(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    await response.write(delta(content="ab"))
    assert request.transport is not None
    request.transport.close()
    return response


async def error_event(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    await response.write(delta(content="ab") + b'data: {"error": {"message": "KV lost"}}\n\n')
    return response


async def abort(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    await response.write(delta("abort") + b"data: [DONE]\n\n")
    return response


async def never(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    await asyncio.sleep(30)
    return response


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub(whole)
    loop = asyncio.new_event_loop()
    up = threading.Event()

    async def main(stop: asyncio.Event) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.post("/v1/chat/completions", server.chat), web.get("/v1/models", server.models)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        up.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(main(stop),))
    thread.start()
    up.wait(10)
    yield server
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pdgate replay")
    command.add_arguments(parser)
    return parser.parse_args(words)


def plan(url: str, **changes: Any) -> LoadPlan:
    values = {"rate_scale": 100.0, "max_in_flight": 100, "timeout_s": 10.0, **changes}
    return LoadPlan(url, "served", {}, PromptScale(), **values)


def test_json_report(stub: Stub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = ["--trace", str(MOONCAKE), "--url", f"{stub.url}/v1/", "--json", "--out", str(out), "--api-key", "secret"]
    assert command.run(parsed(*words, "--slo-ttft-s", "60", "--slo-tpot-s", "60")) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert printed.err == ""
    assert json.loads(out.read_text()) == report
    assert "secret" not in printed.out
    assert stub.tokens == ["Bearer secret"] * 4
    assert report["settings"]["model"] == "served"
    assert report["requests"] == {**report["requests"], "sent": 4, "completed": 4, "failed": 0}
    assert report["goodput"]["ratio"] == 1.0
    assert report["tokens"] == {
        **report["tokens"],
        "prompt": 1100 + 1024 + 600 + 512,
        "cached": 550 + 512 + 300 + 256,
        "output": 10,
        "prefix_hit_ratio": 0.5,
    }
    assert report["placement"] == {"prefill": {"http://p0": 4}, "decode": {"http://d0": 4}, "attempts": {"1": 4}}
    assert report["ttft_s"]["max"] <= report["e2e_s"]["max"]


def test_requests_are_the_traces(stub: Stub) -> None:
    words = ["--trace", str(MOONCAKE), "--url", stub.url, "--model", "named", "--limit", "1", "--text-scale", "2"]
    assert command.run(parsed(*words)) == 0
    (body,) = stub.bodies
    text = prompt_of(TraceRequest(0.0, 1100, 3, (7, 8, 9)), 0, PromptScale(text_scale=2.0))
    assert body == {
        "model": "named",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_table_on_standard_output(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parsed("--trace", str(DATA / "replay_azure.csv"), "--url", stub.url)) == 0
    assert "3 requests in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (refuse, "status_429", "overloaded"),
        (cut, "truncated", "without [DONE]"),
        (reset, "reset", "connection lost"),
        (error_event, "stream_error", "KV lost"),
        (abort, "aborted", "abort"),
    ],
)
def test_failures_are_counted_by_kind(
    stub: Stub, capsys: pytest.CaptureFixture[str], answer: Answer, kind: str, detail: str
) -> None:
    stub.answer = answer
    assert command.run(parsed("--trace", str(MOONCAKE), "--url", stub.url, "--json")) == 1
    report = json.loads(capsys.readouterr().out)
    (error,) = report["errors"]
    assert (error["kind"], error["count"]) == (kind, 4)
    assert detail in error["example"]
    assert (report["requests"]["completed"], report["ttft_s"], report["goodput"]["requests"]) == (0, None, 0)


async def test_a_request_that_never_ends(stub: Stub) -> None:
    stub.answer = never
    (sample,), _ = await replay([TraceRequest(0.0, 10, 10)], plan(stub.url, timeout_s=0.1), lambda _: None)
    assert sample.error == "timeout"
    assert tasks.running() == ()


async def test_times_of_a_sample(stub: Stub) -> None:
    async def paced(_: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(delta(role="assistant", content=""))
        for _ in range(3):
            await asyncio.sleep(0.05)
            await response.write(delta(content="ab"))
        await asyncio.sleep(0.1)
        await response.write(event([], usage={"completion_tokens": 3}) + b"data: [DONE]\n\n")
        return response

    stub.answer = paced
    (sample,), duration_s = await replay([TraceRequest(0.0, 10, 10)], plan(stub.url), lambda _: None)
    assert sample.error is None
    assert sample.ttft_s is not None
    assert sample.tpot_s is not None
    assert sample.e2e_s is not None
    assert sample.ttft_s >= 0.045
    assert 0.04 <= sample.tpot_s <= 0.1
    assert 0.24 <= sample.e2e_s <= duration_s


async def test_open_loop_sends_at_the_traces_times(stub: Stub) -> None:
    together = threading.Barrier(5)

    async def wait_for_all(_: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.to_thread(together.wait, 10)
        return await whole(_, request, body)

    stub.answer = wait_for_all
    trace = [TraceRequest(10.0 * number, 10, 1) for number in range(5)]
    samples, duration_s = await replay(trace, plan(stub.url, rate_scale=200.0), lambda _: None)
    assert [sample.error for sample in samples] == [None] * 5
    assert [sample.number for sample in samples] == list(range(5))
    assert 0.2 <= duration_s < 10
    assert samples[0].e2e_s is not None
    assert samples[0].e2e_s >= 0.19


async def test_bounded_concurrency_is_accounted_for(stub: Stub) -> None:
    async def slow(_: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return await whole(_, request, body)

    stub.answer = slow
    ended = []
    samples, _ = await replay([TraceRequest(0.0, 10, 1)] * 4, plan(stub.url, max_in_flight=1), ended.append)
    assert stub.most_in_flight == 1
    assert len(ended) == 4
    assert samples[3].held_s >= 0.15
    assert all(sample.ttft_s is not None and sample.ttft_s < sample.held_s + 0.1 for sample in samples)


async def test_cancelling_leaves_nothing_behind(stub: Stub) -> None:
    stub.answer = never
    trace = [*[TraceRequest(0.0, 10, 1)] * 3, TraceRequest(1e6, 10, 1)]
    running = tasks.spawn(replay(trace, plan(stub.url), lambda _: None), "replay")
    while stub.in_flight < 3:  # noqa: ASYNC110, the stub lives on another thread
        await asyncio.sleep(0.005)
    async with asyncio.timeout(5):
        await tasks.stop(running)
    assert tasks.running() == ()


def test_late_requests_are_told(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    async def slow(_: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return await whole(_, request, body)

    stub.answer = slow
    words = ["--trace", str(MOONCAKE), "--url", stub.url, "--rate-scale", "1000", "--max-in-flight", "1"]
    assert command.run(parsed(*words)) == 0
    assert "raise --max-in-flight" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parsed("--trace", str(MOONCAKE), "--url", "http://127.0.0.1:1")) == 2
    assert "--url: no server answers" in capsys.readouterr().err


def test_no_model_listed(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parsed("--trace", str(MOONCAKE), "--url", f"{stub.url}/elsewhere")) == 2
    assert "--model: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "missing.jsonl"], "--trace: missing.jsonl: "),
        (["--trace", str(DATA)], "--trace: "),
        (["--trace", str(MOONCAKE), "--text-scale", "0.001"], "--text-scale: 0.001 is too small"),
        (["--trace", str(MOONCAKE), "--out", "/nowhere/report.json"], "--out: /nowhere is not a directory"),
        (["--trace", __file__], "test_bench_replay.py:1: expected a Mooncake JSON line"),
    ],
)
def test_bad_input_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parsed(*words, "--url", "http://127.0.0.1:1")) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "127.0.0.1:30000"], "--url: expected http://host:port"),
        (["--limit", "0"], "--limit: expected a number above 0, got '0'"),
        (["--limit", "1.5"], "--limit: expected a number above 0"),
        (["--rate-scale", "nan"], "--rate-scale: expected a number above 0"),
        (["--rate-scale", "inf"], "--rate-scale: expected a number above 0"),
        (["--slo-ttft-s", "-1"], "--slo-ttft-s: expected a number above 0"),
    ],
)
def test_bad_flags_exit_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--trace", "t", "--url", "http://h:1", *words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
