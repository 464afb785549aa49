"""The first pass of a permutation through spill files: the source's rows into files, a bucket each.

A plan says how many buckets there are and how much of each is gathered before it is written;
:mod:`featstore.packing.spill` has the reasons, and the second pass.
"""

from __future__ import annotations

import queue
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.compilation import njit
from featstore.base.files import RegularFile
from featstore.base.native import address_of, memcpy
from featstore.base.system import room_for_files, submitted
from featstore.base.threads import thread_pool
from featstore.errors import BudgetError, SourceError
from featstore.packing.permute import CHECKPOINT_BYTES, PermuteJob, save_progress, source_blocks
from featstore.storage.disk import File
from featstore.units import PAGE_BYTES

FLUSH_BYTES_MAX = 4 * 2**20
FLUSH_BYTES_MIN = 64 * 2**10
ANEW = "start the pack anew with --overwrite"  # after damage to files of an unfinished pack
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
    def fitting(cls, job: PermuteJob, memory_bytes: int) -> SpillPlan | None:
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
    def choose(cls, job: PermuteJob) -> SpillPlan:
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


def spill_path(job: PermuteJob, bucket: int) -> Path:
    return job.spill_directory / f"{job.name}.{bucket}"


class _SpillFiles:
    """The buckets' spill files and their buffers, written by two threads."""

    def __init__(self, job: PermuteJob, plan: SpillPlan) -> None:
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
        room_for_files(plan.buckets)
        self._files: list[File] = []
        try:
            for bucket in range(plan.buckets):
                self._files.append(job.disk.create(spill_path(job, bucket), keep=True, direct=True))
                job.disk.truncate(self._files[bucket], int(self.offset[bucket]))
            self._keep_partial_rows()
        except BaseException:
            self._close_files()
            raise
        self._pool = thread_pool(2, "featstore-spill")
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
                with RegularFile(file.path, advice=ANEW) as old:
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
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            self.job.disk.close(file)


def spill_pass(job: PermuteJob, plan: SpillPlan) -> None:
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
                if files.fill[bucket] >= plan.flush_bytes:  # by more than that, where a row is longer
                    files.flush(bucket, int(files.fill[bucket]) // PAGE_BYTES * PAGE_BYTES)
            job.stages.add(rows.nbytes)
            since += rows.nbytes
            if since >= CHECKPOINT_BYTES:
                files.checkpoint()
                save_progress(job)
                since = 0
        for bucket in range(plan.buckets):
            size = -(-int(files.fill[bucket]) // PAGE_BYTES) * PAGE_BYTES
            if size:
                files.flush(bucket, size)
        files.checkpoint()
        job.progress.spilled = True
        save_progress(job)
    finally:
        files.close()
