"""What the loader of a compiled trace holds in memory, decided when the trace is compiled.

In the order of need: mini-batches under way (one that the loop has, one that waits or is being assembled, a
third where there is room; of small ones more, see :func:`depths_in_groups`), their records, and the readers;
the rest is slots, in which rows stay from mini-batch to mini-batch. A loader needs no less, because the slots
are part of what was compiled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import ALIGNMENT
from featstore.compile.limits import SLOTS_MAX
from featstore.errors import BudgetError
from featstore.plan.budget import Budget, TableNeed, own_bytes, reader_bytes
from featstore.storage.store import OpenStore, Table
from featstore.units import multiple_bytes

#: Of each slot: where it lies, where the round leaves its row, and what turning these round takes.
MAP_BYTES = 24
_RECORD_BYTES_PER_ID = 32  # at most: a row of the shared or the base table, its admission, its node id
_RECORD_BYTES = 8192
DEPTH_MIN = 2  # mini-batches: the loop's, and one on its way
ASKED_AHEAD = 2  # groups (of one mini-batch, where they are large) whose records are asked for beforehand
_THIRD_SHARE = 3  # a third mini-batch is held where all three take at most this part of the budget
_GROUPS = 4  # the loop's, one that is being assembled, and two on their way
_GROUP_BYTES, _GROUP_MOST = 12 * 2**20, 64
_GROUPS_SHARE = 5  # groups take at most this part of the budget


def depths_in_groups(memory_bytes: int, batch_bytes: int) -> range:
    """How many small mini-batches, of ``batch_bytes`` with their records, may exist at once within a budget:
    the best number first. Empty where they are not small.

    They are read in groups, as many together as keep a disk busy; four groups exist at once.
    """
    share = memory_bytes // _GROUPS_SHARE // _GROUPS
    group = min(_GROUP_MOST, min(_GROUP_BYTES, share) // max(1, batch_bytes))
    return range(_GROUPS * group, _GROUPS, -_GROUPS)


def read_together(depth: int) -> int:
    """How many mini-batches are read together where so many exist at once."""
    return max(1, depth // _GROUPS)


class BatchSizes(Protocol):
    """The sizes of mini-batches, as those of a :class:`featstore.trace.trace.Trace`."""

    @property
    def counts(self) -> Mapping[str, NDArray[np.int64]]: ...

    @property
    def sample_sizes(self) -> Any: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class LoaderBudget:
    """The split of a loader's budget, in bytes; slots are rows, by node type. ``depth``: mini-batches under
    way."""

    memory_bytes: int
    depth: int
    batch_bytes: int
    record_bytes: int
    slots: dict[str, int]
    device_slots: dict[str, int]

    @classmethod
    def split(
        cls,
        memory_bytes: int,
        cache_bytes: int | None,
        device_bytes: int,
        disk_bytes: int | None,
        trace: BatchSizes,
        tables: Mapping[str, Table],
    ) -> LoaderBudget:
        """Raises BudgetError with the smallest budget that works."""
        asked = {t: int(trace.counts[t].sum()) * table.row_bytes for t, table in tables.items()}
        total = max(1, sum(asked.values()))
        batch = sum(
            batch_bytes(int(trace.counts[t].max(initial=0)), table.row_bytes) for t, table in tables.items()
        )
        ids = sum((trace.counts[t] for t in tables), np.zeros(len(trace), np.int64))
        samples = np.maximum(np.asarray(trace.sample_sizes), 0)
        records = _RECORD_BYTES_PER_ID * ids + samples + _RECORD_BYTES
        record = int(records.max(initial=_RECORD_BYTES))
        written = total if disk_bytes is None else min(disk_bytes, total)
        pages = written + device_bytes + sum(t.data_bytes for t in tables.values()) + int(records.sum())

        def rows_in(memory: int, t: str, beside: int) -> int:
            own = memory * asked[t] // total
            return min(SLOTS_MAX, tables[t].rows, own // (tables[t].row_bytes + beside))

        given = {t: rows_in(cache_bytes or 0, t, 0) for t in tables}  # a cache that is asked for is of rows
        cached = (cache_bytes or 0) + MAP_BYTES * sum(given.values())

        def fixed(depth: int, memory: int) -> int:
            checksums = (pages + memory) // 1024 + _RECORD_BYTES
            return (
                depth * (batch + record)
                + ASKED_AHEAD * read_together(depth) * record
                + readers_bytes(memory, tables.values())
                + checksums
                + cached
            )

        third = [3] if 3 * (batch + record) * _THIRD_SHARE <= memory_bytes else []
        wanted = [*depths_in_groups(memory_bytes, batch + record), *third, DEPTH_MIN]
        depth = next((d for d in wanted if fixed(d, memory_bytes) <= memory_bytes), 0)
        if depth == 0:
            depth = needed = DEPTH_MIN
            while fixed(depth, needed) > needed:  # more memory has a larger reader, too
                needed = fixed(depth, needed)
            if needed > memory_bytes:
                raise BudgetError(
                    needed,
                    memory_bytes,
                    "hold two mini-batches of this trace, their records and what reads them",
                )
        left = memory_bytes - fixed(depth, memory_bytes)
        slots = {t: rows_in(left, t, MAP_BYTES) for t in tables} if cache_bytes is None else given
        device = {t: rows_in(device_bytes, t, 0) for t in tables}
        return cls(memory_bytes, depth, batch, record, slots, device)


def readers_bytes(memory_bytes: int, tables: Iterable[Table]) -> int:
    """What the readers of a loader with this budget have for staging and planning, that of the compiled trace
    one half and that of the store's tables the other: as those of other loaders, or more where rows are
    large."""
    least = own_bytes(memory_bytes, [TableNeed(0, 0, table.row_bytes) for table in tables], most=1)
    return max(reader_bytes(memory_bytes), 2 * least)


def extent_bytes_max(memory_bytes: int, tables: Collection[Table]) -> int:
    """The longest read of either of them."""
    needs = [TableNeed(0, 0, table.row_bytes) for table in tables]
    return Budget.split(readers_bytes(memory_bytes, tables) // 2, needs, 0).extent_bytes_max


def batch_bytes(rows: int, row_bytes: int) -> int:
    """Memory for the rows of a mini-batch in a group: the next one's begin aligned, too."""
    step = math.lcm(ALIGNMENT, row_bytes)
    return -(-rows * row_bytes // step) * step


def parse_disk(disk: int | str | None, store: OpenStore) -> int | None:
    """A limit on disk space: bytes, a size, or a multiple of the store's tables on this disk as ``"3x"``.
    Raises ArgumentError."""
    if disk is None:
        return None
    return multiple_bytes(disk, sum(t.data_bytes for t in store.on_disk.tables.values()), "disk")
