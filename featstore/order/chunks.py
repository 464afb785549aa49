"""Passes over a graph by several threads, with one result whatever their number.

A partitioner's pass looks at each node in turn: it counts the labels of its neighbours and moves it. For
several threads nodes are cut into *chunks* of one size, and :data:`CHUNKS` successive chunks are a *batch*.
Within a chunk each node sees what those before it did. Of the other chunks of the batch it sees how they were
when the batch began; of the rest of the graph, how it is. So the chunks of a batch may run at the same time,
in any order. What they did together is then checked in the order of the nodes by the kernel that ends the
batch: where two chunks filled one part beyond its capacity, the later node goes back. A thread that is free
takes the chunk with the most edges that is left, within its kernel: where it came back to Python for each,
threads waited for the interpreter a fifth of their time.

Chunks follow from the number of nodes alone, so equal arguments give equal results on any machine. Graphs of
fewer than :data:`ALONE_NODES` nodes are one chunk, and go through as one thread would take them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import address_of, atomic_add, memcpy
from featstore.errors import SourceError
from featstore.order.crew import Crew
from featstore.order.stream import GraphLike, edge_count, node_count

CHUNKS = 16
CHUNK_NODES_MAX = 8192
ALONE_NODES = 1 << 16  # fewer take less than a second, and have parts of which a batch is too much
CHUNKS_MIN = 8
BATCHES_MIN = 16  # a pass: else too much of what a node sees is of before its batch

#: Runs the nodes from ``begin`` to ``end`` whose last edge is in the block; first bad position in it, or -1.
#: (number of the thread, begin, end, block, its first edge)
Work = Callable[[int, int, int, NDArray[Any], int], int]

#: Runs chunks until none is left to take; first bad edge of the graph, or -1. (number of the thread, chunks)
TakeAll = Callable[[int, "Taking"], int]


def chunk_nodes(nodes: int) -> int:
    """How many nodes a chunk has."""
    if nodes < ALONE_NODES:
        return max(1, nodes)
    return min(CHUNK_NODES_MAX, nodes // (CHUNKS_MIN * BATCHES_MIN))  # up, a batch would have a chunk less


def batch_chunks(nodes: int) -> int:
    """How many chunks a batch has."""
    return max(1, min(CHUNKS, nodes // (BATCHES_MIN * chunk_nodes(nodes))))


def batch_nodes(nodes: int) -> int:
    """How many nodes a batch has."""
    return min(nodes, batch_chunks(nodes) * chunk_nodes(nodes))


@dataclass(frozen=True, eq=False)
class Taking:
    """Chunks of a batch that threads take.

    ``plan`` int64 [3, chunks + 1]: first node of each, and the end of the last; first edge of each, and the
    end; the chunks, those with the most edges first, and how many have been taken. ``block``: room for their
    edges; ``source``: the address from where these come, or 0 where they are there.
    """

    plan: NDArray[np.int64]
    block: NDArray[Any]
    source: int


@njit(cache=True, nogil=True)
def take_chunk(plan: Any, source: int, block: Any) -> Any:
    """The next chunk that nobody has taken, its edges in ``block``, or -1: see :class:`Taking`."""
    chunks = plan.shape[1] - 1
    place = atomic_add(plan.ctypes.data + 8 * (plan.size - 1), 1)
    if place >= chunks:
        return np.int64(-1)
    chunk = plan[2, place]
    if source != 0:
        low = (plan[1, chunk] - plan[1, 0]) * block.itemsize
        high = (plan[1, chunk + 1] - plan[1, 0]) * block.itemsize
        memcpy(block.ctypes.data + low, source + low, high - low)
    return chunk


class Chunks:
    """Goes over a graph's nodes batch by batch, by ``threads`` threads; a context manager. Holds one block of
    at most ``block_edges`` edges. Raises SourceError for a block size below one."""

    def __init__(self, graph: GraphLike, indptr: NDArray[np.int64], block_edges: int, threads: int) -> None:
        if block_edges < 1:
            raise SourceError(f"block_edges must be at least 1, not {block_edges}")
        self._graph, self._indptr = graph, indptr
        self._nodes = node_count(graph)
        self.size = chunk_nodes(self._nodes)
        self._block = np.empty(min(block_edges, edge_count(graph)), graph.indices.dtype)
        self._threads = max(1, min(threads, -(-self._nodes // self.size), CHUNKS))
        self._crew = Crew(self._threads, "featstore-order")

    def __enter__(self) -> Chunks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._crew.__exit__(kind, error, trace)

    def batches(self) -> Iterator[tuple[int, int]]:
        """(first node, node after the last) of each batch; at least one, if need be of no nodes."""
        step = max(1, batch_nodes(self._nodes))
        for begin in range(0, max(self._nodes, 1), step):
            yield begin, min(begin + step, self._nodes)

    def run(self, begin: int, end: int, work: Work, share: TakeAll) -> int:
        """Have all chunks of a batch worked on. The first bad edge of the graph, or -1."""
        starts = [*range(begin, end, self.size), end]
        edges = [int(self._indptr[node]) for node in starts]
        at = 0
        while at < len(starts) - 1:
            last = at + 1
            while last < len(starts) - 1 and edges[last + 1] - edges[at] <= self._block.size:
                last += 1
            if edges[last] - edges[at] > self._block.size:
                bad = self._streamed(starts[at], starts[last], work)
            else:
                bad = self._at_once(starts[at : last + 1], edges[at : last + 1], share)
            if bad >= 0:
                return bad
            at = last
        return -1

    def _streamed(self, begin: int, end: int, work: Work) -> int:
        """One chunk that has more edges than a block, block by block."""
        first, after = int(self._indptr[begin]), int(self._indptr[end])
        for low in range(first, after, self._block.size):
            block = self._block[: min(self._block.size, after - low)]
            np.copyto(block, self._graph.indices[low : low + block.size])
            bad = work(0, begin, end, block, low)
            if bad >= 0:
                return low + bad
        return -1

    def _at_once(self, starts: list[int], edges: list[int], share: TakeAll) -> int:
        """Chunks whose edges fit into the block together."""
        count, indices = len(starts) - 1, self._graph.indices[edges[0] : edges[-1]]
        block = self._block[: indices.size]
        source = address_of(indices) if isinstance(indices, np.ndarray) and indices.flags.c_contiguous else 0
        if source == 0:
            np.copyto(block, indices)
        largest = sorted(range(count), key=lambda one: edges[one] - edges[one + 1])
        some = Taking(np.array([starts, edges, [*largest, 0]], np.int64), block, source)
        found: list[int] = []

        def take(thread: int) -> None:
            bad = share(thread, some)
            if bad >= 0:
                found.append(bad)

        self._crew.run(take, min(self._threads, count))
        return min(found, default=-1)
