"""Restreamed linear deterministic greedy partitioning, annealed: good partitions in four bytes a node.

LDG (Stanton & Kliot, KDD'12) looks at each node once, in stream order, and puts it where most of its
neighbours are, each part weighed by the room left in it: ``neighbours(p) * (1 - size(p) / capacity)``.
Restreaming (Nishimura & Ugander, KDD'13) repeats the pass with the parts of the last one, so that every
neighbour has a part. That is all the state there is: a part number for each node, a size for each part, and
the block of edges being read. Edges are passed over in the order in which they are stored and never held, so
the graph may be far larger than memory.

Two things differ from the papers. Sizes are not reset between passes: a node leaves its part, is scored, and
enters the best one; so no part ever exceeds the capacity, after any pass. And a greedy restream stops in a
poor local optimum (on ogbn-arxiv in 64 parts .40 of the edges stay cut, where METIS cuts .34). So we anneal:
to the score of a part we add ``heat * u``, with u uniform in [0, 1), and heat, in neighbours, falls linearly
from 1.25 to nothing over the first 95 % of the passes; the rest settles. That all but closes the gap to METIS
on citation, co-author and purchase graphs, and costs nothing. Fewer than eight passes are too few to cool
down, so they run cold. `benchmarks/order_quality.py` has the figures.

What it cannot do: on meshes and road maps, where good parts are blobs of which no single node sees the shape,
a method without coarsening stays far behind METIS; there :mod:`featstore.order.multilevel` finds a start,
from which the same passes go on, cooler. Where a part's slack is less than one node (under 20 nodes a part)
nobody can move, and the first pass decides. In directed graphs a node sees those it gathers from (its
in-neighbours) and not those that gather from it, for these would need the transposed graph; symmetrise first
where that matters.

Several threads share a pass by chunks of nodes (:mod:`featstore.order.chunks`). Noise comes from xorshift
generators seeded by (seed, pass, chunk): equal seeds give equal parts, whatever the block size and the number
of threads, on any machine. Ties go to the lower part number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import prefetch
from featstore.errors import SourceError
from featstore.order.chances import next_random, random_of_pass, seed_of_chunk
from featstore.order.chunks import (
    FIRST_NODE,
    WAITING,
    Chunks,
    batch_before,
    batch_nodes,
    chunk_of,
    end_chunk,
    take_chunk,
)
from featstore.order.crew import apart
from featstore.order.parts import part_sizes
from featstore.order.stream import (
    BLOCK_EDGES,
    PREFETCH_EDGES,
    GraphLike,
    bad_edge_error,
    checked_indptr,
    node_count,
)

PASSES = 40
SLACK = 0.05
HEAT = 1.25
COOL_SHARE = 0.95
PASSES_TO_ANNEAL = 8

STAY_BONUS = 1e-3
"""Added to the score of the part a node comes from: between equals it stays."""

SURE_MOVES = 1
"""What a chunk saw of its batch's moves is taken for what the others see, the more so the more moves it saw:
by half where it saw so many. Without, all chunks fill the emptiest part at once."""

DRAWS = 8
"""A node that no neighbour draws anywhere goes to the emptiest of this many random parts."""

# Positions in the kernel's state, int64: what it must remember when a block ends inside a node's edges.
_NODE, _TOUCHED, _CURSOR, _MOVED = range(4)
_STATE_SIZE = 4

_FIXED_BYTES = 1 << 18


@njit(cache=True, nogil=True)
def best_part(
    old: int, base: int, sizes: Any, moved: Any, counts: Any, touched: Any, touched_count: int, random: Any,
    chunks: int, capacity: int, heat: float, full: float,
) -> int:  # fmt: skip
    """The part with room that scores best among those of a node's neighbours, or -1; clears ``counts``. Part
    p had ``sizes[base + p]`` nodes of this one's group, ``moved[base + p]`` came since by this chunk (the
    node itself has left), and about as many by each of the other ``chunks``."""
    best = -1
    best_score = 0.0
    for i in range(touched_count):
        p = touched[i]
        own = moved[base + p] + (p == old)
        size = sizes[base + p] + moved[base + p] + (chunks - 1) * own * abs(own) / (abs(own) + SURE_MOVES)
        score = counts[p] * (1.0 - size / full)
        counts[p] = 0
        if size >= capacity:
            continue
        if heat > 0.0:
            score += heat * (np.int64(next_random(random) >> np.uint64(40)) / 16777216.0)
        if p == old:
            score += STAY_BONUS
        if score > best_score or (score == best_score and p < best):
            best = p
            best_score = score
    return best


@njit(cache=True, nogil=True)
def part_with_room(
    base: Any, parts: Any, sizes: Any, moved: Any, random: Any, capacity: int, state: Any
) -> Any:  # fmt: skip
    """The emptiest of a few random parts; where all of them are full, the next with room after the cursor."""
    best = np.int64(0)
    best_size = np.int64(capacity)
    for _ in range(DRAWS):
        p = np.int64((next_random(random) >> np.uint64(20)) % np.uint64(parts))
        if sizes[base + p] + moved[base + p] < best_size:
            best = p
            best_size = sizes[base + p] + moved[base + p]
    if best_size < capacity:
        return best
    while sizes[base + state[_CURSOR]] + moved[base + state[_CURSOR]] >= capacity:
        state[_CURSOR] = (state[_CURSOR] + 1) % parts
    return np.int64(state[_CURSOR])


@njit(cache=True, nogil=True)
def ldg_chunk(
    indptr: Any, block: Any, first_edge: int, begin: int, end: int, first_node: int, before: Any, part: Any,
    groups: Any, sizes: Any, moved: Any, counts: Any, touched: Any, state: Any, random: Any, chunks: int,
    capacities: Any, heat: float, ease: float,
) -> int:  # fmt: skip
    """One block of edges of a chunk, nodes ``begin`` to ``end``: moves every node whose last edge is in it.
    The first bad position in the block, or -1.

    ``part`` int32 [nodes], -1 = not yet; ``before`` int32 [nodes of the batch], what it was for them, from
    ``first_node`` on, when the batch began; ``groups`` int64 [groups + 1], the first node of each;
    ``sizes`` int64 [groups * parts], of that time; ``moved`` the same, zeros; ``counts`` int64 [parts],
    zeros; ``touched`` int32 [parts]; ``state`` int64 [STATE_SIZE]; ``random`` uint64 [1]; ``capacities``
    int64 [groups]. At ``ease`` times its capacity, at least 1, a part scores nothing. A node in a part that
    holds too many leaves it, if need be for any other.
    """
    nodes = part.size
    address = part.ctypes.data
    end_edge = first_edge + block.size
    node = state[_NODE]
    touched_count = state[_TOUCHED]
    parts = counts.size
    group, group_end, base, capacity, full = -1, np.int64(0), 0, np.int64(0), 0.0
    while node < end:
        while node >= group_end:
            group += 1
            group_end, base, capacity = groups[group + 1], group * parts, capacities[group]
            full = ease * capacity
        for edge in range(max(indptr[node], first_edge), min(indptr[node + 1], end_edge)):
            if edge + PREFETCH_EDGES < end_edge:
                prefetch(address + 4 * np.int64(block[edge - first_edge + PREFETCH_EDGES]))
            source = block[edge - first_edge]
            if source < 0 or source >= nodes:
                return edge - first_edge
            at = source - first_node
            if at >= 0 and at < before.size and (source < begin or source >= end):
                p = before[at]
            else:
                p = part[source]
            # A self-loop would hold a node where it is.
            if p < 0 or source == node:
                continue
            if counts[p] == 0:
                touched[touched_count] = p
                touched_count += 1
            counts[p] += 1
        if indptr[node + 1] > end_edge:
            break
        old = np.int64(part[node])
        if old >= 0:
            moved[base + old] -= 1
        new = np.int64(best_part(
            old, base, sizes, moved, counts, touched, touched_count, random, chunks, capacity, heat, full
        ))  # fmt: skip
        touched_count = 0
        if new < 0:
            fits = old >= 0 and sizes[base + old] + moved[base + old] < capacity
            new = old if fits else part_with_room(base, parts, sizes, moved, random, capacity, state)
        moved[base + new] += 1
        part[node] = new
        node += 1
    state[_NODE] = node
    state[_TOUCHED] = touched_count
    if node == end:  # the next chunk begins with the sizes of the batch, too
        group = 0
        for one in range(begin, end):
            while one >= groups[group + 1]:
                group += 1
            moved[group * parts + part[one]] = 0
            if before[one - first_node] >= 0:
                moved[group * parts + before[one - first_node]] = 0
    return -1


@njit(cache=True, nogil=True)
def ldg_chunks(
    plan: Any, helps: bool, waiting: Any, chunk_size: int, seed: Any, indptr: Any, block: Any,
    all_before: Any, part: Any, groups: Any, sizes: Any, moved: Any, counts: Any, touched: Any, state: Any,
    random: Any, capacities: Any, heat: float, ease: float,
) -> None:  # fmt: skip
    """Chunks as long as there are any to take (see :mod:`featstore.order.chunks`), each as :func:`ldg_chunk`
    goes through it, whose arguments these are."""
    while True:
        chunk = take_chunk(plan, block, helps, waiting)
        if chunk < 0:
            return
        begin, end, edges, low = chunk_of(plan, block, chunk)
        before = batch_before(plan, all_before)
        state[:] = 0
        state[_NODE] = begin
        random[0] = seed_of_chunk(seed, begin // chunk_size)
        bad = ldg_chunk(
            indptr, edges, low, begin, end, plan[FIRST_NODE], before, part, groups, sizes, moved, counts,
            touched, state, random, -(-before.size // chunk_size), capacities, heat, ease,
        )  # fmt: skip
        end_chunk(plan, chunk, low + bad if bad >= 0 else np.int64(-1))


@njit(cache=True, nogil=True)
def end_parts_batch(
    first_node: int, before: Any, part: Any, groups: Any, parts: Any, sizes: Any, none: Any, state: Any,
    random: Any, capacities: Any,
) -> None:  # fmt: skip
    """Count the moves of a batch in ``sizes``, in the order of the nodes; a part that is full by then takes
    no more. ``none`` int64 [groups * parts], zeros."""
    group = 0
    for at in range(before.size):
        old, new = np.int64(before[at]), np.int64(part[first_node + at])
        if new == old:
            continue
        while first_node + at >= groups[group + 1]:
            group += 1
        base, capacity = group * parts, capacities[group]
        if old >= 0:
            sizes[base + old] -= 1
        if sizes[base + new] >= capacity:
            fits = old >= 0 and sizes[base + old] < capacity
            new = old if fits else part_with_room(base, parts, sizes, none, random, capacity, state)
            part[first_node + at] = new
        sizes[base + new] += 1
        if new != old:
            state[_MOVED] += 1


def part_capacity(nodes: int, parts: int, slack: float) -> int:
    """The most nodes a part may hold: (1 + slack) * nodes / parts, but never less than an even split
    needs."""
    return max(-(-nodes // parts), int((1 + slack) * nodes / parts))


def heat_of_pass(number: int, passes: int, heat: float = HEAT) -> float:
    """The heat of pass ``number`` (from 0): falls linearly, and is nothing for the last of them."""
    if passes < PASSES_TO_ANNEAL:
        return 0.0
    return heat * max(0.0, 1.0 - (number + 1) / passes / COOL_SHARE)


def _groups_of(groups: Sequence[int] | None, nodes: int) -> NDArray[np.int64]:
    found = np.array([0, nodes] if groups is None else groups, np.int64)
    if found[0] != 0 or found[-1] != nodes or (np.diff(found) < 0).any():
        raise SourceError(f"groups must ascend from 0 to {nodes}, the number of nodes, not {found.tolist()}")
    return found


def _check_numbers(parts: int, passes: int, seed: int, slack: float, heat: float, ease: float) -> None:
    if not 1 <= parts < 2**31:
        raise SourceError(f"parts must be from 1 to 2**31 - 1, not {parts}")
    if passes < 1 or seed < 0 or not 0 <= slack < float("inf"):
        raise SourceError(
            f"need passes >= 1, seed >= 0, slack >= 0, not passes={passes}, seed={seed}, slack={slack}"
        )
    if not 0 <= heat < float("inf") or not 1 <= ease < float("inf"):
        raise SourceError(f"need heat >= 0 and ease >= 1, not heat={heat}, ease={ease}")


def ldg_partition(
    graph: GraphLike,
    parts: int,
    *,
    seed: int,
    passes: int = PASSES,
    slack: float = SLACK,
    block_edges: int = BLOCK_EDGES,
    start: NDArray[np.int32] | None = None,
    heat: float = HEAT,
    ease: float = 1.0,
    groups: Sequence[int] | None = None,
    threads: int = 1,
) -> NDArray[np.int32]:
    """Part of each node, int32 [nodes], from annealed restreamed LDG; the same for equal arguments
    whatever ``threads`` and ``block_edges`` are.

    No part holds more than ``max(ceil(nodes / parts), floor((1 + slack) * nodes / parts))`` nodes; with more
    parts than nodes some are empty. Reads the edges ``passes`` times from first to last, ``block_edges`` at
    once, and allocates at most :func:`ldg_memory_bytes`.

    ``start`` int32 [nodes] is a partition to go on from, changed in place and returned; parts in it that are
    over the capacity are brought below it. ``heat`` is the first pass's; a low one keeps what is good about a
    start. A part's score vanishes at ``ease`` times the capacity: above 1.0 sizes are pushed less towards the
    mean. ``groups``: where there are several, the first node of each and the number of all, from 0 on; then
    the bound holds of each group by itself, as for the types of a typed graph. ``threads`` that work at most.

    Raises SourceError for a bad graph (an edge to a node that does not exist ...) and for arguments out of
    range. After Stanton & Kliot (KDD'12) and Nishimura & Ugander (KDD'13); the annealing is ours, see the
    module.
    """
    indptr = checked_indptr(graph)
    nodes = node_count(graph)
    _check_numbers(parts, passes, seed, slack, heat, ease)
    bounds = _groups_of(groups, nodes)
    capacities = np.array([part_capacity(int(count), parts, slack) for count in np.diff(bounds)], np.int64)
    if start is None:
        part, sizes = np.full(nodes, -1, np.int32), np.zeros(parts * len(capacities), np.int64)
    else:
        part, sizes = start, part_sizes(start, bounds, parts)
    before = np.empty(batch_nodes(nodes), np.int32)
    own = [_Scratch(parts, len(capacities)) for _ in range(threads)]
    ending, ending_random = np.zeros(_STATE_SIZE, np.int64), np.zeros(1, np.uint64)

    def run_pass(chunks: Chunks, number: int, warmth: float) -> int:
        """Returns how many nodes moved."""
        seed_of_pass = random_of_pass(seed, number)[0]

        def work(thread: int, begin: int, end: int, block: NDArray[Any], first_edge: int) -> int:
            mine = own[thread]
            if first_edge == indptr[begin]:
                mine.begin(begin, seed_of_chunk(seed_of_pass, begin // chunks.size))
            return int(ldg_chunk(
                indptr, block, first_edge, begin, end, first_node, then, part, bounds, sizes, mine.moved,
                mine.counts, mine.touched, mine.state, mine.random, together, capacities, warmth, ease,
            ))  # fmt: skip

        def share(thread: int) -> None:
            mine = own[thread]
            ldg_chunks(
                chunks.plan, thread > 0, WAITING, chunks.size, seed_of_pass, indptr, chunks.block, before,
                part, bounds, sizes, mine.moved, mine.counts, mine.touched, mine.state, mine.random,
                capacities, warmth, ease,
            )  # fmt: skip

        ending[:], ending_random[0] = 0, ~seed_of_pass | np.uint64(1)
        with chunks.helping(share):
            for first_node, last_node in chunks.batches():
                then, together = before[: last_node - first_node], -(-(last_node - first_node) // chunks.size)
                np.copyto(then, part[first_node:last_node])
                bad = chunks.run(first_node, last_node, work, share)
                if bad >= 0:
                    raise bad_edge_error(graph, bad)
                end_parts_batch(
                    first_node, then, part, bounds, parts, sizes, own[0].moved, ending, ending_random,
                    capacities,
                )  # fmt: skip
        return int(ending[_MOVED])

    with Chunks(graph, indptr, block_edges, threads) as chunks:
        for number in range(passes):
            warmth = heat_of_pass(number, passes, heat)
            moved = run_pass(chunks, number, warmth)
            if warmth == 0.0 and moved == 0:
                # Nothing is left to chance, so later passes would only repeat this one; an idle warm pass
                # proves nothing.
                break
    return part


class _Scratch:
    """What a thread has of its own: 20 bytes a part, and 8 more for each further group."""

    def __init__(self, parts: int, groups: int) -> None:
        self.moved, self.counts = apart(1, groups * parts, np.int64)[0], apart(1, parts, np.int64)[0]
        self.touched = apart(1, parts, np.int32)[0]
        self.state, self.random = apart(1, _STATE_SIZE, np.int64)[0], apart(1, 1, np.uint64)[0]

    def begin(self, node: int, random: Any) -> None:
        """Start a chunk at its first node."""
        self.state[:] = 0
        self.state[_NODE] = node
        self.random[0] = random


def ldg_memory_bytes(
    nodes: int, parts: int, block_edges: int = BLOCK_EDGES, threads: int = 1, groups: int = 1
) -> int:
    """The most :func:`ldg_partition` allocates, in bytes, above the graph itself (machine code is not
    counted)."""
    scratch_bytes = (8 * groups + (8 * groups + 12) * threads) * parts + 4 * batch_nodes(nodes)
    return 4 * nodes + scratch_bytes + 8 * block_edges + _FIXED_BYTES
