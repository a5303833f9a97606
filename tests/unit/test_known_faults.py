"""What users of other gateways hit, and the tests that hold it here; the page on it is written from this table.

`python tests/unit/test_known_faults.py` writes it anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "known-faults.md"
BEGIN = "<!-- written by `python tests/unit/test_known_faults.py` -->\n"
END = "<!-- end of what is written -->\n"

LEGS, HEALTH, STREAMS = "Two servers for one request", "Retries, health, connections", "Streams and bodies"
ELSEWHERE = {
    "13": "a prefill has no limit on requests of its own: what waits, waits in the gateway for room on a decode",
    "15": "the memory of an engine's host is not watched",
    "16": "the memory of an engine's host is not watched",
    "26": "SGLang wants both servers at once; how early a decode may be told is not decided here",
    "54": "who waits too long is told 429 with a time to come back; a full queue refuses after the body was read",
    "73": "one process serves one core; loads beyond it are not tested here",
}
"""Rows of the survey that no test holds, and why."""


@dataclass(frozen=True)
class Fault:
    """What users met elsewhere, in `refs` (owner/repository#number), and `tests` (file::name, files below tests/)."""

    group: str
    refs: tuple[str, ...]
    words: str
    tests: tuple[str, ...]


def fault(group: str, refs: str, words: str, *tests: str) -> Fault:
    """`tests` as `file::name name ...`."""
    named = [(file, name) for file, names in (each.split("::") for each in tests) for name in names.split()]
    return Fault(group, tuple(refs.split()), words, tuple(f"{file}::test_{name}" for file, name in named))


_FAULTS, _KILLS, _LEAVES = "scenarios/test_faults.py", "scenarios/test_kills.py", "scenarios/test_disconnects.py"
_HERE, _DISPATCH = "scenarios/test_known_faults.py", "unit/gateway/test_dispatch.py"
_STREAMS, _GO_ON = "scenarios/test_stream_kills.py", "unit/gateway/test_continuation.py"
_PAIRS, _CANARIES = "scenarios/test_pairs.py", "unit/gateway/test_canaries.py"
_WIRE, _STORY = "unit/engines/test_sglang_wire.py", "unit/gateway/test_lifecycle.py"
_CLIENT, _MONITOR = "scenarios/test_openai_client.py", "unit/failover/test_monitor.py"

KNOWN: dict[str, Fault] = {
    # ---- two servers for one request ---------------------------------------------------------------------------------
    "1": fault(
        LEGS,
        "sgl-project/sglang#9726",
        "A prefill gives up and nobody tells its decode, which waits on for minutes.",
        f"{_FAULTS}::a_fault_before_output_is_retried silence_before_output_is_retried",
        f"{_HERE}::a_burst_of_failing_prefills_pins_no_decode_and_is_told_at_once",
    ),
    "2": fault(
        LEGS,
        "sgl-project/sglang#29017",
        "Every failed prefill keeps a place on a decode for five minutes, so that a burst of them stops the fleet.",
        f"{_HERE}::a_burst_of_failing_prefills_pins_no_decode_and_is_told_at_once",
        f"{_KILLS}::the_gauge_agrees_with_the_ledger_while_pages_wait",
        "unit/gateway/test_admin_api.py::gauges_show_the_fleet_as_it_is",
    ),
    "3": fault(
        LEGS,
        "sgl-project/sglang#24159",
        "A prefill says that the prompt is too long, and the client waits half an hour for the decode.",
        f"{_FAULTS}::a_callers_fault_goes_to_the_client",
        f"{_STORY}::a_callers_fault_goes_to_the_client_in_the_engines_words",
        "unit/failover/test_retry.py::a_callers_fault_goes_to_the_client_and_is_never_retried",
    ),
    "4": fault(
        LEGS,
        "sgl-project/sglang#29482",
        "A decode cannot be reached, and its prefill stays behind waiting for it.",
        f"{_STORY}::a_leg_that_fails_before_the_commit_is_tried_elsewhere",
        f"{_DISPATCH}::another_attempt_has_other_names_and_the_old_one_was_told_to_stop_before",
        f"{_FAULTS}::a_fault_before_output_is_retried",
        f"{_LEAVES}::aborts_leave_at_once_when_the_other_leg_has_failed",
    ),
    "5": fault(
        LEGS,
        "vllm-project/aibrix#2289",
        "The prefill's call runs beside the request, its failure becomes a line in a log, and the client hangs.",
        f"{_DISPATCH}::a_client_hears_of_a_failed_prefill_at_once_though_its_decode_goes_on_waiting",
        f"{_KILLS}::without_another_pair_there_is_one_clear_error",
        "unit/engines/test_pair.py::failures_are_told_when_nobody_asks_for_events",
    ),
    "6": fault(
        LEGS,
        "vllm-project/aibrix#2746",
        "Nothing can be aborted, as the gateway does not know the name that the engine gave the request.",
        f"{_WIRE}::no_rid_begins_another",
        f"{_STORY}::both_legs_get_one_rid_and_one_room",
        f"{_LEAVES}::aborts_leave_at_once_when_the_client_has_gone",
    ),
    "7": fault(
        LEGS,
        "llm-d/llm-d#2433",
        "Two servers that do not fit each other fail at every transfer, and clients see a hang.",
        "scenarios/test_unlike_servers.py::a_fleet_without_a_pair_says_why_and_lives a_decode_that_fits_takes_all",
        f"{_PAIRS}::a_broken_link_between_healthy_servers_takes_one_pair_out_of_use",
        "unit/gateway/test_pairs.py::two_failures_that_name_neither_server_close_a_pair",
    ),
    "8": fault(
        LEGS,
        "sgl-project/sglang#23342",
        "KV does not arrive, requests hang for ever, and every health check is green.",
        f"{_PAIRS}::a_broken_link_between_healthy_servers_takes_one_pair_out_of_use",
        "scenarios/test_deadlines.py::a_pair_that_is_dead_but_connected_is_found_before_its_first_token",
        "unit/failover/test_deadlines.py::all_of_it_is_far_below_what_sglang_waits",
        f"{_CANARIES}::idle_pairs_have_their_turn_one_canary_a_server_and_interval",
    ),
    "10": fault(
        LEGS,
        "sgl-project/sglang#9266",
        "Under load transfers fail, and the decodes' streams break off in their clients' hands.",
        f"{_STREAMS}::a_stream_goes_on_on_another_decode streams_survive_kills",
        f"{_KILLS}::a_killed_server_costs_no_answer",
        "unit/gateway/test_decider.py::many_at_once_are_booked_as_promised",
        "property/test_queueing_properties.py::a_dispatch_never_overbooks_a_decode",
    ),
    "11": fault(
        LEGS,
        "sgl-project/sglang#10110",
        "Prefills are sent more than decodes can take, until everything waits for everything and times out.",
        f"{_DISPATCH}::no_prefill_begins_what_no_decode_has_room_for",
        "scenarios/test_overload.py::a_full_decode_is_waited_for_in_order",
        "unit/gateway/test_decider.py::full_decodes_are_waited_for_in_order_of_arrival",
    ),
    "12": fault(
        LEGS,
        "smg-project/smg#2466",
        "A request is sent though its decode cannot take it in time, and its client learns of it after minutes.",
        "scenarios/test_overload.py::who_waits_too_long_is_refused a_full_queue_refuses_at_once",
        "unit/gateway/test_decider.py::retry_after_follows_the_rate_at_which_requests_leave",
        f"{_HERE}::a_burst_of_failing_prefills_pins_no_decode_and_is_told_at_once",
    ),
    "14": fault(
        LEGS,
        "sgl-project/sglang#8352",
        "Aborted requests stay in the queues of a pair, and the decode's memory fills up little by little.",
        f"{_HERE}::storms_of_clients_that_hang_up_leave_nothing_in_any_queue",
        f"{_LEAVES}::hanging_up_frees_both_sides hanging_up_on_many_streams_at_once",
    ),
    "17": fault(
        LEGS,
        "sgl-project/sglang#30233",
        "A prefill breaks off with a 200, and the decode writes nonsense from half of the KV.",
        f"{_FAULTS}::a_fault_before_output_is_retried",
        "unit/gateway/test_attempt.py::held_output_of_a_failed_attempt_is_never_delivered",
        "unit/engines/test_pair.py::a_200_that_ended_in_abort_is_a_failure",
        "property/test_attempt_properties.py::a_prefill_that_fails_before_hand_over_lets_nothing_through",
    ),
    "18": fault(
        LEGS,
        "sgl-project/sglang#11139",
        "A long prefill cannot be stopped, since its name comes with the first output only.",
        f"{_LEAVES}::hanging_up_frees_both_sides",
        f"{_CLIENT}::a_client_timeout_frees_both_sides",
    ),
    "19": fault(
        LEGS,
        "sgl-project/sglang#39461",
        "The client has gone and the engines go on, above all for several samples and in pairs.",
        f"{_HERE}::a_client_that_hangs_up_ends_every_sample_on_both_sides",
        f"{_CLIENT}::closing_a_stream_frees_both_sides",
        f"{_STORY}::a_client_that_goes_frees_both_servers",
    ),
    "21": fault(
        LEGS,
        "sgl-project/sglang#25561",
        "An abort with an empty name ends everybody's requests, one with a short name those of others.",
        f"{_HERE}::no_abort_of_an_empty_or_a_shorter_name_ends_a_request",
        f"{_WIRE}::an_abort_of_another_width_is_refused no_rid_begins_another",
        "unit/gateway/test_live.py::a_rid_is_needed",
        f"{_FAULTS}::one_rid_for_two_requests_is_no_clash",
    ),
    "22": fault(
        LEGS,
        "ai-dynamo/dynamo#7489 ai-dynamo/dynamo#13855",
        "A server dies during a transfer and the other keeps the KV for ever, or a decode starts for nobody.",
        f"{_KILLS}::a_killed_server_costs_no_answer",
        f"{_LEAVES}::hanging_up_frees_both_sides",
        "unit/gateway/test_cancellation.py::a_request_that_is_cancelled_leaves_nothing",
    ),
    "23": fault(
        LEGS,
        "ai-dynamo/dynamo#14368",
        "A decode that waits for KV cannot be stopped before it has answered.",
        f"{_LEAVES}::hanging_up_frees_both_sides aborts_leave_at_once_when_the_client_has_gone",
        "contract/test_emulator_faults.py::abort_in_the_decode_transfer_queue_tells_the_prefill",
    ),
    "25": fault(
        LEGS,
        "llm-d/llm-d#1138",
        "A client that leaves between prefill and decode strands the prefill's blocks.",
        f"{_LEAVES}::hanging_up_frees_both_sides",
        "unit/gateway/test_cancellation.py::a_request_that_is_cancelled_leaves_nothing",
        "unit/failover/test_release.py::a_lost_abort_is_repeated_and_only_to_what_is_open "
        "what_does_not_end_is_closed_and_watched",
    ),
    "27": fault(
        LEGS,
        "NVIDIA/TensorRT-LLM#12313 NVIDIA/TensorRT-LLM#5820",
        "A server leaks until it does nothing any more, and calls itself healthy.",
        "contract/test_health_with_servers.py::a_decode_that_stands_still_under_work_is_wedged_until_it_goes_on "
        "a_server_that_works_is_not_wedged",
        "unit/failover/test_release.py::a_server_that_goes_on_counting_is_named",
        f"{_MONITOR}::a_leak_ends_with_its_process",
    ),
    "30": fault(
        LEGS,
        "sgl-project/sglang#6215 ai-dynamo/nixl#795",
        "A prefill that was restarted is of no use until its decodes are restarted too.",
        f"{_PAIRS}::a_prefill_that_is_back_at_once_costs_nobody_a_deadline",
        f"{_CANARIES}::every_pair_of_a_restarted_prefill_gets_a_canary",
        "unit/gateway/test_pairs.py::an_attempt_on_the_process_before_says_nothing",
    ),
    "31": fault(
        LEGS,
        "sgl-project/sglang#40125",
        "Two live requests with one room end the schedulers of both servers.",
        "property/test_rooms.py::no_room_comes_twice processes_of_different_ids_share_no_room",
        "contract/test_replicas.py::no_two_of_50_claims_get_one_id_and_none_after_a_flush "
        "rooms_begin_with_the_claimed_id",
        f"{_WIRE}::no_routing_field_of_a_client_reaches_an_engine",
        f"{_CLIENT}::fields_of_the_gateway_are_stripped",
    ),
    "32": fault(
        LEGS,
        "sgl-project/sglang#26486 sgl-project/sglang#24223 sgl-project/sglang#40297",
        "Several samples of one request share a room, and are garbled or hang.",
        f"{_HERE}::every_route_that_generates_brings_a_room_of_its_own_for_each_sample",
        f"{_CLIENT}::two_samples two_samples_streamed a_list_of_prompts",
    ),
    "34": fault(
        LEGS,
        "sgl-project/sglang#35497 sgl-project/sglang#35229",
        "Some routes lose the fields that make a pair, and engines refuse what they get.",
        f"{_HERE}::a_route_that_no_pair_can_serve_reaches_no_server",
        "contract/test_http_server.py::what_is_not_served_has_the_shape_of_an_error",
    ),
    "35": fault(
        LEGS,
        "volcano-sh/kthena#865 llm-d/llm-d-router#2006",
        "A route is not known to the gateway and reaches an engine without a room.",
        f"{_HERE}::every_route_that_generates_brings_a_room_of_its_own_for_each_sample "
        "a_route_that_no_pair_can_serve_reaches_no_server",
    ),
    "35a": fault(
        LEGS,
        "sgl-project/sglang#34570",
        "A request is sent again as it was, while its first attempt may still run under the same name and room.",
        f"{_DISPATCH}::another_attempt_has_other_names_and_the_old_one_was_told_to_stop_before",
        f"{_GO_ON}::a_broken_completion_goes_on_after_its_last_token",
    ),
    "35b": fault(
        LEGS,
        "sgl-project/sglang#31206",
        "Decodes get requests though the breaker keeps prefills out, and the prefills never come back.",
        f"{_DISPATCH}::where_one_side_is_down_the_other_hears_nothing",
        "scenarios/test_half_open.py::a_whole_role_that_restarts_is_in_full_use_again_at_once",
        "property/test_health_properties.py::a_server_that_is_well_is_ready_soon_whatever_was",
    ),
    "35c": fault(
        LEGS,
        "lightseekorg/tokenspeed#1427",
        "Servers that have not met cannot tell each other that a request is over; nobody else does.",
        f"{_LEAVES}::aborts_leave_at_once_when_the_client_has_gone aborts_leave_at_once_when_the_other_leg_has_failed "
        "aborts_leave_after_the_grace_when_a_prefill_was_lost",
        "unit/failover/test_release.py::the_decode_is_aborted_first",
    ),
    # ---- retries, health, connections --------------------------------------------------------------------------------
    "51": fault(
        HEALTH,
        "sgl-project/sglang#25811",
        "Requests that are wrong open the breakers, until no server is left for those that are right.",
        f"{_MONITOR}::no_number_of_client_errors_or_full_queues_changes_anything",
        "unit/failover/test_blame.py::client_errors_and_saturation_speak_against_nobody",
    ),
    "55": fault(
        HEALTH,
        "sgl-project/sglang#20851 smg-project/smg#2162",
        "Connections are kept longer than engines keep them, and requests fail on those that are closed.",
        "unit/engines/test_upstream.py::idle_connections_are_closed_before_a_server_closes_them",
        "contract/test_upstream.py::idle_connection_is_dropped_before_the_server_does "
        "idle_connection_closed_by_the_server reset_of_an_idle_connection_is_no_news",
        "sglang/test_constants.py::our_idle_connections_are_closed_before_theirs",
    ),
    "57": fault(
        HEALTH,
        "sgl-project/sglang#33740",
        "The gateway calls itself healthy while no prefill is up.",
        "unit/gateway/test_admin_api.py::it_is_not_ready_while_one_side_of_every_pair_is_down "
        "each_model_is_ready_by_itself",
    ),
    "59": fault(
        HEALTH,
        "AMD-AGI/Infera#82",
        "Every request has to find out anew that a server is bad.",
        f"{_MONITOR}::a_broken_leg_is_suspected_at_once_and_looked_into_at_once "
        "anothers_suspicion_stops_new_rooms_until_an_own_probe",
        "scenarios/test_replicas.py::a_server_that_one_lost_gets_nothing_from_the_other",
        f"{_DISPATCH}::another_attempt_leaves_the_server_that_failed_though_it_has_the_prefix",
        f"{_FAULTS}::a_frozen_prefill_is_passed_over",
    ),
    "60": fault(
        HEALTH,
        "radixark/miles#1334",
        "A retry begins a second generation beside the first, which can no longer be stopped.",
        f"{_DISPATCH}::another_attempt_has_other_names_and_the_old_one_was_told_to_stop_before",
        f"{_LEAVES}::aborts_leave_at_once_when_the_other_leg_has_failed",
    ),
    "61": fault(
        HEALTH,
        "smg-project/smg#2487",
        "One pair fails every handshake, and each of its servers is healthy.",
        f"{_PAIRS}::a_broken_link_between_healthy_servers_takes_one_pair_out_of_use",
        "unit/gateway/test_pairs.py::two_failures_that_name_neither_server_close_a_pair",
        f"{_CANARIES}::a_broken_link_is_tried_ever_more_rarely_until_it_is_mended",
    ),
    "63": fault(
        HEALTH,
        "llm-d/llm-d-router#2521",
        "Without a prefill the decodes compute prompts, and nobody is told.",
        "unit/gateway/test_decider_health.py::no_decode_computes_a_prompt_where_no_prefill_is_up",
        f"{_FAULTS}::no_pair_is_told_at_once",
    ),
    # ---- streams and bodies ------------------------------------------------------------------------------------------
    "64": fault(
        STREAMS,
        "ai-dynamo/dynamo#7930",
        "An answer bound to a grammar goes on on another server, and its JSON begins anew inside itself.",
        f"{_STREAMS}::what_cannot_go_on_ends_with_one_error_at_once",
        "unit/failover/test_failure_semantics.py::the_page_holds_the_table_as_it_is",
        "unit/engines/test_exact_chat_rules.py::what_makes_it_plain",
        f"{_GO_ON}::another_answer_is_never_spliced_on",
    ),
    "66": fault(
        STREAMS,
        "ai-dynamo/dynamo#2038",
        "An answer that goes on on another server gets its whole length once more.",
        f"{_GO_ON}::a_broken_completion_goes_on_after_its_last_token",
        "unit/engines/test_completion_stream.py::the_next_call_asks_for_the_rest "
        "a_stop_string_over_the_seam_ends_the_stream_here logprobs_are_kept_as_they_came",
        "unit/engines/test_generate_stream.py::the_next_call_asks_for_the_rest",
        "unit/engines/test_exact_chat.py::the_room_shrinks_by_what_has_come",
        f"{_STREAMS}::logprobs_and_ids_go_on a_stop_string_over_the_seam_is_found",
    ),
    "67": fault(
        STREAMS,
        "BerriAI/litellm#32835",
        "A stream that breaks is begun anew, and the client reads everything twice.",
        "unit/failover/test_retry.py::once_the_client_has_a_byte_a_stream_goes_on_but_nothing_begins_anew",
        f"{_STREAMS}::a_stream_goes_on_on_another_decode a_stream_is_whole_wherever_its_decode_died",
        "unit/failover/chaos/test_checker.py::every_wrong_token_is_found",
    ),
    "68": fault(
        STREAMS,
        "BerriAI/litellm#36267",
        "An answer goes on as a chat with its beginning as text, which is refused, and the first error is lost.",
        f"{_GO_ON}::a_broken_completion_goes_on_after_its_last_token no_pair_is_left_to_go_on "
        "what_cannot_go_on_ends_with_one_error_that_says_why",
        "unit/engines/test_exact_chat.py::the_body_is_that_of_a_completion_with_everything_written_out",
        f"{_STREAMS}::a_stream_goes_on_on_another_decode",
    ),
    "69": fault(
        STREAMS,
        "BerriAI/litellm#38610 open-webui/open-webui#29628",
        "A stream simply stops: a 200, no error, no end.",
        f"{_FAULTS}::a_stream_that_breaks_off_ends_with_one_error a_stall_ends_with_one_error",
        f"{_KILLS}::without_another_pair_there_is_one_clear_error",
        "unit/failover/chaos/test_checker.py::every_wrong_end_is_found",
        "scenarios/test_shutdown.py::what_does_not_end_in_time_is_told_so",
    ),
    "70": fault(
        STREAMS,
        "vllm-project/production-stack#952 vllm-project/production-stack#960",
        "The engine's answer is closed before its stream was read.",
        f"{_CLIENT}::a_late_reader_gets_all_of_it",
        "unit/engines/test_pair.py::a_slow_reader_gets_everything_in_order",
    ),
    "71": fault(
        STREAMS,
        "vllm-project/production-stack#777",
        "A stream is collected first and sent as a whole.",
        f"{_HERE}::a_token_is_with_its_client_before_the_next_is_made",
        "contract/test_upstream.py::each_chunk_comes_when_it_is_sent",
        "contract/test_http_server.py::each_event_leaves_at_once",
    ),
    "76": fault(
        STREAMS,
        "vllm-project/router#193 vllm-project/vllm#47136",
        "All of a prompt counts as cached, because the decode did not compute it.",
        f"{_HERE}::cached_tokens_are_those_that_the_prefill_had",
        "contract/test_emulator_faults.py::the_decode_reports_what_the_prefill_had_cached",
        "scenarios/test_exact_ids.py::a_repeated_chat_hits_what_was_predicted",
    ),
    "78": fault(
        STREAMS,
        "vllm-project/router#161 sgl-project/sglang#8500 sgl-project/sglang#21571",
        "Fields that the gateway does not know are dropped on the way.",
        f"{_CLIENT}::unknown_fields_reach_the_engine",
        f"{_WIRE}::unknown_fields_are_kept_and_the_clients_body_is_not_changed",
        "unit/gateway/test_openai_api.py::a_chat_request_is_read_and_its_unknown_fields_are_kept",
    ),
    "79": fault(
        STREAMS,
        "sgl-project/sglang#6622",
        "Bodies with pictures in them are refused for their size.",
        f"{_HERE}::a_large_body_arrives_whole_on_both_sides",
        "contract/test_http_server.py::a_large_body_arrives_whole "
        "a_body_announced_too_large_is_refused_before_it_is_sent",
        "unit/gateway/test_config.py::the_defaults_are_those_of_sglang_router_where_it_has_the_flag",
        "unit/gateway/test_openai_api.py::an_embedded_image_is_not_a_megabyte_of_prompt",
    ),
}
"""By their numbers in the survey."""


def table() -> str:
    lines: list[str] = []
    for group, rows in groupby(KNOWN.items(), lambda item: item[1].group):
        lines += [f"## {group}", "", "| | what users hit | where | held by |", "|---|---|---|---|"]
        lines += [_row(number, each) for number, each in rows]
        lines.append("")
    lines += ["## Not held by a test", "", "| | why |", "|---|---|"]
    return "\n".join([*lines, *(f"| {number} | {why} |" for number, why in ELSEWHERE.items()), "", ""])


def _row(number: str, known: Fault) -> str:
    refs = ", ".join(f"[{ref}](https://github.com/{ref.replace('#', '/issues/')})" for ref in known.refs)
    named = (test.split("::") for test in known.tests)
    files = groupby(named, lambda pair: pair[0])
    tests = "<br>".join(f"`{file}`: " + ", ".join(f"`{name}`" for _, name in names) for file, names in files)
    return f"| {number} | {known.words} | {refs} | {tests} |"


def with_table(page: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} lacks the marks around the table")
    return before + BEGIN + "\n" + table() + END + after


@cache
def defined_in(file: str) -> frozenset[str]:
    """The tests that a file below tests/ defines, also those that are made by a call."""
    return frozenset(_defined((ROOT / "tests" / file).read_text()))


def _defined(text: str) -> Iterator[str]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("number", KNOWN)
def test_the_tests_that_are_named_exist(number: str) -> None:
    assert KNOWN[number].tests
    for test in KNOWN[number].tests:
        file, _, name = test.partition("::")
        assert name in defined_in(file), test


def test_what_is_defined_in_a_file() -> None:
    text = "def test_a(): ...\nasync def test_b(): ...\ntest_c = story(inner)\n# test_d\n'def test_e(): ...'\n"
    assert set(_defined(text)) == {"test_a", "test_b", "test_c"}


def test_every_fault_says_where_it_was_met() -> None:
    for known in KNOWN.values():
        assert known.words.endswith(".")
        assert all(ref.count("/") == ref.count("#") == 1 for ref in known.refs)
    assert not KNOWN.keys() & ELSEWHERE.keys()


def test_the_page_holds_the_table_as_it_is() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run `python tests/unit/test_known_faults.py`"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
