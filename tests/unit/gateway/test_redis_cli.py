"""`pdgate redis inspect`: what it prints, and which Redis it means."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engines.types import EngineId
from gateway import cli
from gateway.redis_cli import as_json, show
from routing.ownership_inspect import EngineSight, Inspection, ReplicaSight, ShardSight
from tests.redis_servers import RedisServer

SEEN = Inspection(
    shards=(ShardSight(0, 7, "ab12", 3, 600), ShardSight(1, 0, "", 0, 0)),
    engines=(EngineSight(EngineId("http://p0:30000"), 0, 1795978408038, 2, 300, 1, 5400),),
    replicas=(ReplicaSight("9f", 0.25, (4, 0)),),
)


def test_the_tables_show_engines_shards_and_gateways() -> None:
    out = io.StringIO()
    show(SEEN, Console(file=out, width=80))
    text = out.getvalue()
    rows = [line.split() for line in text.splitlines()]
    assert ["http://p0:30000", "0", "1795978408038", "2", "300", "1", "5400", "18.0"] in rows
    assert ["0", "7", "ab12", "3", "600"] in rows
    assert not [row for row in rows if row[:2] == ["1", "0"]], "a shard that nothing was ever written to"
    assert ["9f", "0.2", "s", "ago", "4", "0"] in rows
    assert "300 blocks in 5400 bytes, 600 bytes of log, 20.0 bytes a block with the log" in text


def test_nothing_at_all_is_shown_as_nothing() -> None:
    out = io.StringIO()
    empty = Inspection((), (), ())
    show(empty, Console(file=out, width=80))
    assert "0 blocks in 0 bytes, 0 bytes of log\n" in out.getvalue()
    assert as_json(empty)["bytes_per_block"] is None


def test_json_has_all_of_it() -> None:
    report = json.loads(json.dumps(as_json(SEEN)))
    assert (report["blocks"], report["bytes_per_block"]) == (300, 20.0)
    assert report["engines"][0]["bytes_per_block"] == 18.0
    assert report["shards"][0]["db_epoch"] == "ab12"
    assert report["replicas"][0]["lag_entries"] == 4


@pytest.fixture
def gateway() -> Iterator[tuple[str, dict[str, Any]]]:
    """(URL, what /readyz answers) of a stand-in for a gateway."""
    body: dict[str, Any] = {}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", body
        server.shutdown()
        thread.join()


def test_the_private_redis_of_a_gateway_is_found(
    gateway: tuple[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, body = gateway
    out = tmp_path / "out.json"
    with RedisServer() as redis:
        body["ownership"] = {"where": f"unix://{redis.socket}"}
        assert cli.main(["redis", "inspect", "--url", url, "--json", "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert len(report["shards"]) == 16


@pytest.mark.parametrize(
    ("ownership", "said"),
    [
        (None, "is no pdgate gateway"),
        ({"where": None}, "keeps ownership in memory"),
        ({"where": "redis://h:1"}, "give its whole --redis-url"),
    ],
)
def test_a_gateway_whose_redis_cannot_be_known(
    gateway: tuple[str, dict[str, Any]], ownership: dict[str, Any] | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, body = gateway
    if ownership is not None:
        body["ownership"] = ownership
    assert cli.main(["redis", "inspect", "--url", url]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--url", "http://127.0.0.1:1"], 2, "no gateway answers"),
        (["--redis-url", "redis://:secret@127.0.0.1:1"], 1, "redis://127.0.0.1:1: down (127.0.0.1:1: "),
        (["--out", "/nowhere/at/all.json"], 2, "--out: there is no folder /nowhere/at"),
    ],
)
def test_what_does_not_answer(flags: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["redis", "inspect", *flags]) == code
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--redis-url", "http://127.0.0.1:1"], "argument --redis-url: a Redis URL begins with"),
        (["--redis-url", "memory"], "argument --redis-url: a Redis URL begins with"),
        (["--redis-namespace", "a{b}"], "argument --redis-namespace: 'a{b}' must be 1 to 100 letters"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["redis", "inspect", *flags])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err
