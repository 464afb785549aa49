"""A mega-batch in memory: partitions, hubs, and the subgraph that they induce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PartitionSet:
    """Partitions and hubs in memory, with the subgraph that they induce. It lives until the next one is asked
    for.

    Rows are in one buffer of ``len(x)`` places, the local ids: ``hubs`` hubs first, then a slot of
    ``slot_rows`` places for each partition. :attr:`places` are those in use; the others, without edges, may
    be loading already what comes next.

    Attributes:
        epoch, step, steps: which mega-batch of how many in the epoch.
        x: [places, *row shape]; node: int64 or int32 [places], node ids.
        indptr, indices: CSC of incoming edges over local ids, int64 [places + 1] and int32 [edges].
        seeds: int64, local ids of the training nodes to be used now, ascending.
        partitions: int64 [n], the partitions in memory; starts, lengths: the local ids at which they begin,
            and their rows.
        hub_copies: int64, local ids of those hubs that are here as members of their partition.
        edges_stored: edges of the lists of these partitions, those lost at the border included.
        read_bytes, load_seconds, build_seconds: what making it took.
        edge_ids: int32 or int64 [edges], the user's numbers of the edges, or None.
    """

    epoch: int
    step: int
    steps: int
    seed: int
    x: NDArray[Any]
    node: NDArray[Any]
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    seeds: NDArray[np.int64]
    partitions: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    partition_count: int
    hubs: int
    hub_copies: NDArray[np.int64]
    slot_rows: int
    edges_stored: int
    partition_edges: int
    read_bytes: int
    load_seconds: float
    build_seconds: float
    edge_ids: NDArray[Any] | None = None

    @property
    def places(self) -> NDArray[np.int64]:
        """int64, the local ids that hold a row, ascending; of a hub whose partition is here too, the hub's
        place has no edges."""
        runs = [
            np.arange(start, start + length) for start, length in zip(self.starts, self.lengths, strict=True)
        ]
        return np.sort(np.concatenate([np.arange(self.hubs), *runs]))

    @property
    def edges(self) -> int:
        """Edges of the induced subgraph, those of the hubs included."""
        return len(self.indices)

    @property
    def kept_share(self) -> float:
        """Of the edges into the partitions' nodes, the share whose source is in memory too."""
        return self.partition_edges / self.edges_stored if self.edges_stored else 1.0

    def always(self) -> NDArray[np.bool_]:
        """bool [places]: the local ids that are hubs, which are in every mega-batch."""
        always = np.zeros(len(self.node), bool)
        always[: self.hubs] = True
        always[self.hub_copies] = True
        return always
