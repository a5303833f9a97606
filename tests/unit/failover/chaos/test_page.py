"""The tables of `docs/chaos.md` are written from what they tell of: scenarios, their fields, faults, invariants.

`python tests/unit/failover/chaos/test_page.py` writes them anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from failover.chaos import scenario_file
from failover.chaos.faults import FAULTS
from failover.chaos.invariants import INVARIANTS
from failover.chaos.load import KINDS
from failover.chaos.scenario import STAGES, Expectations, FaultPlan, FleetPlan, LoadPlan, Scenario

ROOT = Path(__file__).parents[4]
PAGE, SHIPPED = ROOT / "docs" / "chaos.md", ROOT / "examples" / "chaos"
END = "<!-- end of what is written -->\n"


def scenarios() -> Iterator[str]:
    yield "| scenario | what happens | what a run that passes has shown |"
    yield "|---|---|---|"
    for file in sorted(SHIPPED.glob("*.toml")):
        each = scenario_file.parse(file.read_text(), file.stem, FAULTS)
        link = f"[{each.name}](../examples/chaos/{file.name})"
        yield f"| {link}{' (quick)' if each.quick else ''} | {each.about} | {each.proves} |"


def faults() -> Iterator[str]:
    yield "| fault | on | parameters | what it does |"
    yield "|---|---|---|---|"
    for name, kind in FAULTS.items():
        params = "<br>".join(f"`{param} = {_toml(value)}`" for param, value in kind.params.items())
        yield f"| `{name}` | {', '.join(sorted(kind.targets))} | {params} | {_doc(kind).splitlines()[0]} |"


def fields() -> Iterator[str]:
    tables = {"the file itself": Scenario, "[fleet]": FleetPlan, "[load]": LoadPlan}
    for name, kind in {**tables, "[[faults]]": FaultPlan, "[expect]": Expectations}.items():
        every = [each for each in dataclasses.fields(kind) if not dataclasses.is_dataclass(each.default_factory)]
        told = ", ".join(_field(each) for each in every if (kind, each.name) not in NOT_IN_A_FILE)
        yield f"**{f'`{name}`' if '[' in name else name}** {' '.join(_doc(kind).split())}"
        yield ""
        yield f"{told}"
        yield ""
    yield f"Kinds of request in a `mix`: {', '.join(f'`{name}`' for name in KINDS)}."
    yield ""
    sides = (f"`{stage}` (on a {side})" for stage, side in STAGES.items())
    yield f"Stages for `phase`: {', '.join(sides)}."


NOT_IN_A_FILE = {(Scenario, "name"), (Scenario, "faults")}


def invariants() -> Iterator[str]:
    yield "| invariant | what it says |"
    yield "|---|---|"
    yield from (f"| `{name}` | {_doc(rule)} |" for name, rule in INVARIANTS.items())


PARTS: Mapping[str, Callable[[], Iterator[str]]] = {
    "scenarios": scenarios,
    "fields": fields,
    "faults": faults,
    "invariants": invariants,
}


def _doc(what: Any) -> str:
    return inspect.getdoc(what) or ""


def _field(each: dataclasses.Field[Any]) -> str:
    default = each.default
    if default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING:
        default = each.default_factory()
    if default is dataclasses.MISSING:
        return f"`{each.name}`"
    return f"`{each.name}` (none)" if default is None else f"`{each.name} = {_toml(default)}`"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{name} = {_toml(each)}" for name, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def with_parts(page: str) -> str:
    """The page with every part as it is now; ValueError where one has no place in it."""
    for name, lines in PARTS.items():
        begin = f"<!-- {name}: written by `python tests/unit/failover/chaos/test_page.py` -->\n"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(END)
        if not (found and ended):
            raise ValueError(f"{PAGE} lacks the marks around {name}")
        page = before + begin + "\n" + "\n".join(lines()).rstrip() + "\n\n" + END + after
    return page


def test_the_page_tells_of_everything_as_it_is() -> None:
    page = PAGE.read_text()
    assert page == with_parts(page), "run `python tests/unit/failover/chaos/test_page.py`"


def test_every_scenario_fault_and_invariant_is_told() -> None:
    page = with_parts(PAGE.read_text())
    for name in [*FAULTS, *INVARIANTS]:
        assert page.count(f"\n| `{name}` |") == 1
    for file in SHIPPED.glob("*.toml"):
        assert page.count(f"](../examples/chaos/{file.name})") == 1


def test_the_fields_are_written_as_in_a_file() -> None:
    told = "\n".join(fields())
    for words in ("`duration_s = [10, 60]`", "`mix = { stream = 3, whole = 1 }`", "`fault`", "`for_s` (none)"):
        assert words in told
    assert "`settle_s = 15`" in told
    assert "`about`, `proves`, `quick = false`" in told
    assert "`token` (on a decode)" in told
    assert "`sampled`" in told


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="marks around scenarios"):
        with_parts("nothing")


if __name__ == "__main__":
    PAGE.write_text(with_parts(PAGE.read_text()))
