"""Packing the rows of one table: every segment in batched passes over the base table, then the shared regions
into their order.

Rows of shared regions lie in another order than the base table's: they go through a spill file that is cut
into buckets, each of which fits in memory and is brought into order there.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.native import address_of
from featstore.base.rows import IN_ORDER, move_rows
from featstore.base.sort import radix_sort
from featstore.compile import segment_plan
from featstore.compile.decide import TableDecision
from featstore.compile.row_lists import RowLists, RowListsWriter
from featstore.compile.segment_pages import PAGE_WRITE_THREADS, Target
from featstore.compile.segment_plan import Route, plan_packing
from featstore.compile.segments import Packing, pack_episode
from featstore.compile.write_records import chunk_path, new_table, table_writer
from featstore.errors import CorruptionError
from featstore.layout import TableLayout
from featstore.plan.budget import TableNeed, own_bytes
from featstore.plan.extents import key_bits
from featstore.reader.reader import Reader
from featstore.storage.disk import Disk
from featstore.storage.generations import Generation
from featstore.storage.journal import TableProgress
from featstore.storage.manifest import TableEntry
from featstore.storage.store import OpenStore
from featstore.storage.table_writer import Catalogue, TableWriter, catalogue_rows
from featstore.units import PAGE_BYTES

#: The tables that are written for one table of the base store.
PARTS = ("packed", "shared", "resident", "device")
_PIECE_PAGES = 1024  # that are written at once


def table_needed_bytes(rows: int, row_bytes: int) -> int:
    """The smallest budget of compiling in which so many rows of this size can be packed, the base table's
    reader included."""
    inner = memory = segment_plan.needed_bytes(rows, row_bytes)
    while memory - packing_reader_bytes(memory, row_bytes) < inner:
        memory = inner + packing_reader_bytes(memory, row_bytes)
    return memory


def packing_reader_bytes(memory_bytes: int, row_bytes: int) -> int:
    """What of it the base table's reader has for staging and planning: as that of a loader, or more where
    rows are large."""
    return own_bytes(memory_bytes, [TableNeed(0, 0, row_bytes)])


class TablePacking:
    """Writes what a compiled trace has of one table. ``segments``: the rows of each mini-batch's own segment,
    ascending, and those of each group's region, in its order. ``save`` makes ``progress`` durable;
    ``tick(stage, bytes)`` is told what has been done."""

    def __init__(
        self, disk: Disk, base: OpenStore, plan: TableDecision, catalogue: Catalogue, generation: Generation,
        segments: tuple[RowLists, RowLists], memory_bytes: int, progress: TableProgress,
        save: Callable[[], None], tick: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._disk, self._base, self._plan, self._catalogue, self._generation = (
            disk,
            base,
            plan,
            catalogue,
            generation,
        )
        self._packed, self._shared = segments
        self._reader_bytes = packing_reader_bytes(memory_bytes, plan.table.row_bytes)
        self._memory_bytes = memory_bytes - self._reader_bytes
        self._progress, self._save, self._tick = progress, save, tick
        self._row_bytes = plan.table.row_bytes
        self._buckets = _Buckets(
            self._shared, plan.table.rows, self._row_bytes, self._memory_bytes, disk, self._scratch("buckets")
        )

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
            zip(
                PARTS,
                (self._packed.total, self._shared.total, len(plan.start), len(plan.device)),
                strict=True,
            )
        )
        base = f"{self._generation.name}/tables/{plan.table.name}"
        entries = {
            part: new_table(self._catalogue, f"{base}.{part}", count, plan.table.row_shape, plan.table.dtype)
            for part, count in rows.items()
        }
        if self._progress.done and self._progress.unfinished:
            raise CorruptionError(
                self._generation.journal, None, "no unfinished pages of a table that is done",
                f"{len(self._progress.unfinished):,}", "start anew with --overwrite",
            )  # fmt: skip
        if not self._progress.done:
            self._pack(entries)
            self._progress.done, self._progress.unfinished = True, []
            self._save()
        for entry in entries.values():
            catalogue_rows(self._catalogue, entry)
        return entries

    def _target(self, entry: TableEntry) -> Target:
        writer = table_writer(self._catalogue, entry, PAGE_WRITE_THREADS)
        return Target(writer, entry.layout, lambda chunk: chunk_path(self._catalogue, entry, chunk))

    def _spill(self) -> Target:
        spill = self._scratch("spill")
        self._disk.mkdir(spill)
        self._disk.fsync_dir(spill.parent)  # what the journal calls done must be found again after a crash
        layout = TableLayout.choose(self._shared.total, self._row_bytes)
        return Target(
            TableWriter(
                self._disk, layout, lambda c: spill / f"c{c}", spill / "checksums", PAGE_WRITE_THREADS
            ),
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
                    routes.append(
                        Route(self._alone(part, rows), np.zeros(1, np.int64), self._target(entries[part]))
                    )
            if self._shared.total:
                routes.append(Route(self._buckets.lists(), self._buckets.first_rows(), self._spill()))
            if routes:
                self._pack_routes(routes)
            for route in routes:
                route.target.writer.finish()
        finally:
            for route in routes:
                route.target.writer.close()
                if route.rows is not self._packed:
                    route.rows.close()
        if self._shared.total:
            self._order_shared(entries["shared"], routes[-1].target)

    def _pack_routes(self, routes: list[Route]) -> None:
        table, progress = self._plan.table, self._progress
        packing = plan_packing(routes, self._plan.table.rows, self._row_bytes, self._memory_bytes)
        slabs, episodes = -(-table.rows // packing.slab_rows), len(packing.episodes)
        if progress.episode > episodes or progress.slab > slabs:
            raise CorruptionError(
                self._generation.journal, None, f"at most {slabs:,} slabs in {episodes:,} passes done",
                f"{progress.slab:,} in {progress.episode:,}", "start anew with --overwrite",
            )  # fmt: skip
        for route, unfinished in zip(routes, progress.unfinished):  # none before the first checkpoint
            route.target.resume(unfinished)
        for earlier in packing.episodes[: progress.episode]:
            whole = Packing(routes, earlier)
            for turn in range(len(earlier)):
                whole.resume(turn)

        def save(slab: int) -> None:
            progress.slab, progress.unfinished = slab, [route.target.unfinished for route in routes]
            self._save()

        memory = self._reader_bytes + 4 * table.layout.pages
        only: dict[str, Any] = {"tables": [table.name], "static": None, "static_memory": 0, "by_row": True}
        with Reader(self._base, memory=memory, **only) as reader:
            for episode in range(progress.episode, len(packing.episodes)):
                pack_episode(reader, table.name, routes, packing, episode, progress.slab, save, self._tick)
                progress.episode, progress.slab = episode + 1, 0
                self._save()
        for route in routes:
            route.target.check_resumed()

    def _order_shared(self, entry: TableEntry, spill: Target) -> None:
        """Bring the spilled rows into the order of the regions, bucket by bucket: one is read and put in
        order while the one before it is written."""
        row_bytes, largest = self._row_bytes, min(self._buckets.rows_each, entry.rows)
        room_bytes = spill.pages_bytes(largest)
        spilled, *others = (aligned_buffer(room_bytes) for _ in range(3))
        ordered = [_Ordered(one) for one in others]
        writer = table_writer(self._catalogue, entry, PAGE_WRITE_THREADS)
        try:
            carried = spilled[:0]  # of the last page, which goes on with the next bucket
            for turn, (first, rank) in enumerate(self._buckets.ranks()):
                data, out = spill.rows_written(first, len(rank), spilled), ordered[turn % 2]
                out.wait()
                head = len(carried)
                out.data[:head] = carried
                move_rows(address_of(data), IN_ORDER, address_of(out.data[head:]), rank, row_bytes)
                end = head + len(data)
                last = first + len(rank) == entry.rows
                if last:
                    out.data[end : -(-end // PAGE_BYTES) * PAGE_BYTES] = 0
                whole = -(-end // PAGE_BYTES) if last else end // PAGE_BYTES
                out.write(writer, first * row_bytes // PAGE_BYTES, whole)
                carried = out.data[whole * PAGE_BYTES : end]
                self._tick("order", 2 * len(data))
            writer.finish()
        finally:
            writer.close()


class _Ordered:
    """A buffer of rows in order, which is written in pieces."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self._written: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._pieces = 0

    def write(self, writer: TableWriter, first_page: int, pages: int) -> None:
        """Write so many of its pages at a page offset."""
        for page in range(0, pages, _PIECE_PAGES):
            piece = self.data[page * PAGE_BYTES : min(pages, page + _PIECE_PAGES) * PAGE_BYTES]
            self._pieces += 1
            writer.write(first_page + page, piece, lambda: self._written.put(None))

    def wait(self) -> None:
        """Until it may be filled again."""
        for _ in range(self._pieces):
            self._written.get()
        self._pieces = 0


def bucket_rows(table_rows: int, row_bytes: int, memory_bytes: int) -> int:
    """Rows of a bucket: as many as a quarter of the memory takes, and as keys of row and place in the bucket
    have bits for."""
    places_max = 1 << min(32, 64 - max(1, (table_rows - 1).bit_length()))
    return max(1, min(places_max, memory_bytes // 4 // (row_bytes + 24)))


class _Buckets:
    """The rows of shared regions, in region order, cut into runs that can be brought into order in memory."""

    def __init__(
        self, shared: RowLists, table_rows: int, row_bytes: int, memory_bytes: int, disk: Disk, path: Path
    ) -> None:  # fmt: skip
        self._shared, self._disk, self._path = shared, disk, path
        self._row_bits = max(1, (table_rows - 1).bit_length())
        self.rows_each = bucket_rows(table_rows, row_bytes, memory_bytes)
        self._place_bits = key_bits(table_rows, self.rows_each, "pack shared rows: those of a bucket")

    def _cut(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for first in range(0, self._shared.total, self.rows_each):
            yield (
                first,
                self._shared.part(first, min(first + self.rows_each, self._shared.total)).astype(np.int64),
            )

    def first_rows(self) -> NDArray[np.int64]:
        return np.arange(0, self._shared.total, self.rows_each, dtype=np.int64)

    def lists(self) -> RowLists:
        """The rows of each bucket, ascending: in the order in which they are spilled."""
        writer = RowListsWriter(self._disk, self._path, np.int64)
        for _, rows in self._cut():
            writer.append(np.sort(rows))
        return writer.finish()

    def ranks(self) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """(the first row of a bucket, where in the region each of its spilled rows goes)."""
        for first, rows in self._cut():
            keys = rows.view(np.uint64) << np.uint64(self._place_bits)
            keys |= np.arange(len(rows), dtype=np.uint64)
            spare = np.empty_like(keys)
            if radix_sort(keys, spare, self._place_bits, self._place_bits + self._row_bits):
                keys = spare
            yield first, (keys & np.uint64((1 << self._place_bits) - 1)).astype(np.uint32)
