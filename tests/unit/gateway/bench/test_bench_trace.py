"""Reading traces, and saying what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.bench.trace import TraceError, TraceRequest, read_trace

DATA = Path(__file__).parents[3] / "data"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def lines_of(name: str) -> list[str]:
    return (DATA / name).read_text().splitlines()


def test_mooncake() -> None:
    assert read_trace(lines_of("replay_mooncake.jsonl"), "t") == [
        TraceRequest(0.0, 1100, 3, (7, 8, 9)),
        TraceRequest(0.02, 1024, 2, (7, 8)),
        TraceRequest(0.04, 600, 1, (7, 10)),
        TraceRequest(0.05, 512, 4, (11,)),
    ]


def test_azure_in_order_of_time() -> None:
    assert read_trace(lines_of("replay_azure.csv"), "t") == [
        TraceRequest(0.0, 374, 44),
        TraceRequest(0.01, 374, 5),
        TraceRequest(0.02, 96, 10),
    ]


def test_columns_in_any_order_and_a_time_zone() -> None:
    lines = ["GeneratedTokens,TIMESTAMP,ContextTokens", "5,2024-05-10 00:00:00.009930+00:00,374"]
    assert read_trace(lines, "t") == [TraceRequest(0.0, 374, 5)]


def test_limit_reads_no_further() -> None:
    assert len(read_trace([*lines_of("replay_mooncake.jsonl")[:2], "broken"], "t", limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "t:2: not JSON"),
        ("[1]", "t:2: expected a Mooncake JSON line"),
        ('{"timestamp": 0}', "t:2: input_length: expected an integer of at least 1, got nothing"),
        ('{"timestamp": 0, "input_length": 0}', "t:2: input_length: expected an integer of at least 1, got 0"),
        ('{"timestamp": 0, "input_length": true}', "t:2: input_length: expected an integer"),
        ('{"timestamp": -1, "input_length": 9}', "t:2: timestamp: expected an integer of at least 0, got -1"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1.5}', "t:2: output_length: .* got 1.5"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1}', "t:2: hash_ids: expected a list of integers"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "t:2: hash_ids: expected 2 ids, one per 512 of input_length 513, got 1",
        ),
    ],
)
def test_bad_mooncake_line(line: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace([lines_of("replay_mooncake.jsonl")[0], line], "t")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "t: the trace is empty"),
        (["", " "], "t: the trace is empty"),
        (["a,b,c"], "t:1: expected a Mooncake JSON line"),
        ([HEADER], "t: the trace has a header and no request"),
        (["TIMESTAMP,ContextTokens", "x,1"], "t:1: GeneratedTokens: no such column among TIMESTAMP, ContextTokens"),
        ([HEADER, "yesterday,1,1"], "t:2: TIMESTAMP: expected a time like .*, got 'yesterday'"),
        ([HEADER, "2023-11-16 18:15:46,many,1"], "t:2: ContextTokens: expected an integer .* got 'many'"),
        ([HEADER, "2023-11-16 18:15:46,1,0"], "t:2: GeneratedTokens: expected an integer of at least 1, got '0'"),
        ([HEADER, "2023-11-16 18:15:46,1"], "t:2: expected 3 values, got 2"),
    ],
)
def test_bad_csv(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(lines, "t")
