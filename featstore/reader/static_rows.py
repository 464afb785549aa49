"""Which rows a reader keeps in memory for good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice
from featstore.base.ids import parse_ids
from featstore.errors import BudgetError, SourceError
from featstore.plan.budget import Budget, TableNeed
from featstore.reader.lookup import Part, Piece, find
from featstore.reader.requests import States, as_tables
from featstore.tiers.members import highest_degrees, members_bytes

StaticIds = str | None | Mapping[str, Any] | NDArray[Any] | Sequence[int]


def static_members(
    states: States,
    static: StaticIds,
    budget: Budget,
    needs: list[TableNeed],
    given_bytes: bool,
    helpers: ThreadPoolExecutor,
) -> dict[str, NDArray[np.int64]]:
    """Rows (ascending, distinct) to keep of each table, within the budget."""
    known = {n: s.table for n, s in states.items() if s.table.entry.order.rows_by_degree is not None}
    if static is None or (isinstance(static, str) and static == "auto" and not known):
        return {}
    if isinstance(static, str):
        as_choice(static, "static", ("degree", "auto"), ", None or node ids")
        if not known:
            raise SourceError(
                "static='degree' needs degrees, but the store was packed without a graph: pack "
                "with one, or give node ids"
            )
        return highest_degrees(known, budget.tier_bytes)
    chosen = {}
    for name, ids in as_tables(states, static).items():
        state, parsed = states[name], parse_ids(ids)
        part = Part(state, parsed.values, state.row_map, np.empty(0, np.uint8))
        chosen[name] = np.unique(find(Piece(part, None), helpers, deliver=False).rows)
    needed = members_bytes(chosen, {name: states[name].table for name in chosen})
    if needed > budget.tier_bytes:
        if given_bytes:
            raise BudgetError(needed, budget.tier_bytes, "hold the static rows (static_memory=)")
        smallest = Budget.smallest(needs, needed)
        raise BudgetError(smallest, budget.memory_bytes, "hold the static rows asked for")
    return chosen
