"""What others believe of a gateway's bookings, whatever is lost or late on the way."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engines.types import EngineId
from routing.bookings_log import AGAIN_S, FORGOTTEN_S, NOTHING, Entry, Others, Publication, Totals, pack, unpack

ENGINES = [EngineId(f"http://{name}") for name in ("p0", "p1", "d0")]
COUNTS = st.integers(0, 1000)
TOTALS = st.builds(Totals, st.floats(0, 100).map(lambda each: round(each, 6)), COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)
ALL = st.dictionaries(st.sampled_from(ENGINES), TOTALS.filter(lambda each: each != NOTHING))
FATES = st.sampled_from(["arrives", "arrives", "arrives", "fails", "vanishes", "is late"])
STEPS = st.lists(st.tuples(st.integers(0, 2), ALL, FATES, st.floats(0.02, 0.6)), max_size=40)


def arrived(entry: Entry) -> Entry:
    found = unpack(pack(entry))
    assert found == entry
    return entry


@given(STEPS)
def test_one_whole_entry_later_all_is_as_it_is(steps: list[tuple[int, dict[EngineId, Totals], str, float]]) -> None:
    """Entries get lost with and without their sender knowing, and overtake each other; sums are never negative."""
    publications = [Publication(f"{number}") for number in range(3)]
    truth: list[dict[EngineId, Totals]] = [{}, {}, {}]
    others = Others("me")
    late: list[Entry] = []
    now_s = 0.0
    for number, totals, fate, pause_s in steps:
        now_s += pause_s
        others.forget(now_s)
        truth[number] = totals
        entry = publications[number].next(totals, now_s)
        if entry is not None:
            if fate == "arrives":
                others.hear([arrived(entry), *late], now_s)
                late = []
            elif fate == "is late":
                late.append(entry)
            elif fate == "fails":
                publications[number].lost()
        for each in others.sums().values():
            assert min(each.queue_s, each.uncached_tokens, each.prefill_requests, each.prefill_kv_tokens) >= 0
            assert min(each.decode_kv_tokens, each.decode_requests) >= 0
            assert each != NOTHING
    now_s += FORGOTTEN_S
    others.forget(now_s)
    for publication, totals in zip(publications, truth, strict=True):
        entry = publication.next(totals, now_s)
        assert entry is not None or not totals, f"it is over {AGAIN_S} s since all was said"
        others.hear([entry] if entry else [], now_s)
    sums: dict[EngineId, Totals] = {}
    for totals in truth:
        for engine_id, each in totals.items():
            sums[engine_id] = sums.get(engine_id, NOTHING) + each
    assert rounded(others.sums()) == rounded(sums)


def rounded(sums: dict[EngineId, Totals]) -> dict[EngineId, Totals]:
    """Sums of seconds depend on their order in the last digits."""
    return {engine_id: replace(each, queue_s=round(each.queue_s, 4)) for engine_id, each in sums.items()}


@given(st.lists(st.tuples(st.sampled_from("abc"), ALL, st.floats(0, 2)), max_size=20))
def test_nobody_counts_longer_than_a_second_unheard(entries: list[tuple[str, dict[EngineId, Totals], float]]) -> None:
    others = Others("me")
    now_s, heard_s = 0.0, dict[str, float]()
    last: dict[str, dict[EngineId, Totals]] = {}
    for number, (replica, totals, pause_s) in enumerate(entries):
        now_s += pause_s
        others.forget(now_s)
        others.hear([Entry(replica, number, True, totals)], now_s)
        heard_s[replica], last[replica] = now_s, totals
        counted = [last[name] for name, at_s in heard_s.items() if now_s < at_s + FORGOTTEN_S]
        assert others.sums().keys() == {engine_id for each in counted for engine_id in each}
    others.forget(now_s + FORGOTTEN_S)
    assert others.sums() == {}
    assert others.forget_at_s() is None
