"""A buffer of other hosts' rows that knows which mini-batches come: with :mod:`featstore.hosts.next_uses`,
the row that is wanted farthest away goes (MIN: Belady, IBM Systems Journal 5(2), 1966; looking ahead is after
Ginex: Park et al., VLDB'22). A row that would be the first to go is not put there at all.

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
from featstore.hosts.next_uses import LEAST_BYTES, USES_MAX, Block, NextUses
from featstore.storage.store import Table
from featstore.tiers import RowSource
from featstore.tiers.over import OverSource
from featstore.tiers.slots.contents import are_present
from featstore.tiers.slots.layout import MIN, NEVER, make_slot_map
from featstore.tiers.slots.policies_min import (
    bring_uses_forward,
    count_by_use,
    list_anew,
    shift_uses,
)
from featstore.tiers.slots.rows import buffer_bytes, slots_for
from featstore.tiers.slots.soonest import keep_soonest, serve_soonest
from featstore.tiers.static_tier import new_rows

_LOOKING_SHARE = 6  # of the memory, for what is known of mini-batches to come


class Ahead:
    """Rows of ``tables`` of other hosts, in ``memory_bytes``. ``weights``: of the tables, by which memory is
    divided among them; alike by default. ``uses``: to be told which steps come, by :meth:`add`; what begins
    is told to :meth:`begin`. Raises BudgetError."""

    def __init__(
        self, tables: Sequence[Table], memory_bytes: int, weights: Sequence[float] | None = None
    ) -> None:
        self.tables, self._memory_bytes = [table.name for table in tables], memory_bytes
        least = self.least_bytes(tables)
        if memory_bytes < least:
            raise BudgetError(least, memory_bytes, "keep rows of other hosts (halo=)")
        self._looking_bytes = memory_bytes // _LOOKING_SHARE
        self.uses = NextUses(self._looking_bytes)
        ends = np.cumsum([0, *(table.rows for table in tables)])
        self._firsts = dict(zip(self.tables, ends.tolist(), strict=False))
        parts = np.ones(len(tables)) if weights is None or not sum(weights) else np.array(weights, float)
        more = memory_bytes - self._looking_bytes - sum(map(_least_rows_bytes, tables))
        self._bytes = {
            table.name: _least_rows_bytes(table) + int(more * part)
            for table, part in zip(tables, parts / parts.sum(), strict=True)
        }
        self._tier: AheadTier | None = None

    def add(self, ids: Mapping[str, NDArray[np.int64]]) -> None:
        """The rows that the next step wants of other hosts, all of a table different."""
        self.uses.add(np.concatenate([ids[name] + first for name, first in self._firsts.items()]))

    def begin(self, step: int) -> None:
        """The rows that are asked for from now on are of this step."""
        self.uses.begin(step, None if self._tier is None else self._tier.note_uses)

    def host_bytes(self, tables: Sequence[Table]) -> int:
        return self._memory_bytes

    def least_bytes(self, tables: Sequence[Table]) -> int:
        rows = sum(_least_rows_bytes(table) for table in tables if table.name in self.tables)
        return max(LEAST_BYTES * _LOOKING_SHARE, -(-rows * _LOOKING_SHARE // (_LOOKING_SHARE - 1)))

    def over(self, below: RowSource, memory_bytes: int) -> AheadTier:
        if memory_bytes < self._memory_bytes:  # by which all has been divided
            raise BudgetError(self._memory_bytes, memory_bytes, "keep rows of other hosts (halo=)")
        self._tier = None  # one that was there before has gone
        self._tier = AheadTier(below, self.uses, self._bytes, self._firsts)
        return self._tier

    def __repr__(self) -> str:
        return f"Ahead({self.tables!r}, {self._memory_bytes:,})"


def _least_rows_bytes(table: Table) -> int:
    return buffer_bytes(1, table.row_bytes, MIN, USES_MAX)


class SoonRows:
    """Rows of a table in slots, by the step that wants them next. Not for several threads at once. Raises
    BudgetError."""

    def __init__(self, table: Table, memory_bytes: int) -> None:
        self._row_bytes = table.row_bytes
        self.slots = slots_for(memory_bytes, table.row_bytes, MIN, USES_MAX)
        self._map = make_slot_map(self.slots, MIN, batches=USES_MAX)
        self._rows = empty_rows(self.slots, table.row_bytes)
        self._idle = np.zeros(USES_MAX + 1, np.int64)
        none, no_ids = np.empty(0, np.int32), np.empty(0, np.int64)
        self.holds(no_ids)
        self.shift(0)
        bring_uses_forward(self._map, no_ids, np.zeros(1, np.int64), 0, 0, 0)
        self.list_anew()
        self.serve(no_ids, none, 0, none)
        self.keep(no_ids, none, 0, none)

    @property
    def memory_bytes(self) -> int:
        return buffer_bytes(self.slots, self._row_bytes, MIN, USES_MAX)

    def holds(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return are_present(self._map, ids)

    def serve(
        self, ids: NDArray[np.int64], uses: NDArray[np.int32], target: int, places: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Copy those that are here to their places at an address; they are wanted next in the steps ``uses``.
        Returns the positions of the others."""
        left = np.empty(len(ids), np.int32)
        rows = address_of(self._rows)
        count = serve_soonest(self._map, ids, uses, self._idle, rows, self._row_bytes, target, places, left)
        return left[:count]

    def keep(
        self, ids: NDArray[np.int64], uses: NDArray[np.int32], source: int, places: NDArray[np.int32]
    ) -> None:
        """Have rows that lie at these places at an address here, those wanted soonest, in place of rows that
        are wanted later."""
        rows = address_of(self._rows)
        lacking = keep_soonest(self._map, ids, uses, self._idle, source, places, self._row_bytes, rows)
        assert not lacking, f"{lacking:,} rows more were chosen than there are slots"

    def shift(self, shift: int) -> None:
        """Uses count from so many steps later. Then :meth:`bring_forward`, and :meth:`list_anew`."""
        shift_uses(self._map, shift)

    def bring_forward(self, block: Block, first: int, rows: int) -> None:
        """Those of its rows that are here are wanted in its steps, if in none before; of all tables' these
        are the ``rows`` from ``first`` on."""
        bring_uses_forward(self._map, block.ids, block.offsets, first, rows, block.use)

    def list_anew(self) -> None:
        """All uses have been said."""
        list_anew(self._map)
        count_by_use(self._map, self._idle)


def shifted(uses: NDArray[np.int32], shift: int) -> NDArray[np.int32]:
    """Uses that count from ``shift`` steps later; NEVER of those before."""
    if not shift:
        return uses
    found: NDArray[np.int32] = np.where((uses >= shift) & (uses != NEVER), uses - np.int32(shift), NEVER)
    return found


class _Missed(NamedTuple):
    """Rows of a table that come from below, some of which may stay."""

    ids: NDArray[np.int64]
    uses: NDArray[np.int32]
    places: NDArray[np.int32]
    steps: int  # how far uses had been shifted


class _Kept(NamedTuple):
    """What stays of a table; ``first`` is the number of its row 0 among those of all tables."""

    table: Table
    first: int
    rows: SoonRows


class AheadTier(OverSource):
    """See the module's text. ``memory``: bytes by table. ``firsts``: by table, the number of its row 0 for
    ``uses``. Of other tables it holds nothing. It belongs to one process. Raises BudgetError."""

    name = "ahead"

    def __init__(
        self, below: RowSource, uses: NextUses, memory: Mapping[str, int], firsts: Mapping[str, int]
    ) -> None:
        super().__init__(below)
        self._uses = uses
        self._kept = {
            name: _Kept(table := below.store.table(name), firsts[name], SoonRows(table, given))
            for name, given in memory.items()
        }
        self._lock, self._hits, self._shift = threading.Lock(), 0, 0

    def note_uses(self, shift: int, blocks: Sequence[Block]) -> None:
        """As :data:`featstore.hosts.next_uses.OnBlock`."""
        with self._lock:
            self._shift += shift
            for table, first, rows in self._kept.values():
                rows.shift(shift)
                for block in blocks:
                    rows.bring_forward(block, first, table.rows)
                rows.list_anew()

    @property
    def memory_bytes(self) -> int:
        return sum(kept.rows.memory_bytes for kept in self._kept.values())

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        missing, places, missed = {}, {}, dict[str, _Missed]()
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

    def _serve(self, kept: _Kept, ids: NDArray[np.int64], out: Any, to: NDArray[np.int32]) -> _Missed:
        """Copy what is here out; the others."""
        target, steps, uses = _address(kept.table, out), self._shift, self._uses.of(ids, kept.first)
        with self._lock:
            left = kept.rows.serve(ids, uses, target, to)
            self._hits += len(ids) - len(left)
        return _Missed(ids[left], uses[left], to[left], steps)

    def _arrived(self, missed: Mapping[str, _Missed], filled: Any) -> Any:
        """Keep some of the rows that have come."""
        for name, one in missed.items():
            if not len(one.ids):
                continue
            table, _, rows = self._kept[name]
            with self._lock:
                shift = self._shift - one.steps
                rows.keep(one.ids, shifted(one.uses, shift), _address(table, filled[name]), one.places)
        return filled

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        if table not in self._kept:
            return np.zeros(len(ids), bool)
        with self._lock:
            return self._kept[table].rows.holds(ids)

    def hits(self) -> int:
        return self._hits

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"<AheadTier of {list(self._kept)}, {self.memory_bytes:,} bytes>"


def _address(table: Table, out: Any) -> int:
    return address_of(check_out(out, (rows_of(out), *table.row_shape), dtype_from_name(table.entry.dtype)))
