"""The knobs of `pdgate serve`: defaults, meanings, and every refusal by name."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from engines.timing import H100_70B, TINY
from engines.types import EngineId, EngineSpec, Role
from gateway import redis_flags
from gateway.config import (
    POLICIES,
    REFUSED_FLAGS,
    Config,
    ConfigError,
    FleetConfig,
    add_serve_arguments,
    from_args,
)

FLEET = "--pd-disaggregation --prefill http://p0:30000 8997 --decode http://d0:30001"


def config(line: str) -> Config:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_arguments(parser)
    return from_args(parser.parse_args(line.split()))


def usage_error(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        config(line)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_the_defaults_of_the_flags_are_those_of_the_tree() -> None:
    read = config(FLEET)
    assert read == Config(fleet=FleetConfig(read.fleet.prefills, read.fleet.decodes))
    assert read.routing.profile is H100_70B


def test_the_defaults_are_those_of_sglang_router_where_it_has_the_flag() -> None:
    read = config(FLEET)
    assert (read.server.host, read.server.port, read.server.log_level) == ("0.0.0.0", 30000, "info")
    assert read.server.max_payload_bytes == 536870912
    assert read.server.api_key is None
    assert (read.deadlines.request_s, read.deadlines.shutdown_grace_s, read.queue.timeout_s) == (1800, 180, 60)


def test_the_fleet() -> None:
    fleet = config(FLEET).fleet
    assert fleet.prefills == (EngineSpec(EngineId("http://p0:30000"), "http://p0:30000", Role.PREFILL, "p0", 8997),)
    assert fleet.decodes == (EngineSpec(EngineId("http://d0:30001"), "http://d0:30001", Role.DECODE),)


@pytest.mark.parametrize(
    ("prefill", "host", "port"),
    [
        ("http://p0:1", "p0", 8998),
        ("http://p0:1 none", "p0", 8998),
        ("http://p0:1 None", "p0", 8998),
        ("http://p0:1/ 9", "p0", 9),
        ("http://[::1]:1 9", "[::1]", 9),
    ],
)
def test_bootstrap_addresses(prefill: str, host: str, port: int) -> None:
    (spec,) = config(f"--pd-disaggregation --decode http://d0:2 --prefill {prefill}").fleet.prefills
    assert (spec.bootstrap_host, spec.bootstrap_port) == (host, port)
    assert not spec.url.endswith("/")
    assert spec.engine_id == spec.url


def test_many_servers_keep_their_order() -> None:
    fleet = config(f"{FLEET} --prefill http://p1:1 --decode http://d1:1 --prefill http://p2:1 7").fleet
    assert [spec.url for spec in fleet.prefills] == ["http://p0:30000", "http://p1:1", "http://p2:1"]
    assert [spec.url for spec in fleet.decodes] == ["http://d0:30001", "http://d1:1"]


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        ("--host ::", "server.host", "::"),
        ("--port 0", "server.port", 0),
        ("--max-payload-size 5", "server.max_payload_bytes", 5),
        ("--api-key k", "server.api_key", "k"),
        ("--log-level warn", "server.log_level", "warn"),
        ("--probe-interval-secs 0.5", "fleet.probe_interval_s", 0.5),
        ("--policy random", "routing.policy", "random"),
        ("--policy random", "routing.prefill_policy", None),
        ("--policy random", "routing.decode_policy", None),
        ("--prefill-policy round_robin", "routing.prefill_policy", "round_robin"),
        ("--prefill-policy round_robin", "routing.decode_policy", None),
        ("--decode-policy power_of_two", "routing.decode_policy", "power_of_two"),
        ("--seed 7", "routing.seed", 7),
        ("--profile tiny", "routing.profile", TINY),
        ("--queue-max-requests 0", "queue.max_requests", 0),
        ("--queue-max-bytes 9", "queue.max_bytes", 9),
        ("--queue-timeout-secs 9", "queue.timeout_s", 9),
        ("--request-timeout-secs 9", "deadlines.request_s", 9),
        ("--first-token-timeout-secs 9", "deadlines.first_output_s", 9),
        ("--first-token-floor-secs 9", "deadlines.first_output_floor_s", 9),
        ("--first-token-hold-secs 0", "deadlines.hold_s", 0),
        ("--stall-timeout-secs 9", "deadlines.stall_s", 9),
        ("--stall-floor-secs 0.5", "deadlines.stall_floor_s", 0.5),
        ("--shutdown-grace-period-secs 0", "deadlines.shutdown_grace_s", 0),
        ("--max-attempts 1", "retry.max_attempts", 1),
        ("--retry-budget-ratio 0", "retry.budget_ratio", 0),
        ("--retry-prefill-chunks 1", "retry.prefill_chunks", 1),
        ("--explain-ring 5", "explain.ring", 5),
    ],
)
def test_every_flag_sets_its_field(flags: str, path: str, value: Any) -> None:
    read: Any = config(f"{FLEET} {flags}")
    for name in path.split("."):
        read = getattr(read, name)
    assert read == value


@pytest.mark.parametrize("flag", ["--policy", "--prefill-policy", "--decode-policy"])
def test_cache_aware_runs_cost_and_says_so_once(flag: str) -> None:
    read = config(f"{FLEET} {flag} cache_aware")
    assert "cost" in (read.routing.policy, read.routing.prefill_policy, read.routing.decode_policy)
    assert "cache_aware" not in (read.routing.policy, read.routing.prefill_policy, read.routing.decode_policy)
    (note,) = read.notes
    assert "cache_aware runs as cost" in note
    assert config(FLEET).notes == ()


@pytest.mark.parametrize("flag", ["--policy manual", "--prefill-policy bucket", "--policy fastest"])
def test_policies_that_do_not_exist(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = usage_error(f"{FLEET} {flag}", capsys)
    assert flag.split()[1] in error
    assert all(policy in error for policy in POLICIES)


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_flags_of_sglang_router_are_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given in (flag, f"{flag} 1", f"{flag}=1"):
        error = usage_error(f"{FLEET} {given}", capsys)
        assert f"{flag} is a flag of sglang-router that pdgate does not have (yet): {REFUSED_FLAGS[flag]}" in error


def test_refused_flags_are_a_whole_list() -> None:
    """sglang-router 0.3.2 has 98 flags: what is not refused is served."""
    parser = argparse.ArgumentParser(add_help=False)
    add_serve_arguments(parser)
    shared = {
        *("--host", "--port", "--policy", "--prefill-policy", "--decode-policy", "--max-payload-size", "--prefill"),
        *("--pd-disaggregation", "--decode", "--log-level", "--request-timeout-secs", "--queue-timeout-secs"),
        *("--shutdown-grace-period-secs", "--api-key", "--redis-url", "--tokenizer-path", "--chat-template"),
    }
    flags = set(parser._option_string_actions)
    assert shared <= flags
    assert len(shared) + len(REFUSED_FLAGS) == 98
    assert not shared & set(REFUSED_FLAGS)


def test_unknown_flags_and_abbreviations_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: --nonsense" in usage_error(f"{FLEET} --nonsense", capsys)
    assert "unrecognized arguments: --polic" in usage_error(f"{FLEET} --polic cost", capsys)


@pytest.mark.parametrize(
    "flag",
    [
        "--port 65536",
        "--port -1",
        "--port x",
        "--max-attempts 0",
        "--retry-budget-ratio -0.1",
        "--retry-budget-ratio nan",
        "--retry-prefill-chunks 0",
        "--stall-floor-secs 0",
        "--queue-max-requests -1",
        "--stall-timeout-secs 0",
        "--stall-timeout-secs inf",
        "--stall-timeout-secs nan",
        "--shutdown-grace-period-secs -1",
        "--profile cray",
        "--log-level loud",
        "--max-payload-size 1.5",
    ],
)
def test_values_out_of_range(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flag.split()[0] in usage_error(f"{FLEET} {flag}", capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--prefill http://p:1 --decode http://d:1", "--pd-disaggregation"),
        ("--pd-disaggregation --decode http://d:1", "--prefill URL"),
        ("--pd-disaggregation --prefill http://p:1", "--decode URL"),
        (f"{FLEET} --prefill https://p:1", "https://p:1: must be http://HOST:PORT"),
        (f"{FLEET} --prefill p:1", "p:1: must be http://HOST:PORT"),
        (f"{FLEET} --prefill http://p", "http://p: must be http://HOST:PORT"),
        (f"{FLEET} --prefill http://:1", "http://:1: must be http://HOST:PORT"),
        (f"{FLEET} --prefill http://p:0", "http://p:0: must be http://HOST:PORT"),
        (f"{FLEET} --prefill http://p:99999", "http://p:99999"),
        (f"{FLEET} --prefill http://[::1:5", "http://[::1:5"),
        (f"{FLEET} --decode http://d:1/v1", "nothing more"),
        (f"{FLEET} --decode http://u:pw@d:1", "nothing more"),
        (f"{FLEET} --prefill http://p:1 x", "bootstrap port 'x'"),
        (f"{FLEET} --prefill http://p:1 0", "bootstrap port '0'"),
        (f"{FLEET} --prefill http://p:1 70000", "bootstrap port '70000'"),
        (f"{FLEET} --prefill http://p:1 1 2", "not 3 words"),
        (f"{FLEET} --prefill http://P0:30000/", "given twice"),
        (f"{FLEET} --decode http://p0:30000", "as --prefill and as --decode"),
    ],
)
def test_fleets_that_cannot_be_served(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(line)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_key_is_not_printed() -> None:
    assert "s3cret" not in repr(config(f"{FLEET} --api-key s3cret"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--redis-url http://h:1", "argument --redis-url: a Redis URL begins with"),
        ("--redis-url none", "or it is `memory`"),
        ("--redis-namespace a{b}", "argument --redis-namespace: 'a{b}' must be"),
        ("--redis-namespace " + "x" * 101, "must be 1 to 100 letters"),
        ("--redis-max-bytes 256x", "argument --redis-max-bytes: '256x' must be bytes, or kb, mb or gb (256mb)"),
        ("--redis-max-bytes 1mb", "at least 16mb"),
        ("--advertise-url 10.0.0.5:30000", "argument --advertise-url: '10.0.0.5:30000' must be http://HOST:PORT"),
        ("--advertise-url http://0.0.0.0:30000", "at which other gateways reach this one"),
        ("--advertise-url http://h:1/path", "must be http://HOST:PORT"),
        ("--advertise-url http://h:70000", "must be http://HOST:PORT"),
    ],
)
def test_bad_values_about_ownership_name_the_flag(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in usage_error(f"{FLEET} {flags}", capsys)


@pytest.mark.parametrize(("given", "size"), [("268435456", 256 << 20), ("64MB", 64 << 20), ("1gb", 1 << 30)])
def test_sizes_have_units(given: str, size: int) -> None:
    assert config(f"{FLEET} --redis-max-bytes {given}").ownership.memory_bytes == size


@pytest.mark.parametrize(
    ("flags", "unused"),
    [
        ("", []),
        ("--redis-url redis://h:1 --redis-namespace a", []),
        ("--redis-max-bytes 64mb", []),
        ("--advertise-url http://h:1 --redis-url redis://h:1", []),
        ("--advertise-url http://h:1", ["--advertise-url"]),
        ("--redis-namespace a", ["--redis-namespace"]),
        ("--redis-namespace a --redis-url memory --redis-max-bytes 64mb", ["--redis-namespace", "--redis-max-bytes"]),
    ],
)
def test_what_is_given_in_vain_is_said(flags: str, unused: list[str]) -> None:
    assert [note.split()[0] for note in config(f"{FLEET} {flags}").notes] == unused


def test_an_advertised_address_has_no_slash_at_its_end() -> None:
    assert config(f"{FLEET} --advertise-url http://h:1/").server.advertise_url == "http://h:1"
    assert config(FLEET).server.advertise_url is None


@pytest.mark.parametrize(
    ("host", "redis_url", "address"),
    [
        ("10.0.0.5", "redis://r:6379", "http://10.0.0.5:7"),
        ("fd00::5", "redis://r:6379", "http://[fd00::5]:7"),
        ("0.0.0.0", "redis://127.0.0.1:6379", ""),
        ("::", "redis://127.0.0.1:6379", ""),
        ("127.0.0.1", "redis://r:6379", ""),
        ("127.0.0.1", "redis://:secret@127.0.0.1:6379/3", "http://127.0.0.1:7"),
        ("localhost", "unix:///run/redis.sock", "http://localhost:7"),
        ("::1", "redis+sentinel://localhost:1,localhost:2/x", "http://[::1]:7"),
    ],
)
def test_a_listener_is_advertised_where_others_can_reach_it(host: str, redis_url: str, address: str) -> None:
    assert redis_flags.listener_address(host, 7, redis_url) == address


def test_a_template_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="--chat-template is of no use without --tokenizer-path"):
        config(f"{FLEET} --chat-template t.jinja")
