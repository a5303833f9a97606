"""The log never waits for its reader: what it cannot take is counted, and said when it can be."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys

from gateway.logs import BoundedHandler, DescriptorHandler, Writer


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("pdgate", logging.INFO, __file__, 0, text, None, None)


def test_a_full_queue_drops_and_counts() -> None:
    records: queue.Queue[logging.LogRecord] = queue.Queue(2)
    handler = BoundedHandler(records)
    for number in range(5):
        handler.handle(record(str(number)))
    assert handler.dropped == 3
    assert [records.get_nowait().getMessage() for _ in range(2)] == ["0", "1"]
    handler.handle(record("5"))
    assert handler.dropped == 0
    assert records.get_nowait().getMessage() == "5"
    assert records.get_nowait().getMessage().startswith("3 lines of this log are lost")


def test_lines_come_out_as_they_went_in() -> None:
    reading, writing = os.pipe()
    records: queue.Queue[logging.LogRecord] = queue.Queue(10)
    writer = Writer(records, DescriptorHandler(writing))
    writer.start()
    handler = BoundedHandler(records)
    handler.handle(record("caf\u00e9 \ud800"))
    writer.stop()
    os.close(writing)
    with os.fdopen(reading, "rb") as lines:
        said = lines.read().decode()
    assert said.endswith("INFO pdgate caf\u00e9 \\ud800\n")


def test_a_reader_that_has_gone_is_no_fault() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    DescriptorHandler(writing).handle(record("nobody hears this"))
    os.close(writing)


BLOCKED = """
import logging, os, sys
from gateway import logs
with logs.to_stderr("INFO"):
    for number in range(10_000):
        logging.getLogger("pdgate").info("x" * 1000)
print("done", flush=True)
"""


def test_a_process_ends_though_nobody_reads_its_log() -> None:
    reading, writing = os.pipe()
    try:
        ended = subprocess.run([sys.executable, "-c", BLOCKED], stderr=writing, stdout=subprocess.PIPE, timeout=20)
        assert (ended.returncode, ended.stdout) == (0, b"done\n")
    finally:
        os.close(reading)
        os.close(writing)
