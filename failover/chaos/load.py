"""What the clients of a run ask, and when: fixed by the plan, the seed and the form. Pure.

One byte of a prompt is one token of an emulated engine, and a word about one of a real model; templates and tools come
on top. Prompts differ from all others within their first few bytes, unless their kind shares its beginning, so that no
answer can be mistaken for another's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from random import Random
from typing import Any

from failover.chaos.scenario import LoadPlan, ScenarioError

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TRACE_BLOCK_TOKENS = 512
"""Prompt tokens that one hash id of a Mooncake trace stands for (FAST'25 release)."""
LONG_PROMPT_TOKENS = (4_000, 12_000)
"""Several chunks of a prefill."""
POISON = "arsenic"
"""The word that the fault `poison_prompt` makes engines die of."""
_SHARED_PREFIXES = 4
_SHARED_TOKENS = 512
_PHRASES = ("tell me more", "and then", "of the sea", "as it was", "why not", "in the end", "one by one", "once again")
_STOPS = (" ba", " mo", "tu")
"""What the emulated model writes now and then: it ends an answer after some dozens of tokens."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `leaves_after`: its client hangs up when it has read so many events; 0: before any answer."""

    number: int
    at_s: float
    kind: str
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    leaves_after: int | None = None


Fill = Callable[[str, int, Random], str]
"""A text that begins with a given one and has a given length, in whatever it is counted in."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a kind of request makes a request of: a prompt, the answer's length in tokens, and its own chance.

    `fill` writes more of a prompt.
    """

    prompt: str
    tokens: int
    model: str
    chance: Random
    fill: Fill


Made = tuple[str, Mapping[str, Any]]
"""A path and a body."""


def by_bytes(start: str, length: int, chance: Random) -> str:
    """A text of exactly `length` bytes that begins with `start`."""
    parts, size = [start], len(start)
    while size < length:
        parts.append(chance.choice(_PHRASES) + ". ")
        size += len(parts[-1])
    return "".join(parts)[:length]


def requests(
    plan: LoadPlan, seed: int, *, long: bool, trace: str = "", model: str = "emulated", fill: Fill = by_bytes
) -> tuple[Asked, ...]:
    """Every request of a run, by time; `trace`: the text of the plan's trace file, where it names one.

    `fill` writes the prompts. ScenarioError for a trace that cannot be read.
    """
    chance = Random(f"load {seed}")
    load_s = plan.duration_s[long]
    kinds, weights = list(plan.mix), list(plan.mix.values())
    coming = _of_trace(plan, trace, fill) if plan.trace else _by_chance(plan, chance, fill)
    asked = []
    for number, (at_s, prompt, tokens) in enumerate(takewhile(lambda each: each[0] < load_s, coming)):
        kind = chance.choices(kinds, weights)[0]
        own = Random(f"load {seed} {number}")
        path, body = KINDS[kind](Draft(prompt, tokens, model, own, fill))
        leaves_after = _leaves_after(kind, body, tokens, plan.leave_ratio, own)
        asked.append(Asked(number, round(at_s, 4), kind, path, body, leaves_after=leaves_after))
    return tuple(asked)


def _leaves_after(kind: str, body: Mapping[str, Any], tokens: int, leave_ratio: float, chance: Random) -> int | None:
    if kind == "leaves" or (body.get("stream") and chance.random() < leave_ratio):
        return chance.randint(0, max(1, tokens // 2)) if body.get("stream") else 0
    return None


# -- when, and how long ---------------------------------------------------------------------------------------------


def _by_chance(plan: LoadPlan, chance: Random, fill: Fill) -> Iterator[tuple[float, str, int]]:
    """Time, prompt and tokens of the answer of one request after another: a Poisson process, lengths evenly spread."""
    at_s, number = 0.0, 0
    while True:
        at_s += chance.expovariate(plan.rate_per_s)
        length = chance.randint(*plan.prompt_tokens)
        yield at_s, fill(f"{number:06d} ", length, chance), chance.randint(*plan.output_tokens)
        number += 1


def _of_trace(plan: LoadPlan, trace: str, fill: Fill) -> Iterator[tuple[float, str, int]]:
    """The same from a trace, lengths kept within those of the plan; equal hash ids give equal text."""
    rows = sorted(_rows(trace), key=lambda row: row[0])
    for number, (at_ms, prompt_tokens, output_tokens, ids) in enumerate(rows):
        at_s = (at_ms - rows[0][0]) / 1000 / plan.trace_speed
        known = "".join(fill(f"block {block} ", TRACE_BLOCK_TOKENS, Random(f"block {block}")) for block in ids)
        length = _within(prompt_tokens, plan.prompt_tokens)
        prompt = fill(known or f"{number:06d} ", length, Random(f"trace {number}"))
        yield at_s, prompt, _within(output_tokens, plan.output_tokens)


def _rows(trace: str) -> Iterator[tuple[float, int, int, Sequence[int]]]:
    for number, line in enumerate(trace.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            ids = [int(each) for each in row["hash_ids"]]
            yield float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), ids
        except (ValueError, TypeError, KeyError) as error:
            form = "a JSON object with timestamp (ms), input_length, output_length and hash_ids"
            raise ScenarioError("load.trace", f"line {number} is not {form}: {error!r}") from error


def _within(value: int, bounds: tuple[int, int]) -> int:
    return min(max(value, bounds[0]), bounds[1])


def by_words(most: int) -> Fill:
    """What fills with words, `most` at most: each is about one token of a real model, with the space behind it."""

    def fill(start: str, length: int, chance: Random) -> str:
        words = start.split()
        while len(words) < min(length, most):
            words += chance.choice(_PHRASES).split()
        return " ".join(words[: min(length, most)]) + " "

    return fill


# -- kinds ----------------------------------------------------------------------------------------------------------


def _chat(draft: Draft, *, stream: bool = True, **fields: Any) -> Made:
    """A greedy chat of exactly so many tokens, unless `fields` say otherwise; half of the streams tell usage."""
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": draft.tokens}
    messages = [{"role": "user", "content": draft.prompt}]
    body = {"model": draft.model, "messages": messages, **greedy, **_streamed(draft, stream), **fields}
    return CHAT, body


def _streamed(draft: Draft, stream: bool) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}} if stream and _either(draft) else {}
    return {"stream": stream, **usage}


def _either(draft: Draft) -> bool:
    return draft.chance.random() < 0.5


def _completion(draft: Draft) -> Made:
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": draft.tokens}
    body = {"model": draft.model, "prompt": draft.prompt, **greedy, **_streamed(draft, _either(draft))}
    return COMPLETIONS, body


def _generate(draft: Draft) -> Made:
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": draft.tokens}
    return GENERATE, {"text": draft.prompt, "sampling_params": params, "stream": _either(draft)}


def _several(draft: Draft) -> Made:
    return _chat(draft, stream=_either(draft), n=draft.chance.randint(2, 3))


def _sampled(draft: Draft) -> Made:
    return _chat(draft, stream=_either(draft), temperature=round(draft.chance.uniform(0.2, 1.2), 2))


def _seeded(draft: Draft) -> Made:
    return _chat(draft, stream=_either(draft), temperature=0.8, seed=draft.chance.randrange(2**31))


def _long(draft: Draft) -> Made:
    length = draft.chance.randint(*LONG_PROMPT_TOKENS)
    return _chat(replace(draft, prompt=draft.fill(draft.prompt, length, draft.chance)))


def _shared(draft: Draft) -> Made:
    which = draft.chance.randrange(_SHARED_PREFIXES)
    prefix = draft.fill(f"shared {which} ", _SHARED_TOKENS, Random(f"shared {which}"))
    return _chat(replace(draft, prompt=prefix + draft.prompt))


def _leaves(draft: Draft) -> Made:
    return _chat(draft, stream=_either(draft))


def _whole(draft: Draft) -> Made:
    return _chat(draft, stream=False)


def _tools(draft: Draft) -> Made:
    """Templates put tools before the prompt, so that they must differ too."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"description": draft.prompt[:16], "name": "weather", "parameters": parameters}
    return _chat(draft, tools=[{"type": "function", "function": function}])


def _stops(draft: Draft) -> Made:
    return _chat(draft, ignore_eos=False, stop=list(_STOPS))


def _poison(draft: Draft) -> Made:
    """Always the same prompt, as of clients that ask again and again."""
    return _chat(replace(draft, prompt=f"{POISON}, please"))


KINDS: Mapping[str, Callable[[Draft], Made]] = {
    "stream": _chat,
    "whole": _whole,
    "completion": _completion,
    "generate": _generate,
    "several": _several,
    "sampled": _sampled,
    "seeded": _seeded,
    "stops": _stops,
    "tools": _tools,
    "long": _long,
    "shared": _shared,
    "leaves": _leaves,
    "poison": _poison,
}
"""Kinds of request, as a plan's `mix` names them. Streams of `tools` cannot go on when their engine fails."""
