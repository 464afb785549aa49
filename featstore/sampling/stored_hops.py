"""A mini-batch under way that is sampled from disk: its hops, its scratch, and the pages that it keeps from
hop to hop."""

from __future__ import annotations

from collections import defaultdict

from featstore.reader.reader import Reader
from featstore.sampling.pages import MISSING_BYTES, KeptPages, Missing
from featstore.sampling.picking import table_size
from featstore.sampling.under_way import Scratch

#: What a mini-batch keeps takes one part in so many of what is free for it, at most.
_KEPT_SHARE = 8


def hop_bytes(
    count: int, nodes_max: int, slot_bytes: int, edges: int, picks: int, neighbour_bytes: int
) -> int:
    """What a hop of ``edges`` takes beyond what will be the result: at most, whatever the cache holds.
    ``count``: nodes there are, ``nodes_max``: with the new ones, at most."""
    # The table and the rows grow into new ones; the old ones go afterwards.
    room_bytes = 8 * (nodes_max + count) + table_size(nodes_max) * slot_bytes * 3 // 2
    # Missing edges: their keys and positions, what was read.
    reading_bytes = edges * (MISSING_BYTES + neighbour_bytes) + 16 * table_size(max(1, picks))
    return room_bytes + reading_bytes


class HopPages:
    """What a mini-batch under way reads: the pages that it keeps, by table, within its scratch, and how many
    edges it ``asked`` for and had ``cached``."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch, self._hop_bytes = scratch, 0
        self._kept: defaultdict[str, list[KeptPages]] = defaultdict(list)
        self.asked = self.cached = 0  # edges

    @property
    def _kept_bytes(self) -> int:
        return sum(one.memory_bytes for kept in self._kept.values() for one in kept)

    def reserve(self, what: str, hop_bytes: int) -> None:
        """Have scratch for a hop, to do ``what``; pages that are kept go where there is no room for both.
        Raises as that does."""
        under_way, self._hop_bytes = self._scratch.of, hop_bytes
        if self._kept and not under_way.try_reserve(self._scratch, hop_bytes + self._kept_bytes):
            self._kept.clear()
        self._scratch.reserve(hop_bytes, what)

    def reserve_more(self, what: str, more_bytes: int) -> None:
        """Have so much beside that. Raises as that does."""
        self.reserve(what, self._hop_bytes + more_bytes)

    def reserve_lists(self, what: str, least_bytes: int, most_bytes: int) -> int:
        """Have scratch for lists that are looked at whole, beside the hop: ``most_bytes`` if that is not much
        of what is free, and ``least_bytes`` in any case. Returns how much. Raises as that does."""
        under_way, taken_bytes = self._scratch.of, self._hop_bytes + self._kept_bytes
        share_bytes = (under_way.free_bytes - taken_bytes) // _KEPT_SHARE
        room_bytes = max(least_bytes, min(most_bytes, share_bytes))
        if not under_way.try_reserve(self._scratch, taken_bytes + room_bytes):
            self._kept.clear()
            room_bytes = least_bytes
            self._scratch.reserve(self._hop_bytes + room_bytes, f"{what}, with its longest list whole")
        self._hop_bytes += room_bytes
        return room_bytes

    def read(self, missing: Missing, reader: Reader, table: str, *, last: bool) -> None:
        """Have what is missing of a hop, after the ``last`` of which the table's pages are not kept. Raises
        CorruptionError, DeviceError, ClosedError."""
        for kept in self._kept[table]:
            missing.take(kept)
        if last:
            del self._kept[table]
        else:
            self._keep(missing, reader, table)
        missing.read(reader, table)

    def end(self) -> None:
        """Keep nothing any more."""
        self._kept.clear()

    def _keep(self, missing: Missing, reader: Reader, table: str) -> None:
        """Read what is missing by whole pages, as far as there is room, and keep these; those between, too,
        that are read through."""
        under_way, taken_bytes = self._scratch.of, self._hop_bytes + self._kept_bytes
        room_bytes = (under_way.free_bytes - self._hop_bytes) // _KEPT_SHARE - self._kept_bytes
        pages = missing.first_pages(KeptPages.fitting(room_bytes), reader.model.gap_pages_max)
        if len(pages) and under_way.try_reserve(self._scratch, taken_bytes + KeptPages.bytes_of(len(pages))):
            kept = KeptPages(reader, table, pages, missing.dtype)
            missing.take(kept)
            self._kept[table].append(kept)
