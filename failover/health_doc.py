"""Draws the health table into `docs/health.md`: `python -m failover.health_doc` writes it anew, a test compares."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from enum import Enum
from itertools import pairwise
from pathlib import Path

from engines.types import Health
from failover.machine import TRANSITIONS, HealthEvent

PAGE = Path(__file__).parents[1] / "docs" / "health.md"
BEGIN, END = (
    "<!-- drawn from failover/machine.py by `python -m failover.health_doc` -->\n",
    "<!-- end of what is drawn -->\n",
)
_FROM_ANYWHERE = 5
"""An event that leads from so many states to the same one is drawn once."""


def table() -> str:
    """Every (state, event) with the next state; a dot where nothing changes."""
    states = tuple(Health)
    lines = [_row(("event", *states)), _row(["---"] * (len(states) + 1))]
    for event in HealthEvent:
        after = [TRANSITIONS[before, event] for before in states]
        cells = ["·" if to is before else str(to) for before, to in zip(states, after, strict=True)]
        lines.append(_row((f"`{event.value}`", *cells)))
    return "\n".join(lines) + "\n"


def meanings() -> str:
    """What each state and each event means, one line each."""
    lines = [f"- **{name}**: {text}" for name, text in _texts(Health).items()]
    lines += ["", *(f"- `{name}`: {text}" for name, text in _texts(HealthEvent).items())]
    return "\n".join(lines) + "\n"


def diagram() -> str:
    """The changes of the table as a Mermaid state diagram."""
    edges: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for event in HealthEvent:
        moves = [(before, TRANSITIONS[before, event]) for before in Health if TRANSITIONS[before, event] is not before]
        targets = {after for _, after in moves}
        if len(moves) >= _FROM_ANYWHERE and len(targets) == 1:
            edges["anywhere", str(targets.pop())].append(event.value)
            continue
        for before, after in moves:
            edges[str(before), str(after)].append(event.value)
    lines = [f"    {before} --> {after}: {', '.join(labels)}" for (before, after), labels in edges.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> unknown", *lines, "```"]) + "\n"


def drawn() -> str:
    """All that is drawn."""
    return f"{meanings()}\n{table()}\n{diagram()}"


def with_drawing(page: str) -> str:
    """The page, with what is between the marks drawn anew. Raises ValueError where it has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no marks to draw between")
    return f"{before}{BEGIN}\n{drawn()}\n{END}{after}"


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _texts(enum: type[Enum]) -> dict[str, str]:
    """What the members of an enum mean: the string that follows each of them in its source."""
    body = ast.parse(inspect.getsource(enum)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for member, after in pairwise(body.body):
        match member, after:
            case (
                ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name.lower()] = " ".join(text.split())
    return texts


if __name__ == "__main__":
    PAGE.write_text(with_drawing(PAGE.read_text()))
