"""Keys of nodes that have no rows of their own: numbered in the order in which they first appear.

Distinct keys are gathered in a table in memory, over one range of hashes at a time. It begins with all of
them; where the table would outgrow the memory, the upper half of its range is left to a later pass over the
keys. What each pass found stands in the order of first appearance, and the passes are merged by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.keys import KeyBlock, KeyKind, joined_keys
from featstore.errors import BudgetError, SourceError
from featstore.packing.keys.spool import BINS, BLOCK_KEYS, KeySpool, ScratchValues, bins_of
from featstore.storage.disk import Disk

__all__ = ["number_appearing"]

#: Memory of a key while it is gathered, beside its own bytes: hash, end, first place, slots, and all of these
#: once more while they grow.
_KEY_BYTES = 96
_ROOM_MIN = 1 << 10
_MERGE_KEYS = 1 << 14


@njit(cache=True, nogil=True)
def add_keys(
    hashes: NDArray[np.uint64], data: NDArray[np.uint8], ends: NDArray[np.int64], first: int, begin: int,
    slots: NDArray[np.int64], own_hashes: NDArray[np.uint64], own: NDArray[np.uint8],
    own_ends: NDArray[np.int64], places: NDArray[np.int64], count: int,
) -> tuple[int, int]:  # fmt: skip
    """Add those keys from ``begin`` on that are not there yet; ``places`` gets ``first`` and the key's number
    in the block. Returns (the first key that found no room, how many keys there are)."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(begin, hashes.shape[0]):
        length = ends[i + 1] - ends[i]
        at = hashes[i] & mask
        known = False
        while slots[at] >= 0 and not known:
            key = slots[at]
            if own_hashes[key] == hashes[i] and own_ends[key + 1] - own_ends[key] == length:
                k = 0
                while k < length and own[own_ends[key] + k] == data[ends[i] + k]:
                    k += 1
                known = k == length
            if not known:
                at = (at + np.uint64(1)) & mask
        if known:
            continue
        if count == own_hashes.shape[0] or own_ends[count] + length > own.shape[0]:
            return i, count
        for k in range(length):
            own[own_ends[count] + k] = data[ends[i] + k]
        own_ends[count + 1] = own_ends[count] + length
        own_hashes[count], places[count], slots[at] = hashes[i], first + i, count
        count += 1
    return hashes.shape[0], count


class _Gathered:
    """Distinct keys in the order in which they came, with the place of each."""

    def __init__(self, keys: int, key_bytes: int) -> None:
        self.count = 0
        self.hashes, self.places = np.empty(keys, np.uint64), np.empty(keys, np.int64)
        self.data, self.ends = np.empty(key_bytes, np.uint8), np.zeros(keys + 1, np.int64)
        self._slots = np.full(1 << (2 * keys - 1).bit_length(), -1)

    @property
    def memory_bytes(self) -> int:
        """What one of twice the size takes beside it."""
        return _KEY_BYTES * len(self.hashes) + 3 * len(self.data)

    def add(self, block: KeyBlock, hashes: NDArray[np.uint64], places: NDArray[np.int64], begin: int) -> int:
        """Add keys from ``begin`` on; returns the first that found no room, or their number."""
        stopped, count = add_keys(
            hashes, *block.as_bytes(), 0, begin, self._slots, self.hashes, self.data, self.ends, self.places,
            self.count,
        )  # fmt: skip
        self.places[self.count : count] = places[self.places[self.count : count]]
        self.count = count
        return int(stopped)

    def keys(self, kind: KeyKind) -> KeyBlock:
        """The keys that there are."""
        ends = self.ends[: self.count + 1]
        data = self.data[: ends[-1]]
        return KeyBlock(data, ends) if kind == "utf8" else KeyBlock(data.view(np.int64))

    def moved(self, keys: int, key_bytes: int, taken: NDArray[np.int64], kind: KeyKind) -> _Gathered:
        """Some of its keys in one of another size."""
        new = _Gathered(keys, key_bytes)
        new.add(self.keys(kind).take(taken), self.hashes[taken], self.places[taken], 0)
        return new


def number_appearing(
    passes: Callable[[], Iterator[KeyBlock]], disk: Disk, folder: Path, name: str, source: str,
    memory_bytes: int,
) -> KeySpool:  # fmt: skip
    """The distinct keys of all that ``passes()`` gives, each time the same, in the order of their first
    appearance, on scratch files in ``folder``. Raises SourceError for keys of two kinds, BudgetError,
    DiskFullError, DeviceError."""
    runs: list[tuple[KeySpool, ScratchValues]] = []
    first, least = 0, _Gathered(_ROOM_MIN, 16 * _ROOM_MIN).memory_bytes
    if least > memory_bytes:
        raise BudgetError(least, memory_bytes, f"number the keys of {name!r}")
    while first < BINS:
        found, kind, end = _gathered(passes(), name, source, memory_bytes, first)
        spool = KeySpool(disk, folder, f"{name}.run{len(runs)}", kind, source)
        order = spool.scratch("order", np.int64)
        for low in range(0, found.count, BLOCK_KEYS):
            high = min(low + BLOCK_KEYS, found.count)
            spool.append(found.keys(kind).part(low, high), found.hashes[low:high])
            order.append(found.places[low:high])
        runs.append((spool, order))
        first = end
        del found
    merged = KeySpool(disk, folder, name, runs[0][0].kind, source)
    for block, hashes in _merged(runs):
        merged.append(block, hashes)
    for spool, order in runs:
        spool.close()
        order.close(remove=True)
    return merged


def _gathered(
    blocks: Iterator[KeyBlock], name: str, source: str, memory_bytes: int, first: int
) -> tuple[_Gathered, KeyKind, int]:
    """(distinct keys of the bins from ``first`` on, their kind, the bin that they end before)."""
    found, kind, end, done = _Gathered(_ROOM_MIN, 16 * _ROOM_MIN), None, BINS, 0
    for whole in blocks:
        if kind not in (None, whole.kind) and len(whole):
            raise SourceError(
                f"{source}: keys of {name!r} are numbers and strings; those of a type of nodes are of one "
                "kind"
            )
        kind = whole.kind if len(whole) else kind
        for low in range(0, len(whole), BLOCK_KEYS):
            block = whole.part(low, min(low + BLOCK_KEYS, len(whole)))
            hashes, places, at = block.hashes(), np.arange(done, done + len(block)), 0
            done += len(block)
            while at < len(block):
                bins = bins_of(hashes)
                taken = np.flatnonzero((bins >= first) & (bins < end))
                if len(taken) < len(block):
                    at = int(np.searchsorted(taken, at))
                    block, hashes, places = block.take(taken), hashes[taken], places[taken]
                at = found.add(block, hashes, places, at)
                if at < len(block):
                    assert kind is not None
                    found, end = _more_room(found, kind, memory_bytes, first, end, name)
    return found, kind or "int64", end


def _more_room(
    found: _Gathered, kind: KeyKind, memory_bytes: int, first: int, end: int, name: str
) -> tuple[_Gathered, int]:
    """The same keys in twice the room; or, where that is too much, those of the lower half of the range."""
    keys, key_bytes = len(found.hashes), len(found.data)
    everything = np.arange(found.count)
    if 2 * found.memory_bytes <= memory_bytes:
        return found.moved(2 * keys, 2 * key_bytes, everything, kind), end
    bins = bins_of(found.hashes[: found.count])
    middle = max(first + 1, int(np.median(bins)))
    if middle >= end or end - first <= 1:
        raise BudgetError(2 * found.memory_bytes, memory_bytes, f"number the keys of {name!r}")
    return found.moved(keys, key_bytes, everything[bins < middle], kind), middle


def _merged(runs: list[tuple[KeySpool, ScratchValues]]) -> Iterator[tuple[KeyBlock, NDArray[np.uint64]]]:
    """(keys, hashes) of all runs, by the places where they first stood."""
    at = [0] * len(runs)
    while True:
        heads = [
            order.read(low, min(low + _MERGE_KEYS, len(spool)))
            for low, (spool, order) in zip(at, runs, strict=True)
        ]
        # Up to here every run has been read: what it has beyond stands later.
        unread = [
            head[-1]
            for head, low, (spool, _) in zip(heads, at, runs, strict=True)
            if low + len(head) < len(spool)
        ]
        limit = min(unread, default=np.iinfo(np.int64).max)
        counts = [int(np.searchsorted(head, limit, side="right")) for head in heads]
        if not sum(counts):
            return
        taken = enumerate(zip(runs, at, counts, strict=True))
        parts = [(k, spool, low, n) for k, ((spool, _), low, n) in taken if n]
        block = joined_keys([spool.keys(low, low + n) for _, spool, low, n in parts])
        hashes = np.concatenate([spool.hashes.read(low, low + n) for _, spool, low, n in parts])
        by_place = np.argsort(np.concatenate([heads[k][:n] for k, _, _, n in parts]))
        yield block.take(by_place), hashes[by_place]
        at = [low + n for low, n in zip(at, counts, strict=True)]
