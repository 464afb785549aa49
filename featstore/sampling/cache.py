"""The neighbour cache: all neighbours where there is room for them; else the lists of the most wanted hubs,
which a store has side by side a second time, and in the rest of the room the lists of the first rows.

The table of neighbours has 4 bytes an edge, so it often fits where a graph that is made for sampling in
memory does not; and where a part of it does, that much less is read, because mini-batches ask all over it.

**Hubs.** A bitmap with ranks (:mod:`featstore.tiers.static`) tells who is in it, and it is filled by one
sequential read of ``GRAPH/hubs``. (Ginex, VLDB 2022, too keeps the lists that are asked most.) Expect no
wonders of it: a hub is asked often, but of its long list only ``fanout`` places each time, so on an
undirected graph a cache of a tenth of all lists serves about a tenth of the edges, and less of large mini-
batches, which ask each hub once. Where the fan-out is -1 it serves more than its share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.bitmap import set_bits
from featstore.base.checks import check_offsets, check_range
from featstore.base.dtypes import dtype_from_name
from featstore.errors import FormatError
from featstore.reader.reader import Reader
from featstore.tiers.static import MEMBERS_MAX, StaticRows

if TYPE_CHECKING:
    from featstore.storage.store import StoredGraph

_HUB_BYTES = 64  # of the cache for each hub, beside its list, also while the index is made
_LOADING_BYTES = 5 * 2**20  # what loading an array takes besides the array
_STEP_EDGES = 2**24  # whose reads are planned at once
NO_MAP = np.empty(0, np.int32)


@dataclass(frozen=True)
class HubIndex:
    """Which lists a cache holds and where: ``rows``, the most wanted first; ``bits`` and ``ranks`` find a row
    among them in ascending order, and the list of the i-th in that order begins at ``starts[i]``."""

    rows: NDArray[Any]
    bits: NDArray[np.uint64]
    ranks: NDArray[np.int32]
    starts: NDArray[np.int64]


_NO_HUBS = HubIndex(NO_MAP, np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.int64))


class NeighbourCache:
    """The neighbours of the first edges, ``first``, and the lists of the most wanted hubs, one after the
    other in ``lists`` (not without ``hubs``). It is filled once and can only become smaller."""

    def __init__(self, graph: StoredGraph, offsets: NDArray[np.int64], *, hubs: bool = True) -> None:
        self._graph, self._with_hubs, self.table = graph, hubs, f"{graph.name}/sources"
        self._offsets = offsets
        # while it is made anew, there are two
        self._index_bytes = 2 * StaticRows.index_bytes(graph.table.rows)
        entry = graph.entry  # which may have int64 where int32 would do
        self.first = np.empty(0, dtype_from_name(entry.sources.dtype))
        self.lists = np.empty(0, dtype_from_name((entry.hubs.sources if entry.hubs else entry.sources).dtype))
        self.index = _NO_HUBS

    @property
    def memory_bytes(self) -> int:
        """What the cache takes, also while it is being cut."""
        return self.first.nbytes + self._hubs_bytes

    @property
    def _hubs_bytes(self) -> int:
        hubs = len(self.index.rows)
        return self.lists.nbytes + hubs * _HUB_BYTES + self._index_bytes if hubs else 0

    @property
    def whole(self) -> bool:
        """Whether all neighbours are held."""
        return len(self.first) == self._graph.edges

    def fill(self, reader: Reader, room_bytes: int) -> None:
        """Take what fits into ``room_bytes``. Raises CorruptionError, DeviceError, FormatError."""
        if self._with_hubs and self._graph.edges * self.first.itemsize > room_bytes:
            self._fill_hubs(reader, room_bytes)
        count = min(self._graph.edges, max(0, room_bytes - self._hubs_bytes) // self.first.itemsize)
        first, table = np.empty(count, self.first.dtype), self.table
        for low in range(0, count, _STEP_EDGES):
            high = min(low + _STEP_EDGES, count)
            reader.read_runs({table: [(low, high)]}, out={table: first[low:high]})
        self.first = first

    def _fill_hubs(self, reader: Reader, room_bytes: int) -> None:
        """Take the most wanted hubs, as many as fit."""
        hubs = self._graph.entry.hubs
        if hubs is None:
            return
        loading_bytes = min(_LOADING_BYTES, 8 * (self._graph.hubs + 1))
        count_max = min(
            self._graph.hubs, MEMBERS_MAX, (room_bytes - self._index_bytes - loading_bytes) // _HUB_BYTES
        )
        if count_max <= 0:
            return
        store, name = reader.store, self._graph.name
        ends = store.load(hubs.offsets, count_max + 1)
        if ends[-1] > hubs.sources.rows:
            raise FormatError(
                f"the offsets of the hubs of graph {name!r} contradict themselves; pack the store again"
            )
        check_offsets(ends, 0, int(ends[-1]), f"the offsets of the hubs of graph {name!r} of {store.path}")
        count = self._fitting(ends, room_bytes)
        rows = store.load(hubs.rows, count)
        check_range(rows, self._graph.table.rows, f"a hub of graph {name!r} of {store.path}")
        if not np.array_equal(self._ends(rows), ends[: count + 1]):
            raise FormatError(
                f"the hubs of graph {name!r} have lists of another length there; pack the store again"
            )
        ends = ends[: count + 1].copy()
        index = self._index(rows)
        lists = np.empty(ends[-1], self.lists.dtype)
        table = f"{name}/hubs"
        reader.read_runs({table: [(0, len(lists))]}, out={table: lists})
        self.lists, self.index = lists, index

    def cut(self, room_bytes: int) -> None:
        """Keep what fits into ``room_bytes``: the most wanted hubs, and in the rest the first edges."""
        if self._hubs_bytes > room_bytes:
            self._cut_hubs(room_bytes)
        count = max(0, room_bytes - self._hubs_bytes) // self.first.itemsize
        if count < len(self.first):
            self.first.resize(count, refcheck=False)

    def _cut_hubs(self, room_bytes: int) -> None:
        rows = self.index.rows
        ends = self._ends(rows)
        count = self._fitting(ends, room_bytes)
        # The index first: whatever interrupts, it never names a list that is gone.
        self.index = self._index(rows[:count].copy())
        self.lists.resize(ends[count], refcheck=False)

    def _fitting(self, ends: NDArray[np.int64], room_bytes: int) -> int:
        """How many hubs fit, whose lists end at ``ends[1:]``."""
        cost = np.arange(len(ends)) * _HUB_BYTES
        cost += ends * self.lists.itemsize
        return max(0, int(np.searchsorted(cost, room_bytes - self._index_bytes, side="right")) - 1)

    def _ends(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """int64 [rows + 1]: where the list of each row begins and ends, when they stand one after the
        other."""
        ends = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(self._offsets[rows + 1] - self._offsets[rows], out=ends[1:])
        return ends

    def _index(self, rows: NDArray[Any]) -> HubIndex:
        if len(rows) == 0:
            return _NO_HUBS
        words = -(-self._graph.table.rows // 64)
        bits, ranks = np.zeros(words, np.uint64), np.zeros(words, np.int32)
        if set_bits(rows.astype(np.int64), bits, ranks) != len(rows):
            raise FormatError(f"a hub of graph {self._graph.name!r} stands there twice; pack the store again")
        return HubIndex(rows, bits, ranks, self._ends(rows)[np.argsort(rows)])
