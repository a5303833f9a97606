"""Frozen dataclasses as plain JSON values, and back with every value checked against its type. Pure.

Bytes are hexadecimal; a float that JSON lacks is `{"float": "inf"}`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Read = Callable[[Any], Any]
_SHOWN_CHARS = 60
_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number", bool: "a boolean"}


class FormError(ValueError):
    """A value that is not of its type; `place` is its path, as in `requests[3].events[0].at_s`."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}" if place else problem)
        self.place, self.problem = place, problem

    def within(self, outer: str) -> FormError:
        """The same problem, seen from a field or an item further out."""
        joint = "." if self.place and not self.place.startswith("[") else ""
        return FormError(f"{outer}{joint}{self.place}", self.problem)


def plain(value: Any) -> Any:
    """`value` as what JSON has; of types that `typed` reads."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def typed(kind: type[T], value: Any) -> T:
    """The inverse of `plain`; FormError names the first place that is not as `kind` has it."""
    wanted: Any = kind
    read: T = _reader(wanted)(value)
    return read


@cache
def _reader(kind: Any) -> _Read:
    """What reads a value of this type; looked up once for each type, as a history has millions of values."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return lambda value: _fields(kind, value)
    if origin in (Union, types.UnionType):
        return lambda value: _one_of(inner, value)
    if origin is tuple:
        return lambda value: _items(inner, value)
    if get_origin(kind) is Mapping:
        return lambda value: {name: _at(f"[{name!r}]", inner[1], each) for name, each in _be(dict, value).items()}
    if issubclass(kind, StrEnum):
        return lambda value: _enum(kind, value)
    return {bytes: _bytes, float: _float}.get(kind, lambda value: _be(kind, value))


def _at(place: str, kind: Any, value: Any) -> Any:
    try:
        return _reader(kind)(value)
    except FormError as error:
        raise error.within(place) from None


@cache
def _form(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The types of a dataclass's fields, and which of them must be there."""
    needed = (each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING)
    return get_type_hints(kind), frozenset(needed)


def _fields(kind: Any, value: Any) -> Any:
    hints, needed = _form(kind)
    value = _be(dict, value)
    if missing := sorted(needed - value.keys()):
        raise FormError(missing[0], "is missing")
    if unknown := sorted(value.keys() - hints.keys()):
        raise FormError(unknown[0], f"{kind.__name__} has no such field")
    return kind(**{name: _at(name, hints[name], each) for name, each in value.items()})


def _items(inner: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    items = _be(list, value)
    kinds = (inner[0],) * len(items) if inner[-1] is Ellipsis else inner
    if len(kinds) != len(items):
        raise FormError("", f"{len(items)} items instead of {len(kinds)}")
    return tuple(_at(f"[{at}]", kind, each) for at, (kind, each) in enumerate(zip(kinds, items, strict=True)))


def _one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    """A value of a union: None, one of exactly its type, or what its only type for other values makes of it."""
    if type(value) in kinds:
        return value
    if isinstance(value, dict) and float in kinds:
        return _float(value)
    others = [kind for kind in kinds if kind is not types.NoneType]
    if len(others) > 1:
        raise FormError("", f"{value!r} is none of {', '.join(kind.__name__ for kind in kinds)}")
    return _reader(others[0])(value)


def _be(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise FormError("", f"{_shown(value)} instead of {_NAMES[kind]}")
    return value


def _bytes(value: Any) -> bytes:
    try:
        return bytes.fromhex(_be(str, value))
    except ValueError as error:
        raise FormError("", f"{_shown(value)} instead of hexadecimal digits") from error


def _float(value: Any) -> float:
    if isinstance(value, dict) and value.get("float") in ("inf", "-inf", "nan"):
        return float(value["float"])
    return float(value) if type(value) is int else _be(float, value)


def _enum(kind: type[StrEnum], value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError as error:
        raise FormError("", f"{_shown(value)} is none of {', '.join(kind)}") from error


def _shown(value: Any) -> str:
    return text if len(text := repr(value)) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
