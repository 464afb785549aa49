"""A buffer of other hosts' rows that knows which mini-batches come (:mod:`featstore.hosts.window`): those
rows stay that are wanted soonest (:mod:`featstore.hosts.soon`). Looking ahead is after Ginex (Park et al.,
VLDB'22).

Of several tables each has slots of its own, as its rows have a size of their own; what is known of
mini-batches to come is of all together, by numbers of rows that go on from table to table.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import empty_rows
from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import check_out, rows_of
from featstore.base.native import address_of
from featstore.engine.request import Request, answered, chained
from featstore.errors import BudgetError
from featstore.hosts import soon, window
from featstore.storage.store import Table
from featstore.tiers import RowSource
from featstore.tiers.over import OverSource
from featstore.tiers.static_tier import new_rows

_ROWS_PER_SLOT = 6  # of mini-batches to come: with fewer, less is known than is kept
_LOOKING_SHARE = 1 / 3  # of the memory, for those, at most
_ROWS_MIN = 64  # of the window
_STEPS_AT_ONCE = 16  # so many mini-batches more are looked at with each that is trained on, until all are


class Missed(NamedTuple):
    """Rows of a table that come from below, and go to ``places``. ``known``: the numbers of their flights,
    which count as long as no step is forgotten: as long as ``begun`` is what it was."""

    ids: NDArray[np.int64]
    places: NDArray[np.int32]
    known: NDArray[np.int32]
    begun: int


class Upcoming:
    """What steps to come want, and which rows have slots; see :mod:`featstore.hosts.window`. ``rows``: of all
    steps that are known. ``slots``: by table. ``firsts``: by table, the number of its row 0, and of
    how many rows there are. One thread may add steps, another go on to them, and others ask for rows.
    """

    def __init__(self, rows: int, slots: Sequence[int], firsts: Sequence[int]) -> None:
        self.slots, self._firsts = list(slots), list(firsts)
        self._window = window.make_window(rows, self.slots, self._firsts[-1])
        self._lock = threading.Lock()
        self.added = self._begun = 0  # steps, and how often they began anew
        self._waiting: tuple[int, NDArray[np.int64]] | None = None  # the one added last, and its rows
        none = np.empty(0, np.int64)  # so that kernels are there
        window.add_step(self._window, none, 0)
        self.restart()
        self.holds(0, none)
        places = none.astype(np.int32)
        self.keep(0, self.serve(0, none, 0, 1, 0, places), 0, 1, 0)

    def restart(self) -> None:
        """Forget all steps: the next one that is added is step 0. Rows stay."""
        with self._lock:
            window.forget_steps(self._window)
            self.added, self._waiting = 0, None
            self._begun += 1

    def wants(self, step: int) -> bool:
        """Whether one more should be added before this step goes to whoever trains: that itself, and a few
        more each time, as far as there is memory."""
        with self._lock:
            end = min(self._step + window.STEPS_MAX, (_STEPS_AT_ONCE + 1) * (step + 1))
            return self.added <= step or (self.added < end and self._waiting is None)

    def add(self, ids: NDArray[np.int64]) -> None:
        """The numbers of the rows that the next step wants, all different. Where there is no memory for them
        all, they wait until there is, the step begins, or another one is added; what that is too little for
        is not looked at. Nobody waits for a step longer than the window goes."""
        with self._lock:
            step, self.added = self.added, self.added + 1
            self._add_waiting()
            window.begin_step(self._window, step - window.STEPS_MAX + 1)
            if step > self._step:
                self._waiting = step, ids
                self._add_waiting(len(ids))

    def _add_waiting(self, room: int = 0) -> None:
        """Add the step that waits, where there is memory for so many rows at least."""
        if self._waiting is not None and window.room(self._window) >= room:
            window.add_step(self._window, self._waiting[1], self._waiting[0])
            self._waiting = None

    def begin(self, step: int) -> None:
        """The rows that are asked for from now on are of this step, or of none."""
        with self._lock:
            if self._waiting is not None and self._waiting[0] <= step:
                window.begin_step(self._window, self._waiting[0] - 1)  # whose memory comes back
                self._add_waiting()
            window.begin_step(self._window, step)
            self._add_waiting(0 if self._waiting is None else len(self._waiting[1]))

    def serve(
        self, table: int, ids: NDArray[np.int64], rows: int, row_bytes: int, target: int,
        places: NDArray[np.int32],
    ) -> Missed:  # fmt: skip
        """Copy the rows of a table that are there, from their slots at an address, to their ``places`` at
        another. Returns the others."""
        left, to = np.empty(len(ids), np.int64), np.empty(len(ids), np.int32)
        known, first = np.empty(len(ids), np.int32), self._firsts[table]
        with self._lock:
            count = soon.serve_soonest(
                self._window, table, ids, first, rows, row_bytes, target, places, left, to, known
            )
            return Missed(left[:count], to[:count], known[:count], self._begun)

    def keep(self, table: int, missed: Missed, source: int, row_bytes: int, rows: int) -> None:
        """Of rows that have come to their places at an address, have those here that are wanted soonest."""
        with self._lock:
            if missed.begun == self._begun:
                ids, places, known, first = *missed[:3], self._firsts[table]
                soon.keep_soonest(self._window, table, ids, first, known, source, places, row_bytes, rows)

    def holds(self, table: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        with self._lock:
            return soon.are_there(self._window, table, ids, self._firsts[table])

    @property
    def _step(self) -> int:
        """The one begun last."""
        return int(self._window.counts[window.NOW])

    @property
    def memory_bytes(self) -> int:
        return sum(array.nbytes for array in self._window)


class Ahead:
    """Rows of ``tables`` of other hosts, in ``memory_bytes``. ``weights``: of the tables, by which memory is
    divided among them; alike by default. ``coming``: to be told which steps come, by :meth:`add`; what begins
    is told to :meth:`begin`. Raises BudgetError."""

    def __init__(
        self, tables: Sequence[Table], memory_bytes: int, weights: Sequence[float] | None = None
    ) -> None:
        self.tables, self._memory_bytes = [table.name for table in tables], memory_bytes
        least = self.least_bytes(tables)
        if memory_bytes < least:
            raise BudgetError(least, memory_bytes, "keep rows of other hosts (halo=)")
        numbers = sum(table.rows for table in tables)
        parts = np.ones(len(tables)) if weights is None else np.array(weights, float)
        parts = parts / parts.sum() if parts.any() else np.full(len(tables), 1 / len(tables))
        each = np.array([_slot_bytes(table, numbers) for table in tables], float)
        known = _ROWS_PER_SLOT * window.place_bytes(numbers) * float((parts / each).sum())  # over all slots
        share, free = min(known / (1 + known), _LOOKING_SHARE), memory_bytes - least
        rows = min(_ROWS_MIN + int(free * share / window.place_bytes(numbers)), window.WINDOW_ROWS_MAX)
        free -= window.window_bytes(rows, len(tables), numbers)
        free += window.window_bytes(_ROWS_MIN, len(tables), numbers)
        slots = [
            max(1, min(1 + int(free * part / size), table.rows, window.WINDOW_ROWS_MAX // len(tables)))
            for table, part, size in zip(tables, parts, each, strict=True)
        ]
        firsts = np.cumsum([0, *(table.rows for table in tables)]).tolist()
        self._firsts = dict(zip(self.tables, firsts, strict=False))
        self.coming = Upcoming(rows, slots, firsts)
        self._rows: dict[str, NDArray[np.uint8]] = {}

    def add(self, ids: Mapping[str, NDArray[np.int64]]) -> None:
        """The rows that the next step wants of other hosts, all of a table different."""
        rows = [ids[name].astype(np.int64, copy=False) + first for name, first in self._firsts.items()]
        self.coming.add(np.concatenate(rows))

    def begin(self, step: int) -> None:
        """The rows that are asked for from now on are of this step."""
        self.coming.begin(step)

    def host_bytes(self, tables: Sequence[Table]) -> int:
        return self._memory_bytes

    def least_bytes(self, tables: Sequence[Table]) -> int:
        kept = [table for table in tables if table.name in self.tables]
        numbers = sum(table.rows for table in kept)
        slots = sum(_slot_bytes(table, numbers) for table in kept)
        return window.window_bytes(_ROWS_MIN, len(kept), numbers) + slots

    def over(self, below: RowSource, memory_bytes: int) -> AheadTier:
        if memory_bytes < self._memory_bytes:  # by which all has been divided
            raise BudgetError(self._memory_bytes, memory_bytes, "keep rows of other hosts (halo=)")
        if not self._rows:  # else they stay, as does what is known of steps, where one tier follows another
            pairs = zip(self.tables, self.coming.slots, strict=True)
            self._rows = {n: empty_rows(slots, below.store.table(n).row_bytes) for n, slots in pairs}
        return AheadTier(below, self.coming, self._rows)

    def __repr__(self) -> str:
        return f"Ahead({self.tables!r}, {self._memory_bytes:,})"


def _slot_bytes(table: Table, numbers: int) -> int:
    return table.row_bytes + window.slot_bytes(numbers)


class _Kept(NamedTuple):
    """What stays of a table, by its number."""

    table: Table
    number: int
    rows: NDArray[np.uint8]


class AheadTier(OverSource):
    """See the module's text. ``rows``: memory for the slots of those tables that ``coming`` has some of, in
    their order. Of others it holds nothing. It belongs to one process."""

    name = "ahead"

    def __init__(self, below: RowSource, coming: Upcoming, rows: Mapping[str, NDArray[np.uint8]]) -> None:
        super().__init__(below)
        self._coming, self._kept = coming, dict[str, _Kept]()
        for number, name in enumerate(rows):
            self._kept[name] = _Kept(below.store.table(name), number, rows[name])
        self._lock, self._hits = threading.Lock(), 0

    @property
    def memory_bytes(self) -> int:
        return self._coming.memory_bytes + sum(kept.rows.nbytes for kept in self._kept.values())

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        missing, places, missed = {}, {}, dict[str, Missed]()
        for name, wanted in ids.items():
            to = np.arange(len(wanted), dtype=np.int32) if at is None else np.asarray(at[name], np.int32)
            if name in self._kept:
                one = missed[name] = self._serve(self._kept[name], wanted, filled[name], to)
                wanted, to = one.ids, one.places
            if len(wanted):
                missing[name], places[name] = wanted, to
        if not missing:
            return answered(filled)
        below = self._below.submit(missing, out={name: filled[name] for name in missing}, at=places)
        return chained(below, lambda: self._arrived(missed, filled))

    def _serve(self, kept: _Kept, ids: NDArray[np.int64], out: Any, to: NDArray[np.int32]) -> Missed:
        """Copy what is here out; the others."""
        rows, row_bytes, target = address_of(kept.rows), kept.table.row_bytes, _address(kept.table, out)
        missed = self._coming.serve(kept.number, ids, rows, row_bytes, target, to)
        with self._lock:
            self._hits += len(ids) - len(missed.ids)
        return missed

    def _arrived(self, missed: Mapping[str, Missed], filled: Any) -> Any:
        """Keep some of the rows that have come."""
        for name, one in missed.items():
            if len(one.ids):
                table, number, rows = self._kept[name]
                source = _address(table, filled[name])
                self._coming.keep(number, one, source, table.row_bytes, address_of(rows))
        return filled

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        if table not in self._kept:
            return np.zeros(len(ids), bool)
        return self._coming.holds(self._kept[table].number, ids)

    def hits(self) -> int:
        return self._hits

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"<AheadTier of {list(self._kept)}, {self.memory_bytes:,} bytes>"


def _address(table: Table, out: Any) -> int:
    return address_of(check_out(out, (rows_of(out), *table.row_shape), dtype_from_name(table.entry.dtype)))
