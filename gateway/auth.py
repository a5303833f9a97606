"""Who may ask: the one key that clients and engines share, as sglang-router's `--api-key` has it.

Observed of sglang-router 0.3.2: with the flag, generation without `Authorization: Bearer KEY` is answered 401,
`/health` and `/v1/models` stay open, and the same key is sent to every worker.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from gateway.errors import GatewayError


def check(api_key: str | None, headers: Mapping[str, str]) -> None:
    """Raise GatewayError 401 unless `headers` carry the key; without a key everybody may ask."""
    if api_key is None:
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    sent = given.strip().encode(errors="surrogateescape")  # bytes that are no UTF-8 arrive as surrogates
    if scheme.lower() != "bearer" or not hmac.compare_digest(sent, api_key.encode()):
        raise GatewayError(
            401,
            "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            kind="authentication_error",
            safe_to_retry=False,
        )
