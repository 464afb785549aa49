"""The lists of one graph in a store, as samplers from disk look at them: their offsets in memory, neighbours
and numbers of edges as far as there is room for them, and the tables that the others are read from."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import check_offsets
from featstore.errors import FormatError, SourceError
from featstore.reader.reader import Reader
from featstore.sampling.cache import NeighbourCache
from featstore.sampling.edge_ids import StoredEdgeIds, wants_edge_ids
from featstore.sampling.first_values import FirstValues
from featstore.sampling.list_draws import BAD_SOURCE, BAD_TIME, BAD_WEIGHT, draw_lists, find_held
from featstore.sampling.options import SamplingOptions, kept
from featstore.sampling.pages import Missing
from featstore.sampling.picking import count_asking, empty_picks, hop_size, pick_hop
from featstore.sampling.stored_hops import HopPages
from featstore.sampling.under_way import MadeAgain
from featstore.sampling.whole_lists import Held, ListView, WholeLists, held_of

if TYPE_CHECKING:
    from featstore.storage.store import StoredGraph

_NO_TIMES = np.empty(0, np.int64)
_NO_WEIGHTS = np.empty(0, np.float32)
#: Of a node whose list is looked at: its id and times, its place in the order of rows, where its list begins,
#: ends and is.
ASKING_NODE_BYTES = 184
#: Of an edge of the longest list: its time, the order of these, and room to sort; or the sums of weights.
LONGEST_BYTES = 40

#: How many bytes of lists may be read at once, of the least and the most that they take.
ListRoom = Callable[[int, int], int]


class Asking(NamedTuple):
    """Who draws in a hop: ``rows`` and ``nodes``, which these are, int64 [n]; ``trees``, where each seed has
    a subgraph of its own, and ``lows`` and ``highs``, the times that are allowed, where there are any; else
    [0]."""

    rows: NDArray[np.int64]
    nodes: NDArray[np.int64]
    trees: NDArray[np.int64]
    lows: NDArray[np.int64]
    highs: NDArray[np.int64]


class DrawnHow(NamedTuple):
    """With replacement, from the last that time allows, with a subgraph of each seed's own."""

    replace: bool
    last: bool
    has_trees: bool


class ListsOnDisk:
    """Of ``graph``: ``tables`` are those that are read, ``ids`` the numbers of its edges, where these are
    wanted (``edge_ids``, see :func:`~featstore.sampling.edge_ids.wants_edge_ids`), ``weights`` and ``times``
    what it keeps of these, where lists are drawn from by them. :meth:`open` fills ``offsets`` int64
    [rows + 1] and makes the ``cache``, which is empty then.

    ``by_node_times``: times are those of sources, ``node_times`` int64 by row, which whoever opens this sets.
    ``whole``: lists of sources are looked at whole, for these times, or for all edges among some nodes.
    ``whole_edges``: of the graph that these are some lists of, where they are not all. Raises SourceError for
    weights and times that the graph does not keep.
    """

    def __init__(
        self, graph: StoredGraph, edge_ids: bool | None, *, weights: bool = False, times: bool = False,
        by_node_times: bool = False, whole: bool = False, whole_edges: int | None = None,
    ) -> None:  # fmt: skip
        check_kept(graph, weights=weights, times=times)
        self.graph, self.whole, self.by_node_times, self.node_times = graph, whole, by_node_times, _NO_TIMES
        self.ids = StoredEdgeIds(graph, whole_edges) if wants_edge_ids(graph, edge_ids) else None
        self.weights = FirstValues(graph, "weights") if weights else None
        self.times = FirstValues(graph, "times") if times else None
        self.sources, self._hubs, self._offsets_table = (
            f"{graph.name}/{part}" for part in ("sources", "hubs", "offsets")
        )
        self.tables = [self.sources, self._offsets_table] + [self._hubs] * (graph.entry.hubs is not None)
        self.tables += [one.table for one in self.values]
        self.close()

    @property
    def values(self) -> list[FirstValues]:
        """What is held of edges beside their sources; those first that are to stay longest."""
        return [one for one in (self.times, self.weights, self.ids) if one is not None]

    @property
    def is_plain(self) -> bool:
        """Whether what is drawn follows from the lengths of lists alone."""
        return self.weights is None and self.times is None and not self.by_node_times

    def close(self) -> None:
        """Hold nothing."""
        self.offsets: NDArray[np.int64] = np.zeros(1, np.int64)
        self.cache, self.node_times = NeighbourCache(self.graph, self.offsets), _NO_TIMES
        for one in self.values:
            one.cut(0)

    @property
    def offsets_bytes(self) -> int:
        """What its offsets take."""
        return 8 * (self.graph.table.rows + 1)

    @property
    def whole_bytes(self) -> int:
        """What all neighbours, and values and numbers of edges take."""
        store, names = self.graph.store, [self.sources, *(one.table for one in self.values)]
        return self.graph.edges * sum(store.table(name).row_bytes for name in names)

    def open(self, reader: Reader) -> None:
        """Read the offsets. Raises CorruptionError, DeviceError, FormatError."""
        table = self._offsets_table
        self.offsets = reader.read_runs({table: [(0, self.graph.table.rows + 1)]})[table]
        where = f"the offsets of graph {self.graph.name!r} of {self.graph.store.path}"
        check_offsets(self.offsets, 0, self.graph.edges, where)
        self.cache = NeighbourCache(self.graph, self.offsets, hubs=not self.whole)

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

    def places(self, rows: NDArray[np.int64], fanout: int, replace: bool) -> NDArray[np.int64]:
        """int64 [n]: where each of rows has its place for as many edges as it may draw."""
        most = self.offsets[rows + 1] - self.offsets[rows]
        if fanout >= 0:
            most = np.where(most > 0, fanout, 0) if replace else np.minimum(most, fanout)
        places: NDArray[np.int64] = np.cumsum(most) - most
        return places

    def draw(
        self, asking: Asking, fanout: int, key: np.uint64, how: DrawnHow, degree_max: int,
        tables: Sequence[Held | None], reader: Reader, room: ListRoom, places: NDArray[np.int64],
        row: NDArray[np.int64], edge: NDArray[np.int64], taken: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """What nodes draw of lists, by ``tables`` of weights, times and sources, see
        :func:`~featstore.sampling.list_draws.draw_lists`. Raises CorruptionError, DeviceError, FormatError,
        and what ``room`` raises."""
        drawn = degree_max if how.replace else max(0, min(fanout, degree_max))
        keys, picks = np.empty(0 if tables[0] is None else drawn), empty_picks(fanout, degree_max)
        rows, nodes, trees, lows, highs = asking
        for some, weights, times, sources in self.pieces(rows, tables, reader, room):
            wrong, at = draw_lists(
                self.offsets, nodes, rows, trees, some, fanout, key, *how, *weights, *times, *sources,
                self.node_times, lows, highs, picks, keys, places, row, edge, taken,
            )  # fmt: skip
            if wrong:
                raise self.bad_value(wrong, at)

    def pieces(
        self, rows: NDArray[np.int64], tables: Sequence[Held | None], reader: Reader, room: ListRoom
    ) -> Iterator[tuple[NDArray[np.int64], ListView, ListView, ListView]]:
        """Which of ``rows`` have their lists at hand, and these, of ``tables``: weights, times and sources.
        Views are of what is held then: where that is cut for ``room``, it is MadeAgain."""
        read = any(one is not None for one in tables)
        order = np.argsort(rows, kind="stable") if read else np.arange(len(rows))
        whole, held = WholeLists(self.offsets, rows[order], tables), held_of(tables)
        room_bytes = room(whole.least_bytes, whole.most_bytes) if read else 0
        if held_of(tables) != held:  # what was held has been cut for that room, and more is to be read
            raise MadeAgain
        for some, (weights, times, sources) in whole.pieces(room_bytes, reader):
            if tables[0] is None:
                weights = weights._replace(values=_NO_WEIGHTS)
            if tables[2] is None:
                sources = sources._replace(values=self.cache.first[:0])
            yield order[some], weights, times, sources

    def find(
        self, rows: NDArray[np.int64], row: NDArray[np.int64], col: NDArray[np.int64],
        edge: NDArray[np.int64],
    ) -> int:  # fmt: skip
        """Have the neighbours that the cache holds of edges into ``rows[col]``, see
        :func:`~featstore.sampling.list_draws.find_held`. Returns how many are to be read."""
        cache, hubs = self.cache, self.cache.index
        misses: int = find_held(
            self.offsets, rows, hubs.bits, hubs.ranks, hubs.starts, cache.lists, cache.first, row, col, edge
        )
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

    def bad_value(self, what: int, edge: int) -> FormatError:
        """What is wrong with a value of an edge, by :mod:`featstore.sampling.list_draws`."""
        said = {
            BAD_SOURCE: f"comes from none of {self.graph.source_table.rows:,} rows",
            BAD_WEIGHT: "has a weight that is negative or not finite",
            BAD_TIME: "is earlier than the edge before it in its list",
        }  # fmt: skip
        return self.contradiction(f"edge {edge:,} {said[what]}")

    def contradiction(self, what: str) -> FormatError:
        """The graph contradicts itself."""
        return FormatError(
            f"graph {self.graph.name!r} of {self.graph.store.path}: {what}; pack the store again"
        )


def check_kept(graph: StoredGraph, *, weights: bool, times: bool) -> None:
    """Raise SourceError for a graph that does not keep what is wanted."""
    for part, asked, there in (
        ("weights", weights, graph.has_weights), ("times", times, graph.has_times)
    ):  # fmt: skip
        if asked and not there:
            raise SourceError(f"{graph.where()} has no {part}: pack it with edge_{part}= (--edge-{part})")


def wanted_of(
    options: SamplingOptions, graphs: Sequence[StoredGraph]
) -> Iterator[tuple[StoredGraph, bool, bool]]:
    """Graphs, and whether samplers from disk go by their weights, and by the times of their edges. Raises
    ArgumentError for others than those that graphs keep."""
    keys: list[Any] = [graph.name if graph.edge_type is None else graph.edge_type for graph in graphs]
    weighted, timed = kept(options.weights, keys, "weights"), kept(options.edge_times, keys, "edge_times")
    for key, graph in zip(keys, graphs, strict=True):
        yield graph, key in weighted, key in timed


def lists_with(
    options: SamplingOptions, graphs: Sequence[StoredGraph], node_times: Container[str],
    edge_ids: bool | None,
) -> list[ListsOnDisk]:  # fmt: skip
    """The lists of graphs, of which options say what is looked at. ``node_times``: which types of nodes have
    times. Raises ArgumentError, SourceError."""
    found = []
    for graph, weighted, timed in wanted_of(options, graphs):
        by_node_times = not timed and graph.entry.table_of_sources in node_times
        found.append(
            ListsOnDisk(
                graph, edge_ids, weights=weighted, times=timed, by_node_times=by_node_times,
                whole=by_node_times or options.subgraph == "induced",
            )
        )  # fmt: skip
    return found
