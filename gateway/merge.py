"""One answer out of the answers of several engine requests: the samples and prompts that were sent one by one.

Pure. Everywhere `bodies[i]` answers the unit whose choice_index is i, and `samples` is how many were asked of each
prompt, so that prompt i // samples is what unit i was asked. Nothing that came in is changed; fields not named here are
the first's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import orjson

Json = dict[str, Any]


def merge_chat(bodies: Sequence[Json], public_id: str, created: int) -> Json:
    """One chat completion with all choices; `created` in Unix seconds."""
    return merge_completions(bodies, public_id, created, samples=len(bodies))


def merge_completions(bodies: Sequence[Json], public_id: str, created: int, samples: int) -> Json:
    """One completion with all choices, in order; the prompt tokens of a prompt count once, not once a sample."""
    choices = [{**choice, "index": index} for index, body in enumerate(bodies) for choice in _choices(body)]
    usage = merge_usage([body.get("usage") for body in bodies], samples)
    return {**bodies[0], "id": public_id, "created": created, "choices": choices, "usage": usage}


def merge_best(
    bodies: Sequence[Json], public_id: str, created: int, candidates: int, samples: int, *, with_logprobs: bool
) -> Json:
    """One completion with the `samples` best of the `candidates` of each prompt, the best first; usage counts them all.

    The best have the highest mean log-probability per generated token. Without `with_logprobs` the client had asked for
    none.
    """
    best: list[Json] = []
    for start in range(0, len(bodies), candidates):
        best += sorted(bodies[start : start + candidates], key=_mean_logprob, reverse=True)[:samples]
    cut = {} if with_logprobs else {"logprobs": None}
    choices = [{**choice, "index": index, **cut} for index, body in enumerate(best) for choice in _choices(body)]
    return {**merge_completions(bodies, public_id, created, candidates), "choices": choices}


def _mean_logprob(body: Json) -> float:
    """Of the generated tokens of a completion, which come last; the worst there is where they have none."""
    choices, usage = _choices(body), body.get("usage")
    logprobs = choices[0].get("logprobs") if choices else None
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    generated = usage.get("completion_tokens") if _makes_sense(usage) else None
    if not isinstance(values, list) or not generated:
        return -math.inf
    known = [value for value in values[-generated:] if isinstance(value, int | float)]
    return sum(known) / len(known) if known else -math.inf


def merge_generate(bodies: Sequence[Json], public_id: str) -> list[Json]:
    """The flat list that /generate answers batches and n with: prompt by prompt, sample by sample."""
    return [_with_meta_id(body, public_id, index) for index, body in enumerate(bodies)]


def merge_usage(usages: Sequence[Json | None], samples: int) -> Json | None:
    """The usage of all units together; None when none has one.

    What is said of a prompt is taken from its first sample: later samples found it in the cache.
    """
    known = [usage for usage in usages if _makes_sense(usage)]
    if not known:
        return None
    first_samples = [usage for usage in usages[::samples] if _makes_sense(usage)]
    prompt_tokens = sum(usage.get("prompt_tokens") or 0 for usage in first_samples)
    completion_tokens = sum(usage.get("completion_tokens") or 0 for usage in known)
    merged = {
        **known[0],
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": _sum_counts(usage.get("prompt_tokens_details") for usage in first_samples),
        "completion_tokens_details": _sum_counts(usage.get("completion_tokens_details") for usage in known),
    }
    if "reasoning_tokens" in merged:
        merged["reasoning_tokens"] = sum(usage.get("reasoning_tokens") or 0 for usage in known)
    return merged


def chat_chunk(chunk: Json, choice_index: int, public_id: str, created: int) -> Json:
    """A stream chunk of one unit as a chunk of the merged stream; the same for /v1/completions."""
    choices = [{**choice, "index": choice_index} for choice in _choices(chunk)]
    return {**chunk, "id": public_id, "created": created, "choices": choices}


def generate_chunk(chunk: Json, choice_index: int, public_id: str) -> Json:
    """A /generate stream chunk of one unit as a chunk of the merged stream.

    SGLang marks the chunks of a batch or of n > 1 with a top-level `index`, and leaves out the mark otherwise.
    """
    return {**_with_meta_id(chunk, public_id, choice_index), "index": choice_index}


class UsageMerger:
    """Collects the usage of every unit of a stream and gives the one chunk that the client is to see."""

    def __init__(self, units: int, samples: int) -> None:
        self._usages: list[Json | None] = [None] * units
        self._samples = samples
        self._template: Json = {}

    def add(self, choice_index: int, chunk: Json) -> bool:
        """Note a chunk's usage, if it has one; the latest of a unit counts. True for a chunk that is nothing else."""
        usage = chunk.get("usage")
        if not usage:
            return False
        self._usages[choice_index] = usage
        self._template = chunk
        return not chunk.get("choices")

    def event(self, public_id: str, created: int) -> bytes | None:
        """The final usage chunk as an SSE event; None where a unit told none: part of a sum is no usage."""
        usage = merge_usage(self._usages, self._samples)
        if usage is None or not all(map(_makes_sense, self._usages)):
            return None
        chunk = {**self._template, "id": public_id, "created": created, "choices": [], "usage": usage}
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _choices(body: Json) -> list[Json]:
    choices = body.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _makes_sense(usage: Any) -> TypeGuard[Json]:
    """Whether a usage has counts that can be added up."""
    names = ("prompt_tokens", "completion_tokens", "reasoning_tokens")
    return isinstance(usage, dict) and bool(usage) and all(type(usage.get(name) or 0) is int for name in names)


def _with_meta_id(body: Json, public_id: str, index: int) -> Json:
    """The unit's id under the public one, in the form SGLang gives to the items of a batch."""
    meta_info = body.get("meta_info")
    if not isinstance(meta_info, dict):
        return body
    return {**body, "meta_info": {**meta_info, "id": f"{public_id}_{index}"}}


def _sum_counts(details: Iterable[Json | None]) -> Json | None:
    """Counts added up by name; None when there are none at all."""
    total: dict[str, int] = {}
    for counts in details:
        for name, count in counts.items() if isinstance(counts, dict) else ():
            if type(count) is int:
                total[name] = total.get(name, 0) + count
    return total or None
