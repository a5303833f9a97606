"""The shared words: timing forms, and what a snapshot shows."""

from __future__ import annotations

import dataclasses

import pytest

from engines.timing import (
    PROFILES,
    TINY,
    DecodeTiming,
    LinkTiming,
    PrefillTiming,
    PrefillWork,
    decode_step_s,
    prefill_forward_s,
    prefill_s,
    transfer_s,
)
from engines.types import FleetSnapshot, Role
from tests.fakes import view

TIMING = PrefillTiming(base_s=1.0, per_token_s=0.1, per_token2_s=0.001, chunk_tokens=100)


def test_a_prefill_pays_the_base_once_a_forward() -> None:
    assert prefill_s(TIMING, 100) == pytest.approx(1 + 10 + 10)
    assert prefill_s(TIMING, 101) == pytest.approx(2 + 10.1 + 10.201)


def test_cached_tokens_save_their_own_part_only() -> None:
    assert prefill_s(TIMING, 100, 40) == pytest.approx(1 + 6 + 0.001 * (100**2 - 40**2))
    assert prefill_s(TIMING, 100, 100) == 0.0
    assert prefill_s(TIMING, 100, 200) == 0.0


def test_one_forward_over_one_request_is_its_prefill() -> None:
    for cached in (0, 30, 99):
        alone = prefill_forward_s(TIMING, [PrefillWork(100, cached)])
        assert alone == pytest.approx(prefill_s(TIMING, 100, cached))


def test_requests_of_one_forward_share_its_base() -> None:
    works = [PrefillWork(40), PrefillWork(50, 10)]
    assert prefill_forward_s(TIMING, works) == pytest.approx(1 + 8 + 0.001 * (1600 + 2400))
    assert prefill_forward_s(TIMING, [PrefillWork(5, 5)]) == 0.0
    assert prefill_forward_s(TIMING, []) == 0.0


def test_new_tokens_are_never_negative() -> None:
    assert PrefillWork(10, 4).new_tokens == 6
    assert PrefillWork(10, 40).new_tokens == 0


def test_decode_and_transfer_times() -> None:
    assert decode_step_s(DecodeTiming(1.0, 0.1, 0.01), running=3, kv_tokens=5) == pytest.approx(1.35)
    assert transfer_s(LinkTiming(bytes_per_s=10.0, fixed_s=1.0), 20) == pytest.approx(3.0)


def test_profiles_are_known_by_name() -> None:
    assert PROFILES["tiny"] is TINY
    assert all(profile.name == name for name, profile in PROFILES.items())


def test_a_snapshot_is_split_by_role_and_cannot_be_changed() -> None:
    snapshot = FleetSnapshot(1, (view("p0"), view("d0"), view("p1")))
    assert [each.engine_id for each in snapshot.with_role(Role.PREFILL)] == ["http://p0", "http://p1"]
    assert snapshot.with_role(Role.PLAIN) == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.version = 2  # type: ignore[misc]
