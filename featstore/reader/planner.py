"""What a reader makes of a request: pieces, what tiers deliver of them, and lanes that read the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from featstore.engine.files import TableFiles
from featstore.engine.lane import Lane
from featstore.layout import TableLayout
from featstore.plan.budget import Budget
from featstore.plan.cost import DeviceModel
from featstore.plan.extents import Extents, plan_extents, plan_runs
from featstore.reader.feeder import MakeLane
from featstore.reader.lookup import NONE, Found, Part, Piece, RunPart, TableState, find, pieces_of
from featstore.reader.report import Counts, TablePlan
from featstore.units import PAGE_BYTES

_NO_FIRST, _NO_KEYS = np.empty(0, np.int32), np.empty(0, np.uint64)
_UNSERVED = np.empty(0, np.uint8)


class Planner:
    """Plans by a device model within a budget, and counts what it plans; ``helpers`` look up and copy,
    too."""

    def __init__(
        self, model: DeviceModel, budget: Budget, counts: Counts, helpers: ThreadPoolExecutor
    ) -> None:
        self.model, self._counts, self._helpers = model, counts, helpers
        self._piece_ids_max, self._extent_bytes_max = budget.piece_ids_max, budget.extent_bytes_max

    def run_pieces(self, parts: list[RunPart]) -> Iterator[MakeLane]:
        return (partial(self._plan_runs, part) for part in parts)

    def _plan_runs(self, part: RunPart, on_done: Callable[[Lane], None]) -> Lane | None:
        """The lane that reads the runs of one table."""
        begin = time.perf_counter()
        table = part.state.table
        e = plan_runs(part.runs, part.places, table.layout, self._extent_bytes_max)
        rows = int((part.runs[:, 1] - part.runs[:, 0]).sum())
        self._counts.add(
            rows_asked=rows, bytes_asked=rows * table.row_bytes,
            forecast_seconds=self.model.seconds(e.reads, e.bytes_read),
            seconds_planning=time.perf_counter() - begin,
        )  # fmt: skip
        if e.reads == 0:
            return None
        return Lane(part.state.files, e.page, e.pages, _NO_FIRST, _NO_KEYS, 1, part.out, on_done, e.spans)

    def page_pieces(
        self, files: TableFiles, pages: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> Iterator[MakeLane]:
        """The pieces of a request for whole pages of a table's files, which are planned as rows are."""
        for at in range(0, len(pages), self._piece_ids_max):
            end = at + self._piece_ids_max
            yield partial(self._plan_pages, files, pages[at:end], out[at * PAGE_BYTES : end * PAGE_BYTES])

    def _plan_pages(
        self, files: TableFiles, pages: NDArray[np.int64], out: NDArray[np.uint8],
        on_done: Callable[[Lane], None],
    ) -> Lane:  # fmt: skip
        begin = time.perf_counter()
        layout = TableLayout(files.layout.pages, PAGE_BYTES, files.layout.pages_per_chunk)
        e = plan_extents(pages, NONE, _UNSERVED, len(pages), layout, self.model, self._extent_bytes_max)
        self._counts.add(
            rows_asked=len(pages), bytes_asked=len(pages) * PAGE_BYTES,
            forecast_seconds=self.model.seconds(e.reads, e.bytes_read),
            seconds_planning=time.perf_counter() - begin,
        )  # fmt: skip
        return Lane(files, e.page, e.pages, e.first, e.keys, e.position_bits, out, on_done, None, PAGE_BYTES)

    def pieces(self, parts: list[Part]) -> Iterator[MakeLane]:
        """The pieces of a request for ids."""
        for part in parts:
            for piece in pieces_of(part, self._piece_ids_max):
                yield partial(self._plan_piece, piece)

    def _plan_piece(self, piece: Piece, on_done: Callable[[Lane], None]) -> Lane | None:
        """Deliver what the tiers hold; the lane that reads the rest, or None if nothing is missing."""
        begin = time.perf_counter()
        part = piece.part
        found = find(piece, self._helpers, deliver=True)
        lane = None
        forecast = 0.0
        if sum(found.hits.values()) < piece.count:
            extents = self._extents(part, found)
            forecast = self.model.seconds(extents.reads, extents.bytes_read)
            lane = lane_of(part.state.files, extents, part.out, on_done)
        self.count_piece(part.state, found, forecast, begin)
        return lane

    def empty_lane(self, state: TableState, on_done: Callable[[Lane], None]) -> Lane:
        """A lane that reads nothing, planned as any other."""
        nothing, none = np.empty(0, np.int64), np.empty(0, np.uint8)
        e = plan_extents(nothing, NONE, none, 0, state.table.layout, self.model, self._extent_bytes_max)
        return lane_of(state.files, e, none, on_done)

    def count_piece(self, state: TableState, found: Found, forecast_seconds: float, begin: float) -> None:
        count = len(found.rows)
        self._counts.add(
            rows_asked=count, bytes_asked=count * state.table.row_bytes, hits=found.hits,
            forecast_seconds=forecast_seconds, seconds_planning=time.perf_counter() - begin,
        )  # fmt: skip

    def _extents(self, part: Part, found: Found) -> Extents:
        return plan_extents(
            found.rows, found.positions, found.served, max(len(part.ids), part.out_rows),
            part.state.table.layout, self.model, self._extent_bytes_max,
        )  # fmt: skip

    def plan_table(self, state: TableState, ids: NDArray[np.int64]) -> TablePlan:
        hits: dict[str, int] = dict.fromkeys((t.name for t in state.tiers), 0)
        distinct = pages = reads = read_bytes = missed = 0
        part = Part(state, ids, state.row_map, np.empty(0, np.uint8))
        for piece in pieces_of(part, self._piece_ids_max):
            found = find(piece, self._helpers, deliver=False)
            extents = self._extents(piece.part, found)
            hits = {k: v + found.hits[k] for k, v in hits.items()}
            missed += len(extents.keys)
            distinct += extents.distinct_rows
            pages += extents.wanted_pages
            reads += extents.reads
            read_bytes += extents.bytes_read
        row_bytes = state.table.row_bytes
        return TablePlan(
            state.table.name, len(ids), hits, missed, distinct, pages, reads, len(ids) * row_bytes,
            read_bytes, read_bytes / (len(ids) * row_bytes) if len(ids) else 0.0,
            self.model.seconds(reads, read_bytes), self.model.gap_pages_max,
        )  # fmt: skip


def lane_of(
    files: TableFiles, extents: Extents, out: NDArray[np.uint8], on_done: Callable[[Lane], None]
) -> Lane:
    """The lane that performs a plan."""
    e = extents
    return Lane(files, e.page, e.pages, e.first, e.keys, e.position_bits, out, on_done)
