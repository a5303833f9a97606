"""The table of cases, the comparison, and the document that lists what stays different. No servers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.cases import CASES
from tests.conformance.compare import MISSING, Difference, differences, reduced, timing_class
from tests.conformance.explained import EXPLAINED, Explained, as_markdown, explanation

DOCUMENT = Path(__file__).parents[3] / "docs" / "emulator.md"
ID = "0123456789abcdef0123456789abcdef"
BODY = '{"id": "ID", "usage": {"prompt_tokens": 5}, "text": "a", "output_ids": [7, 8], "created": 3}'.replace("ID", ID)
STREAM = (
    'data: {"text": "a", "output_ids": [7], "meta_info": {"completion_tokens": 1, "finish_reason": null}}\n\n'
    'data: {"text": "ab", "output_ids": [7, 8], "meta_info": {"completion_tokens": 2, "finish_reason": null}}\n\n'
    'data: {"text": "c", "output_ids": [7, 8, 9], "meta_info": {"completion_tokens": 3, "finish_reason": "length"}}\n\n'
    "data: [DONE]\n\n"
)


def observation(body: str = BODY, **changes: Any) -> dict[str, Any]:
    reply = {"status": 200, "headers": {"content-type": "application/json"}, "body": body, "end": "whole"}
    return {"names": {"4711": "ROOM"}, "replies": {"decode": {**reply, "elapsed_s": 0.1, **changes}}, "facts": {}}


def paths(real: dict[str, Any], emulated: dict[str, Any], *loose: str, timed: bool = False) -> list[str]:
    left, right = (reduced(copy.deepcopy(each), loose, timed) for each in (real, emulated))
    return [difference.path for difference in differences(left, right)]


def test_there_are_enough_cases_with_names_of_their_own() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    faults = [case.fault for case in CASES]
    assert faults == sorted(faults), "faults come last"


def test_the_document_holds_exactly_the_explained_differences() -> None:
    text = DOCUMENT.read_text()
    assert text.endswith(as_markdown() + "\n")
    assert text.count("|---|---|---|") == 1


def test_every_explanation_names_a_case() -> None:
    for row in EXPLAINED:
        assert any(explanation(case.name, Difference(row.path, 1, 2)) for case in CASES), row


def test_an_explanation_is_of_its_case_and_path_only() -> None:
    rows = [Explained("one *", "decode.body.*", "because")]
    assert explanation("one case", Difference("decode.body.x", 1, 2), rows) is rows[0]
    assert explanation("other", Difference("decode.body.x", 1, 2), rows) is None
    assert explanation("one case", Difference("decode.status", 1, 2), rows) is None


def test_equal_observations_agree_whatever_the_model_said() -> None:
    other = BODY.replace(ID, "f" * 32).replace('"a"', '"b"').replace("[7, 8]", "[1, 2]").replace("3}", "4}")
    assert paths(observation(), observation(other)) == []


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        (observation(status=500), "decode.status"),
        (observation(end="cut"), "decode.end"),
        (observation(headers={"content-type": "text/plain"}), "decode.headers.content-type"),
        (observation(headers={"content-type": "application/json", "transfer-encoding": "chunked"}), "decode.form"),
        (observation(BODY.replace("5}", "6}")), "decode.body.usage.prompt_tokens"),
        (observation(BODY.replace("5}", "null}")), "decode.body.usage.prompt_tokens"),
        (observation(BODY.replace('"usage"', '"use"')), "decode.body.usage"),
        (observation(BODY.replace("[7, 8]", "[7]")), "decode.body.output_ids[1]"),
        (observation(BODY.replace("[7, 8]", '["7", "8"]')), "decode.body.output_ids[2]"),
        (observation(BODY.replace('"a"', "5")), "decode.body.text"),
    ],
)
def test_a_changed_field_is_found(changed: dict[str, Any], path: str) -> None:
    assert path in paths(observation(), changed)


def test_what_is_there_on_one_side_only_is_named() -> None:
    found = list(differences({"a": 1}, {}))
    assert found == [Difference("a", 1, MISSING)]


def test_true_is_no_number_and_a_float_is_no_int() -> None:
    assert paths(observation('{"x": true}'), observation('{"x": 1}')) == ["decode.body.x"]
    assert paths(observation('{"x": 1.0}'), observation('{"x": 1}')) == ["decode.body.x"]


def test_names_replace_rooms_in_texts_keys_and_values() -> None:
    body = '{"message": "room 4711 failed, not 47110", "rooms": {"4711": 4711}}'
    assert reduced(observation(body))["decode"]["body"] == {
        "message": "room ROOM failed, not 47110",
        "rooms": {"ROOM": "ROOM"},
    }


def stream(text: str = STREAM) -> dict[str, Any]:
    return observation(text, headers={"content-type": "text/event-stream; charset=utf-8"})


def test_streams_agree_however_their_tokens_are_cut() -> None:
    first, _, rest = STREAM.split("\n\n", 2)
    assert paths(stream(), stream(f"{first}\n\n{rest}")) == []


@pytest.mark.parametrize(
    "changed",
    [
        STREAM.removesuffix("data: [DONE]\n\n"),
        STREAM.replace('"completion_tokens": 3', '"completion_tokens": 4'),
        STREAM.replace('"finish_reason": "length"', '"finish_reason": "stop"'),
        STREAM.split("\n\n", 2)[2],
        STREAM.replace('{"completion_tokens": 1', '{"cached": 0, "completion_tokens": 1'),
    ],
)
def test_a_changed_event_is_found(changed: str) -> None:
    assert paths(stream(), stream(changed)) != []


def test_loose_paths_count_by_type_or_not_at_all() -> None:
    other = observation(BODY.replace("5}", "6}"))
    assert paths(observation(), other, "*.prompt_tokens") == []
    null = observation(BODY.replace("5}", "null}"))
    assert paths(observation(), null, "*.prompt_tokens") == ["decode.body.usage.prompt_tokens"]
    assert paths(observation(), null, "!*.prompt_tokens") == []


def test_times_are_compared_by_class_and_only_where_asked() -> None:
    late = observation(elapsed_s=9.0)
    assert paths(observation(), late) == []
    assert paths(observation(), late, timed=True) == ["decode.time"]
    assert paths(observation(), observation(elapsed_s=9.0, untimed=True), timed=True) == ["decode.time"]
    assert [timing_class(at) for at in (0.49, 0.51, 8.2, 11.3, 14.0, 30.0)] == [
        "at once",
        "poll or heartbeat",
        "bootstrap timeout",
        "waiting timeout",
        "look-up given up",
        "longer",
    ]


def test_facts_and_order_are_compared() -> None:
    real, emulated = observation(), observation()
    real |= {"facts": {"settled": True}, "order": ["prefill", "decode"]}
    emulated |= {"facts": {"settled": False}, "order": ["decode", "prefill"]}
    assert paths(real, emulated) == ["facts.settled", "order[0]", "order[1]"]
