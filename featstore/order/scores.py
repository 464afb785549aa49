"""How good a partition is: what it cuts, how even it is, and how local neighbour sampling is in it.

The edge cut is what partitioners minimise; what a loader feels is how much of a mini-batch lies in the parts
of its own nodes. So we sample as it does: some roots (training nodes where they are known), at most
``FANOUT`` in-neighbours of each, at most ``FANOUT`` of each of these, uniformly without replacement; and
count which of them lie in the root's part. Neighbours count as often as they are reached; steps back to the
root itself do not count, as they cost nothing.

Offsets are in memory, so the positions of the sampled edges are known beforehand. A pass over the edges that
takes up these positions as they come by serves one hop; two passes are all, and the first counts the cut as
well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.errors import SourceError
from featstore.order.chances import next_random, random_of_pass
from featstore.order.stream import (
    BLOCK_EDGES,
    GraphLike,
    bad_edge_error,
    checked_indptr,
    cut_block,
    edge_blocks,
)

FANOUT = 16
SAMPLES = 1000

_ROOT_BYTES = 96
_FIXED_BYTES = 1 << 18


@dataclass(frozen=True)
class Scores:
    """Scores of a partition.

    ``edge_cut``: share of stored edges whose ends are in different parts. ``node_balance``, ``edge_balance``,
    ``train_balance``: the largest part over the mean part, in nodes, in edges that its nodes gather along,
    and in training nodes (None where these are unknown); 1.0 is perfect. ``hop1``, ``hop2``: mean over
    ``roots`` sampled nodes of the share of nodes reached in one step, and in exactly two, that lie in the
    root's part; None where there are none.
    """

    parts: int
    edge_cut: float
    node_balance: float
    edge_balance: float
    train_balance: float | None
    hop1: float | None
    hop2: float | None
    roots: int

    def to_dict(self) -> dict[str, int | float | None]:
        """The scores by name, for JSON."""
        return asdict(self)


@njit(cache=True, nogil=True)
def tally(indptr: Any, part: Any, train: Any, nodes: Any, edges: Any, trains: Any) -> int:
    """Count into ``nodes``, ``edges``, ``trains`` int64 [parts]; the first node of no such part, or -1.

    ``train`` is bool [nodes], or of size 0 where training nodes are unknown.
    """
    for node in range(part.size):
        p = part[node]
        if p < 0 or p >= nodes.size:
            return node
        nodes[p] += 1
        edges[p] += indptr[node + 1] - indptr[node]
        if train.size > 0 and train[node]:
            trains[p] += 1
    return -1


@njit(cache=True, nogil=True)
def draw_roots(train: Any, nodes: int, left: int, roots: Any, random: Any) -> None:
    """Fill ``roots`` with that many of the ``left`` candidates, ascending: selection sampling, each subset
    equally likely (Knuth, vol. 2, 3.4.2 S)."""
    found = 0
    for node in range(nodes):
        if found == roots.size:
            break
        if train.size > 0 and not train[node]:
            continue
        if np.int64((next_random(random) >> np.uint64(20)) % np.uint64(left)) < roots.size - found:
            roots[found] = node
            found += 1
        left -= 1


@njit(cache=True, nogil=True)
def draw_edges(indptr: Any, nodes: Any, fanout: int, positions: Any, owners: Any, random: Any) -> int:
    """Draw at most ``fanout`` different edges of each of ``nodes`` (Floyd's algorithm, Bentley 1987); how
    many.

    Writes their positions into ``positions`` and the index of their node into ``owners``, both int64.
    """
    count = 0
    for i in range(nodes.size):
        begin = indptr[nodes[i]]
        degree = indptr[nodes[i] + 1] - begin
        first = count
        for j in range(max(0, degree - fanout), degree):
            drawn = begin + j
            if degree > fanout:
                drawn = begin + np.int64((next_random(random) >> np.uint64(20)) % np.uint64(j + 1))
                for k in range(first, count):
                    if positions[k] == drawn:
                        drawn = begin + j
                        break
            positions[count] = drawn
            owners[count] = i
            count += 1
    return count


def _take(
    block: NDArray[Any], first: int, order: NDArray[np.int64], positions: NDArray[np.int64], out: Any
) -> None:
    """Store the edges of ``block`` whose positions were drawn; ``order`` sorts ``positions``."""
    begin, end = np.searchsorted(positions, [first, first + block.size], sorter=order)
    mine = order[begin:end]
    out[mine] = block[positions[mine] - first]


def _share(
    reached: NDArray[np.int64], owner: NDArray[np.int64], roots: NDArray[np.int64], part: Any
) -> float | None:
    """Mean over roots of the share of the nodes reached that is in the root's part."""
    kept = reached != roots[owner]
    reached, owner = reached[kept], owner[kept]
    near = part[reached] == part[roots[owner]]
    counts = np.bincount(owner, minlength=roots.size)
    inside = np.bincount(owner[near], minlength=roots.size)
    some = counts > 0
    return float((inside[some] / counts[some]).mean()) if some.any() else None


def _balance(counts: NDArray[np.int64]) -> float:
    """The largest over the mean; 1.0 where there is nothing to balance."""
    total = int(counts.sum())
    return float(counts.max() * counts.size / total) if total else 1.0


class _Draw:
    """The edges drawn of some nodes, and, once a pass has gone by, the nodes at their other ends."""

    def __init__(
        self, indptr: NDArray[np.int64], nodes: NDArray[np.int64], random: NDArray[np.uint64]
    ) -> None:
        positions, owners = np.empty(nodes.size * FANOUT, np.int64), np.empty(nodes.size * FANOUT, np.int64)
        count = draw_edges(indptr, nodes, FANOUT, positions, owners, random)
        self.positions, self.owners = positions[:count], owners[:count]
        self.order: NDArray[np.int64] = np.argsort(self.positions, kind="stable")
        self.sources: NDArray[np.int64] = np.zeros(count, np.int64)

    def take(self, block: NDArray[Any], first: int) -> None:
        """Look at one block of edges."""
        _take(block, first, self.order, self.positions, self.sources)


def _first_pass(graph: GraphLike, part: NDArray[np.int32], draw: _Draw, block_edges: int) -> int:
    """Edges cut; a function, so that its block is gone before the second pass makes another."""
    indptr = checked_indptr(graph)
    cut, node = 0, 0
    for first, block in edge_blocks(graph, block_edges):
        block_cut, node, bad = cut_block(indptr, block, first, node, part)
        if bad >= 0:
            raise bad_edge_error(graph, first + bad)
        cut += block_cut
        draw.take(block, first)
    return cut


def score_parts(
    graph: GraphLike,
    part: NDArray[np.int32],
    parts: int,
    *,
    train: NDArray[np.bool_] | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    block_edges: int = BLOCK_EDGES,
) -> Scores:
    """Scores of ``part`` int32 [nodes]; deterministic for equal arguments, whatever the block size.

    ``train``: bool [nodes], the training nodes, from which roots are then drawn (None: from all nodes);
    ``samples``: at most this many roots. Reads the edges twice from first to last and allocates at most
    :func:`scores_memory_bytes`. Raises SourceError for a bad graph, a part number outside 0 to parts - 1, and
    arguments out of range.

    BGL (NSDI'23) argues for locality over several hops rather than for the edge cut alone.
    """
    indptr = checked_indptr(graph)
    nodes = indptr.size - 1
    if part.shape != (nodes,):
        raise SourceError(f"part must have one entry for each of {nodes} nodes, not shape {part.shape}")
    if train is not None and (train.shape != (nodes,) or train.dtype != np.bool_):
        raise SourceError(f"train must be bool of shape ({nodes},), not {train.dtype} of shape {train.shape}")
    if parts < 1 or samples < 1 or seed < 0:
        raise SourceError(
            f"need parts >= 1, samples >= 1, seed >= 0, not parts={parts}, samples={samples}, seed={seed}"
        )
    is_train = np.zeros(0, np.bool_) if train is None else train
    counts = np.zeros((3, parts), np.int64)
    bad = tally(indptr, part, is_train, counts[0], counts[1], counts[2])
    if bad >= 0:
        raise SourceError(f"node {bad} is in part {int(part[bad])}, but parts are 0 to {parts - 1}")
    random = random_of_pass(seed, 0)
    candidates = nodes if train is None else int(counts[2].sum())
    roots = np.empty(min(samples, candidates), np.int64)
    draw_roots(is_train, nodes, candidates, roots, random)
    near = _Draw(indptr, roots, random)
    cut = _first_pass(graph, part, near, block_edges)
    far = _Draw(indptr, near.sources, random)
    for first, block in edge_blocks(graph, block_edges):
        far.take(block, first)
    return Scores(
        parts=parts,
        edge_cut=cut / max(graph.indices.size, 1),
        node_balance=_balance(counts[0]),
        edge_balance=_balance(counts[1]),
        train_balance=None if train is None else _balance(counts[2]),
        hop1=_share(near.sources, near.owners, roots, part),
        hop2=_share(far.sources, near.owners[far.owners], roots, part),
        roots=int(roots.size),
    )


def scores_memory_bytes(parts: int, samples: int = SAMPLES, block_edges: int = BLOCK_EDGES) -> int:
    """The most :func:`score_parts` allocates, in bytes, above the graph and the parts (machine code is not
    counted)."""
    return (
        24 * parts + _ROOT_BYTES * samples * (1 + FANOUT + FANOUT * FANOUT) + 8 * block_edges + _FIXED_BYTES
    )
