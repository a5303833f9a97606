"""The forms of `/v1/loads`: which sections, and the Prometheus page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_SECTIONS = {
    "memory": "memory",
    "speculative": "spec",
    "lora": "lora",
    "disaggregation": "disagg",
    "queues": "queues",
}
"""What `include` calls each section."""
_PREFIXES = {"speculative": "spec", "disaggregation": "disagg"}


def included(load: Mapping[str, Any], include: str | None) -> dict[str, Any]:
    """`load` with the sections that `include` (comma-separated) asks for; ValueError for one that does not exist."""
    asked = {name.strip() for name in include.split(",")} if include else {"all"}
    if "all" in asked:
        return dict(load)
    unknown = asked - {*_SECTIONS.values(), "core"}
    if unknown:
        raise ValueError(f"Invalid include sections: {unknown}")
    return {name: value for name, value in load.items() if name not in _SECTIONS or _SECTIONS[name] in asked}


def as_prometheus(loads: Iterable[Mapping[str, Any]]) -> str:
    """The figures as gauges, one sample a DP rank."""
    samples: dict[str, list[str]] = {}
    for load in loads:
        for name, value in _flat(load):
            samples.setdefault(name, []).append(f'{name}{{dp_rank="{load["dp_rank"]}"}} {value}')
    lines = [line for name, values in samples.items() for line in (f"# TYPE {name} gauge", *values)]
    return "\n".join(lines) + "\n"


def _flat(load: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in load.items():
        if isinstance(value, Mapping):
            prefix = _PREFIXES.get(name, name)
            yield from (
                (f"sglang_{prefix}_{inner}", one) for inner, one in value.items() if isinstance(one, int | float)
            )
        elif name != "dp_rank" and isinstance(value, int | float):
            yield f"sglang_{name}", value
