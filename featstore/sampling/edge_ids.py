"""The numbers that the user knows the edges of a mini-batch by, of a graph in a store that keeps them.

They stand in a table of their own beside the lists, ``GRAPH/edge_ids``, and are found by the positions of the
edges there. Those of the first edges are held in memory, as far as there is room; the others are read, all of
a mini-batch in one request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_flag
from featstore.base.checks import check_range
from featstore.errors import SourceError
from featstore.reader.reader import Reader
from featstore.sampling.first_values import FirstValues
from featstore.sampling.pages import Missing

if TYPE_CHECKING:
    from featstore.storage.store import StoredGraph

#: Of an edge while its number is found: whether it is in memory, what stands there, its key, what was read.
FINDING_BYTES = 40


def wants_edge_ids(graph: StoredGraph, asked: bool | None) -> bool:
    """Whether mini-batches have them: as ``asked``, by default where the store has them. Raises
    ArgumentError, and SourceError where they are asked for and not kept."""
    if asked is not None:
        as_flag(asked, "edge_ids")
    if asked and not graph.has_edge_ids:
        raise SourceError(
            f"{graph.where()} does not keep the numbers of its edges: pack it with edge_ids=True (--edge-ids)"
        )
    return graph.has_edge_ids if asked is None else asked


class StoredEdgeIds(FirstValues):
    """The numbers of a graph's edges, those of the first edges in memory; ``whole_edges``: that there are
    numbers for, where these are not all."""

    def __init__(self, graph: StoredGraph, whole_edges: int | None = None) -> None:
        super().__init__(graph, "edge_ids")
        self._numbers = graph.edges if whole_edges is None else whole_edges

    def of(self, reader: Reader, edges: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64: the numbers of the edges at these positions. Raises CorruptionError, DeviceError,
        FormatError for a number that none has."""
        if len(edges) == 0:
            return np.empty(0, np.int64)
        held = edges < len(self.first)
        ids = np.empty(len(edges), np.int64)
        ids[held] = self.first[edges[held]]
        check_range(ids[held], self._numbers, f"an edge id of {self._where}")  # below, -1 is one to be read
        if not held.all():
            ids[~held] = -1
            missing = Missing(ids, edges, len(edges) - int(held.sum()), self._edges, self.first.dtype)
            missing.read(reader, self.table)
        check_range(ids, self._numbers, f"an edge id of {self._where}")
        return ids
