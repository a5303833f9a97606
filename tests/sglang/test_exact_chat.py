"""A chat that is asked for with token ids tells its client what SGLang's own chat stream would have told."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.exact_chats import CASES, Asker, Case
from tests.sglang.fleet import MODEL, RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_it_is_the_engines_own(fleet: RealFleet, case: Case) -> None:
    exact, plain = await Asker(fleet.http, fleet.url, MODEL, biased=True).both(case)
    assert exact.comparable() == plain.comparable()
