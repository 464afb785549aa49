"""Edges and their reverse, as PyG's ``to_bidirectional`` has them: by target, then source, each pair of nodes
once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.storage.edge_types import EdgeType

Ids = NDArray[np.int64]


def with_reverse(
    row: Ids, col: Ids, edge: Ids, e_id: Ids | None, other: tuple[Ids, Ids] | None = None
) -> tuple[Ids, Ids, Ids, Ids | None]:
    """The edges (``row``, ``col``) with the reverse of those of ``other``, by default their own, and their
    numbers, ``edge`` and ``e_id``: of a pair of nodes the first edge's that was there, else the first
    reverse's. Edges that other ones brought have -1."""
    back_row, back_col = (row, col) if other is None else other
    rows, cols = np.concatenate([row, back_col]), np.concatenate([col, back_row])
    order = np.lexsort((rows, cols))
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(rows[order]) != 0) | (np.diff(cols[order]) != 0)
    kept = order[new]

    def with_back(numbers: Ids) -> Ids:
        back = numbers if other is None else np.full(len(back_row), -1, np.int64)
        return np.concatenate([numbers, back])[kept]

    return rows[kept], cols[kept], with_back(edge), None if e_id is None else with_back(e_id)


def reverses(edge_types: Iterable[EdgeType]) -> dict[EdgeType, EdgeType]:
    """Of each relation the one that leads back, itself where its ends are of one type, as PyG finds it: by
    its name, ``rev_`` before the other's, else the only one between the two types. Raises SourceError where
    there is none, or several could be meant."""
    known = list(edge_types)
    found = {}
    for edge_type in known:
        source, name, target = edge_type
        named = [(target, f"rev_{name}", source), (target, name.removeprefix("rev_"), source)]
        named = [one for one in named if one in known and one != edge_type]
        back = [one for one in known if one[0] == target and one[2] == source]
        if named:
            found[edge_type] = named[0]
        elif source == target:
            found[edge_type] = edge_type
        elif len(back) == 1:
            found[edge_type] = back[0]
        else:
            raise SourceError(
                f"subgraph='bidirectional' needs a relation that leads back for each, and {edge_type} has "
                f"{len(back)}: name it {(target, f'rev_{name}', source)}"
            )
    return found
