"""Permuting a table that does not fit in memory: through spill files, in two sequential passes.

The table's rows are cut into buckets, runs of rows that fit in memory. The first pass reads the source and
appends each row to its bucket's spill file; within a bucket, rows lie in source order, so where each belongs
follows from the map alone and no index is spilled. The second pass reads one bucket at a time, scatters it in
memory and writes it. Two reads and two writes of the table, all sequential: the fewest there are for a
permutation that does not fit (Aggarwal and Vitter, CACM'88, for one pass of distribution).

After an interruption only whole flushed buffers count: the rows that were still in memory are read again from
the earliest of them, and each bucket skips those it already has.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.compilation import njit
from featstore.base.files import RegularFile
from featstore.base.native import address_of, memcpy
from featstore.base.rows import IN_ORDER, move_rows
from featstore.base.system import submitted
from featstore.errors import BudgetError, SourceError
from featstore.packing.permute import Job, ahead, save, source_blocks
from featstore.storage.disk import File
from featstore.storage.rows_digest import add, digest_rows
from featstore.storage.table_writer import TableWriter
from featstore.units import PAGE_BYTES

#: Bytes of a spill between checkpoints, and of a piece of a bucket handed to the writer.
CHECKPOINT_BYTES = 2 * 2**30
PIECE_BYTES = 8 * 2**20
FLUSH_BYTES_MAX = 4 * 2**20
FLUSH_BYTES_MIN = 64 * 2**10
_ANEW = "start the pack anew with --overwrite"
_BUCKET_INDEX_BYTES = 24  # a row's node id, its rank, and the sort's work space


@njit(cache=True, nogil=True)
def spill_rows(
    block: int,
    begin: int,
    end: int,
    first_node: int,
    row_bytes: int,
    row_of_node: NDArray[Any],
    rows_per_bucket: int,
    skip: NDArray[np.int64],
    fill: NDArray[np.int64],
    buffers: NDArray[np.int64],
    flush_bytes: int,
) -> int:
    """Append rows [begin, end) of a block to their buckets' buffers, until one is full.

    Returns the index of the next row; where that is not ``end``, the bucket of the row before it is full
    (fill >= flush_bytes).
    """
    for i in range(begin, end):
        bucket = np.int64(row_of_node[first_node + i]) // rows_per_bucket
        if skip[bucket] > 0:
            skip[bucket] -= 1
            continue
        memcpy(buffers[bucket] + fill[bucket], block + i * row_bytes, row_bytes)
        fill[bucket] += row_bytes
        if fill[bucket] >= flush_bytes:
            return i + 1
    return end


@njit(cache=True, nogil=True)
def arrivals(
    row_of_node: NDArray[Any],
    rows_per_bucket: int,
    wanted: NDArray[np.int64],
    restart: NDArray[np.int64],
    skip: NDArray[np.int64],
) -> None:
    """Where a spill must go on when bucket b holds ``wanted[b]`` rows: restart[0] = the first source row that
    some bucket still lacks, skip[b] = rows of b from there on that it already has."""
    seen = np.zeros(wanted.shape[0], np.int64)
    restart[0] = row_of_node.shape[0]
    for node in range(row_of_node.shape[0]):
        bucket = np.int64(row_of_node[node]) // rows_per_bucket
        if seen[bucket] == wanted[bucket]:
            restart[0] = node
            break
        seen[bucket] += 1
    for b in range(wanted.shape[0]):
        skip[b] = wanted[b] - seen[b]


@dataclass(frozen=True)
class SpillPlan:
    """Sizes of a spill: buckets, and the buffers of both passes."""

    buckets: int
    rows_per_bucket: int
    flush_bytes: int

    @classmethod
    def fitting(cls, job: Job, memory_bytes: int) -> SpillPlan | None:
        """The fewest buckets that this memory allows; None where two passes do not do."""
        job = replace(job, memory_bytes=memory_bytes)
        layout, row_bytes = job.layout, job.layout.row_bytes
        # The second pass holds two buckets (one is written while the next is scattered), their index, and
        # three slabs.
        left = memory_bytes - 3 * (job.block_rows * row_bytes + 2 * PAGE_BYTES) - 4 * PAGE_BYTES
        rows_per_bucket = min(layout.rows, left // (2 * row_bytes + _BUCKET_INDEX_BYTES))
        if rows_per_bucket < 1:
            return None
        buckets = -(-layout.rows // rows_per_bucket)
        # The first pass holds source blocks, a buffer for each bucket and a few on their way to the disk.
        each = (memory_bytes - job.source_bytes) // (buckets + 4) - row_bytes - PAGE_BYTES
        flush = min(FLUSH_BYTES_MAX, each // PAGE_BYTES * PAGE_BYTES)
        if flush < min(FLUSH_BYTES_MIN, -(-layout.data_bytes // buckets)) or flush < PAGE_BYTES:
            return None
        return cls(buckets, rows_per_bucket, flush)

    @classmethod
    def choose(cls, job: Job) -> SpillPlan:
        """The plan for the job's budget. Raises BudgetError that names the smallest budget that works (within
        1 %)."""
        plan = cls.fitting(job, job.memory_bytes)
        if plan is not None:
            return plan
        low, high = job.memory_bytes, 2 * max(0, job.memory_bytes) + PAGE_BYTES
        while cls.fitting(job, high) is None:
            low, high = high, 2 * high
        while high - low > high // 100:
            middle = (low + high) // 2
            low, high = (low, middle) if cls.fitting(job, middle) is not None else (middle, high)
        raise BudgetError(
            high + job.fixed_bytes,
            job.memory_bytes + job.fixed_bytes,
            f"permute table {job.name!r} in two passes",
        )


def spill(job: Job, writer: TableWriter) -> None:
    """Permute through spill files; see the module's text."""
    plan = SpillPlan.choose(job)
    if not job.progress.spilled:
        _spill_pass(job, plan)
    _bucket_pass(job, plan, writer)


def spill_path(job: Job, bucket: int) -> Path:
    return job.spill_directory / f"{job.name}.{bucket}"


class _SpillFiles:
    """The buckets' spill files and their buffers, written by two threads."""

    def __init__(self, job: Job, plan: SpillPlan) -> None:
        self.job, self.plan = job, plan
        done = job.progress.spill_bytes or [0] * plan.buckets
        if len(done) != plan.buckets:
            raise SourceError(
                "cannot resume with another --memory: the spill's buckets would differ; use the same, "
                "or start anew with --overwrite"
            )
        row_bytes = job.layout.row_bytes
        capacity = -(-(plan.flush_bytes + row_bytes) // PAGE_BYTES) * PAGE_BYTES
        self.offset = np.array(done, np.int64)  # of each buffer's first byte in its file
        self.fill = np.zeros(plan.buckets, np.int64)
        self.wanted = self.offset // row_bytes
        self._buffers = [aligned_buffer(capacity) for _ in range(plan.buckets)]
        self._spare: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(3):
            self._spare.put(aligned_buffer(capacity))
        self.addresses = np.array([address_of(b) for b in self._buffers], np.int64)
        self._files: list[File] = []
        for bucket in range(plan.buckets):
            file = job.disk.create(spill_path(job, bucket), keep=True, direct=True)
            job.disk.truncate(file, int(self.offset[bucket]))
            self._files.append(file)
        self._keep_partial_rows()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="featstore-spill")
        self._pending: list[Future[None]] = []

    def _keep_partial_rows(self) -> None:
        """After an interruption a file may end within a row: that row comes again, so go back to where it
        begins."""
        row_bytes = self.job.layout.row_bytes
        for bucket, file in enumerate(self._files):
            whole = int(self.wanted[bucket]) * row_bytes
            page = whole // PAGE_BYTES * PAGE_BYTES
            self.fill[bucket] = whole - page
            if whole > page:
                with RegularFile(file.path, advice=_ANEW) as old:
                    old.read_into(self._buffers[bucket][: whole - page], page)
            self.offset[bucket] = page

    def flush(self, bucket: int, size: int) -> None:
        """Write the first ``size`` bytes of a bucket's buffer; the rest moves to the start of a fresh one."""
        buffer = self._buffers[bucket]
        fresh = self._spare.get()
        rest = int(self.fill[bucket]) - size
        if rest > 0:
            fresh[:rest] = buffer[size : size + rest]
        self._buffers[bucket] = fresh
        self.addresses[bucket] = address_of(fresh)
        offset = int(self.offset[bucket])
        self.offset[bucket] += size
        self.fill[bucket] = max(rest, 0)
        for future in [f for f in self._pending if f.done()]:
            self._pending.remove(future)
            future.result()
        self._pending.append(submitted(self._pool, self._write, bucket, offset, buffer, size))

    def _write(self, bucket: int, offset: int, buffer: NDArray[np.uint8], size: int) -> None:
        try:
            self.job.disk.write(self._files[bucket], offset, buffer[:size])
        finally:
            self._spare.put(buffer)

    def checkpoint(self) -> None:
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        for file in self._files:
            self.job.disk.fsync(file)
        self.job.disk.fsync_dir(self.job.spill_directory)
        self.job.progress.spill_bytes = [int(n) for n in self.offset]

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for file in self._files:
            self.job.disk.close(file)


def _spill_pass(job: Job, plan: SpillPlan) -> None:
    row_of_source = job.maps.row_of_source
    assert row_of_source is not None
    files = _SpillFiles(job, plan)
    try:
        restart, skip = np.zeros(1, np.int64), np.zeros(plan.buckets, np.int64)
        arrivals(row_of_source, plan.rows_per_bucket, files.wanted, restart, skip)
        since = 0
        job.begin("spill", int(restart[0]) * job.layout.row_bytes)
        for first, rows in source_blocks(job, int(restart[0])) if restart[0] < job.layout.rows else ():
            at = 0
            while at < len(rows):
                at = spill_rows(
                    address_of(rows), at, len(rows), first, job.layout.row_bytes, row_of_source,
                    plan.rows_per_bucket, skip, files.fill, files.addresses, plan.flush_bytes,
                )  # fmt: skip
                bucket = int(row_of_source[first + at - 1]) // plan.rows_per_bucket
                if files.fill[bucket] >= plan.flush_bytes:
                    files.flush(bucket, plan.flush_bytes)
            job.stages.add(rows.nbytes)
            since += rows.nbytes
            if since >= CHECKPOINT_BYTES:
                files.checkpoint()
                save(job)
                since = 0
        for bucket in range(plan.buckets):
            size = -(-int(files.fill[bucket]) // PAGE_BYTES) * PAGE_BYTES
            if size:
                files.flush(bucket, size)
        files.checkpoint()
        job.progress.spilled = True
        save(job)
    finally:
        files.close()


def _bucket_pass(job: Job, plan: SpillPlan, writer: TableWriter) -> None:
    """Read bucket after bucket, scatter, write; a page that two buckets share is carried from one to the
    next."""
    source_of_row = job.maps.source_of_row
    assert source_of_row is not None
    layout, progress = job.layout, job.progress
    if progress.buckets_written == plan.buckets:
        return
    row_bytes = layout.row_bytes
    capacity = -(-(plan.rows_per_bucket * row_bytes) // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
    buffers: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
    for _ in range(2):
        buffers.put(aligned_buffer(capacity))
    since = 0
    carry = _carried(job, progress.buckets_written * plan.rows_per_bucket * row_bytes)
    job.begin("write", progress.buckets_written * plan.rows_per_bucket * row_bytes)
    slabs = ahead(_slabs(job, plan, progress.buckets_written))
    for bucket in range(progress.buckets_written, plan.buckets):
        begin_row = bucket * plan.rows_per_bucket
        end_row = min(begin_row + plan.rows_per_bucket, layout.rows)
        nodes = job.maps.nodes_of_rows(begin_row, end_row)
        rank = np.argsort(source_of_row[begin_row:end_row])
        buffer = buffers.get()
        buffer[: len(carry)] = carry
        out = address_of(buffer) + len(carry)
        at = 0
        while at < end_row - begin_row:
            slab = next(slabs)
            count = len(slab) // row_bytes
            move_rows(address_of(slab), IN_ORDER, out, rank[at : at + count], row_bytes)
            at += count
        part = digest_rows(out, row_bytes, nodes, begin_row, end_row - begin_row)
        progress.written_digest = add(progress.written_digest, int(part))
        # All whole pages go out now; the page in which the next bucket begins waits for it.
        filled = len(carry) + (end_row - begin_row) * row_bytes
        last = bucket == plan.buckets - 1
        whole = (-(-filled // PAGE_BYTES) if last else filled // PAGE_BYTES) * PAGE_BYTES
        buffer[filled : max(whole, filled)] = 0
        carry = buffer[min(whole, filled) : filled].copy()
        _write_whole(job, writer, buffer, whole, begin_row * row_bytes // PAGE_BYTES, buffers)
        since += filled
        if since >= CHECKPOINT_BYTES or last:
            _bucket_checkpoint(job, writer, bucket, carry, end_row * row_bytes // PAGE_BYTES)
            since = 0


def _bucket_checkpoint(
    job: Job, writer: TableWriter, bucket: int, carry: NDArray[np.uint8], page: int
) -> None:
    """Make all buckets up to this one durable, the page shared with the next one too, and drop their spill
    files."""
    if len(carry):
        writer.checkpoint()
        shared = aligned_buffer(PAGE_BYTES)
        shared[: len(carry)] = carry
        writer.write(page, shared, lambda: None)
    writer.checkpoint()
    before = job.progress.buckets_written
    job.progress.buckets_written = bucket + 1
    save(job)
    for old in range(before, bucket + 1):
        job.disk.unlink(spill_path(job, old))


def _write_whole(
    job: Job,
    writer: TableWriter,
    buffer: NDArray[np.uint8],
    size: int,
    first_page: int,
    buffers: queue.SimpleQueue[NDArray[np.uint8]],
) -> None:
    """Write a bucket's pages in pieces; its buffer is free again when the last piece is written."""
    left = [-(-size // PIECE_BYTES)]
    lock = threading.Lock()

    def written(count: int) -> None:
        job.stages.add(count)
        with lock:
            left[0] -= 1
            if left[0] == 0:
                buffers.put(buffer)

    if size == 0:
        buffers.put(buffer)
    for at in range(0, size, PIECE_BYTES):
        piece = buffer[at : min(at + PIECE_BYTES, size)]
        writer.write(first_page + at // PAGE_BYTES, piece, partial(written, len(piece)))


def _carried(job: Job, byte: int) -> NDArray[np.uint8]:
    """The bytes before ``byte`` of the page that holds it, from the table: what the bucket before it left
    there."""
    page = byte // PAGE_BYTES
    size = byte - page * PAGE_BYTES
    if size == 0:
        return np.empty(0, np.uint8)
    chunk, within = divmod(page, job.layout.pages_per_chunk)
    with RegularFile(job.chunk_path(chunk), advice=_ANEW) as file:
        return file.read_at(within * PAGE_BYTES, size)


def _slabs(job: Job, plan: SpillPlan, first_bucket: int) -> Iterator[NDArray[np.uint8]]:
    """The rows of the spill files from one bucket on, in order, as bytes; a slab never spans two buckets.

    Three buffers take turns: one is being read, one waits, one is in use.
    """
    row_bytes = job.layout.row_bytes
    buffers = [
        aligned_buffer(-(-job.block_rows * row_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES)
        for _ in range(3)
    ]
    turn = 0
    for bucket in range(first_bucket, plan.buckets):
        rows = min(plan.rows_per_bucket, job.layout.rows - bucket * plan.rows_per_bucket)
        with RegularFile(spill_path(job, bucket), direct=True, advice=_ANEW) as file:
            for at in range(0, rows, job.block_rows):
                count = min(job.block_rows, rows - at) * row_bytes
                begin = at * row_bytes // PAGE_BYTES * PAGE_BYTES
                inside = at * row_bytes - begin
                buffer = buffers[turn % 3][: -(-(inside + count) // PAGE_BYTES) * PAGE_BYTES]
                file.read_into(buffer, begin, inside + count)
                turn += 1
                yield buffer[inside : inside + count]
