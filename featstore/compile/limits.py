"""What a trace and its tables may be at most, so that all that is packed into keys and 32-bit numbers fits.

Compiling numbers places of a mini-batch, slots and mini-batches in 32 bits, and sorts keys
``row << bits | place`` of 64. Tables may have 2^40 rows. All that follows from sizes is looked at here,
before any work is done.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.plan.extents import key_bits

__all__ = ["RECORD_PLACES_MAX", "SLOTS_MAX", "TRACE_BATCHES_MAX", "check_sizes"]

#: Of a mini-batch: its places are int32.
RECORD_PLACES_MAX = 2**31 - 1
#: Of a trace: a next use is a mini-batch of this round or the next one, int32, and the largest number means
#: never.
TRACE_BATCHES_MAX = 2**30 - 1
#: Rows kept in memory, or on a device: -2 - slot is int32, and so is slot + 1.
SLOTS_MAX = 2**31 - 2


def check_sizes(table_rows: Mapping[str, int], counts: Mapping[str, NDArray[np.int64]], batches: int) -> None:
    """Raise SourceError for a trace of so many mini-batches that cannot be compiled.

    ``table_rows``: of each table. ``counts``: int64 [mini-batches], how many of its ids each asks for.
    """
    if batches > TRACE_BATCHES_MAX:
        raise SourceError(
            f"a trace of {batches:,} mini-batches cannot be compiled, {TRACE_BATCHES_MAX:,} can: record "
            "fewer epochs, or make several traces"
        )
    for table, rows in table_rows.items():
        most = int(counts[table].max(initial=0))
        if most > RECORD_PLACES_MAX:
            raise SourceError(
                f"a mini-batch asks for {most:,} rows of table {table!r}, at most {RECORD_PLACES_MAX:,} can "
                "be compiled: make mini-batches smaller"
            )
        key_bits(rows, most, f"compile mini-batches for table {table!r}: their ids")
        key_bits(rows, batches, f"compile a trace for table {table!r}: its mini-batches")
