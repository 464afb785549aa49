"""Hop after hop: the loop that all neighbour samplers go through, whether the graph is in memory or on disk.

A hop looks only at the nodes that the hop before it found first. Its edges are counted before anything is
taken, which bounds the new nodes; then there is room for them, and the sampler picks the edges and enters the
nodes that they lead to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.hashing import hop_key
from featstore.sampling.picking import empty_picks, hop_size, make_room


@dataclass
class Hops:
    """A mini-batch under way: its nodes with room for more, the table that finds them, and the edges of each
    hop."""

    nodes: NDArray[np.int64]
    slots: NDArray[Any]
    counts: list[int] = field(default_factory=list)  # new nodes by hop
    row: list[NDArray[np.int64]] = field(default_factory=list)
    col: list[NDArray[np.int64]] = field(default_factory=list)
    edge: list[NDArray[np.int64]] = field(default_factory=list)

    @property
    def edge_count(self) -> int:
        """Edges of all hops so far."""
        return sum(map(len, self.edge))

    def joined(self) -> dict[str, Any]:
        """What a mini-batch says of its edges, by its names; the parts are given back."""
        edge_counts = tuple(map(len, self.edge))
        return {
            "row": join_parts(self.row),
            "col": join_parts(self.col),
            "edge_id": join_parts(self.edge),
            "num_sampled_nodes": tuple(self.counts),
            "num_sampled_edges": edge_counts,
        }


def join_parts(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The parts as one array; they are given back."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    parts.clear()
    return whole


class HopSampler(ABC):
    """What the loop asks of a sampler. ``fanouts``: neighbours per node and hop; -1 takes all."""

    fanouts: tuple[int, ...]

    @property
    @abstractmethod
    def node_count(self) -> int:
        """Number of nodes of the graph."""

    @abstractmethod
    def _fill(
        self, hops: Hops, begin: int, end: int, fanout: int, key: np.uint64, picks: NDArray[np.int64],
        row: NDArray[np.int64], col: NDArray[np.int64], edge: NDArray[np.int64],
    ) -> int:  # fmt: skip
        """Pick the edges of ``hops.nodes[begin:end]``, and enter the nodes that they come from. Returns the
        number of nodes with those that are new."""

    @abstractmethod
    def _bad_offsets(self, node: int) -> Exception:
        """What is wrong with the offsets of a node."""

    @abstractmethod
    def _reserve_hop(self, hops: Hops, hop: int, nodes_max: int, edges: int, picks: int) -> None:
        """Make sure that there is memory for a hop that ends with at most ``nodes_max`` nodes."""

    def _count(
        self, hops: Hops, offsets: NDArray[np.int64], edge_total: int, begin: int, end: int, fanout: int,
        key: np.uint64,
    ) -> tuple[int, int]:  # fmt: skip
        """How many edges ``hops.nodes[begin:end]`` will have, and the largest degree. By offsets in memory,
        unless a sampler has them elsewhere."""
        edges, degree_max = hop_size(offsets, edge_total, hops.nodes, begin, end, fanout)
        if edges < 0:
            raise self._bad_offsets(int(hops.nodes[-edges - 1]))
        return edges, degree_max

    def _go(self, hops: Hops, offsets: NDArray[np.int64], edge_total: int, key: int) -> None:
        """Sample all hops of a mini-batch whose ``nodes`` are its seeds; ``key`` is the mini-batch's."""
        begin, count = 0, len(hops.nodes)
        hops.counts.append(count)
        for hop, fanout in enumerate(self.fanouts):
            edges, degree_max = self._count(
                hops, offsets, edge_total, begin, count, fanout, hop_key(key, hop)
            )
            bound = min(count + edges, self.node_count)
            self._reserve_hop(hops, hop, bound, edges, min(fanout, degree_max))
            hops.nodes, hops.slots = make_room(hops.nodes, hops.slots, count, bound)
            row, col, edge = (np.empty(edges, np.int64) for _ in range(3))
            picks = empty_picks(fanout, degree_max)
            found = self._fill(hops, begin, count, fanout, hop_key(key, hop), picks, row, col, edge)
            begin, count = count, found
            hops.counts.append(count - begin)
            hops.row.append(row)
            hops.col.append(col)
            hops.edge.append(edge)
