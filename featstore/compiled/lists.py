"""Row lists: one list of rows for each mini-batch, one after the other in a scratch file.

Compiling passes over the rows of all mini-batches several times, forwards and backwards, and they need not fit in memory. A list is
read when it is asked for; the file is the compilation's own scratch, written and read through descriptors, and never mapped, so that
what is in memory is what was asked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.disk import Disk, File
from featstore.errors import CorruptionError, DeviceError

_HOLD_BYTES = 1 << 20


class RowLists:
    """Lists of numbers in a scratch file, by mini-batch.

    ``offsets``: int64 [lists + 1]; list i has the elements ``offsets[i]`` to ``offsets[i + 1]``. ``dtype``: of the elements.
    """

    def __init__(self, path: Path, dtype: Any, offsets: NDArray[np.int64]) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.offsets = offsets
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

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
            raise IndexError(index)
        return self.part(int(self.offsets[index]), int(self.offsets[index + 1]))

    def part(self, begin: int, end: int) -> NDArray[Any]:
        """Elements ``begin`` to ``end`` of all lists laid end to end. Raises CorruptionError, DeviceError."""
        out = np.empty(end - begin, self.dtype)
        view = memoryview(out).cast("B")  # type: ignore[arg-type]
        at, done = begin * self.dtype.itemsize, 0
        while done < len(view):
            try:
                got = os.preadv(self._descriptor, [view[done:]], at + done)
            except OSError as error:
                raise DeviceError(error.errno or 5, self.path, at + done) from error
            if got == 0:
                raise CorruptionError(self.path, at + done, f"{len(view) - done} bytes more", "the end of the file")
            done += got
        return out

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:  # an error came between
            self.close()


class RowListsWriter:
    """Writes :class:`RowLists`, list by list, holding a megabyte."""

    def __init__(self, disk: Disk, path: Path, dtype: Any) -> None:
        self._disk = disk
        self.path = path
        self.dtype = np.dtype(dtype)
        self._file: File | None = disk.create(path)
        self._ends = [0]
        self._held: list[NDArray[Any]] = []
        self._held_bytes = 0
        self._written = 0

    def append(self, values: NDArray[Any]) -> None:
        """Add a list."""
        own = values.astype(self.dtype, copy=True)
        self._held.append(own)
        self._held_bytes += own.nbytes
        self._ends.append(self._ends[-1] + len(own))
        if self._held_bytes >= _HOLD_BYTES:
            self._flush()

    def put(self, index: int, offsets: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Write list ``index`` at the place that ``offsets`` give it: for lists whose lengths are known, in any order."""
        assert self._file is not None
        if len(values) != offsets[index + 1] - offsets[index]:
            raise ValueError(
                f"list {index} has {len(values)} elements, {offsets[index + 1] - offsets[index]} were announced"
            )
        data = np.ascontiguousarray(values, self.dtype)
        if data.nbytes:
            self._disk.write(self._file, int(offsets[index]) * self.dtype.itemsize, data.view(np.uint8))

    def _flush(self) -> None:
        assert self._file is not None
        data = np.concatenate(self._held) if self._held else np.empty(0, self.dtype)
        if data.nbytes:
            self._disk.write(self._file, self._written, data.view(np.uint8))
        self._written += data.nbytes
        self._held, self._held_bytes = [], 0

    def finish(self, offsets: NDArray[np.int64] | None = None) -> RowLists:
        """The lists, to be read. ``offsets``: those that :meth:`put` was given."""
        if offsets is None:
            self._flush()
            offsets = np.array(self._ends, np.int64)
        self.close()
        return RowLists(self.path, self.dtype, offsets)

    def close(self) -> None:
        if self._file is not None:
            self._disk.close(self._file)
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:  # an error came between
            self.close()
