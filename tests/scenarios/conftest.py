"""Adds the end of the gateway's log to the report of every scenario that fails."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tests.scenarios import cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        for each in cluster.running():
            report.sections.append((f"gateway {each.url}", each.gateway.log_tail()))
    return report
