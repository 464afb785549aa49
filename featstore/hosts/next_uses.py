"""When the rows of mini-batches are wanted again: those to come are looked at in blocks of steps, and of each
row that the present block wants it is known when it is wanted next, within that block and the next.

A block that is looked at is one array of keys, id and step, which is sorted when the block is whole. When its
turn comes it is laid out by step: each step's ids, ascending, and beside each the step that wants it next.
Uses are numbered from the begin of the present block.

One thread adds steps, another goes on to them; both may ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.sort import radix_sort
from featstore.errors import BudgetError
from featstore.tiers.slots.layout import NEVER

STEPS_MAX = 64  # of a block
_STEPS_MIN = 8  # of a block: what of a mini-batch is too much for this is not looked at
_STEP_BITS = 16
_STEP_MASK = (1 << _STEP_BITS) - 1
_PLACE_BITS = 16
_PLACE_MASK = (1 << _PLACE_BITS) - 1
ROWS_AT_ONCE = 1 << _PLACE_BITS  # of which it is said when they are wanted first
_STRIDE = 8  # keys that are passed by together
_BUFFERS = 3  # of keys: the next block's, that after it, and what is begun before its turn
_ENTRY_BYTES = 8 * _BUFFERS + 8 + 4
#: It takes so much memory at least.
LEAST_BYTES = _STEPS_MIN * _ENTRY_BYTES
_FILLED = 0.9  # of the memory, by the first block, so that later ones may be a little larger
#: Uses are below this.
USES_MAX = 2 * STEPS_MAX
#: Says of up to ROWS_AT_ONCE rows (int64 [n]) when each is wanted first, int32 [n]. It is given which
#: of them (bool [n]) may be wanted by the block that begins: whose use was not known when that before began,
#: or has passed.
FirstUses = Callable[[NDArray[np.int64], NDArray[np.bool_]], NDArray[np.int32]]
#: Takes by how much uses have less to count from now on.
OnBlock = Callable[[int, FirstUses], None]


@njit(cache=True, nogil=True)
def lay_out(
    keys: NDArray[np.int64], following: NDArray[np.int64], steps: int, offsets: NDArray[np.int64],
    ids: NDArray[np.int64], uses: NDArray[np.int32],
) -> None:  # fmt: skip
    """Order the entries of a block by step. ``keys``, ``following`` (the next block's): ascending.
    ``offsets`` int64 [at least steps + 1]: on return where each step begins in ``ids`` and ``uses``."""
    offsets[:] = 0
    for i in range(keys.shape[0]):
        offsets[(keys[i] & _STEP_MASK) + 1] += 1
    for step in range(1, offsets.shape[0]):
        offsets[step] += offsets[step - 1]
    at = offsets.copy()
    j = 0
    for i in range(keys.shape[0]):
        row, step = keys[i] >> _STEP_BITS, keys[i] & _STEP_MASK
        if i + 1 < keys.shape[0] and keys[i + 1] >> _STEP_BITS == row:
            use = keys[i + 1] & _STEP_MASK
        else:
            while j < following.shape[0] and following[j] >> _STEP_BITS < row:
                j += 1
            found = j < following.shape[0] and following[j] >> _STEP_BITS == row
            use = steps + (following[j] & _STEP_MASK) if found else NEVER
        ids[at[step]] = row
        uses[at[step]] = use
        at[step] += 1


@njit(cache=True, nogil=True)
def find_uses(
    wanted: NDArray[np.int64], ids: NDArray[np.int64], uses: NDArray[np.int32], out: NDArray[np.int32]
) -> None:
    """Of each id wanted what stands beside it in ``uses``, NEVER where it is not in ``ids``, ascending."""
    if ids.shape[0] == 0:
        out[:] = NEVER
        return
    for i in range(wanted.shape[0]):
        low, left = 0, ids.shape[0]
        while left > 1:  # no branch depends on what is found
            half = left >> 1
            low += half * np.int64(ids[low + half - 1] < wanted[i])
            left -= half
        low = min(low + np.int64(ids[low] < wanted[i]), ids.shape[0] - 1)
        out[i] = uses[low] if ids[low] == wanted[i] else NEVER


@njit(cache=True, nogil=True)
def first_uses(
    sorted_rows: NDArray[np.uint64], wanted: NDArray[np.bool_], keys: NDArray[np.int64], later: int,
    out: NDArray[np.int32],
) -> None:  # fmt: skip
    """In which step of a block, given its keys, each row is wanted first, ``later`` steps later; where it is
    in none, or not ``wanted`` (bool [rows]), ``out`` [rows] stays what it is. ``sorted_rows``: ascending,
    rows with their places in these two, as :func:`with_places` has them."""
    j, end = 0, keys.shape[0]
    for i in range(sorted_rows.shape[0]):
        row, place = np.int64(sorted_rows[i] >> _PLACE_BITS), np.int64(sorted_rows[i] & _PLACE_MASK)
        least = row << _STEP_BITS
        while j + _STRIDE <= end and keys[j + _STRIDE - 1] < least:
            j += _STRIDE
        while j < end and keys[j] < least:
            j += 1
        if j < end and keys[j] >> _STEP_BITS == row and wanted[place]:
            out[place] = later + (keys[j] & _STEP_MASK)


def with_places(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Up to :data:`ROWS_AT_ONCE` rows, ascending, each with its place: the lowest bits."""
    keys = (rows << _PLACE_BITS).view(np.uint64)
    keys |= np.arange(len(rows), dtype=np.uint64)
    spare, bits = np.empty_like(keys), int(rows.max(initial=0)).bit_length()
    return spare if radix_sort(keys, spare, _PLACE_BITS, _PLACE_BITS + bits) else keys


class NextUses:
    """See the module's text. ``memory_bytes``: for all of it. Raises BudgetError."""

    def __init__(self, memory_bytes: int) -> None:
        entries = memory_bytes // _ENTRY_BYTES
        if memory_bytes < LEAST_BYTES:
            raise BudgetError(LEAST_BYTES, memory_bytes, "look ahead")
        self._keys = [np.empty(entries, np.int64) for _ in range(_BUFFERS)]
        self._ids, self._uses = np.empty(entries, np.int64), np.empty(entries, np.int32)
        self._offsets = np.zeros(STEPS_MAX + 1, np.int64)
        self._lock = threading.Lock()
        self.restart()
        lay_out(self._keys[0][:0], self._keys[0][:0], 1, self._offsets, self._ids, self._uses)
        find_uses(self._ids[:0], self._ids[:0], self._uses[:0], self._uses[:0])
        first_uses(with_places(self._ids[:0]), np.empty(0, bool), self._keys[0][:0], 0, self._uses[:0])
        radix_sort(self._keys[0][:0].view(np.uint64), self._keys[1][:0].view(np.uint64), 0, 0)

    def restart(self) -> None:
        """Forget all steps: the next one that is added is step 0."""
        with self._lock:
            self.added = 0  # steps
            self._steps = 0  # of a block; 0 until the first one is whole
            self._whole: dict[int, tuple[int, int]] = {}  # blocks by number: which keys, and how many
            self._filling = self._filled = self._begun = 0  # keys, how many, and of how many steps
            self._laid = self._step = (
                self._known
            ) = -1  # the block that is laid out, and the step in it, -1 for none

    @property
    def wanted_ahead(self) -> int:
        """So many steps, from the one that is next on, should be known."""
        return 2 * (self._steps or STEPS_MAX)

    # Looking at steps.

    def add(self, ids: NDArray[np.int64]) -> None:
        """The next step's ids, all different. What there is no memory for is not looked at."""
        with self._lock:
            entries = len(self._ids)
            some = ids[: entries // _STEPS_MIN]
            much = self._filled + len(some) > _FILLED * entries and self._begun >= _STEPS_MIN
            if not self._steps and (much or self._begun == STEPS_MAX):
                self._steps = self._begun
                self._end_block()
            some = some[: entries - self._filled]
            keys = self._keys[self._filling][self._filled : self._filled + len(some)]
            np.left_shift(some, _STEP_BITS, out=keys)
            keys |= self._begun
            self._filled, self._begun, self.added = self._filled + len(some), self._begun + 1, self.added + 1
            if self._begun == self._steps:
                self._end_block()

    def _end_block(self) -> None:
        if len(self._whole) == _BUFFERS - 1:  # nobody went on to the oldest one: it is let go
            del self._whole[min(self._whole)]
        taken = [self._filling, *(keys for keys, _ in self._whole.values())]
        spare = next(one for one in range(_BUFFERS) if one not in taken)
        here, there = (self._keys[one][: self._filled].view(np.uint64) for one in (self._filling, spare))
        # steps ascend already, and the sort is stable
        id_bits = (int(here.max(initial=0)) >> _STEP_BITS).bit_length()
        if radix_sort(here, there, _STEP_BITS, _STEP_BITS + id_bits):
            self._filling, spare = spare, self._filling
        self._whole[self.added // self._steps - 1] = self._filling, self._filled
        self._filling = spare
        self._filled = self._begun = 0

    def _block(self, number: int) -> NDArray[np.int64]:
        keys, count = self._whole.get(number, (0, 0))
        return self._keys[keys][:count]

    # Going on to them.

    def begin(self, step: int, on_block: OnBlock | None = None) -> None:
        """Go on to a step. Where that is of another block, ``on_block(shift, first)`` is called: from now
        on uses count from its begin, ``shift`` steps after the block before, and ``first(rows, passed)``
        says when each is wanted first, as far as is known. Of a step before the present
        block nothing is known."""
        with self._lock:
            number = step // self._steps if self._steps else -1
            self._step = step - number * self._steps if number >= max(0, self._laid) else -1
            if number <= self._laid:
                return
            shift = USES_MAX if self._laid < 0 else min(USES_MAX, (number - self._laid) * self._steps)
            known = self._known == number  # of all that wait it was said whether the present block wants them
            self._laid, self._known = number, number + 1 if number + 1 in self._whole else -1
            present, following = self._block(number), self._block(number + 1)
            lay_out(present, following, self._steps, self._offsets, self._ids, self._uses)
            if on_block is not None:
                on_block(
                    shift, lambda rows, passed: self._first(rows, passed | (not known), present, following)
                )
            for old in [one for one in self._whole if one <= number]:
                del self._whole[old]

    def _first(
        self, rows: NDArray[np.int64], passed: NDArray[np.bool_], present: NDArray[np.int64],
        following: NDArray[np.int64],
    ) -> NDArray[np.int32]:  # fmt: skip
        found, by_row = np.full(len(rows), NEVER, np.int32), with_places(rows)
        first_uses(by_row, np.ones(len(rows), bool), following, self._steps, found)
        first_uses(by_row, passed, present, 0, found)
        return found

    def of(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """When each row (int64 [n]) is wanted after the step begun last: a step of this block or the next, or
        NEVER, also for rows that this step does not want."""
        found = np.empty(len(ids), np.int32)
        with self._lock:
            low, high = self._offsets[self._step : self._step + 2] if self._step >= 0 else (0, 0)
            find_uses(ids, self._ids[low:high], self._uses[low:high], found)
        return found
