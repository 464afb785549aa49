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
from contextlib import closing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.checksum import crc_pages
from featstore.base.files import RegularFile
from featstore.base.native import address_of
from featstore.base.rows import IN_ORDER, move_rows
from featstore.errors import CorruptionError
from featstore.packing.permute import CHECKPOINT_BYTES, PermuteJob, ahead, save_progress
from featstore.packing.spill_files import ANEW, SpillPlan, spill_pass, spill_path
from featstore.storage.rows_digest import add, digest_rows
from featstore.storage.table_writer import TableWriter
from featstore.units import PAGE_BYTES

PIECE_BYTES = 8 * 2**20  # of a bucket, handed to the writer at once


def spill(job: PermuteJob, writer: TableWriter) -> None:
    """Permute through spill files; see the module's text."""
    plan = SpillPlan.choose(job)
    if not job.progress.spilled:
        spill_pass(job, plan)
    _bucket_pass(job, plan, writer)


def _bucket_pass(job: PermuteJob, plan: SpillPlan, writer: TableWriter) -> None:
    """Read bucket after bucket, scatter, write; a page that two buckets share is carried from one to the
    next."""
    layout, progress = job.layout, job.progress
    if progress.buckets_written == plan.buckets:
        return
    row_bytes = layout.row_bytes
    capacity = -(-(plan.rows_per_bucket * row_bytes) // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
    buffers: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
    for _ in range(2):
        buffers.put(aligned_buffer(capacity))
    carry = _carried(job, progress.buckets_written * plan.rows_per_bucket * row_bytes)
    job.begin("write", progress.buckets_written * plan.rows_per_bucket * row_bytes)
    with closing(ahead(_slabs(job, plan, progress.buckets_written))) as slabs:
        _write_buckets(job, plan, writer, slabs, buffers, carry)


def _write_buckets(
    job: PermuteJob, plan: SpillPlan, writer: TableWriter, slabs: Iterator[NDArray[np.uint8]],
    buffers: queue.SimpleQueue[NDArray[np.uint8]], carry: NDArray[np.uint8],
) -> None:  # fmt: skip
    """Write the buckets that are left, whose rows ``slabs`` gives; ``carry``: bytes of the page that the
    first one begins in."""
    source_of_row, since = job.maps.source_of_row, 0
    assert source_of_row is not None
    progress, layout, row_bytes = job.progress, job.layout, job.layout.row_bytes
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
    job: PermuteJob, writer: TableWriter, bucket: int, carry: NDArray[np.uint8], page: int
) -> None:
    """Make all buckets up to this one durable, the page shared with the next one too, and drop their spill
    files."""
    job.progress.carry_checksum = _checksum(carry)
    if len(carry):
        writer.checkpoint()
        shared = aligned_buffer(PAGE_BYTES)
        shared[: len(carry)] = carry
        writer.write(page, shared, lambda: None)
    writer.checkpoint()
    before = job.progress.buckets_written
    job.progress.buckets_written = bucket + 1
    save_progress(job)
    for old in range(before, bucket + 1):
        job.disk.unlink(spill_path(job, old))


def _write_whole(
    job: PermuteJob,
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
        try:
            job.stages.add(count)
        finally:  # whoever waits for the buffer learns of the error then
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    buffers.put(buffer)

    if size == 0:
        buffers.put(buffer)
    for at in range(0, size, PIECE_BYTES):
        piece = buffer[at : min(at + PIECE_BYTES, size)]
        writer.write(first_page + at // PAGE_BYTES, piece, partial(written, len(piece)))


def _carried(job: PermuteJob, byte: int) -> NDArray[np.uint8]:
    """The bytes before ``byte`` of the page that holds it, from the table: what the bucket before it left
    there. Raises CorruptionError where they are not as they were written; nothing else would see it, as the
    page gets a new checksum."""
    page = byte // PAGE_BYTES
    size = byte - page * PAGE_BYTES
    if size == 0:
        return np.empty(0, np.uint8)
    chunk, within = divmod(page, job.layout.pages_per_chunk)
    path = job.chunk_path(chunk)
    with RegularFile(path, advice=ANEW) as file:
        carry = file.read_at(within * PAGE_BYTES, size)
    known, found = job.progress.carry_checksum, _checksum(carry)
    if known is not None and found != known:  # none: of an earlier version
        expected = f"checksum {known:08x} of what was written of the 4 KiB page"
        raise CorruptionError(path, within * PAGE_BYTES, expected, f"{found:08x}", ANEW)
    return carry


def _checksum(carry: NDArray[np.uint8]) -> int:
    """Of a page that begins with these bytes, and has zeros after them."""
    page = np.zeros(PAGE_BYTES, np.uint8)
    page[: len(carry)] = carry
    return int(crc_pages(page)[0])


def _slabs(job: PermuteJob, plan: SpillPlan, first_bucket: int) -> Iterator[NDArray[np.uint8]]:
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
        with RegularFile(spill_path(job, bucket), direct=True, advice=ANEW) as file:
            for at in range(0, rows, job.block_rows):
                count = min(job.block_rows, rows - at) * row_bytes
                begin = at * row_bytes // PAGE_BYTES * PAGE_BYTES
                inside = at * row_bytes - begin
                buffer = buffers[turn % 3][: -(-(inside + count) // PAGE_BYTES) * PAGE_BYTES]
                file.read_into(buffer, begin, inside + count)
                turn += 1
                yield buffer[inside : inside + count]
