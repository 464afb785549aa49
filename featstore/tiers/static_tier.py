"""A fixed set of rows as a tier over any other source: those of the highest degree, or given ones.

Over the disk the reader keeps such a set itself (``static=``), which saves a step; this is for any other
place in a stack.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, known_name
from featstore.base.buffers import empty_rows
from featstore.base.called import called
from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import check_out, parse_ids
from featstore.engine.request import Request, answered, chained
from featstore.errors import ArgumentError, BudgetError, IdError, SourceError
from featstore.storage.store import Table
from featstore.tiers import RowSource, Tier, source_tables
from featstore.tiers.members import highest_degrees, members_bytes
from featstore.tiers.over import OverSource
from featstore.tiers.static import StaticRows
from featstore.units import parse_bytes

_NONE = np.empty(0, np.int32)
_AT_ONCE = 1 << 16  # rows that are read at once beforehand


@dataclass(frozen=True, repr=False)
class Static:
    """Rows kept for good.

    ``rows``: ``"degree"`` for those of the highest degree, as many as there is memory for; node ids; or a
    mapping of tables to these. ``memory``: bytes or a size; a share of what is left over by default. Raises
    ArgumentError, IdError.
    """

    rows: Any = "degree"
    memory: int | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rows, str):
            as_choice(self.rows, "rows", ("degree",), " or node ids")
        else:
            for ids in self.rows.values() if isinstance(self.rows, Mapping) else [self.rows]:
                parse_ids(ids)
        if self.memory is not None:
            parse_bytes(self.memory, "memory")

    def __repr__(self) -> str:
        return called("featstore.Static", self.rows, memory=self.memory)

    def host_bytes(self, tables: Sequence[Table]) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory, "memory")

    def least_bytes(self, tables: Sequence[Table]) -> int:
        by_name = {table.name: table for table in tables}
        return members_bytes(self._given(by_name), by_name)

    def over(self, below: RowSource, memory_bytes: int) -> Tier:
        return StaticTier(below, self._members(below, memory_bytes), memory_bytes)

    def _given(self, tables: Mapping[str, Table]) -> dict[str, NDArray[np.int64]]:
        """The rows that were said, by table; none where they go by degree."""
        if isinstance(self.rows, str):
            return {}
        by_table = self.rows if isinstance(self.rows, Mapping) else None
        if by_table is None:
            if len(tables) != 1:
                raise ArgumentError(f"Static: of which table? give {{{next(iter(tables))!r}: ids}}")
            by_table = {next(iter(tables)): self.rows}
        for name in by_table:
            known_name(name, tables, "Static: there is no table")
        return {name: np.unique(parse_ids(ids).values) for name, ids in by_table.items()}

    def _members(self, below: RowSource, memory_bytes: int) -> dict[str, NDArray[np.int64]]:
        tables = {table.name: table for table in source_tables(below)}
        if not isinstance(self.rows, str):
            return self._given(tables)
        if all(table.entry.order.rows_by_degree is None for table in tables.values()):
            raise SourceError(
                "Static('degree') needs degrees, but the store was packed without a graph: pack with one, or "
                "give node ids (where topology is split by hosts, too, no host knows those of all nodes)"
            )
        chosen = {}
        for name, rows in highest_degrees(
            {n: t for n, t in tables.items() if t.entry.order.rows_by_degree is not None}, memory_bytes
        ).items():
            if len(rows):
                node_of_row = tables[name].node_of_row()
                ids = rows if node_of_row is None else node_of_row[rows]
                chosen[name] = np.sort(ids.astype(np.int64))
        return chosen


class StaticTier(OverSource):
    """The rows of ``members`` (node ids, int64, ascending, by table) over ``below``; they are read now.

    Raises BudgetError where they take more than ``memory_bytes``; what reading raises.
    """

    name = "static"

    def __init__(self, below: RowSource, members: Mapping[str, NDArray[np.int64]], memory_bytes: int) -> None:
        super().__init__(below)
        self._hits, self._counting = 0, threading.Lock()
        tables = {name: below.store.table(name) for name in members}
        needed = members_bytes(members, tables)
        if needed > memory_bytes:
            raise BudgetError(needed, memory_bytes, "hold the static rows asked for")
        self._rows: dict[str, StaticRows] = {}
        for name, ids in members.items():
            table = tables[name]
            for bad in (ids.min(), ids.max()) if len(ids) else ():
                if not 0 <= bad < table.rows:
                    raise IdError(
                        f"Static: node id {bad} is out of range: table {name!r} has {table.rows:,} rows"
                    )
            held = StaticRows(ids, table.rows, table.row_bytes)
            shape, dtype = (len(ids), *table.row_shape), dtype_from_name(table.entry.dtype)
            rows = held.data.reshape(-1).view(dtype).reshape(shape)
            for low in range(0, len(ids), _AT_ONCE):
                part = slice(low, low + _AT_ONCE)
                below.submit({name: ids[part]}, out={name: rows[part]}).result()
            self._rows[name] = held

    @property
    def memory_bytes(self) -> int:
        return sum(held.memory_bytes for held in self._rows.values())

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        missing: dict[str, NDArray[np.int64]] = {}
        places: dict[str, NDArray[np.int32]] = {}
        for name, wanted in ids.items():
            to = _NONE if at is None else at[name]
            served = np.zeros(len(wanted), np.uint8)
            if name in self._rows:
                table = self.store.table(name)
                raw = check_out(filled[name], tuple(filled[name].shape), dtype_from_name(table.entry.dtype))
                hits = self._rows[name].serve(wanted, to, served, raw)
                with self._counting:
                    self._hits += hits
            left = np.flatnonzero(served == 0)
            if len(left):
                missing[name] = wanted[left]
                places[name] = left.astype(np.int32) if at is None else to[left]
        if not missing:
            return answered(filled)
        below = self._below.submit(missing, out={name: filled[name] for name in missing}, at=places)
        return chained(below, lambda: filled)

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        served = np.zeros(len(ids), np.uint8)
        if table in self._rows:
            self._rows[table].serve(ids, _NONE, served, np.empty(0, np.uint8))
        return served.astype(bool)

    def hits(self) -> int:
        return self._hits

    def close(self) -> None:
        self._closed, self._rows = True, {}


def new_rows(source: RowSource, ids: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Arrays for the rows of these ids, by table."""
    made = {}
    for name, wanted in ids.items():
        table = source.store.table(name)
        rows = empty_rows(len(wanted), table.row_bytes).view(dtype_from_name(table.entry.dtype))
        made[name] = rows.reshape(len(wanted), *table.row_shape)
    return made
