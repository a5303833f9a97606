"""Client requests as values: parse, check, expand into single engine requests.

Pure. Bodies stay the client's own JSON: the fields the gateway reads are checked, the fields only it may set are
stripped, everything else is kept untouched. What an engine cannot survive is `engines/sglang_wire.py`'s to refuse.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from gateway.errors import MAX_PARAM_CHARS, GatewayError, bad_request, clipped

MAX_SAMPLES = 128
MAX_CHOICES = 10_000
"""Prompts times samples of one request: a small body must not become millions of engine requests."""
MAX_RID_CHARS = 128
"""The rid a client wishes for is kept with the record of its request, long after its end."""

# What SGLang applies where the request names no limit; a chat is limited by its context only.
_COMPLETIONS_OUTPUT_TOKENS = 16
_GENERATE_OUTPUT_TOKENS = 128

_STRIPPED = frozenset(
    {"rid", "http_worker_ipc", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "kv_hints"}
)
_STRIPPED_PREFIXES = ("bootstrap_", "x-override-")

# Separators are bytes that UTF-8 never contains, so no text can imitate them.
_TOOLS, _MESSAGE, _FIELD, _VALUE, _PART, _MEDIA = b"\xfa", b"\xfb", b"\xfc", b"\xfd", b"\xfe", b"\xff"
_MEDIA_MAX_BYTES = 256


class Api(StrEnum):
    """The generating endpoints; the value is the path, here and on the engine."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/generate"


_PROMPT_FIELDS = {Api.COMPLETIONS: ("prompt",), Api.GENERATE: ("text", "input_ids")}
_PROMPT_KINDS = {
    "prompt": ({"text", "ids"}, "a string, a list of token ids, or a list of either"),
    "text": ({"text"}, "a string or a list of strings"),
    "input_ids": ({"ids"}, "a list of token ids or a list of such lists"),
}

# Fields that may carry one element a prompt when prompts come as a list (io_struct.py, protocol.py of SGLang 0.5).
_PER_PROMPT_FIELDS = {
    Api.COMPLETIONS: "lora_path extra_key cache_salt",
    Api.GENERATE: """
        sampling_params return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask
        sampling_logprobs_mode return_hidden_states custom_logit_processor image_data video_data audio_data modalities
        mm_hashes mm_content_hashes lora_path extra_key cache_salt watermark""",
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked client request.

    `body` is as it came, minus the fields named in `stripped`. `samples` is n, and `candidates` (best_of) are generated
    for each prompt to choose them from: as many, or more. `prompts` counts list prompts (1 if single), `batched` says
    that they came as a list. `max_output_tokens` is the limit the engine will apply to one
    sample; None where only its context ends it. `client_rid` is the rid the client wished for: an alias only.
    """

    api: Api
    body: dict[str, Any]
    body_bytes: int
    stream: bool
    include_usage: bool
    model: str | None
    samples: int
    candidates: int
    prompts: int
    batched: bool
    max_output_tokens: int | None
    client_rid: str | None
    stripped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """One engine request: one prompt, one sample.

    `body` shares its values with the parsed body: copy before changing. `prompt_bytes` is the canonical prompt, whose
    equal beginnings are equal beginnings of the prompt: text, or little-endian u32 where the prompt came as ids;
    `prompt_token_ids` is then their count, else None.
    """

    body: dict[str, Any]
    prompt_index: int
    sample_index: int
    choice_index: int
    prompt_bytes: bytes
    prompt_token_ids: int | None


def parse(api: Api, raw: bytes) -> ParsedRequest:
    """Check a request body; raises GatewayError 400 that names the field and the fix."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    stripped = tuple(name for name in body if name in _STRIPPED or name.startswith(_STRIPPED_PREFIXES))
    removed = {name: body.pop(name) for name in stripped}
    stream_options = _field(body, "stream_options", dict, "an object") or {}
    stream = bool(_field(body, "stream", bool, "true or false"))
    prompts, batched = _check_prompts(api, body)
    samples = _samples(api, body, prompts, batched)
    candidates = _candidates(body, samples, stream) if api is Api.COMPLETIONS else samples
    _check_choices(api, body, prompts, samples, candidates)
    return ParsedRequest(
        api=api,
        body=body,
        body_bytes=len(raw),
        stream=stream,
        include_usage=bool(_field(stream_options, "include_usage", bool, "true or false", "stream_options.")),
        model=_field(body, "model", str, "a string"),
        samples=samples,
        candidates=candidates,
        prompts=prompts,
        batched=batched,
        max_output_tokens=_max_output_tokens(api, body, prompts, batched),
        client_rid=_client_rid(removed.get("rid")),
        stripped=stripped,
    )


def expand(parsed: ParsedRequest) -> tuple[Unit, ...]:
    """Split into single engine requests, prompt by prompt: choice_index = prompt_index * candidates + sample_index."""
    units = []
    for prompt_index in range(parsed.prompts):
        body = _without_samples(parsed.api, _body_of_prompt(parsed, prompt_index))
        if parsed.candidates > parsed.samples and body.get("logprobs") is None:
            body = {**body, "logprobs": 0}  # those of the output alone: what the best are known by
        prompt_bytes, token_ids = _canonical_prompt(parsed.api, body)
        for sample_index in range(parsed.candidates):
            choice_index = prompt_index * parsed.candidates + sample_index
            units.append(Unit(body, prompt_index, sample_index, choice_index, prompt_bytes, token_ids))
    return tuple(units)


def served(model: str | None, models: Collection[str]) -> None:
    """Refuse a model that no engine serves (engines answer under any name); an absent one is accepted."""
    if model is not None and model not in models:
        names = ", ".join(sorted(models)) or "none yet"
        asked = clipped(model, MAX_PARAM_CHARS)
        raise GatewayError(
            404,
            f"the model {asked!r} is not served here; served: {names}",
            code="model_not_found",
            kind="not_found_error",
            param="model",
            safe_to_retry=False,
        )


def openai_models(models: Mapping[str, int], created: int) -> dict[str, Any]:
    """The body of /v1/models: names with their context length in tokens; `created` in Unix seconds."""
    card = {"object": "model", "created": created, "owned_by": "sglang", "parent": None}
    data = [{"id": name, **card, "root": name, "max_model_len": tokens} for name, tokens in models.items()]
    return {"object": "list", "data": data}


def _client_rid(rid: object) -> str | None:
    """The rid that the client wished for; one that is no single name is none."""
    if not isinstance(rid, str) or not rid:
        return None
    if len(rid) > MAX_RID_CHARS:
        raise bad_request(f"rid must be at most {MAX_RID_CHARS} characters, not {len(rid)}", param="rid")
    return rid


def _field(owner: dict[str, Any], name: str, kind: type, wanted: str, path: str = "") -> Any:
    """The value of a field, None when absent or null."""
    value = owner.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise bad_request(f"{path}{name} must be {wanted}, not {_json_type(value)}", param=path + name)


def _json_type(value: object) -> str:
    names = {bool: "a boolean", str: "a string", dict: "an object", list: "a list", type(None): "null"}
    return names.get(type(value), "a number")


def _whole(owner: dict[str, Any], name: str, low: int, high: int | None = None, path: str = "") -> int | None:
    value = owner.get(name)
    if value is None:
        return None
    if type(value) is not int or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise bad_request(f"{path}{name} must be a whole number, {bounds}", param=path + name)
    return value


def _samples(api: Api, body: dict[str, Any], prompts: int, batched: bool) -> int:
    owners, path = [body], ""
    if api is Api.GENERATE:
        owners, path = _sampling_params(body, prompts, batched), "sampling_params."
    counts = {_whole(owner, "n", 1, MAX_SAMPLES, path) or 1 for owner in owners}
    if len(counts) > 1:
        raise bad_request(f"{path}n must be the same for all prompts of a request", param=f"{path}n")
    return counts.pop()


def _candidates(body: dict[str, Any], samples: int, stream: bool) -> int:
    """How many answers are generated for each prompt; engines know no best_of."""
    candidates = _whole(body, "best_of", 1, MAX_SAMPLES) or samples
    if candidates < samples:
        raise bad_request(f"best_of must be at least n, which is {samples}", param="best_of")
    if stream and candidates > samples:
        raise bad_request("best_of above n cannot be streamed: the best are known at the end", param="best_of")
    return candidates


def _check_choices(api: Api, body: dict[str, Any], prompts: int, samples: int, candidates: int) -> None:
    if candidates * prompts <= MAX_CHOICES:
        return
    count = "best_of" if candidates > samples else "sampling_params.n" if api is Api.GENERATE else "n"
    raise bad_request(
        f"{prompts} prompts with {count} = {candidates} are more than {MAX_CHOICES} choices; send several requests",
        param=count if candidates > 1 else _prompt_name(api, body),
    )


def _max_output_tokens(api: Api, body: dict[str, Any], prompts: int, batched: bool) -> int | None:
    if api is Api.CHAT:
        max_tokens = _whole(body, "max_tokens", 1)
        return _whole(body, "max_completion_tokens", 1) or max_tokens
    if api is Api.COMPLETIONS:
        return _whole(body, "max_tokens", 1) or _COMPLETIONS_OUTPUT_TOKENS
    params = _sampling_params(body, prompts, batched)
    limits = [_whole(each, "max_new_tokens", 0, path="sampling_params.") for each in params]
    return max(_GENERATE_OUTPUT_TOKENS if limit is None else limit for limit in limits)


def _sampling_params(body: dict[str, Any], prompts: int, batched: bool) -> list[dict[str, Any]]:
    """The sampling_params of /generate: one for all prompts, or one for each."""
    params = body.get("sampling_params")
    if not batched or not isinstance(params, list):
        return [_field(body, "sampling_params", dict, "an object") or {}]
    if len(params) != prompts or not all(isinstance(item, dict) for item in params):
        wanted = f"an object, or a list of {prompts} objects: one for each prompt"
        raise bad_request(f"sampling_params must be {wanted}", param="sampling_params")
    return params


def _check_prompts(api: Api, body: dict[str, Any]) -> tuple[int, bool]:
    """(number of prompts, whether they came as a list)."""
    if api is Api.CHAT:
        _check_messages(body.get("messages"))
        if body.get("input_ids") is not None and _kind_of_prompt(body["input_ids"], "input_ids") != "ids":
            raise bad_request("input_ids must be a list of token ids", param="input_ids")
        return 1, False
    fields = _PROMPT_FIELDS[api]
    given = [name for name in fields if body.get(name) is not None]
    if len(given) != 1:
        found = "both are given" if given else "it is missing" if len(fields) == 1 else "neither is given"
        raise bad_request(f"exactly one prompt is needed, as {' or '.join(fields)}: {found}", param=fields[0])
    name = given[0]
    batched = _kind_of_prompt(body[name], name) == "list"
    kinds = {_kind_of_prompt(prompt, name) for prompt in (body[name] if batched else [body[name]])}
    allowed, wanted = _PROMPT_KINDS[name]
    if len(kinds) > 1 or not kinds <= allowed:
        raise bad_request(f"{name} must be {wanted}", param=name)
    return (len(body[name]), True) if batched else (1, False)


def _prompt_name(api: Api, body: dict[str, Any]) -> str:
    """Which field holds the prompt of a checked body."""
    return next(name for name in _PROMPT_FIELDS[api] if body.get(name) is not None)


def _kind_of_prompt(prompt: object, name: str) -> str:
    """`text`, `ids` or `list` (of either); refuses what is none of them, and what is empty."""
    if not isinstance(prompt, str | list):
        raise bad_request(f"{name} must be a string or a list, not {_json_type(prompt)}", param=name)
    if not prompt:
        raise bad_request(f"{name} must not be empty", param=name)
    if isinstance(prompt, str):
        return "text"
    if type(prompt[0]) is not int:
        return "list"
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) > 0xFFFF_FFFF:
        raise bad_request(f"{name} must hold token ids: whole numbers from 0 to 2^32 - 1", param=name)
    return "ids"


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list of at least one message", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise bad_request(f"{where} must be an object with a role, not {_json_type(message)}", param=where)
        if not isinstance(message.get("role"), str):
            raise bad_request(f"{where}.role must be a string such as user", param=f"{where}.role")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            wanted = f"a string or a list of parts, not {_json_type(content)}"
            raise bad_request(f"{where}.content must be {wanted}", param=f"{where}.content")


def _body_of_prompt(parsed: ParsedRequest, index: int) -> dict[str, Any]:
    if not parsed.batched:
        return parsed.body
    name = _prompt_name(parsed.api, parsed.body)
    body = {**parsed.body, name: parsed.body[name][index]}
    for field in _PER_PROMPT_FIELDS[parsed.api].split():
        values = body.get(field)
        if not isinstance(values, list) or not values:
            continue
        if field == "token_ids_logprob" and not isinstance(values[0], list):
            continue  # one list of ids for all prompts
        if len(values) != parsed.prompts:
            raise bad_request(f"{field} must have one element for each of the {parsed.prompts} prompts", param=field)
        body[field] = values[index]
    return body


def _without_samples(api: Api, body: dict[str, Any]) -> dict[str, Any]:
    """The body without what asks for several answers to one prompt: engines give one then."""
    owner = body.get("sampling_params") if api is Api.GENERATE else body
    names = ("n", "best_of") if api is Api.COMPLETIONS else ("n",)
    if not owner or not any(name in owner for name in names):
        return body
    kept = {name: value for name, value in owner.items() if name not in names}
    return {**body, "sampling_params": kept} if api is Api.GENERATE else kept


def _canonical_prompt(api: Api, body: dict[str, Any]) -> tuple[bytes, int | None]:
    """(canonical bytes, number of ids where the prompt is ids)."""
    prompt = body.get("input_ids") if api is Api.CHAT else body[_prompt_name(api, body)]
    if prompt is None:
        return canonical_chat(body), None
    if isinstance(prompt, str):
        return prompt.encode(), None
    words = array("I", prompt)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes(), len(prompt)


def canonical_chat(body: dict[str, Any]) -> bytes:
    """The chat as bytes in the order a template renders it: tools, then message by message, append-only.

    The bytes of the first k messages begin the bytes of all of them; the generation prompt is not included.
    """
    pieces = [_TOOLS, orjson.dumps(body["tools"])] if body.get("tools") else []
    for message in body["messages"]:
        pieces += (_MESSAGE, message["role"].encode(), _VALUE)
        pieces += _content_pieces(message.get("content"))
        for name, value in message.items():
            if name not in ("role", "content") and value is not None:
                pieces += (_FIELD, name.encode(), _VALUE, value.encode() if type(value) is str else orjson.dumps(value))
    return b"".join(pieces)


def _content_pieces(content: str | list[Any] | None) -> Iterator[bytes]:
    """A text, or parts: a single text part is the same as its text."""
    for index, part in enumerate([content] if isinstance(content, str) else content or ()):
        if index:
            yield _PART
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if isinstance(text, str):
            yield text.encode()
        else:
            yield _MEDIA
            # An embedded image counts by its hash: it is not so many bytes of prompt.
            raw = orjson.dumps(part)
            yield raw if len(raw) <= _MEDIA_MAX_BYTES else hashlib.blake2b(raw, digest_size=16).hexdigest().encode()
