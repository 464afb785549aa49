"""The static host tier: a fixed set of rows, kept for good.

Power-law graphs ask for a few nodes again and again; keeping the rows of the nodes with the highest degree
(or of any given set) is the oldest cache of graph training (PaGraph, SoCC'20; HierBatching's static cache;
DiskGNN's host level). The set is a bitmap over all rows with a running count for each 64 bits, so a lookup is
a bit test and one population count at 0.19 bytes a row of the table; a member's slot is its rank, so rows lie
in the tier in row order and fill it sequentially.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.bitmap import set_bits, slot_of
from featstore.base.compilation import njit
from featstore.base.native import STREAM_BYTES, address_of, fence, memcpy
from featstore.base.rows import STREAMED_BYTES_MIN, expect_row, stream_row
from featstore.errors import ArgumentError, SourceError
from featstore.tiers.team import Team

_AHEAD = 8  # rows looked up and prefetched ahead of the copy; a power of two
MEMBERS_MAX = 2**31 - 1
_NOTHING = np.empty(0, np.uint8)


@njit(cache=True, nogil=True)
def serve_rows(
    rows: NDArray[np.int64],
    positions: NDArray[np.int32],
    served: NDArray[np.uint8],
    bits: NDArray[np.uint64],
    ranks: NDArray[np.int32],
    data: int,
    row_bytes: int,
    out: int,
) -> int:
    """Copy the members among ``rows`` that are not served yet from ``data`` to ``out`` (addresses; 0: do not
    copy), and mark them.

    Slots are looked up a few rows ahead of the copy, and those rows prefetched. Returns the number of rows
    served.
    """
    n = rows.shape[0]
    in_order = positions.shape[0] == 0
    streaming = (
        n * row_bytes >= STREAMED_BYTES_MIN and row_bytes % STREAM_BYTES == 0 and out % STREAM_BYTES == 0
    )
    slots = np.full(_AHEAD, -1, np.int64)  # of rows i to i + _AHEAD - 1, at i & (_AHEAD - 1)
    count = 0
    for step in range(n + _AHEAD):
        at = step & (_AHEAD - 1)
        if slots[at] >= 0:
            i = step - _AHEAD
            served[i] = 1
            count += 1
            if out != 0:
                to = i if in_order else np.int64(positions[i])
                if streaming:
                    stream_row(out + to * row_bytes, data + slots[at] * row_bytes, row_bytes)
                else:
                    memcpy(out + to * row_bytes, data + slots[at] * row_bytes, row_bytes)
        slots[at] = -1
        if step < n and served[step] == 0:
            slots[at] = slot_of(rows[step], bits, ranks)
            if slots[at] >= 0 and out != 0:
                expect_row(data + slots[at] * row_bytes, row_bytes)
    if streaming:
        fence()
    return count


def check_members(count: int) -> None:
    """Raise SourceError for more members than ranks, which are int32, can number."""
    if count > MEMBERS_MAX:
        raise SourceError(
            f"a set of rows in memory has at most {MEMBERS_MAX:,}, not {count:,}: keep fewer (static=)"
        )


class StaticRows:
    """A fixed set of rows of one table; see the module's text.

    ``members``: int64, ascending, distinct. The caller fills ``data`` (uint8 [members, row_bytes]) in that
    order before the tier is asked for the first time.
    """

    name = "static"

    def __init__(self, members: NDArray[np.int64], table_rows: int, row_bytes: int) -> None:
        check_members(len(members))
        words = -(-table_rows // 64)
        self._bits = np.zeros(words, np.uint64)
        self._ranks = np.zeros(words, np.int32)
        self.rows = set_bits(members, self._bits, self._ranks)
        if self.rows != len(members):
            raise ArgumentError("the rows of a static tier must be distinct")
        self.row_bytes = row_bytes
        self.hold(np.empty((self.rows, row_bytes), np.uint8))

    def hold(self, data: NDArray[np.uint8]) -> None:
        """Take this memory for the rows."""
        self.data, self._address = data, address_of(data)

    @staticmethod
    def index_bytes(table_rows: int) -> int:
        """Memory of the structures that find rows, for a table of so many rows."""
        return 12 * -(-table_rows // 64)

    @property
    def memory_bytes(self) -> int:
        return self.data.nbytes + self._bits.nbytes + self._ranks.nbytes

    def serve(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int32],
        served: NDArray[np.uint8],
        out: NDArray[np.uint8],
    ) -> int:
        members, to = (self._bits, self._ranks, self._address, self.row_bytes), address_of(out)
        return int(serve_rows(rows, positions, served, *members, to))

    def has(self, ids: NDArray[np.int64], row_of_node: NDArray[Any], rows: int, team: Team) -> bool:
        """Whether the rows of these node ids are all members."""
        members = (self._bits, self._ranks)
        return team.serve(ids, row_of_node, rows, members, 0, 0, _NOTHING)

    def serve_ids(
        self, ids: NDArray[np.int64], row_of_node: NDArray[Any], rows: int, out: NDArray[np.uint8], team: Team
    ) -> bool:
        """Copy the rows of these node ids to ``out``, in order, by a team. False where not all of them are
        members, or of the table: ``out`` is to be filled otherwise then."""
        members = (self._bits, self._ranks)
        return team.serve(ids, row_of_node, rows, members, self._address, self.row_bytes, out)
