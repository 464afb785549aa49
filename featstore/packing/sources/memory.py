"""Row sources that are in memory already, or come from the caller block by block.

Arrays, tensors and CSR matrices are cut into blocks; a sparse block is made dense when it is asked for, so a
matrix of 3 MB that is a gigabyte as rows never becomes one. An iterator of blocks is the way in for
everything this package does not read: its first block is taken at once (it says the shape and dtype of the
rows) and each later one is held against it. Arrays of other libraries are read by
`featstore.packing.sources.arrays`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.modules import loaded
from featstore.base.sequences import each_of
from featstore.errors import SourceError
from featstore.packing.sources.arrays import array_of, dense_tensor, tensor_to_numpy
from featstore.packing.sources.base import FeatureSource, dtype_text, native_dtype, sample_crc32, to_native

__all__ = ["ArrayRows", "IteratorRows", "SparseRows", "TensorRows", "add_sparse"]

# Rows, and non-zeros, of a sparse matrix that are spread at a time: scratch of some 3 MiB whatever the block.
CHUNK = 1 << 16
# Rows that an iterable gives one at a time are handed on in blocks of at most this size.
GATHER_BYTES = 1 << 20


def add_sparse(
    rows: NDArray[Any],
    row_of: NDArray[Any],
    columns: NDArray[Any],
    values: NDArray[Any],
    *,
    name: str,
    first: int,
) -> None:
    """Add ``values`` at ``rows[row_of, columns]``, in place. Raises SourceError for a column outside the
    matrix."""
    if columns.size == 0:
        return
    bad = np.flatnonzero((columns < 0) | (columns >= rows.shape[1]))
    if bad.size:
        at = int(bad[0])
        raise SourceError(
            f"{name}: column {int(columns[at])} in row {first + int(row_of[at]):,} is outside "
            f"0..{rows.shape[1] - 1}; the sparse matrix is damaged"
        )
    flat = rows.reshape(-1)
    where = row_of.astype(np.int64) * rows.shape[1] + columns.astype(np.int64)
    (np.logical_or if rows.dtype == np.bool_ else np.add).at(flat, where, values)


class ArrayRows(FeatureSource):
    """Rows of a NumPy array in memory, of any strides and byte order. Blocks are views where that is
    possible."""

    def __init__(
        self,
        array: NDArray[Any],
        *,
        name: str = "<array>",
        identity: dict[str, str | int] | None = None,
        held: bool = False,
    ) -> None:
        if array.ndim == 0:
            raise SourceError(f"{name}: a single value (0-d) is no table; give an array of rows")
        super().__init__(
            name, array.shape[0], array.shape[1:], array.dtype, held_bytes=array.nbytes if held else 0
        )
        self._array = array
        self._identity = identity

    def fingerprint(self) -> dict[str, str | int]:
        """Shape, dtype and a CRC of some rows: an array has no name that would be the same in another
        process."""
        if self._identity is not None:
            return self._identity
        shape = ",".join(map(str, self._array.shape))
        return {
            "kind": "array",
            "shape": shape,
            "dtype": dtype_text(self._array.dtype),
            "sample_crc32": sample_crc32(self._array),
        }

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        for first in range(start, self._array.shape[0], block_rows):
            yield to_native(np.asarray(self._array[first : first + block_rows]), self.dtype, owned=False)


class TensorRows(FeatureSource):
    """Rows of a torch tensor on any device; each block is brought to the CPU on its own."""

    def __init__(
        self, tensor: Any, *, name: str = "<tensor>", identity: dict[str, str | int] | None = None
    ) -> None:
        if tensor.ndim == 0:
            raise SourceError(f"{name}: a single value (0-d) is no table; give a tensor of rows")
        dtype = tensor_to_numpy(dense_tensor(tensor, name)[:0], name).dtype
        super().__init__(name, int(tensor.shape[0]), tuple(tensor.shape[1:]), dtype)
        self._tensor = tensor
        self._identity = identity

    def fingerprint(self) -> dict[str, str | int]:
        """Shape, dtype and a CRC of some rows, or what the file it was loaded from gives."""
        if self._identity is not None:
            return self._identity
        rows, shape = int(self._tensor.shape[0]), ",".join(map(str, self._tensor.shape))
        picked = self._tensor[np.linspace(0, rows - 1, num=min(64, rows)).astype(np.int64).tolist()]
        crc = sample_crc32(tensor_to_numpy(picked, self.name))
        return {"kind": "tensor", "shape": shape, "dtype": dtype_text(self.dtype), "sample_crc32": crc}

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        for first in range(start, int(self._tensor.shape[0]), block_rows):
            yield np.ascontiguousarray(tensor_to_numpy(self._tensor[first : first + block_rows], self.name))


class SparseRows(FeatureSource):
    """Rows of a SciPy sparse matrix, made dense block by block. Anything but CSR is converted to it once, and
    held."""

    def __init__(self, matrix: Any, *, name: str = "<sparse matrix>") -> None:
        if matrix.ndim != 2:
            raise SourceError(
                f"{name}: a sparse matrix of shape {matrix.shape} is no table; give two dimensions"
            )
        csr = matrix.tocsr()
        held = 0 if csr is matrix else csr.data.nbytes + csr.indices.nbytes + csr.indptr.nbytes
        super().__init__(
            name, int(csr.shape[0]), (int(csr.shape[1]),), csr.dtype, held_bytes=held + 40 * CHUNK
        )
        self._csr = csr

    def fingerprint(self) -> dict[str, str | int]:
        """Shape, dtype, number of non-zeros, and a CRC of some of them."""
        crc = sample_crc32(self._csr.data) ^ sample_crc32(self._csr.indices)
        shape = ",".join(map(str, self._csr.shape))
        return {
            "kind": "csr",
            "shape": shape,
            "dtype": dtype_text(self.dtype),
            "nonzeros": int(self._csr.nnz),
            "sample_crc32": crc,
        }

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        if start == self.rows:
            return
        buffer = self._empty(self._block_rows_used(start, block_rows))
        indptr = self._csr.indptr
        for first in range(start, int(self._csr.shape[0]), block_rows):
            rows = buffer[: min(block_rows, int(self._csr.shape[0]) - first)]
            rows[...] = 0
            for low in range(0, rows.shape[0], CHUNK):
                part = rows[low : low + CHUNK]
                ends = indptr[first + low : first + low + part.shape[0] + 1].astype(np.int64)
                for at in range(int(ends[0]), int(ends[-1]), CHUNK):
                    stop = min(at + CHUNK, int(ends[-1]))
                    row_of = np.searchsorted(ends, np.arange(at, stop), side="right") - 1
                    columns, values = self._csr.indices[at:stop], self._csr.data[at:stop]
                    add_sparse(part, row_of, columns, values, name=self.name, first=first + low)
            yield rows


_TORCHS = ("torch", "torchdata")  # whose ways of making mini-batches keep the order of their sampler


def _check_whole_and_in_order(blocks: Any, name: str) -> None:
    """Raise SourceError for a torch ``DataLoader`` that shuffles, samples, drops, repeats or overtakes: row i
    would not be item i."""
    data = loaded("torch.utils.data", "DataLoader")
    if data is None or not isinstance(blocks, data.DataLoader):
        return
    streams = isinstance(blocks.dataset, data.IterableDataset)
    batches = blocks.batch_sampler
    sampler = blocks.sampler if batches is None else batches
    if isinstance(batches, data.BatchSampler) and type(batches).__module__.split(".")[0] in _TORCHS:
        sampler = batches.sampler
    drop_last = blocks.drop_last or bool(getattr(batches, "drop_last", False))
    in_order = getattr(blocks, "in_order", True) or blocks.num_workers < 2
    if (
        (streams and blocks.num_workers > 1)
        or not (streams or isinstance(sampler, data.SequentialSampler))
        or not (streams or len(sampler) == len(blocks.dataset))
        or drop_last
        or not in_order
    ):
        raise SourceError(
            f"{name}: a DataLoader with a {type(sampler).__name__}, drop_last={drop_last}, "
            f"in_order={in_order} and {blocks.num_workers} workers does not give each item once and in "
            "order, so row i would not be item i: make it with shuffle=False, no sampler of its own, "
            "drop_last=False, in_order=True, and at most one worker for an IterableDataset"
        )


class IteratorRows(FeatureSource):
    """Rows from an iterable of blocks ``[n, *row_shape]`` (arrays or tensors), each with n of its own.

    Where ``row_shape`` is given, an item of that shape is a single row. Without it, an item of one dimension
    could be a row or a block of rows of one value each, so it is a SourceError that asks.

    A one-shot iterator (a generator) can be passed over once: a second `blocks` is a SourceError. A list of
    blocks, or an object whose ``__iter__`` starts afresh each time, is replayable; one that only goes on,
    as what stands around a generator does, is told by another first block, or another number of rows, and is
    a SourceError then. Blocks larger than asked
    for are cut, single rows gathered, other blocks handed on as they are. A block of another row shape or
    dtype than the first is a SourceError that names it, and so is an end that does not match ``rows``, where
    that is given.
    """

    def __init__(
        self,
        blocks: Iterable[Any],
        *,
        rows: int | None = None,
        row_shape: tuple[int, ...] | None = None,
        name: str = "<iterator>",
    ) -> None:
        _check_whole_and_in_order(blocks, name)
        iterator = iter(each_of(blocks))
        first = next(iterator, None)
        if first is None:
            raise SourceError(
                f"{name}: gives no block, so the shape of a row is unknown; give at least one (n may be 0)"
            )
        replayable = iterator is not blocks
        block, single = _block_of(first, 0, row_shape, name)
        held = GATHER_BYTES if single else 0 if isinstance(blocks, list | tuple) else block.nbytes
        super().__init__(name, rows, block.shape[1:], block.dtype, held_bytes=held, replayable=replayable)
        self._given_row_shape = row_shape
        self._blocks_given = blocks
        # what has been begun is gone on with: another iterator may have no first block any more
        self._pending: Iterator[Any] | None = itertools.chain([first], iterator)
        self._first_crc32 = sample_crc32(block)
        self._passed: int | None = None  # rows of a whole pass

    def fingerprint(self) -> dict[str, str | int]:
        """Only what is known: of an iterator's rows the first block, before they are read."""
        shape = ",".join(map(str, self.row_shape))
        return {
            "kind": "iterator",
            "rows": -1 if self.rows is None else self.rows,
            "shape": shape,
            "dtype": dtype_text(self.dtype),
            "first_crc32": self._first_crc32,
        }

    def blocks(self, start: int = 0, block_rows: int = 65536) -> Iterator[NDArray[Any]]:
        """As `FeatureSource.blocks`; SourceError when a one-shot iterator has been used already."""
        if not self.replayable and self._pending is None:
            raise SourceError(
                f"{self.name}: a one-shot iterator was read already; give a list or an object that can "
                "iterate again"
            )
        return super().blocks(start, block_rows)

    def sample(self, rows: int) -> NDArray[Any]:
        """As `FeatureSource.sample`; what a one-shot iterator gave for it, it gives in the pass again."""
        if self._pending is None or isinstance(self._blocks_given, list | tuple):
            return super().sample(rows)
        items: list[Any] = []
        found, count = [np.empty((0, *self.row_shape), self.dtype)], 0
        for item in self._pending:
            block, _ = _block_of(item, len(items), self._given_row_shape, self.name)
            items.append(item)
            if block.shape[1:] != self.row_shape or native_dtype(block.dtype, self.name) != self.dtype:
                break  # which the pass tells of
            found.append(to_native(block[: rows - count], self.dtype, owned=False))
            count += len(found[-1])
            if count == rows:
                break
            items[-1], found[-1] = block.copy(), found[-1].copy()  # what comes next may be in its memory
        self._pending = itertools.chain(items, self._pending)
        return np.concatenate(found)

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        pending, self._pending = self._pending, None
        if pending is None:
            assert self.replayable
            pending = iter(each_of(self._blocks_given))
        return self._cut(pending, start, block_rows)

    def _cut(self, given: Iterator[Any], start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        done = 0
        for block in self._gathered(given, block_rows):
            for low in range(max(0, start - done), block.shape[0], block_rows):
                yield to_native(block[low : low + block_rows], self.dtype, owned=False)
            done += block.shape[0]
        if done < start or (self.rows is not None and done != self.rows):
            raise SourceError(
                f"{self.name}: ended after {done:,} rows, "
                f"{self.rows if self.rows is not None else start:,} were promised"
            )
        if self._passed not in (None, done):
            raise self._goes_on(f"{done:,} rows come, and {self._passed:,} came before")
        self._passed = done

    def _goes_on(self, why: str) -> SourceError:
        return SourceError(
            f"{self.name}: {why}: going through it anew does not begin it anew, as what stands around a "
            "generator does not; give a list, or an object whose __iter__ starts afresh each time"
        )

    def _gathered(self, given: Iterator[Any], block_rows: int) -> Iterator[NDArray[Any]]:
        """The blocks, checked; single rows that follow one another as one block."""
        limit = max(1, min(block_rows, GATHER_BYTES // self.row_bytes))
        gathered: NDArray[Any] | None = None
        held = done = 0
        for number, item in enumerate(given):
            block, single = _block_of(item, number, self._given_row_shape, self.name)
            if block.shape[1:] != self.row_shape or native_dtype(block.dtype, self.name) != self.dtype:
                raise SourceError(
                    f"{self.name}: block {number} has rows of shape {block.shape[1:]} and {block.dtype}, "
                    f"block 0 had {self.row_shape} and {self.dtype}; all blocks must agree"
                )
            if number == 0 and sample_crc32(block) != self._first_crc32:
                raise self._goes_on("another first block comes than before")
            done += block.shape[0]
            if self.rows is not None and done > self.rows:
                raise SourceError(
                    f"{self.name}: block {number} ends at row {done:,}, beyond rows={self.rows:,}"
                )
            if gathered is not None and held and (not single or held == limit):
                yield gathered[:held]
                held = 0
            if not single:
                yield block
                continue
            if gathered is None:
                gathered = self._empty(limit)
            gathered[held] = block[0]
            held += 1
        if gathered is not None and held:
            yield gathered[:held]


def _block_of(
    item: Any, number: int, row_shape: tuple[int, ...] | None, name: str
) -> tuple[NDArray[Any], bool]:
    """An item of an iterable as rows ``[n, ...]``, and whether it is one row. ``row_shape`` None: not
    told."""
    array = array_of(item, f"{name} block {number}")
    if array is None or (array.ndim == 0 and row_shape != ()):
        raise SourceError(
            f"{name}: block {number} is a {type(item).__name__}, not an array of rows; give numpy arrays [n, "
            "...], or the whole as one with numpy.asarray"
        )
    if row_shape is None:
        if array.ndim == 1:
            count = array.shape[0]
            raise SourceError(
                f"{name}: item {number} has one dimension ({count:,} values of {array.dtype}): is it one row "
                f"of {count:,} values, or a block of {count:,} rows of one value each? Say shape=(-1, "
                f"{count}) where each item is a row, shape=(-1,) where each is a block of rows of one value; "
                f"or give blocks of two dimensions, [rows, {count}]"
            )
        return array, False
    if array.shape == row_shape:
        return array[np.newaxis], True
    if array.ndim != len(row_shape) + 1:
        raise SourceError(
            f"{name}: item {number} has shape {array.shape}, which is neither a row {row_shape} nor a block "
            "of such rows; let shape= and the items agree"
        )
    return array, False
