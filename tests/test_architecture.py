"""The rules between the parts, read from the source: who may import whom, what is pure, sizes, knobs that are read.

Each rule is a function over one source file that returns what is wrong with it; each is also run on a bad sample.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from gateway.config import Config

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "engines", "routing", "failover")
LEAVES = ("engines.types", "engines.kv_types", "engines.timing", "engines.token_rule")


PURE_FILES = (
    "engines/types.py",
    "engines/kv_types.py",
    "engines/timing.py",
    "engines/token_rule.py",
    "engines/sglang_versions.py",
    "engines/sglang_wire.py",
    "engines/sglang_merge.py",
    "engines/sglang_facts.py",
    "engines/sse_frames.py",
    "engines/client_stream.py",
    "engines/capture.py",
    "engines/completion_chunk.py",
    "engines/completion_stream.py",
    "engines/exact_chat.py",
    "engines/exact_chat_rules.py",
    "engines/generate_stream.py",
    "engines/plain_stream.py",
    "engines/seam.py",
    "engines/seam_counts.py",
    "engines/seam_text.py",
    "engines/kv_events.py",
    "engines/kv_event_source.py",
    "engines/emulator/contract.py",
    "engines/emulator/core.py",
    "engines/emulator/draw.py",
    "engines/emulator/kv_pool.py",
    "engines/emulator/load_format.py",
    "engines/emulator/kv_event_log.py",
    "engines/emulator/output.py",
    "engines/emulator/radix.py",
    "engines/emulator/tokens.py",
    "engines/emulator/wire.py",
    "failover/phase.py",
    "failover/pair_health.py",
    "failover/canary.py",
    "failover/retry.py",
    "failover/machine.py",
    "failover/blame.py",
    "failover/trust.py",
    "failover/wedge.py",
    "failover/poison.py",
    "failover/suspects.py",
    "failover/journal.py",
    "failover/reaper.py",
    "failover/features.py",
    "failover/recovery.py",
    "failover/replay.py",
    "failover/resume_text.py",
    "failover/deadlines.py",
    "failover/budget.py",
    "failover/chaos/history.py",
    "failover/chaos/segments.py",
    "failover/chaos/checker.py",
    "failover/chaos/scenario.py",
    "failover/chaos/scenario_file.py",
    "failover/chaos/schedule.py",
    "failover/chaos/load.py",
    "failover/chaos/record.py",
    "failover/chaos/report_html.py",
    "failover/chaos/verdict.py",
    "failover/chaos/plain.py",
    "failover/chaos/evidence.py",
    "failover/chaos/explained.py",
    "failover/chaos/orphans.py",
    "failover/chaos/holdings.py",
    "failover/chaos/invariants.py",
    "failover/chaos/report_text.py",
    "failover/chaos/junit.py",
    "failover/chaos/real_fleet.py",
    "failover/chaos/fleet_file.py",
    "failover/chaos/real_plan.py",
    "failover/chaos/real_reading.py",
    "failover/chaos/client_checks.py",
    "failover/chaos/dry_run.py",
    "gateway/chat_template.py",
    "gateway/openai_api.py",
    "gateway/trials.py",
    "gateway/merge.py",
    "gateway/engine_errors.py",
    "gateway/sse.py",
    "gateway/errors.py",
    "gateway/config.py",
    "gateway/limit_flags.py",
    "gateway/flag_kinds.py",
    "gateway/refused_flags.py",
    "gateway/redis_flags.py",
)
PURE_PACKAGE = "routing/"
IMPURE_IN_PURE_PACKAGE = (
    "routing/ownership_redis.py",
    "routing/ownership_follower.py",
    "routing/shared_bookings.py",
    "routing/redis_link.py",
    "routing/redis_server.py",
    "routing/standstill.py",
    "routing/redis_topology.py",
    "routing/embedded_redis.py",
)
IMPURE_MODULES = ("asyncio", "time", "logging", "socket", "aiohttp", "redis")

EMULATOR_ALLOWED = ("engines/emulator/", "gateway/demo_fleets.py", "gateway/bench/", "failover/chaos/")
CHAOS = "failover/chaos/"
"""Drives gateways and engines from outside: may import engines; nothing that it drives may import its shells."""
CHAOS_FOR_ALL = ("failover.chaos.checker", "failover.chaos.history", "failover.chaos.segments")

FILE_LINES, FILE_LINES_HARD, FUNCTION_LINES = 400, 600, 80
REVIEWED_LONG_FILES: tuple[str, ...] = ()
"""Files above FILE_LINES that were looked at again and are better whole."""


@dataclass(frozen=True)
class Source:
    """One file of our packages; `path` is relative to the repository, with slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def sources() -> list[Source]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text()) for file in files]


def imported(source: Source) -> Iterator[str]:
    """Every dotted name that the file imports: of `from a import b` it is a.b, whether b is a module or not."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            start = ".".join(part for part in (base, node.module) if part)
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


# -- the rules ------------------------------------------------------------------------------------------------------


def arrows(source: Source) -> list[str]:
    """The leaves import nothing of ours; engines only engines; routing and failover themselves and the leaves."""
    package = source.path.split("/")[0]
    ours = [name for name in imported(source) if name.split(".")[0] in PACKAGES]
    if source.module in LEAVES:
        return [f"a leaf imports {name}" for name in ours]
    if not source.path.startswith(CHAOS):
        shells = [name for name in ours if within(name, "failover.chaos")]
        inside = [name for name in shells if not any(within(name, module) for module in CHAOS_FOR_ALL)]
        if inside:
            return [f"what chaos drives imports {name}" for name in inside]
    if package == "gateway":
        return []
    leaves = () if package == "engines" else ("engines",) if source.path.startswith(CHAOS) else LEAVES
    allowed = (package, *leaves)
    return [f"{package} imports {name}" for name in ours if not any(within(name, module) for module in allowed)]


def purity(source: Source) -> list[str]:
    """No clock, no I/O, no logging, no unseeded chance in the files that are listed as pure."""
    listed = source.path in PURE_FILES
    in_package = source.path.startswith(PURE_PACKAGE) and source.path not in IMPURE_IN_PURE_PACKAGE
    if not listed and not in_package:
        return []
    found = [
        f"a pure file imports {name}"
        for name in imported(source)
        if name.split(".")[0] in IMPURE_MODULES or (within(name, "random") and name not in ("random", "random.Random"))
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("random."):
            seeded = ast.unparse(node.func) == "random.Random" and (node.args or node.keywords)
            found += [] if seeded else [f"a pure file calls {ast.unparse(node.func)}() at line {node.lineno}"]
    return found


def no_emulator(source: Source) -> list[str]:
    """What serves real fleets knows nothing of the emulator: neither its code nor its own endpoints."""
    if source.path.startswith(EMULATOR_ALLOWED):
        return []
    found = [f"imports {name}" for name in imported(source) if within(name, "engines.emulator")]
    return found + (["names /emulator/"] if "/emulator/" in source.text else [])


def sizes(source: Source) -> list[str]:
    """Files and functions that can be read in one go."""
    lines = source.text.count("\n")
    limit = FILE_LINES_HARD if source.path in REVIEWED_LONG_FILES else FILE_LINES
    found = [f"{lines} lines; at most {limit}"] if lines > limit else []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            found += [f"{node.name} has {length} lines; at most {FUNCTION_LINES}"] if length > FUNCTION_LINES else []
    return found


def docstrings(source: Source) -> list[str]:
    """Every file that holds anything says what it owns."""
    return ["no module docstring"] if source.text.strip() and not ast.get_docstring(source.tree) else []


Rule = Callable[[Source], list[str]]
RULES: tuple[Rule, ...] = (arrows, purity, no_emulator, sizes, docstrings)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_follows(rule: Rule) -> None:
    wrong = [f"{source.path}: {what}" for source in sources() for what in rule(source)]
    assert not wrong, "\n".join(wrong)


DOC = '"""Doc."""\n'
BAD_SAMPLES: tuple[tuple[Rule, str, str, str], ...] = (
    (arrows, "engines/types.py", "from engines.errors import UpstreamError", "a leaf imports engines.errors"),
    (arrows, "engines/token_rule.py", "import engines.types", "a leaf imports engines.types"),
    (arrows, "engines/pair.py", "from routing import types", "engines imports routing.types"),
    (arrows, "engines/pair.py", "from failover.phase import Phase", "engines imports failover.phase"),
    (arrows, "engines/emulator/core.py", "import gateway.config", "engines imports gateway.config"),
    (arrows, "routing/cost.py", "from engines.fleet import Fleet", "routing imports engines.fleet"),
    (arrows, "routing/cost.py", "from engines import fleet", "routing imports engines.fleet"),
    (arrows, "routing/cost.py", "def f():\n    from failover import phase", "routing imports failover.phase"),
    (arrows, "routing/cost.py", "import importlib\nimportlib.import_module('gateway.app')", "imports gateway.app"),
    (arrows, "failover/phase.py", "from routing.types import Choice", "failover imports routing.types"),
    (arrows, "failover/chaos/driver.py", "from gateway.app import run", "failover imports gateway.app"),
    (
        arrows,
        "gateway/app.py",
        "from failover.chaos.runner import run",
        "what chaos drives imports failover.chaos.runner",
    ),
    (arrows, "failover/retry.py", "from failover.chaos import proxy", "what chaos drives imports failover.chaos.proxy"),
    (arrows, "routing/policies/cost.py", "from ... import failover\nfrom ...failover import x", "imports failover"),
    (purity, "routing/cost.py", "import asyncio", "imports asyncio"),
    (purity, "routing/policies/random.py", "from time import monotonic", "imports time.monotonic"),
    (purity, "gateway/merge.py", "def f():\n    import logging", "imports logging"),
    (purity, "gateway/sse.py", "import aiohttp.web", "imports aiohttp.web"),
    (purity, "routing/pairing.py", "import random\nx = random.choice([1])", "calls random.choice()"),
    (purity, "routing/pairing.py", "import random\nx = random.Random()", "calls random.Random()"),
    (purity, "routing/pairing.py", "from random import choice", "imports random.choice"),
    (no_emulator, "gateway/app.py", 'URL = "/emulator/faults"', "names /emulator/"),
    (no_emulator, "engines/fleet.py", "from engines.emulator import core", "imports engines.emulator.core"),
    (sizes, "gateway/app.py", "\n" * 401, "401 lines"),
    (sizes, "gateway/app.py", "async def f():\n" + "    x = 1\n" * 80, "f has 81 lines"),
    (docstrings, "gateway/app.py", "x = 1", "no module docstring"),
)


@pytest.mark.parametrize(("rule", "path", "text", "said"), BAD_SAMPLES)
def test_a_bad_sample_is_found(rule: Rule, path: str, text: str, said: str) -> None:
    assert said in "\n".join(rule(Source(path, text)))


GOOD_SAMPLES: tuple[tuple[Rule, str, str], ...] = (
    (
        arrows,
        "routing/cost.py",
        "from engines.types import EngineId\nfrom engines import token_rule\nimport routing.types",
    ),
    (arrows, "engines/pair.py", "from engines.types import Leg\nfrom . import base\nfrom .base import Engine"),
    (arrows, "gateway/app.py", "import engines.pair, routing.cost, failover.phase"),
    (
        purity,
        "routing/pairing.py",
        "import random\ndef f(rng: random.Random): return rng.random()\nx = random.Random(7)",
    ),
    (purity, "routing/ownership_redis.py", "import asyncio, redis"),
    (purity, "engines/upstream.py", "import asyncio"),
    (no_emulator, "gateway/bench/sim.py", "from engines.emulator import core"),
    (docstrings, "gateway/__init__.py", ""),
    (docstrings, "gateway/app.py", DOC),
)


@pytest.mark.parametrize(("rule", "path", "text"), GOOD_SAMPLES)
def test_a_good_sample_passes(rule: Rule, path: str, text: str) -> None:
    assert rule(Source(path, text)) == []


@pytest.mark.parametrize("path", PURE_FILES)
def test_pure_files_exist(path: str) -> None:
    assert (ROOT / path).exists(), f"{path} is listed as pure and does not exist"


# -- every knob is read ---------------------------------------------------------------------------------------------

KNOB_FILES = ("gateway/config.py", "gateway/limit_flags.py")


def knobs(tree: type) -> Iterator[tuple[str, ...]]:
    """The path of every leaf field of a tree of dataclasses of KNOB_FILES."""
    for field in dataclasses.fields(tree):
        default = field.default
        if type(default).__module__.replace(".", "/") + ".py" in KNOB_FILES:
            yield from ((field.name, *rest) for rest in knobs(type(default)))
        else:
            yield (field.name,)


def attributes_read(files: list[Source]) -> set[str]:
    nodes = (node for source in files for node in ast.walk(source.tree))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def unread(paths: Iterator[tuple[str, ...]], files: list[Source]) -> list[str]:
    """Knobs of which some part is never read as an attribute outside KNOB_FILES."""
    read = attributes_read([source for source in files if source.path not in KNOB_FILES])
    return [".".join(path) for path in paths if not read.issuperset(path)]


def test_every_knob_is_read() -> None:
    assert unread(knobs(Config), sources()) == []


def test_an_unread_knob_is_found() -> None:
    reads = Source(
        "gateway/app.py", "def f(config):\n    config.queue.max_bytes = 1\n    return config.queue.timeout_s"
    )
    own = [Source(path, "def f(queue):\n    return queue.max_requests") for path in KNOB_FILES]
    missing = unread(knobs(Config), [reads, *own])
    assert {"queue.max_bytes", "queue.max_requests", "server.port", "notes"} <= set(missing)
    assert "queue.timeout_s" not in missing
    assert ("routing", "profile") in knobs(Config)  # a profile is one knob, not a section


# -- nothing from outside the repository ----------------------------------------------------------------------------

OUTSIDE = ("../" + "shared", "/work/" + "shared")
NOT_OURS = ("__pycache__", "build", "dist", "node_modules")


def repository_files(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        hidden = [name for name in names if name.startswith(".") and name not in (".ci", ".github")]
        generated = [name for name in names if name in NOT_OURS or name.endswith(".egg-info")]
        names[:] = sorted(set(names) - {*hidden, *generated})
        yield from (Path(folder) / name for name in files)


def names_outside(root: Path) -> list[str]:
    found = []
    for file in repository_files(root):
        content = file.read_bytes()
        found += [f"{file.relative_to(root)} names {place}" for place in OUTSIDE if place.encode() in content]
    return found


def test_the_repository_needs_nothing_beside_it() -> None:
    assert names_outside(ROOT) == []


def test_a_file_that_does_is_found(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(f"cat {OUTSIDE[0]}/x")
    (tmp_path / "README.md").write_text(OUTSIDE[1])
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "x").write_text(OUTSIDE[1])
    assert sorted(names_outside(tmp_path)) == [f".ci/run names {OUTSIDE[0]}", f"README.md names {OUTSIDE[1]}"]
