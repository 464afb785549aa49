"""Row sources in plain files: ``.npy`` in either order, and headless binary.

A C-ordered file is one sequential read. In a Fortran-ordered one the values of a row lie a whole column
apart: for each block of rows the slice of each column is read on its own, which costs as many reads as a row
has values, of ``block_rows * itemsize`` bytes each. With blocks of many thousand rows these reads are large
and the pass stays close to sequential speed; with small blocks it does not, so give such a source big blocks.
Columns are turned into rows a tile at a time, so that no second block is held.

The ``.npy`` header is parsed here, with a limit on its size and no pickle: NumPy keeps its own parser for
format 3.0 private, and the header may come from a stranger.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.packing.sources.base import (
    READ_PIECE_BYTES,
    FeatureSource,
    FileReader,
    dtype_text,
    file_fingerprint,
    named_dtype,
    native_dtype,
    open_binary,
    read_native,
    stat_of,
)

__all__ = [
    "NPY_MAGIC",
    "FileRows",
    "NpyHeader",
    "npy_rows",
    "parse_npy_header",
    "raw_rows",
    "read_npy_header",
]

NPY_MAGIC = b"\x93NUMPY"
HEADER_BYTES_MAX = 1 << 20


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class NpyHeader:
    """What a ``.npy`` header says, and at which byte the values begin."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    offset: int

    @property
    def values(self) -> int:
        """Number of values (a Python integer, so no header can make it overflow)."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def data_bytes(self) -> int:
        """Bytes of all values together."""
        return self.values * self.dtype.itemsize


def parse_npy_header(stream: _Readable, name: str) -> NpyHeader:
    """The header of a ``.npy`` stream, which stands at the first value afterwards.

    Raises SourceError for a missing magic, an unknown version, a malformed header or an object dtype.
    """
    lead = _read_exactly(stream, 8, name)
    if lead[:6] != NPY_MAGIC:
        raise SourceError(f"{name}: no .npy magic at its start, so it is headless; give --dtype and --shape")
    version = (lead[6], lead[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise SourceError(
            f"{name}: .npy version {version[0]}.{version[1]} is unknown; save it with numpy.save again"
        )
    width = 2 if version == (1, 0) else 4
    (text_bytes,) = struct.unpack("<H" if width == 2 else "<I", _read_exactly(stream, width, name))
    if text_bytes > HEADER_BYTES_MAX:
        raise SourceError(
            f"{name}: a .npy header of {text_bytes:,} bytes is over the limit of {HEADER_BYTES_MAX:,}"
        )
    text = _read_exactly(stream, text_bytes, name)
    try:
        fields = ast.literal_eval(text.decode("utf-8" if version == (3, 0) else "latin1").strip())
        if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
            why = f"keys {sorted(map(str, fields))}" if isinstance(fields, dict) else "not a dictionary"
            raise _malformed(name, why)
        shape = fields["shape"]
        if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise _malformed(name, f"shape {shape!r}")
        dtype = np.lib.format.descr_to_dtype(fields["descr"])
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, KeyError, IndexError) as error:
        raise _malformed(name, error) from error
    native_dtype(dtype, name)
    return NpyHeader(shape, dtype, bool(fields["fortran_order"]), 8 + width + text_bytes)


def _malformed(name: str, why: Exception | str) -> SourceError:
    return SourceError(f"{name}: malformed .npy header ({why}); save it with numpy.save again")


def read_npy_header(path: Path) -> NpyHeader:
    """The header of a ``.npy`` file; the file's size is held against it. Raises SourceError."""
    size_bytes = stat_of(path).st_size
    with open_binary(path) as stream:
        header = parse_npy_header(stream, str(path))
    if size_bytes < header.offset + header.data_bytes:
        raise SourceError(
            f"{path} is truncated: shape {header.shape} of {header.dtype} needs "
            f"{header.offset + header.data_bytes:,} bytes with the header, the file has "
            f"{size_bytes:,}; copy it again"
        )
    return header


def _read_exactly(stream: _Readable, size: int, name: str) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise SourceError(f"{name}: the file ends inside its .npy header; it is truncated or no .npy file")
    return data


class FileRows(FeatureSource):
    """Rows at a fixed place in a file: the values of a ``.npy`` file, or headless binary."""

    def __init__(
        self,
        path: Path,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        offset: int = 0,
        fortran_order: bool = False,
        kind: str = "npy",
        name: str | None = None,
    ) -> None:
        if not shape:
            raise SourceError(f"{name or path}: a single value (0-d) is no table; give an array of rows")
        fortran_order = fortran_order and len(shape) > 1
        held = 2 * READ_PIECE_BYTES if fortran_order or dtype.names is not None else 0
        super().__init__(name or str(path), shape[0], shape[1:], dtype, held_bytes=held)
        self.path = path
        self._file_dtype = dtype
        self._offset = offset
        self._fortran_order = fortran_order
        self._kind = kind

    def fingerprint(self) -> dict[str, str | int]:
        """The file's path, size and time of change, and how it is read (offset, shape, dtype)."""
        shape = ",".join(map(str, (self.rows, *self.row_shape)))
        return file_fingerprint(
            self._kind, self.path, offset=self._offset, shape=shape, dtype=dtype_text(self._file_dtype)
        )

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        assert self.rows is not None
        if start == self.rows:
            return
        buffer = self._empty(self._block_rows_used(start, block_rows))
        with FileReader(self.path) as reader:
            for first in range(start, self.rows, block_rows):
                out = buffer[: min(block_rows, self.rows - first)]
                if self._fortran_order:
                    self._read_columns(reader, first, out)
                else:
                    self._read_rows(reader, first, out)
                yield out

    def _read_rows(self, reader: FileReader, first: int, out: NDArray[Any]) -> None:
        def read(buffer: NDArray[Any], row: int) -> None:
            reader.read_into(buffer, self._offset + (first + row) * self.row_bytes)

        read_native(out, self._file_dtype, read)

    def _read_columns(self, reader: FileReader, first: int, out: NDArray[Any]) -> None:
        """Rows ``first ...`` of a Fortran-ordered file: slices of columns, read and turned over by tiles."""
        assert self.rows is not None
        count = out.shape[0]
        # Fortran order of [n, a, b] is C order of [b, a, n]: the columns come with the first axis of a row
        # fastest.
        columns = np.moveaxis(out, 0, -1).transpose(*range(out.ndim - 2, -1, -1), out.ndim - 1)
        tile_columns = max(1, min(self.row_values, READ_PIECE_BYTES // (count * self.dtype.itemsize)))
        tile = np.zeros((tile_columns, count), dtype=self._file_dtype)
        extents = columns.shape[:-1]
        for low in range(0, self.row_values, tile_columns):
            high = min(low + tile_columns, self.row_values)
            for column in range(low, high):
                at = self._offset + (column * self.rows + first) * self.dtype.itemsize
                reader.read_into(tile[column - low], at)
            # The index arrays scatter into the view, so no reshape of it (which would copy) is needed.
            columns[np.unravel_index(np.arange(low, high), extents)] = tile[: high - low]


def npy_rows(
    path: Path, *, dtype: Any = None, shape: tuple[int, ...] | None = None, name: str | None = None
) -> FileRows:
    """Rows of a ``.npy`` file ``[rows, ...]`` of any non-object dtype, byte order and memory order.

    ``dtype`` may name what NumPy could not: a file of 2-byte voids (``<V2``, what `numpy.save` makes of
    bfloat16) with ``dtype="bfloat16"``. Any other ``dtype`` or ``shape`` that contradicts the header is a
    SourceError.
    """
    label = name or str(path)
    header = read_npy_header(path)
    stored = agreed_dtype(header.dtype, dtype, label)
    agreed_shape(header.shape, shape, label)
    return FileRows(
        path, header.shape, stored, offset=header.offset, fortran_order=header.fortran_order, name=name
    )


def raw_rows(
    path: Path, dtype: Any, shape: tuple[int, ...], *, offset: int = 0, name: str | None = None
) -> FileRows:
    """Rows of a headless file of exactly ``offset + prod(shape) * itemsize`` bytes; ``shape[0]`` may be -1.

    Raises SourceError when size, shape and dtype do not fit together.
    """
    label = name or str(path)
    stored = named_dtype(dtype, label)
    native_dtype(stored, label)
    if stored.subdtype is not None:
        stored, inner = stored.subdtype
        shape = (*shape, *inner)
    size_bytes = stat_of(path).st_size
    if not shape or any(n < 0 for n in shape[1:]) or shape[0] < -1 or 0 in shape[1:]:
        raise SourceError(
            f"{label}: shape {shape} is no table; only its first number may be -1, the others are at least 1"
        )
    row_bytes = NpyHeader(shape[1:], stored, False, 0).data_bytes
    if shape[0] == -1:
        if offset < 0 or size_bytes < offset or (size_bytes - offset) % row_bytes:
            raise SourceError(
                f"{label}: {size_bytes:,} bytes less an offset of {offset:,} are no whole number of rows of "
                f"{row_bytes:,} bytes ({shape[1:]} of {stored}); check dtype, shape and offset"
            )
        shape = ((size_bytes - offset) // row_bytes, *shape[1:])
    wanted = offset + shape[0] * row_bytes
    if offset < 0 or size_bytes != wanted:
        raise SourceError(
            f"{label}: {size_bytes:,} bytes, but shape {shape} of {stored} at offset {offset:,} is "
            f"{wanted:,} bytes; check dtype, shape and offset"
        )
    return FileRows(path, shape, stored, offset=offset, kind="raw", name=name)


def agreed_dtype(stored: np.dtype[Any], wanted: Any, name: str) -> np.dtype[Any]:
    """The dtype to read with: the stored one, or ``wanted`` where the stored one is untyped bytes of the same
    size."""
    if wanted is None:
        return stored
    given = named_dtype(wanted, name)
    if native_dtype(given, name) == native_dtype(stored, name):
        return stored
    if stored.kind == "V" and stored.names is None and stored.itemsize == given.itemsize:
        return given
    raise SourceError(
        f"{name}: holds {stored}, not {given}; sources are read as they are, so leave dtype out (and "
        "let the pack convert)"
    )


def agreed_shape(stored: tuple[int, ...], wanted: tuple[int, ...] | None, name: str) -> None:
    """Raise SourceError when a shape was given (-1 for any) and it is not the stored one."""
    if wanted is None:
        return
    if len(wanted) != len(stored) or any(w not in (-1, s) for w, s in zip(wanted, stored)):
        raise SourceError(
            f"{name}: has shape {stored}, not {tuple(wanted)}; leave shape out, the file names its own"
        )
