"""Every knob of `pdgate serve`: default, unit, meaning and check, each written once.

Pure. Flags that sglang-router has too mean the same here; its other flags are refused by name, never ignored.
To add a knob: one field, one line in `add_serve_arguments`, one in `from_args`, and code that reads it; those about
limits and retries are in `gateway/limit_flags.py`, about broken streams in `gateway/failover_flags.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from engines.timing import H100_70B, PROFILES, EngineProfile
from engines.types import EngineId, EngineSpec, Role
from gateway import failover_flags, limit_flags, redis_flags
from gateway.failover_flags import DEFAULT_FAILOVER, FailoverConfig
from gateway.flag_kinds import add, seconds, seconds_or_0, whole
from gateway.limit_flags import DEFAULT_DEADLINES, DEFAULT_QUEUE, DEFAULT_RETRY
from gateway.limit_flags import DeadlineConfig as DeadlineConfig
from gateway.limit_flags import QueueConfig as QueueConfig
from gateway.limit_flags import RetryConfig as RetryConfig
from gateway.refused_flags import REFUSED_FLAGS, Refuse

MAX_PROBE_INTERVAL_S = 4.0
"""A prefill whose bootstrap server was not seen for 5 s gets no new rooms."""
DEFAULT_BOOTSTRAP_PORT = 8998
"""SGLang's own default; it is always sent, because a server that is told no port assumes its own."""

POLICIES = ("cost", "random", "round_robin", "power_of_two", "cache_aware")
_POLICIES_MISSING = ("manual", "bucket")
LOG_LEVELS = ("debug", "info", "warn", "error")


class ConfigError(ValueError):
    """The command line cannot be served; the message says what to change."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where clients are answered. `api_key`: sent to every engine; clients must send it too.

    `advertise_url`: where other gateways reach this very one; None: where it listens, if that is an address.
    """

    host: str = "0.0.0.0"
    port: int = 30000
    max_payload_bytes: int = 536_870_912
    api_key: str | None = field(default=None, repr=False)
    log_level: str = "info"
    advertise_url: str | None = None


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The servers, at least one of each role, and how often each is asked how it is."""

    prefills: tuple[EngineSpec, ...] = ()
    decodes: tuple[EngineSpec, ...] = ()
    probe_interval_s: float = 2.0
    canary_interval_s: float = 30.0
    """An idle pair's servers move a canary's KV as often as this at most; 0: only pairs in trouble do."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How pairs are chosen. Where `prefill_policy` or `decode_policy` is given, each side is chosen by itself.

    `seed` fixes how ties break; None draws one. `profile` is what is assumed of servers until they are measured.
    """

    policy: str = "cost"
    prefill_policy: str | None = None
    decode_policy: str | None = None
    seed: int | None = None
    profile: EngineProfile = H100_70B

    @property
    def shown(self) -> str:
        """The policy in words: one name, or one for each side where they choose separately."""
        if self.prefill_policy is None and self.decode_policy is None:
            return self.policy
        return f"{self.prefill_policy or self.policy} (prefill) and {self.decode_policy or self.policy} (decode)"


@dataclass(frozen=True, slots=True)
class ExplainConfig:
    """How many of the latest decisions are kept for `explain`."""

    ring: int = 1000


@dataclass(frozen=True, slots=True)
class OwnershipStoreConfig:
    """Where prefix ownership is kept. `url` None: a private Redis; "memory": in this process alone.

    `namespace` names the fleet: gateways of one fleet share it, and one Redis may serve several fleets.
    """

    url: str | None = field(default=None, repr=False)
    namespace: str = "default"
    memory_bytes: int = 256 << 20
    """Of a private Redis: what is beyond that it refuses."""


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Where the model's tokenizer lies (a folder, or tokenizer.json), and a chat template that overrides its own."""

    path: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """All of it. `notes` are lines the operator is shown at the start."""

    server: ServerConfig = ServerConfig()
    fleet: FleetConfig = FleetConfig()
    routing: RoutingConfig = RoutingConfig()
    queue: QueueConfig = DEFAULT_QUEUE
    deadlines: DeadlineConfig = DEFAULT_DEADLINES
    retry: RetryConfig = DEFAULT_RETRY
    failover: FailoverConfig = DEFAULT_FAILOVER
    explain: ExplainConfig = ExplainConfig()
    ownership: OwnershipStoreConfig = OwnershipStoreConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    notes: tuple[str, ...] = ()


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `pdgate serve` on `parser`."""
    base = Config()
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--pd-disaggregation", action="store_true", help="serve prefill/decode pairs (required)")
    fleet.add_argument(
        "--prefill",
        nargs="+",
        action="append",
        default=[],
        metavar=("URL", "BOOTSTRAP_PORT"),
        help=f"a prefill server and its bootstrap port (default {DEFAULT_BOOTSTRAP_PORT}); may be given again",
    )
    fleet.add_argument(
        "--decode", action="append", default=[], metavar="URL", help="a decode server; may be given again"
    )
    add(fleet, "--probe-interval-secs", _probe_interval, base.fleet.probe_interval_s, "how often each server is probed")
    canary_s = base.fleet.canary_interval_s
    add(
        fleet,
        "--canary-interval-secs",
        seconds_or_0,
        canary_s,
        "how often an idle server moves a canary's KV; 0: never",
    )

    server = parser.add_argument_group("server")
    add(server, "--host", str, base.server.host, "address to listen on")
    add(server, "--port", whole(0, 65535), base.server.port, "port to listen on; 0 takes a free one")
    add(server, "--max-payload-size", whole(1), base.server.max_payload_bytes, "largest request body, in bytes")
    add(server, "--api-key", str, None, "key sent to every engine, and asked of clients")
    add(server, "--log-level", str, base.server.log_level, "least severe level logged", choices=LOG_LEVELS)
    add(
        server,
        "--advertise-url",
        redis_flags.advertise_url,
        None,
        "http://HOST:PORT at which other gateways of this fleet reach this very one (default: where it listens)",
    )

    routing = parser.add_argument_group("routing")
    add(routing, "--policy", _policy, base.routing.policy, f"how pairs are chosen: {', '.join(POLICIES)}")
    add(routing, "--prefill-policy", _policy, None, "the same for prefills alone")
    add(routing, "--decode-policy", _policy, None, "the same for decodes alone")
    add(routing, "--seed", int, base.routing.seed, "fixes how ties break (default: drawn at start)")
    add(
        routing,
        "--profile",
        str,
        base.routing.profile.name,
        "what servers are assumed to be like until measured",
        choices=tuple(PROFILES),
    )
    add(routing, "--explain-ring", whole(1), base.explain.ring, "latest decisions kept for `explain`")

    _add_ownership_arguments(parser.add_argument_group("prefix ownership"), base)

    limit_flags.add_limit_arguments(parser.add_argument_group("limits"))
    failover_flags.add_arguments(parser.add_argument_group("failover"))

    for flag, advice in REFUSED_FLAGS.items():
        parser.add_argument(flag, action=Refuse, nargs="*", help=argparse.SUPPRESS, const=advice)


def _add_ownership_arguments(group: Any, base: Config) -> None:
    add(
        group,
        "--redis-url",
        redis_flags.redis_url_or_memory,
        None,
        "Redis that all gateways of this fleet share: redis:// or rediss:// (a Cluster is noticed), unix://, or "
        "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE; memory: in this process (default: a private Redis)",
    )
    add(
        group,
        "--redis-namespace",
        redis_flags.namespace,
        base.ownership.namespace,
        "names this fleet within that Redis",
    )
    add(group, "--redis-max-bytes", redis_flags.size_bytes, base.ownership.memory_bytes, "bound of a private Redis")
    add(group, "--tokenizer-path", str, None, "the model's Hugging Face folder or tokenizer.json: exact token counts")
    add(group, "--chat-template", str, None, "a Jinja file used instead of the tokenizer's own chat template")


def from_args(args: argparse.Namespace) -> Config:
    """The configuration that parsed arguments ask for; raises ConfigError."""
    if not args.pd_disaggregation:
        raise ConfigError("add --pd-disaggregation: pdgate serves prefill/decode pairs only (yet)")
    routing, notes = _routing(args)
    return Config(
        server=_server(args),
        fleet=_fleet(args),
        routing=routing,
        queue=limit_flags.queue_config(args),
        deadlines=limit_flags.deadline_config(args),
        retry=limit_flags.retry_config(args),
        failover=failover_flags.from_args(args),
        explain=ExplainConfig(args.explain_ring),
        ownership=OwnershipStoreConfig(args.redis_url, args.redis_namespace, args.redis_max_bytes),
        tokenizer=_tokenizer(args),
        notes=notes + _unused(args),
    )


def _server(args: argparse.Namespace) -> ServerConfig:
    place = (args.host.strip("[]"), args.port)
    return ServerConfig(*place, args.max_payload_size, args.api_key, args.log_level, args.advertise_url)


def _routing(args: argparse.Namespace) -> tuple[RoutingConfig, tuple[str, ...]]:
    wanted = (args.policy, args.prefill_policy, args.decode_policy)
    policy, prefill, decode = ("cost" if name == "cache_aware" else name for name in wanted)
    notes = []
    if "cache_aware" in wanted:
        notes.append("policy cache_aware runs as cost, which weighs cached prefixes against queues in seconds")
    return RoutingConfig(policy, prefill, decode, args.seed, PROFILES[args.profile]), tuple(notes)


def _unused(args: argparse.Namespace) -> tuple[str, ...]:
    base = OwnershipStoreConfig()
    return redis_flags.notes(
        args.redis_url,
        args.redis_namespace != base.namespace,
        args.redis_max_bytes != base.memory_bytes,
        args.advertise_url is not None,
    )


def _tokenizer(args: argparse.Namespace) -> TokenizerConfig:
    if args.chat_template is not None and args.tokenizer_path is None:
        raise ConfigError("--chat-template is of no use without --tokenizer-path: add it, or remove this")
    return TokenizerConfig(args.tokenizer_path, args.chat_template)


# -- the fleet ------------------------------------------------------------------------------------------------------


def _fleet(args: argparse.Namespace) -> FleetConfig:
    prefills = tuple(_prefill(given) for given in args.prefill)
    decodes = tuple(_decode(url) for url in args.decode)
    for specs, role in ((prefills, Role.PREFILL), (decodes, Role.DECODE)):
        if not specs:
            raise ConfigError(f"add at least one --{role} URL")
    seen: dict[tuple[str | None, int | None], Role] = {}
    for spec in prefills + decodes:
        parts = urlsplit(spec.url)
        place = (parts.hostname, parts.port)
        if place in seen:
            both = "twice" if seen[place] is spec.role else f"as --{seen[place]} and as --{spec.role}"
            raise ConfigError(f"{spec.url} is given {both}: each server has one role and is named once")
        seen[place] = spec.role
    return FleetConfig(prefills, decodes, args.probe_interval_secs, args.canary_interval_secs)


def _prefill(given: Sequence[str]) -> EngineSpec:
    if len(given) > 2:
        raise ConfigError(f"--prefill takes a URL and a bootstrap port, not {len(given)} words: {' '.join(given)}")
    url, parts = _url("--prefill", given[0])
    host = parts.hostname or ""
    return EngineSpec(
        engine_id=EngineId(url),
        url=url,
        role=Role.PREFILL,
        # IPv6 stays bracketed: SGLang joins host and port by plain concatenation.
        bootstrap_host=f"[{host}]" if ":" in host else host,
        bootstrap_port=_bootstrap_port(given[1]) if len(given) == 2 else DEFAULT_BOOTSTRAP_PORT,
    )


def _decode(given: str) -> EngineSpec:
    url, _ = _url("--decode", given)
    return EngineSpec(engine_id=EngineId(url), url=url, role=Role.DECODE)


def _bootstrap_port(text: str) -> int:
    if text.lower() == "none":
        return DEFAULT_BOOTSTRAP_PORT
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ConfigError(f"--prefill: bootstrap port {text!r} must be a number from 1 to 65535, or none")
    return int(text)


def _url(flag: str, text: str) -> tuple[str, SplitResult]:
    """(the URL without trailing slash, its parts); refuses what is not http://host:port."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}") from None
    if parts.scheme != "http" or not parts.hostname or port is None or port == 0:
        raise ConfigError(f"{flag} {text}: must be http://HOST:PORT")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{flag} {text}: must be http://HOST:PORT and nothing more")
    return text.rstrip("/"), parts


# -- reading flags --------------------------------------------------------------------------------------------------


def _probe_interval(text: str) -> float:
    value = seconds(text)
    if value > MAX_PROBE_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_PROBE_INTERVAL_S:g} seconds")
    return value


def _policy(text: str) -> str:
    if text in _POLICIES_MISSING:
        raise argparse.ArgumentTypeError(
            f"policy {text} of sglang-router is not built yet; use one of {', '.join(POLICIES)}"
        )
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(f"unknown policy {text!r}; use one of {', '.join(POLICIES)}")
    return text
