"""Which rows a static tier keeps: those asked for, or those of the highest degree that a budget allows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from featstore.storage.store import Table
from featstore.tiers.static import MEMBERS_MAX, StaticRows


def highest_degrees(tables: Mapping[str, Table], tier_bytes: int) -> dict[str, NDArray[np.int64]]:
    """The budget for tiers, shared by the tables' sizes; the rows of the highest degrees that fit into each
    share, ascending."""
    total = sum(t.data_bytes for t in tables.values())
    chosen = {}
    for name, table in tables.items():
        share = tier_bytes * table.data_bytes // max(1, total) - StaticRows.index_bytes(table.rows)
        # While it is filled, a member costs its row id besides; before, what ranks it.
        count = max(0, min(table.rows, MEMBERS_MAX, share // max(table.row_bytes + 8, 24)))
        ranked = table.rows_by_degree(count) if count else None
        chosen[name] = np.empty(0, np.int64) if ranked is None else np.sort(ranked.astype(np.int64))
    return chosen


def members_bytes(members: Mapping[str, NDArray[np.int64]], tables: Mapping[str, Table]) -> int:
    """What tiers of these rows take."""
    return sum(
        len(rows) * tables[name].row_bytes + StaticRows.index_bytes(tables[name].rows)
        for name, rows in members.items()
    )
