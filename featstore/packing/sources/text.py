"""Row sources in text: comma-separated numbers, above all the ``.csv.gz`` files of OGB's raw folders.

The first line may name the columns; which are taken says `featstore.packing.sources.columns`. Text is parsed
as float64, or int64 for integer dtypes, and only then brought to the dtype asked for (float32 unless told),
so that pyarrow's parser and NumPy's, which serves where pyarrow is missing, give the same bits. What that
dtype has no room for is an error, and so are large integers that float32, which nobody asked for, would
round.
"""

from __future__ import annotations

import csv
import gzip
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.keys import KeyBlock
from featstore.base.system import is_regular
from featstore.errors import SourceError
from featstore.packing.sources.base import (
    FeatureSource,
    dtype_text,
    file_fingerprint,
    named_dtype,
)
from featstore.packing.sources.cells import COMMA, column_blocks
from featstore.packing.sources.columns import (
    ALL_COLUMNS,
    SAMPLE_ROWS_MAX,
    Column,
    choose_columns,
    refuse_id_values,
    whole_ids,
)
from featstore.packing.sources.lines import CSV_BLOCK_BYTES, CSV_LINE_BYTES_MAX, open_text

__all__ = ["CsvRows", "ogb_folder", "ogb_rows"]

MISSING_TEXTS = {  # what stands for no number
    "", "-", ".", "?", "na", "n/a", "#n/a", "#na", "<na>", "n.a.", "\\n", "null", "none", "nil", "missing",
}  # fmt: skip
_FLOAT64_WHOLE_MAX = 2.0**53  # from here on float64 itself does not tell neighbouring integers apart
_SAY_DTYPE = "raw_dtype= (--raw-dtype)"


def ogb_folder(path: Path, member: str) -> Path | None:
    """The folder with OGB's raw files: ``path`` itself or its ``raw``; None when ``member`` is in neither."""
    for folder in (path, path / "raw"):
        if is_regular(folder / member):
            return folder
    return None


def ogb_rows(folder: Path, *, dtype: Any = None, name: str | None = None) -> CsvRows:
    """Node features of an OGB raw folder; ``num-node-list.csv.gz`` gives the number of rows, if it is
    there."""
    counts = folder / "num-node-list.csv.gz"
    rows = None
    if is_regular(counts):
        source = CsvRows(counts, dtype=np.int64)
        rows = sum(int(block.sum()) for block in source.blocks())
    return CsvRows(
        folder / "node-feat.csv.gz", dtype=dtype, rows=rows, name=name, columns=ALL_COLUMNS, header=False
    )


class CsvRows(FeatureSource):
    """Rows of comma-separated numbers, gzipped or not. A first line not all of numbers names the columns.

    ``header``: False where the file is known to have no names; a line of numbers is then never taken for one.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: Any = None,
        rows: int | None = None,
        name: str | None = None,
        columns: str | int | Sequence[str | int] | None = None,
        id: str | int | None = None,
        header: bool = True,
    ) -> None:
        label = name or str(path)
        wanted = named_dtype("float32" if dtype is None else dtype, label)
        if wanted.kind not in "biuf" and wanted.name != "bfloat16":
            raise SourceError(
                f"{label}: text is read as numbers, not as {wanted}; give a float or integer dtype"
            )
        self.path = path
        self._parsed = np.dtype(np.int64 if wanted.kind in "iub" else np.float64)
        self._dtype_told = dtype is not None
        try:
            with open_text(path) as file:
                lines = [file.readline(CSV_LINE_BYTES_MAX) for _ in range(2)]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _bad_text(label, error) from error
        described, self._skipped = _described(lines, header, label, columns, id)
        self.chosen = choose_columns(described, columns, id, label)
        self._width = len(described)
        # A parser's block must hold whole lines. The shortest number is two bytes of text and becomes eight.
        self._block_bytes = max(CSV_BLOCK_BYTES, 4 * len(lines[self._skipped]))
        super().__init__(label, rows, (len(self.chosen.taken),), wanted, held_bytes=10 * self._block_bytes)
        if columns is None:
            names = [described[k].name for k in self.chosen.taken]
            refuse_id_values(self._sample(), names, label)

    def ids(self) -> Iterator[NDArray[Any]]:
        """As `FeatureSource.ids`."""
        assert self.chosen is not None
        if self.chosen.id is None:
            yield from super().ids()
            return
        first = 0
        for values in self._values((self.chosen.id,), np.dtype(np.float64)):
            yield whole_ids(values[:, 0], first, self.name, self.chosen.names[self.chosen.id])
            first += values.shape[0]

    def keys(self) -> Iterator[KeyBlock]:
        """As `FeatureSource.keys`: cells as they are written."""
        assert self.chosen is not None
        assert self.chosen.id is not None
        blocks = column_blocks(self.path, COMMA, (self.chosen.id,), self._skipped)
        return (block for (block,) in blocks)

    def fingerprint(self) -> dict[str, str | int]:
        """The file's path, size and time of change, the columns, and the dtype the text is read as."""
        assert self.chosen is not None
        more: dict[str, str | int] = {"columns": self.row_shape[0], "dtype": dtype_text(self.dtype)}
        if len(self.chosen.taken) < self._width:
            more["taken"] = ",".join(map(str, self.chosen.taken))
        if self.chosen.id is not None:
            more["id"] = self.chosen.id
        return file_fingerprint("csv", self.path, **more)

    def _sample(self) -> NDArray[Any]:
        """The first thousands of rows of the columns taken; none where text is no number: the pass says
        where."""
        assert self.chosen is not None
        try:
            with open_text(self.path) as file:
                lines = file.readlines(min(CSV_BLOCK_BYTES, self._block_bytes))[
                    self._skipped : SAMPLE_ROWS_MAX
                ]
            kept = [line.decode("utf-8-sig", "replace") for line in lines[:-1] or lines if line.strip()]
            return np.loadtxt(
                kept, delimiter=",", ndmin=2, comments=None, quotechar='"', usecols=self.chosen.taken
            )
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile):
            return np.empty((0, len(self.chosen.taken)))

    def _values(self, columns: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
        """The values of some columns ``[n, columns]``, of a dtype that text is parsed as, run by run."""
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            return self._parsed_by_numpy(columns, dtype)
        return self._parsed_by_arrow(columns, dtype)

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        assert self.chosen is not None
        done = 0
        for values in self._values(self.chosen.taken, self._parsed):
            if self.rows is not None and done + values.shape[0] > self.rows:
                raise SourceError(
                    f"{self.name}: has more than the {self.rows:,} rows that were counted before"
                )
            for low in range(max(0, start - done), values.shape[0], block_rows):
                yield self._as_dtype(values[low : low + block_rows], done + low)
            done += values.shape[0]
        if done < (start if self.rows is None else self.rows):
            raise SourceError(
                f"{self.name}: has {done:,} rows, {start if self.rows is None else self.rows:,} were "
                "expected; it may be cut off"
            )

    def _as_dtype(self, values: NDArray[Any], first: int) -> NDArray[Any]:
        """Parsed ``values`` [n, columns] of rows ``first`` and on in the table's dtype. Raises SourceError
        for what it has no room for."""
        with np.errstate(over="ignore"):
            kept = np.ascontiguousarray(values.astype(self.dtype))
        advice = f"say a wider dtype, or leave the column out with columns= ({_SAY_DTYPE})"
        if self._parsed.kind == "i":
            lost = (kept.astype(np.int64) != values) | ((values < 0) & (self.dtype.kind in "ub"))
        else:
            lost = np.isinf(kept.astype(np.float64)) & np.isfinite(values)
            if not self._dtype_told:
                rounded = (kept != values) | (np.abs(values) >= _FLOAT64_WHOLE_MAX)
                lost |= rounded & (values == np.floor(values)) & np.isfinite(values)
                advice = (
                    f"say {_SAY_DTYPE} of 'int64' or 'float64', or of 'float32' for the nearest number "
                    "that it has"
                )
        if lost.any():
            assert self.chosen is not None
            row, at = (int(k[0]) for k in np.nonzero(lost))
            column = self.chosen.names[self.chosen.taken[at]]
            raise SourceError(
                f"{self.name}: {values[row, at]:.17g} in row {first + row:,}, column {column!r}, would "
                f"not be itself as {self.dtype.name}: {advice}"
            )
        return kept

    def _parsed_by_arrow(self, columns: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
        import pyarrow as arrow
        from pyarrow import csv as arrow_csv

        names = [str(k) for k in range(self._width)]
        wanted = [names[k] for k in columns]
        kind = arrow.int64() if dtype.kind == "i" else arrow.float64()
        # Only an empty cell would be a null, and for numbers that is an error below; "nan" and "NA" are not
        # nulls here.
        convert = arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(wanted, kind),
            null_values=[""],
            include_columns=wanted,
            quoted_strings_can_be_null=self._width > 1,  # else what is quoted and empty is a line, too
        )
        read = arrow_csv.ReadOptions(
            column_names=names, block_size=self._block_bytes, use_threads=False, skip_rows=self._skipped
        )
        # of one column an empty line is a row without a value
        parse = arrow_csv.ParseOptions(ignore_empty_lines=self._width > 1)
        done = ending = 0
        try:
            with open_text(self.path) as file:
                source = arrow.PythonFile(file, mode="r")
                for batch in arrow_csv.open_csv(
                    source, read_options=read, parse_options=parse, convert_options=convert
                ):
                    rows = batch.num_rows
                    if self._width == 1 and rows:  # those that end the file are none
                        there = np.flatnonzero(~batch.column(0).is_null().to_numpy(zero_copy_only=False))
                        rows = int(there[-1]) + 1 if len(there) else 0
                        if ending and rows:
                            raise _empty_cell(self.name, done, done + ending - 1)
                        ending += batch.num_rows - rows
                        batch = batch.slice(0, rows)
                    if any(column.null_count for column in batch.columns):
                        raise _empty_cell(self.name, done, done + rows - 1)
                    yield np.stack([column.to_numpy() for column in batch.columns], axis=1)
                    done += rows
        except (arrow.ArrowException, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _bad_text(f"{self.name} after row {done:,}", error) from error

    def _parsed_by_numpy(self, columns: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
        done = ending = 0
        try:
            with open_text(self.path) as file:
                for _ in range(self._skipped):
                    file.readline()
                while lines := file.readlines(self._block_bytes):
                    kept = [line.decode("utf-8-sig", "replace") for line in lines if line.strip()]
                    if self._width == 1:  # an empty line is a row without a value, but at the end of the file
                        last = max((k for k, line in enumerate(lines) if line.strip()), default=-1)
                        if last >= 0 and (ending or len(kept) <= last):
                            raise _empty_cell(self.name, done, done + ending + last)
                        ending += len(lines) - 1 - last
                    if not kept:
                        continue
                    wrong = next(
                        (line for line in kept if '"' not in line and line.count(",") + 1 != self._width),
                        None,
                    )
                    if wrong is not None:
                        why = f"{wrong.count(',') + 1} columns, {self._width} expected"
                        raise _bad_text(f"{self.name} after row {done:,}", why)
                    with warnings.catch_warnings():
                        warnings.simplefilter("error", DeprecationWarning)  # 1.5 would be the integer 1
                        values = np.loadtxt(
                            kept, delimiter=",", dtype=dtype, ndmin=2, comments=None, quotechar='"',
                            usecols=columns,
                        )  # fmt: skip
                    yield values
                    done += len(kept)
        except SourceError:
            raise
        except (ValueError, DeprecationWarning, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _bad_text(f"{self.name} after row {done:,}", error) from error


def _empty_cell(name: str, first: int, last: int) -> SourceError:
    return SourceError(f"{name}: an empty cell in rows {first:,} to {last:,}")


def _cells(line: bytes, name: str) -> list[str]:
    """The cells of a line of comma-separated values, without quotes."""
    text = line.decode("utf-8-sig", "replace").rstrip("\r\n")
    if '"' not in text:
        return [cell.strip() for cell in text.split(",")] if text else []
    try:
        return [cell.strip() for cell in next(csv.reader([text]), [])]
    except csv.Error as error:
        raise _bad_text(name, error) from error


def _described(
    lines: list[bytes], header: bool, name: str, columns: Any, id: Any
) -> tuple[list[Column], int]:
    """The columns by the first two lines of a file, and how many lines to pass over. ``columns``, ``id``:
    what the user says of them, which may tell that the first line has names."""
    first, second = _cells(lines[0], name), _cells(lines[1], name)
    numbers, after = [_is_number(cell) for cell in first], [_is_number(cell) for cell in second]
    if header and first and first == [str(k) for k in range(len(first))]:
        raise SourceError(
            f"{name}: its first line is {','.join(first[:3])}{',...' * (len(first) > 3)}, which may be "
            "numbers of columns, as pandas writes them, or a row: take it out if it is no row, or write "
            "a line of names above it"
        )
    if all(numbers) and first:
        return [Column(str(k), "number", "number") for k in range(len(first))], 0
    if first and any(numbers) and not all(after) and numbers == after:
        raise SourceError(
            f"{name}: column {numbers.index(False)} holds text ({first[numbers.index(False)]!r}), so the "
            "first line may be a row or names of columns; write a line of names before it, then say "
            "columns= and id="
        )
    if first and (not header or _may_be_a_row(first, second, numbers, columns, id)):
        cell = first[numbers.index(False)]
        raise SourceError(
            f"{name}: its first line has {cell!r}, and may be a row that lacks a number, or names of "
            "columns: write a number there, or other names; or name one of them that is no number, columns= "
            "or id="
        )
    if not second or not any(after):
        raise SourceError(
            f"{name}: no line of comma-separated numbers at its start; check that this is the feature file"
        )
    if len(first) != len(second):
        raise SourceError(
            f"{name}: the first line names {len(first)} columns, the second has {len(second)} cells; mend "
            "the line of names"
        )
    return [
        Column(n, "number", "number") if ok else Column(n, "other", "text") for n, ok in zip(first, after)
    ], 1


def _may_be_a_row(first: list[str], second: list[str], numbers: list[bool], columns: Any, id: Any) -> bool:
    """Whether a first line that is not all of numbers may be a row that lacks some. Names that the user says
    tell that it has names; positions tell nothing."""
    told = [id, *([columns] if isinstance(columns, str | int) else columns or [])]
    numbered = {str(k) for k in range(len(first))}  # as columns without names are called
    if set(first) & {one for one in told if isinstance(one, str)} - numbered:
        return False
    texts = {cell for cell, number in zip(first, numbers) if not number}
    gaps = [cell for cell in texts if cell.lower() in MISSING_TEXTS]
    if gaps == [""] and first == ["", *map(str, range(len(first) - 1))] and second[:1] == ["0"]:
        return False  # as pandas writes its count of rows beside columns that have no names
    numeric = any(re.search(r"[.eE]", cell) for cell, number in zip(first, numbers) if number)
    return (any(numbers) and (bool(gaps) or numeric)) or len(gaps) == len(texts) == len(set(first))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _bad_text(where: str, why: Exception | str) -> SourceError:
    return SourceError(
        f"{where}: not comma-separated numbers ({why}); the file is damaged, cut off or of another kind"
    )
