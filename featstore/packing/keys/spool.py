"""The keys of a type of nodes on scratch files, in the order of their ids.

They are written once, as they come, with a hash of each; what is then made of them (an index on disk, tables
in memory to look edges up in) takes ranges of hashes, as many as it takes for one to fit the memory. How many
keys, and how many bytes of them, have which upper bits of their hash is counted on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.files import RegularFile
from featstore.base.keys import KeyBlock, KeyKind
from featstore.errors import BudgetError
from featstore.storage.disk import Disk, File

__all__ = ["KeySpool", "ScratchValues"]

#: Keys that are read together from scratch files.
BLOCK_KEYS = 1 << 16
BIN_BITS = 14
BINS = 1 << BIN_BITS
_BIN_SHIFT = np.uint64(64 - BIN_BITS)


class ScratchValues:
    """Values on a scratch file that are appended, or written in place, and read again by runs."""

    def __init__(self, disk: Disk, path: Path, dtype: Any) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self.count = 0
        self._disk = disk
        self._file: File | None = disk.create(path)
        self._reading: RegularFile | None = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:  # an error came between
            self.close()

    def append(self, values: NDArray[Any]) -> None:
        """Add values at the end."""
        self.put(self.count, values)

    def put(self, place: int, values: NDArray[Any]) -> None:
        """Write values from number ``place`` on."""
        assert self._file is not None
        data = np.ascontiguousarray(values, self.dtype)
        if data.size:
            self._disk.write(self._file, place * self.dtype.itemsize, data.reshape(-1).view(np.uint8))
        self.count = max(self.count, place + data.size)

    def read(self, low: int, high: int) -> NDArray[Any]:
        """Values ``low`` to ``high``, in memory of their own."""
        if self._reading is None:
            self._reading = RegularFile(self.path)
        out = np.empty(high - low, self.dtype)
        self._reading.read_into(out, low * self.dtype.itemsize)
        return out

    def blocks(self, count: int) -> Iterator[NDArray[Any]]:
        """All of them, so many at a time."""
        return (self.read(low, min(low + count, self.count)) for low in range(0, self.count, count))

    def close(self, *, remove: bool = False) -> None:
        """Give the descriptors back. May be called more than once."""
        file, self._file = self._file, None
        if file is not None:
            self._disk.close(file)
        if self._reading is not None:
            self._reading.close()
            self._reading = None
        if remove:
            self._disk.unlink(self.path)


@dataclass(frozen=True)
class HashRange:
    """Bins ``first`` to ``end`` of hashes: ``keys`` keys of ``key_bytes`` bytes."""

    first: int
    end: int
    keys: int
    key_bytes: int

    def has(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of some hashes are in the range."""
        bins = bins_of(hashes)
        return (bins >= self.first) & (bins < self.end)


def bins_of(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The bin of each hash, by its upper bits."""
    return (hashes >> _BIN_SHIFT).astype(np.int64)


class KeySpool:
    """Keys of one kind, those of nodes 0, 1, ...: ``name`` is what messages call their type of nodes,
    ``source`` where they came from. Files are ``NAME.key-...`` in ``folder``."""

    def __init__(self, disk: Disk, folder: Path, name: str, kind: KeyKind, source: str) -> None:
        self.disk, self.folder, self.name, self.kind, self.source = disk, folder, name, kind, source
        text = kind == "utf8"
        self.values = self.scratch("values", np.uint8 if text else np.int64)
        self.ends = self.scratch("ends", np.int64) if text else None
        self.hashes = self.scratch("hashes", np.uint64)
        self._counts, self._bytes = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)

    def scratch(self, what: str, dtype: Any) -> ScratchValues:
        """A scratch file of these keys."""
        return ScratchValues(self.disk, self.folder / f"{self.name}.key-{what}", dtype)

    def __len__(self) -> int:
        return self.hashes.count

    @property
    def key_bytes(self) -> int:
        """Bytes of all keys."""
        return int(self.values.count * self.values.dtype.itemsize)

    def append(self, block: KeyBlock, hashes: NDArray[np.uint64]) -> None:
        """The keys of the next nodes, and their hashes."""
        if self.ends is not None:
            assert block.offsets is not None
            self.ends.append(block.offsets[1:] + self.values.count)
        lengths = np.full(len(block), 8) if block.offsets is None else np.diff(block.offsets)
        self.values.append(block.values)
        self.hashes.append(hashes)
        bins = bins_of(hashes)
        self._counts += np.bincount(bins, minlength=BINS)
        self._bytes += np.bincount(bins, lengths, minlength=BINS).astype(np.int64)

    def keys(self, low: int, high: int) -> KeyBlock:
        """The keys of nodes ``low`` to ``high``."""
        if self.ends is None:
            return KeyBlock(self.values.read(low, high))
        before = self.ends.read(low - 1, low) if low else np.zeros(1, np.int64)
        ends = np.concatenate([before, self.ends.read(low, high)])
        return KeyBlock(self.values.read(int(ends[0]), int(ends[-1])), ends - ends[0])

    def blocks(self) -> Iterator[tuple[int, KeyBlock, NDArray[np.uint64]]]:
        """(the first node, keys, hashes), in the order of the nodes."""
        for low in range(0, len(self), BLOCK_KEYS):
            high = min(low + BLOCK_KEYS, len(self))
            yield low, self.keys(low, high), self.hashes.read(low, high)

    def ranges(self, key_bytes: int, memory_bytes: int, what: str) -> list[HashRange]:
        """All hashes in ranges, each of which takes at most the memory: the keys' bytes where ``key_bytes``
        is negative and ``-key_bytes`` more a key, else ``key_bytes`` a key. Raises BudgetError where not even
        one bin fits."""
        cost = self._counts * abs(key_bytes) + (self._bytes if key_bytes < 0 else 0)
        if int(cost.max(initial=0)) > memory_bytes:
            raise BudgetError(int(cost.max()), memory_bytes, what)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(cost)])
        cuts = [0]
        while cuts[-1] < BINS:
            cuts.append(int(np.searchsorted(ends, ends[cuts[-1]] + memory_bytes, side="right")) - 1)
        return [
            HashRange(a, b, int(self._counts[a:b].sum()), int(self._bytes[a:b].sum()))
            for a, b in pairwise(cuts)
        ]

    def close(self) -> None:
        """Remove its files."""
        for values in (self.values, self.ends, self.hashes):
            if values is not None:
                values.close(remove=True)
