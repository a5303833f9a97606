"""Patching the identity changes the identity, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway import sse

IDS = st.binary(min_size=16, max_size=16).map(bytes.hex)
TIMES = st.integers(1_000_000_000, 9_999_999_999)


@st.composite
def answers(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    rid = draw(IDS)
    odd = st.sampled_from([f'"id":"{rid}"', f'\\"id":"{rid}"', '"created":1795955382', '"', "\\", rid])
    text = "".join(draw(st.lists(st.one_of(odd, st.text(max_size=6)), max_size=5)))
    if draw(st.booleans()):
        return {"text": text, "output_ids": [1], "meta_info": {"id": rid, "finish_reason": None}}, rid
    choice = {"index": 0, "delta": {"content": text, "tool_calls": [{"id": text, "created": text}]}}
    return {"id": rid, "object": "chat.completion.chunk", "created": draw(TIMES), "choices": [choice]}, rid


@given(answers(), IDS, TIMES)
def test_only_the_identity_changes(answer: tuple[dict[str, Any], str], public_id: str, created: int) -> None:
    event, rid = answer
    frame = b"data: " + orjson.dumps(event) + b"\n\n"
    patched = sse.patch_identity(frame, rid.encode(), public_id.encode(), b"%d" % created)
    if "meta_info" in event:
        expected = {**event, "meta_info": {**event["meta_info"], "id": public_id}}
    else:
        expected = {**event, "id": public_id, "created": created}
    assert json.loads(patched.removeprefix(b"data: ")) == expected
    assert len(patched) == len(frame)
