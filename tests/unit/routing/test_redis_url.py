"""What a Redis URL says, what an error of Redis means, and which slot a key is in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import exceptions
from redis._parsers.base import BaseParser
from redis.crc import key_slot

from routing.redis_errors import Trouble, kind_of, trouble_of
from routing.redis_orders import order_of
from routing.redis_topology import slot_of
from routing.redis_url import Address, RedisUrl, Tls, parse

A, B = Address("a", 26379), Address("b", 7)

GOOD = [
    ("redis://h", RedisUrl((Address("h", 6379),))),
    ("redis://h:7/3", RedisUrl((Address("h", 7),), db=3)),
    ("redis://h?db=3", RedisUrl((Address("h", 6379),), db=3)),
    ("redis://[::1]:7", RedisUrl((Address("::1", 7),))),
    ("redis://:p%40%2F@h", RedisUrl((Address("h", 6379),), password="p@/")),
    ("redis://u:a/b@c@h", RedisUrl((Address("h", 6379),), username="u", password="a/b@c")),
    ("rediss://h", RedisUrl((Address("h", 6379),), tls=Tls())),
    (
        "rediss://h?ssl_ca_certs=/ca&ssl_certfile=/c&ssl_keyfile=/k&ssl_cert_reqs=optional&ssl_check_hostname=false",
        RedisUrl((Address("h", 6379),), tls=Tls("/ca", "/c", "/k", "optional", False)),
    ),
    ("unix:///run/my%20redis.sock", RedisUrl((Address("/run/my redis.sock", 0),))),
    ("unix://u:p@/s?db=2", RedisUrl((Address("/s", 0),), username="u", password="p", db=2)),
    ("redis+sentinel://a,b:7/name", RedisUrl((A, B), service="name")),
    (
        "redis+sentinel://u:p@a/name?db=1&sentinel_username=su&sentinel_password=sp",
        RedisUrl((A,), "name", "u", "p", "su", "sp", db=1),
    ),
    ("rediss+sentinel://a/n?ssl_ca_certs=/ca", RedisUrl((A,), service="n", tls=Tls("/ca"))),
]


@pytest.mark.parametrize(("url", "expected"), GOOD)
def test_a_url_is_read(url: str, expected: RedisUrl) -> None:
    assert parse(url) == expected


BAD = [
    ("h:6379", "begins with"),
    ("http://h", "begins with"),
    ("redis://", "names no host"),
    ("redis://:7", "names no host"),
    ("redis://h:port", "port of h is 'port'"),
    ("redis://h:0", "from 1 to 65535"),
    ("redis://h:65536", "from 1 to 65535"),
    ("redis://h/zero", "database is 'zero'"),
    ("redis://h/-1", "database is '-1'"),
    ("redis://a,b", "takes one host"),
    ("redis://u@h", "user is named without a password"),
    ("redis://h?ssl_ca_certs=/x", "no option 'ssl_ca_certs'"),
    ("redis://h?timeout=3", "no option 'timeout'; it knows db"),
    ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs is 'maybe'"),
    ("rediss://h?ssl_check_hostname=maybe", "ssl_check_hostname is 'maybe'"),
    ("rediss://h?ssl_keyfile=/k", "without ssl_certfile"),
    ("unix://", "absolute path"),
    ("unix://run/redis.sock", "absolute path"),
    ("redis+sentinel://a:1,b:2", "name that the Sentinels"),
    ("redis+sentinel://a:1,,b:2/n", "names no host"),
    ("redis+sentinel://a/n/2", "name that the Sentinels"),
]


@pytest.mark.parametrize(("url", "said"), BAD)
def test_a_bad_url_says_what_is_wrong(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(url)
    assert said in str(caught.value)


@pytest.mark.parametrize("place", ["h:port", "h/x", "h?x=1", "", "a,b"])
def test_no_secret_is_shown(place: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(f"redis://user:hunter2@{place}")
    assert "hunter2" not in str(caught.value)
    read = parse("redis+sentinel://user:hunter2@a:1,b/n?sentinel_password=hunter2")
    assert "hunter2" not in repr(read)
    assert read.where == "redis+sentinel://a:1,b:26379/n"


def test_where_is_the_place_alone() -> None:
    assert parse("rediss://u:p@h:7/2?ssl_ca_certs=/x").where == "rediss://h:7/2"
    assert parse("redis://[::1]").where == "redis://[::1]:6379"
    assert parse("unix://:p@/run/r.sock").where == "unix:///run/r.sock"


IN_A_SCRIPT = "ERR Error running script (call to f_1): @user_script:1: @user_script: 1: "
REPLIES = [
    ("LOADING Redis is loading the dataset in memory", Trouble.DOWN),
    ("CLUSTERDOWN The cluster is down", Trouble.DOWN),
    ("CLUSTERDOWN Hash slot not served", Trouble.DOWN),
    ("MASTERDOWN Link with MASTER is down", Trouble.DOWN),
    ("TRYAGAIN Multiple keys request during rehashing of slot", Trouble.DOWN),
    ("UNBLOCKED force unblock from blocking operation, instance state changed", Trouble.DOWN),
    ("ERR max number of clients reached", Trouble.DOWN),
    ("BUSY Redis is busy running a script.", Trouble.SLOW),
    ("READONLY You can't write against a read only replica.", Trouble.READ_ONLY),
    (IN_A_SCRIPT + "-READONLY You can't write against a read only replica.", Trouble.READ_ONLY),
    ("MISCONF Redis is configured to save RDB snapshots", Trouble.READ_ONLY),
    ("NOREPLICAS Not enough good replicas to write.", Trouble.READ_ONLY),
    ("OOM command not allowed when used memory > 'maxmemory'.", Trouble.OUT_OF_MEMORY),
    (IN_A_SCRIPT + "-OOM command not allowed when used memory > 'maxmemory'.", Trouble.OUT_OF_MEMORY),
    ("NOAUTH Authentication required.", Trouble.AUTH),
    ("WRONGPASS invalid username-password pair", Trouble.AUTH),
    ("NOPERM this user has no permissions to run the 'get' command", Trouble.AUTH),
    (IN_A_SCRIPT + "The user executing the script can't run this command or subcommand", Trouble.AUTH),
    ("ERR ACL failure in script: No permissions to access a key", Trouble.AUTH),
    ("ERR unknown command", Trouble.REFUSED),
    ("ERR user_script:1: the OOM of a text", Trouble.REFUSED),
    ("WRONGTYPE Operation against a key holding the wrong kind of value", Trouble.REFUSED),
    ("CROSSSLOT Keys in request don't hash to the same slot", Trouble.REFUSED),
    ("NOSCRIPT No matching script.", Trouble.REFUSED),
]


@pytest.mark.parametrize(("reply", "kind"), REPLIES)
def test_what_the_server_says_is_understood(reply: str, kind: Trouble) -> None:
    error = BaseParser.parse_error(reply)
    assert kind_of(error) is kind
    assert kind.value in str(trouble_of(error, where="h:1"))
    assert trouble_of(error, where="h:1").message.startswith("h:1: ")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(111, "refused"), Trouble.DOWN),
        (OSError("x"), Trouble.DOWN),
        (exceptions.ConnectionError("x"), Trouble.DOWN),
        (exceptions.MaxConnectionsError("x"), Trouble.DOWN),
        (TimeoutError(), Trouble.SLOW),
        (exceptions.TimeoutError("x"), Trouble.SLOW),
        (exceptions.AuthenticationError("x"), Trouble.AUTH),
        (exceptions.DataError("x"), Trouble.REFUSED),
    ],
)
def test_what_the_library_raises_is_understood(error: Exception, kind: Trouble) -> None:
    trouble = trouble_of(error, maybe_done=True)
    assert (trouble.kind, trouble.maybe_done) == (kind, True)
    assert trouble.message


@given(st.binary(max_size=20) | st.text("{}ab", max_size=12).map(str.encode))
def test_a_key_has_the_slot_that_the_library_says(key: bytes) -> None:
    assert slot_of(key) == key_slot(key)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("GET", "k"), b"k"),
        ((b"get", b"k"), b"k"),
        (("XLEN", 7), b"7"),
        (("MEMORY", "USAGE", "k"), b"k"),
        (("XINFO", "STREAM", b"k"), b"k"),
        (("INFO", "memory"), None),
        (("ping",), None),
        (("GET",), None),
    ],
)
def test_the_key_of_a_command(words: tuple[str | bytes | int, ...], key: bytes | None) -> None:
    assert order_of(words).key == key
