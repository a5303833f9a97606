"""The log's way to stderr, which never waits: a reader that stands still costs lines, never the event loop.

Records go through a bounded queue to a thread that writes them. The log may lie on disk or in a pipe of a supervisor;
a full pipe blocks that thread alone, and what the queue cannot take is counted.
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler, QueueListener

WAITING_RECORDS = 8192
"""Records that may wait for a slow reader of the log; more are dropped."""
_LAST_RECORDS_S = 1.0
"""At exit, how long the last records may take: a pipe that nobody reads must not hold the process."""
_STDERR = 2
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

Records = queue.Queue[logging.LogRecord]


@contextmanager
def to_stderr(level: str) -> Iterator[None]:
    """Everything logged goes to stderr, from `level` on."""
    records: Records = queue.Queue(WAITING_RECORDS)
    handler = BoundedHandler(records)
    writer = Writer(records, DescriptorHandler(_STDERR))
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(handler)
    writer.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        writer.stop()


class BoundedHandler(QueueHandler):
    """Hands records to the queue; drops and counts them while it is full, and says so when it no longer is."""

    def __init__(self, records: Records) -> None:
        super().__init__(records)
        self.dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            return
        if self.dropped:
            with suppress(queue.Full):
                self.queue.put_nowait(_lost(self.dropped))
                self.dropped = 0


class Writer(QueueListener):
    """The daemon thread that writes; `stop` waits for it no longer than `_LAST_RECORDS_S`."""

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            with suppress(queue.Full):
                self.enqueue_sentinel()
            thread.join(_LAST_RECORDS_S)


class DescriptorHandler(logging.Handler):
    """Writes lines to a file descriptor, past `sys.stderr`.

    Neither the stream's lock nor a handler's is held while a write blocks: the interpreter takes both when it exits.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.setFormatter(logging.Formatter(_FORMAT))

    def createLock(self) -> None:
        """None is needed: one thread writes."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        line = memoryview(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        with suppress(OSError):  # nobody is left to be told
            while line:
                line = line[os.write(self._descriptor, line) :]


def _lost(count: int) -> logging.LogRecord:
    text = f"{count} lines of this log are lost: its reader was too slow"
    return logging.LogRecord("pdgate.logs", logging.WARNING, __file__, 0, text, None, None)
