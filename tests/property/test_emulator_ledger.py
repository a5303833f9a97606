"""Whatever happens to requests, every KV token has an owner, and in the end none belongs to a room."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.emulator.core import (
    AckAbort,
    Ended,
    ForgetPeer,
    Job,
    Node,
    PushAddresses,
    SendKv,
    TellAbort,
    Timeouts,
)
from engines.emulator.decode_node import DecodeNode
from engines.emulator.kv_pool import KvPool
from engines.emulator.plain_node import PlainNode
from engines.emulator.prefill_node import PrefillNode
from engines.emulator.radix import RadixCache
from engines.timing import TINY
from engines.token_rule import pack

PEER = "p:1"
SMALL = replace(TINY, prefill=replace(TINY.prefill, chunk_tokens=64), max_running_requests=3)
TIMEOUTS = Timeouts(bootstrap_s=5.0, waiting_s=5.0, deferred_release_s=2.0)


class Countdown:
    """A token source that ends after so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def step(self) -> bool:
        self.left -= 1
        return self.left <= 0


class World:
    """One prefill, one decode and one plain server, joined without sockets."""

    def __init__(self, pool_tokens: int, page: int) -> None:
        self.prefill = PrefillNode(SMALL, KvPool(pool_tokens, page, RadixCache(page)), TIMEOUTS)
        self.decode = DecodeNode(SMALL, KvPool(pool_tokens, page), TIMEOUTS)
        self.plain = PlainNode(SMALL, KvPool(pool_tokens, page, RadixCache(page)), TIMEOUTS)
        self.decode.peer_known(PEER)
        self.nodes: tuple[Node, ...] = (self.prefill, self.decode, self.plain)
        self.now_s = 0.0
        self.submitted = 0
        self.ended: list[Job] = []
        self.acks_lost = False

    def submit(self, sides: str, prompt_tokens: int, answer_tokens: int, prefix: int) -> None:
        self.submitted += 1
        prompt = pack([prefix] * (prompt_tokens // 2) + [self.submitted] * (prompt_tokens - prompt_tokens // 2))
        for side, node in (("p", self.prefill), ("d", self.decode), ("s", self.plain)):
            if side in sides:
                room = None if side == "s" else self.submitted
                tokens = 1 if side == "p" else answer_tokens
                source, peer = Countdown(tokens), PEER if side == "d" else ""
                job = Job(f"r{self.submitted:04}", room, prompt, prompt_tokens, tokens, source, peer)
                node.submit(job, self.now_s)  # type: ignore[attr-defined]
        self.settle()

    def settle(self) -> None:
        """Advance the nodes and deliver their messages until nobody has any: what a real driver's pokes do."""
        busy = True
        while busy:
            busy = False
            for node in self.nodes:
                node.advance(self.now_s)  # type: ignore[attr-defined]
                for event in node.take_events():
                    busy = True
                    self._deliver(event)
            self.check()

    def _deliver(self, event: object) -> None:
        if isinstance(event, SendKv) and event.last:
            self.decode.kv_arrived(event.job.room or 0, event.job.cached_tokens, self.now_s)
            self.prefill.transfer_acked(event.job, self.now_s)
        elif isinstance(event, AckAbort) and not self.acks_lost:
            self.decode.abort_acked(event.room)
        elif isinstance(event, PushAddresses):
            self.prefill.addresses(event.job.room or 0, "d:1", self.now_s)
        elif isinstance(event, TellAbort):
            self.prefill.peer_abort(event.job.room or 0, self.now_s)
        elif isinstance(event, ForgetPeer):
            self.decode.peer_known(event.peer)
        elif isinstance(event, Ended):
            self.ended.append(event.job)

    def run(self, until_s: float) -> None:
        """Let the nodes advance through every due moment up to `until_s`."""
        while True:
            self.settle()
            due = [node.next_s() for node in self.nodes]  # type: ignore[attr-defined]
            soonest = min((at_s for at_s in due if at_s is not None), default=None)
            if soonest is None or soonest > until_s:
                break
            self.now_s = max(self.now_s, soonest)
        self.now_s = until_s

    def check(self) -> None:
        for node in self.nodes:
            ledger = node.pool.ledger()
            assert ledger.used_tokens == sum(ledger.by_room.values()) + ledger.cache_tokens
            assert ledger.used_tokens + ledger.free_tokens == ledger.total_tokens
            assert ledger.free_tokens >= 0
            assert 0 <= ledger.locked_cache_tokens <= ledger.cache_tokens


@dataclass(frozen=True)
class Action:
    name: str
    sides: str = ""
    prompt_tokens: int = 1
    answer_tokens: int = 1
    number: int = 0
    duration_s: float = 0.0


ACTIONS = st.one_of(
    st.builds(
        Action,
        name=st.just("submit"),
        sides=st.sampled_from(["pd", "pd", "pd", "p", "d", "s"]),
        prompt_tokens=st.integers(1, 200),
        answer_tokens=st.integers(1, 50),
        number=st.integers(0, 3),
    ),
    st.builds(Action, name=st.just("abort"), sides=st.sampled_from("pds"), number=st.integers(0, 12)),
    st.builds(Action, name=st.just("run"), duration_s=st.floats(0.0005, 0.2)),
    st.builds(Action, name=st.just("peer_lost")),
    st.builds(Action, name=st.just("send_failed")),
    st.builds(Action, name=st.just("lose_acks")),
)


def _apply(world: World, action: Action) -> None:
    if action.name == "submit":
        world.submit(action.sides, action.prompt_tokens, action.answer_tokens, action.number)
    elif action.name == "abort":
        rid = f"r{action.number:04}"
        for side, node in (("p", world.prefill), ("d", world.decode), ("s", world.plain)):
            if side in action.sides:
                node.abort(rid, world.now_s)  # type: ignore[attr-defined]
    elif action.name == "run":
        world.run(world.now_s + action.duration_s)
    elif action.name == "peer_lost":
        world.decode.peer_lost(PEER, world.now_s)
    elif action.name == "send_failed":
        for job in list(world.prefill.jobs.values())[:1]:
            world.prefill.transfer_failed(job, "Failed to send", world.now_s)
    elif action.name == "lose_acks":
        world.acks_lost = True
    world.settle()


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(ACTIONS, max_size=40), st.sampled_from([1, 4, 16]), st.sampled_from([256, 700, 4096]))
def test_the_ledger_balances_and_comes_back_to_zero(actions: list[Action], page: int, pool_tokens: int) -> None:
    world = World(pool_tokens, page)
    for action in actions:
        _apply(world, action)
    world.run(world.now_s + 1000.0)
    for node in world.nodes:
        assert node.jobs == {}
        assert node.pool.ledger().by_room == {}
        assert node.pool.ledger().locked_cache_tokens == 0
        assert node.pool.used_tokens == 0
