"""The engine of one server: registered requests, and the DP ranks that run them. A shell.

Holds, faults and the registry of rids belong to the whole server; scheduler, KV and radix cache to each rank.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from datetime import UTC, datetime

from engines.emulator.config import Options
from engines.emulator.core import Timeouts
from engines.emulator.faults import Faults, Hold, Holds
from engines.emulator.live import Finished, Live, finished
from engines.emulator.rank import Rank, Shared
from engines.types import Role

_REMEMBERED_REQUESTS = 1000
_ATTENTION_RANK = 0
"""What every rank takes for its own number when it compares it with a room's.

SGLang 0.5.23 looks at the rank of DP attention, which is 0 on all of them where only `--dp-size` is set: rooms of other
ranks fail unless the prefill's body names `disagg_prefill_dp_rank`.
"""


class Engine:
    """Registers requests and gives each to a rank; everything happens in one event loop."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.wall_offset_s = datetime.now(UTC).timestamp() - self.loop.time()
        self.timeouts = Timeouts().set_by(os.environ).faster(options.speed)
        self.holds = Holds()
        self.faults = Faults()
        self.live: dict[str, Live] = {}
        self.recent: deque[Finished] = deque(maxlen=_REMEMBERED_REQUESTS)
        self.requests_total = 0
        self.prompt_tokens_total = 0
        self.aborted_total = 0
        self.secret = options.sampling_secret or secrets.token_bytes(32)
        shared = Shared(options, self.timeouts, self.secret, self.holds, self.faults, self._ended)
        self.ranks = [Rank(number, shared) for number in range(options.dp_size)]
        self._turn = 0
        self.faults.on_change = self._faults_changed

    @property
    def now_s(self) -> float:
        return self.loop.time()

    def wall_s(self, loop_s: float) -> float:
        """The Unix time of a moment of the loop's clock."""
        return loop_s + self.wall_offset_s

    def submit(self, live: Live) -> None:
        """Register `live` and give it to its rank."""
        self.live[live.rid] = live
        self.requests_total += 1
        self.prompt_tokens_total += live.job.prompt_tokens
        rank = self._rank_for(live)
        live.dp_rank = rank.number if self.options.dp_size > 1 else None
        rank.submit(live)

    def _rank_for(self, live: Live) -> Rank:
        """By SGLang's balance method `auto`: the rank asked for, else a prefill follows the room, others take turns."""
        size, item, job = self.options.dp_size, live.item, live.job
        if size == 1:
            return self.ranks[0]
        if self.options.role is not Role.PREFILL:
            if item.routed_dp_rank is not None:
                return self.ranks[item.routed_dp_rank]
            self._turn += 1
            return self.ranks[(self._turn - 1) % size]
        room_rank = (job.room or 0) % size
        if job.prefill_rank is None and room_rank != _ATTENTION_RANK:
            job.failure = _room_conflict(job.room or 0, size)
        return self.ranks[room_rank if item.routed_dp_rank is None else item.routed_dp_rank]

    def abort(self, rid: str, everything: bool = False) -> None:
        """SGLang's abort: lost unless `rid` is registered, then it hits every rid that starts with it, on any rank."""
        if everything or (rid and rid in self.live):
            for rank in self.ranks:
                rank.abort("" if everything else rid)

    def release(self, hold: Hold) -> None:
        """Release a hold, and let what it held go on."""
        job = self.holds.release(hold)
        if job is not None and hold.resume is not None:
            hold.resume()
        elif job is not None:
            self.ranks[self.live[job.rid].dp_rank or 0].release_hold(job)

    def _faults_changed(self) -> None:
        """Let every rank have the faults that stand now."""
        standing = self.faults.standing
        for rank in self.ranks:
            rank.stuck = bool(standing("stuck"))
            rank.pause_s = sum(fault.pause_s for fault in standing("slow_scheduler"))
            rank.node.pool.leak(sum(fault.tokens for fault in standing("leak")))
            rank.poke()

    def _ended(self, live: Live) -> None:
        del self.live[live.rid]
        self.holds.forget(live.job)
        if live.end is not None and live.end.message:
            self.aborted_total += 1
        self.recent.append(finished(live))


def _room_conflict(room: int, dp_size: int) -> str:
    return (
        f"follow_bootstrap_room conflict: dispatched to dp_rank {_ATTENTION_RANK} but bootstrap_room {room} implies"
        f" dp_rank {room % dp_size}. Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing."
    )
