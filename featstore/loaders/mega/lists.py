"""The lists of one graph in mega-batches: what is read of them, and the subgraph that becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import check_offsets
from featstore.errors import CorruptionError
from featstore.loaders.mega.induce import FILLED, TARGET, copy_kept, count_by_partition, induce_block
from featstore.loaders.mega.partition_set import InducedLists
from featstore.loaders.mega.rows import TableRows
from featstore.loaders.mega.schedule import Schedule, Step
from featstore.loaders.mega.sizes import ListNeeds, Sizes

if TYPE_CHECKING:
    from featstore.reader.reader import Reader
    from featstore.storage.store import StoredGraph

_COUNTED_EDGES = 1 << 16  # of hubs' lists, looked at at once

#: A run of a table of lists: its name, and edges from and to.
Segment = tuple[str, int, int]
#: Which rows are in memory, and where: :meth:`featstore.loaders.mega.induce.Places.here`.
Here = tuple[NDArray[np.uint64], NDArray[np.int32], NDArray[np.int32]]


class GraphLists:
    """The lists of ``graph`` into the nodes of ``targets``, with sources in ``sources``. ``parts``: of
    ``edge_ids``, ``weights`` and ``times`` those that are kept of each edge. ``order_bytes``: of an edge,
    while lists are put in the order of time."""

    def __init__(
        self, graph: StoredGraph, targets: TableRows, sources: TableRows, parts: Sequence[str],
        order_bytes: int,
    ) -> None:  # fmt: skip
        self.graph, self._targets, self._sources = graph, targets, sources
        self._order_bytes = order_bytes
        self.offsets, self.sources = f"{graph.name}/offsets", f"{graph.name}/sources"
        self.hubs = f"{graph.name}/hubs" if graph.hubs else None
        store, parts = graph.store, tuple(parts)
        self.dtype = store.table(self.sources).dtype
        #: Tables of values beside the lists, and beside those of hubs.
        self.values_of = {self.sources: [f"{graph.name}/{part}" for part in parts]}
        if self.hubs is not None:
            self.values_of[self.hubs] = [f"{graph.name}/hub_{part}" for part in parts]
        names = zip(parts, self.values_of[self.sources], strict=True)
        self.dtypes: dict[str, np.dtype[Any]] = {part: store.table(name).dtype for part, name in names}
        self._hub_offsets = graph.hub_rows(targets.hubs)[1]
        self._where = f"the offsets of graph {graph.name!r} of {store.path}"

    @property
    def tables(self) -> list[str]:
        """All tables that are read."""
        beside = [name for names in self.values_of.values() for name in names]
        return [self.offsets, *self.values_of, *beside]

    @property
    def value_bytes(self) -> int:
        """Of an edge, of what is kept of it beside its source."""
        return sum(dtype.itemsize for dtype in self.dtypes.values())

    def look(self, reader: Reader) -> ListNeeds:
        """What the sizes of buffers follow from: takes the ends of each partition's lists, and one pass over
        the hubs' lists. Raises CorruptionError, FormatError, DeviceError."""
        rows, sources = self._targets, self._sources
        bounds = reader.read({self.offsets: rows.offsets})[self.offsets]
        check_offsets(bounds, 0, self.graph.edges, self._where)
        self._bounds: NDArray[np.int64] = bounds
        counts, end = np.zeros(len(rows.offsets), np.int64), int(self._hub_offsets[-1])
        nothing = np.empty(0, np.int64)
        hub_bits, hub_ranks, _ = sources.places.here(nothing, nothing)
        for low in range(0, end, _COUNTED_EDGES):
            assert self.hubs is not None
            run = (low, min(low + _COUNTED_EDGES, end))
            block = reader.read_runs({self.hubs: [run]})[self.hubs]
            bad = count_by_partition(
                block, sources.places.hints, sources.offsets, hub_bits, hub_ranks, counts
            )
            if bad >= 0:
                raise self.bad(str(block[bad]))
        return ListNeeds(
            rows.table.name, self.graph.entry.sources.row_bytes, self.value_bytes,
            np.diff(bounds) + counts[:-1], int(counts[-1]), self._order_bytes,
        )  # fmt: skip

    def allocate(self, sizes: Sizes) -> None:
        """Make the buffers of subgraphs."""
        edges = sizes.edges_max[self.graph.name] + 1
        places = self._targets.hubs + sizes.slots * sizes.slot_rows[self._targets.table.name]
        self._buffers = [
            (
                np.zeros(places + 1, np.int64), np.empty(edges, np.int32),
                {part: np.empty(edges, dtype) for part, dtype in self.dtypes.items()},
            )
            for _ in range(sizes.buffers)
        ]  # fmt: skip

    def runs(self, step: Step) -> dict[str, NDArray[np.int64]]:
        """What a step reads of each table of lists, int64 [n, 2], those of offsets first."""
        ends = np.stack([step.partitions, step.partitions + 1], axis=1)
        lists = self._targets.offsets[ends] + np.array([0, 1])
        runs = {self.offsets: lists, self.sources: self._bounds[ends]}
        if self.hubs is not None:
            runs[self.hubs] = np.array([[0, self._hub_offsets[-1]]])
        return runs | {name: runs[of] for of, names in self.values_of.items() for name in names}

    def offset_runs(self, step: Step) -> NDArray[np.int64]:
        """int64 [n, 2], the offsets of a step's lists, by slot."""
        runs = self._targets.runs(step.partitions)[np.argsort(step.slots)]
        return np.stack([runs[:, 0], runs[:, 1] + 1], axis=1)

    def begin(
        self, schedule: Schedule, step: Step, offsets: NDArray[np.int64], here: Mapping[str, Here]
    ) -> Inducing:
        """The subgraph of a step, to be filled from blocks of its segments. ``offsets``: those of
        :meth:`offset_runs`; ``here``: by table of sources, which of them are in memory. Raises
        FormatError."""
        by_slot = np.argsort(step.slots)
        runs = self._targets.runs(step.partitions)[by_slot]
        starts = self._targets.starts(step)[by_slot]
        bounds = self._bounds[step.partitions[by_slot]], self._bounds[step.partitions[by_slot] + 1]
        regions: list[tuple[NDArray[np.int64], NDArray[np.bool_], int]] = []
        segments: list[Segment] = []
        if self._targets.hubs and self.hubs is not None:
            # the others' lists come with their partition
            regions.append((self._hub_offsets, self._targets.hubs_away(step), 0))
            segments.append((self.hubs, 0, int(self._hub_offsets[-1])))
        at = 0
        for number, (low, high) in enumerate(runs.tolist()):
            lists = offsets[at : at + high - low + 1]
            at += high - low + 1
            check_offsets(lists, int(bounds[0][number]), int(bounds[1][number]), self._where)
            regions.append((lists, np.full(high - low, True), int(starts[number])))
            segments.append((self.sources, int(lists[0]), int(lists[-1])))
        buffer = self._buffers[(schedule.epoch * schedule.steps + step.index) % len(self._buffers)]
        stored = int((bounds[1] - bounds[0]).sum())
        return Inducing(self, segments, regions, buffer, here[self._sources.table.name], stored)

    @property
    def source_rows(self) -> int:
        """Rows of the table of sources."""
        return self._sources.places.rows

    def bad(self, actual: str) -> CorruptionError:
        """What to say of a source that is no row."""
        store = self.graph.store
        path = store.path / self.graph.entry.offsets.path
        again = f"run `featstore verify {store.path}`"
        return CorruptionError(path, None, "rows of the table", actual, again)


class Inducing:
    """The subgraph of one graph under way. ``segments``: runs of its tables, each of which comes in one or
    more blocks, in this order."""

    def __init__(
        self, lists: GraphLists, segments: list[Segment],
        regions: list[tuple[NDArray[np.int64], NDArray[np.bool_], int]],
        buffer: tuple[NDArray[np.int64], NDArray[np.int32], Mapping[str, NDArray[Any]]],
        here: Here, edges_stored: int,
    ) -> None:  # fmt: skip
        self._lists, self.segments, self._regions = lists, segments, regions
        self._indptr, self._indices, self._values = buffer
        self._here, self._edges_stored = here, edges_stored
        self._state = np.zeros(2, np.int64)
        self._filled_to, self._hub_edges, self._before = 0, 0, -1

    def take(self, region: int, first_edge: int, block: NDArray[Any], values: Sequence[NDArray[Any]]) -> None:
        """The next block of a segment, which is written over, and ``values`` of its edges. Raises
        CorruptionError for a source that is no row."""
        state, before = self._state, int(self._state[FILLED])
        lists, wanted, start = self._regions[region]
        if region != self._before:  # places without rows have empty lists
            self._indptr[self._filled_to + 1 : start + 1] = before
            self._before = region
        ends = self._indptr[start + 1 : start + len(lists)]
        bad = induce_block(
            lists, block, first_edge, self._lists.source_rows, *self._here, wanted, state, ends, self._indices
        )
        if bad >= 0:
            raise self._lists.bad(str(block[bad]))
        filled = int(state[FILLED])
        for of_block, out in zip(values, self._values.values(), strict=True):
            copy_kept(block, of_block, out[before:filled])
        if state[TARGET] == len(ends):
            state[TARGET], self._filled_to = 0, start + len(ends)
            if self.segments[region][0] == self._lists.hubs:
                self._hub_edges = filled

    def result(self) -> InducedLists:
        """What became of all blocks."""
        filled = int(self._state[FILLED])
        self._indptr[self._filled_to + 1 :] = filled
        values = {part: one[:filled] for part, one in self._values.items()}
        own = filled - self._hub_edges
        return InducedLists(self._indptr, self._indices[:filled], values, self._edges_stored, own)
