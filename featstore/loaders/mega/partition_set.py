"""A mega-batch in memory: partitions, hubs, and the subgraph that they induce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ResidentRows:
    """The nodes of one type in memory: a buffer of ``len(node)`` places, the local ids, ``hubs`` hubs first,
    then a slot of ``slot_rows`` places for each partition. :attr:`places` are those in use; the others,
    without edges, may be loading already what comes next.

    Attributes:
        x: [places, *row shape], None of nodes without features; node: int64 or int32 [places], node ids.
        starts, lengths: int64 [n], of each partition in memory the local id at which it begins, and its rows.
        hub_copies: int64, local ids of those hubs that are here as members of their partition.
    """

    x: NDArray[Any] | None
    node: NDArray[Any]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    hubs: int
    hub_copies: NDArray[np.int64]
    slot_rows: int

    @property
    def places(self) -> NDArray[np.int64]:
        """int64, the local ids that hold a row, ascending; of a hub whose partition is here too, the hub's
        place has no edges."""
        runs = [
            np.arange(start, start + length) for start, length in zip(self.starts, self.lengths, strict=True)
        ]
        return np.sort(np.concatenate([np.arange(self.hubs), *runs]))

    @property
    def slots(self) -> tuple[int, int]:
        """Hubs, and rows of a slot: from which slot a local id is. Of empty slots there is none."""
        return self.hubs, max(1, self.slot_rows)

    def always(self) -> NDArray[np.bool_]:
        """bool [places]: the local ids that are hubs, which are in every mega-batch."""
        always = np.zeros(len(self.node), bool)
        always[: self.hubs] = True
        always[self.hub_copies] = True
        return always


@dataclass(frozen=True)
class InducedLists:
    """The edges of one graph among the nodes in memory.

    Attributes:
        indptr, indices: CSC of incoming edges over local ids, int64 [places of targets + 1] and int32
            [edges].
        values: of each edge, ``edge_ids``, the user's numbers, ``weights`` and ``times``, of which there are
            any.
        edges_stored: edges of the lists of these partitions, those lost at the border included.
        partition_edges: of these, those whose source is in memory too.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: Mapping[str, NDArray[Any]]
    edges_stored: int
    partition_edges: int

    @property
    def edge_ids(self) -> NDArray[Any] | None:
        """int32 or int64 [edges], the user's numbers of the edges, or None."""
        return self.values.get("edge_ids")


@dataclass(frozen=True)
class PartitionSet:
    """Partitions and hubs in memory, with the subgraph that they induce. It lives until the next one is asked
    for.

    Attributes:
        epoch, step, steps: which mega-batch of how many in the epoch.
        rows: by table of nodes; lists: by graph. Without types there is one of each.
        seeds: int64, local ids of the training nodes to be used now, ascending.
        partitions: int64 [n], the partitions in memory, of ``partition_count``.
        read_bytes, load_seconds, build_seconds: what making it took.
    """

    epoch: int
    step: int
    steps: int
    seed: int
    rows: Mapping[str, ResidentRows]
    lists: Mapping[str, InducedLists]
    seeds: NDArray[np.int64]
    partitions: NDArray[np.int64]
    partition_count: int
    read_bytes: int
    load_seconds: float
    build_seconds: float

    @property
    def edges(self) -> int:
        """Edges of the induced subgraph, those of the hubs included."""
        return sum(len(one.indices) for one in self.lists.values())

    @property
    def edges_stored(self) -> int:
        """Edges of the lists of these partitions, those lost at the border included."""
        return sum(one.edges_stored for one in self.lists.values())

    @property
    def partition_edges(self) -> int:
        """Of these, those whose source is in memory too."""
        return sum(one.partition_edges for one in self.lists.values())

    @property
    def kept_share(self) -> float:
        """Of the edges into the partitions' nodes, the share whose source is in memory too."""
        return self.partition_edges / self.edges_stored if self.edges_stored else 1.0
