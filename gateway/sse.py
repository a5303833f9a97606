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
    sendable = message.encode(errors="replace").decode()  # an engine's text may hold half a surrogate pair
    error = {"message": sendable, "type": kind, "param": param, "code": code}
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"


def comment(text: str) -> bytes:
    """An event without data."""
    return b": " + " ".join(text.split()).encode(errors="replace") + b"\n\n"


def patch_identity(frame: bytes, rid: bytes, public_id: bytes, created: bytes) -> bytes:
    """`frame`, or a whole JSON body, with the engine's request id and creation time replaced by the client's.

    Ids have equal lengths, and times (Unix seconds) ten digits, so that nothing else moves. A quote inside generated
    text is escaped: no text can look like these fields. In `/generate` events the id lies behind the text and there is
    no time.
    """
    patched = frame.replace(b'"id":"' + rid + b'"', b'"id":"' + public_id + b'"', 1)
    start = patched.find(_CREATED) + len(_CREATED)
    end = start + _CREATED_DIGITS
    if start < len(_CREATED) or not patched[start:end].isdigit() or patched[end : end + 1].isdigit():
        return patched
    return patched[:start] + created + patched[end:]
