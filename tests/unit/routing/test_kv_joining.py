"""Events joined and cut: what they mean together stays."""

from __future__ import annotations

from dataclasses import replace

from engines.kv_types import KvEvent, Medium, PagesCleared, PagesRemoved, PagesStored
from routing.kv_bridge import Held, KvBridge
from routing.kv_joining import joined, slices


def stored(hashes: list[int], parent: int | None, medium: Medium = Medium.GPU, salt: str | None = None) -> PagesStored:
    return PagesStored(hashes, parent, [10 * page for page in hashes], 1, medium, salt)


def test_slices_mean_the_same_as_the_whole() -> None:
    event = PagesStored(list(range(50, 58)), 49, list(range(16)), 2, Medium.DISK, "salt", "lora")
    parts = list(slices(event, 3))
    assert [(part.hashes, part.parent, part.token_ids) for part in parts if isinstance(part, PagesStored)] == [
        ([50, 51, 52], 49, list(range(6))),
        ([53, 54, 55], 52, list(range(6, 12))),
        ([56, 57], 55, list(range(12, 16))),
    ]
    whole, bits = (KvBridge(lambda salt, lora: b"r", 4, 2, 100) for _ in range(2))
    first = replace(event, parent=None)
    (held,) = whole.apply(first)
    changes = [change for part in slices(first, 3) for change in bits.apply(part)]
    assert isinstance(changes[-1], Held)
    assert changes[-1] == held
    assert list(slices(PagesRemoved([1, 2, 3], Medium.DISK), 2)) == [
        *(PagesRemoved([1, 2], Medium.DISK), PagesRemoved([3], Medium.DISK)),
    ]
    assert list(slices(event, 8)) == [event]
    assert list(slices(PagesCleared(), 1)) == [PagesCleared()]


def test_events_that_continue_each_other_become_one() -> None:
    events: list[KvEvent] = [
        stored([1], None, salt="s"),
        stored([7, 8], None),
        stored([2, 3], 1),
        stored([9], 8),
        stored([20], 2),  # parts from the first
        stored([4], 3, Medium.DISK),  # another medium
        stored([4], 3),
        PagesRemoved([1]),
        PagesRemoved([2], Medium.DISK),
        PagesRemoved([3, 4]),
        stored([5], 4),
        PagesCleared(),
        stored([6], 5),
    ]
    assert list(joined(events, 100)) == [
        stored([1, 2, 3, 4], None, salt="s"),
        stored([7, 8, 9], None),
        stored([20], 2),
        stored([4], 3, Medium.DISK),
        PagesRemoved([1, 3, 4]),
        PagesRemoved([2], Medium.DISK),
        stored([5], 4),
        PagesCleared(),
        stored([6], 5),
    ]


def test_no_event_is_larger_than_asked_and_none_comes_after_a_longer_look() -> None:
    looked = 0

    def events() -> list[KvEvent]:
        return [stored([page], page - 1) for page in range(1, 20)] + [stored(list(range(20, 40)), 19)]

    def looking() -> object:
        nonlocal looked
        for event in events():
            looked += 1
            yield event

    sizes = []
    for event in joined(looking(), 6):  # type: ignore[arg-type]
        assert isinstance(event, PagesStored)
        sizes.append(len(event.hashes))
        assert looked <= sum(sizes) + 1
    assert sizes == [6, 6, 6, 1, 6, 6, 6, 2]
    assert [len(list(joined([stored([], None)] * 9, 4)))] == [9]
