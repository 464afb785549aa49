"""What is known of steps to come: which rows each wants, when these are wanted next, and which have slots.

The steps that come are a window of fewer than :data:`STEPS_MAX`, in a ring with a *place* for each row of
each. A place has the row's number, the place of its next use, how many steps later that is, and the slot that
has the row: the slot is known at the place of the next use alone, and goes on from place to place as steps
end. So who begins a step, asks for its rows, and keeps those that come goes through its places one after the
other, and writes elsewhere, but looks nothing up. That is done once, when a step is added: a hash table says
at which place each row was wanted last before, and the slot of those rows that no step wants. Memory goes by
what is looked at, not by nodes. In place of a slot a row on its way has its *flight*, which goes on likewise:
whatever step has begun when it comes, it is known when the row is wanted next.

Of several tables each has slots of its own. Rows are numbered on from table to table, as slots are.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.base.hashing import GOLDEN
from featstore.base.native import INLINED, PART, borrow, prefetch

#: Steps that may be known, the present one included.
STEPS_MAX = 128
NO_STEP = STEPS_MAX  # the number of slots of rows of which no use is known is counted there
NO_USE = np.int32(2**31 - 1)  # the step of their next use

_ENTRIES = 1.5  # for each row of which something is known
_FULL = 0.8  # of all entries
_IN_FLIGHT = 8  # at most one row of so many of the window; of more the first ones do not stay
AWAY = -2  # less the flight's number
_NO_ROW = -1  # of a place that nobody finds
_EMPTY = -2  # the last place of an entry that is none
_LAST_MAX = 2**31 - 1
_AHEAD = 16  # ids
#: Places, and slots: they are int32, and counted on for as long as there are twice as many.
WINDOW_ROWS_MAX = 2**29

# Places in ``counts``: the step begun last; how many places have been given out before it, and how many are
# taken from there on; how many had been when place 0 was, the last time before; how many entries are taken;
# how many flights there have been.
NOW, START, _TAKEN, _BASE, _USED, FLIGHTS = range(6)


class Window(NamedTuple):
    """See the module's text. Steps are numbered from 0."""

    counts: NDArray[np.int64]
    entries: NDArray[Any]  # a row, its last place, counting on, and the slot of one that no step wants, or -1
    rows: NDArray[Any]  # of each place
    following: NDArray[np.int32]  # the place of the row's next use
    later: NDArray[np.uint8]  # steps from this use to the next, and where there is none this step's number
    slots: NDArray[np.int32]  # -1 for none; AWAY - flight of a row that comes
    # [flights, 3]: where the row is wanted (-1: nowhere), by which step (-1: the present one asked), number
    flights: NDArray[np.int32]
    steps: NDArray[np.int64]  # [STEPS_MAX, 3]: number, first place, places
    held: NDArray[np.int64]  # [tables, STEPS_MAX + 1], slots by their rows' next use
    uses: NDArray[np.int32]  # [slots + 1], the step that wants each one's row next, -1 where it is free
    owners: NDArray[np.int32]  # [slots + 1], the place that knows each; -2 - the entry
    free: NDArray[np.int32]  # slots that are free, of each table from its first on
    tables: NDArray[np.int64]  # [tables, 3]: where its slots end, how many are free, the hand


def make_window(rows: int, slots: list[int], numbers: int) -> Window:
    """Nothing is known, and all slots are free. ``rows``: of all steps in the window. ``slots``: by table.
    ``numbers``: of rows, from 0 to below that."""
    total, row = sum(slots), node_dtype(numbers)
    entry = np.dtype([("row", row), ("last", "<i4"), ("slot", "<i4")])
    # entries for rows in all slots, and half as many as there are in the window, where many come again
    made = Window(
        np.empty(6, np.int64), np.empty(int(_ENTRIES * (total + rows / 2)) + 4, entry), np.empty(rows, row),
        np.empty(rows, np.int32), np.empty(rows, np.uint8), np.empty(rows, np.int32),
        np.empty((rows // _IN_FLIGHT + 4, 3), np.int32), np.empty((STEPS_MAX, 3), np.int64),
        np.empty((len(slots), STEPS_MAX + 1), np.int64), np.empty(total + 1, np.int32),
        np.empty(total + 1, np.int32), np.empty(total, np.int32), np.empty((len(slots), 3), np.int64),
    )  # fmt: skip
    made.tables[:, 0], made.tables[:, 1] = np.cumsum(slots), slots
    made.tables[:, 2] = made.tables[:, 0] - slots
    made.free[:] = np.arange(total)
    made.counts[:], made.counts[NOW] = 0, -1
    made.entries["last"] = _EMPTY
    made.uses[:], made.held[:], made.steps[:], made.flights[:] = -1, 0, -1, -1
    return made


def _entry_bytes(numbers: int) -> float:
    return _ENTRIES * (node_dtype(numbers).itemsize + 4 + 4)


def place_bytes(numbers: int) -> float:
    return node_dtype(numbers).itemsize + 4 + 1 + 4 + 12 / _IN_FLIGHT + _entry_bytes(numbers) / 2


def slot_bytes(numbers: int) -> int:
    """Of a slot, beside its row, where there are so many numbers of rows."""
    return int(_entry_bytes(numbers)) + 3 * 4


def window_bytes(rows: int, tables: int, numbers: int) -> int:
    """Memory for what is known of steps, of so many rows, beside :func:`slot_bytes` for each slot."""
    fixed = 6 * 8 + 5 * 16 + 4 * 12 + STEPS_MAX * 24 + tables * ((STEPS_MAX + 1) * 8 + 24) + 8
    return fixed + math.ceil(rows * place_bytes(numbers))


def room(w: Window) -> int:
    """For so many rows more of steps."""
    return len(w.rows) - int(w.counts[_TAKEN])


@njit(**INLINED)
def borrow_window(w: Window) -> Window:
    """The same, as arrays that nobody owns; see :func:`featstore.base.native.borrow`."""
    return Window(
        borrow(w.counts), borrow(w.entries), borrow(w.rows), borrow(w.following), borrow(w.later),
        borrow(w.slots), borrow(w.flights), borrow(w.steps), borrow(w.held), borrow(w.uses), borrow(w.owners),
        borrow(w.free), borrow(w.tables),
    )  # fmt: skip


@njit(**INLINED)
def _first_of(w: Window, row: Any) -> np.int64:
    """Where the entry of a row is looked for first."""
    upper = (np.uint64(row) * GOLDEN) >> np.uint64(32)
    return np.int64((upper * np.uint64(w.entries.shape[0])) >> np.uint64(32))


@njit(**INLINED)
def _entry_from(w: Window, entry: Any, row: Any) -> Any:
    """The entry of a row, or the empty one that it would take, from the first one on."""
    size = w.entries.shape[0]
    while w.entries[entry].row != row and w.entries[entry].last != _EMPTY:
        entry = entry + 1 if entry + 1 < size else 0
    return entry


@njit(**PART)
def _find_entries(
    w: Window, ids: NDArray[np.int64], found: NDArray[np.int32], lasts: NDArray[np.int32]
) -> None:
    """Of as many ids as are found: their entries, and their last places. These will be written to."""
    w = borrow_window(w)
    last, entries, start = found.shape[0] - 1, np.int64(w.entries.ctypes.data), w.counts[START]
    following, later = np.int64(w.following.ctypes.data), np.int64(w.later.ctypes.data)
    for i in range(found.shape[0]):
        prefetch(entries + w.entries.itemsize * _first_of(w, ids[min(i + _AHEAD, last)]))
        entry = _entry_from(w, _first_of(w, ids[i]), ids[i])
        found[i], lasts[i] = entry, w.entries[entry].last
        before = ring_place(w, max(np.int64(lasts[i]), start))
        prefetch(following + 4 * before)
        prefetch(later + before)


@njit(**INLINED)
def first_slot(w: Window, table: int) -> Any:
    """A table's first slot."""
    return w.tables[table - 1, 0] if table > 0 else np.int64(0)


@njit(**INLINED)
def _table_of(w: Window, slot: Any) -> np.int64:
    table = np.int64(0)
    while slot >= w.tables[table, 0]:
        table += 1
    return table


@njit(**INLINED)
def count_of(use: Any) -> np.int64:
    """Where slots of such a next use are counted."""
    return np.int64(NO_STEP) if use == NO_USE else np.int64(use) & (STEPS_MAX - 1)


@njit(**INLINED)
def use_next(w: Window, slot: Any, use: Any) -> None:
    """The row in a slot is wanted next then, and no more when it was; nothing happens to slot -1."""
    table = _table_of(w, slot)
    w.held[table, count_of(w.uses[slot])] -= slot >= 0 and w.uses[slot] >= 0
    w.uses[slot] = use  # of which the last one is no slot's
    w.held[table, count_of(use)] += slot >= 0


@njit(**INLINED)
def use_after(w: Window, place: Any) -> Any:
    """The step after the present one, which wants this place's row, that wants it next."""
    return NO_USE if w.following[place] < 0 else np.int32(w.counts[NOW] + w.later[place])


@njit(**PART)
def take_out(w: Window, entry: int) -> None:
    """Nothing is known of its row any more. Those after it that would else not be found move up (Knuth, The
    Art of Computer Programming 3, 6.4, algorithm R)."""
    w = borrow_window(w)
    size, hole, at = w.entries.shape[0], np.int64(entry), np.int64(entry)
    while True:
        at = at + 1 if at + 1 < size else np.int64(0)
        one = w.entries[at]
        if one.last == _EMPTY:
            break
        first = _first_of(w, one.row)
        moved, stays = hole - first, at - first
        if (moved if moved >= 0 else moved + size) < (stays if stays >= 0 else stays + size):
            to = w.entries[hole]
            to.row, to.last, to.slot = one.row, one.last, one.slot
            if one.slot >= 0:
                w.owners[one.slot] = -2 - hole
            hole = at
    w.entries[hole].last = _EMPTY
    w.counts[_USED] -= 1


@njit(**PART)
def _count_anew(w: Window) -> None:
    """Count places from the first one on."""
    base = w.counts[_BASE]
    for i in range(w.entries.shape[0]):
        if w.entries[i].last != _EMPTY:
            w.entries[i].last = max(np.int64(w.entries[i].last) - base, np.int64(-1))
    w.counts[START] -= base
    w.counts[_BASE] = 0


@njit(cache=True, nogil=True)
def add_step(w: Window, ids: NDArray[np.int64], step: int) -> None:
    """A step after those that were added wants these rows, all different. Rows for which there is no memory
    are not looked at."""
    w = borrow_window(w)
    c, size = w.counts, w.rows.shape[0]
    most = min(ids.shape[0], size - c[_TAKEN])
    if c[START] + c[_TAKEN] + most > _LAST_MAX:
        _count_anew(w)
    begin = c[START] + c[_TAKEN]
    found, lasts = np.empty(most, np.int32), np.empty(most, np.int32)
    known, others, count = np.empty(most, np.int32), np.empty(most, np.int32), np.int64(0)
    _find_entries(w, ids, found, lasts)
    # Without branches that could not be foreseen: after each of them memory is waited for anew.
    first = place = ring_place(w, begin)
    for i in range(most):
        w.rows[place], w.following[place], w.later[place], w.slots[place] = ids[i], -1, step, -1
        place = place + 1 if place + 1 < size else 0
        known[count], others[i - count] = i, i
        count += lasts[i] >= c[START]
    _go_on(w, known[:count], found, lasts, begin, step)
    _begin_anew(w, ids, others[: most - count], found, begin, step)
    c[_TAKEN] += most
    at = step % STEPS_MAX
    w.steps[at, 0], w.steps[at, 1], w.steps[at, 2] = step, first, most


@njit(**INLINED)
def _go_on(
    w: Window, known: NDArray[np.int32], found: NDArray[np.int32], lasts: NDArray[np.int32], begin: int,
    step: int,
) -> None:  # fmt: skip
    """Of a step, the rows that one before it wants, too."""
    future = w.counts[START] + places_now(w)
    for i in known:
        if w.entries[found[i]].last >= begin:  # twice in a step
            w.rows[ring_place(w, begin + i)] = _NO_ROW
            continue
        before = ring_place(w, lasts[i])
        w.following[before] = ring_place(w, begin + i)
        w.later[before] = step - w.later[before]
        w.entries[found[i]].last = begin + i
        slot = w.slots[before]
        if lasts[i] < future and slot >= 0 and w.uses[slot] == NO_USE:  # it has been asked for
            use_next(w, slot, step)


@njit(**INLINED)
def _begin_anew(
    w: Window, ids: NDArray[np.int64], others: NDArray[np.int32], found: NDArray[np.int32], begin: int,
    step: int,
) -> None:  # fmt: skip
    """Of a step, the rows that none before it wants, some of which have slots."""
    c, limit = w.counts, np.int64(_FULL * w.entries.shape[0])
    for i in others:
        entry = _entry_from(w, np.int64(found[i]), ids[i])
        one = w.entries[entry]
        new = one.last == _EMPTY
        if one.last >= begin or (new and c[_USED] >= limit):  # twice in a step, or too many
            w.rows[ring_place(w, begin + i)] = _NO_ROW
            continue
        c[_USED] += new
        slot = np.int32(-1) if new else one.slot
        place = ring_place(w, begin + i)
        w.slots[place], w.owners[slot] = slot, place
        use_next(w, slot, step)
        one.row, one.last, one.slot = ids[i], begin + i, -1


@njit(**INLINED)
def ring_place(w: Window, last: Any) -> Any:
    """The place that has been given out as number ``last``, from the present step on."""
    place = np.int64(last) - w.counts[_BASE]
    return place - w.rows.shape[0] if place >= w.rows.shape[0] else place


@njit(**INLINED)
def places_now(w: Window) -> Any:
    """Places of the present step."""
    at = max(w.counts[NOW], np.int64(0)) % STEPS_MAX
    return w.steps[at, 2] if w.counts[NOW] >= 0 and w.steps[at, 0] == w.counts[NOW] else np.int64(0)


@njit(**INLINED)
def idle_slot(w: Window, row: Any) -> Any:
    """The slot of a row that no step from the present one on wants, -1 for none."""
    one = w.entries[_entry_from(w, _first_of(w, row), row)]
    return one.slot if one.last != _EMPTY else np.int32(-1)


@njit(**INLINED)
def put_idle(w: Window, row: int, slot: int) -> bool:
    """A slot has a row now that no step after the present one wants. False where one does, or another slot
    has it, or there is no memory for it."""
    entry = _entry_from(w, _first_of(w, row), row)
    one, now = w.entries[entry], w.counts[START]
    if one.last == _EMPTY:
        if w.counts[_USED] >= np.int64(_FULL * w.entries.shape[0]):
            return False
        w.counts[_USED] += 1
        one.row, one.last, one.slot = row, -1, slot
        w.owners[slot] = -2 - entry
    else:
        place = ring_place(w, max(np.int64(one.last), now))
        if one.last < now or one.last >= now + places_now(w) or w.slots[place] >= 0:
            return False
        w.slots[place], w.owners[slot] = slot, place
    use_next(w, slot, NO_USE)
    return True


@njit(**PART)
def _end_step(w: Window) -> None:
    """The present step is over: its rows' slots are known where they are wanted next. What no step wants, and
    no slot has, is forgotten."""
    w = borrow_window(w)
    c, size = w.counts, w.rows.shape[0]
    place, count = ring_place(w, c[START]), places_now(w)
    for i in range(count):
        slot, following = w.slots[place], w.following[place]
        if slot <= AWAY:
            w.flights[AWAY - slot, 0] = following
            w.flights[AWAY - slot, 1] = c[NOW] + w.later[place]
        if slot >= 0 and w.uses[slot] == c[NOW]:  # nobody has asked for it
            use_next(w, slot, use_after(w, place))
        if slot != -1 and following >= 0:
            w.slots[following] = slot
            if slot >= 0:
                w.owners[slot] = following
        elif following < 0:
            entry = _entry_from(w, _first_of(w, w.rows[place]), w.rows[place])
            if slot >= 0:
                w.entries[entry].slot, w.owners[slot] = slot, -2 - entry
            elif w.entries[entry].last == c[START] + i:
                take_out(w, entry)
        place = place + 1 if place + 1 < size else 0
    c[START] += count
    c[_TAKEN] -= count
    c[_BASE] += size if c[START] - c[_BASE] >= size else 0


@njit(cache=True, nogil=True)
def begin_step(w: Window, step: int) -> None:
    """Go on to a step: rows that it wants are wanted next after it from when they are asked for. Nothing
    happens where it is not after the step begun last."""
    c = w.counts
    for one in range(c[NOW] + 1, min(c[NOW] + STEPS_MAX, np.int64(step)) + 1):
        _end_step(w)
        c[NOW] = one
    if step > c[NOW]:
        _end_step(w)
        c[NOW] = step


@njit(cache=True, nogil=True)
def forget_steps(w: Window) -> None:
    """No step is known any more, and the next one is number 0; rows that are there stay."""
    begin_step(w, w.counts[NOW] + STEPS_MAX)
    _end_step(w)
    w.counts[NOW] = -1
    w.steps[:] = -1
