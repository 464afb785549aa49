"""A table as an array on disk: indexed as arrays in memory are, its rows read through a reader.

Rows come in the kind of the ids: NumPy's for arrays, lists, slices and numbers, tensors for tensors. What is
read is in memory of its own, aligned to 64 bytes, so that torch and JAX take it by DLPack as it lies there.
Ids in an array must be those of rows: a negative one, which NumPy would count from the end, mostly stands for
"none" in graphs, and is refused. A single number and a slice count from the end as ever.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_flag, as_integer, known_name, shown
from featstore.base.buffers import empty_rows
from featstore.base.called import called
from featstore.base.dtypes import is_bfloat16
from featstore.base.ids import is_tensor, parse_ids
from featstore.base.sheets import Sheet, Shown
from featstore.errors import ArgumentError, IdError, NotInMemoryError
from featstore.reader.sheets import array_sheet

_CPU = (1, 0)  # kDLCPU, the first of it: how DLPack calls host memory


class TableArray(Shown):
    """A table of a store, indexed like an array; made by ``store.table(name, memory=...)``. A context
    manager.

    Args:
        source: what reads the rows: a reader of :meth:`featstore.Store.reader`, or a client of a
            :class:`featstore.SharedBuffer`. All memory that is held is its.
        table: the name of the table; may be left out where the source has one.
        closes: whether :meth:`close` closes the source, too.

    ``shape`` (rows, then the shape of a row), ``dtype``, ``ndim``, ``len``. ``array[ids]`` reads rows: one
    number, a slice, integers of any shape in an array, tensor or list, or a mask of all rows. The result has
    the shape of the ids followed by that of a row. It is a data set to ``torch.utils.data``, too.

    It goes to other processes as its source does: pickled as path and options, of which a reader of its own
    is made there, with a budget of its own; through a fork where the source survives one. Reading raises what
    the source raises, and IdError for what is no index of rows.
    """

    def __init__(self, source: Any, table: str | None = None, *, closes: bool = False) -> None:
        if not all(hasattr(source, what) for what in ("read", "submit", "tables")):
            raise ArgumentError(
                "source must be a store's reader or a client of a shared buffer, not " + shown(source)
            )
        self.closes = as_flag(closes, "closes")
        self.source = source
        if table is None and len(source.tables) != 1:
            names = ", ".join(map(repr, source.tables))
            raise ArgumentError(f"table must say which: the source has {names}")
        self.name: str = known_name(
            source.tables[0] if table is None else table, source.tables, "the source has no table"
        )
        known = source.table(self.name) if hasattr(source, "table") else source.store.table(self.name)
        self.dtype: np.dtype[Any] = known.dtype
        self.row_bytes: int = known.row_bytes
        self.shape: tuple[int, ...] = (known.rows, *known.row_shape)

    @property
    def ndim(self) -> int:
        """Number of axes: one more than a row has."""
        return len(self.shape)

    def __len__(self) -> int:
        """Number of rows."""
        return self.shape[0]

    def __bool__(self) -> bool:
        return True

    # Rows.

    def __getitem__(self, index: Any) -> Any:
        return self._read(self._ids(index))[()]  # of a table of numbers, a number

    def index_select(self, dim: int, index: Any) -> Any:
        """Rows of ``index``, integers with one axis, as torch's function gives them; ``dim`` is 0: rows alone
        can be selected. Raises ArgumentError, IdError."""
        if as_integer(dim, "dim") not in (0, -self.ndim):
            raise ArgumentError(
                f"dim must be 0, not {shown(dim)}: rows are read whole; select columns of what comes back, "
                "or read through store.reader(columns=...)"
            )
        if len(parse_ids(index).shape) != 1:
            raise IdError(f"index must have one axis, not {len(parse_ids(index).shape)}")
        return self._read(index)

    def __getitems__(self, indices: Any) -> list[Any]:
        """Rows of a list of ids, one by one, in one read: what a data loader of torch asks a data set for.
        Rows of bfloat16, of which NumPy and torch know no common name, are tensors."""
        rows = self._read(self._ids(indices))
        if is_bfloat16(self.dtype) and isinstance(rows, np.ndarray):
            from featstore.base.tensors import as_tensor

            rows = as_tensor(rows)
        return list(rows)

    def _read(self, ids: Any) -> Any:
        return self.source.read({self.name: ids})[self.name]

    def _ids(self, index: Any) -> Any:
        """What an index picks, as a number or integers that the source knows."""
        rows = self.shape[0]
        if isinstance(index, slice):
            try:
                return np.arange(*index.indices(rows))
            except (TypeError, ValueError) as error:
                raise IdError(f"{index} is no slice of rows: {error}") from None
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            if not -rows <= index < rows:
                raise IdError(f"row {shown(int(index))} is out of range: {self._where()} has {rows:,} rows")
            return int(index) % rows
        if index is None or index is Ellipsis or isinstance(index, tuple | str | bytes):
            raise IdError(
                f"rows of {self._where()} are taken by one index of rows alone, not by {shown(index)}: index "
                "what comes back further"
            )
        given = index if is_tensor(index) or isinstance(index, np.ndarray) else _as_array(index)
        return self._of_mask(given) if str(given.dtype).endswith("bool") else given

    def _of_mask(self, mask: Any) -> Any:
        """Ids of the rows where a mask is true, in its kind."""
        rows = self.shape[0]
        dense = not is_tensor(mask) or not (mask.is_nested or mask.is_sparse or mask.is_meta)
        if isinstance(mask, np.ma.MaskedArray) or not dense or tuple(mask.shape) != (rows,):
            raise IdError(
                f"a mask of rows of {self._where()} must be bool [{rows}], one of each row, not {shown(mask)}"
            )
        if is_tensor(mask):
            return mask.nonzero().reshape(-1)
        return np.flatnonzero(mask)

    def __iter__(self) -> Any:
        raise NotInMemoryError(
            f"{self._where()} is not gone through row by row, each a read: take blocks, for low in range(0, "
            f"{len(self)}, 65536): array[low : low + 65536]"
        )

    # All of it.

    def whole(self) -> NDArray[Any]:
        """All rows [rows, ...] in an array of their own, where they take no more than the memory that the
        source was given (and an eighth of that meanwhile). Raises NotInMemoryError where they take more."""
        held = getattr(self.source, "memory", None)
        limit = 0 if held is None else sum(held().values())
        row_count, needed = self.shape[0], self.shape[0] * self.row_bytes
        if needed > limit:
            raise NotInMemoryError(
                f"{self._where()} is on disk: all of its rows are {needed:,} bytes, more than the "
                f"{limit:,} bytes of memory that its reader was given; take some, array[ids]"
            )
        rows = empty_rows(row_count, self.row_bytes).view(self.dtype).reshape(self.shape)
        whole = self.source.store.table(self.name) if hasattr(self.source, "store") else self
        step = max(1, limit // 8 // (whole.row_bytes + 8))  # of some columns whole rows are read, too
        for low in range(0, row_count, step):
            high = min(low + step, row_count)
            self.source.read({self.name: np.arange(low, high)}, out={self.name: rows[low:high]})
        return rows

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        if copy is False:
            raise ArgumentError(f"copy=False: {self._where()} is on disk, and what is read of it is a copy")
        rows = self.whole()
        return rows if dtype is None else rows.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        if is_bfloat16(self.dtype):  # which DLPack knows, and NumPy does not
            from featstore.base.tensors import as_tensor

            return as_tensor(self.whole()).__dlpack__()
        if self.dtype.kind not in "biufc":
            raise ArgumentError(f"DLPack has no type for {self.dtype}, of which {self._where()} is")
        return self.whole().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    # Explaining and ending.

    def memory(self) -> dict[str, int]:
        """Bytes of the source's budget, by use; none of a client of a shared buffer, whose owner has one."""
        memory = getattr(self.source, "memory", dict)
        held: dict[str, int] = memory()
        return held

    def close(self) -> None:
        """Close the reader that it was made with; one that was given stays open. May be called more than
        once."""
        if self.closes:
            self.source.close()

    def __enter__(self) -> TableArray:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.source, self.name, self.closes)

    def _where(self) -> str:
        return f"table {self.name!r}"

    def _sheet(self) -> Sheet:
        return array_sheet(self)

    def __repr__(self) -> str:
        given = getattr(self.source, "given", None)  # a split store's table has other sources
        if given is None or not self.closes:
            return called("featstore.TableArray", self.source, self.name)
        options = {name: value for name, value in given.items() if name != "tables"}
        return called(f"{self.source.store!r}.table", self.name, **options)


def as_table_array(value: Any, name: str) -> TableArray:
    """A table as an array."""
    if not isinstance(value, TableArray):
        raise ArgumentError(
            f"{name} must be a table as an array, store.table(name, memory=...), not {shown(value)}"
        )
    return value


def _as_array(index: Any) -> NDArray[Any]:
    try:
        given = np.asarray(index)
    except (TypeError, ValueError, RuntimeError):
        raise IdError(f"{shown(index)} is no index of rows") from None
    return given


def _reopen(source: Any, table: str, closes: bool) -> TableArray:
    return TableArray(source, table, closes=closes)
