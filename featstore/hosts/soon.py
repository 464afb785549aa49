"""Rows that are wanted soon stay: which rows have slots, by what is known of steps to come
(:mod:`featstore.hosts.window`).

Who goes is the row that is wanted farthest away (MIN: Belady, IBM Systems Journal 5(2), 1966), and those of
which no use is known before all others; a row that would be the first to go does not come. How many slots
have each next use is counted, so it is known from which use on rows go, and a hand that goes round the slots
finds them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN
from featstore.base.native import INLINED, PART
from featstore.base.rows import move_rows
from featstore.hosts.window import (
    AWAY,
    FLIGHTS,
    NO_USE,
    NOW,
    START,
    STEPS_MAX,
    Window,
    borrow_window,
    count_of,
    first_slot,
    idle_slot,
    places_now,
    put_idle,
    ring_place,
    take_out,
    use_after,
    use_next,
)

_NUMBER_MAX = 2**31 - 2


@njit(**PART)
def _find_places(w: Window, ids: NDArray[np.int64], first: int, places: NDArray[np.int32]) -> None:
    """The place of each row in the present step, -1 for none, in whatever order they are."""
    w = borrow_window(w)
    count, size = places_now(w), w.rows.shape[0]
    bits = 1
    while 1 << bits < 2 * count:
        bits += 1
    table, mask = np.full(1 << bits, -1, np.int32), (1 << bits) - 1
    place = ring_place(w, w.counts[START])
    for _ in range(count):
        at = np.int64((np.uint64(w.rows[place]) * GOLDEN) >> np.uint64(64 - bits))
        while table[at] >= 0:
            at = (at + 1) & mask
        table[at] = place
        place = place + 1 if place + 1 < size else 0
    for i in range(ids.shape[0]):
        row = ids[i] + first
        at = np.int64((np.uint64(row) * GOLDEN) >> np.uint64(64 - bits))
        while table[at] >= 0 and w.rows[table[at]] != row:
            at = (at + 1) & mask
        places[i] = table[at]


@njit(**INLINED)
def _in_order(w: Window, ids: NDArray[np.int64], first: int, places: NDArray[np.int32]) -> bool:
    """The place of each row, where they are the present step's, in the order in which it was added, with
    those of other tables before or after them."""
    count, size = places_now(w), w.rows.shape[0]
    place, left = ring_place(w, w.counts[START]), count
    while left > 0 and ids.shape[0] > 0 and w.rows[place] != ids[0] + first:
        place, left = place + 1 if place + 1 < size else 0, left - 1
    if left < ids.shape[0]:
        return False
    for i in range(ids.shape[0]):
        if w.rows[place] != ids[i] + first:
            return False
        places[i] = place
        place = place + 1 if place + 1 < size else 0
    return True


@njit(cache=True, nogil=True)
def serve_soonest(
    w: Window, table: int, ids: NDArray[np.int64], first: int, rows: int, row_bytes: int, target: int,
    to: NDArray[np.int32], left: NDArray[np.int64], left_to: NDArray[np.int32], known: NDArray[np.int32],
) -> Any:  # fmt: skip
    """Copy the rows of a table that are there from their slots (``rows``: the address of the first) to their
    places ``to`` at an address. ``first``: of the ids' numbers. The others go to ``left``, with their places
    ``left_to``; returns how many. ``known`` gets the numbers of their flights, -1 for
    those that the present step does not want."""
    w = borrow_window(w)
    begin, now = first_slot(w, table), w.counts[NOW]
    slots, here = np.empty(ids.shape[0], np.int32), np.empty(ids.shape[0], to.dtype)
    places, count = np.empty(ids.shape[0], np.int32), np.int64(0)
    if not _in_order(w, ids, first, places):
        _find_places(w, ids, first, places)
    for i in range(ids.shape[0]):  # without a branch by what is there, which could not be foreseen
        place = max(places[i], np.int32(0))
        slot = w.slots[place] if places[i] >= 0 else idle_slot(w, ids[i] + first)
        slots[count], here[count] = slot - begin, to[i]
        left[i - count], left_to[i - count] = ids[i], to[i]
        known[i - count] = places[i]
        count += slot >= 0
        held = max(slot, np.int32(-1))
        use_next(w, held if places[i] >= 0 and w.uses[held] == now else np.int32(-1), use_after(w, place))
    if count > 0:
        move_rows(rows, slots[:count], target, here[:count], row_bytes)
    _depart(w, known[: ids.shape[0] - count])
    return ids.shape[0] - count


@njit(**INLINED)
def _depart(w: Window, known: NDArray[np.int32]) -> None:
    """Rows that places of the present step want, or none (-1), are on their way from now on."""
    flights = w.flights.shape[0]
    for i in range(known.shape[0]):
        place = np.int64(known[i])
        if place >= 0:
            number = w.counts[FLIGHTS]
            w.counts[FLIGHTS] = number + 1 if number < _NUMBER_MAX else 0
            flight = number % flights
            before = max(np.int64(w.flights[flight, 0]), np.int64(0))
            if w.slots[before] == AWAY - flight:
                w.slots[before] = -1  # there are more than there is memory for
            w.slots[place] = AWAY - flight
            w.flights[flight, 0], w.flights[flight, 1], w.flights[flight, 2] = place, -1, number
            known[i] = number


@njit(**PART)
def _choose(w: Window, table: int, uses: NDArray[np.int32], chosen: NDArray[np.int32]) -> np.int64:
    """Of rows that have come and are wanted next in ``uses``, those that stay: as many as there are slots
    that are free or wanted later. Their positions go to ``chosen``; returns how many."""
    w = borrow_window(w)
    now = w.counts[NOW]
    coming = np.zeros(STEPS_MAX, np.int64)
    for use in uses:
        coming[use - now] += 1
    soon, come = np.int64(0), np.int64(0)
    leave = w.tables[table, 1] + w.held[table].sum() - w.held[table, now % STEPS_MAX]
    while soon < STEPS_MAX and come + coming[soon] <= leave:
        come += coming[soon]
        soon += 1
        leave -= w.held[table, (now + soon) % STEPS_MAX] if soon < STEPS_MAX else 0
    room = max(np.int64(0), leave - come) if soon < STEPS_MAX else np.int64(0)  # for those of that step
    count = np.int64(0)
    for i in range(uses.shape[0]):
        use = uses[i] - now
        if use < soon or (use == soon and room > 0):
            room -= use == soon
            chosen[count] = i
            count += 1
    return count


@njit(**PART)
def _make_room(w: Window, table: int, slots: NDArray[np.int32]) -> None:
    """Have ``slots`` of a table, as many as these are: those that are free first, then of the rows that are
    wanted farthest away, which go."""
    w = borrow_window(w)
    begin, end, count = first_slot(w, table), w.tables[table, 0], np.int64(slots.shape[0])
    done = min(w.tables[table, 1], count)
    w.tables[table, 1] -= done
    slots[:done] = w.free[begin + w.tables[table, 1] : begin + w.tables[table, 1] + done]
    # from which use on they go, and how many of those with that use
    use, left, step = np.int64(NO_USE), count - done, w.counts[NOW] + STEPS_MAX - 1
    while w.held[table, count_of(use)] < left:
        left -= w.held[table, count_of(use)]
        use = step
        step -= 1
    at = w.tables[table, 2]
    while done < count:
        one = w.uses[at]
        if one >= use and (one > use or left > 0):
            left -= one == use
            owner = np.int64(w.owners[at])
            if owner >= 0:
                w.slots[owner] = -1
            else:
                take_out(w, -2 - owner)
            w.held[table, count_of(one)] -= 1
            w.uses[at] = -1
            slots[done] = at
            done += 1
        at = at + 1 if at + 1 < end else begin
    w.tables[table, 2] = at


@njit(**PART)
def _fill(
    w: Window, table: int, ids: NDArray[np.int64], first: int, idle: NDArray[np.int32],
    idle_at: NDArray[np.int32], source: int, places: NDArray[Any], row_bytes: int, rows: int,
) -> None:  # fmt: skip
    """As long as slots are free, rows stay of which no use is known, too: those at the positions ``idle``,
    which places of the present step want, or none (-1)."""
    w = borrow_window(w)
    begin, new = first_slot(w, table), np.int64(0)
    slots, froms = np.empty(idle.shape[0], np.int32), np.empty(idle.shape[0], places.dtype)
    for k in range(idle.shape[0]):
        if w.tables[table, 1] == 0:
            break
        slot = w.free[begin + w.tables[table, 1] - 1]
        if idle_at[k] >= 0:
            if w.slots[idle_at[k]] != -1:  # the same row twice
                continue
            w.slots[idle_at[k]], w.owners[slot] = slot, idle_at[k]
            use_next(w, slot, NO_USE)
        elif not put_idle(w, ids[idle[k]] + first, slot):
            continue
        w.tables[table, 1] -= 1
        slots[new], froms[new] = slot - begin, places[idle[k]]
        new += 1
    move_rows(source, froms[:new], rows, slots[:new], row_bytes)


@njit(cache=True, nogil=True)
def keep_soonest(
    w: Window, table: int, ids: NDArray[np.int64], first: int, known: NDArray[np.int32], source: int,
    places: NDArray[Any], row_bytes: int, rows: int,
) -> None:  # fmt: skip
    """Have rows that have come to ``places`` at an address here (``rows``: the address of the table's first
    slot), those that are wanted soonest, in place of rows that are wanted later. ``known``: as of
    :func:`serve_soonest`, since when no step was forgotten."""
    w = borrow_window(w)
    flights, count, others = w.flights.shape[0], np.int64(0), np.int64(0)
    some, uses = np.empty(ids.shape[0], np.int32), np.empty(ids.shape[0], np.int32)
    wanted = np.empty(ids.shape[0], np.int32)
    idle, idle_at = np.empty(ids.shape[0], np.int32), np.empty(ids.shape[0], np.int32)
    for i in range(ids.shape[0]):
        flight = max(np.int64(known[i]), np.int64(0)) % flights
        place, use = np.int64(w.flights[flight, 0]), NO_USE
        if (
            known[i] < 0
            or w.flights[flight, 2] != known[i]
            or w.slots[max(place, np.int64(0))] != AWAY - flight
        ):
            place = np.int64(-1)
        if place >= 0:
            w.slots[place] = -1
            use = w.flights[flight, 1] if w.flights[flight, 1] >= 0 else use_after(w, place)
        some[count], uses[count], wanted[count] = i, use, place
        idle[others], idle_at[others] = i, place
        count += use != NO_USE
        others += use == NO_USE
    chosen = np.empty(count, np.int32)
    chosen = chosen[: _choose(w, table, uses[:count], chosen)]
    slots, froms = np.empty(chosen.shape[0], np.int32), np.empty(chosen.shape[0], places.dtype)
    _make_room(w, table, slots)
    for k in range(chosen.shape[0]):
        one = chosen[k]
        w.slots[wanted[one]], w.owners[slots[k]] = slots[k], wanted[one]
        use_next(w, slots[k], uses[one])
        froms[k] = places[some[one]]
    slots[:] = slots - np.int32(first_slot(w, table))
    move_rows(source, froms, rows, slots, row_bytes)
    if w.tables[table, 1] > 0:
        _fill(w, table, ids, first, idle[:others], idle_at[:others], source, places, row_bytes, rows)


def are_there(w: Window, table: int, ids: NDArray[np.int64], first: int) -> NDArray[np.bool_]:
    """bool [n], which of these rows would be served now: those of the present step, and those that no step to
    come wants."""
    found = np.empty(len(ids), np.int32)
    find_slots(w, ids, first, found)
    begin = w.tables[table - 1, 0] if table else 0
    return np.asarray((found >= begin) & (found < w.tables[table, 0]))


@njit(cache=True, nogil=True)
def find_slots(w: Window, ids: NDArray[np.int64], first: int, slots: NDArray[np.int32]) -> None:
    """The slots from which these rows would be served now, below 0 for none."""
    w = borrow_window(w)
    places = np.empty(ids.shape[0], np.int32)
    _find_places(w, ids, first, places)
    for i in range(ids.shape[0]):
        slots[i] = w.slots[places[i]] if places[i] >= 0 else idle_slot(w, ids[i] + first)
