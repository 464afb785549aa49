"""The lists of one graph in a store, as samplers from disk look at them: their offsets in memory, neighbours
and numbers of edges as far as there is room for them, and the tables that the others are read from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import check_offsets
from featstore.errors import FormatError
from featstore.reader.reader import Reader
from featstore.sampling.cache import NeighbourCache
from featstore.sampling.edge_ids import StoredEdgeIds, wants_edge_ids
from featstore.sampling.pages import Missing
from featstore.sampling.picking import count_asking, hop_size, pick_hop
from featstore.sampling.stored_hops import HopPages

if TYPE_CHECKING:
    from featstore.storage.store import StoredGraph


class ListsOnDisk:
    """Of ``graph``: ``tables`` are those that are read, ``ids`` the numbers of its edges, where these are
    wanted (``edge_ids``, see :func:`~featstore.sampling.edge_ids.wants_edge_ids`). :meth:`open` fills
    ``offsets`` int64 [rows + 1] and makes the ``cache``, which is empty then."""

    def __init__(self, graph: StoredGraph, edge_ids: bool | None) -> None:
        self.graph = graph
        self.ids = StoredEdgeIds(graph) if wants_edge_ids(graph, edge_ids) else None
        self.sources, self._hubs, self._offsets_table = (
            f"{graph.name}/{part}" for part in ("sources", "hubs", "offsets")
        )
        self.tables = [self.sources, self._offsets_table] + [self._hubs] * (graph.entry.hubs is not None)
        self.tables += [] if self.ids is None else [self.ids.table]
        self.close()

    def close(self) -> None:
        """Hold nothing."""
        self.offsets: NDArray[np.int64] = np.zeros(1, np.int64)
        self.cache = NeighbourCache(self.graph, self.offsets)
        if self.ids is not None:
            self.ids.cut(0)

    @property
    def offsets_bytes(self) -> int:
        """What its offsets take."""
        return 8 * (self.graph.table.rows + 1)

    @property
    def whole_bytes(self) -> int:
        """What all neighbours and numbers of edges take."""
        store, names = self.graph.store, [self.sources, *([] if self.ids is None else [self.ids.table])]
        return self.graph.edges * sum(store.table(name).row_bytes for name in names)

    def open(self, reader: Reader) -> None:
        """Read the offsets. Raises CorruptionError, DeviceError, FormatError."""
        table = self._offsets_table
        self.offsets = reader.read_runs({table: [(0, self.graph.table.rows + 1)]})[table]
        where = f"the offsets of graph {self.graph.name!r} of {self.graph.store.path}"
        check_offsets(self.offsets, 0, self.graph.edges, where)
        self.cache = NeighbourCache(self.graph, self.offsets)

    def size(
        self, rows: NDArray[np.int64], begin: int, end: int, fanout: int, replace: bool
    ) -> tuple[int, int]:
        """How many edges ``rows[begin:end]`` will have, and the largest degree. Raises FormatError."""
        taken = -1 if replace else fanout
        edges, degree_max = hop_size(self.offsets, self.graph.edges, rows, begin, end, taken)
        if edges < 0:
            raise self.bad_offsets(int(rows[-edges - 1]))
        if replace and fanout >= 0:
            edges = fanout * count_asking(self.offsets, rows, begin, end)
        return edges, degree_max

    def pick(
        self, node_of_row: NDArray[Any], rows: NDArray[np.int64], begin: int, end: int, fanout: int,
        replace: bool, key: np.uint64, picks: NDArray[np.int64], row: NDArray[np.int64],
        col: NDArray[np.int64], edge: NDArray[np.int64],
    ) -> int:  # fmt: skip
        """Pick the edges of ``rows[begin:end]``, see :func:`~featstore.sampling.picking.pick_hop`. Returns
        how many neighbours are to be read."""
        cache, hubs = self.cache, self.cache.index
        misses: int = pick_hop(
            self.offsets, node_of_row, rows, begin, end, fanout, replace, key, hubs.bits, hubs.ranks,
            hubs.starts, cache.lists, cache.first, picks, row, col, edge,
        )  # fmt: skip
        return misses

    def read(
        self, reading: HopPages, reader: Reader, row: NDArray[np.int64], edge: NDArray[np.int64],
        misses: int, *, last: bool,
    ) -> None:  # fmt: skip
        """Read the neighbours that the cache did not hold: the negative ones in ``row``."""
        missing = Missing(row, edge, misses, self.graph.edges, self.cache.first.dtype)
        reading.read(missing, reader, self.sources, last=last)

    def bad_offsets(self, row: int) -> FormatError:
        """What is wrong with the offsets of a row."""
        low, high = self.offsets[row], self.offsets[row + 1]
        return self.contradiction(
            f"the offsets give row {row} the edges {low:,} to {high:,} of {self.graph.edges:,}"
        )

    def bad_source(self, place: int, row: NDArray[np.int64], edge: NDArray[np.int64]) -> FormatError:
        """What is wrong with the source at a place of a hop."""
        rows = self.graph.source_table.rows
        return self.contradiction(f"edge {edge[place]:,} comes from row {row[place]} of {rows:,}")

    def contradiction(self, what: str) -> FormatError:
        """The graph contradicts itself."""
        return FormatError(
            f"graph {self.graph.name!r} of {self.graph.store.path}: {what}; pack the store again"
        )
