"""Some columns of rows: read in full, and handed out cut.

Rows lie whole on disk, a page holds many of them or a part of one, and to read less than a row would rarely
read fewer pages. So columns are a matter of what is handed out: rows are read into memory of their own, their
columns copied out of it, and it is given back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_integer, as_sequence, known_name
from featstore.base.buffers import empty_rows
from featstore.base.called import called
from featstore.base.ids import check_out, is_tensor, parse_ids
from featstore.engine.request import Request, chained
from featstore.errors import ArgumentError, NotInMemoryError
from featstore.reader.requests import as_tables
from featstore.storage.store import OpenStore

if TYPE_CHECKING:
    from featstore.reader.reader import Reader
    from featstore.reader.report import Plan, ReaderStats
    from featstore.reader.tiered import TieredReader


def columns_of(columns: Sequence[int] | slice, row_shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Columns of rows of a shape, as numbers or a slice, as their numbers, int64 [n]. Raises ArgumentError
    for rows without columns, numbers that are none of theirs, and where none is left."""
    if len(row_shape) != 1:
        raise ArgumentError(f"columns= is of rows with one axis, and these have {len(row_shape)}")
    width = row_shape[0]
    if isinstance(columns, slice):
        if columns.step == 0:
            raise ArgumentError("columns has a step of 0")
        ends = (columns.start, columns.stop, columns.step)
        start, stop, step = [None if end is None else as_integer(end, "columns") for end in ends]
        taken = list(range(width)[start:stop:step])
    else:
        taken = [
            as_integer(number, "a number of columns", 0, width - 1)
            for number in as_sequence(columns, "columns", "numbers of columns")
        ]
    if not taken:
        raise ArgumentError(f"columns={columns} leaves no column of {width}")
    return np.array(taken, np.int64)


@dataclass(frozen=True)
class CutTable:
    """What is known of a table of which some columns are handed out: as of a table with only these.
    ``taken``: their numbers, or the names of fields; None for all."""

    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    taken: NDArray[np.int64] | list[str] | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    def cut(self, rows: Any, out: NDArray[Any] | None = None) -> Any:
        """These columns of rows, in memory of their own, or in ``out``."""
        if is_tensor(rows):
            return rows if self.taken is None else rows[..., self.taken]
        if self.taken is None and out is None:
            return rows
        if out is None:
            shape = (*rows.shape[: rows.ndim - len(self.row_shape)], *self.row_shape)
            count = math.prod(shape[: len(shape) - len(self.row_shape)])
            out = empty_rows(count, self.row_bytes).view(self.dtype).reshape(shape)
        if self.taken is None:
            out[...] = rows
        elif isinstance(self.taken, list):
            for name in self.taken:
                out[name] = rows[name]
        else:
            np.take(rows, self.taken, axis=-1, out=out, mode="clip")  # all are there: no buffer
        return out


def cut_tables(store: OpenStore, names: Collection[str], columns: Any) -> dict[str, CutTable]:
    """Tables of which ``columns`` are handed out, by name; see :class:`ColumnReader`."""
    given = as_tables(names, columns)
    made = {}
    for name in names:
        table = store.table(name)
        whole = CutTable(table.rows, table.row_shape, table.dtype, None)
        made[name] = whole if given.get(name) is None else _cut(whole, given[name])
    return made


def _cut(table: CutTable, columns: Any) -> CutTable:
    dtype = table.dtype
    if dtype.names is None:
        taken = columns_of(columns, table.row_shape)
        return CutTable(table.rows, (len(taken),), dtype, taken)
    fields = as_sequence(columns, "columns", "names of fields")
    for name in fields:
        known_name(name, dtype.names, "columns: records of the table have no field")
    if not fields or len(set(fields)) < len(fields):
        raise ArgumentError(f"columns must be names of fields, at least one, and each once, not {fields}")
    return CutTable(table.rows, table.row_shape, np.dtype([(name, dtype[name]) for name in fields]), fields)


class ColumnReader:
    """Some columns of rows; made by ``store.reader(columns=...)``. A context manager.

    Args:
        reader: the reader that reads the rows, in full; it is closed with this one.
        columns: of rows with one axis which of their elements, as numbers or a slice; of records the names of
            fields. For several tables a mapping of their names to such; those that it leaves out are whole.

    It knows tables as if they had these columns alone (:meth:`table`); what it reads, plans and counts is
    that of whole rows. Beside its budget, which is the reader's, and the rows that it hands out, it holds the
    whole rows of each request until they are cut. Raises ArgumentError, UnknownNameError.
    """

    def __init__(self, reader: Reader | TieredReader, columns: Any) -> None:
        self.tables = list(reader.tables)
        self._cuts = cut_tables(reader.store, self.tables, columns)
        self._reader, self._columns = reader, columns

    def table(self, name: str) -> CutTable:
        """What is known of a table: its ``rows``, and as it is handed out ``row_shape``, ``dtype`` and
        ``row_bytes``. Raises UnknownNameError."""
        return self._cuts[known_name(name, self._cuts, "this reader has no table")]

    def read(self, ids: Any, *, out: Any = None) -> Any:
        """Columns of the rows of ``ids``, in the order asked; otherwise as :meth:`featstore.Reader.read`."""
        if out is None:
            return self._handed(self._reader.read(ids))
        asked, whole, finish = self._filling(ids, out)
        self._reader.read(asked, out=whole)
        return finish()

    def submit(self, ids: Any, *, out: Any = None) -> Request:
        """As :meth:`read`, but returns at once with a :class:`~featstore.engine.request.Request`."""
        if out is None:
            below: Request = self._reader.submit(ids)
            return chained(below, lambda: self._handed(below.result()))
        asked, whole, finish = self._filling(ids, out)
        return chained(self._reader.submit(asked, out=whole), finish)

    def _handed(self, rows: Any) -> Any:
        if isinstance(rows, dict):
            return {name: self._cuts[name].cut(found) for name, found in rows.items()}
        return self._cuts[self.tables[0]].cut(rows)

    def _filling(self, ids: Any, out: Any) -> tuple[dict[str, Any], dict[str, Any], Callable[[], Any]]:
        """Ids by table, memory for their whole rows, and what cuts these into the caller's ``out``."""
        asked, given = as_tables(self.tables, ids), as_tables(self.tables, out)
        if set(asked) != set(given):
            raise ArgumentError("out, where given, is given for every table that ids are given for")
        whole, places = {}, {}
        for name, value in asked.items():
            cut, table, shape = self._cuts[name], self._reader.store.table(name), parse_ids(value).shape
            to = check_out(given[name], (*shape, *cut.row_shape), cut.dtype)
            places[name] = to.view(cut.dtype).reshape(*shape, *cut.row_shape)
            rows = empty_rows(math.prod(shape), table.row_bytes)
            whole[name] = rows.view(table.dtype).reshape(*shape, *table.row_shape)

        def finish() -> Any:
            for name, rows in whole.items():
                self._cuts[name].cut(rows, places[name])
            return out

        return asked, whole, finish

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        raise NotInMemoryError("a reader is no array in memory: read rows with reader.read(ids)")

    def plan(self, ids: Any) -> Plan:
        """As of the reader of whole rows."""
        return self._reader.plan(ids)

    def stats(self) -> ReaderStats:
        """As of the reader of whole rows."""
        return self._reader.stats()

    def memory(self) -> dict[str, int]:
        """Bytes of the budget, by use."""
        return self._reader.memory()

    @property
    def store(self) -> OpenStore:
        """The store."""
        return self._reader.store

    @property
    def given(self) -> dict[str, Any]:
        """The options that it was made with."""
        return {**self._reader.given, "columns": self._columns}

    def close(self) -> None:
        """Close the reader. May be called more than once."""
        self._reader.close()

    def __enter__(self) -> ColumnReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnReader, (self._reader, self._columns)

    def __repr__(self) -> str:
        return called(f"{self.store!r}.reader", **self.given)
