"""Where the rows of a compiled trace's mini-batches lie: its own store and, for what was left there, the base
store; and the records that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.engine.request import Request
from featstore.errors import CorruptionError
from featstore.layout.records import Limits, TableRecord, check_record, decode_record

if TYPE_CHECKING:
    from featstore.loaders.compiled.trace import CompiledTrace
    from featstore.reader.reader import Reader
    from featstore.tiers import RowSource

_ADVICE = "pack the trace anew with --overwrite"


@dataclass(frozen=True)
class TablePart:
    """A table's part of a mini-batch: rows that are to be read into ``out``, [rows, *row shape], each at its
    place; or, with ``moved`` (int32, by place; -1: not at all), at ``moved[place]``."""

    number: int
    record: TableRecord
    out: NDArray[Any]
    moved: NDArray[np.int32] | None = None


class CompiledSources:
    """Reads records, and the rows that they name, by the numbers that the compiled trace gives them.

    ``pack``: the reader of the compiled trace. ``base``: of the base store, by row; None where no row was
    left there.
    """

    def __init__(self, compiled: CompiledTrace, pack: Reader, base: RowSource | None) -> None:
        self.compiled, self.pack, self._base = compiled, pack, base
        self.tables = list(compiled.entry.tables.items())
        self.limits: list[Limits] = [compiled.limits(name) for name, _ in self.tables]
        self.row_bytes = [compiled.row_bytes(name) for name, _ in self.tables]
        self._offsets = compiled.offsets()

    def shaped(self, number: int, data: NDArray[np.uint8]) -> NDArray[Any]:
        """Bytes as rows of a table."""
        table = self.compiled.pack.tables[self.tables[number][1].packed]
        return data.view(table.dtype).reshape(len(data) // table.row_bytes, *table.row_shape)

    # Records.

    def submit_record(self, index: int) -> Request:
        """Begin to read a mini-batch's record."""
        low, high = int(self._offsets[index]), int(self._offsets[index + 1])
        return self.pack.submit_runs({self.compiled.entry.records: [(low, high)]})

    def record(self, request: Request) -> tuple[list[TableRecord], NDArray[np.uint8]]:
        """Wait for a record: its part for each table, checked, and the encoded sample. Raises
        CorruptionError."""
        name = self.compiled.entry.records
        data = request.result()[name]
        path = self.compiled.pack.path / self.compiled.pack.tables[name].entry.path
        parts, sample = decode_record(data, len(self.tables), path)
        for part, limits, (_, table) in zip(parts, self.limits, self.tables, strict=True):
            check_record(part, limits, path)
            if part.count > table.batch_rows_max:
                raise CorruptionError(
                    path, None, f"at most {table.batch_rows_max} rows", f"{part.count}", _ADVICE
                )
        return parts, sample

    # Rows.

    def submit(self, parts: Iterable[TablePart]) -> list[Request]:
        """Begin to read what these parts of one mini-batch name on disk: a request of each store."""
        packed: dict[str, tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = {}
        base: dict[str, tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = {}
        for part in parts:
            name, table = self.tables[part.number]
            record, first = part.record, part.record.packed_first
            run = np.arange(first, first + len(record.packed_place))
            for wanted, source, rows, places in (
                (packed, table.packed, run, record.packed_place),
                (packed, table.shared, record.shared_row, record.shared_place),
                (base, name, record.base_row, record.base_place),
            ):
                at: NDArray[Any] = places
                if part.moved is not None:
                    at = part.moved[places]
                    rows, at = rows[at >= 0], at[at >= 0]
                if len(rows):
                    wanted[source] = rows, part.out, at
        requests = [self._submit(self.pack.submit, packed)] if packed else []
        if base:
            if self._base is None:
                raise CorruptionError(
                    self.compiled.pack.path, None, "no rows of the base store, as its manifest says",
                    "a record with some", _ADVICE,
                )  # fmt: skip
            requests.append(self._submit(self._base.submit, base))
        return requests

    @staticmethod
    def _submit(submit: Callable[..., Request], wanted: dict[str, tuple[Any, Any, Any]]) -> Request:
        rows, out, at = ({name: what[i] for name, what in wanted.items()} for i in range(3))
        return submit(rows, out=out, at=at)
