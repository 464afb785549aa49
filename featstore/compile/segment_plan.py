"""How segments are packed: the sizes of slabs and buffers in the memory that there is, and how often the
table is gone through."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.compile.row_lists import RowLists
from featstore.compile.segment_pages import PAGE_WRITE_THREADS, Target
from featstore.errors import BudgetError
from featstore.units import PAGE_BYTES

BUFFER_BYTES_MAX = 2**20
BUFFER_BYTES_MIN = 64 * 2**10
SLAB_BYTES_MAX = 16 * 2**20
BOUND_BYTES = 4  # of each segment and slab: how many of its rows come before that
WRITES_TOGETHER = 8  # of full buffers, that one thread does one after the other
_SPARE_BUFFERS_MIN = PAGE_WRITE_THREADS + 2  # being written while others fill
_SPARE_BUFFERS_MAX = (PAGE_WRITE_THREADS + 1) * WRITES_TOGETHER


@dataclass(frozen=True)
class Route:
    """What goes to one target: list i of ``rows`` (ascending rows of the base table) is the segment of the
    target from row ``first_rows[i]`` on."""

    rows: RowLists
    first_rows: NDArray[np.int64]
    target: Target


@dataclass(frozen=True)
class SegmentPlan:
    """How to pack: rows a slab, the size of a buffer, and episodes, each a list of (route, list) numbers."""

    slab_rows: int
    buffer_bytes: int
    buffers: int
    episodes: tuple[tuple[tuple[int, int], ...], ...]


def _smallest_buffer(row_bytes: int) -> int:
    return -(-max(BUFFER_BYTES_MIN, 2 * row_bytes + PAGE_BYTES) // PAGE_BYTES) * PAGE_BYTES


def needed_bytes(rows: int, row_bytes: int) -> int:
    """The memory in which :func:`plan_packing` always finds a way for a table of so many rows: two slabs take
    a quarter of it, or are of one row each; the fewer slabs there are, the less is known of each."""
    buffers = (_SPARE_BUFFERS_MIN + 1) * (_smallest_buffer(row_bytes) + PAGE_BYTES)
    # Slabs are of at least half of SLAB_BYTES_MAX, or a sixteenth of the memory, so there are no more than:
    table_bytes = rows * row_bytes
    known = isqrt(22 * BOUND_BYTES * table_bytes) + BOUND_BYTES * (4 + 3 * table_bytes // SLAB_BYTES_MAX)
    return (buffers + 2 * row_bytes) * 4 // 3 + min(known, 2 * BOUND_BYTES * (rows + 1)) + 1


class PackingSizes(NamedTuple):
    """Rows a slab, the size of a buffer, segments that are packed at once, buffers, and how often the table
    is gone through."""

    slab_rows: int
    buffer_bytes: int
    per_episode: int
    buffers: int
    episodes: int


def packing_sizes(segments: int, rows: int, row_bytes: int, memory_bytes: int) -> PackingSizes:
    """Buffers as large as the memory allows, for so many segments of a table of ``rows`` rows in as few
    episodes. Raises BudgetError."""
    slab_rows = max(1, min(SLAB_BYTES_MAX, memory_bytes // 8) // row_bytes)
    left = memory_bytes - 2 * slab_rows * row_bytes
    smallest, known = _smallest_buffer(row_bytes), BOUND_BYTES * (-(-rows // slab_rows) + 1)
    each = smallest + PAGE_BYTES
    spare = min(_SPARE_BUFFERS_MAX, max(_SPARE_BUFFERS_MIN, left // (each + known) // 8))
    at_once = min(segments, (left - spare * each) // (each + known))
    if segments and at_once < 1:
        raise BudgetError(
            needed_bytes(rows, row_bytes),
            memory_bytes,
            "hold a slab of the table and a buffer for each of a few segments",
        )
    episodes = -(-segments // max(1, at_once))
    per_episode = -(-segments // max(1, episodes))
    each = (left - per_episode * known) // max(1, per_episode + spare) - PAGE_BYTES
    size = max(smallest, min(BUFFER_BYTES_MAX, each) // PAGE_BYTES * PAGE_BYTES)
    return PackingSizes(slab_rows, size, per_episode, per_episode + spare, episodes)


def plan_packing(routes: list[Route], rows: int, row_bytes: int, memory_bytes: int) -> SegmentPlan:
    """How to pack all lists of these routes, of a table of ``rows`` rows. Raises BudgetError."""
    segments = [(r, int(i)) for r, route in enumerate(routes) for i in np.flatnonzero(route.rows.lengths())]
    sizes = packing_sizes(len(segments), rows, row_bytes, memory_bytes)
    step = max(1, sizes.per_episode)
    cut = tuple(tuple(segments[at : at + step]) for at in range(0, len(segments), step))
    return SegmentPlan(sizes.slab_rows, sizes.buffer_bytes, sizes.buffers, cut)
