"""Server-sent events as the client sees them: identity patched in place, errors in OpenAI shape, the terminator.

Pure. Frames come whole from `engines/sse_frames.py` and leave as bytes; nothing is parsed that need not be.
"""

from __future__ import annotations

import orjson

DONE = b"data: [DONE]\n\n"
_CREATED = b'"created":'
_CREATED_DIGITS = 10


def error_event(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    """One event with an OpenAI-shaped error, which client libraries raise."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"


def patch_identity(frame: bytes, rid: bytes, public_id: bytes, created: bytes) -> bytes:
    """`frame` with the engine's request id and creation time replaced by the client's.

    Both ids have the same length. Quotes inside generated text are escaped, so no text can look like these fields.
    """
    patched = frame.replace(b'"id":"' + rid + b'"', b'"id":"' + public_id + b'"', 1)
    at = patched.find(_CREATED)
    start = at + len(_CREATED)
    end = start + _CREATED_DIGITS
    if at < 0 or not patched[start:end].isdigit():
        return patched
    return patched[:start] + created + patched[end:]
