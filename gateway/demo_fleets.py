"""The fleets that `pdgate demo` shows, and how it knows what they must answer: emulated servers, or real ones."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from engines import sglang_process
from engines.emulator.process import EmulatedServer
from engines.emulator.tokenizer_files import FOLDER
from engines.emulator.tokens import decode, encode, render_chat
from engines.server_process import ServerProcess
from engines.sglang_process import SglangServer
from engines.token_rule import sampling_key, unpack
from engines.types import Role
from failover.chaos.history import Attempt, Choice, Limits
from failover.chaos.segments import Read, Whole, explain
from gateway.demo_guest import CHAT_S, READY_S, Chat, Guest

_SPEED = 5.0
_SYSTEM = "You are the guide of a museum of failures. " + " ".join(
    f"Rule {number}: never lose, repeat or splice a token, however many servers die." for number in range(1, 60)
)
_SHORT_SYSTEM = _SYSTEM[:800]
"""A real server runs on the user's own cores."""
_SERVER_BYTES = 2 << 30
"""What a real server of the tiny model takes, with room to spare."""


Ask = Callable[[str, int], Awaitable[Chat]]
"""Asks a question for so many tokens, greedily."""
Get = Callable[[str], Awaitable[Any]]
"""The JSON at a URL."""
AmidStreams = Callable[[], Awaitable[ServerProcess]]
"""Waits until a decode is amid streams, and says which."""


class DemoFleet(ABC):
    """Servers, and what their answers must be. `story`: what they are; `oracle`: where that is known from."""

    story: str
    patience: str = ""
    """What to say of how long it takes to start."""
    oracle: str
    model: str
    tokenizer_path: Path
    system: str
    streams: int
    calls: int
    long_tokens: int
    """Of a stream."""
    call_tokens: int
    """Of a chat that is not streamed."""
    release_s: float
    """How long KV may stay reserved after a kill."""

    def __init__(self, prefills: Sequence[ServerProcess], decodes: Sequence[ServerProcess]) -> None:
        self.prefills = prefills
        self.decodes = decodes

    @property
    def servers(self) -> Sequence[ServerProcess]:
        return (*self.prefills, *self.decodes)

    def body(self, question: str, tokens: int) -> dict[str, Any]:
        """The chat that asks a question."""
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": question}]
        return {"model": self.model, "messages": messages, "max_tokens": tokens, "temperature": 0}

    @abstractmethod
    async def learn(self, questions: Sequence[str], tokens: int, ask: Ask) -> None:
        """Find out the answers, where that takes asking, before anything is disturbed."""

    async def prepare(self, guest: Guest) -> None:
        """Find out, while all servers live, what `is_true` needs of them; wait until chats are asked for with ids."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + READY_S
        while loop.time() < until_s:
            chat = await guest.stream("Are you open?", 1)
            if (await guest.explain(chat.request_id))["attempts"][-1]["plain_chat_reason"] is None:
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the gateway did not come to know how its servers tokenize")

    @asynccontextmanager
    async def catching(self, guest: Guest) -> AsyncIterator[AmidStreams]:
        """Streams that are asked for inside of this are waited for."""
        yield partial(guest.busiest, self.decodes, at_least=2)

    @abstractmethod
    async def is_true(self, chat: Chat, guest: Guest) -> bool:
        """Whether this is an answer that the model gives: for a greedy chat the only one."""

    @abstractmethod
    async def held_kv_tokens(self, server: ServerProcess, get: Get) -> int:
        """The tokens of KV that requests hold on a server."""


class EmulatedFleet(DemoFleet):
    """Two prefills and two decodes, emulated: the next token follows from the context by a rule that is known here."""

    story = "2 prefill and 2 decode servers (emulated)"
    oracle = "the model's own answer"
    model = "emulated"
    tokenizer_path = FOLDER
    system = _SYSTEM
    streams, calls, long_tokens, call_tokens = 12, 8, 300, 140
    release_s = 30.0 / _SPEED + 20.0

    def __init__(self) -> None:
        flags = ("--enable-cache-report",)
        roles = (Role.PREFILL, Role.PREFILL), (Role.DECODE, Role.DECODE)
        prefills, decodes = ([EmulatedServer(role, speed=_SPEED, arguments=flags) for role in each] for each in roles)
        super().__init__(prefills, decodes)
        self._secrets: dict[str, bytes] = {}

    async def learn(self, questions: Sequence[str], tokens: int, ask: Ask) -> None:
        """Nothing: the rule tells."""

    async def prepare(self, guest: Guest) -> None:
        await super().prepare(guest)
        for server in self.servers:
            self._secrets[server.url] = bytes.fromhex((await guest.get(f"{server.url}/emulator/secret"))["secret"])

    @asynccontextmanager
    async def catching(self, guest: Guest) -> AsyncIterator[AmidStreams]:
        """Each decode holds one stream in its middle: all would be over before they are looked at on a busy machine."""
        holds = dict[ServerProcess, str]()
        for server in self.decodes:
            middle = {"stage": "token", "k": self.call_tokens + 1}  # no other chat comes so far
            hold = await guest.send("POST", f"{server.url}/emulator/hold", middle)
            holds[server] = f"{server.url}/emulator/hold/{hold['hold_id']}"
        yield partial(_first_held, holds, guest)
        for server, url in holds.items():
            if server.returncode is None:
                await guest.send("DELETE", url)

    async def is_true(self, chat: Chat, guest: Guest) -> bool:
        """Attempt by attempt: each must have gone on from just what the one before had written."""
        prompt = tuple(unpack(encode(render_chat(self.body(chat.question, 1)["messages"]))))
        tries = (await guest.explain(chat.request_id))["attempts"]
        attempts = tuple(self._attempt(each, sampled=chat.sampled) for each in tries)
        read = Read(chat.text, None, chat.finish)
        found = explain(Choice(prompt, attempts), Limits(self._asked_tokens(chat)), read, decode)
        return isinstance(found, Whole) and len(found.ids) == chat.completion_tokens

    def _asked_tokens(self, chat: Chat) -> int:
        return chat.completion_tokens if chat.finish == "length" else self.long_tokens

    def _attempt(self, told: Mapping[str, Any], *, sampled: bool) -> Attempt:
        rid, pair = told["rid"], (told["prefill"], told["decode"])
        own, other = (sampling_key(self._secrets[url], rid) if sampled else b"" for url in pair)
        return Attempt(rid, int(told["room"]), *pair, told["decided_s"], told["ended_s"], own, other)

    async def held_kv_tokens(self, server: ServerProcess, get: Get) -> int:
        return sum((await get(f"{server.url}/emulator/ledger"))["by_room"].values())


class SglangFleet(DemoFleet):
    """A prefill and one or two decodes of real SGLang; a greedy answer must be what it was when nothing died.

    Raises NoEnvironment where there is none to start them from.
    """

    oracle = "the answer when nothing was killed"
    patience = " (half a minute to two)"
    system = _SHORT_SYSTEM
    streams, calls, long_tokens, call_tokens = 4, 4, 150, 150
    release_s = 40.0
    """A decode keeps the KV of a request whose prefill died for 30 s."""

    def __init__(self, directory: Path | None) -> None:
        launch = sglang_process.load(directory)
        decodes = 2 if _available_bytes() > 3 * _SERVER_BYTES else 1
        super().__init__(
            [SglangServer(Role.PREFILL, launch)], [SglangServer(Role.DECODE, launch) for _ in range(decodes)]
        )
        self.story = f"1 prefill and {decodes} decode servers of SGLang (their output: {launch.directory / 'logs'})"
        self.model = launch.served_model_name
        self.tokenizer_path = launch.model_dir
        self._answers: dict[tuple[str, int], str] = {}

    async def learn(self, questions: Sequence[str], tokens: int, ask: Ask) -> None:
        for question in questions:
            answer = await ask(question, tokens)
            if answer.error:
                raise RuntimeError(f"a chat failed before anything was killed: {answer.error}")
            self._answers[question, tokens] = answer.text

    async def is_true(self, chat: Chat, guest: Guest) -> bool:
        """A sampled answer can only be known to have all its tokens."""
        asked = (chat.question, chat.completion_tokens)
        if chat.sampled:
            return bool(chat.text) and (chat.finish == "stop" or chat.completion_tokens == self.long_tokens)
        if asked not in self._answers:
            await self.learn([chat.question], chat.completion_tokens, guest.call)
        return self._answers[asked] == chat.text

    async def held_kv_tokens(self, server: ServerProcess, get: Get) -> int:
        """By `/v1/loads`, which says what requests use: what the radix cache keeps is not counted."""
        loads = await get(f"{server.url}/v1/loads")
        return sum(rank["num_used_tokens"] for rank in loads["loads"])


async def _first_held(holds: Mapping[ServerProcess, str], guest: Guest) -> ServerProcess:
    async with asyncio.timeout(CHAT_S):
        while True:
            for server, url in holds.items():
                if (await guest.get(url))["state"] == "held":
                    return server
            await asyncio.sleep(0.01)


def _available_bytes() -> int:
    """Of memory, on this machine, now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 0
