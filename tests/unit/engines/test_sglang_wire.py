"""SGLang's wire: ids, what may never be sent, bodies, answers, probes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from engines import sglang_facts as about
from engines import sglang_wire as wire
from engines.sse_frames import EventKind, FrameDecoder, data_of, event_kind
from engines.types import FailureKind
from gateway.openai_api import Api, expand, parse
from tests.fakes import RID, server_info

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "failures.json").read_text())
WHOLE = [row for row in RECORDED if not row["stream"]]
STREAMED = [row for row in RECORDED if row["stream"]]


# ---- ids -------------------------------------------------------------------------------------------------------------


def test_no_rid_begins_another() -> None:
    rng = Random(1)
    rids = {wire.new_rid(rng) for _ in range(2000)}
    assert len(rids) == 2000
    assert {len(rid) for rid in rids} == {wire.RID_CHARS}
    assert all(rid.isascii() and rid.isalnum() for rid in rids)


def test_a_small_rid_keeps_its_width() -> None:
    class Small(Random):
        def getrandbits(self, bits: int) -> int:
            return 5

    assert wire.new_rid(Small()) == "5".rjust(wire.RID_CHARS, "0")


# ---- the poison table ------------------------------------------------------------------------------------------------

REFUSED: dict[str, list[dict[str, Any]]] = {
    "top_logprobs": [{"top_logprobs": 129}, {"top_logprobs": 129.0}, {"top_logprobs": "129"}],
    "logprobs": [{"logprobs": 129}, {"logprobs": 129.0}],
    "top_logprobs_num": [{"top_logprobs_num": 129}, {"top_logprobs_num": [5]}, {"top_logprobs_num": []}],
    "logprob_start_len": [{"logprob_start_len": bad, "return_logprob": True} for bad in (-2, -5, [0], [-1], [])],
    "session_params": [{"session_params": {"id": "s"}}, {"session_params": {}}],
    "input_embeds": [{"input_embeds": [[0.5]]}],
    "return_sampling_mask": [{"return_sampling_mask": True}, {"return_sampling_mask": 1}],
    "input_ids": [{"input_ids": []}, {"input_ids": [[1], []]}],
    "min_p": [{"min_p": 0.1, "seed": 0}, {"min_p": 1, "sampling_seed": 3}, {"min_p": "0.1", "seed": 1}],
    "beam_width": [{"beam_width": 2}],
    "token ids": [
        *({name: bad} for name in ("input_ids", "prompt") for bad in ([-1], [5, -1, 7], [[5], [6, -7]], [[-(2**63)]])),
        *({"stop_token_ids": bad} for bad in ([-1], [2, -1], [None, "-1"], [-2.0])),
        *({"prompt": ["text", other, -1]} for other in (True, 1.5, "-1", None, {})),
    ],
    "integer": [{"seed": 2**63}, {"seed": -(2**63) - 1}, {"seed": 2**64 - 1}],
}
ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "top_logprobs": [{"top_logprobs": 128}, {"top_logprobs": None}, {"top_logprobs": "20"}],
    "logprobs": [{"logprobs": 128}, {"logprobs": True}, {"logprobs": None}],
    "top_logprobs_num": [{"top_logprobs_num": 128}, {"top_logprobs_num": -1}, {"top_logprobs_num": None}],
    "logprob_start_len": [
        *({"logprob_start_len": good, "return_logprob": True} for good in (-1, 0, 3, None, "1")),
        {"logprob_start_len": -5, "return_logprob": False},
        {"logprob_start_len": [0]},
    ],
    "session_params": [{"session_params": None}],
    "input_embeds": [{"input_embeds": None}],
    "return_sampling_mask": [{"return_sampling_mask": False}, {"return_sampling_mask": None}],
    "input_ids": [{"input_ids": [0]}, {"input_ids": [[1], [2]]}, {"input_ids": None}],
    "min_p": [{"min_p": 0.1}, {"min_p": 0, "seed": 1}, {"seed": 1}],
    "beam_width": [{"beam_width": 1}],
    "token ids": [
        *({name: good} for name in ("input_ids", "prompt") for good in ([0], [5, 2**40], [[0], [5, 6]], None)),
        *({"prompt": text} for text in ("-1", "", ["-1", "-2"], [], [[]], [True, 1.5, "-1", None, {}], [-1.5], 7, {})),
        *({"stop_token_ids": good} for good in ([0, 7], [], [None, "text", "7", True], [[-1]], None, -1, "-1", {})),
        {"logit_bias": {"-1": 1.0}},
        {"token_ids_logprob": [-1]},
    ],
    "integer": [{"seed": 2**63 - 1}, {"seed": -(2**63)}, {"temperature": 1e18}, {"flag": True}],
}


def rows(table: dict[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, body) for name, bodies in table.items() for body in bodies]


def test_every_row_of_the_poison_table_has_cases() -> None:
    names = {row.field for row in wire.POISON_TABLE}
    assert names == set(REFUSED) == set(ACCEPTED)


@pytest.mark.parametrize(("name", "body"), rows(REFUSED))
def test_poison_is_refused_by_name(name: str, body: dict[str, Any]) -> None:
    found = wire.poison({"model": "tiny", **body})
    assert found is not None
    assert found[0] == (next(iter(body)) if name in ("token ids", "integer") else name)
    assert found[1] == next(row.reason for row in wire.POISON_TABLE if row.field == name)


@pytest.mark.parametrize(("name", "body"), rows(ACCEPTED))
def test_a_near_miss_passes(name: str, body: dict[str, Any]) -> None:
    assert wire.poison({"model": "tiny", **body}) is None


@pytest.mark.parametrize("name", ["min_p", "beam_width"])
def test_sampling_params_are_looked_into(name: str) -> None:
    found = wire.poison({"text": "hi", "sampling_params": REFUSED[name][0]})
    assert found is not None
    assert found[0] == f"sampling_params.{name}"


VOCABULARY_TOKENS = 2048
FOREIGN = [2047, 2048, 1_000_000]
"""The last id of the vocabulary, then two that it does not have."""


@pytest.mark.parametrize("name", ["input_ids", "prompt", "stop_token_ids"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("token", FOREIGN)
def test_ids_beyond_a_known_vocabulary_are_refused_with_its_size(name: str, nested: bool, token: int) -> None:
    body: dict[str, Any] = {name: [5, token, 6]}
    if nested and name == "stop_token_ids":
        body = {"sampling_params": body}
    elif nested:
        body = {name: [[5], [6, token]]}
    assert wire.poison(body) is None, "nothing is known of the vocabulary"
    found = wire.poison(body, VOCABULARY_TOKENS)
    if token < VOCABULARY_TOKENS:
        assert found is None
    else:
        assert found is not None
        assert found[0] == ("sampling_params.stop_token_ids" if nested and name == "stop_token_ids" else name)
        assert "it has 2048, so 2047 is the last" in found[1]


@pytest.mark.parametrize("token", [-1, VOCABULARY_TOKENS])
def test_a_stop_of_one_prompt_of_a_batch_is_found(token: int) -> None:
    batch = {"text": ["a", "b"], "sampling_params": [{}, None, 7, {"stop_token_ids": [token]}]}
    found = wire.poisonous_ids(batch, VOCABULARY_TOKENS)
    assert found is not None
    assert found[0] == "sampling_params.stop_token_ids"


def test_what_is_no_token_id_is_not_judged_by_a_known_vocabulary() -> None:
    prompts = ("9999", ["9999"], [True, 9999.5, "9999", None, {}], [["9999"], [None]])
    assert [wire.poison({"prompt": prompt}, VOCABULARY_TOKENS) for prompt in prompts] == [None] * len(prompts)
    assert wire.poison({"seed": 9999, "logit_bias": {"9999": 1}, "x": [9999]}, VOCABULARY_TOKENS) is None


@pytest.mark.parametrize("number", ["18446744073709551616", "-9223372036854775809", "9223372036854775808", "1e19"])
def test_integers_that_the_parser_makes_floats_of_are_refused_too(number: str) -> None:
    body = orjson.loads(b'{"sampling_params": {"stop_token_ids": [1, %b]}}' % number.encode())
    found = wire.poison(body)
    assert found is not None
    assert found[0].startswith("sampling_params.stop_token_ids")


def test_an_oversized_integer_is_named_by_its_path() -> None:
    assert wire.poison({"a": [{"b": 1}, {"b": 2**63}]}) == ("a.1.b", wire._INTEGER.reason)


def test_the_extremes_of_long_lists_count() -> None:
    for bad in (2**63, -(2**63) - 1):
        assert wire.poison({"ids": [1, 2, bad, 3]}) is not None
    assert wire.poison({"ids": [-(2**63), 2**63 - 1, 0]}) is None


def nested(levels: int) -> dict[str, Any]:
    """A body of so many levels, itself the first."""
    return orjson.loads(b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}")


@pytest.mark.parametrize(
    ("levels", "deep"), [(2, False), (wire.MAX_DEPTH, False), (wire.MAX_DEPTH + 1, True), (1000, True)]
)
def test_a_body_that_cannot_be_written_again_is_noticed(levels: int, deep: bool) -> None:
    """Its dump would raise in the middle of an attempt."""
    assert wire.too_deep(nested(levels)) is deep
    if not deep:
        assert wire.generation_body(nested(levels), RID, BOOTSTRAP, want_usage=True)
        assert wire.poison(nested(levels)) is None


# ---- bodies ----------------------------------------------------------------------------------------------------------

BOOTSTRAP = wire.Bootstrap("10.0.0.1", 8998, 2**62 + 1)


def test_bootstrap_fields_come_together() -> None:
    assert BOOTSTRAP.fields() == {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 2**62 + 1}
    with pytest.raises(TypeError):
        wire.Bootstrap("10.0.0.1", 8998)  # type: ignore[call-arg]


def test_unknown_fields_are_kept_and_the_clients_body_is_not_changed() -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "é"}],
        "new_thing": {"x": [1, None]},
        "rid": "mine",
    }
    before = orjson.dumps(body)
    sent = orjson.loads(wire.generation_body(body, RID, BOOTSTRAP, want_usage=True))
    assert sent == {**body, "rid": RID, **BOOTSTRAP.fields(), "stream_options": {"include_usage": True}}
    assert orjson.dumps(body) == before


def test_no_routing_field_of_a_client_reaches_an_engine() -> None:
    wished = {
        "rid": "x",
        "routed_dp_rank": 3,
        "data_parallel_rank": 3,
        "disagg_prefill_dp_rank": 3,
        "kv_hints": {},
        "bootstrap_host": "evil",
        "bootstrap_port": 1,
        "bootstrap_room": 1,
        "bootstrap_pair_key": "k",
        "x-override-url": "u",
    }
    body = {"model": "tiny", "prompt": "hi", "custom": 1, **wished}
    (unit,) = expand(parse(Api.COMPLETIONS, orjson.dumps(body)))
    sent = orjson.loads(wire.generation_body(unit.body, RID, BOOTSTRAP, want_usage=False))
    assert sent == {"model": "tiny", "prompt": "hi", "custom": 1, "rid": RID, **BOOTSTRAP.fields()}


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"continuous_usage_stats": True}])
def test_usage_is_asked_for_only_where_wanted(options: dict[str, Any] | None) -> None:
    body = {"stream_options": options}
    wanted = orjson.loads(wire.generation_body(body, RID, BOOTSTRAP, want_usage=True))["stream_options"]
    assert wanted == {**(options or {}), "include_usage": True}
    assert orjson.loads(wire.generation_body(body, RID, BOOTSTRAP, want_usage=False))["stream_options"] == options


def test_an_abort_names_one_rid() -> None:
    assert orjson.loads(wire.abort_body(RID)) == {"rid": RID}


@pytest.mark.parametrize("rid", ["", "a", RID[:-1], RID + "0"])
def test_an_abort_of_another_width_is_refused(rid: str) -> None:
    """SGLang aborts by prefix: a short rid ends the requests of others."""
    with pytest.raises(ValueError, match="32 characters"):
        wire.abort_body(rid)


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", WHOLE, ids=[row["name"] for row in WHOLE])
def test_recorded_failures_are_judged_as_such(row: dict[str, Any]) -> None:
    found = wire.judge_answer(row["status"], row["body"].encode())
    assert found is not None
    kind, message, status = found
    if row["status"] == 200:
        assert (kind, message, status) == (FailureKind.ABORTED, "Aborted", None)
    else:
        assert (kind, status) == (FailureKind.STATUS, row["status"])
        assert not message.startswith("{")


@pytest.mark.parametrize("row", STREAMED, ids=[row["name"] for row in STREAMED])
def test_recorded_stream_failures_keep_their_words_and_code(row: dict[str, Any]) -> None:
    frames = FrameDecoder().feed(row["body"].encode())
    bad = next(frame for frame in frames if event_kind(frame) in (EventKind.ERROR, EventKind.ABORT))
    message, code, aborted = wire.stream_error(data_of(bad))
    assert "KVTransferError" in message
    assert code == 500
    assert aborted is (event_kind(bad) is EventKind.ABORT)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": "plain"}', "plain"),
        (b'{"error": {"message": "inner"}}', "inner"),
        (b'{"object": "error", "message": "flat"}', "flat"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"]}]}', "[{'loc': ['body']}]"),
        (b"<html>", "<html>"),
        (b"[1]", "[1]"),
        (b'{"x": 1}', '{"x": 1}'),
        (b"\xff", "�"),
        (b"", ""),
    ],
)
def test_error_text_of_every_shape(body: bytes, text: str) -> None:
    assert wire.error_text(body) == text


def test_a_long_error_is_cut() -> None:
    assert len(wire.error_text(b"x" * 1_000_000)) == 2000


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"error": {"message": "m", "code": 503}}', ("m", 503, False)),
        (b'{"error": {"message": "m", "code": "busy"}}', ("m", None, False)),
        (b'{"error": "m"}', ("m", None, False)),
        (b'{"object": "error", "message": "m", "code": 400}', ("m", 400, False)),
        (b'{"meta_info": {"finish_reason": {"type": "abort", "message": "m", "status_code": 500}}}', ("m", 500, True)),
        (b'{"meta_info": {"finish_reason": {"type": "abort", "message": null}}}', ("aborted", None, True)),
        (b'{"choices": [{"finish_reason": "abort"}]}', ("finish_reason abort", None, True)),
        (b"no json", ("no json", None, False)),
    ],
)
def test_stream_errors_of_every_shape(data: bytes, expected: tuple[str, int | None, bool]) -> None:
    assert wire.stream_error(data) == expected


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": None},
        {"choices": [{"finish_reason": "stop"}, "odd"]},
        {"meta_info": {"finish_reason": {"type": "stop"}}},
        {"meta_info": {"finish_reason": None}},
        {"meta_info": None},
    ],
)
def test_what_is_no_abort(answer: dict[str, Any]) -> None:
    assert wire.abort_reason(answer) is None


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, b'{"choices": [{"finish_reason": "stop"}]}', None),
        (200, b'{"choices": []}', FailureKind.GARBLED),
        (200, b'{"choices": [null]}', FailureKind.GARBLED),
        (200, b'{"choices": [{"finish_reason": null}]}', FailureKind.GARBLED),
        (201, b'{"choices": [{"finish_reason": "stop"}]}', FailureKind.STATUS),
        (302, b"", FailureKind.STATUS),
        (200, b'{"meta_info": {}}', None),
        (200, b"not json", FailureKind.GARBLED),
        (200, b"[]", FailureKind.GARBLED),
        (200, b"{}", FailureKind.GARBLED),
        (200, b"", FailureKind.GARBLED),
        (200, b'{"choices": 5}', FailureKind.GARBLED),
        (400, b"not json", FailureKind.STATUS),
        (599, b"", FailureKind.STATUS),
        (200, b'{"choices": [{"finish_reason": "abort"}]}', FailureKind.ABORTED),
    ],
)
def test_whole_answers_are_judged(status: int, body: bytes, kind: FailureKind | None) -> None:
    found = wire.judge_answer(status, body)
    assert (found[0] if found else None) is kind


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 2}}, wire.Usage(5, 2, None)),
        ({"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}}, wire.Usage(5, 0, 4)),
        ({"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}}, wire.Usage(5, 0, None)),
        ({"meta_info": {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 1}}, wire.Usage(5, 2, 1)),
        ({"meta_info": {"id": "x"}}, None),
        ({"usage": None}, None),
        ({}, None),
    ],
)
def test_usage_is_read_from_every_shape(answer: dict[str, Any], expected: wire.Usage | None) -> None:
    assert wire.usage_of(answer) == expected


# ---- probes ----------------------------------------------------------------------------------------------------------


def test_a_boot_fingerprint_is_stable() -> None:
    print_of = about.boot_fingerprint
    assert print_of(server_info(), ["a:1", "b:2"]) == print_of(server_info(startup_time={"load": 1.25}), ["b:2", "a:1"])
    assert print_of({"startup_time": {"a": 1, "b": 2}}) == print_of({"startup_time": {"b": 2, "a": 1}})
    assert print_of(server_info(gen_throughput=3)) == print_of(server_info(gen_throughput=4))


@pytest.mark.parametrize(
    "changed",
    [{"startup_time": {"load": 1.2500001}}, {"random_seed": 8}, {"launch_command": "sglang serve --x"}],
)
def test_each_part_changes_the_boot_fingerprint(changed: dict[str, Any]) -> None:
    assert about.boot_fingerprint(server_info(**changed)) != about.boot_fingerprint(server_info())


def test_a_rank_port_changes_the_boot_fingerprint() -> None:
    prints = {about.boot_fingerprint(server_info(), ranks) for ranks in ([], ["a:1"], ["a:2"], ["a:1", "b:1"])}
    assert len(prints) == 4


def test_facts_are_read() -> None:
    facts = about.facts_of(
        server_info(version="0.5.23", max_running_requests=16), {"served_model_name": "tiny"}, ["a:1"]
    )
    assert (facts.model, facts.max_total_tokens, facts.context_tokens, facts.chunk_tokens) == (
        "tiny",
        10_000,
        8_000,
        2048,
    )
    assert (facts.version, facts.max_running_requests, facts.radix_cache, facts.dp_size) == ("0.5.23", 16, True, 1)
    assert facts.cache_format.transfer_backend == "mooncake"
    assert facts.boot_fingerprint == about.boot_fingerprint(server_info(), ["a:1"])


@pytest.mark.parametrize("field", ["max_total_num_tokens", "max_req_input_len"])
@pytest.mark.parametrize("value", [None, "8", 8.5, True])
def test_a_bad_fact_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"server_info.{field}"):
        about.facts_of(server_info(**{field: value}), {})


@pytest.mark.parametrize("size", [-1, 0])
def test_a_server_that_does_not_chunk_takes_a_prompt_in_one_forward(size: int) -> None:
    """`--chunked-prefill-size -1` turns chunking off."""
    assert about.facts_of(server_info(chunked_prefill_size=size), {}).chunk_tokens == 8_000


@pytest.mark.parametrize(
    ("changed", "radix"),
    [
        ({"disaggregation_mode": "decode"}, False),
        ({"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}, True),
        ({"disable_radix_cache": True}, False),
        ({}, True),
    ],
)
def test_a_decode_has_no_radix_cache_unless_told(changed: dict[str, Any], radix: bool) -> None:
    assert about.facts_of(server_info(**changed), {}).radix_cache is radix


def test_loads_are_summed_over_ranks() -> None:
    rank = {
        "timestamp": 5.0,
        "num_running_reqs": 1,
        "num_waiting_reqs": 2,
        "num_waiting_uncached_tokens": 3,
        "num_used_tokens": 4,
        "num_total_tokens": 5,
        "max_total_num_tokens": 6,
        "total_prefill_uncached_tokens": 7,
        "total_prefill_busy_us": 8,
    }
    load = about.load_of({"loads": [rank, {**rank, "timestamp": 4.0}, "odd"]})
    assert load is not None
    assert load.taken_s == 4.0
    summed = (load.running_requests, load.waiting_requests, load.waiting_uncached_tokens, load.used_tokens)
    assert summed == (2, 4, 6, 8)
    assert (load.total_tokens, load.max_total_tokens) == (10, 12)
    assert (load.prefill_uncached_tokens_total, load.prefill_busy_us_total) == (14, 16)


@pytest.mark.parametrize("loads", [{}, {"loads": []}, {"loads": None}, {"loads": ["odd"]}])
def test_an_answer_without_ranks_is_no_load(loads: dict[str, Any]) -> None:
    assert about.load_of(loads) is None


@pytest.mark.parametrize(
    "answer",
    [
        {"usage": {"prompt_tokens": "7"}},
        {"usage": {"prompt_tokens": 7.5}},
        {"usage": {"prompt_tokens": -1}},
        {"usage": {"prompt_tokens": 7, "completion_tokens": "x"}},
        {"meta_info": {"prompt_tokens": None}},
        {"usage": 5},
        {},
    ],
)
def test_counts_that_make_no_sense_are_no_usage(answer: dict[str, Any]) -> None:
    assert wire.usage_of(answer) is None


def test_a_senseless_cached_count_is_an_unknown_one() -> None:
    usage = wire.usage_of({"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": "many"}}})
    assert usage == wire.Usage(7, 0, None)
