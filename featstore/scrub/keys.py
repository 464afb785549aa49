"""Scrubbing keys: what their numbers mean, after every page of them has been found to be as it was written.

Offsets cut the bytes into strings of UTF-8; the hashes of the index ascend, the nodes of equal ones too, and
starts count them. That the index has each key's own hash, and each key once, is seen by the sum of hashes of
(hash, node), which is the same over the keys, as they stand, and over the index. Of keys with one hash the
keys themselves are read: no two may be the same. All passes are sequential but the last, which is rare.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import find_fall
from featstore.base.hashing import mix64
from featstore.base.keys import KEY_BYTES_MAX, KeyBlock, find_no_utf8
from featstore.scrub.numbers import Numbers
from featstore.scrub.report import Findings
from featstore.storage.manifest import KeysEntry

#: Strings that are looked at together, and their bytes, about.
_PIECE_KEYS, _PIECE_BYTES = 1 << 14, 8 << 20
#: Keys of one hash that are compared with each other.
_SAME_MAX = 1 << 12


class _KeysScrub:
    """The checks of one table's keys."""

    def __init__(self, findings: Findings, entry: KeysEntry) -> None:
        self._findings, self._entry = findings, entry
        parts = {part: Numbers(findings.store, table) for part, table in entry.parts.items()}
        self._values, self._hashes, self._ids = parts["values"], parts["hashes"], parts["ids"]
        self._starts, self._offsets = parts["starts"], parts.get("offsets")
        self._whole = all(findings.intact(path) for numbers in parts.values() for path in numbers.paths)

    def run(self) -> None:
        if not self._whole or not self._cut():
            return
        of_keys = self._of_keys()
        of_index = self._of_index()
        if of_keys is not None and of_index is not None and of_keys != of_index:
            self._say(self._hashes, 0, "the hashes of the keys, each with its node", "others")

    def _say(self, numbers: Numbers, index: int, expected: str, actual: object) -> None:
        path, offset = numbers.place(index) if numbers.count else (self._entry.values.path, 0)
        self._findings.problem("keys", path, expected, actual, offset)

    def _cut(self) -> bool:
        """Whether the offsets cut the bytes into strings; the first that does not is reported."""
        if self._offsets is None:
            return True
        last, end = 0, self._values.count
        for first, values in self._offsets.pieces():
            steps = np.concatenate([np.array([last]), values])
            at = int(find_fall(steps))
            if at < 0:
                long = np.flatnonzero(np.diff(steps) > KEY_BYTES_MAX)
                at = int(long[0]) + 1 if len(long) else -1
            if at < 0 and first == 0 and values[0] != 0:
                at = 1
            if at >= 0:
                expected = f"an offset from {int(steps[at - 1]):,} to {int(steps[at - 1]) + KEY_BYTES_MAX:,}"
                self._say(self._offsets, first + at - 1, expected, steps[at])
                return False
            last = int(values[-1])
        if last != end:
            self._say(self._offsets, self._offsets.count - 1, f"offsets that end with {end:,}", last)
        return last == end

    def _blocks(self) -> Iterator[tuple[int, KeyBlock]]:
        """(first node, keys), in the order of the nodes."""
        if self._offsets is None:
            yield from ((first, KeyBlock(values)) for first, values in self._values.pieces())
            return
        first, rows = 0, self._offsets.count - 1
        while first < rows:
            ends = self._offsets.read(first, _PIECE_KEYS + 1)
            count = int(np.searchsorted(ends, int(ends[0]) + _PIECE_BYTES, side="right")) - 1
            ends = ends[: max(2, count + 1)]
            values = self._values.read(int(ends[0]), int(ends[-1] - ends[0]))
            yield first, KeyBlock(values, ends - ends[0])
            first += len(ends) - 1

    def _of_keys(self) -> int | None:
        total = 0
        for first, block in self._blocks():
            bad = -1 if block.offsets is None else int(find_no_utf8(block.values, block.offsets))
            if bad >= 0 and self._offsets is not None:
                place = int(self._offsets.read(first + bad, 1)[0])
                self._say(self._values, place, "a key of UTF-8", f"other bytes, of node {first + bad:,}")
                return None
            total += _digest(block.hashes(), np.arange(first, first + len(block)))
        return total % 2**64

    def _of_index(self) -> int | None:
        """The digest of the index, where it is one by itself."""
        total, nodes = 0, self._hashes.count
        bits = (self._starts.count - 1).bit_length() - 1
        last_hash, last_id = np.uint64(0), -1
        for first, hashes in self._hashes.pieces():
            ids = self._ids.read(first, len(hashes)).astype(np.int64)
            for at in np.flatnonzero((ids < 0) | (ids >= nodes))[:1].tolist():
                self._say(self._ids, first + at, f"nodes from 0 to {nodes - 1:,}", ids[at])
                return None
            before = np.concatenate([np.array([last_hash]), hashes[:-1]])
            before_ids = np.concatenate([np.array([last_id]), ids[:-1]])
            same = (hashes == before) & (before_ids >= 0)
            for at in np.flatnonzero((hashes < before) | (same & (ids <= before_ids)))[:1].tolist():
                self._say(
                    self._hashes, first + at, "hashes that ascend, and nodes among equal ones", hashes[at]
                )
                return None
            for at in np.flatnonzero(same)[:_SAME_MAX].tolist():
                if not self._differ(first + at, hashes[at]):
                    return None
            total += _digest(hashes, ids)
            last_hash, last_id = hashes[-1], int(ids[-1])
        return total % 2**64 if self._started(bits) else None

    def _differ(self, place: int, word: np.uint64) -> bool:
        """Whether the key at a place of the index differs from those of the same hash before it."""
        low = max(0, place - _SAME_MAX)
        before = np.flatnonzero(self._hashes.read(low, place - low) == word) + low
        own = int(self._ids.read(place, 1)[0])
        for at in before.tolist():
            other = int(self._ids.read(at, 1)[0])
            if self._key(own) == self._key(other):
                found = f"node {other:,} and node {own:,} with one key"
                self._say(self._ids, place, "keys that differ", found)
                return False
        return True

    def _key(self, node: int) -> bytes:
        if self._offsets is None:
            return self._values.read(node, 1).tobytes()
        begin, end = self._offsets.read(node, 2).tolist()
        return self._values.read(begin, end - begin).tobytes()

    def _started(self, bits: int) -> bool:
        """Whether the starts count the hashes by their upper bits."""
        at = 0
        for first, hashes in chain(self._hashes.pieces(), [(self._hashes.count, np.empty(0, np.uint64))]):
            final = len(hashes) == 0
            upper = (
                (hashes >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(hashes), np.int64)
            )
            stop = self._starts.count if final else int(upper[-1]) + 1
            while at < stop:
                run = self._starts.read(at, min(stop - at, Numbers.PIECE))
                wanted = first + np.searchsorted(upper, np.arange(at, at + len(run)), side="left")
                for k in np.flatnonzero(run != wanted)[:1].tolist():
                    self._say(self._starts, at + k, f"{int(wanted[k]):,} hashes before", run[k])
                    return False
                at += len(run)
        return True


def _digest(hashes: NDArray[np.uint64], nodes: NDArray[np.int64]) -> int:
    """Sum of the hashes of (hash, node): equal for equal sets of pairs, whatever their order."""
    return int(mix64(mix64(nodes.astype(np.uint64)) + hashes).sum(dtype=np.uint64))


def scrub_keys(findings: Findings, entry: KeysEntry) -> None:
    """Report what is wrong with the keys of a table; see the module's text. What holds faulty or unreadable
    files is left out: that has been said, and what follows from it is not known."""
    _KeysScrub(findings, entry).run()
