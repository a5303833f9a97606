"""What is recorded of an answer, on every route: a good one passes the checker, a spoiled one does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engines.emulator.tokens import decode
from failover.chaos.checker import check
from failover.chaos.history import History
from tests.scenarios.client import CHAT, COMPLETIONS, DONE, GENERATE, Answer, ask, chat, completion, new_prompt
from tests.scenarios.cluster import Cluster
from tests.scenarios.history import recorded, taken

pytestmark = pytest.mark.asyncio(loop_scope="session")


def generate(**fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    return {"text": new_prompt(), "sampling_params": {**sampling, **fields.pop("sampling", {})}, **fields}


def bodies() -> dict[str, tuple[str, dict[str, Any]]]:
    usage = {"stream_options": {"include_usage": True}}
    return {
        "chat": (CHAT, chat(new_prompt())),
        "chat stream": (CHAT, chat(new_prompt(), stream=True, **usage)),
        "sampled chat stream": (CHAT, chat(new_prompt(), 200, stream=True, temperature=1)),
        "several chats": (CHAT, chat(new_prompt(), stream=True, n=3, temperature=1)),
        "completion": (COMPLETIONS, completion(new_prompt(), temperature=1, ignore_eos=False)),
        "completions with ids": (COMPLETIONS, completion([new_prompt(), "b"], stream=True, n=2, return_token_ids=True)),
        "echo": (COMPLETIONS, completion(new_prompt(), stream=True, echo=True, stop=["ba", "é"])),
        "generate": (GENERATE, generate()),
        "generate stream": (GENERATE, generate(stream=True, sampling={"temperature": 1, "max_new_tokens": 200})),
        "refused": (CHAT, {"messages": []}),
    }


async def history_of(cluster: Cluster, answer: Answer) -> History:
    return await recorded(cluster, [answer])


@pytest.mark.parametrize("name", bodies())
async def test_every_route_is_recorded(two_pairs: Cluster, name: str) -> None:
    path, body = bodies()[name]
    answer = await ask(two_pairs.http, two_pairs.url, body, path)
    assert taken(two_pairs) == [answer]
    history = await history_of(two_pairs, answer)
    assert [str(each) for each in check(history, decode)] == []
    (request,) = history.requests
    assert (answer.status == 200) == bool(request.choices)
    read = sum(len(event.text) for event in request.events)
    assert (answer.status == 200) == (read > 60 or name in ("echo", "completion"))


SPOILS: dict[str, Callable[[Answer], Any]] = {
    "a lost event": lambda answer: answer.read.pop(5),
    "an event twice": lambda answer: answer.read.insert(5, answer.read[5]),
    "no terminator": lambda answer: answer.read.remove(answer.read[-1]),
    "two terminators": lambda answer: answer.read.append((answer.read[-1][0], DONE)),
    "half an event": lambda answer: answer.read.append((answer.read[-1][0], b"data: {")),
    "cut": lambda answer: setattr(answer, "ended", False),
}


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("name", ["chat stream", "sampled chat stream", "completions with ids"])
async def test_a_spoiled_answer_is_found(two_pairs: Cluster, name: str, spoil: str) -> None:
    path, body = bodies()[name]
    answer = await ask(two_pairs.http, two_pairs.url, body, path)
    taken(two_pairs)
    SPOILS[spoil](answer)
    assert check(await history_of(two_pairs, answer), decode)
