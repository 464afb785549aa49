"""One memory budget for everything a reader holds: how it is split, and when it is too small.

In the order of need: the maps from node ids to rows and the page checksums (fixed by the tables); the staging
in which pages arrive; the scratch of planning for the pieces under way; the rest is for tiers. Results belong
to the caller and are not counted: pass ``out=`` to decide where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from featstore.errors import BudgetError
from featstore.plan.extents import PLANNING_BYTES_PER_ID, READING_BYTES_PER_ID
from featstore.units import EXTENT_BYTES_MAX, PAGE_BYTES

#: Pieces (parts of requests) planned or under way at once.
PIECES_IN_FLIGHT = 3
_SCRATCH_BYTES_PER_ID = PLANNING_BYTES_PER_ID + (PIECES_IN_FLIGHT - 1) * READING_BYTES_PER_ID
STAGING_BYTES = 16 * 2**20
_STAGING_BYTES_MIN = 512 * 2**10
_SLOTS_WANTED = 32
_EXTENT_BYTES_MIN = 16 * 2**10
_PIECE_IDS_MIN = 1024
_PIECE_IDS_MAX = 2**20


@dataclass(frozen=True)
class TableNeed:
    """What one table takes whatever the budget."""

    row_map_bytes: int
    checksum_bytes: int
    row_bytes: int

    @property
    def row_span_bytes(self) -> int:
        """Pages that one row can touch, in bytes."""
        return (-(-(self.row_bytes - 1) // PAGE_BYTES) + 1) * PAGE_BYTES


@dataclass(frozen=True)
class Budget:
    """The split of a budget, in bytes; ``tier_bytes`` is what is left for tiers."""

    memory_bytes: int
    row_map_bytes: int
    checksum_bytes: int
    staging_bytes: int
    extent_bytes_max: int
    scratch_bytes: int
    piece_ids_max: int
    tier_bytes: int

    @classmethod
    def split(cls, memory_bytes: int, tables: Sequence[TableNeed], static_bytes: int | None = None) -> Budget:
        """Split ``memory_bytes``. ``static_bytes``: what static rows get, all the rest is the reader's own;
        None for what is left when staging has had an eighth and planning a tenth.

        Raises BudgetError with the smallest budget that works.
        """
        maps = sum(t.row_map_bytes for t in tables)
        checksums = sum(t.checksum_bytes for t in tables)
        span = max((t.row_span_bytes for t in tables), default=PAGE_BYTES)
        staging_min = max(_STAGING_BYTES_MIN, 4 * span)
        scratch_min = _PIECE_IDS_MIN * _SCRATCH_BYTES_PER_ID
        needed = maps + checksums + staging_min + scratch_min + (static_bytes or 0)
        if memory_bytes < needed:
            raise BudgetError(
                needed, memory_bytes, "read these tables (row maps, checksums, staging, scratch)"
            )
        free = memory_bytes - maps - checksums - (static_bytes or 0)
        # Without static rows staging and planning share the whole as they would share a larger budget.
        staging_wanted, scratch_wanted = (free // 8, free // 10) if static_bytes is None else (
            free * 5 // 9, free * 4 // 9
        )  # fmt: skip
        staging = max(staging_min, min(STAGING_BYTES, staging_wanted)) // PAGE_BYTES * PAGE_BYTES
        extent = max(
            span,
            min(
                EXTENT_BYTES_MAX, max(_EXTENT_BYTES_MIN, staging // _SLOTS_WANTED // PAGE_BYTES * PAGE_BYTES)
            ),
        )
        piece_ids = max(
            _PIECE_IDS_MIN,
            min(_PIECE_IDS_MAX, min(scratch_wanted, free - staging) // _SCRATCH_BYTES_PER_ID),
        )
        scratch = piece_ids * _SCRATCH_BYTES_PER_ID
        tiers = free - staging - scratch if static_bytes is None else static_bytes
        return cls(memory_bytes, maps, checksums, staging, extent, scratch, piece_ids, tiers)

    def uses(self, tier_bytes: int) -> dict[str, int]:
        """Bytes by what they are for, where tiers hold so many, and how many are ``unused``."""
        held = {
            "row_maps": self.row_map_bytes, "page_checksums": self.checksum_bytes,
            "staging": self.staging_bytes, "scratch": self.scratch_bytes, "tiers": tier_bytes,
        }  # fmt: skip
        return held | {"unused": self.memory_bytes - sum(held.values())}

    @classmethod
    def smallest(cls, tables: Sequence[TableNeed], tier_bytes: int) -> int:
        """The smallest budget that leaves so much for tiers (within a page: staging grows by whole pages)."""
        try:
            low = cls.split(1, tables).memory_bytes
        except BudgetError as error:
            low = error.needed_bytes
        high = 2 * (low + tier_bytes)
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if cls.split(middle, tables).tier_bytes >= tier_bytes else (middle + 1, high)
            )
        return high


def least_reading_bytes(tables: Sequence[TableNeed]) -> int:
    """The smallest budget of a reader of these tables."""
    try:
        Budget.split(0, tables)
    except BudgetError as error:
        return error.needed_bytes
    return 0


def own_bytes(
    memory_bytes: int, tables: Sequence[TableNeed], beside_bytes: int | None = None, *,
    most: int | None = None,
) -> int:  # fmt: skip
    """What a reader takes that keeps no rows, beside others in a budget: maps, checksums and, for staging and
    planning, ``beside_bytes``, or by default :func:`reader_bytes`, ``most`` of these at most, or more where
    rows are large.

    Raises BudgetError where ``beside_bytes`` are given and too little.
    """
    maps = sum(t.row_map_bytes + t.checksum_bytes for t in tables)
    if beside_bytes is not None:
        return Budget.split(maps + beside_bytes, tables, 0).memory_bytes
    own = reader_bytes(memory_bytes) if most is None else min(most, reader_bytes(memory_bytes))
    try:
        return Budget.split(maps + own, tables, 0).memory_bytes
    except BudgetError as error:
        return error.needed_bytes


def reader_bytes(memory_bytes: int) -> int:
    """What of a loader's budget its readers take for staging and planning: a ninth, within bounds that leave
    2 to 16 MiB for staging (see :meth:`Budget.split`)."""
    return max(18 * 2**20 // 5, min(144 * 2**20 // 5, memory_bytes // 9))
