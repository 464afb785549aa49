"""Row sources in text: comma-separated numbers, above all the ``.csv.gz`` files of OGB's raw folders.

Text is parsed as float64, or int64 for integer dtypes, and only then brought to the dtype asked for (float32 unless
told), so that pyarrow's parser and NumPy's, which serves where pyarrow is missing, give the same bits.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.packing.sources_base import RowSource, dtype_text, file_fingerprint, named_dtype, open_binary

__all__ = ["CsvRows", "ogb_folder", "ogb_rows", "open_text"]

CSV_BLOCK_BYTES = 1 << 20
CSV_LINE_BYTES_MAX = 64 << 20


@contextmanager
def open_text(path: Path) -> Iterator[io.BufferedIOBase]:
    """A text file's bytes, decompressed when its name ends in ``.gz``. Errors of gzip come with the reads."""
    with open_binary(path) as file:
        if path.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile(fileobj=file, mode="rb") as text:
            yield text


def ogb_folder(path: Path, member: str) -> Path | None:
    """The folder with OGB's raw files: ``path`` itself or its ``raw``; None when ``member`` is in neither."""
    for folder in (path, path / "raw"):
        if (folder / member).is_file():
            return folder
    return None


def ogb_rows(folder: Path, *, dtype: Any = None, name: str | None = None) -> CsvRows:
    """Node features of an OGB raw folder; ``num-node-list.csv.gz`` gives the number of rows, if it is there."""
    counts = folder / "num-node-list.csv.gz"
    rows = None
    if counts.is_file():
        source = CsvRows(counts, dtype=np.int64)
        rows = sum(int(block.sum()) for block in source.blocks())
    return CsvRows(folder / "node-feat.csv.gz", dtype=dtype, rows=rows, name=name)


class CsvRows(RowSource):
    """Rows of comma-separated numbers, gzipped or not; one header line is passed over if it is there."""

    def __init__(self, path: Path, *, dtype: Any = None, rows: int | None = None, name: str | None = None) -> None:
        label = name or str(path)
        wanted = named_dtype("float32" if dtype is None else dtype, label)
        if wanted.kind not in "biuf" and wanted.name != "bfloat16":
            raise SourceError(f"{label}: text is read as numbers, not as {wanted}; give a float or integer dtype")
        self.path = path
        self._parsed = np.dtype(np.int64 if wanted.kind in "iub" else np.float64)
        lines = []
        try:
            with open_text(path) as file:
                lines = [file.readline(CSV_LINE_BYTES_MAX) for _ in range(2)]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _bad_text(label, error) from error
        self._skipped = int(not _is_numbers(lines[0]))
        line = lines[self._skipped]
        if not _is_numbers(line):
            raise SourceError(
                f"{label}: no line of comma-separated numbers at its start; check that this is the feature file"
            )
        columns = line.count(b",") + 1
        # A parser's block must hold whole lines. The shortest number is two bytes of text and becomes eight.
        self._block_bytes = max(CSV_BLOCK_BYTES, 4 * len(line))
        super().__init__(label, rows, (columns,), wanted, held_bytes=10 * self._block_bytes)

    def fingerprint(self) -> dict[str, str | int]:
        """The file's path, size and time of change, and the dtype the text is read as."""
        return file_fingerprint("csv", self.path, columns=self.row_shape[0], dtype=dtype_text(self.dtype))

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            parsed = self._parsed_by_numpy()
        else:
            parsed = self._parsed_by_arrow()
        done = 0
        for values in parsed:
            if self.rows is not None and done + values.shape[0] > self.rows:
                raise SourceError(f"{self.name}: has more than the {self.rows:,} rows that num-node-list.csv.gz gives")
            for low in range(max(0, start - done), values.shape[0], block_rows):
                yield np.ascontiguousarray(values[low : low + block_rows].astype(self.dtype))
            done += values.shape[0]
        if done < (start if self.rows is None else self.rows):
            raise SourceError(
                f"{self.name}: has {done:,} rows, {start if self.rows is None else self.rows:,} were expected; it may "
                "be cut off"
            )

    def _parsed_by_arrow(self) -> Iterator[NDArray[Any]]:
        import pyarrow as arrow
        from pyarrow import csv

        names = [str(i) for i in range(self.row_shape[0])]
        kind = arrow.int64() if self._parsed.kind == "i" else arrow.float64()
        # Only an empty cell would be a null, and for numbers that is an error below; "nan" and "NA" are not nulls here.
        convert = csv.ConvertOptions(column_types=dict.fromkeys(names, kind), null_values=[""])
        read = csv.ReadOptions(
            column_names=names, block_size=self._block_bytes, use_threads=False, skip_rows=self._skipped
        )
        done = 0
        try:
            with open_text(self.path) as file:
                stream = csv.open_csv(arrow.PythonFile(file, mode="r"), read_options=read, convert_options=convert)
                for batch in stream:
                    for column in batch.columns:
                        if column.null_count:
                            raise SourceError(
                                f"{self.name}: an empty cell in rows {done:,} to {done + batch.num_rows - 1:,}"
                            )
                    yield np.stack([column.to_numpy() for column in batch.columns], axis=1)
                    done += batch.num_rows
        except (arrow.ArrowException, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _bad_text(f"{self.name} after row {done:,}", error) from error

    def _parsed_by_numpy(self) -> Iterator[NDArray[Any]]:
        done = 0
        try:
            with open_text(self.path) as file:
                for _ in range(self._skipped):
                    file.readline()
                while lines := file.readlines(self._block_bytes):
                    kept = [line.decode("ascii", "replace") for line in lines if line.strip()]
                    if not kept:
                        continue
                    values = np.loadtxt(kept, delimiter=",", dtype=self._parsed, ndmin=2, comments=None)
                    if values.shape[1] != self.row_shape[0]:
                        raise ValueError(f"{values.shape[1]} columns, {self.row_shape[0]} expected")
                    yield values
                    done += values.shape[0]
        except SourceError:
            raise
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _bad_text(f"{self.name} after row {done:,}", error) from error


def _is_numbers(line: bytes) -> bool:
    try:
        return bool([float(cell) for cell in line.split(b",")])
    except ValueError:
        return False


def _bad_text(where: str, error: Exception) -> SourceError:
    return SourceError(
        f"{where}: not comma-separated numbers ({error}); the file is damaged, cut off or of another kind"
    )
