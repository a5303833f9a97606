"""Errors: their OpenAI shape, what each kind says of asking again, and the headers that libraries obey."""

from __future__ import annotations

import orjson
import pytest

from engines.types import Stage
from gateway.errors import GatewayError, bad_request, no_pair, overloaded, upstream_failed
from gateway.http_server import error_response


def test_an_error_has_the_shape_that_client_libraries_parse() -> None:
    error = bad_request("n must be a number", param="n")
    assert error.openai_error() == {
        "error": {
            "message": "n must be a number",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }
    assert str(error) == error.message


def test_a_clients_own_text_is_told_back_up_to_a_bound() -> None:
    error = bad_request("m" * 10**6, param="p" * 10**6)
    assert error.param is not None
    assert (len(error.message), len(error.param), len(str(error))) == (1000, 200, 1000)
    assert error.message.endswith("…")
    whole = bad_request("m" * 1000, param="p" * 200)
    assert (whole.message, whole.param) == ("m" * 1000, "p" * 200)


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry", "after_s"),
    [
        (bad_request("x"), 400, "invalid_request_error", False, None),
        (no_pair("x"), 503, "service_unavailable", True, 2.0),
        (overloaded("x", retry_after_s=7.0), 429, "rate_limit_error", True, 7.0),
        (upstream_failed("x", code="c", stage=Stage.STREAMING, definite=False), 502, "server_error", True, 1.0),
        (
            upstream_failed("x", code="c", stage=Stage.STREAMING, definite=False, status=504, retry=False),
            504,
            "server_error",
            False,
            None,
        ),
    ],
)
def test_what_each_kind_says_of_asking_again(
    error: GatewayError, status: int, kind: str, retry: bool, after_s: float | None
) -> None:
    assert (error.status, error.kind, error.safe_to_retry, error.retry_after_s) == (status, kind, retry, after_s)


def test_headers_of_an_answer() -> None:
    error = overloaded("x", retry_after_s=1.2)
    error.headers["x-pdgate-attempts"] = "0"
    answer = error_response(error)
    assert (answer.status, answer.content_type) == (429, "application/json")
    assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("2", "true")
    assert answer.headers["x-pdgate-attempts"] == "0"
    assert isinstance(answer.body, bytes)
    assert orjson.loads(answer.body) == error.openai_error()


@pytest.mark.parametrize(("after_s", "header"), [(0.0, "1"), (0.4, "1"), (1.0, "1"), (59.01, "60")])
def test_retry_after_is_whole_seconds_and_never_zero(after_s: float, header: str) -> None:
    assert error_response(overloaded("x", retry_after_s=after_s)).headers["retry-after"] == header


def test_what_cannot_be_helped_by_asking_again_says_so() -> None:
    answer = error_response(bad_request("x"))
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


def test_where_nothing_is_known_nothing_is_said() -> None:
    assert "x-should-retry" not in error_response(GatewayError(500, "x", code="c")).headers


def test_a_401_names_the_scheme() -> None:
    assert error_response(GatewayError(401, "x", code="c")).headers["www-authenticate"] == "Bearer"
    assert "www-authenticate" not in error_response(GatewayError(403, "x", code="c")).headers
