"""What every source of a pack has in common: the `FeatureSource` contract, sequential reads, fingerprints.

A pack never asks a source for a row by its number. It makes passes: rows in the user's order, a block at a
time, into as little memory as one block. So a source may be a compressed stream, a text file or an iterator,
and a table that is far larger than memory costs no more than a small one.

Files are read with plain `preadv` into a buffer that is used again, never mapped: pages of a mapping count in
the resident set, and a promise about peak memory could not be kept. `POSIX_FADV_DONTNEED` follows the read
position, so that a pass over a large file does not fill the page cache either (inside a memory cgroup the
cache counts as well).
"""

from __future__ import annotations

import abc
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import need_package, shown
from featstore.base.dtypes import CONVERT_ADDED, added_type
from featstore.base.files import open_given, open_stream, read_fully
from featstore.base.keys import KeyBlock
from featstore.base.system import asking, refusal
from featstore.errors import ArgumentError, MissingPackageError, SourceError
from featstore.packing.sources.columns import ChosenColumns

__all__ = [
    "FeatureSource",
    "FileReader",
    "bytes_of",
    "dtype_text",
    "file_fingerprint",
    "import_extra",
    "named_dtype",
    "native_dtype",
    "open_binary",
    "read_native",
    "sample_crc32",
    "stat_of",
    "to_native",
]

# Pages behind the read position are given back in steps of this size: a system call per step, not per block.
DROP_STEP_BYTES = 8 << 20
DROP_RUN_BYTES = 256 << 10
# Conversions that cannot be done in place work through pieces of about this size.
READ_PIECE_BYTES = 1 << 20
# Of a longer row, `sample_crc32` takes values spread over it.
SAMPLE_ROW_BYTES = 1 << 20


def import_extra(module: str, extra: str, name: str) -> Any:
    """Import an optional package late. Raises SourceError that says which extra brings it."""
    try:
        return need_package(module, extra, f"{name}: reading this")
    except MissingPackageError as error:
        raise SourceError(str(error)) from error


class FeatureSource(abc.ABC):
    """The rows of one table, in the user's order, read by sequential passes.

    Attributes:
        name: for messages: a path, or ``<array>`` and the like.
        rows: number of rows, or None where it is not known before the end (iterators, ``.csv.gz`` without a
            count).
        row_shape: shape of one row, ``()`` for a 1-D source.
        dtype: native little-endian dtype of the blocks (``ml_dtypes.bfloat16`` is allowed).
        held_bytes: memory held during a pass beside the block itself (a decompressed row group, for example).
        replayable: whether `blocks` may be called again from the start.
        chosen: of a table with named columns, which are taken; rows are placed by the column ``chosen.id``,
            if there is one, or it holds their keys (``chosen.keyed``).
    """

    chosen: ChosenColumns | None = None

    def __init__(
        self,
        name: str,
        rows: int | None,
        row_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        held_bytes: int = 0,
        replayable: bool = True,
    ) -> None:
        if any(extent == 0 for extent in row_shape):
            raise SourceError(f"{name}: a row of shape {row_shape} has no values; give at least one column")
        self.name = name
        self.rows = rows
        self.row_shape = tuple(int(extent) for extent in row_shape)
        self.dtype = native_dtype(dtype, name)
        self.held_bytes = held_bytes
        self.replayable = replayable

    @property
    def row_values(self) -> int:
        """Values in one row."""
        return int(np.prod(self.row_shape, dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a block."""
        return self.row_values * self.dtype.itemsize

    def blocks(self, start: int = 0, block_rows: int = 65536) -> Iterator[NDArray[Any]]:
        """Rows ``start``, ``start + 1``, ... as C-contiguous ``[n, *row_shape]`` arrays,
        ``1 <= n <= block_rows``.

        A block is only lent: it may be a view of the user's own array (do not write to it) or of a buffer
        that the next block overwrites (copy what is kept). Blocks may be shorter than ``block_rows`` anywhere
        in the pass.

        Raises SourceError for input that cannot be used, also in the middle of a pass, and DeviceError for a
        failed read. ``start`` beyond the last row is a SourceError where the number of rows is known or comes
        to be known.
        """
        if block_rows < 1:
            raise ArgumentError(f"block_rows must be at least 1, not {block_rows}")
        if start < 0 or (self.rows is not None and start > self.rows):
            raise SourceError(f"{self.name}: cannot start at row {start}; it has {self.rows} rows")
        return self._blocks(start, block_rows)

    @abc.abstractmethod
    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]: ...

    def sample(self, rows: int) -> NDArray[Any]:
        """Up to ``rows`` of the first rows, lent as a block is, for a look at them before the pass."""
        return next(self.blocks(0, rows), np.zeros((0, *self.row_shape), self.dtype))

    def ids(self) -> Iterator[NDArray[Any]]:
        """Node ids of the rows, in their order: runs of int64 ``[n]``. Of sources with ``chosen.id`` alone.

        Raises SourceError for ids that are no whole numbers.
        """
        raise SourceError(f"{self.name}: has no column of ids; give id= for a table with named columns")

    def keys(self) -> Iterator[KeyBlock]:
        """Keys of the rows, in their order, of sources with ``chosen.keyed`` alone. Raises SourceError."""
        raise SourceError(f"{self.name}: has no column of keys; give id= for a table with named columns")

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, str | int]:
        """What identifies the source when a killed pack resumes: kind, path, size and mtime, or shape and
        dtype."""

    def _empty(self, rows: int) -> NDArray[Any]:
        """A new block: zeros, because padding inside structured values must not carry what was in memory
        before."""
        return np.zeros((rows, *self.row_shape), dtype=self.dtype)

    def _block_rows_used(self, start: int, block_rows: int) -> int:
        """``block_rows``, or the rows left if these are fewer: what a buffer must hold."""
        return block_rows if self.rows is None else max(1, min(block_rows, self.rows - start))


def native_dtype(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    """The little-endian form of a dtype. Raises SourceError for what has no fixed size or holds Python
    objects."""
    if dtype.hasobject or dtype.kind in "OT":
        raise SourceError(
            f"{name}: dtype {dtype} holds Python objects, which have no fixed size and could only be "
            "read with pickle; convert it to a numeric or fixed-width dtype first"
        )
    if dtype.itemsize == 0:
        raise SourceError(
            f"{name}: values of dtype {dtype} have zero bytes; give at least one byte per value"
        )
    if (added := added_type(dtype)) is not None:
        raise SourceError(
            f"{name}: dtype {added} is not NumPy's own and would come back as bytes; {CONVERT_ADDED}"
        )
    return dtype.newbyteorder("<")


def named_dtype(dtype: Any, name: str) -> np.dtype[Any]:
    """A NumPy dtype from whatever names one, ``"bfloat16"`` included. Raises SourceError for anything
    else."""
    try:
        if isinstance(dtype, str) and dtype == "bfloat16":
            import ml_dtypes

            dtype = ml_dtypes.bfloat16
        named: np.dtype[Any] = np.dtype(dtype)
        return named
    except (TypeError, ValueError) as error:
        raise SourceError(
            f"{name}: {shown(dtype)} is no dtype; write for example float32, int64, bfloat16 or '>f4'"
        ) from error


def dtype_text(dtype: np.dtype[Any]) -> str:
    """A dtype as text that tells any two apart (bfloat16 calls itself ``<V2`` otherwise)."""
    if dtype.names is not None:
        return str(dtype.descr)
    return dtype.name if dtype.name == "bfloat16" else dtype.str


def to_native(block: NDArray[Any], dtype: np.dtype[Any], *, owned: bool) -> NDArray[Any]:
    """``block`` as C-contiguous values of the native ``dtype``; swapped in place when the buffer is ours
    (``owned``).

    Values are never cast: only the order of bytes changes. Padding in structured values becomes zeros.
    """
    if block.dtype == dtype and (dtype.names is None or block.flags.c_contiguous):
        return np.ascontiguousarray(block)
    if block.dtype.names is None and owned and block.flags.c_contiguous:
        return block.byteswap(inplace=True).view(dtype)
    out = np.zeros(block.shape, dtype=dtype)
    out[...] = block
    return out


def read_native(out: NDArray[Any], stored: np.dtype[Any], read: Callable[[NDArray[Any], int], None]) -> None:
    """Fill ``out`` with values that are stored as ``stored``; ``read(buffer, row)`` gives the bytes of a run
    of rows.

    Plain values are swapped in place. Structured ones go through pieces, as their fields are swapped one by
    one.
    """
    if stored == out.dtype:
        read(out, 0)
    elif stored.names is None:
        raw = out.view(stored)
        read(raw, 0)
        raw.byteswap(inplace=True)
    else:
        piece_rows = max(1, READ_PIECE_BYTES // max(1, out[:1].nbytes))
        for row in range(0, out.shape[0], piece_rows):
            piece = np.zeros(out[row : row + piece_rows].shape, dtype=stored)
            read(piece, row)
            out[row : row + piece_rows] = piece


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a C-contiguous array as a flat uint8 view (every dtype, bfloat16 and datetimes
    included)."""
    return array.reshape(-1).view(np.uint8)


def sample_crc32(array: NDArray[Any], samples: int = 64) -> int:
    """CRC-32 of rows spread evenly over an array: tells two arrays of one shape apart without reading all of
    them."""
    crc = 0
    if array.shape[0]:
        for row in np.linspace(0, array.shape[0] - 1, num=min(samples, array.shape[0])).astype(np.int64):
            picked = array[row : row + 1]
            if picked.dtype.names:  # what lies between fields is anything
                from numpy.lib.recfunctions import repack_fields

                picked = repack_fields(picked, recurse=True)
            if picked.nbytes > SAMPLE_ROW_BYTES:  # a row of an edge_index is half of the graph
                picked = picked.reshape(-1)[:: picked.size * picked.itemsize // SAMPLE_ROW_BYTES + 1]
            crc = zlib.crc32(bytes_of(np.ascontiguousarray(picked)).tobytes(), crc)
    return crc


def file_fingerprint(kind: str, path: Path, **more: str | int) -> dict[str, str | int]:
    """Kind, absolute path, size and time of last change of a file, for `FeatureSource.fingerprint`. Raises
    SourceError, for a path that is no text, too."""
    status = stat_of(path)
    identity: dict[str, str | int] = {
        "path": text_of(path),
        "size_bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
    return {"kind": kind, **identity, **more}


def text_of(path: Path) -> str:
    """A path, absolute, as it is kept. Raises SourceError for one that is no text."""
    name = str(path.absolute())
    if name.encode(errors="replace").decode() != name:
        raise SourceError(
            f"{path}: this path is no UTF-8, and a pack keeps the paths of its inputs: rename it, or give a "
            "link to it with another name"
        )
    return name


def stat_of(path: Path) -> os.stat_result:
    """`os.stat`, with a missing file as a SourceError and any other failure as a DeviceError."""
    try:
        return path.stat()
    except FileNotFoundError as error:
        raise SourceError(f"{path}: no such file or directory; check the path") from error
    except OSError as error:
        raise refusal(error, path, "stat") from error


def open_binary(path: Path) -> io.BufferedReader:
    """A user's file, for a library that reads from file objects. Raises SourceError where there is none,
    DeviceError."""
    stat_of(path)
    return open_stream(path)


class FileReader:
    """Sequential reads of one file into buffers of the caller, leaving nothing in the page cache behind
    them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        stat_of(path)
        self._fd = open_given(path)
        with asking(path, "look at"):
            self.size_bytes = os.fstat(self._fd).st_size
        self._read_start = 0
        self._read_end = 0
        self._advise(0, 0, "POSIX_FADV_SEQUENTIAL")

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def read_into(self, buffer: NDArray[Any], offset: int) -> None:
        """Fill a C-contiguous array from byte ``offset`` on. Raises SourceError where the file ends too
        early."""
        view = bytes_of(buffer)
        done = read_fully(self._fd, view, offset, self.path)
        if done < len(view):
            raise SourceError(
                f"{self.path} is truncated: bytes {offset:,} to {offset + len(view):,} were expected, the "
                f"file ends at byte {offset + done:,}; it changed during the pack or was not copied whole"
            )
        if offset != self._read_end:
            self._drop()
            self._read_start = offset
        self._read_end = offset + done
        if self._read_end - self._read_start >= DROP_STEP_BYTES or self._read_end >= self.size_bytes:
            self._drop()

    def _drop(self) -> None:
        """Give back the pages of the run read last; short runs share theirs with neighbours that are still to
        come."""
        if self._read_end - self._read_start >= DROP_RUN_BYTES:
            self._advise(self._read_start, self._read_end - self._read_start, "POSIX_FADV_DONTNEED")
        self._read_start = self._read_end

    def _advise(self, offset: int, size_bytes: int, advice: str) -> None:
        # An advice only: where the system has none (or the file is a pipe), reads work just as well.
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._fd, offset, size_bytes, getattr(os, advice))
