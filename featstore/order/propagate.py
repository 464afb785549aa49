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
node that is still alone at the end of its batch is therefore put together with others that would have liked
the same label ("two-hop matching", LaSalle et al., IA3'15): each label that was full has a bin that collects
them, as have the nodes without any edge.

Several threads share a pass by chunks of nodes (:mod:`featstore.order.chunks`); there are as many labels as
nodes, so a chunk keeps what it changed of their sizes in a hash table. Ties are broken by chance: to each
count a random number below ``heat`` is added, with heat at most one. Generators are seeded by (seed, pass,
chunk), so equal seeds give equal labels, whatever the block size and the number of threads. Without heat ties
go to the label met first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN
from featstore.base.native import prefetch
from featstore.order.chances import next_random, random_of_pass, seed_of_chunk
from featstore.order.chunks import (
    FIRST_NODE,
    WAITING,
    Chunks,
    batch_before,
    batch_nodes,
    chunk_nodes,
    chunk_of,
    end_chunk,
    take_chunk,
)
from featstore.order.crew import apart
from featstore.order.ldg import STAY_BONUS
from featstore.order.stream import PREFETCH_EDGES, GraphLike, bad_edge_error, node_count

TABLE_SLOTS_MAX = 1 << 16
"""Slots of the table of labels around a node; at most half are used."""

# Positions in the kernel's state, int64: what it must remember when a block ends inside a node's edges.
_NODE, _TOUCHED, _CHANGED = range(3)
_STATE_SIZE = 3

_NO_WISH = -2  # of a node that has company; -1: one without neighbours

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
def change_slot(changes: Any, name: int) -> int:
    """The slot of a label's change of size, or the free one where it belongs. ``changes`` int32 [3, slots]:
    labels, -1 = free; by how much each changed; slots in use."""
    mask = changes.shape[1] - 1
    slot = np.int64((np.uint64(name) * GOLDEN) >> np.uint64(32)) & mask
    while changes[0, slot] != name and changes[0, slot] >= 0:
        slot = (slot + 1) & mask
    return int(slot)


@njit(cache=True, nogil=True)
def size_now(sizes: Any, changes: Any, name: int) -> Any:
    """The size of a label for the chunk under way."""
    return sizes[name] + changes[1, change_slot(changes, name)]


@njit(cache=True, nogil=True)
def change(changes: Any, name: int, by: int, state: Any) -> None:
    """Change a label's size for the chunk under way."""
    slot = change_slot(changes, name)
    if changes[0, slot] < 0:
        changes[0, slot] = name
        changes[2, state[_CHANGED]] = slot
        state[_CHANGED] += 1
    changes[1, slot] += by


@njit(cache=True, nogil=True)
def best_label(
    old: int, sizes: Any, changes: Any, keys: Any, counts: Any, touched: Any, touched_count: int, random: Any,
    limit: int, heat: float,
) -> Any:  # fmt: skip
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
        score = np.float64(count)
        if heat > 0.0:
            score += heat * (np.int64(next_random(random) >> np.uint64(40)) / 16777216.0)
        if name == old:
            score += STAY_BONUS
        if score > best_score and size_now(sizes, changes, name) < limit:
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
def propagate_chunk(
    indptr: Any, block: Any, first_edge: int, begin: int, end: int, first_node: int, before: Any, label: Any,
    sizes: Any, wishes: Any, changes: Any, table: Any, counts: Any, state: Any, random: Any, limit: int,
    heat: float,
) -> int:  # fmt: skip
    """One block of edges of a chunk, nodes ``begin`` to ``end``: moves every node whose last edge is in it.
    The first bad position in the block, or -1.

    ``label`` int32 [nodes]; ``before`` int32 [nodes of the batch], what it was for them, from ``first_node``
    on, when the batch began; ``sizes`` int32 [labels], of that time; ``wishes`` int32 [nodes of the batch],
    or [0]: the favourite label of nodes that are alone; ``changes`` as for :func:`change_slot`, ``table``
    int32 [2, SLOTS_MAX], labels and touched slots, and ``counts`` int64 [SLOTS_MAX], all empty.
    """
    keys, touched = table[0], table[1]
    nodes = label.size
    address = label.ctypes.data
    end_edge = first_edge + block.size
    node = state[_NODE]
    touched_count = state[_TOUCHED]
    while node < end:
        bits = slot_bits(indptr[node + 1] - indptr[node])
        mask = (1 << bits) - 1
        for edge in range(max(indptr[node], first_edge), min(indptr[node + 1], end_edge)):
            if edge + PREFETCH_EDGES < end_edge:
                prefetch(address + 4 * np.int64(block[edge - first_edge + PREFETCH_EDGES]))
            source = block[edge - first_edge]
            if source < 0 or source >= nodes:
                return edge - first_edge
            # A self-loop would hold a node where it is.
            if source == node:
                continue
            at = source - first_node
            if at >= 0 and at < before.size and (source < begin or source >= end):
                name = before[at]
            else:
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
        change(changes, old, -1, state)
        new, favourite = best_label(
            old, sizes, changes, keys, counts, touched, touched_count, random, limit, heat
        )
        touched_count = 0
        if new < 0:
            new = old
            if wishes.size > 0 and size_now(sizes, changes, old) == 0:
                wishes[node - first_node] = favourite
        change(changes, new, 1, state)
        label[node] = new
        node += 1
    state[_NODE] = node
    state[_TOUCHED] = touched_count
    if node == end:  # the next chunk begins with the sizes of the batch, too
        for i in range(state[_CHANGED]):
            changes[0, changes[2, i]] = -1
            changes[1, changes[2, i]] = 0
        state[_CHANGED] = 0
    return -1


@njit(cache=True, nogil=True)
def propagate_chunks(
    plan: Any, helps: bool, waiting: Any, chunk_size: int, seed: Any, indptr: Any, block: Any,
    all_before: Any, label: Any, sizes: Any, all_wishes: Any, changes: Any, table: Any, counts: Any,
    state: Any, random: Any, limit: int, heat: float,
) -> None:  # fmt: skip
    """Chunks as long as there are any to take (see :mod:`featstore.order.chunks`), each as
    :func:`propagate_chunk` goes through it, whose arguments these are."""
    while True:
        chunk = take_chunk(plan, block, helps, waiting)
        if chunk < 0:
            return
        begin, end, edges, low = chunk_of(plan, block, chunk)
        state[:] = 0
        state[_NODE] = begin
        random[0] = seed_of_chunk(seed, begin // chunk_size)
        bad = propagate_chunk(
            indptr, edges, low, begin, end, plan[FIRST_NODE], batch_before(plan, all_before), label, sizes,
            batch_before(plan, all_wishes), changes, table, counts, state, random, limit, heat,
        )  # fmt: skip
        end_chunk(plan, chunk, low + bad if bad >= 0 else np.int64(-1))


@njit(cache=True, nogil=True)
def end_labels_batch(
    first_node: int, before: Any, label: Any, sizes: Any, wishes: Any, bins: Any, limit: int
) -> int:
    """Count the moves of a batch in ``sizes``, in the order of the nodes; a label that is full by then takes
    no more. Nodes that are alone with a wish go to a bin. How many moved.

    ``bins`` int32 [labels + 1], -1 = none, or [0]; ``wishes`` is cleared.
    """
    count = 0
    address = sizes.ctypes.data
    for at in range(before.size):
        if at + PREFETCH_EDGES < before.size:
            prefetch(address + 4 * np.int64(before[at + PREFETCH_EDGES]))
            prefetch(address + 4 * np.int64(label[first_node + at + PREFETCH_EDGES]))
        old, new = np.int64(before[at]), np.int64(label[first_node + at])
        sizes[old] -= 1
        if new != old and sizes[new] >= limit:
            new = old
        if wishes.size > 0:
            if wishes[at] != _NO_WISH and new == old and sizes[old] == 0:
                new = bin_label(old, wishes[at], sizes, bins, limit)
            wishes[at] = _NO_WISH
        sizes[new] += 1
        label[first_node + at] = new
        count += new != old
    return count


def _change_slots(nodes: int) -> int:
    """Slots for the changes of a chunk, at most half of which are used: two labels a node."""
    return 1 << max(2, (4 * chunk_nodes(nodes) - 1).bit_length())


class _Scratch:
    """What a thread has of its own."""

    def __init__(self, nodes: int) -> None:
        self.table = np.full((2, TABLE_SLOTS_MAX), -1, np.int32)
        self.counts = np.zeros(TABLE_SLOTS_MAX, np.int64)
        self.changes = np.zeros((3, _change_slots(nodes)), np.int32)
        self.changes[0] = -1
        self.state, self.random = apart(1, _STATE_SIZE, np.int64)[0], apart(1, 1, np.uint64)[0]


def propagate_bytes(nodes: int, threads: int) -> int:
    """The most :func:`propagate` allocates, in bytes, without the block and the bins."""
    return threads * (TABLE_BYTES + 12 * _change_slots(nodes)) + 8 * batch_nodes(nodes)


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
    threads: int = 1,
) -> int:
    """Pass ``number`` over the graph: changes ``label`` int32 [nodes] and ``sizes`` int32 [labels]; how many
    moved.

    No label comes to have more than ``limit`` nodes. Holds one block, :func:`propagate_bytes`, and with
    ``bins`` 4 bytes a label. Raises SourceError for an edge to a node that does not exist.
    """
    nodes = node_count(graph)
    seed_of_pass = random_of_pass(seed, FIRST_RANDOM + number)[0]
    own = [_Scratch(nodes) for _ in range(threads)]
    open_bins = np.full(sizes.size + 1 if bins else 0, -1, np.int32)
    before = np.empty(batch_nodes(nodes), np.int32)
    all_wishes = np.full(before.size if bins else 0, _NO_WISH, np.int32)

    def work(thread: int, begin: int, end: int, block: NDArray[Any], first_edge: int) -> int:
        mine = own[thread]
        if first_edge == indptr[begin]:
            mine.state[:] = 0
            mine.state[_NODE] = begin
            mine.random[0] = seed_of_chunk(seed_of_pass, begin // chunks.size)
        return int(propagate_chunk(
            indptr, block, first_edge, begin, end, first_node, then, label, sizes, wishes, mine.changes,
            mine.table, mine.counts, mine.state, mine.random, limit, heat,
        ))  # fmt: skip

    def share(thread: int) -> None:
        mine = own[thread]
        propagate_chunks(
            chunks.plan, thread > 0, WAITING, chunks.size, seed_of_pass, indptr, chunks.block, before, label,
            sizes, all_wishes, mine.changes, mine.table, mine.counts, mine.state, mine.random, limit, heat,
        )  # fmt: skip

    moved = 0
    with Chunks(graph, indptr, block_edges, threads) as chunks, chunks.helping(share):
        for first_node, last_node in chunks.batches():
            then, wishes = before[: last_node - first_node], all_wishes[: last_node - first_node]
            np.copyto(then, label[first_node:last_node])
            bad = chunks.run(first_node, last_node, work, share)
            if bad >= 0:
                raise bad_edge_error(graph, bad)
            moved += int(end_labels_batch(first_node, then, label, sizes, wishes, open_bins, limit))
    return moved
