"""What a pack takes of data that bring tables, graphs and arrays at once: PyG's objects, folders of data
sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class WholeData:
    """Tables, or numbers of nodes, edges by table or edge type (none where graphs were given), arrays,
    warnings; tables and arrays of edges, and of which relation; the relations of the edges; and
    how many rows tables should have, where that is known."""

    tables: dict[str, Any]
    graphs: dict[Any, Any]
    arrays: dict[str, NDArray[Any]]
    warnings: list[str]
    edge_rows: dict[str, str]
    relations: list[str]
    counts: dict[str, int] = field(default_factory=dict)
