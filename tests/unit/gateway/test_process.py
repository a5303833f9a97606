"""What a process that serves does with its surroundings."""

from __future__ import annotations

import gc

from gateway import process


def test_collections_are_rare() -> None:
    before, enabled = gc.get_threshold(), gc.isenabled()
    try:
        process.collect_rarely()
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[0] == 50_000
        assert gc.isenabled() == enabled
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
