"""A record comes back from its file as it was, and a file that is none is told with what is wrong and where."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failover.chaos.history import Error, Event, Request, Usage
from failover.chaos.invariants import judge
from failover.chaos.plain import FormError, plain, typed
from failover.chaos.record import Instance, Planned, Record, Sample
from failover.chaos.record_file import RecordFileError, read, write
from failover.chaos.scenario import FaultPlan, FleetPlan, LoadPlan, Scenario, Value
from tests.unit.failover.chaos.histories import PATIENT
from tests.unit.failover.chaos.records import BROKEN, REFUSED, RESUMED, WHOLE, history, record

VALUES = st.text(max_size=5) | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.booleans()
COUNTS = st.integers(0, 2**62)
FLOATS = st.floats(allow_nan=False)
PARAMS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
FORMS = st.tuples(FLOATS, FLOATS)
PLANNED = st.builds(Planned, st.integers(0, 99), for_s=st.none() | FLOATS, at_s=FLOATS, params=PARAMS)
EVENTS = st.builds(
    Event,
    at_s=FLOATS,
    ids=st.lists(st.integers(0, 9)).map(tuple),
    matched=st.none() | st.text(max_size=3) | st.integers(0, 9),
    usage=st.none() | st.builds(Usage, COUNTS, COUNTS, COUNTS, st.none() | COUNTS),
    error=st.none() | st.builds(Error, definite=st.none() | st.booleans()),
)
FAULT_PLANS = st.builds(
    FaultPlan, for_s=st.none() | FORMS, at_s=FLOATS, jitter_s=FLOATS, every_s=st.none() | FLOATS, params=PARAMS
)
SCENARIOS = st.builds(
    Scenario,
    fleet=st.builds(
        FleetPlan,
        prefills=COUNTS,
        decodes=COUNTS,
        gateways=COUNTS,
        links=st.lists(st.text(max_size=4), max_size=2).map(tuple),
    ),
    load=st.builds(LoadPlan, duration_s=FORMS, mix=st.dictionaries(st.text(max_size=3), FLOATS, max_size=2)),
    faults=st.lists(FAULT_PLANS, max_size=2).map(tuple),
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    requests = draw(st.lists(st.sampled_from([WHOLE, RESUMED, BROKEN, REFUSED]), max_size=3, unique_by=id))
    events = tuple(draw(st.lists(EVENTS, max_size=3)))
    return record(
        scenario=draw(SCENARIOS),
        planned=tuple(draw(st.lists(PLANNED, max_size=2))),
        instances=tuple(draw(st.lists(st.builds(Instance), max_size=2))),
        samples=tuple(draw(st.lists(st.builds(Sample, FLOATS, st.text(), COUNTS, COUNTS, COUNTS), max_size=2))),
        history=history(*(replace(each, events=(*each.events, *events)) for each in requests)),
        settled_s=draw(st.none() | FLOATS),
        unseen=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)),
        stopped=draw(st.booleans()),
    )


@PATIENT
@given(records(), st.sampled_from(["r.json", "r.json.gz"]))
def test_a_record_comes_back(folder: Path, made: Record, name: str) -> None:
    write(made, folder / name)
    assert read(folder / name) == made
    assert exactly(read(folder / name)) == exactly(made)


def exactly(value: Any) -> str:
    """Also the types: 1 equals 1.0 and True."""
    return repr(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_lacks_come_back(tmp_path: Path, value: float) -> None:
    made = record(settled_s=value, load_s=value, planned=(Planned(0, "kill", "redis", 1.0, None, "", {"x": value}),))
    write(made, tmp_path / "r.json")
    assert exactly(read(tmp_path / "r.json")) == exactly(made)


def test_its_judgement_comes_back_too(tmp_path: Path) -> None:
    for made in (record(), record(WHOLE, BROKEN, settled_s=None, unseen={"deaths": "dark"})):
        write(made, tmp_path / "r.json.gz")
        assert judge(read(tmp_path / "r.json.gz")) == judge(made)


def test_a_name_that_ends_in_gz_is_compressed_and_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz", "c.json"):
        write(record(), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) + b"\n" == (tmp_path / "c.json").read_bytes()


def test_every_type_of_a_record_can_be_read() -> None:
    """Each is one of those that the reader knows; a new kind of type is not read as something else in silence."""
    seen: set[Any] = set()

    def walk(kind: Any) -> None:
        if kind in seen or kind is Ellipsis:
            return
        seen.add(kind)
        parts = get_args(kind) or (
            tuple(get_type_hints(kind).values()) if hasattr(kind, "__dataclass_fields__") else ()
        )
        for part in parts:
            walk(part)
        if not parts:
            assert kind in (str, int, float, bool, bytes, type(None)) or issubclass(kind, str), kind

    walk(Record)
    assert Request in seen
    assert Value in seen


# -- what is no record ------------------------------------------------------------------------------------------------


def changed(path: str, value: Any) -> dict[str, Any]:
    """A record's JSON with something else at a place; None takes it out."""
    whole: dict[str, Any] = {"form": 1, **plain(record())}
    *way, last = path.split("/")
    inner: Any = whole
    for step in way:
        inner = inner[int(step) if step.isdigit() else step]
    if value is None:
        del inner[last]
    else:
        inner[int(last) if last.isdigit() else last] = value
    return json.loads(json.dumps(whole))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("form", None, "no record of `pdgate chaos run --out`"),
        ("form", 2, "a record of form 2; this program reads form 1"),
        ("seed", None, "seed: is missing"),
        ("seed", True, "seed: True instead of a whole number"),
        ("seed", "3", "seed: '3' instead of a whole number"),
        ("colour", "red", "colour: Record has no such field"),
        ("long", 0, "long: 0 instead of a boolean"),
        ("load_s", "1", "load_s: '1' instead of a number"),
        ("load_s", True, "load_s: True instead of a number"),
        ("load_s", {"float": "1"}, "load_s: {'float': '1'} instead of a number"),
        ("settled_s", [], "settled_s: [] instead of a number"),
        ("unseen", {"a": 1}, "unseen['a']: 1 instead of a text"),
        ("scenario/load/duration_s", [1.0], "scenario.load.duration_s: 1 items instead of 2"),
        ("scenario/load/mix", [], "scenario.load.mix: [] instead of an object"),
        ("planned/0/params", {"a": []}, "planned[0].params['a']: [] is none of str, int, float, bool"),
        ("planned", {}, "planned: {} instead of a list"),
        ("history/requests/1/ending", "odd", "history.requests[1].ending: 'odd' is none of whole, cut, left"),
        (
            "history/requests/0/choices/0/attempts/0/prefill_key",
            "zz",
            "prefill_key: 'zz' instead of hexadecimal digits",
        ),
        ("history/requests/0/events/2/usage", {"prompt_tokens": 1}, "events[2].usage.completion_tokens: is missing"),
        ("history/requests/0/events/2/text", 5, "history.requests[0].events[2].text: 5 instead of a text"),
        ("version", 5, "version: 5 instead of a text"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, path: str, value: Any, said: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(RecordFileError) as told:
        read(file)
    assert str(told.value).startswith(f"{file}: ")
    assert str(told.value).endswith(said)


def whole() -> bytes:
    return json.dumps({"form": 1, **plain(record())}).encode()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.json", whole()[:500], "it is cut off, or no JSON"),
        ("r.json", b"", "it is cut off, or no JSON"),
        ("r.json", b"[1]", "no record of"),
        ("r.json", gzip.compress(whole(), mtime=0), "it is cut off, or no JSON"),
        ("r.json.gz", whole(), "Not a gzipped file"),
        ("r.json.gz", gzip.compress(whole(), mtime=0)[:300], "it is cut off, or not compressed"),
        ("r.json.gz", gzip.compress(whole(), mtime=0)[:10] + b"\xff" * 50, "it is cut off, or not compressed"),
    ],
)
def test_a_broken_file_is_told(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordFileError, match=said):
        read(tmp_path / name)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecordFileError, match="No such file"):
        read(tmp_path / "r.json")


def test_long_values_are_shown_by_their_beginning() -> None:
    with pytest.raises(FormError) as told:
        typed(Instance, {"name": "a", "role": "b", "url": ["x" * 500]})
    assert len(str(told.value)) < 120


@PATIENT
@given(st.recursive(st.none() | VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner)))
def test_nothing_but_a_form_error_comes_of_any_value(value: Any) -> None:
    with pytest.raises(FormError):
        typed(Record, value)


def test_defaults_may_be_left_out() -> None:
    less: Mapping[str, Any] = {
        name: each for name, each in plain(record()).items() if name not in ("unseen", "stopped")
    }
    assert typed(Record, less) == record()
