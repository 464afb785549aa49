"""Passes over a graph by several threads, with one result whatever their number.

A partitioner's pass looks at each node in turn: it counts the labels of its neighbours and moves it. For
several threads nodes are cut into *chunks* of one size, and :data:`CHUNKS` successive chunks are a *batch*.
Within a chunk each node sees what those before it did. Of the other chunks of the batch it sees how they were
when the batch began; of the rest of the graph, how it is. So the chunks of a batch may run at the same time,
in any order. What they did together is then checked in the order of the nodes by the kernel that ends the
batch: where two chunks filled one part beyond its capacity, the later node goes back. A thread that is free
takes the chunk with the most edges that is left.

For a whole pass threads stay in a kernel. One opens a batch and works with the others, which wait for the
next, awake at first: a pass has sixteen batches of some milliseconds each, and to come back to Python, or to
be woken up, for each takes a twentieth of that.

Chunks follow from the number of nodes alone, so equal arguments give equal results on any machine. Graphs of
fewer than :data:`ALONE_NODES` nodes are one chunk, and go through as one thread would take them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import (
    address_of,
    atomic_add,
    call_i32_i64,
    call_i64,
    fence,
    function_address,
    libc,
    load_shared,
    memcpy,
    store_i64,
)
from featstore.errors import SourceError
from featstore.order.crew import Crew, apart
from featstore.order.stream import GraphLike, edge_count, node_count

CHUNKS = 16
CHUNK_NODES_MAX = 8192
ALONE_NODES = 1 << 16  # fewer take less than a second, and have parts of which a batch is too much
CHUNKS_MIN = 8
BATCHES_MIN = 16  # a pass: else too much of what a node sees is of before its batch

# Places of a plan, int64 [PLAN_SIZE]: what several threads write stands on lines of its own.
_LEFT, _DONE, _ENDED = 0, 16, 32  # chunks that nobody has taken; that are done; whether the pass has ended
FIRST_NODE, _NODES = 48, 49  # of the batch
_CHUNKS = 50  # how many are open
_SOURCE = 51  # the address where their edges come from, or 0 where they are in the block
_STARTS = 64  # first node of each open chunk, and the end
_EDGES = _STARTS + CHUNKS + 1  # first edge of each, and the end
_TURNS = _EDGES + CHUNKS + 1  # the chunks, those with the fewest edges first, as they are taken from the end
_BAD = _TURNS + CHUNKS  # of each, the first bad edge of the graph, or -1
PLAN_SIZE = _BAD + CHUNKS

_SPINS, _YIELDS = 1 << 14, 1 << 12  # some 20 µs, and then a millisecond
_NAP_MICROSECONDS = 50

#: How kernels wait: the addresses of sched_yield and usleep.
WAITING = np.array([function_address(libc(), name) for name in ("sched_yield", "usleep")], np.int64)

#: Runs the nodes from ``begin`` to ``end`` whose last edge is in the block; first bad position in it, or -1.
#: (number of the thread, begin, end, block, its first edge)
Work = Callable[[int, int, int, NDArray[Any], int], int]

#: Works on open chunks: thread 0 comes back when all are done, others when the pass has ended.
#: (number of the thread)
TakeAll = Callable[[int], None]


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


@njit(nogil=True)
def _wait_a_little(waiting: Any, turn: Any) -> None:
    """For the ``turn``-th time: awake, then for others to run, then asleep."""
    if turn >= _SPINS + _YIELDS:
        call_i32_i64(waiting[1], np.int64(_NAP_MICROSECONDS))
    elif turn >= _SPINS:
        call_i64(waiting[0])


@njit(cache=True, nogil=True)
def _open_chunks(plan: Any) -> None:
    """Let threads have the chunks of a plan."""
    address = plan.ctypes.data
    store_i64(address + 8 * _DONE, np.int64(0))
    fence()
    store_i64(address + 8 * _LEFT, plan[_CHUNKS])


@njit(nogil=True)
def take_chunk(plan: Any, block: Any, helps: Any, waiting: Any) -> Any:
    """The number of a chunk that nobody has taken, its edges in ``block``, or -1: where all are done, or, for
    one who helps, where the pass has ended."""
    address = plan.ctypes.data
    turn = 0
    while True:
        if load_shared(address + 8 * _LEFT) > 0:
            left = atomic_add(address + 8 * _LEFT, np.int64(-1))
            if left > 0:
                break
        if helps:
            if load_shared(address + 8 * _ENDED) != 0:
                return np.int64(-1)
        elif load_shared(address + 8 * _DONE) == plan[_CHUNKS]:
            return np.int64(-1)
        _wait_a_little(waiting, turn)
        turn += 1
    chunk = plan[_TURNS + left - 1]
    source = plan[_SOURCE]
    if source != 0:
        low = (plan[_EDGES + chunk] - plan[_EDGES]) * block.itemsize
        high = (plan[_EDGES + chunk + 1] - plan[_EDGES]) * block.itemsize
        memcpy(block.ctypes.data + low, source + low, high - low)
    return chunk


@njit(nogil=True)
def chunk_of(plan: Any, block: Any, chunk: Any) -> Any:
    """(first node, the node after the last, edges in the block, the number of the first in the graph)."""
    low = plan[_EDGES + chunk]
    edges = block[low - plan[_EDGES] : plan[_EDGES + chunk + 1] - plan[_EDGES]]
    return plan[_STARTS + chunk], plan[_STARTS + chunk + 1], edges, low


@njit(nogil=True)
def end_chunk(plan: Any, chunk: Any, bad: Any) -> None:
    """A chunk that was taken is done; its first bad edge of the graph, or -1."""
    plan[_BAD + chunk] = bad
    atomic_add(plan.ctypes.data + 8 * _DONE, np.int64(1))


@njit(nogil=True)
def batch_before(plan: Any, before: Any) -> Any:
    """What ``before`` has of the nodes of the batch."""
    return before[: plan[_NODES]]


class Chunks:
    """Goes over a graph's nodes batch by batch, by ``threads`` threads; a context manager. Holds one block of
    at most ``block_edges`` edges. Raises SourceError for a block size below one."""

    def __init__(self, graph: GraphLike, indptr: NDArray[np.int64], block_edges: int, threads: int) -> None:
        if block_edges < 1:
            raise SourceError(f"block_edges must be at least 1, not {block_edges}")
        self._graph, self._indptr = graph, indptr
        self._nodes = node_count(graph)
        self.size = chunk_nodes(self._nodes)
        self.block = np.empty(min(block_edges, edge_count(graph)), graph.indices.dtype)
        self.plan = apart(1, PLAN_SIZE, np.int64)[0]
        self._threads = max(1, min(threads, -(-self._nodes // self.size), CHUNKS))
        self._crew = Crew(self._threads, "featstore-order")

    def __enter__(self) -> Chunks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.plan[_ENDED] = 1  # an interrupt may have come between
        self._crew.__exit__(kind, error, trace)

    def batches(self) -> Iterator[tuple[int, int]]:
        """(first node, node after the last) of each batch; at least one, if need be of no nodes."""
        step = max(1, batch_nodes(self._nodes))
        for begin in range(0, max(self._nodes, 1), step):
            yield begin, min(begin + step, self._nodes)

    @contextmanager
    def helping(self, share: TakeAll) -> Iterator[None]:
        """A pass, in which all threads take part."""
        self.plan[[_LEFT, _ENDED]] = 0
        try:
            self._crew.begin(share)
            yield
        finally:
            self.plan[_ENDED] = 1
            self._crew.wait()

    def run(self, begin: int, end: int, work: Work, share: TakeAll) -> int:
        """Have all chunks of a batch worked on. The first bad edge of the graph, or -1."""
        starts = [*range(begin, end, self.size), end]
        edges = [int(self._indptr[node]) for node in starts]
        self.plan[FIRST_NODE], self.plan[_NODES] = begin, end - begin
        at = 0
        while at < len(starts) - 1:
            last = at + 1
            while last < len(starts) - 1 and edges[last + 1] - edges[at] <= self.block.size:
                last += 1
            if edges[last] - edges[at] > self.block.size:
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
        for low in range(first, after, self.block.size):
            block = self.block[: min(self.block.size, after - low)]
            np.copyto(block, self._graph.indices[low : low + block.size])
            bad = work(0, begin, end, block, low)
            if bad >= 0:
                return low + bad
        return -1

    def _at_once(self, starts: list[int], edges: list[int], share: TakeAll) -> int:
        """Chunks whose edges fit into the block together."""
        count, indices = len(starts) - 1, self._graph.indices[edges[0] : edges[-1]]
        in_memory = isinstance(indices, np.ndarray) and indices.flags.c_contiguous
        if not in_memory:
            np.copyto(self.block[: indices.size], indices)
        plan = self.plan
        plan[_CHUNKS], plan[_SOURCE] = count, address_of(indices) if in_memory else 0
        plan[_STARTS : _STARTS + count + 1] = starts
        plan[_EDGES : _EDGES + count + 1] = edges
        plan[_TURNS : _TURNS + count] = sorted(range(count), key=lambda one: edges[one + 1] - edges[one])
        _open_chunks(plan)
        share(0)
        bad = plan[_BAD : _BAD + count]
        return min(bad[bad >= 0].tolist(), default=-1)
