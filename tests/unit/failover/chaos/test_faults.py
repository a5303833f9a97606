"""Each fault on a world without processes: what it does, and that lifting it undoes all of that, whenever it comes."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from failover.chaos.faults import FAULTS
from failover.chaos.faults.base import Fault
from failover.chaos.scenario import Value
from failover.chaos.world import PLAIN, LinkRule, Unable

SILENT = LinkRule(silent=True)
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
NEVER_LIFTED = {"flush", "cut", "reset"}
"""What is done is done."""


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@dataclass
class FakeProcess:
    """A process that ends some turns of the loop after it was told to; `deaf` to SIGTERM."""

    name: str
    role: str
    pids: count[int]
    url: str = "http://fake"
    running: bool = True
    frozen: bool = False
    deaf: bool = False
    flags: Sequence[str] = ()
    before: Sequence[str] = ()
    signals: list[signal.Signals] = field(default_factory=list)
    starts: int = 0
    limit: tuple[int, int] = UNLIMITED
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.pid = next(self.pids)

    def send_signal(self, number: signal.Signals) -> None:
        if not self.running:
            return
        self.signals.append(number)
        if number is signal.SIGSTOP:
            self.frozen = True
        elif number is signal.SIGCONT:
            self.frozen = False
        elif number is signal.SIGKILL or not self.deaf:
            asyncio.get_running_loop().call_later(0.003, self.end, self.pid)

    def end(self, pid: int) -> None:
        if pid == self.pid:
            self.running = self.frozen = False
            self.limit = UNLIMITED
            self.ending.set()

    async def wait(self) -> int:
        if self.running:
            await self.ending.wait()
        return 0

    async def start(self, flags: Sequence[str] = (), before: Sequence[str] = ()) -> None:
        await turns(2)
        if not self.running:
            self.running, self.pid, self.flags, self.before = True, next(self.pids), tuple(flags), tuple(before)
            self.ending = asyncio.Event()
            self.starts += 1
        await turns(3)


@dataclass
class FakeLink:
    """What is imposed on it now, and what ended its connections."""

    imposed: dict[int, tuple[LinkRule, LinkRule, bool]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    number: count[int] = field(default_factory=count)

    def impose(self, forth: LinkRule = PLAIN, back: LinkRule = PLAIN, *, refuse: bool = False) -> Callable[[], None]:
        number = next(self.number)
        self.imposed[number] = (forth, back, refuse)

        def lift() -> None:
            self.imposed.pop(number, None)

        return lift

    def cut(self) -> int:
        self.ended.append("cut")
        return 3

    def reset(self) -> int:
        self.ended.append("reset")
        return 4


class FakeWorld:
    """Two gateways, an engine of each kind, Redis and one link."""

    def __init__(self) -> None:
        pids = count(100)
        roles = {"gateway0": "gateway", "gateway1": "gateway", "prefill0": "prefill", "decode0": "decode"}
        self.processes = {name: FakeProcess(name, role, pids) for name, role in (roles | {"redis": "redis"}).items()}
        self.the_link = FakeLink()
        self.faults: dict[tuple[str, int, str], Mapping[str, Any]] = {}
        """What engines have set, by name, pid and id."""
        self.drained: set[tuple[str, str]] = set()
        self.commands: list[tuple[str | int, ...]] = []
        self.marks: list[tuple[str, str]] = []
        self.unable: set[str] = set()
        """Whose calls fail."""

    def process(self, name: str) -> FakeProcess:
        return self.processes[name]

    def names(self, role: str) -> Sequence[str]:
        return [name for name, process in self.processes.items() if process.role == role]

    def seen(self, gateway: str, engine: str) -> str:
        return f"http://{engine}.{gateway}"

    def link(self, name: str) -> FakeLink:
        return self.the_link

    async def admin(
        self, name: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        await turns(2)
        process = self.process(name)
        if not process.running or name in self.unable:
            raise Unable(f"{name} does not answer")
        if method == "POST" and path == "/emulator/fault":
            assert body is not None
            self.faults[name, process.pid, body["fault_id"]] = {k: v for k, v in body.items() if k != "fault_id"}
        elif method == "DELETE" and path.startswith("/emulator/fault/"):
            self.faults.pop((name, process.pid, path.rpartition("/")[2]), None)
        elif (method, path) == ("POST", "/admin/drain"):
            assert body is not None
            self.drained.add((name, body["engine"]))
        elif (method, path) == ("POST", "/admin/undrain"):
            assert body is not None
            self.drained.discard((name, body["engine"]))
        else:
            raise AssertionError(f"{method} {path}")
        await turns(2)
        return {}

    async def redis(self, *words: str | int) -> Any:
        await turns(2)
        if not self.process("redis").running:
            raise Unable("redis does not run")
        self.commands.append(words)
        return {b"dbfilename": b"now.rdb"} if words[0] == "CONFIG" else b"OK"

    def mark(self, name: str, what: str) -> None:
        self.marks.append((name, what))

    def wrong(self) -> list[str]:
        """What is not as it was in the beginning."""
        found = [f"{name} does not run" for name, each in self.processes.items() if not each.running]
        found += [f"{name} is frozen" for name, each in self.processes.items() if each.frozen]
        others = [each for name, each in self.processes.items() if name != "redis"]
        found += [f"{each.name} has {each.flags}" for each in others if each.flags]
        found += [f"{name} has {each.before}" for name, each in self.processes.items() if each.before]
        found += [f"{name}: {each.limit}" for name, each in self.processes.items() if each.limit != UNLIMITED]
        found += [f"{key} is on" for key in self.faults if self.processes[key[0]].pid == key[1]]
        found += [f"{key} is drained" for key in self.drained]
        return found + [f"{rule} is on" for rule in self.the_link.imposed.values()]


TARGETS = {"prefill": "prefill0", "decode": "decode0", "gateway": "gateway0", "redis": "redis", "link": "a>b"}
CASES = [(name, TARGETS[role]) for name, kind in FAULTS.items() for role in sorted(kind.targets)]
CASES_OF_PROCESSES = [(name, target) for name, target in CASES if target != "a>b"]


def make(world: FakeWorld, name: str, target: str, **params: Value) -> Fault:
    kind = FAULTS[name]
    assert params.keys() <= kind.params.keys()
    return kind(world, target, {**kind.params, **params})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    fake = FakeWorld()

    def prlimit(pid: int, what: int, limits: tuple[int, int] | None = None) -> tuple[int, int]:
        assert what == resource.RLIMIT_FSIZE
        process = next((each for each in fake.processes.values() if each.pid == pid and each.running), None)
        if process is None:
            raise ProcessLookupError(3, "No such process")
        before = process.limit
        process.limit = limits or before
        return before

    monkeypatch.setattr(resource, "prlimit", prlimit)
    return fake


# ---- all faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), FAULTS.items())
def test_every_fault_says_what_it_is(name: str, kind: type[Fault]) -> None:
    words = (kind.__doc__ or "").split("\n")[0]
    assert len(words) > 20, "`pdgate chaos list` shows the first line"
    assert kind.targets <= TARGETS.keys()
    assert kind.real == (kind.targets == {"link"}), "on a real fleet only proxies"
    assert kind.__name__ == name.title().replace("_", "")
    assert kind.__module__ == f"failover.chaos.faults.{name}"


@pytest.mark.parametrize(("name", "target"), CASES)
async def test_lifting_undoes_it_and_twice_is_once(world: FakeWorld, name: str, target: str) -> None:
    fault = make(world, name, target)
    await fault.apply()
    if name not in NEVER_LIFTED | {"restart", "redis_restart", "redis_failover"}:
        assert world.wrong() or name == "stop", "it does something"
    await fault.lift()
    assert world.wrong() == []
    before = {each: (process.pid, list(process.signals)) for each, process in world.processes.items()}
    ended, commands = list(world.the_link.ended), list(world.commands)
    await fault.lift()
    assert before == {each: (process.pid, process.signals) for each, process in world.processes.items()}
    assert (ended, commands) == (world.the_link.ended, world.commands)


@pytest.mark.parametrize(("name", "target"), CASES)
async def test_lifting_undoes_what_was_done_until_it_was_cancelled(world: FakeWorld, name: str, target: str) -> None:
    for after in range(60):
        fault = make(world, name, target)
        task = asyncio.ensure_future(fault.apply())
        await turns(after) if after < 20 else await asyncio.sleep((after - 20) * 0.0005)
        done = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await fault.lift()
        await fault.lift()
        assert world.wrong() == [], f"cancelled after {after} turns"
        if done:
            return
    raise AssertionError("it was never done")


@pytest.mark.parametrize(("name", "target"), CASES)
async def test_lifting_can_be_cancelled_and_done_again(world: FakeWorld, name: str, target: str) -> None:
    for after in range(60):
        fault = make(world, name, target)
        await fault.apply()
        task = asyncio.ensure_future(fault.lift())
        await turns(after) if after < 20 else await asyncio.sleep((after - 20) * 0.0005)
        done = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await fault.lift()
        assert world.wrong() == [], f"cancelled after {after} turns"
        if done:
            return
    raise AssertionError("it was never done")


@pytest.mark.parametrize(("name", "target"), CASES)
async def test_lifting_what_was_never_applied_does_nothing(world: FakeWorld, name: str, target: str) -> None:
    await make(world, name, target).lift()
    assert world.wrong() == []
    assert not any(process.signals or process.starts for process in world.processes.values())
    assert not world.commands
    assert not world.the_link.ended


@pytest.mark.parametrize(("name", "target"), [each for each in CASES_OF_PROCESSES if each[0] not in ("flush", "drain")])
async def test_nothing_is_done_to_a_process_that_does_not_run(world: FakeWorld, name: str, target: str) -> None:
    world.process(target).end(world.process(target).pid)
    fault = make(world, name, target)
    with pytest.raises(Unable, match=f"{target} does not run"):
        await fault.apply()
    await fault.lift()
    assert not world.process(target).running, "whoever ended it starts it again"


@pytest.mark.parametrize(("name", "target"), CASES_OF_PROCESSES)
async def test_lifting_leaves_a_process_alone_that_another_fault_has_put_there(
    world: FakeWorld, name: str, target: str
) -> None:
    fault, process = make(world, name, target), world.process(target)
    await fault.apply()
    if name in ("wrong_page_size", "clock_skew", "drain"):
        return  # theirs is to be undone whoever runs there
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await process.start()
    pid = process.pid
    process.signals.clear()
    await fault.lift()
    assert (process.pid, process.signals) == (pid, [])


# ---- processes -----------------------------------------------------------------------------------------------------


async def test_kill(world: FakeWorld) -> None:
    fault, process = make(world, "kill", "prefill0"), world.process("prefill0")
    await fault.apply()
    assert (process.signals, process.running) == ([signal.SIGKILL], False)
    await fault.lift()
    assert (process.running, process.starts) == (True, 1)


async def test_freeze(world: FakeWorld) -> None:
    fault, process = make(world, "freeze", "redis"), world.process("redis")
    await fault.apply()
    assert (process.frozen, process.running) == (True, True)
    await fault.lift()
    assert process.signals == [signal.SIGSTOP, signal.SIGCONT]


async def test_restart_waits_for_its_time(world: FakeWorld) -> None:
    fault, process = make(world, "restart", "decode0", after_s=0.05), world.process("decode0")
    clock = asyncio.get_running_loop().time
    began_s, applying = clock(), asyncio.ensure_future(fault.apply())
    await process.wait()
    assert not process.running
    await applying
    assert clock() - began_s >= 0.05
    assert (process.running, process.starts) == (True, 1)


@pytest.mark.parametrize("deaf", [False, True])
async def test_stop_gives_time_to_end(world: FakeWorld, deaf: bool) -> None:
    fault, process = make(world, "stop", "gateway0", grace_s=0.05), world.process("gateway0")
    process.deaf = deaf
    await fault.apply()
    await asyncio.sleep(0.02)
    assert process.running is deaf
    await fault.lift()
    assert process.signals == [signal.SIGTERM, *([signal.SIGKILL] if deaf else [])]
    assert process.starts == 1


async def test_a_wrong_page_size_is_gone_when_it_is_lifted(world: FakeWorld) -> None:
    fault, process = make(world, "wrong_page_size", "decode0", page_size=48), world.process("decode0")
    await fault.apply()
    assert process.flags == ("--page-size", "48")
    await fault.lift()
    assert (len(process.flags), process.starts) == (0, 2)


async def test_a_decode_that_died_of_its_page_size_comes_again_with_the_right_one(world: FakeWorld) -> None:
    fault, process = make(world, "wrong_page_size", "decode0"), world.process("decode0")
    await fault.apply()
    process.end(process.pid)
    await fault.lift()
    assert (len(process.flags), process.running) == (0, True)


async def test_a_skewed_clock(world: FakeWorld) -> None:
    fault, process = make(world, "clock_skew", "gateway1", ahead_s=-60), world.process("gateway1")
    await fault.apply()
    assert process.signals == [signal.SIGTERM]
    assert process.before[:6] == ("unshare", "--user", "--map-current-user", "--time", "--monotonic", "-60")
    await fault.lift()
    assert process.signals == [signal.SIGTERM, signal.SIGTERM]


async def test_a_full_disk(world: FakeWorld) -> None:
    fault, process = make(world, "disk_full", "gateway0"), world.process("gateway0")
    process.limit = (5_000, 9_000)
    await fault.apply()
    assert process.limit == (0, 9_000)
    await fault.lift()
    assert process.limit == (5_000, 9_000)


async def test_every_gateway_is_told_to_drain_by_the_name_it_knows(world: FakeWorld) -> None:
    fault = make(world, "drain", "decode0")
    await fault.apply()
    assert world.drained == {("gateway0", "http://decode0.gateway0"), ("gateway1", "http://decode0.gateway1")}
    await fault.lift()
    assert not world.drained


async def test_a_gateway_that_is_gone_need_not_be_told_to_stop_draining(world: FakeWorld) -> None:
    fault = make(world, "drain", "decode0")
    await fault.apply()
    world.process("gateway1").end(world.process("gateway1").pid)
    await fault.lift()
    assert world.drained == {("gateway1", "http://decode0.gateway1")}  # forgotten with the process


async def test_redis_loses_or_keeps_its_data(world: FakeWorld) -> None:
    redis = world.process("redis")
    await make(world, "flush", "redis").apply()
    assert world.commands == [("FLUSHALL",)]
    await make(world, "redis_restart", "redis").apply()
    assert world.commands[1:] == [("CONFIG", "GET", "dbfilename"), ("SAVE",)]
    assert (redis.starts, redis.signals, redis.flags) == (1, [signal.SIGKILL], ("--dbfilename", "now.rdb"))
    pid = redis.pid
    await make(world, "redis_failover", "redis").apply()
    assert redis.flags == ("--dbfilename", f"empty-{pid}.rdb")


# ---- links ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "rule"),
    [
        ("delay", {"delay_s": 0.2, "jitter_s": 0.1}, LinkRule(delay_s=0.2, jitter_s=0.1)),
        ("bandwidth", {"bytes_per_s": 500}, LinkRule(bytes_per_s=500.0)),
        ("silent", {}, SILENT),
    ],
)
@pytest.mark.parametrize("direction", ["both", "forth", "back"])
async def test_slow_and_silent_links(
    world: FakeWorld, name: str, params: dict[str, Value], rule: LinkRule, direction: str
) -> None:
    fault = make(world, name, "a>b", direction=direction, **params)
    await fault.apply()
    forth, back = (rule if direction in (way, "both") else PLAIN for way in ("forth", "back"))
    assert list(world.the_link.imposed.values()) == [(forth, back, False)]
    await fault.lift()
    assert not world.the_link.imposed


async def test_a_direction_that_there_is_not(world: FakeWorld) -> None:
    with pytest.raises(Unable, match="both, forth, back"):
        await make(world, "silent", "a>b", direction="forward").apply()


async def test_links_that_refuse_or_end_connections(world: FakeWorld) -> None:
    fault = make(world, "refuse", "a>b")
    await fault.apply()
    assert list(world.the_link.imposed.values()) == [(PLAIN, PLAIN, True)]
    assert await make(world, "cut", "a>b").apply() == "3 connections"
    assert await make(world, "reset", "a>b").apply() == "4 connections"
    assert world.the_link.ended == ["cut", "reset"]


# ---- inside engines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "body"),
    [
        ("error_500", {}, {"fault": "status", "status": 500, "count": 1}),
        ("error_400", {"count": 3}, {"fault": "status", "status": 400, "count": 3}),
        ("abort_in_200", {"count": 2}, {"fault": "abort_in_200", "count": 2}),
        ("partial_kv", {}, {"fault": "partial_kv", "count": 1}),
        ("error_mid_stream", {"after_tokens": 7}, {"fault": "error_event", "count": 1, "after_tokens": 7}),
        ("die_at_token", {"token": 9}, {"fault": "die", "after_tokens": 9}),
        ("lying_health", {}, {"fault": "stuck"}),
        ("lying_health", {"says": "ill"}, {"fault": "ill"}),
        ("poison_prompt", {"word": "lead"}, {"fault": "poison", "word": "lead"}),
        ("leak", {"tokens": 50}, {"fault": "leak", "tokens": 50}),
        ("slow_scheduler", {"pause_s": 0.1}, {"fault": "slow_scheduler", "pause_s": 0.1}),
    ],
)
async def test_what_engines_are_told(
    world: FakeWorld, name: str, params: dict[str, Value], body: dict[str, Any]
) -> None:
    target = TARGETS[sorted(FAULTS[name].targets)[-1]]
    await make(world, name, target, **params).apply()
    assert list(world.faults.values()) == [body]


async def test_a_health_that_there_is_not(world: FakeWorld) -> None:
    with pytest.raises(Unable, match="well, ill"):
        await make(world, "lying_health", "prefill0", says="dead").apply()


async def test_two_faults_of_an_engine_are_lifted_one_by_one(world: FakeWorld) -> None:
    first, second = make(world, "leak", "decode0"), make(world, "slow_scheduler", "decode0")
    await first.apply()
    await second.apply()
    await first.lift()
    assert [body["fault"] for body in world.faults.values()] == ["slow_scheduler"]


@pytest.mark.parametrize("name", ["die_at_token", "poison_prompt"])
async def test_an_engine_that_died_of_its_fault_comes_again(world: FakeWorld, name: str) -> None:
    fault, process = make(world, name, "decode0"), world.process("decode0")
    await fault.apply()
    process.end(process.pid)
    await fault.lift()
    assert (process.running, process.starts) == (True, 1)


async def test_an_engine_that_does_not_answer_when_its_fault_is_lifted_can_be_asked_again(world: FakeWorld) -> None:
    fault = make(world, "leak", "decode0")
    await fault.apply()
    world.unable.add("decode0")
    with pytest.raises(Unable):
        await fault.lift()
    world.unable.clear()
    await fault.lift()
    assert world.wrong() == []
