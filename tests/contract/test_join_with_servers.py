"""The join probe against emulated servers: one that tokenizes as the gateway does, and a gateway with other files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from engines.emulator.tokenizer_files import FOLDER, tokenizer_files
from engines.fleet import Fleet
from engines.sglang import SglangEngine
from engines.types import EngineId, EngineSpec, Health, Role
from engines.upstream import Upstream
from gateway import tokenizer
from gateway.config import TokenizerConfig
from gateway.join_probe import CONTINUES, Join, JoinProbe
from routing.prefix import BlockKind
from tests.contract.emu_fleet import EmuFleet, emu_fleet, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[EmuFleet]:
    async with emu_fleet(speed=10.0, arguments=("--model", "tiny", "--page-size", "16")) as running:
        yield running


@asynccontextmanager
async def joins(servers: EmuFleet, path: Path, template: Path | None = None) -> AsyncIterator[JoinProbe]:
    """A join probe over the fleet, once it has come to something."""
    config = TokenizerConfig(str(path), None if template is None else str(template))
    upstream, own = Upstream(), tokenizer.load(config)
    assert own is not None
    await upstream.start()
    engine, prefill = SglangEngine(upstream, None), servers.prefill
    spec = EngineSpec(EngineId(prefill.url), prefill.url, Role.PREFILL, prefill.host, prefill.bootstrap_port)
    known = Fleet([spec])
    seen = await engine.probe(spec, 5.0)
    assert seen.facts is not None
    known.set_facts(spec.engine_id, seen.facts)
    known.set_health(spec.engine_id, Health.READY)
    probe = JoinProbe(known, engine, own, look_every_s=0.02)
    probe.start()

    async def has_asked() -> bool:
        await asyncio.sleep(0)
        return "has been asked" not in probe.of("tiny").reason

    try:
        await until(has_asked, 10.0)
        yield probe
    finally:
        await probe.stop()
        own.close()
        await upstream.close()


async def test_the_emulated_server_agrees_with_its_files(fleet: EmuFleet) -> None:
    async with joins(fleet, FOLDER) as probe:
        join = probe.of("tiny")
        assert (join.kind, join.reason, join.page_tokens) == (BlockKind.IDS, "", 16)
        assert join.text_fields <= {CONTINUES}
        assert probe.models() == {"tiny": join}


async def test_another_template_is_found_out(fleet: EmuFleet, tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text(tokenizer_files()["chat_template.jinja"].replace("<|im_end|>\\n", "<|im_end|>"))
    async with joins(fleet, FOLDER, other) as probe:
        join = probe.of("tiny")
        assert join == Join(BlockKind.TEXT, join.reason, EngineId(fleet.prefill.url), "plain")
        assert "ids instead of" in join.reason


async def test_a_template_that_differs_in_one_kind_of_chat_is_found_out(fleet: EmuFleet, tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text(tokenizer_files()["chat_template.jinja"].replace("tools | tojson", "tools[:0] | tojson"))
    async with joins(fleet, FOLDER, other) as probe:
        assert (probe.of("tiny").kind, probe.of("tiny").probe) == (BlockKind.TEXT, "tools")


async def test_another_tokenizer_is_found_out(fleet: EmuFleet, tmp_path: Path) -> None:
    files = tokenizer_files()
    files["tokenizer.json"] = files["tokenizer.json"].replace('"normalizer": null', '"normalizer": {"type": "NFC"}')
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    async with joins(fleet, tmp_path) as probe:
        assert (probe.of("tiny").kind, probe.of("tiny").probe) == (BlockKind.TEXT, "unicode")
