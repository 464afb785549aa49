"""Rows that are records: structured arrays, in memory or in files, whose fields have names.

Unasked, or with ``columns="*"``, a row is its record, stored as it stands. A field that looks like the ids of
the rows is refused then, by the rule of `featstore.packing.sources.columns`: its records would stay in the
order in which they come, as if row i were node i. With ``columns`` or ``id``, fields are columns as those of
any other table: fields of one dtype side by side, or one field of arrays, and rows placed by their ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.keys import KeyBlock, as_keys
from featstore.errors import SourceError
from featstore.packing.sources.base import READ_PIECE_BYTES, FeatureSource
from featstore.packing.sources.columns import (
    ALL_COLUMNS,
    SAMPLE_ROWS_MAX,
    Column,
    choose_columns,
    id_error,
    looks_like_id,
    refuse_id_values,
    whole_ids,
)

__all__ = ["FieldRows", "with_fields"]

_SAMPLE_ROWS_MIN = 64


def with_fields(
    source: FeatureSource, columns: str | int | Sequence[str | int] | None, id: str | int | None
) -> FeatureSource:
    """The source itself, or of a source of records the fields asked for. Raises SourceError for ``columns``
    and ``id`` of what has no fields, and for a field that looks like ids where neither says what it is."""
    fields = source.dtype.names
    for what, value in (("columns", columns), ("id", id)):
        if fields is None and value is not None:
            raise SourceError(
                f"{source.name}: {what}= is for tables with named columns (Parquet, Arrow, .csv) and for "
                "structured arrays; leave it out"
            )
    if fields is None or (columns == ALL_COLUMNS and id is None):
        return source
    if columns is None and id is None:
        if source.row_values == 1:
            _refuse_ids(source, fields)
        return source
    return FieldRows(source, fields, columns, id)


def _refuse_ids(source: FeatureSource, fields: tuple[str, ...]) -> None:
    """Raise SourceError where a field, or one inside a field, looks like the ids of the rows."""
    suspect = next((name for name in _scalars(source.dtype) if looks_like_id(name)), None)
    if suspect is not None:
        raise id_error(source.name, suspect, "by its name")
    numbers = [name for name in fields if source.dtype[name].kind in "iuf"]
    if len(fields) > 1 and numbers:
        rows = min(SAMPLE_ROWS_MAX, max(_SAMPLE_ROWS_MIN, READ_PIECE_BYTES // source.row_bytes))
        sample = source.sample(rows).reshape(-1)
        # A field of another kind is no number, so it is none of those that repeat or have fractions.
        others = [np.full(len(sample), 0.5)] * (len(numbers) == 1)
        with np.errstate(invalid="ignore"):  # a signalling NaN is told when it is widened
            values = np.column_stack([sample[name] for name in numbers] + others)
        refuse_id_values(values, numbers, source.name)


def _scalars(dtype: np.dtype[Any], within: str = "") -> Iterator[str]:
    """Names of the fields that have one value, those of records inside records as ``outer.inner``."""
    for name in dtype.names or ():
        if dtype[name].names is not None:
            yield from _scalars(dtype[name], f"{within}{name}.")
        elif int(np.prod(dtype[name].shape)) == 1:
            yield within + name


def _column(name: str, dtype: np.dtype[Any]) -> Column:
    numbers = dtype.base.kind in "biufc"
    return Column(name, "other" if not numbers else "list" if dtype.shape else "number", str(dtype))


class FieldRows(FeatureSource):
    """Fields of a source of records as columns. Records are taken apart a piece at a time."""

    def __init__(
        self,
        source: FeatureSource,
        fields: tuple[str, ...],
        columns: str | int | Sequence[str | int] | None,
        id: str | int | None,
    ) -> None:
        if source.row_shape != ():
            raise SourceError(
                f"{source.name}: columns= and id= are for rows of one record each, these have records of "
                f"shape {source.row_shape}; give array.reshape(-1), or the field itself, array[name]"
            )
        described = [_column(name, source.dtype[name]) for name in fields]
        self.chosen = choose_columns(described, columns, id, source.name)
        if self.chosen.id is not None and not source.replayable:
            raise SourceError(
                f"{source.name}: id= is read in a pass of its own, and a one-shot iterator gives one pass; "
                "give a list, or an object that can iterate again"
            )
        self._taken = [fields[k] for k in self.chosen.taken]
        self._source = source
        kind = source.dtype[self._taken[0]]
        self._piece_rows = max(1, READ_PIECE_BYTES // source.row_bytes)
        super().__init__(
            source.name, source.rows, (len(self._taken),) if len(self._taken) > 1 else kind.shape, kind.base,
            held_bytes=source.held_bytes + self._piece_rows * source.row_bytes, replayable=source.replayable,
        )  # fmt: skip

    def ids(self) -> Iterator[NDArray[Any]]:
        """As `FeatureSource.ids`."""
        assert self.chosen is not None
        if self.chosen.id is None:
            yield from super().ids()
            return
        name, first = self.chosen.names[self.chosen.id], 0
        for block in self._source.blocks(0, self._piece_rows):
            yield whole_ids(block[name], first, self.name, name)
            first += len(block)

    def keys(self) -> Iterator[KeyBlock]:
        """As `FeatureSource.keys`."""
        assert self.chosen is not None
        assert self.chosen.id is not None
        name, first = self.chosen.names[self.chosen.id], 0
        for block in self._source.blocks(0, self._piece_rows):
            yield as_keys(block[name], f"{self.name}, {name!r}", first)
            first += len(block)

    def fingerprint(self) -> dict[str, str | int]:
        """That of the records, and which fields are taken."""
        assert self.chosen is not None
        placed_by = {} if self.chosen.id is None else {"id": self.chosen.names[self.chosen.id]}
        return {**self._source.fingerprint(), "columns": ",".join(self._taken), **placed_by}

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        for block in self._source.blocks(start, min(block_rows, self._piece_rows)):
            columns = [block[name] for name in self._taken]
            yield np.ascontiguousarray(columns[0]) if len(columns) == 1 else np.stack(columns, axis=1)
