"""A client that checks answers byte for byte: asks, reads what comes, and knows what should have come.

The truth is computed from the rule of the emulated model, not from a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import orjson

from engines.emulator.tokens import decode, encode, render_chat
from engines.token_rule import EOS_TOKEN, continue_greedily, unpack

MODEL = "emulated"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
DONE = "[DONE]"
_serial = count(1)


def new_prompt(length: int = 300) -> str:
    """A prompt that no server has seen: it differs from all others within its first block."""
    return f"{next(_serial):06d} tell me more. ".ljust(length, "x")


def chat(prompt: str, tokens: int = 40, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """The body of a greedy chat whose answer has exactly `tokens` tokens."""
    message = {"role": "user", "content": prompt}
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
    return {"model": MODEL, "messages": [message], **greedy, "stream": stream, **fields}


def completion(prompt: Any, tokens: int = 40, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """The same as a text completion."""
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
    return {"model": MODEL, "prompt": prompt, **greedy, "stream": stream, **fields}


def expected_text(prompt: str, tokens: int) -> str:
    """The true answer to a chat of one user message."""
    return continued(render_chat([{"role": "user", "content": prompt}]), tokens)


def continued(text: str, tokens: int) -> str:
    """The true greedy continuation of a text."""
    ids = continue_greedily(unpack(encode(text)), tokens, ignore_eos=True)
    return decode([token for token in ids if token != EOS_TOKEN])


@dataclass
class Answer:
    """What one client got, as far as it came. `ended`: the body came to its proper end."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytearray = field(default_factory=bytearray)
    events: list[Any] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    done: int = 0
    body: Any = None
    ended: bool = False
    grew: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    path: str = ""
    asked: Any = None
    asked_s: float = 0.0
    read: list[tuple[float, Any]] = field(default_factory=list)
    """What was read and when, by the loop's clock: events, the body, or bytes that are neither."""
    over: bool = False
    """Its client reads no more, for it has all or its connection broke."""

    def text(self, index: int = 0) -> str:
        """The text of one choice: of a stream so far, or of a whole body."""
        choices = [choice for event in self.events for choice in event.get("choices") or ()]
        choices += (self.body or {}).get("choices") or ()
        return "".join(_text(choice) for choice in choices if choice["index"] == index)

    @property
    def errors(self) -> list[Any]:
        """The error events of a stream, or the error of a body."""
        bodies = [*self.events, self.body] if isinstance(self.body, dict) else self.events
        return [body["error"] for body in bodies if "error" in body]

    @property
    def attempts(self) -> int:
        return int(self.headers["x-pdgate-attempts"])

    @property
    def request_id(self) -> str:
        return self.headers["x-pdgate-request-id"]

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def check_whole(self, text: str, attempts: int | None = None) -> None:
        """It is the whole true answer, in so many attempts."""
        assert (self.status, self.errors, self.ended) == (200, [], True), self
        assert self.text() == text
        assert self.done == (1 if self.is_stream else 0)
        assert attempts is None or self.attempts == attempts, f"{self.attempts} attempts instead of {attempts}"

    def check_refused(self, *statuses: int) -> None:
        """It is one clear error with a real status, in OpenAI's shape."""
        assert self.status in statuses, self
        assert not self.is_stream
        check_error(self.body["error"])

    def check_broken(self, text: str) -> None:
        """It is a stream that began with true text and ended with one clear error event, and no [DONE]."""
        assert (self.status, self.done, self.ended) == (200, 0, True), self
        assert self.text()
        assert text.startswith(self.text())
        assert len(self.errors) == 1, self
        assert "error" in self.events[-1]
        check_error(self.errors[0])


asked_answers: list[Answer] = []
"""All that was asked with `ask` and not judged yet (`history.judge`)."""


def check_error(error: Any) -> None:
    """An error as OpenAI's libraries read it, with words in it."""
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"]
    assert isinstance(error["code"], str)
    assert isinstance(error["type"], str)


def _text(choice: Mapping[str, Any]) -> str:
    owner = choice.get("delta") or choice.get("message")
    return str((owner.get("content") if owner is not None else choice.get("text")) or "")


async def ask(
    http: aiohttp.ClientSession, url: str, body: Any, path: str = CHAT, answer: Answer | None = None
) -> Answer:
    """Post `body` and read all that comes; `answer`, if given, grows while it comes."""
    answer = Answer() if answer is None else answer
    answer.url, answer.path, answer.asked, answer.asked_s = url, path, body, _now_s()
    asked_answers.append(answer)
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    try:
        await _read(http, answer, data)
    except aiohttp.ClientConnectorError:
        asked_answers.remove(answer)  # nobody was asked
        raise
    except aiohttp.ClientError:
        answer.over = True
        raise
    return answer


async def _read(http: aiohttp.ClientSession, answer: Answer, data: bytes) -> None:
    headers = {"content-type": "application/json"}
    async with http.post(answer.url + answer.path, data=data, headers=headers) as reply:
        answer.status, answer.headers = reply.status, reply.headers
        answer.grew.set()
        pending = b""
        try:
            async for chunk in reply.content.iter_any():
                answer.raw += chunk
                if answer.is_stream:
                    pending = _take_events(answer, pending + chunk)
                answer.grew.set()
        except aiohttp.ClientPayloadError:
            answer.over = True
            return
    answer.ended = answer.over = not pending
    if not answer.is_stream:
        answer.body = orjson.loads(answer.raw)
        answer.read.append((_now_s(), answer.body))
    elif pending:
        answer.read.append((_now_s(), pending))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _take_events(answer: Answer, data: bytes) -> bytes:
    *frames, rest = data.split(b"\n\n")
    for frame in frames:
        payload = frame.removeprefix(b"data: ")
        if payload == b"[DONE]":
            answer.done += 1
            answer.read.append((_now_s(), DONE))
        elif frame.startswith(b":"):
            answer.comments.append(frame[1:].decode().strip())
        else:
            answer.events.append(orjson.loads(payload))
            answer.read.append((_now_s(), answer.events[-1]))
    return rest
