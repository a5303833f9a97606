"""Everything one running gateway consists of, as `app.py` puts it together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from engines.base import Engine, PairStrategy
from engines.fleet import Fleet
from engines.sglang_wire import RoomMaker
from engines.upstream import Upstream
from failover.monitor import Monitor
from failover.poison import PoisonGuard
from gateway.canaries import Canaries
from gateway.config import Config
from gateway.decider import Decider
from gateway.engine_kinds import EngineKinds
from gateway.engine_tokens import EngineTokens
from gateway.explain import ExplainRing
from gateway.join_probe import JoinProbe
from gateway.kv_feed import KvFeed
from gateway.live import LiveRequests
from gateway.observability import Metrics
from gateway.releaser import Releaser
from gateway.replicas import Replicas
from gateway.retries import Retries
from gateway.second_look import SecondLook
from gateway.shared_state import SharedState
from gateway.suspects import ContentTrials
from gateway.tokenizer import Tokenizer
from gateway.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts, in the order data flows through them.

    `wall_clock_s` gives Unix seconds, for `created` fields; `started_s` is when this gateway was built.
    """

    config: Config
    fleet: Fleet
    upstream: Upstream
    engine: Engine
    strategy: PairStrategy
    tokenizer: Tokenizer | None
    joins: JoinProbe
    kinds: EngineKinds
    engine_tokens: EngineTokens
    monitor: Monitor
    decider: Decider
    shared: SharedState
    replicas: Replicas | None
    feed: KvFeed
    second_look: SecondLook
    releaser: Releaser
    retries: Retries
    canaries: Canaries
    poison: PoisonGuard
    contents: ContentTrials
    rooms: RoomMaker
    rng: Random
    live: LiveRequests
    explain: ExplainRing
    metrics: Metrics
    tracing: Tracing
    wall_clock_s: Callable[[], float]
    started_s: int
