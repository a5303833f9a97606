"""Errors of engines, as recorded, in the one shape that clients parse."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engines.types import Stage
from gateway.engine_errors import engine_error_to_openai

RECORDED_VALIDATION = (
    "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required', 'input': "
    "{'model': 'tiny', 'tool_choice': 'none'}}\n\n  File \"/opt/sgl/srt/entrypoints/http_server.py\", line 1870, in "
    "openai_v1_chat_completions\n    POST /v1/chat/completions [{'type': 'missing', 'loc': ('body', 'messages')}]"
)
RECORDED_BAD_JSON = (
    "1 validation error:\n  {'type': 'json_invalid', 'loc': ('body', 1), 'msg': 'JSON decode error', 'input': {}, "
    "'ctx': {'error': 'unexpected character, expected a string key'}}\n\n  File \"/opt/sgl/http_server.py\", line 928"
)
TOO_LONG = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."


@pytest.mark.parametrize(
    ("status", "body", "message", "code", "param"),
    [
        (
            400,
            {"error": "invalid type: string, expected i64"},
            "invalid type: string, expected i64",
            "engine_refused",
            None,
        ),
        (400, {"error": {"message": TOO_LONG}}, TOO_LONG, "context_length_exceeded", None),
        (400, {"error": {"message": "no", "param": "seed"}}, "no", "engine_refused", "seed"),
        (
            500,
            {"object": "error", "message": "Aborted by AbortReq", "type": "500", "param": None, "code": 500},
            "Aborted by AbortReq",
            "engine_failed",
            None,
        ),
        (404, {"detail": "Not Found"}, "Not Found", "engine_refused", None),
        (400, {"message": RECORDED_VALIDATION}, "messages: Field required", "engine_refused", "messages"),
        (400, {"message": RECORDED_BAD_JSON}, "JSON decode error", "engine_refused", None),
        (422, {"detail": [{"loc": ["body"], "msg": "x"}]}, '[{"loc":["body"],"msg":"x"}]', "engine_refused", None),
        (503, b"not ready", "not ready", "engine_failed", None),
        (503, b"", "the engine answered 503", "engine_failed", None),
        (500, b'boom\nTraceback (most recent call last):\n  File "/srv/x.py", line 3', "boom", "engine_failed", None),
        (500, b'  File "/srv/x.py", line 3, in f', "the engine answered 500", "engine_failed", None),
        (429, b"busy", "busy", "engine_failed", None),
        (500, b"\xff\xfe", "\ufffd\ufffd", "engine_failed", None),
        (400, b"[1]", "[1]", "engine_refused", None),
        (400, {"error": None}, "null", "engine_refused", None),
    ],
)
def test_every_shape_of_an_engine_error(status: int, body: Any, message: str, code: str, param: str | None) -> None:
    error = engine_error_to_openai(status, body if isinstance(body, bytes) else orjson.dumps(body))
    assert (error.status, error.message, error.code, error.param) == (status, message, code, param)
    assert error.stage is Stage.DISPATCHED
    assert set(error.openai_error()["error"]) == {"message", "type", "param", "code"}


def test_only_the_callers_fault_is_not_worth_another_try() -> None:
    assert engine_error_to_openai(400, b"no").safe_to_retry is False
    assert engine_error_to_openai(500, b"no").safe_to_retry is True
    assert engine_error_to_openai(429, b"no").safe_to_retry is True


def test_an_echoed_megabyte_is_cut_in_no_time() -> None:
    error = engine_error_to_openai(400, b"File " * 500_000)
    assert len(error.message) <= 1000
