"""Who owns which prefix, as this gateway believes: joins the index that decisions read with the store that is shared.

What happens here is told to both. What others did comes from the store and goes to the index; what an engine says of
itself (its KV events) comes from the feed and goes to both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engines.types import EngineFacts, EngineId, EngineView, Role
from routing.index import Match, PrefixIndex
from routing.ownership import ClaimId, OwnershipStore, Run, Tier
from routing.ranks import RankPrefixes
from routing.types import RequestView

_CLEAR_MISS_RATIO = 0.9
"""Blocks may stand for a mean number of tokens: less than a tenth (and a block) off is no miss."""
_EXPIRE_EVERY_S = 30.0
_FOLLOWED_ROOM = 2
"""Evictions that another gateway hears of come after the prefixes they made room for: those may be there together."""

BlockTokens = Callable[[str], float]
"""The tokens that a block of this model's prompts stands for."""


class Owners:
    """The ownership of one gateway. Synchronous; used from the event loop only. Is the store's listener."""

    def __init__(
        self, index: PrefixIndex, store: OwnershipStore, block_tokens: BlockTokens, clock: Callable[[], float]
    ) -> None:
        self.index = index
        self.ranks = RankPrefixes()
        self.store = store
        self.on_restart_seen: Callable[[EngineId], None] = lambda _: None
        """Called when another gateway has seen a newer boot of an engine than we have."""
        self._block_tokens = block_tokens
        self._clock = clock
        self._boots: dict[EngineId, tuple[int, str]] = {}
        self._capacity: dict[EngineId, int | None] = {}
        self._exact: set[EngineId] = set()
        self._followed: set[EngineId] = set()
        """Engines whose events another gateway hears."""
        self._doubted: set[EngineId] = set()
        self._emptied: dict[EngineId, int] = {}
        """How often the index was emptied of an engine: what was promised before cannot be taken back after."""
        self._promised: dict[ClaimId, int] = {}
        """Of each claim under way, what `_emptied` was when the index was told of it."""
        self._expire_s = 0.0
        store.listen(self)

    # ---- decisions -----------------------------------------------------------------------------------------------

    def match(self, request: RequestView) -> Match:
        """How much of this prompt every engine has; beside them, how much of it every DP rank was sent."""
        engines, ranks = self.index.match(request.blocks), self.ranks.match(request.blocks)
        return {**engines, **ranks} if ranks else engines

    def promise(self, prefill: EngineView, request: RequestView, now_s: float, dp_rank: int | None = None) -> ClaimId:
        """A request was dispatched; the claim ends in `kept` or `broken`. `dp_rank` where the prefill has several."""
        self.note(prefill, now_s)
        engine_id = prefill.engine_id
        if dp_rank is not None and prefill.facts is not None:
            self.ranks.sent(engine_id, dp_rank, request.blocks, self._blocks_of_rank(prefill.facts))
        claim = self.store.claim_pending(engine_id, prefill.epoch, request.blocks, now_s)
        if self._is_current(engine_id, prefill.epoch):
            self.index.add_pending(engine_id, request.blocks)
            self._promised[claim] = self._emptied.get(engine_id, 0)
        return claim

    def kept(
        self,
        prefill: EngineView,
        request: RequestView,
        claim: ClaimId,
        now_s: float,
        predicted_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        """The prefix is on the prefill now. A clear miss says that it had forgotten more than the index.

        `cached_tokens`: what the prefill says it had found, where it does; `predicted_tokens`: what we thought.
        """
        still_counts = self._end_promise(prefill, request, claim)
        if still_counts and self._is_current(prefill.engine_id, prefill.epoch):
            if (
                cached_tokens is not None
                and cached_tokens + request.block_tokens < _CLEAR_MISS_RATIO * predicted_tokens
            ):
                self._correct(prefill, request.blocks, int(cached_tokens / request.block_tokens))
            self.index.add_held(prefill.engine_id, request.blocks)
        if self._is_told(prefill.engine_id):  # a word of ours could reach the others after that of its eviction
            self.store.drop(claim)
            self.store.refresh(prefill.engine_id, prefill.epoch, request.blocks, now_s)
        else:
            self.store.confirm(claim, now_s)

    def broken(self, prefill: EngineView, request: RequestView, claim: ClaimId) -> None:
        """The attempt ended before its prefix was there."""
        self._end_promise(prefill, request, claim)
        self.store.drop(claim)

    def _end_promise(self, prefill: EngineView, request: RequestView, claim: ClaimId) -> bool:
        """Take it back; False where the index has forgotten it with all that it had of this engine.

        The same then went for the store, and for the engine: who flushes its cache has nothing under way.
        """
        if self._promised.pop(claim, None) != self._emptied.get(prefill.engine_id, 0):
            return False
        self.index.drop(prefill.engine_id, request.blocks)
        return True

    def _correct(self, prefill: EngineView, blocks: Sequence[bytes], reported_blocks: int) -> None:
        """Forget the rest of this chain. Without events, also what is older, which the engine evicted before.

        Others are told of this chain alone: what is older was not seen, and they know its age as well as we do.
        """
        if self._is_told(prefill.engine_id):
            for tier in Tier:
                self.index.evict(prefill.engine_id, blocks[reported_blocks:], tier)
        else:
            self.index.correct(prefill.engine_id, blocks, reported_blocks)
        self.store.evict(prefill.engine_id, prefill.epoch, blocks[reported_blocks:])

    # ---- engines -------------------------------------------------------------------------------------------------

    def note(self, view: EngineView, now_s: float) -> None:
        """Something is new about an engine: its boot, its size; to be told often."""
        if view.facts is None or view.spec.role is not Role.PREFILL:
            return
        boot = (view.epoch, view.facts.boot_fingerprint)
        known = self._boots.get(view.engine_id, (-1, ""))
        if known[0] > view.epoch:
            return
        if known != boot:
            self._begin(view.engine_id, boot)
        self._size(view.engine_id, view.facts)
        self._expire(now_s)

    def is_doubted(self, engine_id: EngineId) -> bool:
        """Whether others have seen a newer boot of it than the one we know."""
        return engine_id in self._doubted

    def seen_again(self, view: EngineView) -> None:
        """A doubted engine was looked at, and runs the boot that we know."""
        self._doubted.discard(view.engine_id)
        if view.facts is not None and view.spec.role is Role.PREFILL:
            self.store.begin(view.engine_id, view.epoch, view.facts.boot_fingerprint)

    def _begin(self, engine_id: EngineId, boot: tuple[int, str]) -> None:
        """A new boot holds nothing, unless others knew of it before us: then the index was told so, and has theirs."""
        if engine_id in self._boots and engine_id not in self._doubted:
            self._empty(engine_id)
        self._doubted.discard(engine_id)
        self._exact.discard(engine_id)
        self._boots[engine_id] = boot
        self.store.begin(engine_id, *boot)

    def _size(self, engine_id: EngineId, facts: EngineFacts) -> None:
        """Its own events bound an engine where they are all known; else its size does, loosely where they are told."""
        room = _FOLLOWED_ROOM if engine_id in self._followed else 1
        blocks = None if engine_id in self._exact else self._blocks_of_rank(facts) * facts.dp_size * room
        if self._capacity.get(engine_id, -1) != blocks:
            self._capacity[engine_id] = blocks
            self._set_capacity(engine_id)

    def _blocks_of_rank(self, facts: EngineFacts) -> int:
        """What one DP rank can cache."""
        return int(facts.max_total_tokens / self._block_tokens(facts.model))

    def _set_capacity(self, engine_id: EngineId) -> None:
        blocks = self._capacity[engine_id]
        for tier in Tier if blocks is None else (Tier.DEVICE,):
            self.index.set_capacity(engine_id, blocks, tier)

    def _empty(self, engine_id: EngineId) -> None:
        self.index.drop_engine(engine_id)
        self.ranks.forget(engine_id)
        self._emptied[engine_id] = self._emptied.get(engine_id, 0) + 1
        if engine_id in self._capacity:
            self._set_capacity(engine_id)

    def _expire(self, now_s: float) -> None:
        """Forget owners that nobody hit for long, now and then."""
        if now_s >= self._expire_s:
            self._expire_s = now_s + _EXPIRE_EVERY_S
            self.store.expire(now_s)

    # ---- what engines say of themselves --------------------------------------------------------------------------

    def events_live(self, engine_id: EngineId, live: bool) -> None:
        """Whether the engine's own events say what it holds; else its size and what it reports as cached do."""
        (self._exact.add if live else self._exact.discard)(engine_id)

    def _is_told(self, engine_id: EngineId) -> bool:
        """Whether the engine's own events say to all gateways what it holds, and in which order."""
        return engine_id in self._exact or engine_id in self._followed

    def events_elsewhere(self, engine_id: EngineId, elsewhere: bool) -> None:
        """Whether another gateway hears the engine's events, and tells everybody."""
        (self._followed.add if elsewhere else self._followed.discard)(engine_id)

    def engine_held(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], tier: Tier) -> None:
        """The engine holds this chain, from the root on."""
        if self._is_current(engine_id, epoch):
            self.index.add_held(engine_id, blocks, tier)
            self.store.hold(engine_id, epoch, blocks, self._clock(), tier)

    def engine_lost(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], tier: Tier) -> None:
        """The engine has evicted these blocks."""
        if self._is_current(engine_id, epoch):
            self.index.evict(engine_id, blocks, tier)
            self.store.evict(engine_id, epoch, blocks, tier)

    def engine_cleared(self, engine_id: EngineId, epoch: int) -> None:
        """The engine has flushed its cache."""
        if self._is_current(engine_id, epoch):
            self._empty(engine_id)
            self.store.drop_engine(engine_id, epoch)

    def _is_current(self, engine_id: EngineId, epoch: int) -> bool:
        """Whether this is the boot that counts: what others know to be over, the index must not be told of."""
        return self._boots.get(engine_id, (epoch, ""))[0] == epoch and engine_id not in self._doubted

    # ---- what others did (OwnershipListener) ---------------------------------------------------------------------

    def held(self, engine_id: EngineId, run: Run, tier: Tier) -> None:
        self.index.add_held(engine_id, run.blocks, tier)

    def lost(self, engine_id: EngineId, blocks: Sequence[bytes], tier: Tier) -> None:
        self.index.evict(engine_id, blocks, tier)

    def promised(self, engine_id: EngineId, blocks: Sequence[bytes]) -> None:
        self.index.add_pending(engine_id, blocks)

    def unpromised(self, engine_id: EngineId, blocks: Sequence[bytes]) -> None:
        self.index.drop(engine_id, blocks)

    def cleared(self, engine_id: EngineId) -> None:
        self._empty(engine_id)

    def restart_seen(self, engine_id: EngineId) -> None:
        self._doubted.add(engine_id)
        self.on_restart_seen(engine_id)
