"""What a server says of itself, read from what a real one said: the recorded arguments that the emulator tells too."""

from __future__ import annotations

from importlib import resources
from typing import Any

import orjson
import pytest

from engines import sglang_facts as about
from engines.sglang_versions import ROWS, UnservedVersion
from engines.types import ChatFacts, EngineFacts, Parallelism, Role

RECORDED = orjson.loads(resources.files("engines.emulator").joinpath("server_args.json").read_bytes())
ROUTE = {
    "attn_tp_size": 1,
    "page_size": 1,
    "kv_cache_dtype": "auto",
    "decode_allocation_policy": "early",
    "enable_kv_cache_sharding": False,
}


def info(**changes: Any) -> dict[str, Any]:
    told = {"max_total_num_tokens": 8192, "max_req_input_len": 4090, "version": "0.5.23", "frontend": "python"}
    return {**RECORDED["server_args"], **told, **changes}


def facts(route: dict[str, Any] | None = None, **changes: Any) -> EngineFacts:
    return about.facts_of(info(**changes), RECORDED["model_info"], (), route)


def test_the_recorded_server_is_read() -> None:
    seen = facts()
    assert (seen.version, seen.version_known, seen.frontend) == ("0.5.23", True, "python")
    assert (seen.context_tokens, seen.max_total_tokens) == (4096, 8192)
    assert (seen.auto_kv_dtype, seen.model_dtype, seen.quantization, seen.device) == (True, "bfloat16", "", "cpu")
    assert seen.parallelism == Parallelism()
    assert (seen.sampling_defaults, seen.deterministic) == ("model", False)
    assert seen.cache_report is False
    assert (seen.cache_format.kv_cache_dtype, seen.cache_format.allocation_policy) == ("auto", "early")
    assert seen.handshake_fields == ROWS[-1].route_fields


@pytest.mark.parametrize(
    ("argument", "fact"),
    [
        ("enable_deterministic_inference", "deterministic"),
        ("enable_cache_report", "cache_report"),
        ("incremental_streaming_output", "incremental_streaming"),
    ],
)
def test_switches_are_read(argument: str, fact: str) -> None:
    assert getattr(facts(**{argument: True}), fact) is True
    assert getattr(facts(**{argument: None}), fact) is False


def test_what_it_does_to_chats_is_read() -> None:
    assert facts().chat == ChatFacts(model_kind="qwen2 Qwen2ForCausalLM")
    told = info(
        reasoning_parser="qwen3",
        tool_call_parser="qwen25",
        chat_template="chatml",
        completion_template="qwen_coder",
        skip_tokenizer_init=True,
    )
    model = {**RECORDED["model_info"], "has_audio_understanding": True, "architectures": None, "model_type": None}
    assert about.facts_of(told, model).chat == ChatFacts("qwen3", "qwen25", "chatml", "qwen_coder", "", True, False)
    sees = {**RECORDED["model_info"], "has_image_understanding": True}
    assert about.facts_of(info(), sees).chat.multimodal
    assert facts(return_input_ids=True).chat.tells_ids
    assert facts(return_output_ids=True).chat.tells_ids
    assert facts(default_chat_template_kwargs={"enable_thinking": False}).chat.template_kwargs


def test_what_route_says_comes_before_the_arguments() -> None:
    seen = facts({**ROUTE, "kv_cache_dtype": "fp8_e4m3", "decode_allocation_policy": "prefill_complete"})
    assert seen.cache_format.kv_cache_dtype == "fp8_e4m3"
    assert seen.cache_format.allocation_policy == "prefill_complete"
    assert seen.auto_kv_dtype, "what it was told is still auto"
    assert seen.handshake_fields == frozenset(ROUTE)


def test_a_named_kv_dtype_is_not_auto() -> None:
    seen = facts(kv_cache_dtype="bf16")
    assert (seen.auto_kv_dtype, seen.cache_format.kv_cache_dtype) == (False, "bf16")


def test_the_scheduler_says_what_it_computes_in() -> None:
    assert facts(internal_states=[{"dtype": "float16"}]).model_dtype == "float16"
    for nothing in (None, [], [None], [{}], "x"):
        assert facts(internal_states=nothing).model_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, ""),
        ({"enable_page_major_kv_layout": True}, "page_major"),
        ({"dsv4_attn_backend": "trtllm"}, "dsv4 trtllm"),
        ({"enable_page_major_kv_layout": True, "dsv4_attn_backend": "trtllm"}, "page_major, dsv4 trtllm"),
    ],
)
def test_layouts(changes: dict[str, Any], layout: str) -> None:
    assert facts(**changes).cache_format.kv_layout == layout


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"tp_size": 8}, Parallelism(attn_tp=8)),
        ({"tp_size": 8, "attn_dp_size": 4, "dp_size": 4}, Parallelism(attn_tp=2)),
        ({"tp_size": 8, "attn_cp_size": 4}, Parallelism(attn_tp=2, attn_cp=4)),
        ({"tp_size": 4, "pp_size": 2, "dcp_size": 2}, Parallelism(attn_tp=4, pp=2, dcp=2)),
        (
            {"tp_size": None, "attn_cp_size": None, "attn_dp_size": None, "pp_size": None, "dcp_size": None},
            Parallelism(),
        ),
    ],
)
def test_ranks(changes: dict[str, Any], ranks: Parallelism) -> None:
    assert facts(**changes).parallelism == ranks


def test_a_decode_reads_what_its_version_reads() -> None:
    assert facts(version="0.5.21").handshake_fields == ROWS[1].route_fields
    unknown = facts(version="0.9.0")
    assert (unknown.version_known, unknown.handshake_fields) == (False, ROWS[-1].route_fields)


def test_an_old_server_has_no_facts() -> None:
    with pytest.raises(UnservedVersion, match=r"SGLang 0\.5\.19 is not served"):
        facts(version="0.5.19")


@pytest.mark.parametrize(
    ("started", "now", "role"),
    [
        ("prefill", "prefill", "prefill"),
        ("prefill", "decode", "decode"),  # /pd_role_switch
        ("decode", None, "decode"),  # 0.5.20 does not tell it in /model_info
        ("null", "null", "plain"),
        (None, None, "plain"),
        (3, 3, "plain"),
    ],
)
def test_the_role_is_the_one_it_plays_now(started: object, now: object, role: str) -> None:
    assert about.role_of({"disaggregation_mode": started}, {"disaggregation_mode": now}) == role


# ---- what is told of a server that joins -----------------------------------------------------------------------------

EVENTS = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "block_size": 1, "dp_size": 1}


def test_a_server_that_joins_is_described() -> None:
    is_what, _ = about.join_lines(Role.PREFILL, facts())
    assert is_what.startswith("SGLang 0.5.23, model ")
    assert "8192 tokens of KV (auto, pages of 1), context 4096" in is_what


@pytest.mark.parametrize(
    ("role", "changes", "said"),
    [
        (Role.PREFILL, {}, ("--enable-cache-report", "--kv-events-config")),
        (Role.PREFILL, {"enable_cache_report": True, "kv_events": EVENTS}, ()),
        (Role.PREFILL, {"enable_cache_report": True, "disable_radix_cache": True}, ()),
        (Role.DECODE, {"disaggregation_mode": "decode"}, ("--enable-cache-report",)),
        (Role.DECODE, {"enable_cache_report": True}, ()),
        (Role.DECODE, {"enable_cache_report": True, "version": "0.9.0"}, ("0.9.0 is newer",)),
        (Role.DECODE, {"enable_cache_report": True, "frontend": "rust"}, ("rust front end",)),
    ],
)
def test_what_an_operator_could_switch_on(role: Role, changes: dict[str, Any], said: tuple[str, ...]) -> None:
    _, advice = about.join_lines(role, facts(**changes))
    assert len(advice) == len(said)
    for line, words in zip(advice, said, strict=True):
        assert words in line


@pytest.mark.parametrize(
    ("changes", "loud"),
    [({}, False), ({"version": "0.9.0"}, True), ({"frontend": "rust"}, True), ({"frontend": None}, False)],
)
def test_what_was_never_tried_is_warned_of(changes: dict[str, Any], loud: bool) -> None:
    assert about.needs_attention(facts(**changes)) is loud


# ---- loads -----------------------------------------------------------------------------------------------------------


def load(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 5.0, "num_running_reqs": 0, "num_waiting_reqs": 3, **changes}


@pytest.mark.parametrize(
    ("queues", "waiting"),
    [
        (None, 0),
        ({"prefill_bootstrap_queue_reqs": 2}, 2),
        ({"decode_prealloc_queue_reqs": 1, "decode_transfer_queue_reqs": 1, "decode_retracted_queue_reqs": 1}, 2),
        ({"prefill_bootstrap_queue_reqs": 1, "prefill_inflight_queue_reqs": 1}, 3),
    ],
)
def test_requests_that_wait_for_the_peer_are_told_apart(queues: dict[str, int] | None, waiting: int) -> None:
    read = about.load_of({"loads": [load(disaggregation=queues)]})
    assert read is not None
    assert (read.waiting_requests, read.waiting_for_peer_requests) == (3, waiting)


def test_decode_steps_are_the_first_moment_of_every_rank() -> None:
    ranks = [load(dp_rank=0, decode_moments=[40.0, 44.0]), load(dp_rank=1, decode_moments=[2.0]), load(dp_rank=2)]
    read = about.load_of({"loads": ranks})
    assert read is not None
    assert read.decode_steps_total == 42.0
