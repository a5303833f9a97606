"""A prefill's connections: decodes' addresses and aborts come in, KV goes out. A shell around `PrefillNode`."""

from __future__ import annotations

import asyncio

from engines.emulator.core import AckAbort, Ended, Event, Job, SendKv
from engines.emulator.engine import Engine
from engines.emulator.prefill_node import PrefillNode
from engines.emulator.transfer import Dialer, Frame, Kind, Peer, kv_payload
from engines.token_rule import TOKEN_BYTES


class PrefillLinks:
    """Moves messages between a prefill's scheduler and its decodes."""

    def __init__(self, engine: Engine, node: PrefillNode) -> None:
        self._engine = engine
        self._node = node
        self._dialer = Dialer(self._from_decode, self._lost)
        self._unacked: dict[int, list[Job]] = {}
        self._asked: dict[int, Peer] = {}
        self._server: asyncio.Server | None = None
        self.rank_port = 0
        engine.on_event = self.on_event

    async def start(self) -> None:
        """Open the rank port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Peer(self._control), self._engine.options.host, 0)
        self.rank_port = self._server.sockets[0].getsockname()[1]

    def registration(self) -> dict[str, object]:
        """What this rank tells the bootstrap server."""
        options = self._engine.options
        return {
            "attn_tp_size": 1,
            "attn_tp_rank": 0,
            "attn_cp_size": 1,
            "attn_cp_rank": 0,
            "attn_dp_size": 1,
            "attn_dp_rank": 0,
            "pp_size": 1,
            "pp_rank": 0,
            "system_dp_size": 1,
            "system_dp_rank": 0,
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
        live = self._engine.live_of(job)
        if live is None or job.room is None:
            return
        stop = send.stop
        if send.last and self._engine.faults.take("abort_in_200"):
            live.fault = "abort_in_200"
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
            last=send.last,
            payload=kv_payload(ids, self._engine.options.kv_bytes_per_token),
        )
        self._dialer.send(job.peer, frame)

    def _control(self, peer: Peer, frame: Frame) -> None:
        """A decode says something."""
        if frame.kind is Kind.ADDRESSES:
            self._node.addresses(frame.room, frame.payload.decode(), self._engine.now_s)
        elif frame.kind is Kind.ABORT:
            self._asked[frame.room] = peer
            self._node.peer_abort(frame.room, self._engine.now_s)
        self._engine.poke()

    def _from_decode(self, peer: Peer, frame: Frame) -> None:
        """A decode acknowledges KV."""
        if frame.kind is not Kind.KV_ACK or not frame.last:
            return
        jobs = self._unacked.get(frame.room)
        if jobs:
            self._node.transfer_acked(jobs[0], self._engine.now_s)
            self._engine.poke()

    def _lost(self, address: str) -> None:
        """The connection to a decode is gone: what it had not acknowledged failed."""
        for room, jobs in list(self._unacked.items()):
            for job in [job for job in jobs if job.peer == address]:
                self._node.transfer_failed(job, f"Failed to send kv chunk of {room} to {address}", self._engine.now_s)
        self._engine.poke()

    async def close(self) -> None:
        self._dialer.close()
        if self._server is not None:
            self._server.close()
