"""Packing the rows of one table: every segment in batched passes over the base table, then the shared regions into their order.

Rows of shared regions lie in another order than the base table's: they go through a spill file that is cut into buckets, each of which fits
in memory and is brought into order there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.compiled import segments
from featstore.compiled.budget import nominal_bytes, reader_bytes
from featstore.compiled.lists import RowLists, RowListsWriter
from featstore.compiled.segments import WRITE_THREADS, Route, Target, pack_episode, plan_packing, segment_of
from featstore.compiled.table import TablePlan
from featstore.disk import Disk
from featstore.dtypes import dtype_name
from featstore.engine.base import aligned_buffer
from featstore.layout import TableLayout
from featstore.manifest import ArrayEntry, OrderEntry, TableEntry, array_chunk
from featstore.native import address_of
from featstore.packing.generations import Generation
from featstore.packing.journal import TableProgress
from featstore.packing.permute import scatter_rows
from featstore.packing.writer import (
    Appender,
    Catalogue,
    TableWriter,
    catalogue_rows,
    write_array,
    write_rows_metadata,
    zarr_group_json,
)
from featstore.store import Store
from featstore.units import PAGE_BYTES

#: The tables that are written for one table of the base store.
PARTS = ("packed", "shared", "resident", "device")
_APPEND_BYTES = 4 * 2**20


def needed_bytes(row_bytes: int) -> int:
    """The smallest budget of compiling in which rows of this size can be packed, the base table's reader included."""
    inner = memory = segments.needed_bytes(row_bytes)
    while memory - reader_bytes(memory) < inner:
        memory = inner + reader_bytes(memory)
    return memory


class TablePacking:
    """Writes what a compiled trace has of one table. ``segments``: the rows of each mini-batch's own segment, ascending, and those of each
    group's region, in its order. ``save`` makes ``progress`` durable; ``tick(stage, bytes)`` is told what has been done."""

    def __init__(
        self, disk: Disk, base: Store, plan: TablePlan, catalogue: Catalogue, generation: Generation,
        segments: tuple[RowLists, RowLists], memory_bytes: int, progress: TableProgress, save: Callable[[], None],
        tick: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._disk, self._base, self._plan, self._catalogue, self._generation = disk, base, plan, catalogue, generation
        self._packed, self._shared = segments
        self._reader_bytes = nominal_bytes(memory_bytes)
        self._memory_bytes = memory_bytes - reader_bytes(memory_bytes)
        self._progress, self._save, self._tick = progress, save, tick
        self._row_bytes = plan.table.row_bytes
        self._buckets = _Buckets(self._shared, self._row_bytes, self._memory_bytes, disk, self._scratch("buckets"))

    @property
    def total_bytes(self) -> int:
        """What is read and written, if the segments fit into one episode."""
        return self._plan.table.data_bytes + (self._packed.total + 3 * self._shared.total) * self._row_bytes

    def _scratch(self, name: str) -> Path:
        return self._generation.spill / f"{self._plan.table.name}.{name}"

    def run(self) -> dict[str, TableEntry]:
        """Write all there is to write; returns the entries, by part."""
        plan = self._plan
        rows = dict(
            zip(PARTS, (self._packed.total, self._shared.total, len(plan.start), len(plan.device)), strict=True)
        )
        entries = {part: self._new_table(f"{plan.table.name}.{part}", count) for part, count in rows.items()}
        if not self._progress.done:
            self._pack(entries)
            self._progress.done = True
            self._save()
        for entry in entries.values():
            catalogue_rows(self._catalogue, entry)
        return entries

    def _new_table(self, name: str, rows: int) -> TableEntry:
        base, table = f"{self._generation.name}/tables/{name}", self._plan.table
        for directory in ("rows", "page_checksums"):
            self._catalogue.directory(f"{base}/{directory}")
        self._catalogue.write(f"{base}/zarr.json", zarr_group_json())
        layout = TableLayout.choose(rows, table.row_bytes)
        offsets = write_array(self._catalogue, f"{base}/partition_offsets", np.array([0, rows]))
        entry = TableEntry(
            path=f"{base}/rows", rows=rows, row_shape=list(table.row_shape), dtype=dtype_name(table.dtype), row_bytes=table.row_bytes,
            rows_per_chunk=layout.rows_per_chunk, page_checksums=ArrayEntry(f"{base}/page_checksums", [layout.pages], "uint32"),
            order=OrderEntry("given", {}, offsets), statistics={},
        )  # fmt: skip
        write_rows_metadata(self._catalogue, entry, table.dtype)
        return entry

    def _writer(self, entry: TableEntry) -> tuple[TableWriter, Callable[[int], Path]]:
        root = self._generation.store

        def chunk_path(chunk: int) -> Path:
            return root / entry.chunk_path(chunk)

        return TableWriter(
            self._disk, entry.layout, chunk_path, root / str(array_chunk(entry.page_checksums)), WRITE_THREADS
        ), chunk_path

    def _target(self, entry: TableEntry) -> Target:
        writer, chunk_path = self._writer(entry)
        return Target(writer, entry.layout, chunk_path)

    def _spill(self) -> Target:
        spill = self._scratch("spill")
        self._disk.mkdir(spill)
        self._disk.fsync_dir(spill.parent)  # what the journal calls done must be found again after a crash
        layout = TableLayout.choose(self._shared.total, self._row_bytes)
        return Target(
            TableWriter(self._disk, layout, lambda c: spill / f"c{c}", spill / "checksums", WRITE_THREADS),
            layout,
            lambda c: spill / f"c{c}",
        )

    def _alone(self, part: str, rows: NDArray[np.int64]) -> RowLists:
        writer = RowListsWriter(self._disk, self._scratch(part), np.int64)
        writer.append(rows)
        return writer.finish()

    def _pack(self, entries: dict[str, TableEntry]) -> None:
        """The passes over the base table, then the one over the spill."""
        routes: list[Route] = []
        try:
            if self._packed.total:
                routes.append(Route(self._packed, self._packed.offsets[:-1], self._target(entries["packed"])))
            for part, rows in (("resident", self._plan.start), ("device", self._plan.device)):
                if len(rows):
                    routes.append(Route(self._alone(part, rows), np.zeros(1, np.int64), self._target(entries[part])))
            if self._shared.total:
                routes.append(Route(self._buckets.lists(), self._buckets.first_rows(), self._spill()))
            if routes:
                self._pack_routes(routes)
            for route in routes:
                route.target.writer.finish(-(-route.target.layout.data_bytes // PAGE_BYTES))
        finally:
            for route in routes:
                route.target.writer.close()
                if route.rows is not self._packed:
                    route.rows.close()
        if self._shared.total:
            self._order_shared(entries["shared"], routes[-1].target)

    def _pack_routes(self, routes: list[Route]) -> None:
        table, progress = self._plan.table, self._progress
        packing = plan_packing(routes, self._row_bytes, self._memory_bytes)
        for earlier in packing.episodes[: progress.episode]:
            for r, i in earlier:
                segment_of(routes, r, i).resume(int(routes[r].rows.lengths()[i]), lambda: aligned_buffer(PAGE_BYTES))

        def save(slab: int) -> None:
            progress.slab = slab
            self._save()

        memory = self._reader_bytes + 4 * table.layout.pages
        with self._base.reader(tables=[table.name], memory=memory, static=None, by_row=True) as reader:
            for episode in range(progress.episode, len(packing.episodes)):
                pack_episode(reader, table.name, routes, packing, episode, progress.slab, save, self._tick)
                progress.episode, progress.slab = episode + 1, 0
                self._save()

    def _order_shared(self, entry: TableEntry, spill: Target) -> None:
        """Bring the spilled rows into the order of the regions, bucket by bucket."""
        writer, _ = self._writer(entry)
        try:
            appender = Appender(writer, 0, _APPEND_BYTES)
            for first, rank in self._buckets.ranks():
                data = spill.rows_written(first, len(rank))
                out = np.empty(len(rank) * self._row_bytes, np.uint8)
                scatter_rows(address_of(data), len(rank), self._row_bytes, rank, 0, 0, address_of(out))
                appender.append(out)
                self._tick("order", 2 * len(out))
            appender.finish()
            writer.finish(-(-entry.layout.data_bytes // PAGE_BYTES))
        finally:
            writer.close()


class _Buckets:
    """The rows of shared regions, in region order, cut into runs that can be brought into order in memory."""

    def __init__(self, shared: RowLists, row_bytes: int, memory_bytes: int, disk: Disk, path: Path) -> None:
        self._shared, self._disk, self._path = shared, disk, path
        self.rows_each = max(1, memory_bytes // 4 // (row_bytes + 24))

    def _cut(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for first in range(0, self._shared.total, self.rows_each):
            yield first, self._shared.part(first, min(first + self.rows_each, self._shared.total)).astype(np.int64)

    def first_rows(self) -> NDArray[np.int64]:
        return np.arange(0, self._shared.total, self.rows_each, dtype=np.int64)

    def lists(self) -> RowLists:
        """The rows of each bucket, ascending: in the order in which they are spilled."""
        writer = RowListsWriter(self._disk, self._path, np.int64)
        for _, rows in self._cut():
            writer.append(np.sort(rows))
        return writer.finish()

    def ranks(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(the first row of a bucket, where in the region each of its spilled rows goes)."""
        for first, rows in self._cut():
            yield first, np.argsort(rows, kind="stable")
