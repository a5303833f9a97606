"""The fleet: snapshots that never change, epochs that grow with restarts only, models that have both sides."""

from __future__ import annotations

from dataclasses import replace

from engines.fleet import Fleet
from engines.types import EngineId, EngineLoad, Health
from tests.fakes import FACTS, spec, up

P, D = EngineId("http://p0"), EngineId("http://d0")
LOAD = EngineLoad(1.0, 1, 0, 0, 5, 5, 100)


def test_a_new_server_is_unknown() -> None:
    view = Fleet([spec("p0")]).view(P)
    assert (view.health, view.epoch, view.facts, view.reason) == (Health.UNKNOWN, 0, None, "not probed yet")


def test_a_snapshot_stays_as_it_was() -> None:
    fleet = up("p0", "d0")
    before = fleet.snapshot()
    assert fleet.snapshot() is before
    fleet.set_health(P, Health.SUSPECTED, "gone")
    assert before.engines[0].health is Health.READY
    assert fleet.snapshot().engines[0].reason == "gone"
    assert fleet.snapshot().version > before.version


def test_what_changes_nothing_is_no_new_version() -> None:
    fleet = up("p0")
    fleet.set_load(P, LOAD)
    before = fleet.snapshot()
    fleet.set_health(P, Health.READY)
    fleet.set_facts(P, FACTS)
    fleet.set_load(P, LOAD)
    assert fleet.snapshot() is before


def test_draining_outlives_a_restart_and_is_no_news_twice() -> None:
    fleet = up("p0")
    fleet.set_draining(P, True)
    before = fleet.snapshot()
    fleet.set_draining(P, True)
    assert fleet.snapshot() is before
    fleet.set_facts(P, replace(FACTS, boot_fingerprint="other"))
    fleet.set_health(P, Health.READY)
    assert (fleet.view(P).draining, fleet.view(P).takes_rooms) == (True, False)
    fleet.set_draining(P, False)
    assert fleet.view(P).takes_rooms


def test_the_first_facts_begin_the_first_epoch_and_are_no_restart() -> None:
    fleet = Fleet([spec("p0")])
    assert not fleet.set_facts(P, FACTS)
    assert fleet.view(P).epoch == 1


def test_another_fingerprint_is_a_restart_which_forgets_the_load() -> None:
    fleet = up("p0")
    fleet.set_load(P, LOAD)
    assert fleet.set_facts(P, replace(FACTS, boot_fingerprint="other"))
    assert fleet.view(P).epoch == 2
    assert fleet.view(P).load is None


def test_other_facts_of_the_same_boot_keep_epoch_and_load() -> None:
    fleet = up("p0")
    fleet.set_load(P, LOAD)
    assert not fleet.set_facts(P, replace(FACTS, weight_version="2"))
    assert (fleet.view(P).epoch, fleet.view(P).load) == (1, LOAD)


def test_a_model_is_served_when_both_sides_have_it() -> None:
    fleet = Fleet([spec("p0"), spec("d0"), spec("d1")])
    assert fleet.models() == ()
    fleet.set_facts(P, FACTS)
    fleet.set_facts(EngineId("http://d1"), replace(FACTS, model="other"))
    assert fleet.models() == ()
    fleet.set_facts(D, FACTS)
    assert fleet.models() == ("tiny",)
