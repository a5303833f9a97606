"""GatewayError: every refusal and failure that a client sees, with its HTTP status and OpenAI shape.

It says what happened, at which stage, and whether asking again is safe; `openai_error` is the body.
"""

from __future__ import annotations

from typing import Any

from engines.types import Stage

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
"""A client's own text is told back to it in errors, and logged: never more than this of it."""


def clipped(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """`text`, or as much of its beginning as fits with an ellipsis."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


class GatewayError(Exception):
    """A request ends here, with this answer.

    `definite`: no engine did any work for it. `retry_after_s`: when asking again may help; None where it will not.
    `param` names the offending field. `safe_to_retry` becomes `x-should-retry`, which client libraries obey.
    Message and param are clipped.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        stage: Stage = Stage.ADMISSION,
        definite: bool = True,
        retry_after_s: float | None = None,
        safe_to_retry: bool | None = None,
    ) -> None:
        self.message = clipped(message)
        super().__init__(self.message)
        self.status = status
        self.code = code
        self.kind = kind
        self.param = None if param is None else clipped(param, MAX_PARAM_CHARS)
        self.stage = stage
        self.definite = definite
        self.retry_after_s = retry_after_s
        self.safe_to_retry = safe_to_retry
        self.headers: dict[str, str] = {}

    def saying(self, message: str) -> GatewayError:
        """This error, in other words."""
        self.message = clipped(message)
        return self

    def openai_error(self) -> dict[str, Any]:
        """The error as an OpenAI client library parses it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> GatewayError:
    """400: the caller's fault; asking again unchanged cannot help."""
    return GatewayError(400, message, code=code, param=param, safe_to_retry=False)


def no_pair(message: str) -> GatewayError:
    """503: no complete compatible pair is up."""
    return GatewayError(
        503, message, code="no_pair_available", kind="service_unavailable", retry_after_s=2.0, safe_to_retry=True
    )


def overloaded(message: str, *, retry_after_s: float) -> GatewayError:
    """429: pairs are up and full; the queue would not serve this in time."""
    return GatewayError(
        429,
        message,
        code="overloaded",
        kind="rate_limit_error",
        stage=Stage.QUEUED,
        retry_after_s=retry_after_s,
        safe_to_retry=True,
    )


def upstream_failed(
    message: str, *, code: str, stage: Stage, definite: bool, status: int = 502, retry: bool = True
) -> GatewayError:
    """502 (or 504): engines failed and no further attempt is allowed; `retry`: whether asking again may help."""
    return GatewayError(
        status,
        message,
        code=code,
        kind="server_error",
        stage=stage,
        definite=definite,
        retry_after_s=1.0 if retry else None,
        safe_to_retry=retry,
    )
