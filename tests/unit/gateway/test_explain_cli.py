"""`pdgate explain`: what it asks, prints and answers with."""

from __future__ import annotations

import argparse
import io
import json
import urllib.request
from collections.abc import Callable
from email.message import Message
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from gateway import explain_cli

TERMS = {
    "wait_s": 0.001,
    "prefill_s": 0.002,
    "prefix_gain_s": -0.0005,
    "transfer_s": 0.0,
    "decode_s": 0.0,
    "capacity_s": 0.0,
}
CANDIDATE = {"prefill": "http://p:1", "decode": "http://d:2", "hit_tokens": 64, "terms": TERMS, "total_s": 0.0025}
RECORD = {
    "request_id": "r1",
    "api": "/generate",
    "model": "tiny",
    "policy": "cost",
    "status": 502,
    "error": "the decode said [/INST]",
    "attempts": [
        {
            "choice_index": 0,
            "prefill": "http://p:1",
            "decode": "http://d:2",
            "prompt_tokens": 100,
            "hit_tokens": 64,
            "cached_tokens": None,
            "considered": [CANDIDATE],
            "outcomes": [{"leg": "decode", "kind": "reset", "stage": "streaming", "message": "[/b] lost"}],
            "dropped": [{"engine": "d1", "reason": "health is suspected"}],
            "pair_note": "version differs: 1 / 2",
            "apart": ["one pair is not formed"],
        }
    ],
    "attempts_not_shown": 0,
}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Run the command against an answer; its exit code, and the URLs it asked for."""

    def run(answer: Any, *argv: str) -> tuple[int, list[str]]:
        asked: list[str] = []

        def urlopen(url: str, timeout: float) -> io.BytesIO:
            asked.append(url)
            if isinstance(answer, Exception):
                raise answer
            return io.BytesIO(answer)

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        parser = argparse.ArgumentParser()
        explain_cli.add_arguments(parser)
        return explain_cli.run(parser.parse_args(argv)), asked

    return run


def refused(status: int, body: bytes) -> HTTPError:
    return HTTPError("http://x", status, "no", Message(), io.BytesIO(body))


def test_the_newest_request_is_shown_as_a_table(ask: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, asked = ask(json.dumps(RECORD).encode())
    out = capsys.readouterr().out
    assert (code, asked) == (0, ["http://127.0.0.1:30000/pdgate/explain/newest"])
    for said in (
        "request r1",
        "policy cost",
        "p:1",
        "d:2",
        "64",
        "2.0",
        "-0.5",
        "2.5",
        "left out d1",
        "reset",
        "version differs",
        "not formed",
    ):
        assert said in out


def test_an_older_gateway_says_less(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (attempt,) = RECORD["attempts"]  # type: ignore[misc]
    less = {name: value for name, value in attempt.items() if name not in ("pair_note", "apart")}
    assert ask(json.dumps({**RECORD, "attempts": [less]}).encode())[0] == 0
    assert "left out d1" in capsys.readouterr().out


def test_words_in_brackets_are_shown_as_they_are(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ask(json.dumps(RECORD).encode())
    out = capsys.readouterr().out
    assert "[/INST]" in out
    assert "[/b] lost" in out


def test_json_is_the_gateways_own(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = ask(json.dumps(RECORD).encode(), "--json")
    assert code == 0
    assert json.loads(capsys.readouterr().out) == RECORD


def test_an_id_is_quoted(ask: Any) -> None:
    _, asked = ask(json.dumps(RECORD).encode(), "a/b c", "--url", "http://h:1/", "--json")
    assert asked == ["http://h:1/pdgate/explain/a%2Fb%20c"]


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (refused(404, b'{"error": {"message": "not among the last 10"}}'), 1, "not among the last 10"),
        (refused(404, b"<html>"), 2, "no gateway answers at http://127.0.0.1:30000"),
        (refused(404, b'{"detail": "Not Found"}'), 2, "no gateway answers"),
        (URLError("refused"), 2, "no gateway answers"),
        (TimeoutError("late"), 2, "no gateway answers"),
        (b"<html>", 2, "no gateway answers"),
    ],
    ids=["unknown", "html", "another server", "refused", "late", "no json"],
)
def test_failures_are_one_line(ask: Any, capsys: pytest.CaptureFixture[str], answer: Any, code: int, said: str) -> None:
    assert ask(answer)[0] == code
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
