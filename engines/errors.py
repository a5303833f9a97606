"""What an exchange with a server raises: library exceptions are translated to this once, in `upstream.py`."""

from __future__ import annotations

from engines.types import FailureKind


class UpstreamError(Exception):
    """An HTTP exchange with a server did not come to a whole answer.

    `definite` says that the server surely did no work for it: true only when no connection was made.
    """

    def __init__(self, kind: FailureKind, message: str, *, definite: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.definite = definite
