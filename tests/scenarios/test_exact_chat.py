"""A chat that is asked for with token ids tells its client what the engine's own chat stream would have told."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engines.emulator.tokenizer_files import FOLDER
from tests.exact_chats import CARRIED, CASES, Asker, Case
from tests.scenarios.client import MODEL
from tests.scenarios.cluster import Cluster
from tests.scenarios.test_exact_ids import joined

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def asker() -> AsyncIterator[Asker]:
    async with Cluster(1, 1, gateway=("--tokenizer-path", str(FOLDER)), engine=("--context-length", "4096")) as started:
        await joined(started)
        yield Asker(started.http, started.url, MODEL, biased=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_it_is_the_engines_own(asker: Asker, case: Case) -> None:
    exact, plain = await asker.both(case)
    assert exact.comparable() == plain.comparable()


@pytest.mark.parametrize("name", CARRIED)
async def test_each_field_that_is_carried_over_has_a_case_with_it_and_one_without(name: str) -> None:
    bodies = [case.body(MODEL, 0) for case in CASES]
    present = [name in body or (case.learn is not None and name in case.learn("abcdef")) for body, case in zip(bodies, CASES, strict=True)]
    assert any(present)
    assert not all(present) or name in ("model", "messages", "stream")
