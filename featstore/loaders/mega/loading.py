"""Loading a mega-batch: its partitions' rows into slots, and the subgraph that they and the hubs induce.

Features go straight into their slots; lists of neighbours come in blocks, of which a kernel keeps what is in
memory (:mod:`featstore.loaders.mega.induce`). The buffers are made once and their sum is known beforehand
(:mod:`featstore.loaders.mega.sizes`).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import BudgetError, SourceError
from featstore.loaders.mega.features import Features
from featstore.loaders.mega.largest import LargestDrawn
from featstore.loaders.mega.lists import GraphLists, Inducing, Segment
from featstore.loaders.mega.options import DrawnWith
from featstore.loaders.mega.partition_set import PartitionSet
from featstore.loaders.mega.parts import Hubs, Parts
from featstore.loaders.mega.rows import TableRows, TrainingRows
from featstore.loaders.mega.schedule import Schedule, Step, grouped
from featstore.loaders.mega.sizes import Needs, budget_that_works, fit
from featstore.plan.budget import TableNeed, own_bytes
from featstore.reader.lookup import table_need
from featstore.reader.reader import Reader

if TYPE_CHECKING:
    from featstore.engine.request import Request
    from featstore.storage.store import OpenStore

# Nominal budget of the reader beyond what it must hold, of which an eighth is staging; the rest is never
# taken.
_READER_BYTES_MIN, _READER_BYTES_MAX = 7 * 2**20, 28 * 2**20
_FEATURE_TURNS = 6
_HUB_SHARE_MAX = 4  # hubs take no more than this part of the budget


class Loading:
    """The reader and the buffers of a loader of mega-batches; the arguments are those of
    :class:`featstore.loaders.mega.sets.PartitionSets`."""

    def __init__(
        self, store: OpenStore, parts: Parts, *, memory_bytes: int, train: Any, hubs: int | None,
        resident: int | None, replaced: int | None, seed: int, drawn: LargestDrawn | None,
        node_ids: Mapping[str, NDArray[Any]] | None = None, drawn_with: DrawnWith | None = None,
        allocate: bool = True, **reader: Any,
    ) -> None:  # fmt: skip
        self.store, self.parts, self.seed, self.memory_bytes = store, parts, seed, memory_bytes
        own = DrawnWith(parts) if drawn_with is None else drawn_with
        self._hubs, train = Hubs(parts), parts.as_seeds(train)
        self.train = TrainingRows(parts.tables[parts.seed_table(train)], parts.seed_ids(train))
        counts = self._hubs.counts(hubs, memory_bytes // _HUB_SHARE_MAX)
        self.rows = {
            name: TableRows(
                table, self._hubs.rows(name, counts[name]), parts.row_bytes(name) > 0,
                (node_ids or {}).get(name), own.place_bytes(name),
            )
            for name, table in parts.tables.items()
        }  # fmt: skip
        self.lists = {
            name: GraphLists(
                graph, self.rows[graph.table.name], self.rows[graph.source_table.name], own.values(name),
                own.order_bytes(name),
            )
            for name, graph in parts.graphs.items()
        }  # fmt: skip
        numbered = {name: 8 for name, graph in parts.graphs.items() if graph.has_edge_ids}
        self._drawn = None if drawn is None else drawn.with_edge_bytes(numbered)
        tables = [name for name, rows in self.rows.items() if rows.has_features]
        tables += [name for lists in self.lists.values() for name in lists.tables]
        needs = [table_need(store.table(name), reader["verify"], by_row=True) for name in tables]
        reading = _reader_memory(memory_bytes, needs)
        self.staging_bytes = _beside_bytes(memory_bytes, needs)  # of the reader, with planning
        held = reading + self.train.rows.nbytes + own.held_bytes
        held += sum(rows.held_bytes for rows in self.rows.values())
        self.reader: Reader = Reader(
            store, tables=tables, memory=reading, static=None, static_memory=0, by_row=True, **reader
        )
        try:
            self._needs = self._looked(held)
            self.sizes = fit(self._needs, memory_bytes, resident, replaced)
            if allocate:
                self._allocate()
        except BudgetError as error:
            self.reader.close()
            self._check_partitions(error)

            # A larger budget would hold more hubs, and a larger reader.
            def needed(memory: int) -> Needs:
                more = _reader_memory(memory, needs) - reading
                return self._needs_with(self._hubs.counts(hubs, memory // _HUB_SHARE_MAX), more)

            works = budget_that_works(needed, error.needed_bytes, resident, replaced)
            raise BudgetError(works, error.given_bytes, error.what) from None
        except BaseException:
            self.reader.close()
            raise

    def _check_partitions(self, error: BudgetError) -> None:
        """Raise SourceError for a store that could not be loaded in any smaller pieces."""
        first = next(iter(self.rows.values()))
        if len(first.offsets) == 2:
            raise SourceError(
                f"table {first.table.name!r} is one single partition, for which "
                f"{error.given_bytes:,} bytes are too little: pack it with partitions (an order "
                f"such as 'metis' or 'multilevel', partitions=N), or give {error.needed_bytes:,} "
                "bytes to train on all of it at once"
            ) from None

    @property
    def partitions(self) -> NDArray[np.int64]:
        """int64, the partitions that hold any rows."""
        some = np.any([np.diff(rows.offsets) > 0 for rows in self.rows.values()], axis=0)
        found: NDArray[np.int64] = np.flatnonzero(some)
        return found

    def _looked(self, held_bytes: int) -> Needs:
        """What the sizes follow from. Raises what :meth:`GraphLists.look` raises."""
        rows = {name: one.needs() for name, one in self.rows.items()}
        lists = {name: one.look(self.reader) for name, one in self.lists.items()}
        return Needs(rows, lists, self.train.table, held_bytes, len(self.train.rows), self._drawn)

    def _needs_with(self, hubs: Mapping[str, int], more_bytes: int) -> Needs:
        """What would be needed with so many hubs, of which no edge is known to be in memory twice."""
        needs = replace(self._needs, held_bytes=self._needs.held_bytes + more_bytes)
        if all(hubs[name] == one.hubs for name, one in needs.rows.items()):
            return needs
        lists = {
            name: replace(one, hub_edges=one.hub_edges + self._hubs.edges(self.parts.graphs[name], count))
            for name, one in needs.lists.items()
            for count in [hubs[one.target]]
        }
        rows = {name: replace(one, hubs=hubs[name]) for name, one in needs.rows.items()}
        return replace(needs, rows=rows, lists=lists)

    def _allocate(self) -> None:
        for rows in self.rows.values():
            rows.allocate(self.sizes, self.reader)
        for lists in self.lists.values():
            lists.allocate(self.sizes)
        self._blocks = [_Block(list(self.lists.values()), self.sizes.block_edges) for _ in range(2)]

    def runs(self, step: Step) -> list[tuple[str, NDArray[np.int64], bool]]:
        """What :meth:`load` reads of each table: its name, int64 [n, 2], and whether in blocks."""
        loaded = step.partitions[step.loaded]
        found = [(name, one.runs(loaded), False) for name, one in self.rows.items() if one.has_features]
        for lists in self.lists.values():
            found += [(name, runs, name != lists.offsets) for name, runs in lists.runs(step).items()]
        return found

    def load(self, schedule: Schedule, step: Step, whole: bool) -> PartitionSet:
        """Bring a step's partitions into their slots (``whole``: also those that should be there already),
        and build its graph."""
        begin = time.perf_counter()
        fresh = np.full(len(step.loaded), True) if whole else step.loaded
        tables = self.rows.values()
        features = Features(self.reader, [part for one in tables for part in one.wanted(step, fresh)])
        try:
            features.submit(1 / _FEATURE_TURNS)
            asked = {
                one.offsets: self.reader.submit_runs({one.offsets: one.offset_runs(step)})
                for one in self.lists.values()
            }
            features.submit(2 / _FEATURE_TURNS)  # the device is busy while the offsets are looked at
            seeds = self.train.seeds(schedule, step, self.rows)
            for one in tables:
                one.name_rows(step, fresh)
            built = time.perf_counter()
            under_way, read = self._build(schedule, step, features, asked)
            built = time.perf_counter() - built
        finally:
            features.settle()
        features.result()
        for one in tables:
            runs = one.runs(step.partitions)[fresh]
            read += int((runs[:, 1] - runs[:, 0]).sum()) * (one.table.row_bytes if one.has_features else 0)
        return PartitionSet(
            schedule.epoch, step.index, schedule.steps, self.seed,
            {name: one.resident(step) for name, one in self.rows.items()},
            {name: one.result() for name, one in zip(self.lists, under_way, strict=True)},
            seeds, step.partitions, len(self.partitions), read, time.perf_counter() - begin, built,
        )  # fmt: skip

    def _build(
        self, schedule: Schedule, step: Step, features: Features, asked: Mapping[str, Request]
    ) -> tuple[list[Inducing], int]:
        """The subgraphs of a step, by graph, and bytes read for them."""
        here = {
            name: one.places.here(step.partitions, one.starts(step))
            for name, one in self.rows.items()
            if any(graph.source_table.name == name for graph in self.parts.graphs.values())
        }
        under_way, segments, read = [], [], 0
        of: list[tuple[Inducing, int]] = []
        for lists in self.lists.values():
            offsets = asked[lists.offsets].result()[lists.offsets]
            one = lists.begin(schedule, step, offsets, here)
            under_way.append(one)
            of += [(one, region) for region in range(len(one.segments))]
            segments += one.segments
            edges = sum(high - low for _, low, high in one.segments)
            read += offsets.nbytes + edges * (lists.dtype.itemsize + lists.value_bytes)
        with closing(self._list_blocks(segments, features)) as blocks:
            for number, first, block, values in blocks:
                one, region = of[number]
                one.take(region, first, block, values)
        return under_way, read

    def _list_blocks(
        self, segments: list[Segment], features: Features
    ) -> Generator[tuple[int, int, NDArray[Any], list[NDArray[Any]]]]:
        """(segment, first edge, block of sources, and of values): every segment in one or more blocks.
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
                (buffer, *values), at = self._blocks[number % 2].views(segments[group[0][0]][0]), 0
                for segment, low, high in group:
                    end = at + high - low
                    yield segment, low, buffer[at:end], [one[at:end] for one in values]
                    at = end
        finally:
            if ahead is not None:
                ahead.exception()

    def _read_group(self, segments: list[Segment], group: list[tuple[int, int, int]], number: int) -> Request:
        block, table = self._blocks[number % 2], segments[group[0][0]][0]
        runs = np.array([(low, high) for _, low, high in group])
        count = int((runs[:, 1] - runs[:, 0]).sum())
        tables = block.tables(table)
        out = {name: view[:count] for name, view in zip(tables, block.views(table), strict=True)}
        return self.reader.submit_runs(dict.fromkeys(tables, runs), out=out)


class _Block:
    """Room for ``edges`` of any of these lists: sources, and the values beside them."""

    def __init__(self, lists: Sequence[GraphLists], edges: int) -> None:
        self._of = {name: one for one in lists for name in one.values_of}
        self._edges = edges
        most = max(one.dtype.itemsize for one in lists) + max(one.value_bytes for one in lists)
        self._memory = np.empty(-(-most * edges // 8), np.int64)

    def tables(self, table: str) -> list[str]:
        """A table of lists, and those of the values beside it."""
        return [table, *self._of[table].values_of[table]]

    def views(self, table: str) -> list[NDArray[Any]]:
        """Where they are read to, in the order of :meth:`tables`; the widest lie first, so that all are
        aligned."""
        lists = self._of[table]
        dtypes = [lists.dtype, *lists.dtypes.values()]
        found: dict[int, NDArray[Any]] = {}
        memory, at = self._memory.view(np.uint8), 0
        for number in sorted(range(len(dtypes)), key=lambda one: -dtypes[one].itemsize):
            end = at + self._edges * dtypes[number].itemsize
            found[number], at = memory[at:end].view(dtypes[number]), end
        return [found[number] for number in range(len(dtypes))]


def _reader_memory(memory_bytes: int, needs: Sequence[TableNeed]) -> int:
    """The reader's part of a loader's budget."""
    return own_bytes(memory_bytes, needs, _beside_bytes(memory_bytes, needs))


def _beside_bytes(memory_bytes: int, needs: Sequence[TableNeed]) -> int:
    """What of it is for staging and planning: more for larger budgets, up to 16 MiB, or more where rows are
    large."""
    beside = max(_READER_BYTES_MIN, min(_READER_BYTES_MAX, memory_bytes // 7))
    return max(beside, 8 * max((need.row_bytes for need in needs), default=0))
