"""The connections of a decode's rank: look-ups and heartbeats of prefills, addresses out, KV in. A shell.

What a prefill's bootstrap server said is cached per address and goes stale when the prefill restarts, until missed
heartbeats or a waiting timeout drop it: SGLang's own behaviour.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp

from engines.emulator.core import Ended, Event, ForgetPeer, Job, PushAddresses, TellAbort
from engines.emulator.decode_node import DecodeNode
from engines.emulator.rank import Rank, crash
from engines.emulator.transfer import Dialer, Frame, Kind, Peer, kv_tokens
from engines.tasks import spawn, stop
from engines.token_rule import TOKEN_BYTES

_ANY_RANK = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
_RANK = "prefill_dp_rank={}&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"


@dataclass(slots=True)
class _Prefill:
    """A prefill that this decode knows by its bootstrap address; one address for each of its DP ranks."""

    rank_addresses: list[str]
    missed_heartbeats: int = 0


class DecodeLinks:
    """Moves messages between one scheduler of a decode and its prefills."""

    def __init__(self, rank: Rank, node: DecodeNode) -> None:
        self._rank = rank
        self._node = node
        self._dialer = Dialer(self._from_prefill, lambda _: None)
        self._prefills: dict[str, _Prefill] = {}
        self._looking: set[str] = set()
        self._arriving: dict[int, bytearray] = {}
        """KV by job as it comes in: the packed ids, zero where nothing came."""
        self._http: aiohttp.ClientSession | None = None
        self._server: asyncio.Server | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        self._address = ""
        rank.on_event = self.on_event
        rank.require = self.require

    async def start(self) -> None:
        """Open the rank port and begin heartbeats."""
        options, loop = self._rank.options, asyncio.get_running_loop()
        port = options.kv_port + self._rank.number if options.kv_port else 0
        self._http = aiohttp.ClientSession()
        self._server = await loop.create_server(lambda: Peer(self._kv), options.host, port)
        self._address = f"{options.host}:{self._server.sockets[0].getsockname()[1]}"
        self._heartbeats = spawn(self._heartbeat(), "emulator-heartbeat")

    def require(self, peer: str) -> None:
        """See that the prefill at bootstrap address `peer` is known, looking it up once for all that wait."""
        if peer not in self._prefills and peer not in self._looking:
            self._looking.add(peer)
            spawn(self._look_up(peer), f"emulator-lookup-{peer}")

    def on_event(self, event: Event) -> None:
        """Act on what the scheduler says."""
        if isinstance(event, PushAddresses):
            self._tell(event.job, Frame(Kind.ADDRESSES, _room(event.job), payload=self._address.encode()))
        elif isinstance(event, TellAbort):
            self._tell(event.job, Frame(Kind.ABORT, _room(event.job)))
        elif isinstance(event, ForgetPeer):
            self._prefills.pop(event.peer, None)
            if self._node.wants(event.peer):
                self.require(event.peer)
        elif isinstance(event, Ended):
            self._arriving.pop(event.job.serial, None)

    def _tell(self, job: Job, frame: Frame) -> None:
        prefill = self._prefills.get(job.peer)
        if prefill is not None and job.prefill_rank is not None:
            self._dialer.send(prefill.rank_addresses[job.prefill_rank], frame)

    async def _look_up(self, peer: str) -> None:
        """Ask once a second until the prefill answers or the attempts are used up; the scheduler waits meanwhile."""
        timeouts = self._rank.timeouts
        try:
            for attempt in range(timeouts.lookup_attempts):
                if attempt:
                    await asyncio.sleep(timeouts.lookup_interval_s)
                self._rank.stall(True)
                try:
                    topology = await self._get(peer, _ANY_RANK)
                    ranks = [await self._get(peer, _RANK.format(rank)) for rank in range(int(topology["dp_size"]))]
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                    continue
                finally:
                    self._rank.stall(False)
                self._found(peer, topology, ranks)
                return
            self._node.peer_unreachable(peer, self._rank.now_s)
        finally:
            self._looking.discard(peer)
            self._rank.poke()

    async def _get(self, peer: str, query: str) -> dict[str, Any]:
        assert self._http is not None
        timeout = aiohttp.ClientTimeout(total=self._rank.timeouts.lookup_timeout_s)
        async with self._http.get(f"http://{peer}/route?{query}", timeout=timeout) as reply:
            if reply.status != 200:
                raise ValueError(f"bootstrap server answered {reply.status}")
            answer: dict[str, Any] = await reply.json()
            return answer

    def _found(self, peer: str, topology: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        options = self._rank.options
        if topology["page_size"] != options.page_size or topology["kv_cache_dtype"] != "auto":
            crash(f"page size mismatch: prefill {topology['page_size']}, decode {options.page_size}")
        if topology["decode_allocation_policy"] != "early":
            self._node.peer_incompatible(peer, "decode_allocation_policy mismatch", self._rank.now_s)
            return
        self._prefills[peer] = _Prefill([f"{rank['rank_ip']}:{rank['rank_port']}" for rank in ranks])
        self._node.peer_known(peer, len(ranks))

    async def _heartbeat(self) -> None:
        """Ask every known prefill's bootstrap server; after too many misses in a row its rooms fail."""
        timeouts = self._rank.timeouts
        while True:
            await asyncio.sleep(timeouts.heartbeat_s)
            for peer, prefill in list(self._prefills.items()):
                if await self._alive(peer):
                    prefill.missed_heartbeats = 0
                    continue
                prefill.missed_heartbeats += 1
                if prefill.missed_heartbeats >= timeouts.heartbeat_failures:
                    self._node.peer_lost(peer, self._rank.now_s)
                    self._rank.poke()

    async def _alive(self, peer: str) -> bool:
        assert self._http is not None
        timeout = aiohttp.ClientTimeout(total=self._rank.timeouts.lookup_timeout_s)
        try:
            async with self._http.get(f"http://{peer}/health", timeout=timeout) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def _from_prefill(self, peer: Peer, frame: Frame) -> None:
        if frame.kind is Kind.ABORT_ACK:
            self._node.abort_acked(frame.room)
            self._rank.poke()

    def _kv(self, peer: Peer, frame: Frame) -> None:
        """A prefill writes KV; the last frame hands the request over with the context that really came."""
        if frame.kind is not Kind.KV:
            return
        job = self._node.awaiting(frame.room)
        if job is not None:
            self._write(job, frame)
            if frame.last:
                self._hand_over(job, frame)
        peer.send(Frame(Kind.KV_ACK, frame.room, start=frame.start, last=frame.last))

    def _write(self, job: Job, frame: Frame) -> None:
        packed = self._arriving.setdefault(job.serial, bytearray(job.prompt_tokens * TOKEN_BYTES))
        at = frame.start * TOKEN_BYTES
        ids = kv_tokens(frame)[: max(0, len(packed) - at)]
        packed[at : at + len(ids)] = ids

    def _hand_over(self, job: Job, frame: Frame) -> None:
        packed = self._arriving.pop(job.serial)
        live = self._rank.live_of(job)
        if live is not None:
            live.output.start(packed, self._rank.sampling_of(live), frame.first_token)
        self._node.kv_arrived(frame.room, frame.cached_tokens, self._rank.now_s)
        self._rank.poke()

    async def close(self) -> None:
        await stop(self._heartbeats)
        self._dialer.close()
        if self._http is not None:
            await self._http.close()
        if self._server is not None:
            self._server.close()


def _room(job: Job) -> int:
    assert job.room is not None
    return job.room
