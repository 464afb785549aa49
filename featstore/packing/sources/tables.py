"""Row sources in columnar files: Parquet and Arrow IPC (Feather).

Rows are either one column of lists that all have the same length (``FixedSizeList``, or ``List`` as most
writers leave it) or several numeric columns of one type, which side by side make the row. They are read a
record batch at a time; what the format forces into memory at once is ``held_bytes``. For Parquet these are
pages, not row groups, because columns are read through small buffers and in batches of about a mebibyte. An
Arrow record batch comes whole; its size is taken from the first one with rows, which writers make the
largest.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.keys import KeyBlock, keys_of_arrow
from featstore.errors import SourceError
from featstore.packing.sources.base import (
    FeatureSource,
    dtype_text,
    file_fingerprint,
    import_extra,
    open_binary,
)
from featstore.packing.sources.columns import (
    SAMPLE_ROWS_MAX,
    Column,
    choose_columns,
    refuse_id_values,
    refuse_twice,
    whole_ids,
)

__all__ = [
    "ARROW_SUFFIXES",
    "ArrowRows",
    "ColumnRows",
    "arrow_batches",
    "arrow_rows",
    "open_arrow",
    "parquet_file",
]


ARROW_SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc")
# Read buffer of a Parquet column, the size of a batch that pyarrow builds, and the page size that writers aim
# at.
READ_BUFFER_BYTES = 256 << 10
BATCH_BYTES = 1 << 20
ID_BATCH_ROWS = 1 << 16
PAGE_BYTES_TYPICAL = 1 << 20


def parquet_file(path: Path) -> Any:
    """An open `pyarrow.parquet.ParquetFile` that reads without mapping the file. Raises SourceError."""
    parquet = import_extra("pyarrow.parquet", "arrow", str(path))
    arrow = import_extra("pyarrow", "arrow", str(path))
    open_binary(path).close()
    try:
        return parquet.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=READ_BUFFER_BYTES)
    except (arrow.ArrowException, OSError) as error:
        raise SourceError(f"{path}: not a readable Parquet file ({error}); copy or write it again") from error


def open_arrow(path: Path) -> Any:
    """An open Parquet or Arrow IPC file, by its name. Raises SourceError."""
    if path.suffix.lower() == ".parquet":
        return parquet_file(path)
    arrow = import_extra("pyarrow", "arrow", str(path))
    options = arrow.ipc.IpcReadOptions(use_threads=False)
    open_binary(path).close()
    try:
        file = arrow.OSFile(str(path), "rb")
        lead = file.read(6)
        file.seek(0)
        return (arrow.ipc.open_file if lead == b"ARROW1" else arrow.ipc.open_stream)(file, options=options)
    except (arrow.ArrowException, OSError) as error:
        raise SourceError(f"{path}: not a readable Arrow file ({error}); copy or write it again") from error


def arrow_batches(
    path: Path, columns: list[str] | None = None, group: int = 0, block_rows: int = ID_BATCH_ROWS, *,
    name: str = "", empty: bool = False,
) -> Iterator[Any]:  # fmt: skip
    """Record batches of some columns, or of all: from a row group on, of ``block_rows`` at most (Parquet), or
    all batches as they are (Arrow), those without rows left out, but for a first one where ``empty`` is true.
    Raises SourceError."""
    arrow = import_extra("pyarrow", "arrow", str(path))
    try:
        with open_arrow(path) as file:
            if path.suffix.lower() == ".parquet":
                groups = range(group, file.metadata.num_row_groups)
                yield from file.iter_batches(
                    batch_size=block_rows, row_groups=groups, columns=columns, use_threads=False
                )
                return
            counted = hasattr(file, "num_record_batches")
            batches = map(file.get_batch, range(file.num_record_batches)) if counted else file
            for number, batch in enumerate(batches):
                if batch.num_rows or (empty and not number):
                    yield batch if columns is None else batch.select(columns)
    except (arrow.ArrowException, OSError) as error:
        raise SourceError(
            f"{name or path}: cannot be read ({error}); it is damaged or cut off, copy it again"
        ) from error


def _refuse_reordered(schema: Any, label: str) -> None:
    """Raise SourceError where a frame of pandas was written whose rows were not in the order of its index,
    a range that stands in the schema alone."""
    for index in (getattr(schema, "pandas_metadata", None) or {}).get("index_columns", ()):
        if isinstance(index, dict) and index.get("kind") == "range" and index.get("step", 1) != 1:
            raise SourceError(
                f"{label}: was written from a frame of pandas whose index goes from {index.get('start')} in "
                f"steps of {index.get('step')}, so that rows may not be in the order of nodes: write it "
                "after frame.reset_index(drop=True) where row i is node i; or with the index as a column, "
                "frame.reset_index(), and say id='index'"
            )


class ColumnRows(FeatureSource):
    """Rows of a table with named columns, which come as Arrow's record batches. Nulls are refused: a feature
    has no such value."""

    def __init__(
        self, label: str, schema: Any, rows: int | None, columns: str | int | Sequence[str | int] | None,
        id: str | int | None,
    ) -> None:  # fmt: skip
        self._arrow = import_extra("pyarrow", "arrow", label)
        if columns is None and id is None:
            _refuse_reordered(schema, label)
        described = _columns_of(schema)
        self.chosen = choose_columns(described, columns, id, label)
        self._columns = [described[k].name for k in self.chosen.taken]
        self._check_names(described, label)
        self._listed = described[self.chosen.taken[0]].kind == "list"
        self.name, self.rows = label, rows
        first = next(self._batches(0, 1, self._columns), None) or self._empty_batch()
        if first is None:
            raise SourceError(f"{label}: has no rows, so the shape of a row is unknown")
        block = self._as_rows(first.slice(0, 1), None, 0)
        single = not self._listed and len(self._columns) == 1
        shape = () if single else block.shape[1:]
        row_bytes = max(1, block.nbytes)
        self._batch_rows = max(1, BATCH_BYTES // row_bytes)
        super().__init__(label, rows, shape, block.dtype, held_bytes=self._held_bytes(row_bytes, first))
        if columns is None and len(self._columns) > 1 and first.num_rows:
            refuse_id_values(self._first_rows(), self._columns, label)

    def _empty_batch(self) -> Any:
        """A batch without rows that tells their shape, where there are no others; None for none."""
        return None

    def _first_rows(self) -> NDArray[Any]:
        """As many as are looked at for what they are, of one batch or several."""
        wanted = min(SAMPLE_ROWS_MAX, max(64, self._batch_rows))
        parts, rows = [], 0
        for batch in self._batches(0, wanted, self._columns):
            parts.append(self._as_rows(batch.slice(0, wanted - rows), self.row_shape, rows).copy())
            rows += len(parts[-1])
            if rows == wanted:
                break
        return np.concatenate(parts)

    @abc.abstractmethod
    def _batches(self, group: int, block_rows: int, columns: list[str]) -> Iterator[Any]:
        """Record batches of some columns, of ``block_rows`` where that can be had, from a group on."""

    @abc.abstractmethod
    def _held_bytes(self, row_bytes: int, first: Any) -> int:
        """Memory of a pass; ``first`` is the first record batch."""

    def _seek(self, start: int) -> tuple[int, int]:
        """(a row at or before ``start``, the group that begins with it)."""
        return 0, 0

    def _check_names(self, described: list[Column], label: str) -> None:
        """Files are read by the names of columns, so those that are read need one of their own."""
        assert self.chosen is not None
        names = [column.name for column in described]
        used = [*self._columns, *([] if self.chosen.id is None else [names[self.chosen.id]])]
        refuse_twice(names, used, label)

    def ids(self) -> Iterator[NDArray[Any]]:
        """As `FeatureSource.ids`."""
        assert self.chosen is not None
        if self.chosen.id is None:
            yield from super().ids()
            return
        name = self.chosen.names[self.chosen.id]
        first = 0
        for batch in self._batches(0, ID_BATCH_ROWS, [name]):
            for low in range(0, batch.num_rows, ID_BATCH_ROWS):
                column = batch.column(0).slice(low, ID_BATCH_ROWS)
                self._refuse_nulls(column, name, first + low)
                yield whole_ids(column.to_numpy(zero_copy_only=False), first + low, self.name, name)
            first += batch.num_rows
        self._arrow.default_memory_pool().release_unused()  # the rows come next, within the same budget

    def keys(self) -> Iterator[KeyBlock]:
        """As `FeatureSource.keys`."""
        assert self.chosen is not None
        assert self.chosen.id is not None
        name, first = self.chosen.names[self.chosen.id], 0
        for batch in self._batches(0, ID_BATCH_ROWS, [name]):
            yield keys_of_arrow(batch.column(0), f"{self.name}, {name!r}", first)
            first += batch.num_rows
        self._arrow.default_memory_pool().release_unused()

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        at = 0
        for batch, first in self._numbered(start, block_rows):
            for low in range(max(0, start - first), batch.num_rows, block_rows):
                piece = batch.slice(low, block_rows)
                yield np.ascontiguousarray(self._as_rows(piece, self.row_shape, first + low))
            at = first + batch.num_rows
        if self.rows is None and at < start:
            raise SourceError(f"{self.name}: cannot start at row {start}; it has {at} rows")

    def _numbered(self, start: int, block_rows: int) -> Iterator[tuple[Any, int]]:
        """Record batches with the number of their first row; whole groups before ``start`` are not read."""
        first, group = self._seek(start)
        for batch in self._batches(group, min(block_rows, self._batch_rows), self._columns):
            yield batch, first
            first += batch.num_rows

    def _as_rows(self, batch: Any, row_shape: tuple[int, ...] | None, first: int) -> NDArray[Any]:
        """``[n, *row_shape]`` of a record batch. ``row_shape`` None: take the widths as they come."""
        columns: list[NDArray[Any]] = []
        for name, column in zip(self._columns, batch.columns, strict=True):
            widths: list[int] = []
            while _is_list(column.type):
                self._refuse_nulls(column, name, first)
                width = (
                    None
                    if row_shape is None
                    else (row_shape[len(widths)] if len(widths) < len(row_shape) else 0)
                )
                widths.append(self._width(column, width, name, first))
                column = column.flatten()
            self._refuse_nulls(column, name, first)
            columns.append(column.to_numpy(zero_copy_only=False).reshape(batch.num_rows, *widths))
        if len(columns) == 1:
            return columns[0]
        return np.stack(columns, axis=1)

    def _width(self, column: Any, wanted: int | None, name: str, first: int) -> int:
        types = self._arrow.types
        if types.is_fixed_size_list(column.type):
            return int(column.type.list_size)
        lengths = np.diff(column.offsets.to_numpy())
        width = int(lengths[0]) if wanted is None else wanted
        bad = np.flatnonzero(lengths != width)
        if bad.size:
            raise SourceError(
                f"{self.name}: the list in column {name!r}, row {first + int(bad[0]):,}, has "
                f"{int(lengths[bad[0]])} values, row 0 has {width}; all rows of a table have one shape"
            )
        return width

    def _refuse_nulls(self, column: Any, name: str, first: int) -> None:
        if column.null_count:
            at = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0]
            raise SourceError(
                f"{self.name}: column {name!r} holds a null in the {column.type} values from row "
                f"{first:,} on (number {int(at)} there); fill nulls before the pack"
            )


class ArrowRows(ColumnRows):
    """Rows of a Parquet or Arrow IPC file (file or stream format)."""

    def __init__(
        self,
        path: Path,
        columns: str | int | Sequence[str | int] | None = None,
        name: str | None = None,
        *,
        id: str | int | None = None,
    ) -> None:
        self.path = path
        self._is_parquet = path.suffix.lower() == ".parquet"
        with open_arrow(path) as file:
            schema = file.schema_arrow if self._is_parquet else file.schema
            rows = file.metadata.num_rows if self._is_parquet else self._count_rows()
        super().__init__(name or str(path), schema, rows, columns, id)

    def fingerprint(self) -> dict[str, str | int]:
        """The file's path, size and time of change, and the columns."""
        assert self.chosen is not None
        more = {} if self.chosen.id is None else {"id": self.chosen.names[self.chosen.id]}
        return file_fingerprint(
            "parquet" if self._is_parquet else "arrow",
            self.path,
            key=",".join(self._columns),
            dtype=dtype_text(self.dtype),
            **more,
        )

    def _held_bytes(self, row_bytes: int, first: Any) -> int:
        return self._parquet_held_bytes(row_bytes) if self._is_parquet else 2 * int(first.nbytes)

    def _seek(self, start: int) -> tuple[int, int]:
        first, group = 0, 0
        if self._is_parquet:
            with open_arrow(self.path) as file:
                for group in range(file.metadata.num_row_groups + 1):
                    counted = group < file.metadata.num_row_groups
                    rows = file.metadata.row_group(group).num_rows if counted else 0
                    if not counted or first + rows > start:
                        break
                    first += rows
        return first, group

    def _batches(self, group: int, block_rows: int, columns: list[str]) -> Iterator[Any]:
        """Record batches from a row group on (Parquet), or all of them (Arrow)."""
        return arrow_batches(self.path, columns, group, block_rows, name=self.name)

    def _empty_batch(self) -> Any:
        if self._is_parquet:
            return None
        found = next(arrow_batches(self.path, self._columns, name=self.name, empty=True), None)
        known = self._arrow.types.is_list, self._arrow.types.is_large_list
        listed = found is not None and any(is_kind(one.type) for one in found.columns for is_kind in known)
        return None if listed else found

    def _count_rows(self) -> int | None:
        """Rows by the batches' metadata; None for the stream format, which has no directory of batches."""
        dataset = import_extra("pyarrow.dataset", "arrow", str(self.path))
        with open_arrow(self.path) as file:
            if not hasattr(file, "num_record_batches"):
                return None
        return int(dataset.dataset(self.path, format="ipc").count_rows())

    def _parquet_held_bytes(self, row_bytes: int) -> int:
        """Pages and read buffers of each column, and the batch as pyarrow builds it (levels, values, a
        copy)."""
        pages_bytes = 0
        with open_arrow(self.path) as file:
            for group in range(file.metadata.num_row_groups):
                meta = file.metadata.row_group(group)
                chunks = [meta.column(i) for i in range(meta.num_columns)]
                paths = [(chunk.path_in_schema, chunk.total_uncompressed_size) for chunk in chunks]
                taken = [size for path, size in paths if {path, path.partition(".")[0]} & set(self._columns)]
                pages_bytes = max(pages_bytes, sum(min(size, 2 * PAGE_BYTES_TYPICAL) for size in taken))
        return pages_bytes + len(self._columns) * READ_BUFFER_BYTES + 8 * max(BATCH_BYTES, row_bytes)


def _is_list(arrow_type: Any) -> bool:
    import pyarrow as arrow

    types = arrow.types
    return bool(
        types.is_fixed_size_list(arrow_type) or types.is_list(arrow_type) or types.is_large_list(arrow_type)
    )


def _is_number(arrow_type: Any) -> bool:
    import pyarrow as arrow

    types = arrow.types
    return bool(types.is_integer(arrow_type) or types.is_floating(arrow_type) or types.is_boolean(arrow_type))


def _columns_of(schema: Any) -> list[Column]:
    def kind(arrow_type: Any) -> str:
        inner = arrow_type
        while _is_list(inner):
            inner = inner.value_type
        return "other" if not _is_number(inner) else "number" if inner is arrow_type else "list"

    return [Column(str(f.name), kind(f.type), str(f.type)) for f in schema]


def arrow_rows(
    path: Path,
    columns: str | int | Sequence[str | int] | None = None,
    name: str | None = None,
    *,
    id: str | int | None = None,
) -> ArrowRows:
    """Rows of a Parquet or Arrow IPC file; for ``columns`` and ``id`` see
    `featstore.packing.sources.columns`."""
    return ArrowRows(path, columns, name, id=id)
