"""The flags that name a real fleet: `--fleet FILE`, or `--url URL` and `--allow HOST:PORT`."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import replace
from pathlib import Path

from failover.chaos import fleet_file
from failover.chaos.real_fleet import RealFleet
from failover.chaos.record import Record
from failover.chaos.scenario import ScenarioError


class FleetError(Exception):
    """A fleet that cannot be used as it was named; the words say what is wrong, and how to mend it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument("--fleet", type=Path, metavar="FILE", help="on the real fleet of this TOML file")
    parser.add_argument(
        "--url", action="append", default=[], metavar="URL", help="on the real gateway at URL; again for several"
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="HOST:PORT", help="may be connected to, beside this machine"
    )
    parser.add_argument("--model", default="", metavar="NAME", help="what to ask for (default: what a gateway names)")


def read(args: argparse.Namespace) -> RealFleet | None:
    """The fleet that is named; None: one of its own is started. FleetError where it cannot be used."""
    if args.fleet is not None and args.url:
        raise FleetError("--fleet and --url: name the fleet by one of them")
    try:
        if args.url:
            return replace(fleet_file.of_urls(args.url, args.allow), model=args.model)
        if args.fleet is None:
            if args.allow or args.model:
                raise FleetError("--allow and --model: name a fleet too, by --url or --fleet")
            return None
        fleet = fleet_file.parse(args.fleet.read_text(encoding="utf-8"), args.fleet.stem, args.allow)
    except OSError as error:
        raise FleetError(f"{args.fleet}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FleetError(f"{args.fleet}: this is not text: {error}") from error
    except ScenarioError as error:
        raise FleetError(f"{args.fleet}: {error}" if args.fleet is not None else str(error)) from error
    if fleet.api_key_env and not os.environ.get(fleet.api_key_env) and not args.dry_run:
        raise FleetError(f"{args.fleet}: api_key_env: the environment variable {fleet.api_key_env} is not set")
    return replace(fleet, model=args.model or fleet.model)


def given(args: argparse.Namespace) -> str:
    """The same flags for a command line, with a space before each."""
    words = ["--fleet", str(args.fleet)] if args.fleet is not None else []
    words += [word for url in args.url for word in ("--url", url)]
    words += [word for at in args.allow for word in ("--allow", at)]
    words += ["--model", args.model] if args.model else []
    return "".join(f" {shlex.quote(word)}" for word in words)


def check_same(record: Record, fleet: RealFleet | None) -> None:
    """FleetError where a record's run cannot be done again on this fleet."""
    if record.fleet is None and fleet is not None:
        raise FleetError("the record is of a fleet that was started for it: leave out --fleet and --url")
    if record.fleet is not None and fleet is None:
        raise FleetError(f"the record is of the real fleet {record.fleet.name}: name it by --fleet or --url")
    if record.fleet is not None and fleet is not None:
        one, other = (replace(each, allow=(), name="", ready_s=1.0) for each in (record.fleet, fleet))
        if one != other:
            raise FleetError(f"this is not the fleet of the record, {record.fleet.name}: it was {one}, now {other}")
