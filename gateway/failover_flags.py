"""The knobs of what happens to a stream that breaks: which ways on the operator allows."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from failover.recovery import DEFAULT_MODES, Mode

_MODES = (Mode.RESUME, Mode.REPLAY, Mode.RESUME_TEXT, Mode.ERROR)


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    """How a broken stream may go on.

    `on_failure`: what clients may ask for, and what is tried, in this order, where they ask for nothing. `exact_chat`:
    streamed chats are asked for with token ids, where that changes nothing else. `deterministic`: the operator says
    that engines repeat greedy and seeded answers token by token.
    """

    on_failure: tuple[Mode, ...] = DEFAULT_MODES
    exact_chat: bool = True
    deterministic: bool = False


DEFAULT_FAILOVER = FailoverConfig()


def add_arguments(group: Any) -> None:
    """Declare the flags on an argument group."""
    group.add_argument(
        "--on-failure",
        type=_modes,
        default=DEFAULT_FAILOVER.on_failure,
        metavar="MODES",
        help="how a stream may go on whose server failed, the best first: resume, replay, resume_text, error "
        "(default resume,replay); clients choose among them by the header x-pdgate-on-failure",
    )
    group.add_argument(
        "--no-exact-chat",
        action="store_true",
        help="ask engines for streamed chats as clients do, which cannot be resumed then",
    )
    group.add_argument(
        "--deterministic-engines",
        action="store_true",
        help="engines repeat greedy and seeded answers token by token, also those that do not say so: allows replay",
    )


def from_args(args: argparse.Namespace) -> FailoverConfig:
    """The configuration that parsed arguments ask for."""
    return FailoverConfig(args.on_failure, not args.no_exact_chat, args.deterministic_engines)


def _modes(text: str) -> tuple[Mode, ...]:
    names = [name.strip().lower() for name in text.split(",")]
    if unknown := [name for name in names if name not in _MODES]:
        known = ", ".join(_MODES)
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is no way on; give one or more of {known}, separated by commas"
        )
    return tuple(dict.fromkeys(map(Mode, names)))
