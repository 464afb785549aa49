"""Mini-batches that are sampled at once, and the scratch that each holds, within one budget.

While one waits for its pages, others pick, plan and finish. A mini-batch begins when there is room for as
much as any has needed so far, beside those under way, and never more than a few at once. One that needs more
takes what is free. Where that is too little it does not wait, because others may wait for what it holds: it
gives that up, is alone as soon as those under way have ended, and is made again. That costs time and nothing
else: what a mini-batch is follows from its seeds and key. Whoever is alone may take the room of what is held
in memory, which nobody else looks at then.

Several that read at once are worth more than what a cache saves where it does not hold everything, so the
cache makes room for two; for more there are only where room is left.

Nothing is lost to an interrupt: what holds scratch is known by weak references, and who waits looks again by
itself from time to time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from featstore.base.threads import Wake
from featstore.errors import BudgetError, ClosedError

UNDER_WAY_MAX = 3
_PATIENCE_SECONDS = 0.2  # who waits looks this often by itself


class MadeAgain(Exception):
    """A mini-batch that has no room beside others, to be made again when it is alone."""


class Holding(Protocol):
    """What holds a part of a table in memory, and can become smaller; ``whole``: it holds all of it."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def whole(self) -> bool: ...

    def cut(self, room_bytes: int) -> None: ...


class HeldInMemory:
    """What is held beside the scratch, and can become smaller: neighbours, and the numbers of edges; those
    first that are to stay longest."""

    def __init__(self, parts: Sequence[Holding]) -> None:
        self.parts = list(parts)

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        return sum(part.memory_bytes for part in self.parts)

    @property
    def whole(self) -> bool:
        """Whether it is all that there is, so that nothing is read."""
        return all(part.whole for part in self.parts)

    def cut(self, room_bytes: int) -> None:
        """Keep what fits into ``room_bytes``, the first parts first."""
        for part in self.parts:
            if part.memory_bytes > room_bytes:
                part.cut(room_bytes)
            room_bytes -= part.memory_bytes


class Scratch:
    """The scratch of a mini-batch, which has ``held_bytes`` of it."""

    def __init__(self, of: UnderWayNow) -> None:
        self.of, self.held_bytes = of, 0

    def reserve(self, scratch_bytes: int, what: str) -> None:
        """Have so much. Raises BudgetError, which says ``what`` it is for, and MadeAgain."""
        self.of.reserve(self, scratch_bytes, f"{what} (or pass fewer seeds)")


class UnderWayNow:
    """The mini-batches under way of one process. ``free_bytes`` are for their scratch and ``held``,
    ``first_bytes`` for the scratch of the first; ``needed``: the budget with so much scratch, for errors."""

    def __init__(
        self,
        held: HeldInMemory,
        free_bytes: int,
        first_bytes: int,
        given_bytes: int,
        needed: Callable[[int], int],
    ) -> None:
        self._held, self.free_bytes, self._given_bytes, self._needed = held, free_bytes, given_bytes, needed
        self.most_bytes = first_bytes  # that any mini-batch could not do without
        self._share_bytes = first_bytes  # that any has held
        self._closed = False
        self.renew()

    def renew(self) -> None:
        """None is under way in this process."""
        self.lock = threading.Lock()
        self._pid = os.getpid()
        self._all: weakref.WeakSet[Scratch] = weakref.WeakSet()
        self._alone: weakref.WeakSet[Scratch] = weakref.WeakSet()  # those that are to be
        self._waiting: list[Wake] = []
        self._crowded = False  # a second one found no room

    # Beginning, ending.

    def begin(self, one: Scratch, alone: bool = False) -> None:
        """Wait until there is room for a mini-batch, or until it is ``alone``. Raises ClosedError."""
        if alone:
            self._alone.add(one)
        self._wait(lambda: self._try_begin(one, alone))

    def end(self, one: Scratch) -> None:
        """A mini-batch holds nothing any more."""
        self._all.discard(one)
        self._alone.discard(one)
        for wake in list(self._waiting):
            wake.set()

    def close(self) -> None:
        """Let none begin any more, and wait for those under way."""
        self._closed = True
        self._wait(lambda: not self._all)

    def _wait(self, until: Callable[[], bool]) -> None:
        if until():
            return
        wake = Wake()
        self._waiting.append(wake)
        try:
            while not until():
                wake.wait(_PATIENCE_SECONDS)
        finally:
            self._waiting.remove(wake)

    def _try_begin(self, one: Scratch, alone: bool) -> bool:
        with self.lock:
            if self._closed:
                raise ClosedError("the sampler is closed; make another with store.sampler()")
            others = len(self._all)
            if others and (alone or others == UNDER_WAY_MAX):
                return False
            if self._alone and not alone:
                return False
            if others and self._room_bytes() < self.most_bytes:
                self._crowded = self._crowded or others == 1
                return False
            if not others and self._crowded and not self._held.whole:
                self._make_room_for_two()
            one.held_bytes = min(self._share_bytes, max(self.most_bytes, self._room_bytes()))
            self._all.add(one)
            return True

    def _make_room_for_two(self) -> None:
        both = 2 * self.most_bytes
        if both <= self.free_bytes < both + self._held.memory_bytes:
            self._held.cut(self.free_bytes - both)

    # Scratch of those that have begun.

    def _room_bytes(self, beside: Scratch | None = None) -> int:
        """What is free for one more, or for one of those."""
        held = sum(one.held_bytes for one in self._all if one is not beside)
        return self.free_bytes - self._held.memory_bytes - held

    def reserve(self, one: Scratch, scratch_bytes: int, what: str) -> None:
        """Have so much for a mini-batch. Raises BudgetError, which says ``what`` it is for, and MadeAgain."""
        if scratch_bytes > self.free_bytes:
            raise BudgetError(self._needed(scratch_bytes), self._given_bytes, what)
        if not self.try_reserve(one, scratch_bytes):
            raise MadeAgain
        self.most_bytes = max(self.most_bytes, scratch_bytes)

    def try_reserve(self, one: Scratch, scratch_bytes: int) -> bool:
        """Have so much for a mini-batch, if there is room."""
        if scratch_bytes <= one.held_bytes:
            return True
        with self.lock:
            if scratch_bytes > self._room_bytes(one):
                if len(self._all) > 1 or scratch_bytes > self.free_bytes:
                    return False
                self._held.cut(self.free_bytes - scratch_bytes)
            one.held_bytes = scratch_bytes
            self._share_bytes = max(self._share_bytes, scratch_bytes)
            return True
