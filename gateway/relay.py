"""Calls that need one server and no pair: tokenize, detokenize."""

from __future__ import annotations

from engines.errors import UpstreamError
from engines.types import Stage
from gateway.context import Gateway
from gateway.errors import no_pair, upstream_failed


async def relay(gw: Gateway, path: str, body: bytes) -> tuple[int, bytes]:
    """A call that any one server answers (tokenize, detokenize): status and body of the first that is up."""
    ready = [view for view in gw.fleet.views() if view.health.takes_rooms]
    for view in ready:
        try:
            return await gw.engine.post(view, path, body, gw.config.deadlines.first_output_s)
        except UpstreamError as error:
            if not error.definite:
                text = f"{view.engine_id}: {error.message}"
                raise upstream_failed(text, code="engine_failed", stage=Stage.DISPATCHED, definite=False) from error
    raise no_pair(f"no server is up to answer {path}")
