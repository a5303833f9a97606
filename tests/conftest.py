"""Hooks for the whole suite."""

import gc

import pytest
from hypothesis import settings

settings.register_profile("pdgate", deadline=None)  # how long an example takes is the machine's to say
settings.load_profile("pdgate")


def pytest_collection(session: pytest.Session) -> None:
    """No garbage collection while test files are parsed.

    CPython 3.11 raises `SystemError: AST constructor recursion depth mismatch` when one runs Python code in the middle.
    """
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
