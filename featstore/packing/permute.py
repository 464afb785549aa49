"""Bringing rows from the source's order into the store's, in bounded memory and sequential passes.

Three ways, by what is needed:

- *as given*: source blocks are appended to the table. One read, one write.
- *in memory*: the table fits the budget. One read, scattered to its place in memory, one write.
- *spill* (:mod:`featstore.packing.spill`): neither. Two reads and two writes.

Each way saves its progress in the journal at checkpoints, after what it names is durable.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.native import address_of
from featstore.base.rows import IN_ORDER, move_rows
from featstore.base.system import started
from featstore.errors import BudgetError, FormatError, SourceError
from featstore.layout import TableLayout
from featstore.packing.convert import ValueReport
from featstore.packing.progress import PackStages
from featstore.packing.row_ids import inverse
from featstore.packing.sources.opening import FeatureSource
from featstore.storage.disk import Disk
from featstore.storage.journal import Journal, TableProgress
from featstore.storage.rows_digest import add, digest_rows
from featstore.storage.table_writer import Appender, TableWriter
from featstore.units import PAGE_BYTES

SOURCE_BLOCK_BYTES = 8 * 2**20
CHECKPOINT_BYTES = 2 * 2**30
_BLOCKS_HELD = 5  # of a source: its own, one being kept, one waiting, one in use, its cast copy
_BUCKET_INDEX_BYTES = 24  # a row's node id, its rank, and the sort's work space


@dataclass(frozen=True)
class RowMaps:
    """Where rows go and whose they are; each [rows], and None for the identity.

    Row i of the source goes to row ``row_of_source[i]`` of the table and is of node ``node_of_source[i]``;
    ``source_of_row`` is the inverse of the first. Without ids of its own, row i of a source is of node i.
    """

    row_of_source: NDArray[Any] | None = None
    source_of_row: NDArray[Any] | None = None
    node_of_source: NDArray[Any] | None = None
    node_of_row: NDArray[Any] | None = None

    @classmethod
    def of(
        cls, row_of_node: NDArray[Any] | None, node_of_row: NDArray[Any] | None, ids: NDArray[Any] | None
    ) -> RowMaps:
        """From the store's maps and the ids of the source's rows."""
        if ids is None:
            return cls(row_of_node, node_of_row, None, node_of_row)
        row_of_source = ids if row_of_node is None else row_of_node[ids]
        return cls(row_of_source, inverse(row_of_source), ids, node_of_row)

    @property
    def held_bytes(self) -> int:
        """Memory that they take; an array that is two of them counts once."""
        arrays = (self.row_of_source, self.source_of_row, self.node_of_source, self.node_of_row)
        return sum({id(a): a.nbytes for a in arrays if a is not None}.values())

    def nodes_of_rows(self, begin: int, end: int) -> NDArray[Any]:
        """Nodes of a run of the table's rows; empty where these are the rows' own numbers."""
        return _NO_NODES if self.node_of_row is None else np.asarray(self.node_of_row[begin:end])

    def nodes_of_sources(self, begin: int, end: int) -> NDArray[Any]:
        """Nodes of a run of the source's rows; empty where these are the rows' own numbers."""
        return _NO_NODES if self.node_of_source is None else self.node_of_source[begin:end]


_NO_NODES = np.empty(0, np.int64)


@dataclass(frozen=True)
class PermuteJob:
    """What one table's pass needs to know."""

    disk: Disk
    name: str
    source: FeatureSource
    layout: TableLayout
    report: ValueReport
    maps: RowMaps
    spill_directory: Path
    chunk_path: Callable[[int], Path]
    memory_bytes: int  # for buffers: what the maps leave of the budget
    fixed_bytes: int  # the maps
    journal: Journal
    progress: TableProgress
    stages: PackStages
    label: str = ""  # what progress calls it, where that is not its name

    def begin(self, stage: str, done_bytes: int = 0) -> None:
        """A pass over the table's rows begins, with what of it is done already."""
        self.stages.begin(stage, self.label or self.name, self.layout.data_bytes, done_bytes)

    @property
    def block_rows(self) -> int:
        return max(1, min(SOURCE_BLOCK_BYTES, self.memory_bytes // 16) // self.layout.row_bytes)

    @property
    def source_bytes(self) -> int:
        """Memory of reading the source."""
        return (
            _BLOCKS_HELD * self.block_rows * max(self.layout.row_bytes, self.source_row_bytes)
            + self.source.held_bytes
        )

    @property
    def source_row_bytes(self) -> int:
        return int(np.prod(self.source.row_shape, dtype=np.int64)) * self.source.dtype.itemsize


def ahead(blocks: Iterator[Any], depth: int = 1) -> Generator[Any, None, None]:
    """The same items, produced by another thread up to ``depth`` items ahead. Errors come through; leaving
    early stops it."""
    items: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: tuple[bool, Any]) -> None:
        while not stop.is_set():
            try:
                items.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for block in blocks:
                put((True, block))
                if stop.is_set():
                    return
            put((False, None))
        except BaseException as error:
            put((False, error))

    thread = threading.Thread(target=produce, name="featstore-source", daemon=True)
    started(thread)
    try:
        while True:
            more, item = items.get()
            if not more:
                if item is not None:
                    raise item
                return
            yield item
    finally:
        stop.set()
        thread.join()


def _kept(blocks: Iterator[NDArray[Any]], block_rows: int) -> Iterator[NDArray[Any]]:
    """The blocks of a source, which are only lent, copied into three buffers that take turns: enough for
    :func:`ahead`."""
    buffers: list[NDArray[Any]] = []
    for turn, block in enumerate(blocks):
        if len(buffers) < 3:
            shape = (block_rows, *block.shape[1:])
            buffers.append(aligned_buffer(math.prod(shape) * block.itemsize).view(block.dtype).reshape(shape))
        kept = buffers[turn % 3][: len(block)]
        kept[...] = block
        yield kept


def source_blocks(job: PermuteJob, start: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(number of the first row, rows as uint8 [n, row_bytes]) from ``start`` on, cast, counted and
    checked."""
    row = start
    counted = job.progress.rows_counted
    for block in ahead(_kept(job.source.blocks(start, job.block_rows), job.block_rows)):
        if row < counted:  # seen before the interruption: cast, but do not count again
            before = job.report.state()
            rows = job.report.convert(block[: counted - row])
            job.report.restore(before)
            if row + len(block) > counted:
                rows = np.concatenate([rows, job.report.convert(block[counted - row :])])
        else:
            rows = job.report.convert(block)
        view = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(len(rows), job.layout.row_bytes)
        if row + len(view) > job.layout.rows:
            raise SourceError(f"{job.source.name} has more than the {job.layout.rows:,} rows it said")
        fresh = max(0, counted - row)
        if fresh < len(view):
            part = digest_rows(
                address_of(view) + fresh * job.layout.row_bytes,
                job.layout.row_bytes,
                job.maps.nodes_of_sources(row + fresh, row + len(view)),
                row + fresh,
                len(view) - fresh,
            )
            job.progress.source_digest = add(job.progress.source_digest, int(part))
            job.progress.rows_counted = row + len(view)
        yield row, view
        row += len(view)
    if row != job.layout.rows:
        raise SourceError(f"{job.source.name} ended after {row:,} rows; {job.layout.rows:,} were expected")


def save_progress(job: PermuteJob) -> None:
    job.progress.report = job.report.state()
    job.journal.save()


def check_progress(job: PermuteJob) -> None:
    """Raise FormatError where a journal says more of a table than there can be."""
    progress, layout = job.progress, job.layout
    table_bytes = -(-layout.data_bytes // PAGE_BYTES) * PAGE_BYTES
    if (
        progress.rows_counted > layout.rows
        or progress.written_bytes > table_bytes
        or progress.written_bytes % PAGE_BYTES
        or progress.buckets_written > layout.rows
        or sum(progress.spill_bytes) > table_bytes + PAGE_BYTES * len(progress.spill_bytes)
    ):
        raise FormatError(
            f"table {job.name!r} has {layout.rows:,} rows of {layout.row_bytes:,} bytes: what it says of "
            "them is impossible"
        )


def as_given(job: PermuteJob, writer: TableWriter) -> None:
    """Append the source's rows as they come."""
    start_byte = job.progress.written_bytes
    buffer = min(SOURCE_BLOCK_BYTES, max(PAGE_BYTES, (job.memory_bytes - job.source_bytes) // 4))
    _check_memory(job)
    appender = Appender(writer, start_byte, buffer)
    row = start_byte // job.layout.row_bytes
    skip = start_byte - row * job.layout.row_bytes
    since = 0
    job.begin("write", start_byte)
    for _, rows in source_blocks(job, row):
        data = rows.reshape(-1)[skip:]
        skip = 0
        appender.append(data)
        since += len(data)
        job.stages.add(len(data))
        if since >= CHECKPOINT_BYTES:
            writer.checkpoint()
            job.progress.written_bytes = appender.page * PAGE_BYTES
            save_progress(job)
            since = 0
    appender.finish()
    job.progress.written_digest = job.progress.source_digest


def fits_in_memory(job: PermuteJob) -> bool:
    """Whether the table can be scattered whole."""
    return job.source_bytes + job.layout.data_bytes + 2 * PAGE_BYTES <= job.memory_bytes


def in_memory(job: PermuteJob, writer: TableWriter) -> None:
    """Scatter the whole table in memory, then write it."""
    row_of_source = job.maps.row_of_source
    assert row_of_source is not None
    layout, progress = job.layout, job.progress
    size = -(-layout.data_bytes // PAGE_BYTES) * PAGE_BYTES
    table = aligned_buffer(size)
    progress.rows_counted, progress.source_digest = 0, 0
    job.begin("read")
    for first, rows in source_blocks(job, 0):
        to = row_of_source[first : first + len(rows)]
        move_rows(address_of(rows), IN_ORDER, address_of(table), to, layout.row_bytes)
        job.stages.add(rows.nbytes)
    nodes = job.maps.nodes_of_rows(0, layout.rows)
    progress.written_digest = int(digest_rows(address_of(table), layout.row_bytes, nodes, 0, layout.rows))
    job.begin("write")
    for at in range(0, size, SOURCE_BLOCK_BYTES):
        piece = table[at : min(at + SOURCE_BLOCK_BYTES, size)]
        writer.write(at // PAGE_BYTES, piece, partial(job.stages.add, len(piece)))


def _check_memory(job: PermuteJob) -> None:
    """Raise BudgetError, with the smallest budget that works, where rows cannot even be streamed: blocks grow
    with the budget."""
    needed = job.memory_bytes
    while (more := replace(job, memory_bytes=needed).source_bytes + 4 * PAGE_BYTES) > needed:
        needed = more
    if needed > job.memory_bytes:
        raise BudgetError(
            needed + job.fixed_bytes, job.memory_bytes + job.fixed_bytes, f"pack table {job.name!r}"
        )


def spool(
    source: FeatureSource, disk: Disk, path: Path, memory_bytes: int, stages: PackStages
) -> FeatureSource:
    """Write a source whose length is not known to a plain file, and return that as the source."""
    from featstore.packing.sources.files import raw_rows

    rows = 0
    file = disk.create(path)
    try:
        for block in source.blocks(
            0, max(1, min(SOURCE_BLOCK_BYTES, memory_bytes // 16) // source.row_bytes)
        ):
            data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            disk.write(file, rows * source.row_bytes, data)
            rows += len(block)
            stages.add(len(data))
        disk.fsync(file)
    finally:
        disk.close(file)
    spooled = raw_rows(path, source.dtype, (rows, *source.row_shape), name=source.name)
    spooled.chosen = source.chosen
    return spooled
