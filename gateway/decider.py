"""Decides where requests go: owns the queue, the prefix index, the bookings and the estimates of one process.

`submit` waits in the queue, then chooses a pair and books it in one synchronous step. What happens to the attempt
comes back as events, each of which may let the next request leave. Pure rules are in `routing/`; this joins them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from engines.timing import PrefillWork, prefill_s
from engines.types import EngineId, EngineView, FleetSnapshot, Health, Role
from failover.deadlines import RULES, Deadline, queue_text
from gateway.bookings import Booking, Bookings
from gateway.candidates import decode_state, no_pair_error, prefill_state
from gateway.errors import GatewayError, no_pair, overloaded
from gateway.kv_audit import KvAudit
from gateway.learned import Learned
from gateway.owners import Owners
from gateway.pairs import Pairs
from gateway.panic import Panic
from gateway.trials import AT_ONCE, Trials
from routing import filters
from routing.compatibility import Apart
from routing.ownership import ClaimId
from routing.policies import Policy
from routing.queueing import FILL_RATIO, HeldBack, Offer, WaitingQueue, has_room, retry_after_s
from routing.types import Choice, Dropped, RequestView, RoutingSnapshot

_MAYBE_ANOTHER = (Health.SUSPECTED, Health.BROKEN)
_FOR_THE_MOMENT = (Health.SLOW, Health.UNKNOWN)
_LOOK_AHEAD = 64
"""Requests that one pass looks at; one that let some leave is followed by another."""


class FleetView(Protocol):
    """What the decider may see of the fleet (`engines.fleet.Fleet`)."""

    def snapshot(self) -> FleetSnapshot: ...


@dataclass(slots=True)
class Decision:
    """A pair for one attempt, booked until `finished` is told. Everything `explain` shows is kept.

    `claim` names what the ownership store was told; `handed_over` and `over` make each release happen once.
    """

    rid: str
    request: RequestView
    prefill: EngineView
    decode: EngineView
    choice: Choice
    dropped: tuple[Dropped, ...]
    booking: Booking
    versions: Mapping[str, int]
    waited_s: float
    decided_s: float
    claim: ClaimId
    handed_over: bool = False
    over: bool = False
    apart: Sequence[Apart] = ()
    pairs_in_trouble: Sequence[str] = ()
    panic: frozenset[Role] = frozenset()
    """The roles whose servers were used though they were late with their answers."""

    @property
    def pair(self) -> tuple[EngineId, EngineId]:
        return self.prefill.engine_id, self.decode.engine_id


@dataclass(slots=True)
class _Waiter:
    request: RequestView
    pinned_prefill: EngineId | None
    decided: asyncio.Future[Decision]


class Decider:
    """The decider of one process. Used from the event loop only."""

    def __init__(
        self,
        fleet: FleetView,
        policy: Policy,
        owners: Owners,
        learned: Learned,
        queue: WaitingQueue,
        rng: Random,
        *,
        new_rid: Callable[[], str],
        is_stale: Callable[[EngineId], bool],
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._rng = rng
        self._new_rid = new_rid
        self._is_stale = is_stale
        self._waiters: dict[str, _Waiter] = {}
        self._left_s: deque[float] = deque(maxlen=256)
        self.pairs = Pairs()
        self.owners = owners
        self.learned = learned
        self.queue = queue
        self.bookings = Bookings()
        self.trials = Trials()
        self.panic = Panic()
        self._audit = KvAudit(self.bookings)

    # ---- requests ------------------------------------------------------------------------------------------------

    async def submit(self, request: RequestView, pinned_prefill: EngineId | None = None) -> Decision:
        """A pair for `request`, booked; the caller must tell `finished` of it exactly once.

        `pinned_prefill` is taken while it can serve. Raises GatewayError: 429 when the queue is full or the request's
        deadline passes first, 503 when no complete compatible pair is up. Cancelling books nothing.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(request, pinned_prefill, loop.create_future())
        if (offer := self.queue.offer(request)) is not Offer.ACCEPTED:
            what = "requests" if offer is Offer.FULL_REQUESTS else "bytes"
            raise overloaded(f"the queue is full ({what})", retry_after_s=self.retry_after_s())
        self._waiters[request.request_id] = waiter
        timer = loop.call_at(request.deadline_s, self._expire)
        try:
            self.pump()
            return await waiter.decided
        except asyncio.CancelledError:
            if waiter.decided.done() and not waiter.decided.cancelled() and waiter.decided.exception() is None:
                self.finished(waiter.decided.result())
            self.queue.take(request.request_id)
            self.pump()  # who waits behind it may fit
            raise
        finally:
            timer.cancel()
            self.queue.take(request.request_id)
            self._waiters.pop(request.request_id, None)

    def pump(self) -> None:
        """Let requests leave the queue, in order, as long as one can that no other before it holds back."""
        held = HeldBack()  # bookings only grow meanwhile: who must wait once must wait in every later pass
        while self._pass(held):
            pass

    def _pass(self, held: HeldBack) -> bool:
        """Look once at the first in the queue; whether another pass may let more of them leave."""
        left = False
        for request in self.queue.ready(_LOOK_AHEAD):
            if not held.has_turn(request):
                continue
            if self._let_go(request, held):
                left = True
            elif not any(map(held.lets_use, self._ready_decodes())):
                return False
        return left

    def retry_after_s(self) -> float:
        """When a client that is turned away now might be served."""
        spread_s = self._left_s[-1] - self._left_s[0] if len(self._left_s) > 1 else 0.0
        return retry_after_s(self.queue, len(self._left_s) / spread_s if spread_s > 0 else 0.0)

    def _ready_decodes(self) -> Iterator[EngineId]:
        views = self._fleet.snapshot().with_role(Role.DECODE)
        return (view.engine_id for view in views if view.takes_rooms)

    def _let_go(self, request: RequestView, held: HeldBack) -> bool:
        """Decide on a request whose turn it is; False when it must wait, which `held` is told then."""
        waiter = self._waiters[request.request_id]
        if waiter.decided.done():
            self.queue.take(request.request_id)
            return True
        try:
            decision = self._decide(waiter, held)
        except Exception as error:  # a refusal, or a fault of ours: its own request's to bear, not who happens to pump
            waiter.decided.set_exception(error)
            self.queue.take(request.request_id)
            return True
        if decision is None:
            return False
        waiter.decided.set_result(decision)
        self.queue.take(request.request_id)
        self._left_s.append(decision.decided_s)
        return True

    def _expire(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for request in self.queue.expired(now_s + 1e-3):
            waiter = self._waiters.get(request.request_id)
            if waiter is not None and not waiter.decided.done():
                waiter.decided.set_exception(self._too_late(request))
        self.pump()

    def _too_late(self, request: RequestView) -> GatewayError:
        """Why it could not leave in time: no room, or nothing but pairs in quarantine."""
        fleet = self._fleet.snapshot()
        if self.pairs.shut(request.model, fleet):
            return no_pair(f"no pair was out of quarantine in time ({self.pairs.why_none(fleet)})")
        text = queue_text(asyncio.get_running_loop().time() - request.arrival_s, request.kv_tokens)
        error = overloaded(text, retry_after_s=self.retry_after_s())
        error.code = RULES[Deadline.QUEUE].code
        return error

    # ---- the decision --------------------------------------------------------------------------------------------

    def _decide(self, waiter: _Waiter, held: HeldBack) -> Decision | None:
        """Choose and book, with nothing in between; None while it must wait, which `held` is told.

        A decode that somebody before it waits for is as good as full.
        """
        request = waiter.request
        now_s = asyncio.get_running_loop().time()
        fleet = self._fleet.snapshot()
        seen = self._as_usable(fleet)
        kept, dropped = filters.filter_engines(request, seen)
        prefills = [view for view in kept if view.spec.role is Role.PREFILL]
        decodes = [view for view in kept if view.spec.role is Role.DECODE]
        if not prefills or not decodes:
            if _may_come_back(seen, Role.PREFILL if not prefills else Role.DECODE):
                held.waits(request, full=())
                return None
            raise no_pair_error(prefills, decodes, dropped)
        if pinned := [view for view in prefills if view.engine_id == waiter.pinned_prefill]:
            prefills = pinned
        match = self.owners.match(request)
        states = [decode_state(view, self.learned, self.bookings) for view in decodes]
        usable = [state for state in states if held.lets_use(state.view.engine_id)]
        open_states = [state for state in usable if has_room(request, state, FILL_RATIO)]
        full = {view.engine_id for view in decodes} - {state.view.engine_id for state in open_states}
        if not open_states:
            held.waits(request, full)
            return None
        snapshot = RoutingSnapshot(
            now_s,
            tuple(prefill_state(view, request, match, self.learned, self.bookings, now_s) for view in prefills),
            tuple(open_states),
            self.learned.profile.link,
            self.learned.profile.kv_bytes_per_token,
            incompatible=self.pairs.forbidden(fleet),
            versions=self._versions(fleet),
        )
        choice = self._policy.choose(request, snapshot, self._rng)
        if choice is None:
            if (
                full
                or any(_may_come_back(seen, role) for role in Role)
                or self.pairs.may_open(prefills, (state.view for state in open_states), request.excluded_pairs)
            ):
                held.waits(request, full)
                return None
            why = self.pairs.why_none(fleet)
            raise no_pair("no prefill and decode that are up may be paired" + (f" ({why})" if why else ""))
        decision = self._book(request, snapshot, choice, dropped)
        decision.apart, decision.pairs_in_trouble = self.pairs.apart(fleet), self.pairs.lines()
        decision.panic = self.panic.roles(fleet)
        self.pairs.booked(decision)
        return decision

    def _book(
        self, request: RequestView, snapshot: RoutingSnapshot, choice: Choice, dropped: tuple[Dropped, ...]
    ) -> Decision:
        best = choice.best
        prefill = next(state for state in snapshot.prefills if state.view.engine_id == best.prefill)
        decode = next(state for state in snapshot.decodes if state.view.engine_id == best.decode)
        work = PrefillWork(request.prompt_tokens, min(best.hit_tokens, request.prompt_tokens))
        booking = Booking(
            self._new_rid(),
            best.prefill,
            best.decode,
            work,
            request.kv_tokens,
            prefill_s(prefill.timing, work.prompt_tokens, work.cached_tokens),
            snapshot.now_s,
            prefill.rank,
            decode.rank,
        )
        claim = self.owners.promise(prefill.view, request, snapshot.now_s, prefill.rank)
        self.bookings.book(booking)  # last: nothing that may go wrong comes between this and its decision
        for view in (prefill.view, decode.view):
            self.trials.begin(view, booking.rid)
        waited_s = max(0.0, snapshot.now_s - request.arrival_s)
        return Decision(
            booking.rid,
            request,
            prefill.view,
            decode.view,
            choice,
            dropped,
            booking,
            snapshot.versions,
            waited_s,
            snapshot.now_s,
            claim,
        )

    def _as_usable(self, fleet: FleetSnapshot) -> list[EngineView]:
        """The servers as far as they may be used now: late ones in a panic, those on probation for a few requests.

        No decode is given a prefill whose bootstrap server has not answered lately, panic or not.
        """
        panic = self.panic.roles(fleet)
        return [self._usable(view, panic) for view in fleet.engines]

    def _usable(self, view: EngineView, panic: frozenset[Role]) -> EngineView:
        if view.health is Health.SLOW and view.spec.role in panic:
            view = replace(view, health=Health.READY)
        if not view.takes_rooms:
            return view
        if view.spec.role is Role.PREFILL and self._is_stale(view.engine_id):
            return replace(view, health=Health.SLOW, reason="its last good probe is too old")
        if view.health is Health.PROBATION and self.trials.is_full(view.engine_id):
            return replace(view, health=Health.SLOW, reason=f"half-open: {AT_ONCE} requests on it have to prove it")
        return view

    def _versions(self, fleet: FleetSnapshot) -> dict[str, int]:
        return {
            "fleet": fleet.version,
            "index": self.owners.index.version,
            "bookings": self.bookings.version,
            "estimates": self.learned.version,
        }

    # ---- what became of it ---------------------------------------------------------------------------------------

    def handed_over(self, decision: Decision, cached_tokens: int | None = None) -> None:
        """The prefill's part succeeded: its booking is released, its prefix is owned. Once; later calls do nothing.

        `cached_tokens`: what the prefill says it had found cached, where it says so.
        """
        if decision.handed_over or decision.over:
            return
        decision.handed_over = True
        self.pairs.handed_over(decision)
        now_s = asyncio.get_running_loop().time()
        took_s = self.bookings.prefill_done(decision.booking, now_s)
        if self._is_trusted(decision.prefill):
            predicted_tokens = decision.booking.work.cached_tokens
            self.owners.kept(decision.prefill, decision.request, decision.claim, now_s, predicted_tokens, cached_tokens)
            self._learn_prefill(decision, cached_tokens, took_s)
        else:
            self._drop_claim(decision)
        self.pump()

    def _learn_prefill(self, decision: Decision, cached_tokens: int | None, took_s: float | None) -> None:
        facts, work, engine_id = decision.prefill.facts, decision.booking.work, decision.prefill.engine_id
        shared = self.bookings.prefill_requests(engine_id) > self.bookings.own(engine_id).prefill_requests
        if took_s is not None and facts is not None and not shared:  # else it also did what others had sent
            cached = work.cached_tokens if cached_tokens is None else min(cached_tokens, work.prompt_tokens - 1)
            self.learned.saw_prefill(engine_id, facts.chunk_tokens, work.prompt_tokens, cached, took_s)

    def finished(self, decision: Decision) -> None:
        """The attempt is over, however: release what is still booked. Once; later calls do nothing."""
        if decision.over:
            return
        decision.over = True
        self.pairs.finished(decision)
        self.bookings.release(decision.booking, asyncio.get_running_loop().time())
        for engine_id in decision.pair:
            self.trials.over(engine_id, decision.rid)
        if not decision.handed_over:
            self._drop_claim(decision)
        self.pump()

    def restarted(self, engine_id: EngineId) -> None:
        """A server came back as a new process: it holds nothing any more, and may be another build."""
        self.learned.forget_engine(engine_id)
        self.fleet_changed(engine_id)

    def fleet_changed(self, engine_id: EngineId) -> None:
        """Health, facts or load of a server changed."""
        view = self._view(engine_id)
        if view is not None:
            self._audit.note(view)
            self.owners.note(view, asyncio.get_running_loop().time())
        self.pairs.apart(self._fleet.snapshot())  # says what cannot be paired as soon as that is known
        self.pump()

    def unaccounted_tokens(self, view: EngineView) -> float | None:
        """KV tokens in use on a server that no live attempt explains; None while it reports no load."""
        return self._audit.unaccounted_tokens(view)

    def _view(self, engine_id: EngineId) -> EngineView | None:
        return next((view for view in self._fleet.snapshot().engines if view.engine_id == engine_id), None)

    def _is_trusted(self, view: EngineView) -> bool:
        """Whether what `view` computed is still there: while a restart is suspected, ownership is not written."""
        now = self._view(view.engine_id)
        return now is not None and now.epoch == view.epoch and now.health not in _MAYBE_ANOTHER

    def _drop_claim(self, decision: Decision) -> None:
        self.owners.broken(decision.prefill, decision.request, decision.claim)


def _may_come_back(views: Iterable[EngineView], role: Role) -> bool:
    """Whether a server of this role takes no rooms for the moment only: a reason to wait, not to refuse."""
    return any(view.health in _FOR_THE_MOMENT and view.spec.role is role and not view.draining for view in views)
