"""Runs of reads through an engine, timed: what calibration and its checks are made of."""

from __future__ import annotations

import os
import threading
import time
from math import gcd
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.base.files import RegularFile
from featstore.engine import EngineName, engine_class, make
from featstore.engine.base import Engine
from featstore.engine.files import TableFiles
from featstore.engine.lane import Lane
from featstore.layout import TableLayout
from featstore.plan.cost import DeviceModel
from featstore.plan.extents import plan_extents
from featstore.storage.store import OpenStore, Table
from featstore.units import EXTENT_BYTES_MAX, PAGE_BYTES

BENCH_QUEUE_DEPTH = 128
BENCH_STAGING_BYTES = 16 * 2**20
_OUT_ROWS = 2048
_ROW_BYTES_MAX = 512
_UNSERVED = np.empty(0, np.uint8)


class LaneBench:
    """Times runs of reads of one size over a table's chunk files, cold, through an engine; see the module's
    text.

    To the engine the files are rows of ``row_bytes`` (a divisor of a page), of which each extent wants one a
    page.
    """

    def __init__(
        self,
        store: OpenStore,
        table: Table,
        engine: EngineName,
        queue_depth: int = BENCH_QUEUE_DEPTH,
        threads: int | None = None,
    ) -> None:
        layout = table.layout
        self.row_bytes = gcd(layout.chunk_bytes, _ROW_BYTES_MAX)
        self._layout = TableLayout(
            layout.chunks * layout.chunk_bytes // self.row_bytes,
            self.row_bytes,
            layout.chunk_bytes // self.row_bytes,
        )
        self._checksums = store.load(table.entry.page_checksums)
        self._paths = [store.path / table.entry.chunk_path(chunk) for chunk in range(layout.chunks)]
        self._wanted = engine_class(engine).access
        files = self._open()
        self.access, self.access_because = files.access, files.buffered_because
        files.close()
        self._engine: Engine = make(engine, queue_depth, BENCH_STAGING_BYTES, EXTENT_BYTES_MAX, threads)
        self.threads = self._engine.threads
        self.cpu_seconds = 0.0  # of this process, in the last run
        self._out = np.zeros(_OUT_ROWS * self.row_bytes, np.uint8)
        self._random = np.random.default_rng(0)

    def places(self, extent_bytes: int) -> int:
        """How many distinct extents of this size the files have; none crosses from one file to the next."""
        pages = self._layout.chunk_bytes // PAGE_BYTES  # a last page that is not full is left out
        return self._layout.chunks * (pages // (extent_bytes // PAGE_BYTES))

    def run(self, extent_bytes: int, reads: int) -> float:
        """Seconds for so many random reads of this size. Raises CorruptionError and DeviceError."""
        pages = extent_bytes // PAGE_BYTES
        per_file = self._layout.chunk_bytes // PAGE_BYTES // pages
        chosen = np.sort(self._random.choice(self.places(extent_bytes), reads, replace=False)).astype(
            np.int64
        )
        first_page = chosen // per_file * self._layout.pages_per_chunk + chosen % per_file * pages
        files = self._open()
        try:
            return self._time(files, first_page, pages)
        finally:
            files.close()

    def run_dense(self, gap_pages: int, region_pages: int) -> tuple[int, int, float]:
        """Reads, bytes and seconds for half of the pages of a region at a random place, with gaps read
        through."""
        per_page = PAGE_BYTES // self.row_bytes
        pages = self._layout.rows // per_page
        region_pages = min(region_pages, pages)
        begin = int(self._random.integers(0, pages - region_pages + 1))
        wanted = begin + np.sort(
            self._random.choice(region_pages, max(1, region_pages // 2), replace=False)
        ).astype(np.int64)
        model = DeviceModel(0.0, 1.0, 0.0, gap_pages)
        positions = (np.arange(len(wanted)) % _OUT_ROWS).astype(np.int32)
        plan = plan_extents(
            wanted * per_page, positions, _UNSERVED, _OUT_ROWS, self._layout, model, EXTENT_BYTES_MAX
        )
        files = self._open()
        try:
            seconds = self._time_lane(files, plan.page, plan.pages, plan.first, plan.keys, plan.position_bits)
        finally:
            files.close()
        return plan.reads, plan.bytes_read, seconds

    def _open(self) -> TableFiles:
        """The files, none of them in the page cache (as far as the system lets go of them)."""
        if self._wanted == "mapped" or getattr(self, "access", "direct") != "direct":
            for path in self._paths:
                drop_cached(path)
        return TableFiles(self._paths, self._layout, self._checksums, self._wanted)

    def _time(self, files: TableFiles, first_page: NDArray[np.int64], pages: int) -> float:
        reads = len(first_page)
        wanted = (first_page[:, None] + np.arange(pages)).reshape(-1)
        bits = (_OUT_ROWS - 1).bit_length()
        rows = (wanted * (PAGE_BYTES // self.row_bytes)).astype(np.uint64)
        keys = rows << np.uint64(bits) | (np.arange(len(rows), dtype=np.uint64) % np.uint64(_OUT_ROWS))
        first = np.arange(0, len(rows) + 1, pages, dtype=np.int32)
        return self._time_lane(files, first_page, np.full(reads, pages, np.int32), first, keys, bits)

    def _time_lane(
        self, files: TableFiles, page: NDArray[np.int64], pages: NDArray[np.int32], first: NDArray[np.int32],
        keys: NDArray[np.uint64], bits: int,
    ) -> float:  # fmt: skip
        done = threading.Event()
        lane = Lane(files, page, pages, first, keys, bits, self._out, lambda _: done.set())
        cpu, begin = time.process_time(), time.perf_counter()
        self._engine.start(lane)
        try:
            done.wait()
        except BaseException:  # an interrupt: the files are closed next, which threads read
            lane.cancel()
            done.wait()
            raise
        elapsed = time.perf_counter() - begin
        self.cpu_seconds = time.process_time() - cpu
        error = lane.error()
        if error is not None:
            raise error
        return elapsed

    def close(self) -> None:
        self._engine.close()


def drop_cached(path: Path) -> None:
    """Ask the system to drop a file's clean pages from the page cache."""
    with RegularFile(path) as file:
        file.advise(os.POSIX_FADV_DONTNEED)
