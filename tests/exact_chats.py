"""Chats that are asked for twice, as completions of token ids and by the engine's own chat stream: one table of cases.

Both must tell a client the same. `tests/sglang` asks a real pair, `tests/scenarios` emulated ones. Ids, times and the
borders between chunks are no part of the comparison; everything else is, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import orjson
import pytest

from engines.exact_chat import ExactChatStream
from engines.exact_chat_rules import FIELDS, OPENAI_SAMPLING, Field
from engines.sse_frames import event_kind
from tests.scenarios.client import CHAT, COMPLETIONS

PLAIN = {"x-pdgate-on-failure": "error"}
"""A chat that is not to be resumed is asked for as its client did."""
DONE = b"data: [DONE]"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TRIES = 20
"""So many prompts are tried until an answer shows what its case needs."""

_ID = re.compile(rb'"id":"[^"]*"')
_CREATED = re.compile(rb'"created":\d+')
_CONTENT = re.compile(rb'"content":"((?:[^"\\]|\\.)*)"')
_LOGPROBS = re.compile(rb'"logprobs":\{.*\}(?=,"finish_reason")')
_RUNNING = re.compile(rb'\]?,"usage":\{.*\}\}$')


@dataclass(frozen=True, slots=True)
class Told:
    """What a client was told: the frames of its stream without their ends, or an error."""

    status: int
    frames: tuple[bytes, ...] = ()
    error: Any = None
    request_id: str = ""

    @property
    def text(self) -> str:
        return "".join(str(delta.get("content") or "") for delta in self._deltas())

    @property
    def finish(self) -> tuple[Any, Any]:
        """Why it ended, and what it met."""
        last = [choice for event in self._events() for choice in event["choices"] if choice["finish_reason"]]
        return (last[-1]["finish_reason"], last[-1]["matched_stop"]) if last else (None, None)

    @property
    def usage(self) -> Mapping[str, Any]:
        return dict(self._events()[-1]["usage"])

    def comparable(self) -> dict[str, Any]:
        """What must be equal: the text as JSON writes it, its logprobs, and what is around them, in order."""
        around: list[bytes] = []
        for frame in self.frames:
            frame = _CREATED.sub(b'"created":0', _ID.sub(b'"id":""', frame))
            if any(match for match in _CONTENT.findall(frame)):
                frame = _LOGPROBS.sub(b'"logprobs":{}', _CONTENT.sub(b'"content":"..."', frame))
                frame = _RUNNING.sub(b',"usage":{}}', frame)
            if frame not in around[-1:]:
                around.append(frame)
        return {
            "status": self.status,
            "error": self.error,
            "text": b"".join(match for frame in self.frames for match in _CONTENT.findall(frame)),
            "logprobs": [{**entry, "logprob": None} for entry in self._logprobs()],
            "running_usage": [event["usage"] for event in self._events() if event["choices"] and event.get("usage")][
                -1:
            ],
            "around": around,
        }

    @property
    def values(self) -> list[float]:
        """Of its logprobs."""
        return [entry["logprob"] for entry in self._logprobs()]

    def _logprobs(self) -> list[dict[str, Any]]:
        """Those of tokens with text of their own: SGLang leaves out others unless they travel with one that has."""
        entries = [entry for choice in self._choices() for entry in (choice.get("logprobs") or {}).get("content") or ()]
        return [entry for entry in entries if "\ufffd" not in entry["token"] and entry["token"] not in SPECIAL]

    def _events(self) -> list[dict[str, Any]]:
        return [orjson.loads(frame.removeprefix(b"data: ")) for frame in self.frames if frame != DONE]

    def _choices(self) -> list[dict[str, Any]]:
        return [choice for event in self._events() for choice in event["choices"]]

    def _deltas(self) -> list[dict[str, Any]]:
        return [choice["delta"] for choice in self._choices()]


def check_alike(one: Told, other: Told) -> None:
    """Their clients were told the same."""
    assert one.comparable() == other.comparable()
    assert one.values == pytest.approx(other.values, abs=1e-3)


Learn = Callable[[str], Mapping[str, Any]]
Shows = Callable[[Told], bool]


def _any(told: Told) -> bool:
    return told.status == 200


@dataclass(frozen=True, slots=True)
class Case:
    """One chat. `fields` go over the base, None takes one out; `learn` makes more of them from the answer without.

    `shows`: what the answer must hold for the case to say something; other prompts are tried until it does. `model`:
    it takes a model that obeys biases and penalties, which the emulated one does not, to show it. `by_hand`: the
    gateway leaves such a chat to the engine, since it could not be resumed; here it is asked for as a completion all
    the same. `plain`: it goes the plain way, for this reason; `counted`: so it does where engines report cached tokens.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    learn: Learn | None = None
    shows: Shows = _any
    model: bool = False
    by_hand: bool = False
    plain: str = ""
    counted: bool = False

    def body(self, model: str, number: int) -> dict[str, Any]:
        """Its body with the prompt of this number."""
        prompt = f"Tell me about {self.name}, for the {number}. time."
        base = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": 24,
        }
        return {name: value for name, value in {**base, **self.fields}.items() if value is not None}


# ---- what answers show -----------------------------------------------------------------------------------------------


def _ends(reason: str, matched: Any = ..., tokens: int | None = None) -> Shows:
    """It ends for this reason, having met this."""

    def shown(told: Told) -> bool:
        if told.status != 200 or told.finish[0] != reason or (matched is not ... and told.finish[1] != matched):
            return False
        return tokens is None or told.usage["completion_tokens"] == tokens

    return shown


def _at_least(tokens: int) -> Shows:
    return lambda told: told.status == 200 and told.usage["completion_tokens"] >= tokens


def _has(pattern: str) -> Shows:
    return lambda told: re.search(pattern, told.text) is not None


def _refused(told: Told) -> bool:
    return told.status == 400


def _middle(text: str, chars: int) -> str:
    """Characters from the middle of a text, of several tokens where there are many."""
    return text[len(text) // 2 :][:chars]


def _stop_string(text: str, chars: int = 5, **more: Any) -> dict[str, Any]:
    return {"stop": [_middle(text, chars)], **more}


def _stop_word(text: str) -> dict[str, Any]:
    return {"stop": _middle(text, 4)}


WHOLE_CHARACTER = r"[^\x00-\x7f\ufffd]"
HALF_CHARACTER = r"\ufffd"
WORDS = list(range(300, 2000, 3))
"""One of these ids comes early in any long answer."""
BYTES = {str(3 + byte): 100 for byte in "aé😀".encode()}
"""A bias that leaves the model these bytes, each a token: it stammers characters, halves of some, and rubbish."""
_LONG = {"max_tokens": 200, "ignore_eos": True}
_STAMMER = {**_LONG, "logit_bias": BYTES}
END_ID, START_ID = 2, 1
CONTEXT_TOKENS = 4096
"""Of every server that is asked."""
_TURNS = [
    {"role": "system", "content": "You are brief. Überall."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "Hello, what is it? 😀"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "the quick brown fox"}, {"type": "text", "text": "and so on"}],
    },
]
_FULL = [{"role": "user", "content": "x" * 4000}]
_BEGUN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well, the quick"}]

CASES: tuple[Case, ...] = (
    Case("the base"),
    # how long
    Case("two hundred tokens without a limit", {"max_tokens": None, "min_tokens": 200, "stop_token_ids": WORDS},
         shows=_at_least(200)),
    Case("all that the context holds", {"messages": _FULL, "max_tokens": None, "ignore_eos": True},
         shows=lambda told: told.finish[0] == "length" and told.usage["total_tokens"] == CONTEXT_TOKENS - 2),
    Case("max_completion_tokens", {"max_tokens": None, "max_completion_tokens": 7, "ignore_eos": True},
         shows=_ends("length", tokens=7)),
    Case("both limits", {"max_tokens": 24, "max_completion_tokens": 7, "ignore_eos": True},
         shows=_ends("length", tokens=7)),
    Case("one token", {"max_tokens": 1, "ignore_eos": True}, shows=_ends("length", tokens=1)),
    Case("ignore_eos", {"logit_bias": {str(END_ID): 100}, "ignore_eos": True}, shows=_ends("length"), model=True),
    Case("the end at once", {"logit_bias": {str(END_ID): 100}}, shows=_ends("stop", END_ID, 1), model=True),
    Case("min_tokens and then the end", {"logit_bias": {str(END_ID): 100}, "min_tokens": 5},
         shows=_ends("stop", END_ID), model=True),
    # what ends it
    Case("stop string", _LONG, _stop_string, _ends("stop")),
    Case("stop string as a text", _LONG, _stop_word, _ends("stop")),
    Case("stop string kept", _LONG, partial(_stop_string, no_stop_trim=True), _ends("stop")),
    Case("stop string of one character", _LONG, partial(_stop_string, chars=1), _ends("stop")),
    Case("stop string that never comes", {"stop": ["never ever", "@@@@@@"]}),
    Case("stop string begun at the end", {**_LONG, "max_tokens": 24}, lambda text: {"stop": [text[-3:] + "@@@"]}),
    Case("stop_token_ids", {"max_tokens": 200, "stop_token_ids": WORDS}, shows=_ends("stop")),
    Case("stop_token_ids kept", {"max_tokens": 200, "stop_token_ids": WORDS, "no_stop_trim": True},
         shows=_ends("stop")),
    Case("min_tokens before a stop token", {"max_tokens": 200, "stop_token_ids": WORDS, "min_tokens": 60},
         shows=lambda told: _at_least(60)(told) and _ends("stop")(told)),
    Case("stop_token_ids that ignore_eos disables", {"max_tokens": 60, "ignore_eos": True, "stop_token_ids": WORDS},
         shows=_ends("length")),
    Case("min_tokens before a stop string", {**_LONG, "min_tokens": 120}, _stop_string),
    Case("stop_regex", {**_LONG, "stop_regex": "[aeiou] ?[a-z]"}, shows=_ends("stop"), by_hand=True, model=True),
    # characters and special tokens
    Case("characters of several tokens", _STAMMER, shows=_has(WHOLE_CHARACTER)),
    Case("a stop string with a character of several tokens", _STAMMER,
         lambda text: {"stop": re.findall(WHOLE_CHARACTER + ".?", text)[:1] or ["@@@@"]}, _ends("stop")),
    Case("half a character at the end", {**_STAMMER, "max_tokens": 9}, shows=_has(HALF_CHARACTER + "$"), model=True),
    Case("special tokens", {"logit_bias": {str(START_ID): 100}, "max_tokens": 6}, model=True),
    Case("special tokens among others", {**_LONG, "logit_bias": {str(START_ID): 0.3}, "skip_special_tokens": False},
         shows=_has(r"<\|im_start\|>"), model=True),
    Case("special tokens skipped among others", {**_LONG, "logit_bias": {str(START_ID): 0.3}}),
    Case("skip_special_tokens", {"logit_bias": {str(START_ID): 100}, "max_tokens": 6, "skip_special_tokens": False},
         shows=_has(r"<\|im_start\|>"), model=True),
    Case("the end shown", {"logit_bias": {str(END_ID): 100}, "min_tokens": 3, "skip_special_tokens": False,
                           "no_stop_trim": True}, shows=_ends("stop", END_ID), model=True),
    # how tokens are chosen; each of these leaves one token to choose
    Case("temperature 1 with top_k", {"temperature": 1.0, "top_k": 1}),
    Case("no temperature with top_k", {"temperature": None, "top_k": 1}),
    Case("top_p", {"temperature": 1.0, "top_p": 0.000001}, model=True),
    Case("min_p", {"temperature": 1.0, "min_p": 1.0, "top_k": -1, "top_p": 1.0}, model=True),
    Case("repetition_penalty", {"repetition_penalty": 1.3}, by_hand=True),
    Case("repetition_penalty of one", {"repetition_penalty": 1.0}),
    Case("frequency_penalty", {"frequency_penalty": 0.7}, by_hand=True),
    Case("presence_penalty", {"presence_penalty": 0.5}, by_hand=True),
    Case("logit_bias", {"logit_bias": {"300": 100, "301": 100}}, shows=_has(""), model=True),
    Case("seed", {"seed": 7}),
    # the prompt
    Case("many turns", {"messages": _TURNS}),
    Case("continue_final_message", {"messages": _BEGUN, "continue_final_message": True}),
    Case("a last word that is not continued", {"messages": _BEGUN}),
    Case("input_ids", {"input_ids": [300, 301, 302, 303, 304, 305]}),
    Case("chat_template_kwargs", {"chat_template_kwargs": {"a_name": "a value"}}),
    Case("thinking", {"thinking": {"type": "disabled"}}),
    Case("reasoning_effort", {"reasoning_effort": "low"}),
    Case("reasoning", {"reasoning": {"effort": "none"}}),
    # usage
    Case("without usage", {"stream_options": None}),
    Case("usage not wanted", {"stream_options": {"include_usage": False}}),
    Case("running usage", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, counted=True),
    Case("running usage alone", {"stream_options": {"continuous_usage_stats": True}}, counted=True),
    # what changes no token
    Case("names", {"user": "me", "cache_salt": "salt", "extra_key": "key"}),
    Case("priority", {"priority": 1}),
    Case("custom_params", {"custom_params": {"x": 1}}, by_hand=True),
    Case("fields without effect", {
        "separate_reasoning": False, "stream_reasoning": False, "parallel_tool_calls": False, "store": False,
        "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "p"}),
    Case("fields that are off", {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}}),
    # log probabilities
    Case("logprobs", {"logprobs": True}),
    Case("logprobs of long text", {**_STAMMER, "logprobs": True}, shows=_has(WHOLE_CHARACTER)),
    Case("logprobs with a stop string", {**_LONG, "logprobs": True}, _stop_string, _ends("stop")),
    Case("logprobs with special tokens", {**_LONG, "logprobs": True, "logit_bias": {str(START_ID): 0.3}}),
    Case("top_logprobs", {"logprobs": True, "top_logprobs": 2}, plain="top_logprobs"),
    # what is refused
    Case("top_p above one", {"top_p": 2.0}, shows=_refused),
    Case("a temperature below zero", {"temperature": -1.0}, shows=_refused),
    Case("min_tokens above the limit", {"min_tokens": 30}, shows=_refused),
    Case("lora_path", {"lora_path": "nowhere"}, shows=_refused, model=True),
    Case("custom_logit_processor", {"custom_logit_processor": "{}"}, shows=_refused, by_hand=True,
         model=True),
    Case("watermark", {"watermark": {"enabled": False}}, by_hand=True),
)  # fmt: skip

_UNPENALIZED = {"temperature": None, "repetition_penalty": 1.0}
OPINION: Mapping[str, Any] = {"temperature": 0.7, "top_p": 1e-6, "top_k": 1, "min_p": 1.0, "repetition_penalty": 1.3}
"""The generation config of a model; each of the first parameters but one leaves one token to choose, by itself."""

OPINION_CASES: tuple[Case, ...] = (
    Case("what the model wants", {"temperature": None}, by_hand=True),
    Case("the model's penalty alone", by_hand=True),
    Case("all but the penalty", _UNPENALIZED),
    Case("the model's top_k", {**_UNPENALIZED, "top_p": 1.0, "min_p": 0.0}),
    Case("the model's top_p", {**_UNPENALIZED, "top_k": -1, "min_p": 0.0}),
    Case("the model's min_p", {**_UNPENALIZED, "top_k": -1, "top_p": 1.0}),
    Case("nothing of it", {"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}),
)

CARRIED = tuple(
    name for name, kind in FIELDS.items() if kind in (Field.SAME, Field.SAMPLING, Field.LIMIT, Field.PROMPT)
)
"""Fields that become something else in the completion; each is present in a case, and absent from one."""


# ---- asking ----------------------------------------------------------------------------------------------------------


class Asker:
    """Asks one gateway, in whose fleet all servers serve `model`. `biased`: the model obeys biases and penalties.

    `sampling`: what the engine takes where a chat names none. `cache_report`: engines report cached tokens.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        model: str,
        *,
        biased: bool,
        cache_report: bool,
        sampling: Mapping[str, Any] = OPENAI_SAMPLING,
    ) -> None:
        self._http = http
        self._url = url
        self._model = model
        self._biased = biased
        self._cache_report = cache_report
        self._sampling = sampling

    async def both(self, case: Case) -> tuple[Told, Told]:
        """What the client is told of a chat that is asked for as a completion, and of the engine's own.

        It has been asked before, so that the prefill knows its prefix both times.
        """
        for number in range(TRIES):
            body = case.body(self._model, number)
            if case.learn is not None:
                body |= case.learn((await self.plain(body)).text)
            await self.plain(body)
            plain = await self.plain(body)
            if case.shows(plain) or (case.model and not self._biased):
                break
        else:
            raise AssertionError(f"no answer shows what it must: {plain}")
        return await (self._by_hand(body) if case.by_hand else self._exact(case, body)), plain

    async def plain(self, body: Mapping[str, Any]) -> Told:
        """By the engine's own chat stream."""
        told = await self._post(CHAT, body, PLAIN)
        assert told.status != 200 or await self._route(told) == CHAT
        return told

    async def planned(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What `explain` shows of a chat's attempt."""
        return await self._attempt(await self._post(CHAT, body))

    async def _exact(self, case: Case, body: Mapping[str, Any]) -> Told:
        told = await self._post(CHAT, body)
        if told.status == 200:
            attempt = await self._attempt(told)
            plain = "cached tokens" if case.counted and self._cache_report else case.plain
            assert attempt["engine_route"] == (CHAT if plain else COMPLETIONS), attempt["plain_chat_reason"]
            assert plain in (attempt["plain_chat_reason"] or "")
        return told

    async def _by_hand(self, body: Mapping[str, Any]) -> Told:
        """As the gateway would, if the stream could be resumed."""
        asked = {name: body[name] for name in ("model", "messages")}
        async with self._http.post(self._url + "/tokenize", json=asked) as reply:
            ids = (await reply.json())["tokens"]
        chat = ExactChatStream(body, ids, self._sampling)
        told = await self._post(COMPLETIONS, chat.call_body(None))
        events = [(event_kind(frame + b"\n\n"), frame + b"\n\n") for frame in told.frames]
        frames = tuple(frame[:-2] for event in events for _, frame in chat.frames([event]))
        return Told(told.status, frames, told.error, told.request_id)

    async def _post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Told:
        async with self._http.post(self._url + path, json=body, headers=headers) as reply:
            raw, request_id = await reply.read(), reply.headers.get("x-pdgate-request-id", "")
        if reply.status != 200:
            return Told(reply.status, error=orjson.loads(raw)["error"], request_id=request_id)
        assert raw.endswith(b"\n\n")
        return Told(200, tuple(raw[:-2].split(b"\n\n")), request_id=request_id)

    async def _route(self, told: Told) -> str:
        return str((await self._attempt(told))["engine_route"])

    async def _attempt(self, told: Told) -> dict[str, Any]:
        async with self._http.get(f"{self._url}/pdgate/explain/{told.request_id}") as reply:
            (attempt,) = (await reply.json())["attempts"]
        return dict(attempt)
