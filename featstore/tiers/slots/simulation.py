"""Hits and misses of a trace under a policy, without a buffer: a slot map alone, through which the trace
passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_batches, as_choice, as_count, as_sequence, check_options
from featstore.base.ids import parse_ids
from featstore.errors import ArgumentError, BudgetError, IdError
from featstore.tiers.slots.layout import (
    BUFFER_ROWS_MAX,
    HITS,
    MIN,
    MISSES,
    OPTIONS,
    POLICIES,
    STATIC,
    make_slot_map,
)
from featstore.tiers.slots.rows import parse_uses
from featstore.tiers.slots.slots import NO_NEXT_USE, acquire, complete, release


def simulate(
    rows_by_batch: Iterable[NDArray[Any]], slots: int, policy: int | str, *,
    next_uses: Sequence[NDArray[Any]] | None = None, static: NDArray[Any] | None = None, **options: Any,
) -> tuple[int, int]:  # fmt: skip
    """Hits and misses of a trace: each mini-batch is acquired, read and released before the next. Nothing is
    read.

    Args:
        rows_by_batch: the rows of each mini-batch, integers.
        slots: how many rows the buffer holds.
        policy: one of :data:`~featstore.tiers.slots.layout.POLICIES`, or its name.
        next_uses: for MIN: for each mini-batch the next use of its rows, as
            :func:`~featstore.tiers.slots.slots.acquire` takes it.
        static: for STATIC: the rows that are in the buffer from the start and for good; loading them is not
            counted.
        options: of :func:`~featstore.tiers.slots.layout.make_slot_map`.

    Raises ArgumentError; IdError for rows that are none; BudgetError (in rows of one byte) where a mini-batch
    has more rows than slots.
    """
    number = (
        POLICIES[as_choice(policy, "policy", POLICIES)]
        if isinstance(policy, str)
        else as_count(policy, "policy", 0)
    )
    slots = as_count(slots, "slots", 1, BUFFER_ROWS_MAX)
    check_options(options, OPTIONS, "a simulated buffer")
    as_batches(rows_by_batch, "rows_by_batch", functions=False)
    uses_of = (
        None if next_uses is None else as_sequence(next_uses, "next_uses", "next uses, one a mini-batch")
    )
    if (uses_of is not None) != (number == MIN):
        raise ArgumentError("next_uses= is for the policy min, which needs it; other policies take none")
    m = make_slot_map(slots, number, batches=len(uses_of or ()), **options)
    if (static is not None) != (number == STATIC):
        raise ArgumentError("static= says which rows the policy static keeps; other policies keep none")
    hold = [] if static is None else [parse_ids(static).values]
    batch = -1
    for batch, given in enumerate([*hold, *rows_by_batch] if hold else rows_by_batch):
        rows = parse_ids(given, copy=True).values
        if len(rows) and rows.min() < 0:
            whose = f"rows of mini-batch {batch - len(hold)}" if batch >= len(hold) else "static"
            raise IdError(f"{whose}: there is no row {rows.min()}")
        uses = NO_NEXT_USE
        if uses_of is not None:
            if batch == len(uses_of):
                break
            uses = parse_uses(uses_of[batch], len(uses_of))
        of_row, missed, waits = (np.empty(len(rows), np.int32) for _ in range(3))
        reads, _ = acquire(m, rows, of_row, missed, waits, uses)
        if reads < 0:
            raise BudgetError(
                slots - reads,
                slots,
                f"hold the {len(rows):,} rows of mini-batch {batch - len(hold)} at one byte a row",
            )
        complete(m, of_row[missed[:reads]])
        if batch < len(hold):
            m.counts[[HITS, MISSES]] = 0
        else:
            release(m, of_row)
    if uses_of is not None and batch + 1 != len(uses_of):
        raise ArgumentError(
            f"next_uses has those of {len(uses_of):,} mini-batches, rows_by_batch has "
            f"{'more' if batch == len(uses_of) else f'{batch + 1:,}'}"
        )
    return int(m.counts[HITS]), int(m.counts[MISSES])
