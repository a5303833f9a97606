"""The bridge against a naive model: pages in a set, and a block is held while all its pages are there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kv_types import KvEvent, Medium, PagesCleared, PagesRemoved, PagesStored
from routing.kv_bridge import Change, Held, KvBridge, Lost
from routing.kv_joining import joined
from routing.ownership import Tier
from routing.prefix import Namespace, id_blocks, root_hash

TIERS = {Medium.GPU: Tier.DEVICE, Medium.CPU_PINNED: Tier.HOST, Medium.DISK: Tier.STORE, Medium.EXTERNAL: Tier.STORE}
MEDIA = st.sampled_from([Medium.GPU] * 4 + [Medium.CPU_PINNED, Medium.DISK, Medium.EXTERNAL])
SHAPES = [(4, 1), (4, 2), (4, 4), (4, 8), (4, 3), (4, 6), (6, 4), (1, 1), (2, 5)]
"""Tokens of a block and of a page: dividing each other, and not."""
SALTS = (None, None, "salt")


def root_of(salt: str | None, lora: str | None) -> bytes:
    return root_hash(Namespace(salt or "", "model", lora=lora or ""))


@dataclass
class Model:
    """What the engine has. A page is (salt, all tokens up to its end); its hash is a number given at first sight."""

    block_tokens: int
    page_tokens: int
    there: dict[Medium, set[tuple[str | None, tuple[int, ...]]]] = field(
        default_factory=lambda: {medium: set() for medium in Medium}
    )
    numbers: dict[tuple[str | None, tuple[int, ...]], int] = field(default_factory=dict)
    fresh: count[int] = field(default_factory=lambda: count(-5))

    def number(self, page: tuple[str | None, tuple[int, ...]]) -> int:
        return self.numbers.setdefault(page, next(self.fresh) * 7_777_777_777_777_777 % (1 << 63) - (1 << 62))

    def pages(self, salt: str | None, tokens: tuple[int, ...]) -> list[tuple[str | None, tuple[int, ...]]]:
        size = self.page_tokens
        return [(salt, tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def store(self, salt: str | None, tokens: tuple[int, ...], skip: int, medium: Medium) -> PagesStored | None:
        pages = self.pages(salt, tokens)
        parent, new = pages[:skip], pages[skip:]
        if not new:
            return None
        self.there[medium] |= set(new)
        ids = tokens[skip * self.page_tokens : len(pages) * self.page_tokens]
        hashes = [self.number(page) for page in new]
        above = self.number(parent[-1]) if parent else None
        return PagesStored(hashes, above, list(ids), self.page_tokens, medium, None if parent else salt)

    def held(self) -> set[tuple[Tier, bytes]]:
        found = set()
        for tier in Tier:
            there = set().union(*(self.there[medium] for medium in Medium if TIERS[medium] is tier))
            for salt, tokens in there:
                for end, block in blocks_of(salt, tokens, self.block_tokens):
                    first, last = self.page_of(end - self.block_tokens), self.page_of(end - 1)
                    size = self.page_tokens
                    ends = [(page + 1) * size for page in range(first, last + 1)]
                    if ends[-1] == len(tokens) and all((salt, tokens[:each]) in there for each in ends):
                        found.add((tier, block))
        return found

    def page_of(self, token: int) -> int:
        return token // self.page_tokens


@lru_cache(50_000)
def blocks_of(salt: str | None, tokens: tuple[int, ...], block_tokens: int) -> list[tuple[int, bytes]]:
    """Every whole block of a prompt, with the number of tokens up to its end."""
    blocks = id_blocks(root_of(salt, None), tokens, block_tokens)
    return [((number + 1) * block_tokens, block) for number, block in enumerate(blocks)]


def follow(held: set[tuple[Tier, bytes]], changes: list[Change]) -> None:
    for change in changes:
        if isinstance(change, Held):
            held |= {(change.tier, block) for block in change.blocks}
        elif isinstance(change, Lost):
            held -= {(change.tier, block) for block in change.blocks}
        else:
            held.clear()


ACTIONS = st.sampled_from(["store"] * 6 + ["evict"] * 2 + ["one"] * 3 + ["leaf"] * 2 + ["clear", "copy"])
TOKENS = st.integers(0, 26).flatmap(lambda size: st.lists(st.integers(0, 1), min_size=size, max_size=size)).map(tuple)
"""Of all lengths alike."""


@st.composite
def prompts(draw: st.DrawFn, earlier: list[tuple[int, ...]]) -> tuple[int, ...]:
    """A new prompt, or one that parts from an earlier one somewhere."""
    tokens = draw(TOKENS)
    if earlier and draw(st.integers(0, 3)):
        before = draw(st.sampled_from(earlier))
        cut = draw(st.integers(0, len(before)))
        tokens = before[:cut] + (2,) * draw(st.integers(0, 1)) + tokens[:10]
    earlier.append(tokens)
    return tokens


@settings(max_examples=2 * settings().max_examples)
@given(st.sampled_from(SHAPES), st.data())
def test_blocks_are_held_while_their_pages_are(shape: tuple[int, int], data: st.DataObject) -> None:
    model, held = Model(*shape), set[tuple[Tier, bytes]]()
    bridge = KvBridge(root_of, *shape, max_pages=10_000)
    earlier: list[tuple[int, ...]] = []
    for _ in range(data.draw(st.integers(1, 14))):
        what = data.draw(
            st.sampled_from(["store"] * 6 + ["evict"] * 2 + ["one"] * 3 + ["leaf", "leaf", "clear", "copy"])
        )
        event: KvEvent | None = None
        medium = data.draw(MEDIA)
        if what == "store":
            salt, tokens = data.draw(st.sampled_from(SALTS)), data.draw(prompts(earlier))
            pages = model.pages(salt, tokens)
            known = 0  # an engine may name any page that it has, on whichever medium, as the one before
            while known < len(pages) and any(pages[known] in there for there in model.there.values()):
                known += 1
            event = model.store(salt, tokens, data.draw(st.integers(0, known)), medium)
        elif what == "clear":
            event = PagesCleared()
            model.there = {medium: set() for medium in Medium}
        elif there := sorted(model.there[medium], key=repr):
            page = data.draw(st.sampled_from(there))
            if what == "copy":
                event = model.store(*page, 0, data.draw(MEDIA))
            else:
                longer = {each for each in there if each[0] == page[0] and each[1][: len(page[1])] == page[1]}
                some = {"leaf": longer, "one": {page}}
                gone = some.get(what) or set(data.draw(st.permutations(there))[: len(longer)])
                model.there[medium] -= gone
                event = PagesRemoved(data.draw(st.permutations([model.number(each) for each in gone])), medium)
        if event is not None:
            follow(held, bridge.apply(event))
            assert held == model.held()
    for medium, there in model.there.items():  # whatever goes, nothing stays behind
        follow(held, bridge.apply(PagesRemoved([model.number(page) for page in there], medium)))
    assert held == set()
    assert bridge.pages == 0


@given(st.sampled_from(SHAPES), st.lists(TOKENS, min_size=1, max_size=5), st.data())
def test_pages_before_their_parents_count_when_these_come(
    shape: tuple[int, int], prompts: list[tuple[int, ...]], data: st.DataObject
) -> None:
    """Events of the same pages, one a page, in any order, with removals after their stores."""
    model, held = Model(*shape), set[tuple[Tier, bytes]]()
    bridge = KvBridge(root_of, *shape, max_pages=10_000)
    events: list[PagesStored] = []
    for tokens in prompts:
        for skip, page in enumerate(model.pages(None, tokens)):
            if page not in model.there[Medium.GPU]:
                event = model.store(*page, skip, Medium.GPU)
                assert event is not None
                events.append(event)
    shuffled = data.draw(st.permutations(events))
    for event in shuffled:
        follow(held, bridge.apply(event))
    assert held == model.held()
    for order in (shuffled, events):  # joined, they mean the same
        together, joint = KvBridge(root_of, *shape, max_pages=10_000), set[tuple[Tier, bytes]]()
        for each in joined(order, data.draw(st.integers(1, 20))):
            follow(joint, together.apply(each))
        assert joint == held
        assert together.pages == bridge.pages
    late = KvBridge(root_of, *shape, max_pages=10_000)
    gone = {page for page in model.there[Medium.GPU] if data.draw(st.booleans())}
    removed = [PagesRemoved([model.number(page)]) for page in gone]
    held.clear()
    for some in (events[1:], removed, events[:1]):  # the first root comes last: removals met what waited
        for each in some:
            follow(held, late.apply(each))
    if events and events[0].hashes[0] in {model.number(page) for page in gone}:
        gone -= {page for page in gone if model.number(page) == events[0].hashes[0]}
    model.there[Medium.GPU] -= gone
    assert held == model.held()


NUMBERS = st.integers(0, 7)


@settings(max_examples=2 * settings().max_examples)
@given(st.sampled_from([(4, 1), (4, 4), (4, 3)]), st.data())
def test_events_that_contradict_each_other_do_no_harm(shape: tuple[int, int], data: st.DataObject) -> None:
    """Any hashes behind any: every event ends, and what is removed everywhere is gone."""
    bridge = KvBridge(root_of, *shape, max_pages=data.draw(st.sampled_from([5, 1000])))
    for _ in range(data.draw(st.integers(1, 12))):
        hashes, medium = data.draw(st.lists(NUMBERS, max_size=4)), data.draw(MEDIA)
        if data.draw(st.integers(0, 3)):
            parent = data.draw(st.none() | NUMBERS)
            bridge.apply(PagesStored(hashes, parent, [1] * len(hashes) * shape[1], shape[1], medium))
        else:
            bridge.apply(PagesRemoved(hashes, medium))
    for medium in Medium:
        bridge.apply(PagesRemoved(list(range(8)), medium))
    waiting = bridge.pages
    bridge.apply(PagesCleared())
    assert waiting <= max(1, 1000 // 8)
    assert bridge.memory_bytes == 0
