"""Where the rows of a compiled trace's mini-batches lie: its own store and, for what was left there, the base
store; and the records that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.engine.request import Request
from featstore.errors import CorruptionError
from featstore.layout.records import Limits, TableRecord, decode_record
from featstore.loaders.compiled.checks import check_record

if TYPE_CHECKING:
    from featstore.loaders.compiled.trace import CompiledTrace
    from featstore.reader.reader import Reader
    from featstore.tiers import RowSource

Record = tuple[list[TableRecord], NDArray[np.uint8]]  # by table, and the encoded sample

_ADVICE = "pack the trace anew with --overwrite"


@dataclass(frozen=True)
class TablePart:
    """A table's part of a mini-batch: rows that are to be read into ``out``, [rows, *row shape], each at its
    place from row ``first`` on; or, with ``moved`` (int32, by place; -1: not at all), at ``moved[place]``."""

    number: int
    record: TableRecord
    out: NDArray[Any]
    first: int = 0
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
        self._records = compiled.entry.records
        self._path = compiled.pack.path / compiled.pack.tables[self._records].entry.path

    def shaped(self, number: int, data: NDArray[np.uint8]) -> NDArray[Any]:
        """Bytes as rows of a table."""
        table = self.compiled.pack.tables[self.tables[number][1].packed]
        return data.view(table.dtype).reshape(len(data) // table.row_bytes, *table.row_shape)

    # Records.

    def submit_records(self, indices: Sequence[int]) -> Request:
        """Begin to read these mini-batches' records."""
        runs = np.stack([self._offsets[indices], self._offsets[np.asarray(indices) + 1]], axis=1)
        return self.pack.submit_runs({self._records: runs})

    def records(self, indices: Sequence[int], request: Request) -> list[Record]:
        """Wait for records: of each its part for each table, checked, and the encoded sample. Raises
        CorruptionError."""
        data, begin, found = request.result()[self._records], 0, []
        for index in indices:
            end = begin + int(self._offsets[index + 1] - self._offsets[index])
            found.append(self._record(data[begin:end]))
            begin = end
        return found

    def _record(self, data: NDArray[np.uint8]) -> Record:
        parts, sample = decode_record(data, len(self.tables), self._path)
        for part, limits, (_, table) in zip(parts, self.limits, self.tables, strict=True):
            check_record(part, limits, self._path)
            if part.count > table.batch_rows_max:
                raise CorruptionError(
                    self._path, None, f"at most {table.batch_rows_max} rows", f"{part.count}", _ADVICE
                )
        return parts, sample

    # Rows.

    def submit(self, parts: Iterable[TablePart]) -> list[Request]:
        """Begin to read what these parts of mini-batches name on disk: a request of each store. Those of one
        table have the same ``out``."""
        packed, base = _Wanted(), _Wanted()
        for part in parts:
            name, table = self.tables[part.number]
            record, first = part.record, part.record.packed_first
            run = np.arange(first, first + len(record.packed_place))
            packed.add(table.packed, part, run, record.packed_place)
            packed.add(table.shared, part, record.shared_row, record.shared_place)
            base.add(name, part, record.base_row, record.base_place)
        if base and self._base is None:
            raise CorruptionError(
                self.compiled.pack.path, None, "no rows of the base store, as its manifest says",
                "a record with some", _ADVICE,
            )  # fmt: skip
        requests: list[Request] = []
        with none_goes_on(requests):
            if packed:
                requests.append(packed.submit(self.pack.submit))
            if base and self._base is not None:
                requests.append(base.submit(self._base.submit))
        return requests


@contextmanager
def none_goes_on(requests: Sequence[Request]) -> Iterator[None]:
    """Where what is inside fails or is interrupted, none of these requests writes into its memory after."""
    try:
        yield
    except BaseException:
        for request in requests:
            request.abandon()
        raise


class _Wanted:
    """Rows of a store's tables, and where they go."""

    def __init__(self) -> None:
        self._rows: dict[str, list[NDArray[Any]]] = {}
        self._at: dict[str, list[NDArray[Any]]] = {}
        self._out: dict[str, NDArray[Any]] = {}

    def add(self, table: str, part: TablePart, rows: NDArray[Any], places: NDArray[np.int32]) -> None:
        at: NDArray[Any] = places
        if part.moved is not None:
            at = part.moved[places]
            rows, at = rows[at >= 0], at[at >= 0]
        elif part.first:
            at = places + np.int32(part.first)
        if len(rows):
            self._rows.setdefault(table, []).append(rows)
            self._at.setdefault(table, []).append(at)
            self._out[table] = part.out

    def __bool__(self) -> bool:
        return bool(self._out)

    def submit(self, submit: Callable[..., Request]) -> Request:
        rows = {table: np.concatenate(some) for table, some in self._rows.items()}
        return submit(
            rows, out=self._out, at={table: np.concatenate(some) for table, some in self._at.items()}
        )
