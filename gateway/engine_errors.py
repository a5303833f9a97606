"""What engines answer when they refuse or fail, in whichever of their shapes, as the one error that clients parse."""

from __future__ import annotations

import re

import orjson

from engines.types import Stage
from gateway.errors import MAX_MESSAGE_CHARS, GatewayError

_SERVER_TEXT = re.compile(r"Traceback \(most recent call last\)|File \"[^\"\n]*\", line \d+")
_VALIDATION = re.compile(r"\d+ validation errors?:\s+{'type': '\w+', 'loc': \(([^)]*)\), 'msg': (['\"])(.*?)\2, '")
_TOO_LONG = re.compile(r"context length|maximum number of tokens|max(?:imum)? input length|too long", re.IGNORECASE)
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def engine_error_to_openai(status: int, body: bytes) -> GatewayError:
    """An engine's error answer, in whichever of its shapes, as an error that keeps its status.

    Paths and source lines of the server are cut out of the message.
    """
    text, param = _error_text(body)
    text = text[:MAX_MESSAGE_CHARS]  # some echo the whole input
    validation = _VALIDATION.match(text)
    if validation is not None:
        # ('body', 'messages', 0, …): the first name after the body is the client's field.
        param = next(iter(re.findall(r"'(\w+)'", validation[1])[1:]), None)
        text = f"{param}: {validation[3]}" if param else validation[3]
    message = _SERVER_TEXT.split(text)[0].strip() or f"the engine answered {status}"
    caller_fault = 400 <= status < 500 and status != 429
    too_long = status == 400 and _TOO_LONG.search(message) is not None
    code = "context_length_exceeded" if too_long else "engine_refused" if caller_fault else "engine_failed"
    return GatewayError(
        status,
        message,
        code=code,
        kind=_KINDS.get(status, "invalid_request_error" if caller_fault else "server_error"),
        param=param,
        stage=Stage.DISPATCHED,
        definite=caller_fault,
        safe_to_retry=not caller_fault,
    )


def _error_text(body: bytes) -> tuple[str, str | None]:
    """(message, param) of {"error": {...}}, {"error": "text"}, {"message": ...}, {"detail": ...} or plain text."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace"), None
    param = None
    if isinstance(value, dict):
        value = value.get("error", value)
    if isinstance(value, dict):
        param = value.get("param")
        value = value.get("message", value.get("detail", ""))
    return value if isinstance(value, str) else orjson.dumps(value).decode(), param if isinstance(param, str) else None
