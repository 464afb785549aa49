"""Rows of data frames and Arrow tables in memory: whatever gives its columns as Arrow does (polars, pandas
from 2.2 on, pyarrow, DuckDB ...). An index of pandas that is no mere count is a column, as Arrow has it, and
is refused as one that looks like ids unless it is named.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from featstore.errors import SourceError
from featstore.packing.sources.arrays import is_count
from featstore.packing.sources.base import FeatureSource, dtype_text, import_extra, sample_crc32
from featstore.packing.sources.columns import id_error
from featstore.packing.sources.tables import ColumnRows

__all__ = ["FrameRows", "frame_table", "is_frame"]


def is_frame(spec: Any) -> bool:
    """Whether something is a table of named columns in memory."""
    named = hasattr(spec, "columns") or hasattr(spec, "column_names")
    arrow = hasattr(spec, "__arrow_c_stream__") or hasattr(spec, "__arrow_c_array__")
    return named and arrow and not isinstance(spec, type) and not isinstance(spec, FeatureSource)


def frame_table(frame: Any, name: str) -> Any:
    """A frame as a `pyarrow.Table`, without a copy where its own library holds Arrow's columns. Raises
    SourceError."""
    arrow = import_extra("pyarrow", "arrow", name)
    try:
        return arrow.table(frame)
    except (arrow.ArrowException, TypeError, ValueError) as error:
        raise SourceError(f"{name}: its columns are none of Arrow's ({error}); convert them first") from error


class FrameRows(ColumnRows):
    """Rows of a frame; one of pandas is converted by slices, so that it is never held twice."""

    def __init__(
        self, frame: Any, columns: str | int | Sequence[str | int] | None, id: str | int | None, name: str
    ) -> None:
        self._sliced = frame if hasattr(frame, "iloc") else None
        self._table = frame_table(frame if self._sliced is None else frame.iloc[:0], name)
        indexed = self._sliced is not None and hasattr(frame, "index")  # of pandas
        known = set(map(str, frame.columns if indexed else self._table.column_names))
        index = [one for one in self._table.column_names if one not in known]
        if indexed and not index and not is_count(frame.index):  # Arrow leaves it out
            index = [str(frame.index.name or "the index")]
        if index and columns is None and id is None:
            raise id_error(name, index[0], "it is the frame's index")
        rows = len(frame) if self._sliced is not None else self._table.num_rows
        super().__init__(name, self._table.schema, rows, columns, id)

    def _held_bytes(self, row_bytes: int, first: Any) -> int:
        return 4 * self._batch_rows * row_bytes

    def _seek(self, start: int) -> tuple[int, int]:
        return start, start

    def fingerprint(self) -> dict[str, str | int]:
        """Rows, columns, and a CRC of some of the rows."""
        assert self.chosen is not None
        more = {} if self.chosen.id is None else {"id": self.chosen.names[self.chosen.id]}
        return {
            "kind": "frame", "rows": self.rows or 0, "key": ",".join(self._columns),
            "dtype": dtype_text(self.dtype), "sample_crc32": self._sample_crc32([*more.values()]), **more,
        }  # fmt: skip

    def _sample_crc32(self, beside: list[str]) -> int:
        """Of rows spread evenly, and of the columns ``beside`` them."""
        rows = self.rows or 0
        places = np.linspace(0, max(0, rows - 1), num=min(64, rows)).astype(np.int64)
        found: list[Any] = []
        for place in places.tolist():
            batch = next(self._batches(place, 1, [*beside, *self._columns]))
            found += [batch.column(k).to_pylist() for k in range(len(beside))]
            found.append(sample_crc32(self._as_rows(batch.select(self._columns), self.row_shape, place)))
        return zlib.crc32(repr(found).encode())

    def _batches(self, group: int, block_rows: int, columns: list[str]) -> Iterator[Any]:
        for low in range(group, self.rows or 0, block_rows):
            if self._sliced is None:
                part = self._table.slice(low, block_rows)
            else:
                part = frame_table(self._sliced.iloc[low : low + block_rows], self.name)
            yield from part.select(columns).combine_chunks().to_batches(max_chunksize=block_rows)
