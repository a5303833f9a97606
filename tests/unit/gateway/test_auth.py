"""The one key: asked for when there is one, compared whole, refused in one shape."""

from __future__ import annotations

import pytest

from gateway.auth import check
from gateway.errors import GatewayError


def test_without_a_key_everybody_may_ask() -> None:
    check(None, {})
    check(None, {"authorization": "Bearer whatever"})


@pytest.mark.parametrize("given", ["Bearer secret", "bearer secret", "BEARER  secret "])
def test_the_key_opens(given: str) -> None:
    check("secret", {"authorization": given})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "secret"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer secre"},
        {"authorization": "Bearer secret2"},
        {"authorization": "Bearer SECRET"},
        {"authorization": "Basic secret"},
        {"authorization": "Bearer sécret"},
        {"authorization": "Bearer \udcff"},
        {"x-api-key": "secret"},
    ],
)
def test_everything_else_is_a_401(headers: dict[str, str]) -> None:
    with pytest.raises(GatewayError) as caught:
        check("secret", headers)
    error = caught.value
    assert (error.status, error.code, error.kind) == (401, "invalid_api_key", "authentication_error")
    assert error.safe_to_retry is False
    assert "secret" not in error.message


def test_a_key_may_hold_any_characters() -> None:
    check("schlüssel", {"authorization": "Bearer schlüssel"})
