"""Row lists: one list of rows for each mini-batch, one after the other in a scratch file.

Compiling passes over the rows of all mini-batches several times, forwards and backwards, and they need not
fit in memory. A list is read when it is asked for; the file is the compilation's own scratch, written and
read through descriptors, and never mapped, so that what is in memory is what was asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.files import RegularFile
from featstore.storage.disk import Disk, File

_HOLD_BYTES = 1 << 20


class RowLists:
    """Lists of numbers in a scratch file, by mini-batch.

    ``offsets``: int64 [lists + 1]; list i has the elements ``offsets[i]`` to ``offsets[i + 1]``. ``dtype``:
    of the elements. ``first``: where in the file the first one is, in elements.
    """

    def __init__(self, path: Path, dtype: Any, offsets: NDArray[np.int64], first: int = 0) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.offsets = offsets
        self._first = first
        self._file = RegularFile(path)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def total(self) -> int:
        """Elements of all lists."""
        return int(self.offsets[-1])

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """List ``index``, in memory of its own."""
        if not 0 <= index < len(self):
            raise IndexError(index)  # a sequence ends so when it is iterated over
        return self.part(int(self.offsets[index]), int(self.offsets[index + 1]))

    def part(self, begin: int, end: int) -> NDArray[Any]:
        """Elements ``begin`` to ``end`` of all lists laid end to end. Raises CorruptionError, DeviceError."""
        out = np.empty(end - begin, self.dtype)
        self.read(begin, out)
        return out

    def read(self, begin: int, out: NDArray[Any]) -> None:
        """Fill ``out``, of this dtype, with the elements from ``begin`` on. Raises as :meth:`part`."""
        self._file.read_into(out, (self._first + begin) * self.dtype.itemsize)

    def parts(self, begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[Any]:
        """``counts[i]`` elements from ``begins[i]`` on, for each i, one after the other. Raises as
        :meth:`part`."""
        out = np.empty(int(counts.sum()), self.dtype)
        width = self.dtype.itemsize
        done = self._file.read_parts(out, (self._first + begins) * width, counts * width)
        at = int(counts[:done].sum())
        for begin, count in zip(begins[done:].tolist(), counts[done:].tolist(), strict=True):
            self.read(begin, out[at : at + count])
            at += count
        return out

    def close(self) -> None:
        self._file.close()


class RowListsWriter:
    """Writes :class:`RowLists`, list by list, holding a megabyte: the first list first, or with ``most`` the
    last one first.

    ``most``: how many elements all lists have together, at most. From that place the file is written
    downwards; if there were fewer, it begins with a hole.
    """

    def __init__(self, disk: Disk, path: Path, dtype: Any, most: int | None = None) -> None:
        self._disk = disk
        self.path = path
        self.dtype = np.dtype(dtype)
        self._file: File | None = disk.create(path)
        self._backward = most is not None
        self._lengths: list[int] = []
        self._held = np.empty(max(1, _HOLD_BYTES // self.dtype.itemsize), self.dtype)
        self._fill = 0
        self._at = most or 0  # where what is held goes: it begins there, or ends

    def append(self, values: NDArray[Any]) -> None:
        """Add a list: the one after those before, or before them where the last one came first."""
        count = len(values)
        self._lengths.append(count)
        if self._fill + count > len(self._held):
            self._flush()
        if count > len(self._held):
            self._write(np.ascontiguousarray(values, self.dtype))
            return
        begin = len(self._held) - self._fill - count if self._backward else self._fill
        self._held[begin : begin + count] = values
        self._fill += count

    def _flush(self) -> None:
        held, self._fill = self._fill, 0
        self._write(self._held[len(self._held) - held :] if self._backward else self._held[:held])

    def _write(self, values: NDArray[Any]) -> None:
        assert self._file is not None
        if self._backward:
            self._at -= len(values)
        if len(values):
            self._disk.write(self._file, self._at * self.dtype.itemsize, values.view(np.uint8))
        if not self._backward:
            self._at += len(values)

    def finish(self) -> RowLists:
        """The lists, to be read."""
        self._flush()
        self.close()
        lengths = self._lengths[::-1] if self._backward else self._lengths
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(lengths, np.int64))])
        return RowLists(self.path, self.dtype, offsets, self._at if self._backward else 0)

    def close(self) -> None:
        if self._file is not None:
            self._disk.close(self._file)
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:  # an error came between
            self.close()
