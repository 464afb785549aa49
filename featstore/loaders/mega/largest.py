"""How large mini-batches drawn from mega-batches can be, and what memory they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from featstore.sampling.picking import table_size

HELD_BATCHES = 2  # mini-batches that exist at once: the loop's, and the one made ahead of it
_DEVICE_NODE_BYTES = 80  # of a node whose row a device tier puts together: its row's number, its slots
_TREE_BYTES = 24  # of a node whose tree is known: this, twice while it grows, and handed out
_REVERSING_BYTES = 100  # of each edge and each reverse, while they are sorted


@dataclass(frozen=True)
class DrawnEdges:
    """Of one graph: from which type of nodes to which, neighbours per node and hop (-1: all), and the bytes
    of an edge's number and rows."""

    source: str
    target: str
    fanouts: tuple[int, ...]
    edge_bytes: int = 0


@dataclass(frozen=True)
class LargestDrawn:
    """Mini-batches of ``batch_size`` seeds of the type ``seeds``, as large as they can be.

    ``edges``: by graph. ``device_bytes``: where a device tier puts their rows together, the host memory that
    it takes for that; else these are gathered in host memory. ``plain``: nothing is said but fan-outs, so
    that nodes are counted once from the start. ``replace``, ``trees`` (each seed has a subgraph of its own),
    ``subgraph``: as samplers have them.
    """

    batch_size: int
    seeds: str
    edges: Mapping[str, DrawnEdges]
    device_bytes: int | None = None
    plain: bool = True
    replace: bool = False
    trees: bool = False
    subgraph: str = "directional"

    def with_edge_bytes(self, more: Mapping[str, int]) -> LargestDrawn:
        """The same with so many bytes more of an edge, by graph."""
        return replace(
            self,
            edges={
                name: replace(one, edge_bytes=one.edge_bytes + more.get(name, 0))
                for name, one in self.edges.items()
            },
        )

    def nodes_and_edges(
        self, places: Mapping[str, int], edges: Mapping[str, int]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Its nodes by type and its edges by graph at most, in a mega-batch of so many."""
        nodes = dict.fromkeys(places, 0)
        nodes[self.seeds] = min(self.batch_size, places[self.seeds])
        subgraphs = nodes[self.seeds] if self.trees else 1
        new, drawn = dict(nodes), dict.fromkeys(self.edges, 0)
        for hop in range(len(next(iter(self.edges.values())).fanouts)):
            found = dict.fromkeys(places, 0)
            for name, of in self.edges.items():
                fanout, most = of.fanouts[hop], edges[name] * subgraphs
                of_hop = most if fanout < 0 else new[of.target] * fanout
                of_hop = of_hop if self.replace and fanout >= 0 else min(most, of_hop)
                of_hop = 0 if new[of.target] == 0 else of_hop
                drawn[name] += of_hop
                room = places[of.source] - nodes[of.source] if self.plain else of_hop
                found[of.source] += min(of_hop, room)
                nodes[of.source] += min(of_hop, room)
            new = found
        if self.subgraph == "induced":
            drawn = {name: drawn[name] + edges[name] * subgraphs for name in drawn}
        return nodes, drawn

    def memory_bytes(
        self, places: Mapping[str, int], edges: Mapping[str, int], row_bytes: Mapping[str, int]
    ) -> int:
        """Of those that exist at once, and of sampling one."""
        nodes, drawn = self.nodes_and_edges(places, edges)
        of_node = 24 + (0 if self.plain else _TREE_BYTES)
        sampling = sum(of_node * count + 12 * table_size(count) for count in nodes.values())
        sampling += 48 * sum(drawn.values())
        if self.subgraph == "bidirectional":
            sampling += 2 * _REVERSING_BYTES * sum(drawn.values())
            drawn = {name: 2 * sum(drawn.values()) for name in drawn}  # each may be another's reverse
        in_host = self.device_bytes is None
        if not in_host:
            sampling += (self.device_bytes or 0) + _DEVICE_NODE_BYTES * sum(nodes.values())
        held = sum(  # of nodes ids twice; of edges ends, and weights
            count * ((row_bytes[name] if in_host else 0) + 16) for name, count in nodes.items()
        )
        held += sum((20 + one.edge_bytes) * drawn[name] for name, one in self.edges.items())
        return HELD_BATCHES * held + sampling
