from __future__ import annotations

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import ROOT, Keys, Run, Tier
from routing.ownership_outbox import Batch, Lane
from routing.ownership_writing import Sent, Writing

ENGINES = [EngineId(f"e{index}") for index in range(4)]
KEYS = Keys("t", "f")


def batch(number: int, blocks: int = 1) -> Batch:
    run = Run(ROOT, tuple(b"%016d" % at for at in range(blocks)))
    return Batch(number, (log.hold(Tier.DEVICE, run, 1000),), 0)


def batches(*made: Batch) -> list[tuple[Lane, Batch]]:
    return [(Lane(engine_id, epoch=1, number=7), each) for engine_id, each in zip(ENGINES, made, strict=False)]


def numbers(groups: list[list[Sent]]) -> list[list[int]]:
    return [[sent.batch.number for sent in group] for group in groups]


def test_batches_go_together_up_to_a_size() -> None:
    writing = Writing(KEYS, "r", 5, 200)
    assert numbers(list(writing.groups(batches(batch(1), batch(2), batch(3)), one_each=False))) == [[1, 2, 3]]
    sizes = batches(batch(1, 9), batch(2), batch(3, 30), batch(4))
    assert numbers(list(writing.groups(sizes, one_each=False))) == [[1], [2], [3], [4]]
    assert numbers(list(writing.groups(batches(batch(1, 4), batch(2), batch(3, 4)), one_each=False))) == [[1, 2], [3]]
    assert list(writing.groups([], one_each=False)) == []


def test_each_goes_alone_in_a_cluster() -> None:
    writing = Writing(KEYS, "r", 5, 1 << 20)
    assert numbers(list(writing.groups(batches(batch(1), batch(2)), one_each=True))) == [[1], [2]]


def test_a_batch_that_was_refused_goes_alone() -> None:
    writing = Writing(KEYS, "r", 5, 1 << 20)
    refused = batch(2)
    refused.refusals = 1
    made = batches(batch(1), refused, batch(3), batch(4))
    assert numbers(list(writing.groups(made, one_each=False))) == [[1], [2], [3, 4]]


def test_a_call_has_the_keys_and_words_of_all_and_clears_out_now_and_then() -> None:
    writing = Writing(KEYS, "r", 5, 1 << 20)
    made = batches(batch(1), batch(2))
    [group] = writing.groups(made, one_each=False)
    call = writing.call(group, 10.0, {b"log a": b"1-0", b"log b": b"0-0"})
    assert len(call.keys) == 2 * 6 + 2
    assert call.keys[6 + 3] == KEYS.runs(ENGINES[1], 7)
    assert call.keys[-2:] == [b"log a", b"log b"]
    assert call.args[2:5] == [b"r1", b"2", b"64"]
    assert call.args[5:8] == [b"r 1 7 e0", b"1", log.pack_ops(made[0][1].ops)]
    assert call.args[11:] == [b"1-0", b"0-0"]
    assert [writing.call(group, now_s, {}).args[6] for now_s in (10.2, 10.4)] == [b"0", b"1"]
    made[0][0].number = 8
    [group] = writing.groups(made[:1], one_each=False)
    assert writing.call(group, 10.0, {}).keys[3] == KEYS.runs(ENGINES[0], 8), "of another boot"


def test_a_reply_tells_the_entry() -> None:
    writing = Writing(KEYS, "r", 5, 1 << 20)
    [[sent]] = writing.groups(batches(batch(3)), one_each=False)
    written = writing.written(sent, [1, 7, 12, b"x", b"5-0", b"4-0", b"0 2", 1, b"tail", b""])
    assert (written.entry_id, written.lost_cuts, written.missing) == (b"5-0", 1, [b"tail", b""])
    ops = log.pack_ops(sent.batch.ops)
    assert written.entry == log.LogEntry(12, b"x", b"4-0", b"r", 3, 7, ENGINES[0], frozenset((0, 2)), ops)
    name = log.batch_name(b"r", 3, 7, ENGINES[0])
    assert written.entry == log.unpack_entry({b"h": b"12 x 4-0 " + name, b"o": ops, b"x": b"0 2"}), "as the log has it"
    assert sent.is_current
    sent.lane.number = 8
    assert not sent.is_current
