"""Loading a mega-batch: its partitions' rows into slots, and the subgraph that they and the hubs induce.

Features go straight into their slots; lists of neighbours come in blocks, of which a kernel keeps what is in
memory (:mod:`featstore.loaders.mega.induce`). The buffers are made once and their sum is known beforehand
(:mod:`featstore.loaders.mega.sizes`).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import populate
from featstore.base.checks import check_offsets
from featstore.base.dtypes import node_dtype
from featstore.base.training_nodes import checked_train
from featstore.errors import BudgetError, CorruptionError, SourceError
from featstore.loaders.mega.features import Features
from featstore.loaders.mega.induce import FILLED, TARGET, Places, count_by_partition, induce_block
from featstore.loaders.mega.partition_set import PartitionSet
from featstore.loaders.mega.schedule import Schedule, Step, grouped
from featstore.loaders.mega.sizes import LargestDrawn, Needs, Sizes, budget_that_works, fit
from featstore.plan.budget import TableNeed, own_bytes
from featstore.reader.lookup import table_need
from featstore.reader.reader import Reader

if TYPE_CHECKING:
    from featstore.engine.request import Request
    from featstore.reader.reader import Reader
    from featstore.storage.store import OpenStore, StoredGraph

# Nominal budget of the reader beyond what it must hold, of which an eighth is staging; the rest is never
# taken.
_READER_BYTES_MIN, _READER_BYTES_MAX = 7 * 2**20, 28 * 2**20
_FEATURE_TURNS = 6
_HUB_SHARE_MAX = 4  # hubs take no more than this part of the budget


class Loading:
    """The reader and the buffers of a loader of mega-batches; the arguments are those of
    :class:`featstore.loaders.mega.sets.PartitionSets`."""

    def __init__(
        self, store: OpenStore, graph: StoredGraph, *, memory_bytes: int, train: Any, hubs: int | None,
        resident: int | None, replaced: int | None, seed: int, drawn: LargestDrawn | None,
        node_ids: NDArray[Any] | None = None, allocate: bool = True, **reader: Any,
    ) -> None:  # fmt: skip
        self.store, self.graph, self.table, self.seed = store, graph, graph.table, seed
        self.memory_bytes, self._drawn = memory_bytes, drawn
        self._offsets = self.table.partition_offsets
        self._offsets_name = f"the offsets of graph {graph.name!r} of {store.path}"
        parts = ("offsets", "sources", "hubs") if self.graph.hubs else ("offsets", "sources")
        self._names: tuple[str, ...] = (self.table.name, *(f"{self.graph.name}/{part}" for part in parts))
        self._ids_of: dict[str, str] = {}  # the edges' numbers beside the lists, and beside the hubs' lists
        if graph.has_edge_ids:
            ids = (f"{self.graph.name}/{part}" for part in ("edge_ids", "hub_edge_ids"))
            self._ids_of = dict(zip(self._names[2:], ids, strict=False))
            self._drawn = None if drawn is None else replace(drawn, edge_bytes=drawn.edge_bytes + 8)
        tables = (*self._names, *self._ids_of.values())
        needs = [table_need(store.table(name), reader["verify"], by_row=True) for name in tables]
        reading = _reader_memory(self.memory_bytes, needs)
        self.train = self._train_rows(train)
        # Looked up once, in the dtype of the rows: any other would have all of them converted.
        firsts = np.searchsorted(self.train, self._offsets[:-1].astype(self.train.dtype))
        self._train_offsets = np.append(firsts, len(self.train))
        self._node_of_row, self._node_dtype = self._nodes(node_ids)
        held = reading + self.train.nbytes
        held += 0 if self._node_of_row is None else self._node_of_row.nbytes
        count = self._hub_count(hubs, self.memory_bytes)
        self.hub_rows, self._hub_offsets = self.graph.hub_rows(count)
        self._hub_partitions = np.searchsorted(self._offsets, self.hub_rows, side="right") - 1
        self._places = Places(self._offsets, self.hub_rows)
        self.reader: Reader = Reader(
            store,
            tables=tables,
            memory=reading,
            static=None,
            static_memory=0,
            by_row=True,
            **reader,
        )
        try:
            self.sizes = self._fit(held, resident, replaced)
            if allocate:
                self._allocate()
        except BudgetError as error:
            self.reader.close()
            if len(self._offsets) == 2:
                raise SourceError(
                    f"table {self.table.name!r} is one single partition, for which "
                    f"{error.given_bytes:,} bytes are too little: pack it with partitions (an order "
                    f"such as 'metis' or 'multilevel', partitions=N), or give {error.needed_bytes:,} "
                    "bytes to train on all of it at once"
                ) from None
            # A larger budget would hold more hubs, and a larger reader.
            works = budget_that_works(
                lambda memory: self._needs_with(
                    self._hub_count(hubs, memory), _reader_memory(memory, needs) - reading
                ),
                error.needed_bytes, resident, replaced,
            )  # fmt: skip
            raise BudgetError(works, error.given_bytes, error.what) from None
        except BaseException:
            self.reader.close()
            raise

    @property
    def partitions(self) -> NDArray[np.int64]:
        """int64, the partitions that hold any rows."""
        some: NDArray[np.int64] = np.flatnonzero(np.diff(self._offsets) > 0)
        return some

    def _nodes(self, node_ids: NDArray[Any] | None) -> tuple[NDArray[Any] | None, np.dtype[Any]]:
        """The node of each row, None where that is its number, and the dtype of nodes."""
        maps = self.table.maps()
        if node_ids is None:
            return None if maps is None else maps[1], node_dtype(self.table.rows)
        return node_ids if maps is None else node_ids[maps[1]], node_ids.dtype

    @property
    def _edge_id_dtype(self) -> np.dtype[Any]:
        return self.store.table(self._ids_of[self._names[2]]).dtype if self._ids_of else np.dtype(np.int32)

    def _train_rows(self, train: Any) -> NDArray[Any]:
        """The training nodes' rows, ascending, in as few bytes as they need."""
        rows, dtype = self.table.rows, node_dtype(self.table.rows)
        if train is None:
            return np.arange(rows, dtype=dtype)
        ids = checked_train(self.store.arrays[train] if isinstance(train, str) else train, rows)
        row_of_node = self.table.row_of_node()
        return np.sort((ids if row_of_node is None else row_of_node[ids]).astype(dtype))

    def _hub_count(self, wanted: int | None, memory_bytes: int) -> int:
        if wanted is not None:
            if wanted > self.graph.hubs:
                raise SourceError(
                    f"{wanted:,} hubs were asked for, but the store has the lists of "
                    f"{self.graph.hubs:,}: pack with more hubs"
                )
            return wanted
        # A hub takes its row, entries of tables, and its list, at most, in both buffers of the subgraph.
        offsets = self.graph.hub_rows()[1]
        needed = np.arange(len(offsets)) * (self.table.row_bytes + 64) + 8 * offsets
        return int(np.searchsorted(needed, memory_bytes // _HUB_SHARE_MAX, side="right")) - 1

    def _fit(self, held_bytes: int, resident: int | None, replaced: int | None) -> Sizes:
        """Choose the sizes: takes the ends of each partition's lists, and one pass over the hubs' lists."""
        bounds = self.reader.read({self._names[1]: self._offsets})[self._names[1]]
        check_offsets(bounds, 0, self.graph.edges, self._offsets_name)
        self._bounds: NDArray[np.int64] = bounds
        counts = np.zeros(len(self._offsets), np.int64)
        places, block = self._places, 1 << 16
        nothing = np.empty(0, np.int64)
        hub_bits, hub_ranks, _ = places.here(nothing, nothing)
        for low in range(0, int(self._hub_offsets[-1]), block):
            run = (low, min(low + block, int(self._hub_offsets[-1])))
            sources = self.reader.read_runs({self._names[3]: [run]})[self._names[3]]
            bad = count_by_partition(sources, places.hints, self._offsets, hub_bits, hub_ranks, counts)
            if bad >= 0:
                raise self._bad("rows of the table", str(sources[bad]))
        self._needs = Needs(
            self.table.rows, self.table.row_bytes, self._node_dtype.itemsize,
            self.graph.entry.sources.row_bytes, np.diff(self._offsets), np.diff(bounds) + counts[:-1],
            len(self.hub_rows), int(counts[-1]), held_bytes, len(self.train), self._drawn,
            self._edge_id_dtype.itemsize if self._ids_of else 0,
        )  # fmt: skip
        return fit(self._needs, self.memory_bytes, resident, replaced)

    def _needs_with(self, hubs: int, more_bytes: int) -> Needs:
        """What would be needed with so many hubs, of which no edge is known to be in memory twice."""
        needs = replace(self._needs, held_bytes=self._needs.held_bytes + more_bytes)
        if hubs == needs.hubs:
            return needs
        edges = int(self.graph.hub_rows(hubs)[1][-1])
        return replace(needs, hubs=hubs, hub_edges=needs.hub_edges + edges)

    def _allocate(self) -> None:
        sizes, hubs = self.sizes, len(self.hub_rows)
        places = hubs + sizes.partition_places
        self._x = np.empty((places, *self.table.row_shape), self.table.dtype)
        self._node = np.full(places, -1, self._node_dtype)
        buffers = 1 if sizes.slots == sizes.resident else 2
        edges, block_edges = (sizes.edges_max + 1, sizes.block_edges) if self._ids_of else (0, 0)
        self._graphs = [
            (
                np.zeros(places + 1, np.int64), np.empty(sizes.edges_max + 1, np.int32),
                np.empty(edges, self._edge_id_dtype),
            )
            for _ in range(buffers)
        ]  # fmt: skip
        dtype = self.store.table(self._names[2]).dtype
        self._blocks = [
            (np.empty(sizes.block_edges, dtype), np.empty(block_edges, self._edge_id_dtype)) for _ in range(2)
        ]
        populate(self._x.reshape(-1).view(np.uint8))
        if hubs:
            self.reader.read({self.table.name: self.hub_rows}, out={self.table.name: self._x[:hubs]})
            self._node[:hubs] = (
                self.hub_rows if self._node_of_row is None else self._node_of_row[self.hub_rows]
            )

    def _bad(self, expected: str, actual: str) -> CorruptionError:
        path = self.store.path / self.graph.entry.offsets.path
        return CorruptionError(path, None, expected, actual, f"run `featstore verify {self.store.path}`")

    def runs(self, step: Step) -> dict[str, NDArray[np.int64]]:
        """What :meth:`load` reads of each table: int64 [n, 2]."""
        ends = np.stack([step.partitions, step.partitions + 1], axis=1)
        rows, lists = self._offsets[ends], self._bounds[ends]
        hubs = np.array([[0, self._hub_offsets[-1]]])
        parts = (rows[step.loaded], rows + np.array([0, 1]), lists, hubs)
        runs = dict(zip(self._names, parts, strict=False))
        return runs | {ids: runs[name] for name, ids in self._ids_of.items()}

    def load(self, schedule: Schedule, step: Step, whole: bool) -> PartitionSet:
        """Bring a step's partitions into their slots (``whole``: also those that should be there already),
        and build its graph."""
        begin = time.perf_counter()
        hubs, size = len(self.hub_rows), self.sizes.slot_rows
        starts = hubs + step.slots * size
        fresh = np.full(len(step.loaded), True) if whole else step.loaded
        runs = np.stack([self._offsets[step.partitions], self._offsets[step.partitions + 1]], axis=1)
        features = Features(self.reader, self.table.name, self._x, runs[fresh], starts[fresh])
        try:
            features.submit(1 / _FEATURE_TURNS)
            lists = np.stack([runs[:, 0], runs[:, 1] + 1], axis=1)[np.argsort(starts)]
            asked = self.reader.submit_runs({self._names[1]: lists})
            features.submit(2 / _FEATURE_TURNS)  # the device is busy while the offsets are looked at
            seeds = self._seeds(schedule, step, starts)
            self._name_rows(runs[fresh], starts[fresh])
            built = time.perf_counter()
            graph, own_edges, read_edges = self._build(schedule, step, runs, starts, features, asked)
            built = time.perf_counter() - built
        finally:
            features.settle()
        features.result()
        return PartitionSet(
            schedule.epoch, step.index, schedule.steps, self.seed, self._x, self._node, *graph[:2],
            seeds, step.partitions, starts, runs[:, 1] - runs[:, 0], len(self.partitions), hubs,
            self._hub_copies(step, starts), size, int(self._degrees(step)), own_edges,
            int((runs[fresh, 1] - runs[fresh, 0]).sum()) * self.table.row_bytes + read_edges,
            time.perf_counter() - begin, built, graph[2] if self._ids_of else None,
        )  # fmt: skip

    def _hub_copies(self, step: Step, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Local ids of the hubs that come with a partition of this step."""
        here = np.isin(self._hub_partitions, step.partitions)
        base = np.zeros(len(self._offsets) - 1, np.int64)
        base[step.partitions] = starts - self._offsets[step.partitions]
        copies: NDArray[np.int64] = base[self._hub_partitions[here]] + self.hub_rows[here]
        return copies

    def _degrees(self, step: Step) -> Any:
        return (self._bounds[step.partitions + 1] - self._bounds[step.partitions]).sum()

    def _name_rows(self, runs: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        for (low, high), start in zip(runs.tolist(), starts.tolist(), strict=True):
            slot = self._node[start : start + self.sizes.slot_rows]
            slot[: high - low] = (
                np.arange(low, high) if self._node_of_row is None else self._node_of_row[low:high]
            )
            slot[high - low :] = -1

    def _seeds(self, schedule: Schedule, step: Step, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Local ids of the training nodes of this step."""
        found = []
        for partition, start in zip(step.partitions.tolist(), starts.tolist(), strict=True):
            low, high = self._train_offsets[partition : partition + 2]
            rows = self.train[low:high].astype(np.int64)
            used = schedule.used_in(rows, np.full(len(rows), partition), step.index)
            found.append(rows[used] - self._offsets[partition] + start)
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)

    def seed_counts(self, schedule: Schedule) -> NDArray[np.int64]:
        """How many training nodes each step uses, int64 [steps]; nothing is loaded for it."""
        partition = np.repeat(np.arange(len(self._offsets) - 1), np.diff(self._train_offsets))
        steps = schedule.used_by(self.train.astype(np.int64), partition)
        return np.bincount(steps, minlength=schedule.steps)

    def _build(
        self,
        schedule: Schedule,
        step: Step,
        runs: NDArray[np.int64],
        starts: NDArray[np.int64],
        features: Features,
        asked: Request,
    ) -> tuple[tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]], int, int]:
        """((indptr, indices, edge ids), edges into the partitions' nodes, bytes read) of the subgraph of a
        step."""
        hubs = len(self.hub_rows)
        indptr, indices, ids = self._graphs[
            (schedule.epoch * schedule.steps + step.index) % len(self._graphs)
        ]
        bits, ranks, local = self._places.here(step.partitions, starts)
        state = np.zeros(2, np.int64)
        by_slot = np.argsort(starts)
        offsets = asked.result()[self._names[1]]
        regions: list[tuple[NDArray[np.int64], NDArray[np.bool_], int]] = []
        segments = []
        if hubs:
            # the others' lists come with their partition
            away = ~np.isin(self._hub_partitions, step.partitions)
            regions.append((self._hub_offsets, away, 0))
            segments.append((self._names[3], 0, int(self._hub_offsets[-1])))
        at = 0
        for (low, high), start in zip(runs[by_slot].tolist(), starts[by_slot].tolist(), strict=True):
            lists = offsets[at : at + high - low + 1]
            at += high - low + 1
            regions.append((lists, np.full(high - low, True), start))
            segments.append((self._names[2], int(lists[0]), int(lists[-1])))
        bounds = self._bounds[step.partitions[by_slot]], self._bounds[step.partitions[by_slot] + 1]
        own = regions[1:] if hubs else regions
        for (lists, _, _), first_edge, end_edge in zip(own, *bounds, strict=True):
            check_offsets(lists, int(first_edge), int(end_edge), self._offsets_name)
        filled_to, hub_edges, before = 0, 0, -1
        blocks = self._list_blocks(segments, features)
        for region, first, block, block_ids in blocks:
            lists, wanted, start = regions[region]
            if region != before:  # places without rows have empty lists
                indptr[filled_to + 1 : start + 1] = state[FILLED]
                before = region
            ends = indptr[start + 1 : start + len(lists)]
            bad = induce_block(
                lists, block, first, self._places.rows, bits, ranks, local, wanted, state, ends, indices,
                block_ids, ids,
            )  # fmt: skip
            if bad >= 0:
                actual = str(block[bad])
                blocks.close()  # the block read ahead has arrived before its buffer is used again
                raise self._bad("rows of the table", actual)
            if state[TARGET] == len(ends):
                state[TARGET], filled_to = 0, start + len(ends)
                hub_edges = int(state[FILLED]) if hubs and region == 0 else hub_edges
        indptr[filled_to + 1 :] = state[FILLED]
        edge_bytes = self._blocks[0][0].itemsize + (self._edge_id_dtype.itemsize if self._ids_of else 0)
        read = offsets.nbytes + sum((high - low) for _, low, high in segments) * edge_bytes
        filled = int(state[FILLED])
        return (indptr, indices[:filled], ids[:filled]), filled - hub_edges, read

    def _list_blocks(
        self, segments: list[tuple[str, int, int]], features: Features
    ) -> Generator[tuple[int, int, NDArray[Any], NDArray[Any]], None, None]:
        """(segment, first edge, block of sources, and of edge ids): every segment in one or more blocks.
        Blocks share two buffers; one is read while the other is looked at, and after each a share of the
        features is asked for, so that neither waits for all of the other."""
        groups = grouped(segments, self.sizes.block_edges)
        ahead = self._read_group(segments, groups[0], 0) if groups else None
        try:
            for number, group in enumerate(groups):
                # One turn of features stays ahead of the lists, so that the device is busy while a block is
                # looked at.
                features.submit((number + 3) / (len(groups) + 2))
                request, ahead = ahead, None
                if number + 1 < len(groups):
                    ahead = self._read_group(segments, groups[number + 1], number + 1)
                assert request is not None
                request.result()
                (buffer, ids), at = self._blocks[number % 2], 0
                for segment, low, high in group:
                    end = at + high - low
                    yield segment, low, buffer[at:end], ids[at:end]
                    at = end
        finally:
            if ahead is not None:
                ahead.exception()

    def _read_group(
        self, segments: list[tuple[str, int, int]], group: list[tuple[int, int, int]], number: int
    ) -> Any:
        table = segments[group[0][0]][0]
        runs = np.array([(low, high) for _, low, high in group])
        count = int((runs[:, 1] - runs[:, 0]).sum())
        tables = [table] + ([self._ids_of[table]] if self._ids_of else [])
        out = dict(zip(tables, (one[:count] for one in self._blocks[number % 2]), strict=False))
        return self.reader.submit_runs(dict.fromkeys(tables, runs), out=out)


def _reader_memory(memory_bytes: int, needs: Sequence[TableNeed]) -> int:
    """The reader's part of a loader's budget: more staging for larger ones, up to 16 MiB."""
    beside = max(_READER_BYTES_MIN, min(_READER_BYTES_MAX, memory_bytes // 7))
    return own_bytes(memory_bytes, needs, beside)
