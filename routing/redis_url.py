"""What a Redis URL says: which servers or Sentinels, as whom, under which certificates. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

_PORTS = {"redis": 6379, "rediss": 6379, "redis+sentinel": 26379, "rediss+sentinel": 26379}
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


class Address(NamedTuple):
    """A host and its port; or a Unix socket: its path, and port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Tls:
    """Files in PEM form; without `ca_certs` the system's CAs are trusted. `cert_reqs`: none, optional, required."""

    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    cert_reqs: str = "required"
    check_hostname: bool = True


@dataclass(frozen=True)
class RedisUrl:
    """`addresses`: the one server, or the Sentinels that know where `service` is. Secrets are kept out of `repr`."""

    addresses: tuple[Address, ...]
    service: str = ""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: Tls | None = None

    @property
    def where(self) -> str:
        """The URL without user, password and options."""
        if not self.addresses[0].port:
            return f"unix://{self.addresses[0]}"
        scheme = ("rediss" if self.tls else "redis") + ("+sentinel" if self.service else "")
        path = f"/{self.service}" if self.service else f"/{self.db}" if self.db else ""
        return f"{scheme}://{','.join(map(str, self.addresses))}{path}"


def parse(url: str) -> RedisUrl:
    """Read a `redis://`, `rediss://`, `unix://`, `redis+sentinel://` or `rediss+sentinel://` URL.

    ValueError says in words what is wrong, and never shows the password.
    """
    scheme, found, _ = url.partition("://")
    if not found or scheme not in (*_PORTS, "unix"):
        raise ValueError(f"a Redis URL begins with {', '.join(f'{each}://' for each in ('unix', *_PORTS))}")
    # Not urlsplit of the whole: several hosts are no valid authority, and a password may hold a slash.
    rest = url.removeprefix(f"{scheme}://")
    login, _, place = rest.rpartition("@")
    split = urlsplit(f"//{place}" if scheme != "unix" else place)
    options = _options(split.query, scheme)
    username, password = _login(login)
    tls = _tls(options) if scheme.startswith("rediss") else None
    if scheme == "unix":
        path = unquote(split.path)
        if not path.startswith("/"):
            raise ValueError("a unix:// URL needs the absolute path of a socket: unix:///run/redis.sock")
        return RedisUrl((Address(path, 0),), username=username, password=password, db=_db(options.get("db", "")))
    hosts, path = split.netloc, unquote(split.path.strip("/"))
    if not scheme.endswith("+sentinel"):
        if "," in hosts:
            raise ValueError(f"{scheme}:// takes one host; several are for {scheme}+sentinel:// (a Cluster needs one)")
        db = _db(path or options.get("db", ""))
        return RedisUrl((_address(hosts, scheme),), username=username, password=password, db=db, tls=tls)
    if not path or "/" in path:
        raise ValueError(f"{scheme}:// needs the name that the Sentinels know the service by: host:port,host:port/NAME")
    return RedisUrl(
        tuple(_address(host, scheme) for host in hosts.split(",")),
        service=path,
        username=username,
        password=password,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        db=_db(options.get("db", "")),
        tls=tls,
    )


def _options(query: str, scheme: str) -> Mapping[str, str]:
    known = ["db"]
    known += _TLS_OPTIONS if scheme.startswith("rediss") else ()
    known += ("sentinel_username", "sentinel_password") if scheme.endswith("+sentinel") else ()
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in known:
            raise ValueError(f"{scheme}:// knows no option {name!r}; it knows {', '.join(known)}")
    return options


def _login(login: str) -> tuple[str | None, str | None]:
    user, _, password = login.partition(":")
    if user and not password:
        raise ValueError("a user is named without a password: write user:password@, or :password@ for the default user")
    return unquote(user) or None, unquote(password) or None


def _tls(options: Mapping[str, str]) -> Tls:
    reqs, check = options.get("ssl_cert_reqs", "required"), options.get("ssl_check_hostname", "true").lower()
    if reqs not in ("none", "optional", "required"):
        raise ValueError(f"ssl_cert_reqs is {reqs!r}; it may be none, optional or required")
    if check not in (*_YES, *_NO):
        raise ValueError(f"ssl_check_hostname is {check!r}; it may be true or false")
    tls = Tls(options.get("ssl_ca_certs"), options.get("ssl_certfile"), options.get("ssl_keyfile"), reqs, check in _YES)
    if tls.keyfile and not tls.certfile:
        raise ValueError("ssl_keyfile is given without ssl_certfile")
    return tls


def _db(text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"the database is {text!r}; it must be a number")
    return int(text)


def _address(text: str, scheme: str) -> Address:
    if text.startswith("["):
        host, _, after = text[1:].partition("]")
        port = after.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    if not host:
        raise ValueError(f"{scheme}:// names no host" if not text else f"{text!r} names no host")
    if not port:
        return Address(host, _PORTS[scheme])
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ValueError(f"the port of {host} is {port!r}; it must be a number from 1 to 65535")
    return Address(host, int(port))
