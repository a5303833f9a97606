"""A client of the gateway, as `pdgate demo` needs one: it asks, reads, and keeps what it saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from engines.server_process import ServerProcess

READY_S = 120.0
"""A busy machine takes so long to start a dozen processes."""
CHAT_S = 60.0
_ANSWER_S = 20.0


@dataclass(frozen=True, slots=True)
class Chat:
    """One answer as a client saw it."""

    question: str
    text: str
    prefill: str
    decode: str
    attempts: int
    request_id: str
    cached_tokens: int
    completion_tokens: int = 0
    finish: str = ""
    sampled: bool = False
    error: str = ""


class Guest:
    """A client of the gateway."""

    def __init__(self, url: str, http: aiohttp.ClientSession, body: Callable[[str, int], dict[str, Any]]) -> None:
        self.url = url
        self._http = http
        self._body = body

    async def get(self, url: str) -> Any:
        return await self.send("GET", url)

    async def send(self, method: str, url: str, body: Any = None) -> Any:
        """The JSON that is answered."""
        async with self._http.request(method, url, json=body, timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as answer:
            return await answer.json()

    async def wait_ready(self, pairs: int) -> None:
        """Wait until the gateway has found all its pairs; RuntimeError if it does not."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + READY_S
        while loop.time() < until_s:
            try:
                if (await self.get(f"{self.url}/readyz"))["pairs"] >= pairs:
                    return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.05)
        raise RuntimeError(f"the gateway did not find {pairs} pairs within {READY_S:g} s")

    async def explain(self, request_id: str) -> dict[str, Any]:
        record: dict[str, Any] = await self.get(f"{self.url}/pdgate/explain/{request_id}")
        return record

    async def busiest(self, decodes: Sequence[ServerProcess], at_least: int) -> ServerProcess:
        """The decode with most requests running, once it has some."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + CHAT_S
        while loop.time() < until_s:
            loads = [(await self.get(f"{server.url}/v1/loads"))["loads"][0] for server in decodes]
            running, busiest = max((load["num_running_reqs"], index) for index, load in enumerate(loads))
            if running >= at_least:
                return decodes[busiest]
            await asyncio.sleep(0.01)
        raise RuntimeError("no decode got any work")

    async def call(self, question: str, tokens: int) -> Chat:
        """One chat, not streamed."""
        body = self._body(question, tokens)
        async with self._post(body) as answer:
            parsed = await answer.json()
            if answer.status != 200:
                return _chat(question, "", answer.headers, None, parsed["error"]["message"])
            text = parsed["choices"][0]["message"]["content"]
            chat = _chat(question, text, answer.headers, parsed["usage"])
            return replace(chat, finish=parsed["choices"][0]["finish_reason"])

    async def stream(
        self, question: str, tokens: int, on_first: Callable[[], None] = lambda: None, *, sampled: bool = False
    ) -> Chat:
        """One streamed chat; `on_first` is called once: at its first content, or at its end if it has none."""
        body = {**self._body(question, tokens), "stream": True, "stream_options": {"include_usage": True}}
        if sampled:
            body["temperature"] = 1.0
        text, finish, usage, error, done = "", "", None, "", False
        async with self._post(body) as answer:
            if answer.status != 200:
                on_first()
                return _chat(question, "", answer.headers, None, (await answer.json())["error"]["message"])
            async for event in _events(answer):
                if event == "[DONE]":
                    done = True
                    continue
                chunk = json.loads(event)
                error = error or chunk.get("error", {}).get("message", "")
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    begins = not text
                    text += choice["delta"].get("content") or ""
                    finish = choice.get("finish_reason") or finish
                    if begins and text:
                        on_first()
        if not text:
            on_first()  # a sampled answer may be over with its first token
        chat = _chat(question, text, answer.headers, usage, error or ("" if done else "the stream just ended"))
        return replace(chat, finish=finish, sampled=sampled)

    def _post(self, body: dict[str, Any]) -> Any:
        timeout = aiohttp.ClientTimeout(total=CHAT_S)
        return self._http.post(f"{self.url}/v1/chat/completions", json=body, timeout=timeout)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()


def _chat(question: str, text: str, headers: Any, usage: Any, error: str = "") -> Chat:
    details = (usage or {}).get("prompt_tokens_details") or {}
    return Chat(
        question,
        text,
        headers.get("x-pdgate-prefill", ""),
        headers.get("x-pdgate-decode", ""),
        int(headers.get("x-pdgate-attempts", 0)),
        headers.get("x-pdgate-request-id", ""),
        details.get("cached_tokens") or 0,
        (usage or {}).get("completion_tokens") or 0,
        error=error,
    )
