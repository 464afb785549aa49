"""How the hosts of a run find each other by the store of ``torch.distributed``, whatever is left in it of
those who met there before.

``torchrun`` begins workers again with the store that they had, and nothing tells the same on all hosts which
time it is. So a host that comes asks with a word that nobody has used, and the first host answers it, with
the name of the meeting, which it has made up likewise. What stands under a word or a name that is made up is
never of before; what is left of before under the numbers of hosts is answered, too, and nobody hears it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

_LOOK_SECONDS = 0.02  # from one look at the store to the next
_AT = "featstore/hosts"


def meet(store: Any, machine: int, machines: int, seconds: float) -> tuple[str, list[int]]:
    """(The name of the meeting, which machines have not come within so many seconds). All call it at about
    the same time. The store: of ``torch.distributed``; raises its errors."""
    lead = _lead if machine == 0 else _follow
    return lead(store, machine, machines, time.monotonic() + seconds)


def _lead(store: Any, _: int, machines: int, end: float) -> tuple[str, list[int]]:
    name, answered = f"{_AT}/{secrets.token_hex(8)}", dict[int, bytes]()

    def look() -> bool:
        for other in range(1, machines):
            asked = f"{_AT}/asks/{other}"
            if store.check([asked]) and answered.get(other) != (word := store.get(asked)):
                if time.monotonic() >= end:  # the store stood still, and another may lead now
                    return False
                store.set(f"{_AT}/{word.decode()}", name)
                answered[other] = word
        return not _missing(store, name, machines)

    if _within(end, look):
        store.set(f"{name}/all", "")
        return name, []
    return name, _missing(store, name, machines)


def _follow(store: Any, machine: int, machines: int, end: float) -> tuple[str, list[int]]:
    word = secrets.token_hex(8)
    store.set(f"{_AT}/asks/{machine}", word)
    if not _within(end, lambda: bool(store.check([f"{_AT}/{word}"]))):
        return "", [0]
    name = store.get(f"{_AT}/{word}").decode()
    store.set(f"{name}/{machine}", "")
    if _within(end, lambda: bool(store.check([f"{name}/all"]))):
        return name, []
    return name, _missing(store, name, machines) or [0]


def _missing(store: Any, name: str, machines: int) -> list[int]:
    return [other for other in range(1, machines) if not store.check([f"{name}/{other}"])]


def _within(end: float, happened: Callable[[], bool]) -> bool:
    """Whether it has happened by then."""
    while not happened():
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
