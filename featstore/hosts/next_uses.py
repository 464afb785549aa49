"""When the rows of mini-batches are wanted again: those to come are looked at in blocks of steps, and of each
row that the present block wants it is known when it is wanted next, within that block and the next.

A block has each step's ids, ascending. When its turn comes, its steps and those of the next block are gone
through backwards, which leaves for each row the step that wants it first in a table, of so many ids at a
time as that has room for: what stood there before is when the row is wanted next. Uses are numbered from the
begin of the present block.

One thread adds steps, another goes on to them; both may ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import INLINED
from featstore.errors import BudgetError
from featstore.tiers.slots.chains import chain_of
from featstore.tiers.slots.layout import NEVER

STEPS_MAX = 64  # of a block
_STEPS_MIN = 8  # of a block: what of a mini-batch is too much for this is not looked at
_TABLE_MAX = 1 << 17  # ids; they stay in a core's cache
_BUFFERS = 4  # of ids: the present block's, the next one's, that after it, and what is begun before its turn
# for each: ids, the next use, the table, and for each id of a step four places of a hash table
_ENTRY_BYTES = 8 * _BUFFERS + 1 + 1 + 4 * 4 // _STEPS_MIN
#: It takes so much memory at least.
LEAST_BYTES = _STEPS_MIN * _ENTRY_BYTES
_FILLED = 0.9  # of the memory, by the first block, so that later ones may be a little larger
#: Uses are below this.
USES_MAX = 2 * STEPS_MAX
_NONE = 255  # no use, in a byte


@njit(**INLINED)
def _mark(
    ids: NDArray[np.int64], offsets: NDArray[np.int64], at: NDArray[np.int64], low: int, later: int,
    table: NDArray[np.uint8],
) -> None:  # fmt: skip
    """Put into ``table``, whose first place is of id ``low``, which step of a block wants each id first,
    ``later`` steps later. ``at``: how far each step has been gone through, with ascending ``low``."""
    for step in range(at.shape[0] - 1, -1, -1):
        i, end = at[step], offsets[step + 1]
        while i < end and ids[i] < low:
            i += 1
        while i < end and ids[i] < low + table.shape[0]:
            table[ids[i] - low] = later + step
            i += 1
        at[step] = i


@njit(cache=True, nogil=True)
def find_next_uses(
    ids: NDArray[np.int64], offsets: NDArray[np.int64], next_ids: NDArray[np.int64],
    next_offsets: NDArray[np.int64], table: NDArray[np.uint8], uses: NDArray[np.uint8],
) -> None:  # fmt: skip
    """When each row of each step of a block (``ids``, ascending between each two ``offsets``) is wanted next,
    by it or by the next block. ``table``: of a power of two of ids."""
    steps = offsets.shape[0] - 1
    at, next_at = offsets[:-1].copy(), next_offsets[:-1].copy()
    while True:
        least = np.int64(-1)
        for step in range(steps):
            if at[step] < offsets[step + 1] and (least < 0 or ids[at[step]] < least):
                least = ids[at[step]]
        if least < 0:
            return
        low = least - least % table.shape[0]
        for step in range(steps):
            i, end = at[step], offsets[step + 1]
            while i < end and ids[i] < low + table.shape[0]:
                table[ids[i] - low] = _NONE
                i += 1
        _mark(next_ids, next_offsets, next_at, low, steps, table)
        for step in range(steps - 1, -1, -1):
            i, end = at[step], offsets[step + 1]
            while i < end and ids[i] < low + table.shape[0]:
                place = ids[i] - low
                uses[i] = table[place]
                table[place] = step
                i += 1
            at[step] = i


@njit(cache=True, nogil=True)
def place_ids(ids: NDArray[np.int64], places: NDArray[np.int32]) -> None:
    """Have the position of each id (all different) in a hash table, of a power of two of places and more than
    there are ids; -1 where none is."""
    places[:] = -1
    shift, mask = _shift_of(places), places.shape[0] - 1
    for i in range(ids.shape[0]):
        at = chain_of(ids[i], shift)
        while places[at] >= 0:
            at = (at + 1) & mask
        places[at] = i


@njit(cache=True, nogil=True)
def find_uses(
    wanted: NDArray[np.int64], first: int, ids: NDArray[np.int64], uses: NDArray[np.uint8],
    places: NDArray[np.int32], out: NDArray[np.int32],
) -> None:  # fmt: skip
    """Of each id wanted, which is ``first`` less than among ``ids``, what stands beside it in ``uses``, NEVER
    where it is not there. ``places``: as of :func:`place_ids`."""
    shift, mask = _shift_of(places), places.shape[0] - 1
    for i in range(wanted.shape[0]):
        one = wanted[i] + first
        at = chain_of(one, shift)
        while places[at] >= 0 and ids[places[at]] != one:
            at = (at + 1) & mask
        found = np.int64(places[at])
        out[i] = uses[found] if found >= 0 and uses[found] != _NONE else NEVER


@njit(**INLINED)
def _shift_of(places: NDArray[np.int32]) -> int:
    """By how much a hash of 64 bits is shifted to a place."""
    shift = 64
    while (1 << (64 - shift)) < places.shape[0]:
        shift -= 1
    return shift


class Block(NamedTuple):
    """The steps of a block: their ``ids``, of each ascending from one of ``offsets`` to the next. ``use``: of
    the first step, counted from the begin of the present block."""

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    use: int


#: Takes by how much uses have less to count from now on, and what is known then: the present block, and the
#: next. The former again, as rows that something above had meanwhile were not asked for.
OnBlock = Callable[[int, Sequence[Block]], None]


class NextUses:
    """See the module's text. ``memory_bytes``: for all of it. Raises BudgetError."""

    def __init__(self, memory_bytes: int) -> None:
        if memory_bytes < LEAST_BYTES:
            raise BudgetError(LEAST_BYTES, memory_bytes, "look ahead")
        entries = memory_bytes // _ENTRY_BYTES
        self._ids = [np.empty(entries, np.int64) for _ in range(_BUFFERS)]
        self._offsets = np.zeros((_BUFFERS, STEPS_MAX + 1), np.int64)  # where each step begins there
        self._uses = np.empty(entries, np.uint8)
        self._table = np.empty(min(_TABLE_MAX, 1 << (entries.bit_length() - 1)), np.uint8)
        self._places = np.empty(_places_of(entries // _STEPS_MIN), np.int32)
        self._lock = threading.Lock()
        self.restart()
        none = self._block(-1)
        find_next_uses(*none[:2], *none[:2], self._table, self._uses)
        place_ids(none.ids, self._places[:2])
        find_uses(none.ids, 0, none.ids, self._uses, self._places[:2], np.empty(0, np.int32))

    def restart(self) -> None:
        """Forget all steps: the next one that is added is step 0."""
        with self._lock:
            self.added = 0  # steps
            self._steps = 0  # of a block; 0 until the first one is whole
            self._whole: dict[int, int] = {}  # buffers by blocks' numbers, from the present one on
            self._filling = self._filled = self._begun = 0  # a buffer, how many ids, and of how many steps
            self._present = self._step = -1  # block, and the step in it, -1 for none
            self._here = self._block(-1)  # as the present block was when it began
            # of the step begun last, once it is asked for: where its ids are
            self._placed = self._places[:0]

    @property
    def wanted_ahead(self) -> int:
        """So many steps, from the one that is next on, should be known."""
        return 2 * (self._steps or STEPS_MAX)

    # Looking at steps.

    def add(self, ids: NDArray[np.int64]) -> None:
        """The next step's ids, all different. What there is no memory for is not looked at."""
        with self._lock:
            entries = len(self._uses)
            some = ids[: entries // _STEPS_MIN]
            much = self._filled + len(some) > _FILLED * entries and self._begun >= _STEPS_MIN
            if not self._steps and (much or self._begun == STEPS_MAX):
                self._steps = self._begun
                self._end_block()
            some = some[: entries - self._filled]
            end = self._filled + len(some)
            kept = self._ids[self._filling][self._filled : end]
            kept[:] = some
            kept.sort()
            self._filled, self._begun, self.added = end, self._begun + 1, self.added + 1
            self._offsets[self._filling, self._begun] = end
            if self._begun == self._steps:
                self._end_block()

    def _end_block(self) -> None:
        if len(self._whole) == _BUFFERS - 1:  # nobody went on to the oldest one: it is let go
            del self._whole[min(number for number in self._whole if number != self._present)]
        self._whole[self.added // self._steps - 1] = self._filling
        self._filling = next(one for one in range(_BUFFERS) if one not in self._whole.values())
        self._filled = self._begun = 0

    def _block(self, number: int) -> Block:
        buffer, use = self._whole.get(number), self._steps * (number - self._present)
        if buffer is None:
            return Block(np.empty(0, np.int64), np.zeros(self._steps + 1, np.int64), use)
        return Block(self._ids[buffer], self._offsets[buffer, : self._steps + 1], use)

    # Going on to them.

    def begin(self, step: int, on_block: OnBlock | None = None) -> None:
        """Go on to a step. Where that is of another block, ``on_block`` is called: from now on uses count
        from its begin. Of a step before the present block nothing is known."""
        with self._lock:
            self._placed = self._places[:0]
            number = step // self._steps if self._steps else -1
            self._step = step - number * self._steps if number >= max(0, self._present) else -1
            if number <= self._present:
                return
            shift = USES_MAX if self._present < 0 else min(USES_MAX, (number - self._present) * self._steps)
            self._present = number
            for old in [one for one in self._whole if one < number]:
                del self._whole[old]
            present, following = self._block(number), self._block(number + 1)
            find_next_uses(*present[:2], *following[:2], self._table, self._uses)
            self._here = present
            if on_block is not None:
                on_block(shift, (present, following))

    def of(self, ids: NDArray[np.int64], first: int = 0) -> NDArray[np.int32]:
        """When each row (int64 [n], numbered from ``first`` on) is wanted after the step begun last: a step
        of this block or the next, or NEVER, also for rows that this step does not want."""
        found = np.empty(len(ids), np.int32)
        with self._lock:
            here, offsets, _ = self._here
            low, high = offsets[self._step : self._step + 2] if self._step >= 0 else (0, 0)
            wanted = here[low:high]
            if not len(self._placed):
                self._placed = self._places[: _places_of(len(wanted))]
                place_ids(wanted, self._placed)
            find_uses(ids, first, wanted, self._uses[low:high], self._placed, found)
        return found


def _places_of(ids: int) -> int:
    """Of a hash table: twice to four times as many as ids."""
    return 2 << ids.bit_length()
