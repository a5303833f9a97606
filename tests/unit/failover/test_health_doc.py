"""The page on health holds the table as it is."""

import pytest

from engines.types import Health
from failover.health_doc import BEGIN, END, PAGE, diagram, drawn, table, with_drawing
from failover.machine import TRANSITIONS, HealthEvent


def test_the_page_is_drawn_from_the_table_as_it_is() -> None:
    page = PAGE.read_text()
    assert page == with_drawing(page), "run `python -m failover.health_doc`"


def test_every_cell_of_the_table_is_drawn() -> None:
    rows = [line.strip("| ").split(" | ") for line in table().splitlines()]
    assert rows[0] == ["event", *Health]
    assert [row[0] for row in rows[2:]] == [f"`{event.value}`" for event in HealthEvent]
    for event, row in zip(HealthEvent, rows[2:], strict=True):
        for before, cell in zip(Health, row[1:], strict=True):
            after = TRANSITIONS[before, event]
            assert cell == ("·" if after is before else after)


def test_every_state_and_event_has_its_meaning() -> None:
    text = drawn()
    assert all(f"- **{health}**: " in text for health in Health)
    assert all(f"- `{event.value}`: " in text for event in HealthEvent)


def test_every_change_is_an_edge_of_the_diagram() -> None:
    edges = {}
    for line in diagram().splitlines():
        if "-->" in line and ":" in line:
            ends, events = line.strip().split(": ")
            before, after = ends.split(" --> ")
            edges.update({(before, event): after for event in events.split(", ")})
    for (before, event), after in TRANSITIONS.items():
        drawn_to = edges.get((str(before), event.value)) or edges.get(("anywhere", event.value))
        if after is not before:
            assert drawn_to == after
        else:
            assert (str(before), event.value) not in edges


def test_what_is_around_the_drawing_stays() -> None:
    page = with_drawing(f"before\n{BEGIN}was here\n{END}after\n")
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "was here" not in page
    assert with_drawing(page) == page
    with pytest.raises(ValueError, match="marks"):
        with_drawing("no marks here")
