"""Numbers of a store as a scrub reads them: runs of elements, from files that are known to be there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import dtype_from_name
from featstore.base.files import RegularFile
from featstore.storage.manifest import ArrayEntry, TableEntry, array_chunk


class Numbers:
    """A vector on disk, a table of numbers or a small array, read by runs of elements."""

    PIECE = 1 << 17  # of them looked at together

    def __init__(self, store: Path, entry: TableEntry | ArrayEntry) -> None:
        self.dtype = dtype_from_name(entry.dtype)
        self._store = store
        if isinstance(entry, TableEntry):
            self.count, self._per_file = entry.rows, entry.rows_per_chunk
            self.paths = [entry.chunk_path(chunk) for chunk in range(entry.layout.chunks)]
        else:
            self.count, self._per_file = entry.shape[0], max(1, entry.shape[0])
            self.paths = [path for path in [array_chunk(entry)] if path is not None]

    def place(self, index: int) -> tuple[str, int]:
        """The file and the byte of an element."""
        file, within = divmod(index, self._per_file)
        return self.paths[file], within * self.dtype.itemsize

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Elements [first, first + count), or as many of them as there are. Raises CorruptionError where a
        file has been changed meanwhile, DeviceError."""
        count = max(0, min(count, self.count - first))
        out = np.empty(count, self.dtype)
        done = 0
        while done < count:
            path, offset = self.place(first + done)
            run = min(count - done, self._per_file - (first + done) % self._per_file)
            with RegularFile(self._store / path, advice="it was changed meanwhile; verify again") as file:
                file.read_into(out[done : done + run], offset)
            done += run
        return out

    def pieces(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, NDArray[Any]]]:
        """(first element, elements), in order."""
        end = self.count if end is None else end
        for at in range(first, end, self.PIECE):
            yield at, self.read(at, min(self.PIECE, end - at))

    def take(self, ascending: NDArray[np.int64]) -> NDArray[np.int64]:
        """The elements of these numbers, which ascend: the pieces that hold any are read once, in order. Of
        floats the bits."""
        bits = self.dtype if self.dtype.kind != "f" else np.dtype(f"i{self.dtype.itemsize}")
        out = np.empty(len(ascending), np.int64)
        piece = ascending // self.PIECE
        starts = np.flatnonzero(np.diff(piece, prepend=-1)).tolist()
        for low, high in pairwise([*starts, len(piece)]):
            first, last = int(ascending[low]), int(ascending[high - 1])
            out[low:high] = self.read(first, last - first + 1).view(bits)[ascending[low:high] - first]
        return out
