"""Real fleets from TOML and from URLs: what may be connected to, and what is refused, naming the field and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from failover.chaos.fleet_file import of_urls, parse
from failover.chaos.plain import plain, typed
from failover.chaos.real_fleet import RealFleet, address, host_and_port
from failover.chaos.scenario import ScenarioError

FLEETS = sorted((Path(__file__).parents[4] / "examples" / "fleets").glob("*.toml"))
GOOD = """
gateways = ["http://10.0.0.1:30000", "https://gw.example"]
prefills = ["http://10.0.0.2:30010"]
decodes = ["http://10.0.0.3:30020", "http://10.0.0.4:30020"]
redis = "10.0.0.5:6379"
allow = ["10.0.0.1:30000", "gw.example:443", "10.0.0.3:30020", "10.0.0.5:6379"]
[proxies]
"gateway0>decode0" = "0.0.0.0:9101"
"gateway0>redis" = "127.0.0.1:9102"
"""


def test_a_fleet_is_read() -> None:
    fleet = parse(GOOD, "staging")
    assert fleet.name == "staging"
    assert (fleet.plan.gateways, fleet.plan.prefills, fleet.plan.decodes, fleet.plan.redis) == (2, 1, 2, True)
    assert fleet.links == ("client>gateway0", "gateway0>decode0", "gateway0>redis"), "no proxy ends TLS"
    assert fleet.connected == {
        "gateway0": "10.0.0.1:30000",
        "gateway1": "gw.example:443",
        "decode0": "10.0.0.3:30020",
        "redis": "10.0.0.5:6379",
    }, "what is behind no proxy is never connected to"
    assert typed(RealFleet, plain(fleet)) == fleet
    assert not fleet.reference
    assert fleet.max_rate_per_s <= 5
    assert fleet.max_concurrent <= 32


@pytest.mark.parametrize("file", FLEETS, ids=lambda file: file.stem)
def test_a_shipped_fleet_can_be_used(file: Path) -> None:
    assert parse(file.read_text(), file.stem).name == file.stem


def test_files_are_shipped() -> None:
    assert FLEETS


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"10.0.0.1:30000", "gw', '"gw', 'gateways[0]: 10.0.0.1:30000 is not allowed: add "10.0.0.1:30000" to allow'),
        ('"gw.example:443", ', "", "gateways[1]: gw.example:443 is not allowed"),
        (', "10.0.0.3:30020", ', ", ", "decodes[0]: 10.0.0.3:30020 is not allowed"),
        (', "10.0.0.5:6379"]', "]", "redis: 10.0.0.5:6379 is not allowed"),
        ('"10.0.0.3:30020", "10', '"10.0.0.3:30021", "10', "decodes[0]: 10.0.0.3:30020 is not allowed"),
        ("http://10.0.0.1:30000", "10.0.0.1:30000", "gateways[0]: must be like http://HOST:PORT"),
        ("http://10.0.0.1:30000", "http://user@10.0.0.1:30000", "gateways[0]: must be like http://HOST:PORT"),
        ("http://10.0.0.2:30010", "http://10.0.0.2:30010/v1", "prefills[0]: must be like http://HOST:PORT"),
        ("http://10.0.0.2:30010", "http://10.0.0.2:x", "prefills[0]: 'http://10.0.0.2:x' is no URL"),
        ("http://10.0.0.4:30020", "http://10.0.0.3:30020", "decodes: one address is there twice"),
        ('"10.0.0.5:6379"\n', '"redis://10.0.0.5:6379"\n', "redis: must be HOST:PORT"),
        ('allow = ["10.0.0.1:30000"', 'allow = ["10.0.0.1"', "allow[0]: must be HOST:PORT, not '10.0.0.1'"),
        ("gateway0>decode0", "gateway0>decode2", 'proxies."gateway0>decode2": this fleet has no such link; it may be '),
        ("gateway0>decode0", "prefill0>decode0", 'proxies."prefill0>decode0": KV moves by ways of its own'),
        ("gateway0>decode0", "client>gateway0", 'proxies."client>gateway0": leave it out'),
        ("0.0.0.0:9101", "9101", 'proxies."gateway0>decode0": must be HOST:PORT'),
        ("0.0.0.0:9101", "127.0.0.1:9102", "proxies: each link needs an address of its own"),
        ("0.0.0.0:9101", "10.0.0.3:30020", 'proxies."gateway0>decode0": 10.0.0.3:30020 is where decode0 itself is'),
        ("redis =", "rediss =", "rediss: there is no such field; did you mean 'redis'?"),
        ("redis =", "max_rate_per_s = 0\nredis =", "max_rate_per_s: must be between 0.01 and 1000, not 0"),
        ("redis =", "max_concurrent = 1.5\nredis =", "max_concurrent: must be a whole number"),
        ('["http://10.0.0.1:30000", "https://gw.example"]', "[]", "gateways: name one at least"),
        ("[proxies]", "[proxies", "staging: this is not TOML"),
    ],
)
def test_what_cannot_be_used_is_refused(old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(ScenarioError) as refused:
        parse(GOOD.replace(old, new, 1), "staging")
    assert str(refused.value).startswith(words)


def test_more_may_be_allowed_by_flags() -> None:
    assert parse(GOOD.replace('"gw.example:443", ', ""), "staging", ["gw.example:443"]).gateways


# -- URLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:30000", "http://localhost:1", "http://[::1]:30000/", "http://127.9.9.9:2"]
)
def test_a_gateway_of_this_machine_needs_nothing(url: str) -> None:
    assert of_urls([url], []).links == ("client>gateway0",)


@pytest.mark.parametrize("url", ["http://10.0.0.1:30000", "http://gw.example", "http://0.0.0.0:30000"])
def test_another_must_be_allowed_as_it_is_named(url: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        of_urls(["http://127.0.0.1:30000", url], ["10.0.0.1:30001"])
    assert str(refused.value) == (
        f"--url: {address(url)} is not allowed: if it may be loaded and disturbed, say --allow {address(url)}"
    )
    assert len(of_urls([url], [address(url)]).gateways) == 1


def test_a_flag_that_is_wrong_is_named() -> None:
    with pytest.raises(ScenarioError, match="--allow: must be HOST:PORT, not '10'"):
        of_urls(["http://127.0.0.1:1"], ["10"])
    with pytest.raises(ScenarioError, match="--url: must be like"):
        of_urls(["127.0.0.1:30000"], [])


def test_an_address() -> None:
    assert address("https://a") == "a:443"
    assert address("http://[::1]:7/") == "[::1]:7"
    assert host_and_port("[::1]:7") == ("::1", 7)
    with pytest.raises(ValueError, match="no host and port"):
        address("a")
