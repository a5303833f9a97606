"""Publishes an emulated server's KV events over ZMQ, and replays the latest, as SGLang does. A shell."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec
import zmq
import zmq.asyncio

from engines.kv_event_source import server_binds
from engines.kv_events import REPLAY_END, SEQUENCE_BYTES
from engines.tasks import spawn, stop
from engines.types import KvEventSource


class KvEventsConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The value of `--kv-events-config`: SGLang's fields and defaults."""

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    format: str = "default"

    @property
    def on(self) -> bool:
        return self.publisher == "zmq"

    def source(self, block_tokens: int = 1) -> KvEventSource:
        """The same as what a subscriber makes of it."""
        return KvEventSource(self.endpoint, block_tokens, self.topic, self.bind, self.replay_endpoint or "")


def parse_config(text: str) -> KvEventsConfig:
    """The configuration in JSON; ValueError saying what is wrong with it. Empty text: nothing is published."""
    if not text:
        return KvEventsConfig()
    try:
        config = msgspec.json.decode(text.encode(), type=KvEventsConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"--kv-events-config: {error}") from error
    if config.publisher not in ("null", "zmq") or config.format != "default":
        raise ValueError("--kv-events-config: the publisher is null or zmq, the format is default")
    for endpoint in (config.endpoint, config.replay_endpoint or config.endpoint):
        port = endpoint.rpartition(":")[2]
        if not endpoint.startswith(("ipc://", "inproc://")) and not (endpoint.startswith("tcp://") and port.isdigit()):
            raise ValueError(f"--kv-events-config: {endpoint!r} is not tcp://host:port, ipc:// or inproc://")
    return config


def config_of_rank(config: KvEventsConfig, rank: int) -> KvEventsConfig:
    """The same for DP rank `rank`, whose ports are that much higher, as SGLang counts them."""
    if rank == 0:
        return config
    endpoints = [
        _offset(each, rank) if each.startswith("tcp://") else f"{each}_dp{rank}"
        for each in (config.endpoint, config.replay_endpoint or "tcp://*:0")
    ]
    replay = endpoints[1] if config.replay_endpoint else None
    return msgspec.structs.replace(config, endpoint=endpoints[0], replay_endpoint=replay)


def with_port_offset(text: str, offset: int) -> str:
    """The JSON configuration of server number `offset` of a fleet: TCP ports are that much higher."""
    config = parse_config(text)
    config.endpoint = _offset(config.endpoint, offset)
    config.replay_endpoint = _offset(config.replay_endpoint, offset) if config.replay_endpoint else None
    return msgspec.json.encode(config).decode()


def _offset(endpoint: str, offset: int) -> str:
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + offset}" if endpoint.startswith("tcp://") else f"{endpoint}_{offset}"


def _host_port(endpoint: str) -> tuple[str | None, int | None]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return (host, int(port)) if endpoint.startswith("tcp://") else (None, None)


class KvPublisher:
    """One publisher: sends never wait, and are lost to a subscriber that is too slow. Numbers begin at 0."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self.published = 0
        """Batches; the number of the next one."""
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context(io_threads=1)
        self._pub: zmq.Socket[bytes] | None = None
        self._replaying: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Open the sockets; OSError naming the endpoint that cannot be bound."""
        config = self._config
        pub = self._context.socket(zmq.PUB)
        pub.set_hwm(config.hwm)
        pub.setsockopt(zmq.LINGER, 0)
        self._pub = pub
        try:
            if server_binds(config.source()):
                pub.bind(config.endpoint)
            else:
                pub.connect(config.endpoint)
            if config.replay_endpoint:
                router = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
                router.setsockopt(zmq.LINGER, 0)
                self._replaying = spawn(self._replay(router), "emulator-kv-replay")
                router.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"KV events {config.endpoint}, {config.replay_endpoint}: {error}") from error

    def publish(self, payload: bytes) -> None:
        """Send one batch."""
        assert self._pub is not None
        self._pub.send_multipart([self._topic, self.published.to_bytes(SEQUENCE_BYTES, "big"), payload], zmq.NOBLOCK)
        self._kept.append((self.published, payload))
        self.published += 1

    def about(self, page_size_tokens: int, dp_size: int = 1) -> dict[str, object]:
        """What `/server_info` says of it; hosts and ports are empty where an endpoint has none."""
        host, port = _host_port(self._config.endpoint)
        told: dict[str, object] = {
            "publisher": "zmq",
            "endpoint_host": host,
            "endpoint_port_base": port,
            "topic": self._config.topic,
            "block_size": page_size_tokens,
            "dp_size": dp_size,
        }
        if self._config.replay_endpoint:
            told["replay_endpoint_port_base"] = _host_port(self._config.replay_endpoint)[1]
        return told

    async def close(self) -> None:
        """Close the sockets; what was not sent is lost."""
        await stop(self._replaying)
        if self._pub is not None:
            self._pub.close()
        self._context.term()

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        with router:
            while True:
                frames = await router.recv_multipart()
                if len(frames) != 3:
                    continue
                client, first = frames[0], int.from_bytes(frames[2], "big")
                for sequence, payload in tuple(self._kept):
                    if sequence >= first:
                        number = sequence.to_bytes(SEQUENCE_BYTES, "big")
                        await router.send_multipart([client, b"", self._topic, number, payload])
                await router.send_multipart([client, b"", b"", REPLAY_END, b""])
