"""Row sources in ``.npz`` archives: an array by its key, or a sparse matrix made dense as it streams by.

Members are never loaded whole: each is a ``.npy`` stream inside a zip, and a pass reads it from front to back
through its own file handle (a sparse matrix has three of them open: index pointers, column indices, values).
The zip's CRC is checked on the way, which is also why a pass that starts late reads, and drops, what comes
before. Two layouts of sparse matrices are known: `scipy.sparse.save_npz`
(``indptr, indices, data, shape, format``), and the flat habit of graph data sets, in which a dense table
called ``name`` is replaced by ``name_data, name_indices, name_indptr, name_shape`` (CSR; also ``attr_...``
and ``feat_...``).

A Fortran-ordered member can only be turned over with random access: an uncompressed one is read in place, a
compressed one is held in memory as a whole, and says so in ``held_bytes``.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.files import read_fully
from featstore.base.system import refusal
from featstore.errors import DeviceError, SourceError
from featstore.packing.sources.base import (
    DROP_STEP_BYTES,
    FeatureSource,
    bytes_of,
    dtype_text,
    file_fingerprint,
    open_binary,
    read_native,
    to_native,
)
from featstore.packing.sources.columns import check_beside
from featstore.packing.sources.files import FileRows, NpyHeader, agreed_dtype, agreed_shape, parse_npy_header
from featstore.packing.sources.memory import ArrayRows, add_sparse

__all__ = ["MemberReader", "NpzCsrRows", "NpzRows", "member_headers", "npz_rows", "read_member"]

INFLATED_BYTES = 1 << 20
# Non-zeros of a sparse matrix that are spread at a time: 64 Ki of them need under 3 MiB of scratch.
SPARSE_CHUNK = 1 << 16


class MemberReader:
    """The values of one ``.npy`` member of a zip, read from front to back. Use as a context manager."""

    def __init__(self, path: Path, member: str) -> None:
        self.path = path
        self.name = f"{path}[{member}]"
        self._stack = ExitStack()
        self._file = self._stack.enter_context(open_binary(path))
        self._dropped = 0
        try:
            archive = self._stack.enter_context(zipfile.ZipFile(self._file))
            info = archive.getinfo(member + ".npy")
            self.compressed = info.compress_type != zipfile.ZIP_STORED
            self._stream = self._stack.enter_context(archive.open(info))
            self.header: NpyHeader = parse_npy_header(self._stream, self.name)
            if info.file_size < self.header.offset + self.header.data_bytes:
                raise SourceError(
                    f"{self.name} is truncated: {self.header.shape} of {self.header.dtype} needs "
                    f"{self.header.offset + self.header.data_bytes:,} bytes, the member has "
                    f"{info.file_size:,}"
                )
            # The local header repeats the name, but may have another extra field than the central directory.
            local = np.zeros(30, np.uint8)
            read_fully(self._file.fileno(), local, info.header_offset, path)
            name_bytes, extra_bytes = local[26:].view("<u2").tolist()
            self.data_offset = info.header_offset + 30 + name_bytes + extra_bytes + self.header.offset
        except BaseException as error:
            self._stack.close()
            raise self._translated(error) from error

    def __enter__(self) -> MemberReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill a C-contiguous array with the next values (same item size, bytes as stored)."""
        view = memoryview(bytes_of(out))  # type: ignore[arg-type]
        done = 0
        while done < len(view):
            chunk = self._read(min(INFLATED_BYTES, len(view) - done))
            view[done : done + len(chunk)] = chunk
            done += len(chunk)

    def read_part(self, out: NDArray[Any], row: int) -> None:
        """`read_into` for `read_native`: the stream stands at ``row`` already."""
        del row
        self.read_into(out)

    def read(self, count: int) -> NDArray[Any]:
        """The next ``count`` values as a new native array."""
        out = np.zeros(count, dtype=self.header.dtype)
        self.read_into(out)
        return to_native(out, out.dtype.newbyteorder("<"), owned=True)

    def skip(self, count: int) -> None:
        """Pass over ``count`` values."""
        left = count * self.header.dtype.itemsize
        while left:
            left -= len(self._read(min(INFLATED_BYTES, left)))

    def _read(self, size: int) -> bytes:
        try:
            chunk = self._stream.read(size)
        except Exception as error:
            raise self._translated(error) from error
        if not chunk:
            raise SourceError(f"{self.name} is truncated: it ends before its last value; copy the file again")
        position = self._file.tell()
        if position - self._dropped >= DROP_STEP_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(
                self._file.fileno(), self._dropped, position - self._dropped, os.POSIX_FADV_DONTNEED
            )
            self._dropped = position
        return chunk

    def _translated(self, error: BaseException) -> BaseException:
        if isinstance(error, (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)):
            return SourceError(
                f"{self.name}: not a readable .npz archive ({error}); it is damaged or cut off, copy it again"
            )
        if isinstance(error, KeyError):
            return SourceError(
                f"{self.name}: no such array; the archive holds {', '.join(member_names(self.path))}"
            )
        if isinstance(error, OSError) and not isinstance(error, DeviceError):
            return refusal(error, self.path, "read")
        return error


def member_names(path: Path) -> list[str]:
    """Keys of the arrays of an archive, in its order. Raises SourceError when it is no zip."""
    try:
        with open_binary(path) as file, zipfile.ZipFile(file) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except zipfile.BadZipFile as error:
        raise SourceError(
            f"{path}: not an .npz archive ({error}); it is damaged or cut off, copy it again"
        ) from error


def member_headers(path: Path) -> dict[str, NpyHeader | SourceError]:
    """Header of each array of an archive; for an array that cannot be read (objects), the error that says
    why."""
    headers: dict[str, NpyHeader | SourceError] = {}
    for member in member_names(path):
        try:
            with MemberReader(path, member) as reader:
                headers[member] = reader.header
        except SourceError as error:
            headers[member] = error
    return headers


def read_member(path: Path, member: str) -> NDArray[Any]:
    """One whole array in native byte order; for small members (a shape, index pointers)."""
    with MemberReader(path, member) as reader:
        values, shape = reader.read(reader.header.values), reader.header.shape
        return (
            values.reshape(shape[::-1]).transpose() if reader.header.fortran_order else values.reshape(shape)
        )


class NpzRows(FeatureSource):
    """Rows of an array in an archive, compressed or not. One whose columns are contiguous is read whole in
    each pass."""

    def __init__(
        self, path: Path, member: str, header: NpyHeader, dtype: np.dtype[Any], name: str | None = None
    ) -> None:
        if not header.shape:
            raise SourceError(f"{path}[{member}]: a single value (0-d) is no table; choose another key")
        self._whole = header.fortran_order and len(header.shape) > 1
        held = 2 * INFLATED_BYTES + (header.values * dtype.itemsize if self._whole else 0)
        super().__init__(
            name or f"{path}[{member}]", header.shape[0], header.shape[1:], dtype, held_bytes=held
        )
        self.path = path
        self._member = member
        self._stored_dtype, self._file_dtype = header.dtype, dtype

    def fingerprint(self) -> dict[str, str | int]:
        """The archive's path, size and time of change, and the key."""
        return file_fingerprint("npz", self.path, key=self._member, dtype=dtype_text(self._file_dtype))

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        assert self.rows is not None
        if start == self.rows:
            return
        if self._whole:
            values = read_member(self.path, self._member)
            values = values if self._file_dtype == self._stored_dtype else values.view(self._file_dtype)
            yield from ArrayRows(values, name=self.name).blocks(start, block_rows)
            return
        buffer = self._empty(self._block_rows_used(start, block_rows))
        with MemberReader(self.path, self._member) as reader:
            reader.skip(start * self.row_values)
            for first in range(start, self.rows, block_rows):
                out = buffer[: min(block_rows, self.rows - first)]
                read_native(out, self._file_dtype, reader.read_part)
                yield out


class NpzCsrRows(FeatureSource):
    """A CSR matrix in an archive as dense rows; duplicates are summed, as SciPy does."""

    def __init__(self, path: Path, prefix: str, name: str | None = None) -> None:
        label = name or (f"{path}[{prefix.rstrip('_')}]" if prefix else str(path))
        shape = read_member(path, prefix + "shape").reshape(-1)
        if shape.size != 2 or shape.dtype.kind not in "iu" or (shape < 0).any():
            raise SourceError(f"{label}: the shape of a sparse matrix is two sizes, not {shape.tolist()}")
        with MemberReader(path, prefix + "data") as data, MemberReader(path, prefix + "indptr") as indptr:
            dtype, pointers = data.header.dtype, indptr.header.values
            self._nonzeros = data.header.values
        super().__init__(
            label,
            int(shape[0]),
            (int(shape[1]),),
            dtype,
            held_bytes=6 * INFLATED_BYTES + SPARSE_CHUNK * (40 + 3 * dtype.itemsize),
        )
        if dtype.kind not in "biufc":
            raise SourceError(f"{label}: the values of a sparse matrix are numbers, not {dtype}")
        if pointers != int(shape[0]) + 1:
            raise SourceError(
                f"{label}: {pointers:,} index pointers do not fit {int(shape[0]):,} rows; one more "
                "than rows is needed"
            )
        self.path = path
        self._prefix = prefix

    def fingerprint(self) -> dict[str, str | int]:
        """The archive's path, size and time of change, and the prefix of the keys."""
        return file_fingerprint("npz-csr", self.path, key=self._prefix, dtype=dtype_text(self.dtype))

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        assert self.rows is not None
        if start == self.rows:
            return
        block = self._empty(self._block_rows_used(start, block_rows))
        with ExitStack() as stack:
            indptr, indices, data = (
                stack.enter_context(MemberReader(self.path, self._prefix + part))
                for part in ("indptr", "indices", "data")
            )
            if indices.header.values != self._nonzeros:
                raise SourceError(
                    f"{self.name}: {indices.header.values:,} column indices for {self._nonzeros:,} values"
                )
            indptr.skip(start)
            at = int(indptr.read(1)[0])
            if not 0 <= at <= self._nonzeros or (start == 0 and at != 0):
                raise SourceError(
                    f"{self.name}: index pointer {at} of row {start} is outside 0..{self._nonzeros:,}"
                )
            indices.skip(at)
            data.skip(at)
            for first in range(start, self.rows, block_rows):
                out = block[: min(block_rows, self.rows - first)]
                out[...] = 0
                at = self._fill(out, first, at, indptr, indices, data)
                yield out

    def _fill(
        self,
        out: NDArray[Any],
        first: int,
        at: int,
        indptr: MemberReader,
        indices: MemberReader,
        data: MemberReader,
    ) -> int:
        """Spread the non-zeros of rows ``first ...``, a chunk of rows and of non-zeros at a time."""
        for low in range(0, out.shape[0], SPARSE_CHUNK):
            rows = out[low : low + SPARSE_CHUNK]
            ends = np.concatenate(([at], indptr.read(rows.shape[0]).astype(np.int64)))
            bad = np.flatnonzero((ends[1:] < ends[:-1]) | (ends[1:] > self._nonzeros))
            if bad.size:
                raise SourceError(
                    f"{self.name}: index pointers of row {first + low + int(bad[0]):,} do not ascend "
                    "or pass the end"
                )
            while at < ends[-1]:
                count = min(SPARSE_CHUNK, int(ends[-1]) - at)
                columns, values = indices.read(count), data.read(count)
                row_of = np.searchsorted(ends, np.arange(at, at + count), side="right") - 1
                add_sparse(rows, row_of, columns, values, name=self.name, first=first + low)
                at += count
        return at


def npz_rows(
    path: Path,
    *,
    key: str | None = None,
    dtype: Any = None,
    shape: tuple[int, ...] | None = None,
    name: str | None = None,
) -> FeatureSource:
    """Rows of an array or CSR matrix in an ``.npz``. Without ``key`` there must be one candidate only.

    Candidates are arrays of two or more dimensions, matrices of `scipy.sparse.save_npz` and flat CSR groups;
    in an archive with none of these, 1-D arrays. Raises SourceError that lists the keys when the choice is
    open.
    """
    headers = member_headers(path)
    groups = sparse_groups(path, set(headers))
    if key is None:
        key = _only_candidate(path, headers, groups)
    if key in groups and key not in headers:
        source: FeatureSource = NpzCsrRows(path, groups[key], name)
        agreed_dtype(source.dtype, dtype, source.name)
        agreed_shape((source.rows or 0, *source.row_shape), shape, source.name)
        return source
    if key not in headers:
        raise SourceError(
            f"{path}: no array {key!r}; keys are {', '.join(sorted({*headers, *filter(None, groups)}))}"
        )
    header = headers[key]
    if isinstance(header, SourceError):
        raise header
    stored = agreed_dtype(header.dtype, dtype, f"{path}[{key}]")
    agreed_shape(header.shape, shape, f"{path}[{key}]")
    if not header.fortran_order or len(header.shape) < 2:
        return NpzRows(path, key, header, stored, name)
    with MemberReader(path, key) as reader:
        label = name or reader.name
        if not reader.compressed:
            return FileRows(
                path,
                header.shape,
                stored,
                offset=reader.data_offset,
                fortran_order=True,
                kind="npz",
                name=label,
            )
    return NpzRows(path, key, header, stored, label)


def sparse_groups(path: Path, keys: set[str]) -> dict[str, str]:
    """Sparse matrices of an archive: key as the user writes it -> prefix of its members. CSC and COO are
    refused."""
    groups = {}
    for key in keys:
        if key.endswith("indptr"):
            prefix = key.removesuffix("indptr")
            if {prefix + "data", prefix + "indices", prefix + "shape"} <= keys:
                groups[prefix.rstrip("_")] = prefix
    if "format" in keys and "shape" in keys:
        layout = read_member(path, "format").tobytes().replace(b"\0", b"").decode("ascii", "replace")
        if layout != "csr":
            raise SourceError(
                f"{path}: a sparse matrix in {layout!r} layout cannot be read row by row; save it again with "
                "scipy.sparse.save_npz(path, matrix.tocsr())"
            )
    return groups


def _only_candidate(path: Path, headers: dict[str, NpyHeader | SourceError], groups: dict[str, str]) -> str:
    parts = ("data", "indices", "indptr", "shape", "format")
    members = {prefix + part for prefix in groups.values() for part in parts}
    shapes: dict[str, tuple[int, ...] | None] = {
        key: head.shape if isinstance(head, NpyHeader) else None
        for key, head in headers.items() if key not in members
    }  # fmt: skip
    for key, prefix in groups.items():
        shapes[key] = tuple(read_member(path, f"{prefix}shape").reshape(-1).tolist())
    tables = [key for key, shape in shapes.items() if shape is not None and len(shape) >= 2]
    candidates = tables or [key for key, shape in shapes.items() if shape is not None and len(shape) == 1]
    for head in headers.values():  # which may be the table
        if not tables and isinstance(head, SourceError):
            raise head
    if len(candidates) == 1:
        check_beside(shapes, candidates[0], str(path))
        return candidates[0]
    listed = ", ".join(
        f"{key} {head.shape if isinstance(head, NpyHeader) else ''}".strip() for key, head in headers.items()
    )
    raise SourceError(
        f"{path}: {len(candidates)} arrays could be the table; give key=, one of: {listed or 'none at all'}"
    )
