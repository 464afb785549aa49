"""From a trace to rows: each mini-batch's node ids as distinct rows of the store's tables, and how often each
is used.

One pass over the trace, the last mini-batch first. The distinct rows of a mini-batch, in the order in which
they first occur, become a row list, and so does when each of them is used next: going backward, that is the
mini-batch that was seen to use it last. The same note tells that a row occurs twice in a mini-batch, and at
the end says where each row is used first, so the pass touches one number for each id (and another one where
uses are counted). Its loops do not branch on what they find, so that the processor fetches many rows at once.

Which places of the mini-batch its rows fill is not kept. Samplers name a node once, so that row i fills place
i; where there are fewer rows than ids, the places are found again from the ids when the record is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.compile.gather import GatheredTable
from featstore.compile.residency import NO_NEXT_BATCH
from featstore.compile.row_lists import RowLists, RowListsWriter
from featstore.errors import IdError
from featstore.sampling.minibatch import table_of
from featstore.storage.store import OpenStore, Table
from featstore.trace.trace import Trace


@njit(cache=True, nogil=True)
def distinct_rows(
    ids: NDArray[Any], row_of_node: NDArray[Any], rows: int, place_of_row: NDArray[np.int32],
    out: NDArray[np.int64], copy_place: NDArray[np.int32], copy_from: NDArray[np.int32],
    first_place: NDArray[np.int32],
) -> tuple[int, int]:  # fmt: skip
    """The distinct rows of ids, in the order of their first places; the other places are copies:
    x[copy_place] = x[copy_from].

    ``place_of_row`` is -1 everywhere, before and after. An empty ``row_of_node`` is the identity. Returns
    (distinct rows, copies), or (-1, index) for a bad id.
    """
    identity = row_of_node.shape[0] == 0
    count, copies, bad = 0, 0, -1
    for i in range(ids.shape[0]):
        node = np.int64(ids[i])
        if node < 0 or node >= rows:
            bad = i
            break
        row = node if identity else np.int64(row_of_node[node])
        if place_of_row[row] < 0:
            place_of_row[row] = i
            out[count] = row
            first_place[count] = i
            count += 1
        else:
            copy_place[copies] = i
            copy_from[copies] = place_of_row[row]
            copies += 1
    for i in range(count):
        place_of_row[out[i]] = -1
    if bad >= 0:
        return -1, bad
    return count, copies


@njit(cache=True, nogil=True)
def last_rows(
    ids: NDArray[Any], row_of_node: NDArray[Any], table_rows: int, batch: int, later: NDArray[np.int32],
    uses: NDArray[np.uint32], rows: NDArray[Any], next_use: NDArray[np.int32],
) -> tuple[int, int]:  # fmt: skip
    """The distinct rows of ids, in the order of their first places, and when each is used next. Called for
    the last mini-batch first.

    ``later[row]``: the mini-batch after this one that uses a row next, NEVER for none; becomes this one's
    number. Rows are counted in ``uses`` unless it is empty. ``rows`` and ``next_use`` hold as many as there
    are ids. An empty ``row_of_node`` is the identity. Returns (distinct rows, -1), or (-1, index) for a bad
    id.
    """
    n, identity = ids.shape[0], row_of_node.shape[0] == 0
    bad = 0
    for i in range(n):
        node = np.int64(ids[i])
        bad += int(node < 0) + int(node >= table_rows)
    if bad:
        for i in range(n):
            if np.int64(ids[i]) < 0 or np.int64(ids[i]) >= table_rows:
                return -1, i
    for i in range(n):
        rows[i] = ids[i] if identity else row_of_node[np.uint64(ids[i])]
    count = 0
    for i in range(n):
        row = rows[i]
        use = later[np.uint64(row)]
        later[np.uint64(row)] = batch
        rows[np.uint64(count)], next_use[np.uint64(count)] = row, use
        count += int(use != batch)
    if uses.shape[0] > 0:
        for i in range(count):
            uses[np.uint64(rows[i])] += np.uint32(1)
    return count, -1


@dataclass(frozen=True)
class DistinctRows:
    """A mini-batch's distinct rows, int64, where each stands first, and the copies; places are int32."""

    rows: NDArray[np.int64]
    place: NDArray[np.int32]
    copy_place: NDArray[np.int32]
    copy_from: NDArray[np.int32]


class NodeRows:
    """Turns node ids of one table into distinct rows. Holds the map, and 4 bytes a row once places are asked
    for."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._gathered = table if isinstance(table, GatheredTable) else None
        found = None if self._gathered is not None else table.row_of_node()
        self._row_of_node: NDArray[Any] = np.empty(0, np.int32) if found is None else found
        self._place_of_row: NDArray[np.int32] | None = None

    def last(
        self, ids: NDArray[Any], batch: int, later: NDArray[np.int32], uses: NDArray[np.uint32],
        dtype: np.dtype[Any]
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:  # fmt: skip
        """(distinct rows, when each is used next) of a mini-batch; see :func:`last_rows`. Raises IdError."""
        ids = ids if self._gathered is None else self._gathered.find(ids)
        rows, next_use = np.empty(len(ids), dtype), np.empty(len(ids), np.int32)
        count, bad = last_rows(ids, self._row_of_node, self.table.rows, batch, later, uses, rows, next_use)
        if count < 0:
            raise self._bad(ids, bad, batch)
        return rows[:count], next_use[:count]

    def _bad(self, ids: NDArray[Any], index: int, batch: int) -> IdError:
        return IdError(
            f"mini-batch {batch} of the trace has node id {ids[index]}, but table {self.table.name!r} "
            f"has {self.table.rows:,} rows: the trace was sampled from another graph"
        )

    def places(self, ids: NDArray[Any], batch: int) -> DistinctRows:
        """Raises IdError for an id that the table does not have."""
        ids = ids if self._gathered is None else self._gathered.find(ids)
        if self._place_of_row is None:
            self._place_of_row = np.full(self.table.rows, -1, np.int32)
        n = len(ids)
        rows, place = np.empty(n, np.int64), np.empty(n, np.int32)
        copy_place, copy_from = np.empty(n, np.int32), np.empty(n, np.int32)
        count, copies = distinct_rows(
            ids, self._row_of_node, self.table.rows, self._place_of_row, rows, copy_place, copy_from, place
        )
        if count < 0:
            raise self._bad(ids, copies, batch)
        return DistinctRows(rows[:count], place[:count], copy_place[:copies], copy_from[:copies])


def tables_of(store: OpenStore, trace: Trace) -> dict[str, str]:
    """Node type to table. Raises SourceError where a node type has no table."""
    return {node_type: table_of(store, node_type, "the trace has") for node_type in trace.node_types}


def scan(
    trace: Trace, node_type: str, nodes: NodeRows, uses: NDArray[np.uint32], lists: RowListsWriter,
    next_uses: RowListsWriter | None
) -> tuple[RowLists, RowLists | None, NDArray[np.int32]]:  # fmt: skip
    """(row lists of one node type, when each of their rows is used next, where each row of the table is used
    first).

    The second are NEVER where a row is not used again, the third (int32 [rows of the table]) where it is not
    used at all. ``uses``, from 0 on, are counted, unless it is empty. Both writers take the last list first.
    """
    later = np.full(nodes.table.rows, NO_NEXT_BATCH, np.int32)
    for batch in range(len(trace) - 1, -1, -1):
        if batch:
            trace.expect(batch - 1)  # nobody reads ahead of one who goes backward
        rows, next_use = nodes.last(trace.ids(batch)[node_type], batch, later, uses, lists.dtype)
        lists.append(rows)
        if next_uses is not None:
            next_uses.append(next_use)
    return lists.finish(), None if next_uses is None else next_uses.finish(), later
