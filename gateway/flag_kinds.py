"""How single flags are declared, and how the values of the usual kinds are read. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any


def add(
    group: Any, flag: str, kind: Callable[[str], Any], default: object, text: str, choices: Sequence[str] | None = None
) -> None:
    """Declare one flag; its default is told at the end of its help."""
    shown = "" if default is None else " (default %(default)s)"
    group.add_argument(flag, type=kind, default=default, choices=choices, help=text + shown)


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Whole numbers from `low` to `high`."""

    def read(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{value} must be at least {low}" + (f", at most {high}" if high else ""))
        return value

    read.__name__ = "whole number"  # argparse names it in its own error
    return read


def seconds(text: str) -> float:
    value = seconds_or_0(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return value


def seconds_or_0(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds")
    return value


def ratio(text: str) -> float:
    """A number of at least 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number of at least 0")
    return value
