"""The index of keys: their hashes ascending, the nodes that they are of, and where to begin in them.

Hashes are sorted range by range, each range in memory: those of a range are first brought together on disk,
where there is more than one. What has the same hash is compared as keys, so that a key that stands twice is
found, and two keys of one hash are not taken for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import node_dtype
from featstore.errors import SourceError
from featstore.packing.keys.spool import BLOCK_KEYS, HashRange, KeySpool, ScratchValues, bins_of
from featstore.packing.memory import of_share

__all__ = ["KeyIndex", "index_keys"]

#: Memory of a key while its range is sorted: hash and node as read, the order, both in that order, and work
#: space.
SORT_KEY_BYTES = 48
#: Keys for which there is one start, about.
_KEYS_PER_START = 128
_BITS_MAX = 40


@dataclass(frozen=True)
class KeyIndex:
    """``hashes`` and ``ids`` on scratch files, ``starts`` int64 [2**b + 1]."""

    hashes: ScratchValues
    ids: ScratchValues
    starts: NDArray[np.int64]

    def close(self) -> None:
        """Remove its files."""
        self.hashes.close(remove=True)
        self.ids.close(remove=True)


def index_keys(spool: KeySpool, memory_bytes: int) -> KeyIndex:
    """The index of all keys, which must differ. Raises SourceError that names a key that stands twice and
    its rows, BudgetError."""
    rows = len(spool)
    bits = min(_BITS_MAX, max(0, (rows // _KEYS_PER_START).bit_length() - 1))
    shift, starts = np.uint64(64 - bits), np.zeros(2**bits + 1, np.int64)
    left = memory_bytes - starts.nbytes
    with of_share(left, memory_bytes):
        ranges = spool.ranges(SORT_KEY_BYTES, left, f"sort the keys of {spool.name!r}")
    pairs = _brought_together(spool, ranges) if len(ranges) > 1 else None
    index = KeyIndex(spool.scratch("sorted", np.uint64), spool.scratch("ids", node_dtype(rows)), starts)
    first = 0
    for one in ranges:
        if pairs is None:
            hashes, ids = spool.hashes.read(0, rows), None
        else:
            read = pairs.read(2 * first, 2 * (first + one.keys)).reshape(-1, 2)
            hashes, ids = read[:, 0].copy(), read[:, 1].astype(np.int64)
            del read
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        ids = order if ids is None else ids[order]
        _refuse_twice(spool, hashes, ids)
        index.hashes.append(hashes)
        index.ids.append(ids)
        begins = (hashes >> shift).astype(np.int64) if bits else np.zeros(len(hashes), np.int64)
        starts[1:] += np.bincount(begins, minlength=2**bits)
        first += one.keys
    np.cumsum(starts, out=starts)
    if pairs is not None:
        pairs.close(remove=True)
    return index


def _brought_together(spool: KeySpool, ranges: list[HashRange]) -> ScratchValues:
    """(hash, node) of each key, those of one range after those of another, by node within each."""
    pairs = spool.scratch("pairs", np.uint64)
    range_of = np.repeat(np.arange(len(ranges)), [one.end - one.first for one in ranges])
    cursors = np.cumsum([0, *(one.keys for one in ranges)])[:-1]
    for low in range(0, len(spool), BLOCK_KEYS):
        hashes = spool.hashes.read(low, min(low + BLOCK_KEYS, len(spool)))
        own = range_of[bins_of(hashes)]
        order = np.argsort(own, kind="stable")
        block = np.stack([hashes[order], (low + order).astype(np.uint64)], axis=1)
        cuts = np.searchsorted(own[order], np.arange(len(ranges) + 1))
        for number, (a, b) in enumerate(pairwise(cuts.tolist())):
            if b > a:
                pairs.put(2 * int(cursors[number]), block[a:b])
                cursors[number] += b - a
    return pairs


def _refuse_twice(spool: KeySpool, hashes: NDArray[np.uint64], ids: NDArray[np.int64]) -> None:
    """Raise SourceError where two of these keys, by their hashes, are the same."""
    same = np.flatnonzero(hashes[1:] == hashes[:-1])
    begins = np.flatnonzero(np.diff(same, prepend=-2) > 1)
    for a, b in pairwise([*begins.tolist(), len(same)]):
        seen: dict[int | str, int] = {}
        for node in ids[same[a] : same[b - 1] + 2].tolist():
            key = spool.keys(node, node + 1).key(0)
            if key in seen:
                raise SourceError(
                    f"{spool.source}: key {key!r} is that of row {seen[key]:,} and of row {node:,}; a key "
                    "names one node: give each row one of its own"
                )
            seen[key] = node
