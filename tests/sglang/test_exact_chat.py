"""A chat that is asked for with token ids tells its client what SGLang's own chat stream would have told."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from engines.sglang_process import Launch
from tests.exact_chats import CASES, OPINION, OPINION_CASES, Asker, Case, check_alike
from tests.sglang.fleet import MODEL, RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")
QUICK = ("the base", "stop string", "characters of several tokens", "two hundred tokens without a limit")


@pytest.mark.parametrize(
    "case", [pytest.param(each, id=each.name, marks=[pytest.mark.smoke] * (each.name in QUICK)) for each in CASES]
)
async def test_it_is_the_engines_own(fleet: RealFleet, case: Case) -> None:
    await fleet.joined()
    exact, plain = await Asker(fleet.http, fleet.url, MODEL, biased=True, cache_report=True).both(case)
    check_alike(exact, plain)


# ---- a model with sampling parameters of its own ---------------------------------------------------------------------


def with_opinion(launch: Launch, folder: Path) -> Launch:
    """The same model in `folder`, with a generation config that matters."""
    shutil.copytree(launch.model_dir, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_sample": True, **OPINION}))
    return replace(launch, model_dir=folder, arguments=(*launch.arguments, "--model-path", str(folder)))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def opinionated(shared_fleet: RealFleet, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealFleet]:
    """One pair more, for a while."""
    launch = with_opinion(shared_fleet.launch, tmp_path_factory.mktemp("opinion") / "model")
    async with RealFleet(launch, plain=False) as fleet:
        await fleet.joined()
        yield fleet


@pytest.mark.parametrize("case", OPINION_CASES, ids=lambda case: case.name)
async def test_what_the_model_wants_is_written_out(opinionated: RealFleet, case: Case) -> None:
    asker = Asker(opinionated.http, opinionated.url, MODEL, biased=True, cache_report=True, sampling=OPINION)
    exact, plain = await asker.both(case)
    check_alike(exact, plain)


async def test_a_penalty_of_the_models_own_is_one(opinionated: RealFleet) -> None:
    """A stream whose engine counts what it has said cannot be resumed, whoever asked for that."""
    asker = Asker(opinionated.http, opinionated.url, MODEL, biased=True, cache_report=True)
    penalized, bare = ({**OPINION_CASES[-1].body(MODEL, 0), "repetition_penalty": each} for each in (None, 1.0))
    assert (await asker.plain(penalized)).text != (await asker.plain(bare)).text
    assert (await asker.planned(penalized))["on_failure"] == "error"
    assert (await asker.planned(bare))["on_failure"] == "resume"
