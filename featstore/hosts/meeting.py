"""How the hosts of a run find each other by the store of ``torch.distributed``, whatever is left in it of
those who met there before.

``torchrun`` begins workers again with the store that they had, and nothing tells the same on all hosts which
time it is. So a host that comes asks with a word that nobody has used, and the first host answers it, with
the name of the meeting, which it has made up likewise. What stands under a word or a name that is made up is
never of before; what is left of before under the numbers of ranks is answered, too, and nobody hears it.

A host that fails says so under that name, which it asks for where it does not have it yet. Whoever finds that
says that it has heard; from then on it is no longer answered, as what it asks is for another meeting.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

_LOOK_SECONDS = 0.02  # from one look at the store to the next
_AT = "featstore/hosts"


class HasFailed(Exception):
    """Another rank has said so, which has this part; ``why``, in its words."""

    def __init__(self, rank: int, part: int | None, why: str) -> None:
        super().__init__(rank, part, why)
        self.rank, self.part, self.why = rank, part, why


class Rendezvous:
    """Of the processes with these ``ranks`` of the run, as that of ``rank`` sees it; rank 0 leads. All make
    theirs at about the same time. ``store``: of ``torch.distributed``; its errors are raised. ``part``: that
    this one has of the split store; None as long as it does not know that."""

    def __init__(self, store: Any, rank: int, ranks: Iterable[int], part: int | None = None) -> None:
        self._store, self._rank = store, rank
        self._part = "" if part is None else str(part)
        self._others = [other for other in ranks if other not in (0, rank)]
        self._answered = dict[int, bytes]()
        #: Under which all that is said in it stands; of others than rank 0 once they have been answered.
        self.name = f"{_AT}/{secrets.token_hex(8)}" if rank == 0 else ""
        self.heard = False  # of one that has failed

    def reach(self, stage: str, seconds: float) -> list[int]:
        """Say that this process has come so far, and wait for the others: which have not within so many
        seconds. Raises HasFailed."""
        end = time.monotonic() + seconds
        if not self._find(end):
            return [0]
        if self._rank:
            self._say(f"{stage}/{self._rank}", self._part)
            reached = _within(end, lambda: self._hear() or self._said(f"{stage}/all"))
            return [] if reached else self._missing(stage) or [0]
        if not _within(end, lambda: self._hear() or (self._answer(end) and not self._missing(stage))):
            return self._missing(stage)
        self._say(f"{stage}/all", self._part)
        return []

    def part_of(self, rank: int, stage: str) -> int | None:
        """Which part a rank has, as it said when it came so far; None where it did not."""
        key = f"{stage}/{rank or 'all'}"
        said = self._store.get(f"{self.name}/{key}").decode() if self._said(key) else ""
        return int(said) if said else None

    def fail(self, why: str, seconds: float) -> None:
        """Tell the others that this process has failed, if none did before. Rank 0, which others hear it
        from, waits until they have, and others until it knows them; no longer than so many seconds."""
        end = time.monotonic() + seconds
        if not self._find(end):
            return
        if not self._said("failed"):
            self._say("failed", f"{self._rank} {self._part} {why}")
        self._say(f"heard/{self._rank}")
        if not self._rank:
            _within(end, lambda: self._answer(end) and not self._missing("heard"))

    def _find(self, end: float) -> bool:
        """Whether the name is known, by then."""
        if not self.name:
            word = secrets.token_hex(8)
            self._store.set(f"{_AT}/asks/{self._rank}", word)
            if _within(end, lambda: bool(self._store.check([f"{_AT}/{word}"]))):
                self.name = self._store.get(f"{_AT}/{word}").decode()
        return bool(self.name)

    def _answer(self, end: float) -> bool:
        """Tell the name to those who ask for it; False where it is too late for that."""
        for other in self._others:
            asked = f"{_AT}/asks/{other}"
            if not self._store.check([asked]):
                continue
            word = self._store.get(asked)
            # once it has heard that one has failed, its word is for another meeting
            if word == self._answered.get(other) or self._said(f"heard/{other}"):
                continue
            if time.monotonic() >= end:  # the store stood still, and another may lead now
                return False
            self._store.set(f"{_AT}/{word.decode()}", self.name)
            self._answered[other] = word
        return True

    def _hear(self) -> bool:
        """False, where none has failed."""
        if self._said("failed"):
            rank, part, why = self._store.get(f"{self.name}/failed").decode().split(" ", 2)
            self._say(f"heard/{self._rank}")
            self.heard = True
            raise HasFailed(int(rank), int(part) if part else None, why)
        return False

    def _missing(self, stage: str) -> list[int]:
        return [other for other in self._others if not self._said(f"{stage}/{other}")]

    def _say(self, what: str, text: str = "") -> None:
        self._store.set(f"{self.name}/{what}", text)

    def _said(self, what: str) -> bool:
        return bool(self._store.check([f"{self.name}/{what}"]))


def _within(end: float, happened: Callable[[], bool]) -> bool:
    """Whether it has happened by then."""
    while not happened():
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
