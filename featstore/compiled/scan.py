"""From a trace to rows: each mini-batch's node ids as distinct rows of the store's tables, and how often each is used.

One pass over the trace. The distinct rows of a mini-batch, in the order in which they first occur, become a row list; which places of the
mini-batch they fill is found again from the ids when its record is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from featstore.compiled.lists import RowLists, RowListsWriter
from featstore.compiled.residency import NEVER, count_uses
from featstore.errors import IdError, SourceError
from featstore.store import Store, Table
from featstore.trace import Trace


@njit(cache=True, nogil=True)
def distinct_rows(
    ids: NDArray[Any], row_of_node: NDArray[Any], rows: int, place_of_row: NDArray[np.int32], out: NDArray[np.int64],
    copy_place: NDArray[np.int32], copy_from: NDArray[np.int32], first_place: NDArray[np.int32],
) -> tuple[int, int]:  # fmt: skip
    """The distinct rows of ids, in the order of their first places; the other places are copies: x[copy_place] = x[copy_from].

    ``place_of_row`` is -1 everywhere, before and after. An empty ``row_of_node`` is the identity. Returns (distinct rows, copies), or
    (-1, index) for a bad id.
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


@dataclass(frozen=True)
class Places:
    """A mini-batch's distinct rows, int64, where each stands first, and the copies; places are int32."""

    rows: NDArray[np.int64]
    place: NDArray[np.int32]
    copy_place: NDArray[np.int32]
    copy_from: NDArray[np.int32]


class NodeRows:
    """Turns node ids of one table into distinct rows. Holds the map and 4 bytes a row."""

    def __init__(self, table: Table) -> None:
        self.table = table
        found = table.row_of_node()
        self._row_of_node: NDArray[Any] = np.empty(0, np.int32) if found is None else found
        self._place_of_row = np.full(table.rows, -1, np.int32)

    def places(self, ids: NDArray[Any], batch: int) -> Places:
        """Raises IdError for an id that the table does not have."""
        n = len(ids)
        rows, place = np.empty(n, np.int64), np.empty(n, np.int32)
        copy_place, copy_from = np.empty(n, np.int32), np.empty(n, np.int32)
        count, copies = distinct_rows(
            ids, self._row_of_node, self.table.rows, self._place_of_row, rows, copy_place, copy_from, place
        )
        if count < 0:
            raise IdError(
                f"mini-batch {batch} of the trace has node id {ids[copies]}, but table {self.table.name!r} has {self.table.rows:,} rows: "
                "the trace was sampled from another graph"
            )
        return Places(rows[:count], place[:count], copy_place[:copies], copy_from[:copies])


def tables_of(store: Store, trace: Trace) -> dict[str, str]:
    """Node type to table. Raises SourceError where a node type has no table."""
    found: dict[str, str] = {}
    for node_type in trace.node_types:
        if node_type in store.tables:
            found[node_type] = node_type
        elif node_type == "" and len(store.tables) == 1:
            found[node_type] = next(iter(store.tables))
        else:
            what = f"node type {node_type!r}" if node_type else "node ids without a type"
            raise SourceError(f"the trace has {what}; the store's tables are {', '.join(map(repr, store.tables))}")
    return found


def scan(
    trace: Trace, node_type: str, nodes: NodeRows, uses: NDArray[np.uint32], first_use: NDArray[np.int32], lists: RowListsWriter
) -> RowLists:  # fmt: skip
    """The row lists of one node type. ``uses`` [rows] is counted up from 0, ``first_use`` [rows] found, from NEVER."""
    for batch in range(len(trace)):
        rows = nodes.places(trace.ids(batch)[node_type], batch).rows
        count_uses(rows, batch, uses, first_use)
        lists.append(rows)
    return lists.finish()


def new_counts(rows: int) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    """(uses, first uses) of a table, of nothing yet."""
    return np.zeros(rows, np.uint32), np.full(rows, NEVER, np.int32)
