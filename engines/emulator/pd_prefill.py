"""A prefill rank's connections: decodes' addresses and aborts come in, KV goes out. A shell around `PrefillNode`."""

from __future__ import annotations

import asyncio

from engines.emulator.core import AckAbort, Ended, Event, Job, SendKv
from engines.emulator.prefill_node import PrefillNode
from engines.emulator.rank import Rank, crash
from engines.emulator.transfer import Dialer, Frame, Kind, Peer, kv_payload
from engines.token_rule import TOKEN_BYTES

_MOST_TOP_LOGPROBS = 128
"""What the metadata row of a transfer holds for the first token."""


class PrefillLinks:
    """Moves messages between one scheduler of a prefill and its decodes."""

    def __init__(self, rank: Rank, node: PrefillNode) -> None:
        self._rank = rank
        self._node = node
        self._dialer = Dialer(self._from_decode, self._lost)
        self._unacked: dict[int, list[Job]] = {}
        self._asked: dict[int, Peer] = {}
        self._server: asyncio.Server | None = None
        self.rank_port = 0
        rank.on_event = self.on_event

    async def start(self) -> None:
        """Open the rank port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Peer(self._control), self._rank.options.host, 0)
        self.rank_port = self._server.sockets[0].getsockname()[1]

    def registration(self) -> dict[str, object]:
        """What this rank tells the bootstrap server."""
        options = self._rank.options
        return {
            "attn_tp_size": 1,
            "attn_tp_rank": 0,
            "attn_cp_size": 1,
            "attn_cp_rank": 0,
            "attn_dp_size": 1,
            "attn_dp_rank": 0,
            "pp_size": 1,
            "pp_rank": 0,
            "system_dp_size": options.dp_size,
            "system_dp_rank": self._rank.number,
            "rank_ip": options.host,
            "rank_port": self.rank_port,
            "page_size": options.page_size,
            "kv_cache_dtype": "auto",
            "kv_layout": None,
            "dsv41_spec_layout": None,
            "load_balance_method": "follow_bootstrap_room",
            "enable_dsa_cache_layer_split": False,
            "enable_kv_cache_sharding": False,
            "prefill_http_port": options.port,
            "decode_allocation_policy": "early",
        }

    def on_event(self, event: Event) -> None:
        """Act on what the scheduler says."""
        if isinstance(event, SendKv):
            self._send_kv(event)
        elif isinstance(event, AckAbort):
            peer = self._asked.pop(event.room, None)
            if peer is not None:
                peer.send(Frame(Kind.ABORT_ACK, event.room))
        elif isinstance(event, Ended) and event.job.room is not None:
            jobs = self._unacked.get(event.job.room, [])
            if event.job in jobs:
                jobs.remove(event.job)
            if not jobs:
                self._unacked.pop(event.job.room, None)

    def _send_kv(self, send: SendKv) -> None:
        job = send.job
        live = self._rank.live_of(job)
        if live is None or job.room is None:
            return
        if send.last and live.item.beyond_vocabulary:
            crash("a prompt id is outside the vocabulary")
        if send.last and not -(2**63) <= job.room < 2**63:
            crash(f"room {job.room} does not fit its cell of the metadata row")
        if send.last and live.item.sampling.top_logprobs > _MOST_TOP_LOGPROBS:
            crash(f"{live.item.sampling.top_logprobs} top logprobs do not fit the metadata row")
        stop = send.stop
        if send.last and self._rank.faults.take("abort_in_200"):
            live.fault = "abort_in_200"
            stop = (send.start + stop) // 2
        partial = send.last and self._rank.faults.take("partial_kv") is not None
        if partial:
            stop = (send.start + stop) // 2
        jobs = self._unacked.setdefault(job.room, [])
        if job not in jobs:
            jobs.append(job)
        ids = job.prompt[send.start * TOKEN_BYTES : stop * TOKEN_BYTES]
        frame = Frame(
            Kind.KV,
            job.room,
            start=send.start,
            count=stop - send.start,
            first_token=live.output.ids[0] if send.last else 0,
            cached_tokens=job.cached_tokens,
            last=send.last and not partial,
            payload=kv_payload(ids, self._rank.options.kv_bytes_per_token),
        )
        self._dialer.send(job.peer, frame)
        if partial:
            self._failed(job)

    def _control(self, peer: Peer, frame: Frame) -> None:
        """A decode says something."""
        if frame.kind is Kind.ADDRESSES:
            destination = frame.payload.decode()
            destination = self._rank.options.kv_via.get(destination, destination)
            self._node.addresses(frame.room, destination, self._rank.now_s)
        elif frame.kind is Kind.ABORT:
            self._asked[frame.room] = peer
            self._node.peer_abort(frame.room, self._rank.now_s)
        self._rank.poke()

    def _from_decode(self, peer: Peer, frame: Frame) -> None:
        """A decode acknowledges KV."""
        if frame.kind is not Kind.KV_ACK or not frame.last:
            return
        jobs = self._unacked.get(frame.room)
        if jobs:
            self._node.transfer_acked(jobs.pop(0), self._rank.now_s)
            self._rank.poke()

    def _lost(self, address: str) -> None:
        """The connection to a decode is gone: what it had not acknowledged failed."""
        for jobs in list(self._unacked.values()):
            for job in [job for job in jobs if job.peer == address]:
                self._failed(job)

    def _failed(self, job: Job) -> None:
        self._node.transfer_failed(job, f"Failed to send kv chunk of {job.room} to {job.peer}", self._rank.now_s)
        self._rank.poke()

    async def close(self) -> None:
        self._dialer.close()
        if self._server is not None:
            self._server.close()
