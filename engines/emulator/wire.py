"""The shapes of SGLang's errors and small replies. Pure.

Held to recorded replies of SGLang 0.5.23 (tests/contract/test_emulator_wire.py). Note the dialects: `/generate` nests
its message, the OpenAI paths answer a flat object, and FastAPI's own errors quote the handler's source line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

JSON_HEADERS = {"server": "uvicorn", "content-type": "application/json", "vary": "Origin"}
SSE_HEADERS = {"server": "uvicorn", "content-type": "text/event-stream; charset=utf-8", "vary": "Origin"}
PLAIN_HEADERS = {"server": "uvicorn", "vary": "Origin"}
DONE = b"data: [DONE]\n\n"

_SOURCE = "sglang/srt/entrypoints/http_server.py"
_HANDLERS = {
    "/generate": (928, "generate_request"),
    "/v1/chat/completions": (1870, "openai_v1_chat_completions"),
    "/v1/completions": (1850, "openai_v1_completions"),
}


def sse(body: Mapping[str, Any]) -> bytes:
    """One SSE event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def value_error(route: str, message: str) -> dict[str, Any]:
    """A ValueError of SGLang's own checks (HTTP 400)."""
    if route == "/generate":
        return {"error": {"message": message}}
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}


def internal_error(message: str, status: int = 500) -> dict[str, Any]:
    """A failure inside the engine, as a whole body."""
    return {"object": "error", "message": message, "type": str(status), "param": None, "code": status}


def stream_error(message: str, status: int = 500) -> bytes:
    """A failure inside an OpenAI stream; SGLang writes this one with Python's json, spaces and all."""
    quoted = orjson.dumps(message).decode()
    kind = "BAD_REQUEST" if status == 400 else "INTERNAL_SERVER_ERROR"
    return (
        f'data: {{"error": {{"object": "error", "message": {quoted}, "type": "{kind}", '
        f'"param": null, "code": {status}}}}}\n\n'
    ).encode()


def generate_stream_error(message: str) -> bytes:
    """A ValueError inside a `/generate` stream (HTTP 200)."""
    return sse({"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}})


def _validation_error(route: str, errors: list[dict[str, Any]]) -> dict[str, Any]:
    """FastAPI's validation failure as SGLang prints it: the errors, then the handler's source line."""
    line, handler = _HANDLERS.get(route, (1, "handler"))
    many = "errors" if len(errors) > 1 else "error"
    listed = "".join(f"  {error!r}\n" for error in errors)
    message = (
        f"{len(errors)} validation {many}:\n{listed}\n"
        f'  File "{_SOURCE}", line {line}, in {handler}\n    POST {route} {errors!r}'
    )
    return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}


def bad_json(route: str, error: orjson.JSONDecodeError) -> dict[str, Any]:
    """The body is not JSON."""
    cause = {"error": error.msg.split(": line ")[0]}
    detail = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}, "ctx": cause}
    return _validation_error(route, [detail])


def missing_error(route: str, field: str, body: Any) -> dict[str, Any]:
    """A required field is absent."""
    return _validation_error(
        route, [{"type": "missing", "loc": ("body", field), "msg": "Field required", "input": body}]
    )


def union_type_error(route: str, field: str, kind: str, value: Any) -> dict[str, Any]:
    """A field that may be a list or a scalar is neither."""
    listed = {
        "type": "list_type",
        "loc": ("body", field, f"list[nullable[{kind}]]"),
        "msg": "Input should be a valid list",
        "input": value,
    }
    scalar = {
        "type": f"{kind}_parsing",
        "loc": ("body", field, kind),
        "msg": "Input should be a valid integer, unable to parse string as an integer",
        "input": value,
    }
    return _validation_error(route, [listed, scalar])


def contract_error(value: Any, wanted: str) -> str:
    """What the JSON contract of `/generate` says of a wrong type."""
    names = {str: "string", bool: "boolean", float: "floating point", list: "sequence", dict: "map", type(None): "null"}
    shown = f"{names.get(type(value), 'value')} {orjson.dumps(value).decode()}" if value is not None else "null"
    return f"invalid type: {shown}, expected {wanted}"


def too_many_tokens(context: int, prompt_tokens: int, answer_tokens: int) -> str:
    """SGLang's text when prompt and answer together exceed the context."""
    return (
        f"Requested token count exceeds the model's maximum context length of {context} tokens. "
        f"You requested a total of {prompt_tokens + answer_tokens} tokens: {prompt_tokens} tokens from the input "
        f"messages and {answer_tokens} tokens for the completion. Please reduce the number of tokens in the input "
        "messages or the completion to fit within the limit."
    )


def missing_room(rid: str) -> str:
    """A prefill or decode server got a request without a room."""
    return f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={rid!r}"


def duplicate_rid(rid: str) -> str:
    """A live request already has the rid."""
    return f"Duplicate request ID detected: {rid}"


def exceeds_pool(rid: str, prompt_tokens: int, pool_tokens: int) -> str:
    """The prompt is larger than this server's KV pool."""
    return f"Request {rid} exceeds the maximum number of tokens: {prompt_tokens} > {pool_tokens}"
