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
UNTYPED = "untyped"
"""Marks a reply that has a body and no content type."""
PLAIN_HEADERS = {"server": "uvicorn", "vary": "Origin"}
DONE = b"data: [DONE]\n\n"

_SOURCE = "sglang/srt/entrypoints/http_server.py"
_HANDLERS = {
    "/generate": (928, "generate_request"),
    "/v1/chat/completions": (1870, "openai_v1_chat_completions"),
    "/v1/completions": (1860, "openai_v1_completions"),
    "/tokenize": (1906, "openai_v1_tokenize"),
    "/v1/tokenize": (1906, "openai_v1_tokenize"),
    "/detokenize": (1924, "openai_v1_detokenize"),
    "/v1/detokenize": (1924, "openai_v1_detokenize"),
    "/abort_request": (1721, "abort_request"),
    "/v1/loads": (96, "get_loads"),
}
ROLES = ("system", "assistant", "tool", "function", "developer", "latest_reminder", "root", "user")
_NUMBERS = {"int": "integer", "float": "number"}


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


def _validation_error(route: str, errors: list[dict[str, Any]], method: str = "POST") -> dict[str, Any]:
    """FastAPI's validation failure as SGLang prints it: the errors, then the handler's source line."""
    line, handler = _HANDLERS.get(route, (1, "handler"))
    many = "errors" if len(errors) > 1 else "error"
    listed = "".join(f"  {error!r}\n" for error in errors)
    message = (
        f"{len(errors)} validation {many}:\n{listed}\n"
        f'  File "{_SOURCE}", line {line}, in {handler}\n    {method} {route} {errors!r}'
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


def no_body(route: str) -> dict[str, Any]:
    """The body is empty."""
    return _validation_error(route, [{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])


def not_json(route: str, data: bytes) -> dict[str, Any]:
    """The content type is not JSON's."""
    if route != "/generate":
        text = "Unsupported Media Type: Only 'application/json' is allowed"
        errors = [{"loc": ["header", "content-type"], "msg": text, "type": "value_error"}]
        message = f"1 validation error:\n  {errors[0]!r} {errors!r}"
        return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    detail = {
        "type": "dataclass_type",
        "loc": ("body",),
        "msg": "Input should be a dictionary or an instance of GenerateReqInput",
        "input": data,
        "ctx": {"class_name": "GenerateReqInput"},
    }
    return _validation_error(route, [detail])


def one_of_two(route: str, body: Any) -> dict[str, Any]:
    """`/tokenize` got both a prompt and messages, or neither."""
    text = "Exactly one of 'prompt' or 'messages' must be provided."
    detail = {
        "type": "value_error",
        "loc": ("body",),
        "msg": f"Value error, {text}",
        "input": body,
        "ctx": {"error": ValueError(text)},
    }
    return _validation_error(route, [detail])


def role_error(route: str, index: int, role: Any) -> dict[str, Any]:
    """A chat message has a role that does not exist."""
    place = ("body", "messages", index, "function-after[validate_thinking_parts_role(), ChatCompletionMessage{}Param]")
    listed = ", ".join(f"'{each}'" for each in ROLES if each != "user")
    text = f"'role' must be one of {listed} (case-insensitive)."
    generic = {
        "type": "value_error",
        "loc": (*place[:3], str(place[3]).format("Generic"), "role"),
        "msg": f"Value error, {text}",
        "input": role,
        "ctx": {"error": ValueError(text)},
    }
    user = {
        "type": "literal_error",
        "loc": (*place[:3], str(place[3]).format("User"), "role"),
        "msg": "Input should be 'user'",
        "input": role,
        "ctx": {"expected": "'user'"},
    }
    return _validation_error(route, [generic, user])


def number_error(route: str, field: str, kind: str, value: Any, where: str = "body", method: str = "POST") -> Any:
    """A field is no number of `kind` (int or float)."""
    number = _NUMBERS[kind]
    detail = {"type": f"{kind}_type", "loc": (where, field), "msg": f"Input should be a valid {number}", "input": value}
    if isinstance(value, str):
        article = "an" if kind == "int" else "a"
        detail["type"] = f"{kind}_parsing"
        detail["msg"] = f"Input should be a valid {number}, unable to parse string as {article} {number}"
    return _validation_error(route, [detail], method)


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
    if isinstance(value, float) and abs(value) >= 2**63:
        scalar["type"] = "int_parsing_size"
        scalar["msg"] = "Unable to parse input string as an integer, exceeded maximum size"
    return _validation_error(route, [listed, scalar])


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


def start_beyond_prompt(start: int, prompt_tokens: int) -> str:
    """Prompt logprobs are asked for from behind the end of the prompt on."""
    return (
        f"req.logprob_start_len={start} is higher than the number of input tokens "
        f"len(req.origin_input_ids)={prompt_tokens}. Please use a smaller logprob_start_len."
    )


def rank_out_of_range(rank: int, dp_size: int) -> str:
    """The request names a DP rank that the server does not have."""
    return f"routed_dp_rank={rank} out of range [0, {dp_size})"


def duplicate_rid(rid: str) -> str:
    """A live request already has the rid."""
    return f"Duplicate request ID detected: {rid}"


def exceeds_pool(rid: str, prompt_tokens: int, pool_tokens: int) -> str:
    """The prompt is larger than this server's KV pool."""
    return f"Request {rid} exceeds the maximum number of tokens: {prompt_tokens} > {pool_tokens}"
