"""The table of cases: what is asked of a pair, and what of the answer is no part of the comparison.

A case asks one leg, or both in one room, or has a play (`plays.py`, `fault_plays.py`). Fault cases may end a server.
They come last, those that end one after the others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.conformance import fault_plays, plays
from tests.conformance.stage import Stage

Play = Callable[[Stage], Awaitable[None]]

GREEDY = {"temperature": 0, "ignore_eos": True}
SIX = {"max_new_tokens": 6, **GREEDY}
IDS = [300, 301, 302, 303, 304, 305, 306, 307]
TEXT = "the quick brown fox"
ROUTE = "/route?prefill_dp_rank={0}&prefill_cp_rank={0}&target_tp_rank={0}&target_pp_rank={0}"


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `to`: prefill, decode, each (one after the other), both (in one room) or bootstrap.

    `loose`: patterns of paths whose values count by type only. `timed`: how long each leg took is compared by class.
    """

    name: str
    to: str = "both"
    path: str = "/generate"
    body: Any = b""
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] | None = None
    choreography: Play | None = None
    loose: tuple[str, ...] = ()
    fault: bool = False
    timed: bool = False

    async def play(self, stage: Stage) -> None:
        """Do it."""
        headers = None if self.headers is None else dict(self.headers)
        if self.choreography is not None:
            await self.choreography(stage)
        elif self.to == "both":
            await stage.pair(self.path, self.body)
        else:
            legs = ("prefill", "decode") if self.to == "each" else (self.to,)
            for leg in legs:
                await stage.ask(leg, self.path, self.body, method=self.method, headers=headers).done()


def generate(name: str, body: dict[str, Any], **more: Any) -> Case:
    """`/generate` of eight ids on both legs; `body` goes over it."""
    return Case(name, body={"input_ids": IDS, "sampling_params": SIX, **body}, **more)


def chat(name: str, body: dict[str, Any], **more: Any) -> Case:
    """A chat completion on both legs."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 6, **GREEDY, **body}
    return Case(name, path="/v1/chat/completions", body=asked, **more)


def completion(name: str, body: dict[str, Any], **more: Any) -> Case:
    """A text completion on both legs."""
    return Case(
        name, path="/v1/completions", body={"model": "tiny", "prompt": TEXT, "max_tokens": 6, **GREEDY, **body}, **more
    )


def get(name: str, path: str, to: str = "each", **more: Any) -> Case:
    """A GET of each leg."""
    return Case(name, to, path, method="GET", **more)


def refused(name: str, body: Any, path: str = "/generate", to: str = "each", **more: Any) -> Case:
    """A request that neither leg runs."""
    return Case(name, to, path, body, **more)


def played(name: str, choreography: Play, **more: Any) -> Case:
    """A case with a play."""
    return Case(name, choreography=choreography, **more)


def fault(name: str, choreography: Play, **more: Any) -> Case:
    """A play about failure: times are compared too."""
    return Case(name, choreography=choreography, fault=True, **{"timed": True, **more})


TOP: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
LENGTH = (
    "*output_ids*",
    "*completion_tokens",
    "*total_tokens",
    "*.length",
    "*weight_versions*",
    "*finish_reason*",
    "*matched_stop",
)

ITS_OWN = (
    *(
        "*_path",
        "*.port",
        "*random_seed",
        "*launch_command",
        "*mem_fraction_static",
        "*startup_time*",
        "*sleep_on_idle",
    ),
    *("*memory_usage*", "*.dtype"),
)
"""What a server says of its own start."""

CUT = ("*completion_tokens", "*total_tokens", "*weight_versions*", "*output_ids*", "*.decode_throughput")
"""Where an answer is cut short from outside, how far it had come is no part of the comparison."""

CASES: tuple[Case, ...] = (
    # /generate
    generate("generate", {}),
    generate("generate stream", {"stream": True}),
    generate("generate text", {"input_ids": None, "text": TEXT}),
    generate("generate sampled", {"sampling_params": {**SIX, "temperature": 0.8, "top_p": 0.9, "top_k": 50}}),
    generate("generate seeded", {"sampling_params": {**SIX, "temperature": 0.8, "sampling_seed": 7}}),
    generate("generate min_p", {"sampling_params": {**SIX, "temperature": 0.8, "min_p": 0.1}}),
    generate("generate one token", {"sampling_params": {**SIX, "max_new_tokens": 1}}),
    generate("generate one token stream", {"sampling_params": {**SIX, "max_new_tokens": 1}, "stream": True}),
    generate("generate logprobs", {"return_logprob": True}),
    generate("generate top logprobs", TOP),
    generate("generate top logprobs stream", {**TOP, "stream": True}),
    generate("generate prompt logprobs", {**TOP, "logprob_start_len": 0}),
    generate("generate prompt logprobs stream", {"return_logprob": True, "logprob_start_len": 0, "stream": True}),
    generate("generate prompt logprobs from 3", {**TOP, "logprob_start_len": 3}),
    generate("generate logprobs of ids", {"return_logprob": True, "token_ids_logprob": [300, 301]}),
    generate("generate logprobs with text", {**TOP, "return_text_in_logprobs": True, "logprob_start_len": 0}),
    generate("generate 128 top logprobs", {**TOP, "top_logprobs_num": 128}),
    generate("generate prompt ids", {"return_prompt_token_ids": True}),
    generate("generate min tokens", {"sampling_params": {"max_new_tokens": 6, "min_new_tokens": 6, "temperature": 0}}),
    generate(
        "generate json schema",
        {"sampling_params": {"max_new_tokens": 12, "temperature": 0, "json_schema": '{"type": "integer"}'}},
        loose=LENGTH,
    ),
    generate("generate batch", {"input_ids": [IDS, [400, 401, 402]]}),
    generate(
        "generate batch stream",
        {"input_ids": [IDS, [400, 401, 402]], "stream": True},
        loose=("*.body.kinds*", "*.body.last*"),
    ),
    generate("generate rid", {"rid": "conformance-rid"}),
    generate("generate unknown fields", {"nonsense": {"a": [1]}, "model": "nope"}),
    generate("generate cache salt", {"cache_salt": "salt", "extra_key": "key"}),
    played("generate cached prefix", plays.cached_prefix),
    played("generate cached prefix usage", plays.cached_prefix_chat),
    played("generate stop string", plays.stop_string, loose=LENGTH),
    played("generate stop token", plays.stop_token, loose=LENGTH),
    played("generate batch rooms in a list", plays.batch_room_list),
    played("generate room 2^63-1", plays.largest_room),
    played("generate room as string", plays.room_as("text")),
    played("generate room as float", plays.room_as("float")),
    played("generate room as bool", plays.room_as("bool")),
    played("generate room 2^64", plays.room_as("far too large")),
    played("completion room as string", plays.room_as("text", "/v1/completions")),
    refused("generate bad json", b"{bad"),
    refused("generate NaN", b'{"input_ids": [5], "sampling_params": {"temperature": NaN}}'),
    refused("generate bad type", {"text": "x", "sampling_params": {"max_new_tokens": "x"}}),
    refused("generate no text", {"sampling_params": {}}),
    refused("generate empty ids", {"input_ids": [], "sampling_params": {}}),
    refused("generate unknown sampling key", {"text": "x", "sampling_params": {"nonsense": 1}}),
    refused("generate temperature -1", {"text": "x", "sampling_params": {"temperature": -1}}),
    refused("generate top_p 2", {"text": "x", "sampling_params": {"top_p": 2}}),
    refused("generate no room", {"input_ids": IDS, "sampling_params": SIX}),
    refused("generate no room stream", {"input_ids": IDS, "sampling_params": SIX, "stream": True}),
    refused(
        "generate as text/plain", {"input_ids": IDS, "sampling_params": SIX}, headers=(("content-type", "text/plain"),)
    ),
    generate("generate prompt too long", {"input_ids": [300] * 4100}),
    generate("generate prompt too long stream", {"input_ids": [300] * 4100, "stream": True}),
    generate("generate answer too long", {"sampling_params": {**SIX, "max_new_tokens": 5000}}),
    # /v1/chat/completions
    chat("chat", {}),
    chat("chat stream", {"stream": True}),
    chat("chat stream usage", {"stream": True, "stream_options": {"include_usage": True}}),
    chat(
        "chat stream usage in each",
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    chat("chat logprobs", {"logprobs": True, "top_logprobs": 2}),
    chat("chat logprobs without top", {"logprobs": True}),
    chat("chat logprobs stream", {"logprobs": True, "top_logprobs": 2, "stream": True}),
    chat("chat max_completion_tokens", {"max_completion_tokens": 3}),
    chat(
        "chat system and parts",
        {
            "messages": [
                {"role": "system", "content": "be"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ]
        },
    ),
    chat(
        "chat last assistant", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    ),
    chat(
        "chat continue final message",
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "continue_final_message": True,
        },
    ),
    chat(
        "chat json schema",
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            "ignore_eos": False,
        },
        loose=LENGTH,
    ),
    chat("chat tools", {"tools": [TOOL], "tool_choice": "auto"}),
    chat("chat tools none", {"tools": [TOOL], "tool_choice": "none"}),
    chat("chat input ids", {"input_ids": IDS}),
    chat("chat token ids", {"return_token_ids": True, "return_prompt_token_ids": True}),
    chat("chat token ids stream", {"return_token_ids": True, "stream": True}),
    chat("chat unknown model", {"model": "nope"}),
    chat("chat prompt too long", {"input_ids": [300] * 4100}),
    chat("chat prompt too long stream", {"input_ids": [300] * 4100, "stream": True}),
    chat("chat answer too long", {"max_tokens": 5000}),
    refused("chat no messages", {"model": "tiny"}, "/v1/chat/completions"),
    refused("chat empty messages", {"model": "tiny", "messages": []}, "/v1/chat/completions"),
    refused(
        "chat bad role", {"model": "tiny", "messages": [{"role": "nobody", "content": "x"}]}, "/v1/chat/completions"
    ),
    refused(
        "chat bad temperature",
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"},
        "/v1/chat/completions",
    ),
    refused("chat bad json", b"{bad", "/v1/chat/completions"),
    refused("chat no room", {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"),
    refused(
        "chat no room stream",
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True},
        "/v1/chat/completions",
    ),
    refused("chat as text/plain", {"model": "tiny"}, "/v1/chat/completions", headers=(("content-type", "text/plain"),)),
    # /v1/completions
    completion("completion", {}),
    completion("completion stream", {"stream": True}),
    completion("completion stream usage", {"stream": True, "stream_options": {"include_usage": True}}),
    completion("completion logprobs", {"logprobs": 2}),
    completion("completion logprobs 0", {"logprobs": 0}),
    completion("completion logprobs stream", {"logprobs": 2, "stream": True}),
    completion("completion echo", {"echo": True}),
    completion("completion echo stream", {"echo": True, "stream": True}),
    completion("completion ids", {"prompt": IDS}),
    completion("completion list", {"prompt": [TEXT, "dog"]}),
    completion("completion token ids", {"return_token_ids": True}),
    completion("completion token ids stream", {"return_token_ids": True, "stream": True}),
    completion("completion no max_tokens", {"max_tokens": None}),
    completion("completion prompt too long", {"prompt": [300] * 4100}),
    refused("completion no prompt", {"model": "tiny"}, "/v1/completions"),
    refused("completion bad json", b"{bad", "/v1/completions"),
    refused("completion no room", {"model": "tiny", "prompt": "x"}, "/v1/completions"),
    # tokenizer
    Case("tokenize", "each", "/tokenize", {"prompt": TEXT}),
    Case("tokenize v1", "decode", "/v1/tokenize", {"prompt": TEXT}),
    Case("tokenize list", "decode", "/tokenize", {"prompt": [TEXT, "dog <|im_end|>"]}),
    Case("tokenize decomposed text", "decode", "/tokenize", {"prompt": "e\u0301 \u212b \ud55c"}),
    Case("tokenize chat", "decode", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    Case(
        "tokenize chat without prompt",
        "decode",
        "/tokenize",
        {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False},
    ),
    Case("tokenize nothing", "decode", "/tokenize", {}),
    Case("tokenize both", "decode", "/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "hi"}]}),
    Case("detokenize", "decode", "/detokenize", {"tokens": [107, 108, 2, 300]}),
    Case("detokenize special", "decode", "/detokenize", {"tokens": [107, 108, 2], "skip_special_tokens": False}),
    Case("detokenize list", "decode", "/v1/detokenize", {"tokens": [[107], [108, 109]]}),
    Case("detokenize nothing", "decode", "/detokenize", {}),
    # what a server says of itself
    get("health", "/health"),
    get("health_generate", "/health_generate", "decode"),
    get("ready", "/ready"),
    get("ping", "/ping", "decode"),
    get("root", "/", "decode"),
    get("models", "/v1/models"),
    get("model by name", "/v1/models/tiny", "decode"),
    get("model unknown", "/v1/models/nope", "decode"),
    get("model_info", "/model_info", loose=ITS_OWN),
    get("get_model_info", "/get_model_info", "decode", loose=ITS_OWN),
    get("server_info", "/server_info", loose=ITS_OWN),
    get("get_server_info", "/get_server_info", "decode", loose=ITS_OWN),
    get("loads", "/v1/loads"),
    get("loads core", "/v1/loads?include=core", "prefill"),
    get("loads disagg and queues", "/v1/loads?include=disagg,queues", "decode"),
    get("loads unknown section", "/v1/loads?include=nonsense", "decode"),
    get("loads of rank 5", "/v1/loads?dp_rank=5", "decode"),
    get("loads bad rank", "/v1/loads?dp_rank=x", "decode"),
    get("loads as prometheus", "/v1/loads?format=prometheus", "decode", loose=("*.body",)),
    played("metrics", plays.metrics),
    get("flush_cache", "/flush_cache"),
    Case("flush_cache by POST", "each", "/flush_cache"),
    played("flush_cache while busy", plays.flush_while_busy),
    get("no such path", "/nope"),
    get("get_load", "/get_load", "decode"),
    get("generate by GET", "/generate", "decode"),
    Case("abort unknown", "each", "/abort_request", {"rid": "nobody"}),
    Case("abort empty object", "each", "/abort_request", {}),
    Case("abort no body", "decode", "/abort_request"),
    Case("abort all, nothing there", "decode", "/abort_request", {"rid": "", "abort_all": True}),
    Case("abort bad json", "decode", "/abort_request", b"{bad"),
    played("idle connection", plays.idle_connection),
    # the bootstrap server
    get("bootstrap health", "/health", "bootstrap"),
    get("bootstrap topology", ROUTE.format(-1), "bootstrap"),
    get("bootstrap rank", ROUTE.format(0), "bootstrap", loose=("*rank_port",)),
    get("bootstrap unknown rank", ROUTE.format(3), "bootstrap"),
    get("bootstrap missing parameter", "/route?prefill_dp_rank=0", "bootstrap"),
    get("bootstrap no such path", "/nope", "bootstrap"),
    get("bootstrap query by GET", "/query_dp_ranks", "bootstrap"),
    Case("bootstrap query", "bootstrap", "/query_dp_ranks", {"bootstrap_rooms": [1, 2]}),
    played("bootstrap register and query", plays.register_dp_rank),
    # both legs
    played("prefill first", plays.one_leg_first("prefill")),
    played("decode first", plays.one_leg_first("decode")),
    played("room used again", plays.room_used_again),
    played("rid used again after a stream", plays.rid_used_again, loose=CUT),
    played("24 rooms at once", plays.many_rooms),
    played("decode has no place yet", plays.decode_full),
    played("32 prompts at once", plays.batching),
    # faults that leave both servers alive
    fault("prefill alone", fault_plays.alone("prefill")),
    fault("prefill alone stream", fault_plays.alone("prefill", {"stream": True})),
    fault("prefill alone chat stream", fault_plays.alone("prefill", {"stream": True}, "/v1/chat/completions")),
    fault("decode alone", fault_plays.alone("decode")),
    fault("decode alone stream", fault_plays.alone("decode", {"stream": True})),
    fault("decode alone chat stream", fault_plays.alone("decode", {"stream": True}, "/v1/chat/completions")),
    fault("wrong bootstrap port", fault_plays.wrong_bootstrap("port")),
    fault("wrong bootstrap host", fault_plays.wrong_bootstrap("host")),
    fault("no host on the prefill", fault_plays.prefill_without_host, timed=False),
    fault("two prompts", fault_plays.two_prompts, timed=False),
    fault("duplicate live room", fault_plays.duplicate_room),
    fault("duplicate live rid", fault_plays.duplicate_rid),
    fault("negative room", fault_plays.odd_room(-5), timed=False),
    fault("room 0", fault_plays.odd_room(0), timed=False),
    fault("two samples in one room", fault_plays.two_samples, timed=False),
    fault("129 top logprobs", fault_plays.many_top_logprobs),
    fault("abort a waiting prefill", fault_plays.abort_alone("prefill")),
    fault("abort a waiting prefill's stream", fault_plays.abort_alone("prefill", {"stream": True})),
    fault("abort a waiting decode", fault_plays.abort_alone("decode")),
    fault("abort a waiting decode's stream", fault_plays.abort_alone("decode", {"stream": True})),
    fault(
        "abort a waiting decode's chat stream",
        fault_plays.abort_alone("decode", {"stream": True}, "/v1/chat/completions"),
    ),
    fault("abort a decode that looks up", fault_plays.abort_look_up),
    fault("abort a running stream", fault_plays.abort_running({"stream": True}), loose=CUT),
    fault(
        "abort a running chat stream", fault_plays.abort_running({"stream": True}, "/v1/chat/completions"), loose=CUT
    ),
    fault("abort a running answer", fault_plays.abort_running({}), loose=CUT),
    fault("abort a running chat", fault_plays.abort_running({}, "/v1/chat/completions"), loose=CUT),
    fault("abort all", fault_plays.abort_all, loose=CUT),
    fault("abort by prefix", fault_plays.abort_prefix),
    fault("abort the prefill after hand-over", fault_plays.abort_after_hand_over, timed=False),
    fault("drop a waiting prefill, decode comes", fault_plays.drop_then_other("prefill")),
    fault("drop a waiting decode, prefill comes", fault_plays.drop_then_other("decode")),
    fault("drop a running stream", fault_plays.drop_running({"stream": True}), timed=False),
    fault("drop a running answer", fault_plays.drop_running({}), timed=False),
    fault("freeze a decode", fault_plays.freeze("decode"), timed=False),
    fault("freeze a prefill", fault_plays.freeze("prefill"), timed=False),
    # faults that end a server
    fault("decode gets a SIGTERM", fault_plays.terminate_decode, timed=False),
    fault("decode killed while it streams", fault_plays.kill_decode_running, loose=CUT),
    fault("decode killed, prefill waits", fault_plays.kill_decode_waiting),
    fault("room without a host kills a decode", fault_plays.decode_without_host),
    fault("prompt ids outside the vocabulary", fault_plays.odd_ids, timed=False),
    fault("room 2^63", fault_plays.room_beyond),
    fault("page sizes that differ", fault_plays.page_sizes),
    fault("prefill killed", fault_plays.kill_prefill),
    fault("prefill restarted", fault_plays.restart_prefill, timed=False),
)
