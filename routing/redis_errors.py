"""What can be wrong with Redis, and how the words of servers and of the client library map to it. Pure."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any


class Trouble(StrEnum):
    """Why Redis could not be used."""

    DOWN = "down"
    """No connection, or it broke, or what came was no Redis reply to what was asked (perhaps another service answers
    there); also while a server loads its data set or a Cluster has no owner for a slot."""
    SLOW = "slow"
    """No answer in time; what was asked may have been done."""
    READ_ONLY = "read_only"
    OUT_OF_MEMORY = "out_of_memory"
    AUTH = "auth"
    """Password or permissions are not (or no longer) what the server wants."""
    REFUSED = "refused"
    """The server answered with an error that none of the others is: a fault of ours, or of a script."""


class RedisTrouble(Exception):
    """A call to Redis failed. `maybe_done`: the server may have carried it out all the same."""

    def __init__(self, kind: Trouble, message: str, *, maybe_done: bool = False) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.maybe_done = maybe_done


# By the code that an error reply begins with. The library cuts the code off where it has a class for it.
_BY_CODE = {
    "LOADING": Trouble.DOWN,
    "CLUSTERDOWN": Trouble.DOWN,
    "MASTERDOWN": Trouble.DOWN,
    "TRYAGAIN": Trouble.DOWN,
    "UNBLOCKED": Trouble.DOWN,  # a blocked reader was let go because its server changes its role
    "BUSY": Trouble.SLOW,  # somebody's script runs for too long
    "READONLY": Trouble.READ_ONLY,
    "MISCONF": Trouble.READ_ONLY,  # the server cannot save its data set and takes no writes until it can
    "NOREPLICAS": Trouble.READ_ONLY,
    "OOM": Trouble.OUT_OF_MEMORY,
    "NOAUTH": Trouble.AUTH,
    "WRONGPASS": Trouble.AUTH,
    "NOPERM": Trouble.AUTH,
}
# By the names of the classes of redis.exceptions and of Python; of an error's own classes the first that is named here.
_BY_CLASS = {
    "BusyLoadingError": Trouble.DOWN,
    "ClusterDownError": Trouble.DOWN,
    "MasterDownError": Trouble.DOWN,
    "TryAgainError": Trouble.DOWN,
    "ReadOnlyError": Trouble.READ_ONLY,
    "OutOfMemoryError": Trouble.OUT_OF_MEMORY,
    "AuthenticationError": Trouble.AUTH,
    "AuthorizationError": Trouble.AUTH,
    "NoPermissionError": Trouble.AUTH,
    "AuthenticationWrongNumberOfArgsError": Trouble.AUTH,
    "InvalidResponse": Trouble.DOWN,
    "TimeoutError": Trouble.SLOW,
    "ConnectionError": Trouble.DOWN,
    "OSError": Trouble.DOWN,
}
# A script that ran into an error: Redis 6 wraps it ("ERR Error running script (...): @user_script:1: -OOM command"),
# Redis 7 puts it first. Both have no code for what the user's permissions forbid to a script.
_CODE = re.compile(rf"(?:^|: ?-?)({'|'.join(_BY_CODE)})\b")
_FORBIDDEN = re.compile(r"The user executing the script can't |ACL failure in script: ")


def kind_of(error: BaseException) -> Trouble:
    """What an exception of the library, of the network, or an error reply means."""
    for each in type(error).__mro__:
        if each.__name__ in _BY_CLASS:
            return _BY_CLASS[each.__name__]
    if found := _CODE.search(str(error)):
        return _BY_CODE[found[1]]
    return Trouble.AUTH if _FORBIDDEN.search(str(error)) else Trouble.REFUSED


def nonsense(where: object, what: str, reply: Any) -> RedisTrouble:
    """`where` answered to `what` as no Redis does; the reply may be of any shape and size."""
    shown = repr(reply) if isinstance(reply, bytes | str | int | float | None) else type(reply).__name__
    return RedisTrouble(Trouble.DOWN, f"{where}: the reply to {what} is none of Redis: {shown[:80]}", maybe_done=True)


def trouble_of(error: BaseException, *, maybe_done: bool = False, where: str = "") -> RedisTrouble:
    """The same as RedisTrouble; `where` names the server in its text."""
    text = str(error) or type(error).__name__
    return RedisTrouble(kind_of(error), f"{where}: {text}" if where else text, maybe_done=maybe_done)
