"""Size-constrained label propagation over a graph that is read in blocks.

The first half of coarsening (:mod:`featstore.order.multilevel`). Each node in turn takes the label that most
of its neighbours carry, among the labels that have room for one more node (Meyerhenke, Sanders & Schulz,
"Partitioning complex networks via size-constrained clustering", SEA'14). Started with a label for each node
and a small limit, a few passes find clusters: dense places, which a good partition does not tear apart.

All state is a label for each node and a size for each label. Edges are passed over in the order in which they
are stored and never held. The labels around one node are counted in a hash table that is no larger than the
node needs, so that it stays in the fastest cache, and never larger than :data:`TABLE_SLOTS_MAX`: of a hub
with neighbours in more than half as many labels the first so many count.

Leaves of a full hub can join nobody and would stay alone in their thousands. In the last pass of clustering a
node that is still alone is therefore put together with others that would have liked the same label ("two-hop
matching", LaSalle et al., IA3'15): each label that was full has a bin that collects them, as have the nodes
without any edge.

Ties are broken by chance: to each count a random number below ``heat`` is added, with heat at most one. The
generator is seeded by (seed, pass), so equal seeds give equal labels, whatever the block size. Without heat
ties go to the label met first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN
from featstore.order.ldg import STAY_BONUS, next_random, random_of_pass
from featstore.order.stream import GraphLike, bad_edge_error, edge_blocks

TABLE_SLOTS_MAX = 1 << 16
"""Slots of the table of labels around a node; at most half are used."""

"""Added to the score of the label a node has: between equals it stays."""

# Positions in the kernel's state, int64: what it must remember when a block ends inside a node's edges.
_NODE, _TOUCHED, _MOVED = range(3)
_STATE_SIZE = 3

FIRST_RANDOM = 1 << 20
"""Passes are numbered from here for the generator, so that no pass of LDG with the same seed draws the
same."""

TABLE_BYTES = (4 + 8 + 4) * TABLE_SLOTS_MAX


@njit(cache=True, nogil=True)
def slot_bits(degree: int) -> int:
    """The table of a node of this degree has two to this power of slots: twice its degree, but no more than
    the most."""
    bits = 1
    while bits < 16 and (1 << bits) < 2 * degree:
        bits += 1
    return bits


@njit(cache=True, nogil=True)
def best_label(
    old: int,
    sizes: Any,
    keys: Any,
    counts: Any,
    touched: Any,
    touched_count: int,
    random: Any,
    limit: int,
    heat: float,
) -> Any:
    """(the label with room that scores best or -1, the one that most neighbours carry or -1); clears the
    table."""
    best, favourite = np.int64(-1), np.int64(-1)
    best_score, most = 0.0, 0
    for i in range(touched_count):
        slot = touched[i]
        name, count = np.int64(keys[slot]), counts[slot]
        keys[slot] = -1
        counts[slot] = 0
        if count > most:
            favourite, most = name, count
        if sizes[name] >= limit:
            continue
        score = np.float64(count)
        if heat > 0.0:
            score += heat * (np.int64(next_random(random) >> np.uint64(40)) / 16777216.0)
        if name == old:
            score += STAY_BONUS
        if score > best_score:
            best, best_score = name, score
    return best, favourite


@njit(cache=True, nogil=True)
def bin_label(old: int, favourite: int, sizes: Any, bins: Any, limit: int) -> Any:
    """The label of the bin of ``favourite`` (the last bin for -1), or the node's own, which then is the new
    bin."""
    place = favourite if favourite >= 0 else bins.size - 1
    found = np.int64(bins[place])
    if found >= 0 and found != old and 0 < sizes[found] < limit:
        return found
    bins[place] = old
    return old


@njit(cache=True, nogil=True)
def propagate_block(
    indptr: Any,
    block: Any,
    first_edge: int,
    label: Any,
    sizes: Any,
    table: Any,
    counts: Any,
    bins: Any,
    state: Any,
    random: Any,
    limit: int,
    heat: float,
) -> int:
    """One block of a pass: moves every node whose last edge is in it. The first bad position in the block, or
    -1.

    ``label`` int32 [nodes]; ``sizes`` int32 [labels]; ``table`` int32 [2, SLOTS_MAX], labels and touched
    slots, and ``counts`` int64 [SLOTS_MAX], both empty; ``bins`` int32 [labels + 1], -1 = none, or [0] to
    leave nodes alone.
    """
    keys, touched = table[0], table[1]
    nodes = label.size
    end_edge = first_edge + block.size
    node = state[_NODE]
    touched_count = state[_TOUCHED]
    while node < nodes:
        bits = slot_bits(indptr[node + 1] - indptr[node])
        mask = (1 << bits) - 1
        for edge in range(max(indptr[node], first_edge), min(indptr[node + 1], end_edge)):
            source = block[edge - first_edge]
            if source < 0 or source >= nodes:
                return edge - first_edge
            # A self-loop would hold a node where it is.
            if source == node:
                continue
            name = label[source]
            slot = np.int64((np.uint64(name) * GOLDEN) >> np.uint64(64 - bits))
            while keys[slot] != name and keys[slot] >= 0:
                slot = (slot + 1) & mask
            if keys[slot] < 0:
                if 2 * touched_count > mask:
                    continue
                keys[slot] = name
                touched[touched_count] = slot
                touched_count += 1
            counts[slot] += 1
        if indptr[node + 1] > end_edge:
            break
        old = np.int64(label[node])
        sizes[old] -= 1
        new, favourite = best_label(old, sizes, keys, counts, touched, touched_count, random, limit, heat)
        touched_count = 0
        if new < 0:
            new = old
            if bins.size > 0 and sizes[old] == 0:
                new = bin_label(old, favourite, sizes, bins, limit)
        sizes[new] += 1
        label[node] = new
        if new != old:
            state[_MOVED] += 1
        node += 1
    state[_NODE] = node
    state[_TOUCHED] = touched_count
    return -1


def propagate(
    graph: GraphLike,
    indptr: NDArray[np.int64],
    label: NDArray[np.int32],
    sizes: NDArray[np.int32],
    *,
    limit: int,
    heat: float,
    seed: int,
    number: int,
    bins: bool,
    block_edges: int,
) -> int:
    """Pass ``number`` over the graph: changes ``label`` int32 [nodes] and ``sizes`` int32 [labels]; how many
    moved.

    No label comes to have more than ``limit`` nodes. Holds one block, :data:`TABLE_BYTES`,
    and with ``bins`` 4 bytes a label. Raises SourceError for an edge to a node that does not exist.
    """
    state = np.zeros(_STATE_SIZE, np.int64)
    random = random_of_pass(seed, FIRST_RANDOM + number)
    table = np.full((2, TABLE_SLOTS_MAX), -1, np.int32)
    counts = np.zeros(TABLE_SLOTS_MAX, np.int64)
    open_bins = np.full(sizes.size + 1 if bins else 0, -1, np.int32)
    for first, block in edge_blocks(graph, block_edges):
        bad = propagate_block(
            indptr, block, first, label, sizes, table, counts, open_bins, state, random, limit, heat
        )
        if bad >= 0:
            raise bad_edge_error(graph, first + bad)
    return int(state[_MOVED])
