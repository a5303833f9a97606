"""The options of one emulated server, from its command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.emulator.kv_publisher import parse_config
from engines.timing import PROFILES, EngineProfile
from engines.types import Role


@dataclass(frozen=True, slots=True)
class Options:
    """What one emulated server was started with; the fields are SGLang's flags of the same names where it has them."""

    role: Role
    port: int
    dp_size: int = 1
    host: str = "127.0.0.1"
    bootstrap_port: int = 8998
    speed: float = 1.0
    profile: EngineProfile = PROFILES["tiny"]
    model: str = "emulated"
    max_total_tokens: int = 65_536
    page_size: int = 1
    random_seed: int = 0
    context_length: int = 32_768
    chunked_prefill_size: int = 2048
    max_running_requests: int = 256
    disable_radix_cache: bool = False
    enable_cache_report: bool = False
    kv_bytes_per_token: int = 16
    api_key: str = ""
    transfer_backend: str = "mooncake_tcp"
    kv_events_config: str = ""
    sampling_defaults: str = "model"
    enable_deterministic_inference: bool = False
    sampling_secret: bytes = b""
    """What keys sampled answers; a new one at each start where it is empty."""
    incremental_streaming_output: bool = False
    reasoning_parser: str = ""
    chat_template: str = ""
    kv_port: int = 0
    kv_via: Mapping[str, str] = field(default_factory=dict)
    launch_command: str = ""

    @property
    def disaggregation_mode(self) -> str:
        """SGLang's word for the role."""
        return "null" if self.role is Role.PLAIN else self.role.value


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of one server; sizes left out come from the profile."""
    parser.add_argument("--bootstrap-port", type=int, default=8998, help="port of a prefill's bootstrap server")
    parser.add_argument(
        "--kv-port", type=int, default=0, help="where a decode takes KV; of DP rank i it is i higher (default: any)"
    )
    parser.add_argument(
        "--kv-via",
        type=_by_way,
        action="append",
        default=[],
        metavar="HOST:PORT=HOST:PORT",
        help="a prefill sends KV for a decode's address to another one, of a proxy between them; repeatable",
    )
    add_model_arguments(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all servers of a fleet share."""
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--speed", type=float, default=1.0, help="how many times faster than real time, timeouts included")
    add("--profile", choices=sorted(PROFILES), default="tiny", help="timing and sizes of the emulated server")
    add("--model", default="emulated", help="served model name")
    add("--max-total-tokens", type=int, help="KV pool in tokens")
    add("--page-size", type=int)
    add("--random-seed", type=int)
    add("--dp-size", type=int, help="DP ranks of a server, each with its own scheduler and KV pool")
    add("--context-length", type=int)
    add("--chunked-prefill-size", type=int, help="new tokens of one prefill forward")
    add("--max-running-requests", type=int)
    add("--disable-radix-cache", action="store_true")
    add("--enable-cache-report", action="store_true", help="report cached tokens in usage")
    add("--kv-bytes-per-token", type=int, default=16, help="bytes really sent per token of KV, at least 4")
    add("--api-key", default="")
    add("--transfer-backend", default="mooncake_tcp", choices=["mooncake_tcp", "mooncake", "nixl"])
    add("--sampling-defaults", default="model", choices=["openai", "model"], help="where chats take what they omit")
    add("--enable-deterministic-inference", action="store_true", help="sampled answers depend on their seed alone")
    add("--sampling-secret", type=bytes.fromhex, default=b"", metavar="HEX", help="keys sampled answers over restarts")
    add("--incremental-streaming-output", action="store_true", help="events of /generate do not repeat what came")
    add("--reasoning-parser", default="", help="only reported; the model does not reason")
    add("--chat-template", default="", help="only reported; the model has one template")
    add(
        "--kv-events-config",
        default="",
        metavar="JSON",
        help="publish KV events, SGLang's argument (publisher, endpoint, replay_endpoint, ...); in a fleet, the ports"
        " of server number i are i higher (counted from 0 over prefills and plain servers; decodes publish nothing)",
    )


def _by_way(text: str) -> tuple[str, str]:
    """An address, and the one to go to instead."""
    address, equals, way = text.partition("=")
    if not equals:
        raise ValueError(text)
    return address, way


def options_from(args: argparse.Namespace, role: Role, port: int, random_seed: int, command: str) -> Options:
    """The options that parsed `args` mean; ValueError for sizes that cannot be."""
    profile = PROFILES[args.profile]
    options = Options(
        role=role,
        port=port,
        dp_size=args.dp_size or 1,
        host=args.host,
        bootstrap_port=args.bootstrap_port,
        speed=args.speed,
        profile=profile,
        model=args.model,
        max_total_tokens=args.max_total_tokens or profile.max_total_tokens,
        page_size=args.page_size or profile.page_size_tokens,
        random_seed=random_seed if args.random_seed is None else args.random_seed,
        context_length=args.context_length or profile.context_tokens,
        chunked_prefill_size=args.chunked_prefill_size or profile.prefill.chunk_tokens,
        max_running_requests=args.max_running_requests or profile.max_running_requests,
        disable_radix_cache=args.disable_radix_cache or role is Role.DECODE,
        enable_cache_report=args.enable_cache_report,
        kv_bytes_per_token=args.kv_bytes_per_token,
        api_key=args.api_key,
        transfer_backend=args.transfer_backend,
        kv_events_config=args.kv_events_config,
        sampling_defaults=args.sampling_defaults,
        enable_deterministic_inference=args.enable_deterministic_inference,
        sampling_secret=args.sampling_secret,
        incremental_streaming_output=args.incremental_streaming_output,
        reasoning_parser=args.reasoning_parser,
        chat_template=args.chat_template,
        kv_port=args.kv_port,
        kv_via=dict(args.kv_via),
        launch_command=command,
    )
    parse_config(options.kv_events_config)
    if options.speed <= 0:
        raise ValueError("--speed must be positive")
    if options.kv_bytes_per_token < 4:
        raise ValueError("--kv-bytes-per-token must be at least 4: KV carries the token ids")
    sizes = (options.page_size, options.chunked_prefill_size, options.context_length, options.max_total_tokens)
    if min(*sizes, options.dp_size) < 1:
        raise ValueError("sizes must be positive")
    return options
