"""A broken link between two healthy servers: what an emulated server sends to the addresses in a file is lost.

Python runs this at its start where it finds it; a test lets one server find it. The file is named by LOST_ADDRESSES.
"""

import os
from pathlib import Path

from engines.emulator.transfer import Dialer, Frame

_lost = Path(os.environ["LOST_ADDRESSES"])
_send = Dialer.send


def send(self: Dialer, address: str, frame: Frame) -> None:
    if address not in _lost.read_text().split():
        _send(self, address, frame)


Dialer.send = send  # type: ignore[method-assign]
