"""METIS (Karypis & Kumar, SISC 1998) through pymetis: the best partitions, for graphs that fit in memory
several times.

METIS wants an adjacency that is symmetric, without self-loops and without duplicates, in its own integer
width, in memory. One pass over the edges finds out what is missing: the sum of a hash over all edges (u, v)
equals that over all (v, u) exactly when the graph is symmetric (but for one chance in 2**64), and rows that
ascend strictly have no duplicates. What passes is copied in METIS's width and handed over; for the rest the
adjacency is built: mirrored if need be, then deduplicated in place with one mark a node.

METIS then coarsens the graph level by level and keeps all levels, which is where the memory goes;
:func:`metis_memory_bytes` is an upper estimate, fitted to measured peaks (`benchmarks/order_quality.py`
measures them). Balance is METIS's own: about 3 % for graphs that have it, not guaranteed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN, MIX_A, mix64
from featstore.errors import SourceError
from featstore.order.stream import (
    BLOCK_EDGES,
    GraphLike,
    bad_edge_error,
    checked_indptr,
    edge_blocks,
    edge_count,
    node_count,
)

# Measured peaks with nothing set aside for nodes: 62 to 120 bytes a stored edge at up to 512 parts, most on
# random graphs, 132 at 4096 parts, and 145 a node on graphs of one edge a node.
NODE_BYTES = 100
EDGE_BYTES = 130
FIXED_BYTES = 16 << 20

# Positions in the survey's state, int64.
_NODE, _PREVIOUS, _LOOPS, _DISORDER = range(4)


@dataclass(frozen=True)
class GraphSurvey:
    """What METIS needs to know of a graph: is it symmetric, are its rows strictly ascending, how many
    self-loops."""

    symmetric: bool
    ascending: bool
    loops: int

    @property
    def clean(self) -> bool:
        """Whether METIS can take the graph as it is."""
        return self.symmetric and self.ascending and self.loops == 0


def metis_installed() -> bool:
    """Whether pymetis can be imported; does not import it."""
    return importlib.util.find_spec("pymetis") is not None


@njit(cache=True, nogil=True)
def edge_hash(u: int, v: int) -> Any:
    """A hash of the ordered pair, uint64."""
    h = np.uint64(u) + GOLDEN
    for _ in range(2):
        h = mix64(h) + np.uint64(v)
    return (h ^ (h >> np.uint64(32))) * MIX_A


@njit(cache=True, nogil=True)
def survey_block(indptr: Any, block: Any, first_edge: int, state: Any, sums: Any) -> int:
    """Add a block to ``state`` int64 [4] and ``sums`` uint64 [2]; the first bad position, or -1."""
    node = state[_NODE]
    for i in range(block.size):
        while indptr[node + 1] <= first_edge + i:
            node += 1
        source = np.int64(block[i])
        if source < 0 or source >= indptr.size - 1:
            return i
        if first_edge + i > indptr[node] and source <= state[_PREVIOUS]:
            state[_DISORDER] += 1
        if source == node:
            state[_LOOPS] += 1
        sums[0] += edge_hash(source, node)
        sums[1] += edge_hash(node, source)
        state[_PREVIOUS] = source
    state[_NODE] = node
    return -1


@njit(cache=True, nogil=True)
def count_ends(indptr: Any, block: Any, first_edge: int, node: int, mirror: bool, ends: Any) -> int:
    """Count into ``ends`` int64 [nodes + 1], shifted by one, the edges each row will get; the last edge's
    node."""
    for i in range(block.size):
        while indptr[node + 1] <= first_edge + i:
            node += 1
        if block[i] != node:
            ends[node + 1] += 1
            if mirror:
                ends[block[i] + 1] += 1
    return node


@njit(cache=True, nogil=True)
def fill_ends(
    indptr: Any, block: Any, first_edge: int, node: int, mirror: bool, cursors: Any, adjacency: Any
) -> int:
    """Write what :func:`count_ends` counted at each row's cursor; the last edge's node."""
    for i in range(block.size):
        while indptr[node + 1] <= first_edge + i:
            node += 1
        source = block[i]
        if source != node:
            adjacency[cursors[node]] = source
            cursors[node] += 1
            if mirror:
                adjacency[cursors[source]] = node
                cursors[source] += 1
    return node


@njit(cache=True, nogil=True)
def drop_duplicates(offsets: Any, adjacency: Any, marks: Any) -> int:
    """Compact rows in place to first occurrences, ``offsets`` with them; ``marks`` [nodes] = -1. The edges
    left."""
    kept = 0
    begin = offsets[0]
    for node in range(offsets.size - 1):
        end = offsets[node + 1]
        for i in range(begin, end):
            source = adjacency[i]
            if marks[source] != node:
                marks[source] = node
                adjacency[kept] = source
                kept += 1
        begin = end
        offsets[node + 1] = kept
    return kept


def survey_graph(graph: GraphLike, *, block_edges: int = BLOCK_EDGES) -> GraphSurvey:
    """What the graph lacks for METIS. One sequential pass; holds one block. Raises SourceError for a bad
    graph."""
    indptr = checked_indptr(graph)
    state = np.zeros(4, np.int64)
    sums = np.zeros(2, np.uint64)
    for first, block in edge_blocks(graph, block_edges):
        bad = survey_block(indptr, block, first, state, sums)
        if bad >= 0:
            raise bad_edge_error(graph, first + bad)
    return GraphSurvey(bool(sums[0] == sums[1]), int(state[_DISORDER]) == 0, int(state[_LOOPS]))


def metis_adjacency(graph: GraphLike, dtype: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """(``xadj`` [nodes + 1], ``adjncy``) in ``dtype``: the graph symmetric, without self-loops and
    duplicates.

    Raises SourceError for a bad graph, and for one with more edges than ``dtype`` can count.
    """
    survey = survey_graph(graph)
    indptr = checked_indptr(graph)
    if edge_count(graph) * (1 if survey.symmetric else 2) > np.iinfo(dtype).max:
        raise SourceError(
            f"{edge_count(graph):,} edges are more than this pymetis can count (its integers are {dtype}); "
            "use method='ldg', or a pymetis built with 64-bit integers"
        )
    if survey.clean:
        return indptr.astype(dtype, copy=False), np.array(graph.indices, dtype)
    mirror = not survey.symmetric
    offsets = np.zeros(indptr.size, np.int64)
    node = 0
    for first, block in edge_blocks(graph):
        node = count_ends(indptr, block, first, node, mirror, offsets)
    del block
    np.cumsum(offsets, out=offsets)
    adjacency = np.empty(int(offsets[-1]), dtype)
    cursors = offsets[:-1].copy()
    node = 0
    for first, block in edge_blocks(graph):
        node = fill_ends(indptr, block, first, node, mirror, cursors, adjacency)
    del block
    cursors.fill(-1)
    kept = drop_duplicates(offsets, adjacency, cursors)
    return offsets.astype(dtype, copy=False), adjacency[:kept]


def metis_partition(graph: GraphLike, parts: int, seed: int) -> NDArray[np.int32]:
    """Part of each node, int32 [nodes], from METIS; deterministic for equal arguments and versions.

    Directed graphs are symmetrised. A graph without edges is cut into even ranges of node ids, and with at
    least as many parts as nodes each node has its own. Needs up to :func:`metis_memory_bytes`, and holds the
    GIL.

    Raises SourceError when pymetis is missing (``pip install 'featstore[metis]'``), for a bad graph and for
    arguments out of range. After Karypis & Kumar, "A fast and high quality multilevel scheme for partitioning
    irregular graphs".
    """
    if not metis_installed():
        raise SourceError(
            "method 'metis' needs pymetis, which is not installed: pip install 'featstore[metis]', or "
            "use method 'ldg'"
        )
    import pymetis

    nodes = node_count(graph)
    if not 1 <= parts < 2**31 or not 0 <= seed < 2**31:
        raise SourceError(
            f"parts must be from 1, seed from 0, both below 2**31, not parts={parts}, seed={seed}"
        )
    xadj, adjacency = metis_adjacency(graph, pymetis.zero_copy_dtype())
    if parts == 1:
        return np.zeros(nodes, np.int32)
    if parts >= nodes or adjacency.size == 0:
        return (np.arange(nodes, dtype=np.int64) * parts // max(nodes, 1)).astype(np.int32)
    return cut_adjacency(xadj, adjacency, parts, seed)


def cut_adjacency(
    xadj: NDArray[Any],
    adjacency: NDArray[Any],
    parts: int,
    seed: int,
    *,
    vertex_weights: NDArray[Any] | None = None,
    edge_weights: NDArray[Any] | None = None,
    halving: bool = False,
) -> NDArray[np.int32]:
    """METIS on a clean adjacency as it is, with integer weights [nodes] and [edges] if given; int32 [nodes].
    ``halving``: by recursive bisection, whatever the number of parts (METIS's own choice takes that up to
    eight parts), and refined once a level; where there are few vertices to a part that cuts as well in a
    quarter of the time.

    Arrays in METIS's own integers are not copied. Raises SourceError where these cannot count the sum of the
    weights.
    """
    import pymetis

    dtype = pymetis.zero_copy_dtype()
    for name, weights in (("vertex", vertex_weights), ("edge", edge_weights)):
        if weights is not None and int(weights.sum()) > np.iinfo(dtype).max:
            raise SourceError(
                f"the {name} weights add up to more than this pymetis can count; use method='ldg'"
            )
    found = pymetis.part_graph(
        parts,
        adjacency=pymetis.CSRAdjacency(xadj.astype(dtype, copy=False), adjacency.astype(dtype, copy=False)),
        vweights=None if vertex_weights is None else vertex_weights.astype(dtype, copy=False),
        eweights=None if edge_weights is None else edge_weights.astype(dtype, copy=False),
        recursive=True if halving else None,
        options=pymetis.Options(seed=seed, **({"niter": 1} if halving else {})),
    )
    return np.fromiter(found.vertex_part, np.int32, xadj.size - 1)


def metis_memory_bytes(nodes: int, edges: int, *, symmetric: bool = False) -> int:
    """An upper estimate, in bytes, of the peak of :func:`metis_partition` above the graph itself.

    ``edges`` are stored edges; unless the graph is known to be ``symmetric`` (each edge stored both ways)
    METIS may see twice as many. Fitted to measurements with pymetis 2025.2 and 64-bit integers; see
    `benchmarks/order_quality.py`.
    """
    return NODE_BYTES * nodes + EDGE_BYTES * edges * (1 if symmetric else 2) + FIXED_BYTES
