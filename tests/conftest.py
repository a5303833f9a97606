"""Hooks for the whole suite."""

import gc

import pytest
from hypothesis import settings

# How long an example takes is the machine's to say. `make test` tries the same few examples each time, `make test-long`
# looks for new ones with `--hypothesis-profile many`.
settings.register_profile("few", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("many", deadline=None, max_examples=1_000)
settings.load_profile("few")


def pytest_collection(session: pytest.Session) -> None:
    """No garbage collection while test files are parsed.

    CPython 3.11 raises `SystemError: AST constructor recursion depth mismatch` when one runs Python code in the middle.
    """
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, else it ends long after the others."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
