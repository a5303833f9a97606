"""The fleets that `pdgate demo` shows, and how it knows what they must answer: emulated servers, or real ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from engines import sglang_process
from engines.emulator.process import EmulatedServer
from engines.emulator.tokens import decode, encode, render_chat
from engines.server_process import ServerProcess
from engines.sglang_process import SglangServer
from engines.token_rule import continue_greedily, unpack
from engines.types import Role

_SPEED = 5.0
_SYSTEM = "You are the guide of a museum of failures. " + " ".join(
    f"Rule {number}: never lose, repeat or splice a token, however many servers die." for number in range(1, 60)
)
_SHORT_SYSTEM = _SYSTEM[:800]
"""A real server runs on the user's own cores."""
_SERVER_BYTES = 2 << 30
"""What a real server of the tiny model takes, with room to spare."""


class Answer(Protocol):
    """What is learned from: text, and the error if there was one."""

    @property
    def text(self) -> str: ...
    @property
    def error(self) -> str: ...


Ask = Callable[[str, int], Awaitable[Answer]]
"""Asks a question for so many tokens, greedily."""
Get = Callable[[str], Awaitable[Any]]
"""The JSON at a URL."""


class DemoFleet(ABC):
    """Servers, and what their answers must be. `story`: what they are; `oracle`: where that is known from."""

    story: str
    patience: str = ""
    """What to say of how long it takes to start."""
    oracle: str
    model: str
    system: str
    streams: int
    calls: int
    long_tokens: int
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

    @abstractmethod
    async def expected(self, question: str, tokens: int, ask: Ask) -> str:
        """The only right answer."""

    @abstractmethod
    async def held_kv_tokens(self, server: ServerProcess, get: Get) -> int:
        """The tokens of KV that requests hold on a server."""


class EmulatedFleet(DemoFleet):
    """Two prefills and two decodes, emulated: the next token follows from the context by a rule that is known here."""

    story = "2 prefill and 2 decode servers (emulated)"
    oracle = "the model's own answer"
    model = "emulated"
    system = _SYSTEM
    streams, calls, long_tokens = 12, 8, 300
    release_s = 30.0 / _SPEED + 2.0

    def __init__(self) -> None:
        flags = ("--enable-cache-report",)
        roles = (Role.PREFILL, Role.PREFILL), (Role.DECODE, Role.DECODE)
        prefills, decodes = ([EmulatedServer(role, speed=_SPEED, arguments=flags) for role in each] for each in roles)
        super().__init__(prefills, decodes)

    async def learn(self, questions: Sequence[str], tokens: int, ask: Ask) -> None:
        """Nothing: the rule tells."""

    async def expected(self, question: str, tokens: int, ask: Ask) -> str:
        prompt = unpack(encode(render_chat(self.body(question, tokens)["messages"])))
        return decode(continue_greedily(prompt, tokens))

    async def held_kv_tokens(self, server: ServerProcess, get: Get) -> int:
        return sum((await get(f"{server.url}/emulator/ledger"))["by_room"].values())


class SglangFleet(DemoFleet):
    """A prefill and one or two decodes of real SGLang; a greedy answer must be what it was when nothing died.

    Raises NoEnvironment where there is none to start them from.
    """

    oracle = "the answer when nothing was killed"
    patience = " (half a minute to two)"
    system = _SHORT_SYSTEM
    streams, calls, long_tokens = 4, 4, 150
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
        self._answers: dict[tuple[str, int], str] = {}

    async def learn(self, questions: Sequence[str], tokens: int, ask: Ask) -> None:
        for question in questions:
            answer = await ask(question, tokens)
            if answer.error:
                raise RuntimeError(f"a chat failed before anything was killed: {answer.error}")
            self._answers[question, tokens] = answer.text

    async def expected(self, question: str, tokens: int, ask: Ask) -> str:
        if (question, tokens) not in self._answers:
            await self.learn([question], tokens, ask)
        return self._answers[question, tokens]

    async def held_kv_tokens(self, server: ServerProcess, get: Get) -> int:
        """By `/v1/loads`, which says what requests use: what the radix cache keeps is not counted."""
        loads = await get(f"{server.url}/v1/loads")
        return sum(rank["num_used_tokens"] for rank in loads["loads"])


def _available_bytes() -> int:
    """Of memory, on this machine, now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 0
