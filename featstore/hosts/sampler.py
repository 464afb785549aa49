"""Sampling where topology is split, too: each host has the lists of its own nodes.

A hop's nodes are divided among their owners: of all others they are asked at the same time, in one message
each where that holds them, while this host picks among its own lists. Then the hop is complete, and the next
one begins. What is picked depends on the seed, the mini-batch and the node alone, so mini-batches are those
that
:class:`featstore.sampling.stored.StoredSampler` samples from the whole topology, edge by edge.

**Memory** is one budget for the scratch of mini-batches: neighbours under way and the hop that they become.
How many neighbours there are is known when they are there, so questions go out in waves of a quarter of the
memory at most. A mini-batch that needs more is a BudgetError. Lists, and what serves other hosts, are of the
store.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_fanouts, as_integer
from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.base.hashing import batch_key
from featstore.base.process import OneProcess
from featstore.engine.request import in_pieces
from featstore.errors import BudgetError, FormatError, SourceError
from featstore.hosts.lists import ListsAsk, Question, picked
from featstore.sampling.cache import NO_MAP
from featstore.sampling.hops import Hops, HopSampler
from featstore.sampling.neighbors import SampledSubgraph, checked_seeds
from featstore.sampling.picking import empty_picks, enter_hop, pick_edges, seed_table, table_size
from featstore.storage.relations import graph_of
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.engine.request import Request
    from featstore.hosts.split_store import WholeStore

_WAVES = 4  # of the memory, a wave of questions takes one part in so many
_NODE_BYTES = 64  # of a hop, for each node that asks
_EDGE_BYTES = 8  # scratch of this host's own answers
_NO_OFFSETS = np.zeros(1, np.int64)


@njit(cache=True, nogil=True)
def lay_out_hop(
    nodes: Any, first: Any, degrees: Any, begins: Any, fanout: Any, key: Any, picks: Any, starts: Any,
    col: Any, edge: Any,
) -> None:  # fmt: skip
    """The edges of a hop, node by node: their numbers into ``edge``, who asks into ``col``, from ``first``
    on, and into ``starts`` where each node's begin."""
    filled = 0
    for i in range(nodes.shape[0]):
        taken = pick_edges(key, nodes[i], begins[i], degrees[i], fanout, picks, i, edge[filled:])
        starts[i] = filled
        for place in range(filled, filled + taken):
            col[place] = first + i
        filled += taken


@njit(cache=True, nogil=True)
def place_lists(positions: Any, starts: Any, counts: Any, skip: Any, neighbours: Any, row: Any) -> None:
    """Put the ``neighbours`` of the nodes at ``positions`` of a hop where theirs begin; of the first ``skip``
    are there already."""
    filled = 0
    for i in range(positions.shape[0]):
        at = positions[i]
        for place in range(skip, counts[at]):
            if filled == neighbours.shape[0]:
                return
            row[starts[at] + place] = neighbours[filled]
            filled += 1
        skip = 0


class _Chunk(NamedTuple):
    """Nodes of one host, at ``positions`` (int32) of the hop, of the first of which ``skip`` neighbours are
    there."""

    host: int
    positions: NDArray[np.int32]
    skip: int


@dataclass
class _Hop:
    """What has come of a hop so far, of its ``nodes``."""

    nodes: NDArray[np.int64]
    fanout: int
    key: np.uint64
    degrees: NDArray[np.int64]
    begins: NDArray[np.int64]
    come: list[tuple[_Chunk, NDArray[Any]]] = field(default_factory=list)

    @property
    def come_bytes(self) -> int:
        return sum(neighbours.nbytes for _, neighbours in self.come)


@dataclass(frozen=True)
class HostsSamplerStats:
    """Counts of a sampler. ``edges_asked``: edges of the mini-batches. ``nodes_remote``: nodes whose
    neighbours were asked of other hosts. ``exchanges``: times that other hosts were waited for."""

    batches: int = 0
    edges_asked: int = 0
    nodes_remote: int = 0
    exchanges: int = 0


class HostsSampler(HopSampler, OneProcess):
    """Uniform neighbour sampler without replacement over a graph whose lists are on several hosts; made by
    :meth:`featstore.SplitStore.sampler`. A context manager; safe to use from several threads, which take
    turns. It belongs to the process that opened the store.

    ``memory``: of mini-batches under way, bytes or ``"256MiB"``; finished ones are the caller's. Raises
    BudgetError, SourceError for fan-outs that no message could hold, PeerError where a host is gone.
    """

    called = "the sampler of a split store"

    def __init__(
        self, store: WholeStore, fanouts: Sequence[int], *, memory: int | str, seed: int = 0,
        graph: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.store, self.fanouts, self.seed = store, as_fanouts(fanouts), as_integer(seed, "seed")
        self.graph = graph_of(store, graph)
        self._memory_bytes = parse_bytes(memory, "memory")
        self._own, self._exchange = store.lists()
        self._number = sorted(store.graphs).index(self.graph.name)
        self._owners = store.owners[self.graph.table.name]
        self._nodes_max, self._edges_max = store.lists_limits()
        largest = max(self.fanouts)
        if largest > self._edges_max:
            raise SourceError(
                f"a fan-out of {largest:,} is more than the {self._edges_max:,} neighbours that a message "
                "between hosts holds: give -1 for all, or the store more memory (open_split(memory=))"
            )
        self._lock = threading.Lock()
        self._counts = HostsSamplerStats()
        self._item = node_dtype(self.node_count)
        none, no_ids = np.empty(0, np.int32), np.empty(0, np.int64)
        lay_out_hop(no_ids, 0, no_ids, no_ids, 1, np.uint64(0), empty_picks(1, 1), no_ids, no_ids, no_ids)
        place_lists(none, no_ids, no_ids, 0, np.empty(0, self._item), no_ids)

    @property
    def node_count(self) -> int:
        """Number of nodes of the whole graph."""
        return self.graph.table.rows

    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> SampledSubgraph:
        """The mini-batch around ``seeds`` (node ids, any integer dtype [b], no duplicates), whoever owns
        them: that of :meth:`featstore.sampling.stored.StoredSampler.sample` over the store that was split,
        ``edge_id`` included.

        Raises IdError, BudgetError, PeerError, CorruptionError, DeviceError, FormatError, ClosedError.
        """
        self.check_open()
        self.store.check_open()
        nodes = checked_seeds(seeds, self.node_count)
        key = batch_key(self.seed, as_integer(epoch, "epoch"), as_integer(batch_index, "batch_index"))
        with self._lock:
            self.check_room(len(nodes))
            hops = Hops(nodes, seed_table(nodes, nodes, self._item))
            self._go(hops, _NO_OFFSETS, 0, key)
            counts = self._counts
            self._counts = HostsSamplerStats(
                counts.batches + 1,
                counts.edges_asked + hops.edge_count,
                counts.nodes_remote,
                counts.exchanges,
            )
            hops.slots, count = NO_MAP, sum(hops.counts)
            return SampledSubgraph(node=hops.nodes[:count].copy(), **hops.joined())

    def check_room(self, seeds: int) -> None:
        """Raises BudgetError where the memory cannot hold even the beginning of a mini-batch of so many
        seeds."""
        self._reserve(self._item.itemsize * table_size(seeds) + 16 * seeds, "begin the sampling")
        self._reserve(_NODE_BYTES * seeds, "ask for the neighbours of a hop")

    # A hop.

    def _count(
        self, hops: Hops, offsets: NDArray[np.int64], edge_total: int, begin: int, end: int, fanout: int,
        key: np.uint64,
    ) -> tuple[int, int]:  # fmt: skip
        """Have the neighbours of a hop, from all hosts."""
        nodes = hops.nodes[begin:end]
        count = end - begin
        self._hop = hop = _Hop(nodes, fanout, key, np.zeros(count, np.int64), np.zeros(count, np.int64))
        todo = self._chunks(hop)
        while todo:
            wave, todo = self._wave(todo, hop)
            todo = self._ask(wave, hop) + todo
        return int(picked(hop.degrees, fanout).sum()), int(hop.degrees.max(initial=0))

    def _chunks(self, hop: _Hop) -> list[_Chunk]:
        """A hop's nodes by host, as many together as one answer has room for."""
        self._reserve(_NODE_BYTES * len(hop.nodes), "ask for the neighbours of a hop")
        most = min(self._nodes_max, self._edges_max // max(1, hop.fanout))
        return [
            _Chunk(host, positions[low : low + most], 0)
            for host, positions in enumerate(self._owners.split(hop.nodes))
            for low in range(0, len(positions), most)
        ]

    def _wave(self, todo: list[_Chunk], hop: _Hop) -> tuple[list[_Chunk], list[_Chunk]]:
        """What is asked now, and what later."""
        ends = np.cumsum([self._question(chunk, hop).answer_bytes for chunk in todo])
        ends += _EDGE_BYTES * np.cumsum([self._edges(chunk, hop) + len(chunk.positions) for chunk in todo])
        count = max(1, int(np.searchsorted(ends, self._memory_bytes // _WAVES, side="right")))
        self._reserve(
            _NODE_BYTES * len(hop.nodes) + hop.come_bytes + int(ends[count - 1]),
            "have neighbours of other hosts",
        )
        return todo[:count], todo[count:]

    def _edges(self, chunk: _Chunk, hop: _Hop) -> int:
        """Neighbours of an answer, at most."""
        return self._edges_max if hop.fanout < 0 else hop.fanout * len(chunk.positions)

    def _question(self, chunk: _Chunk, hop: _Hop) -> Question:
        edges = self._edges(chunk, hop)
        nodes = hop.nodes[chunk.positions]
        return Question(self._number, hop.fanout, hop.key, chunk.skip, nodes, edges, self._item.itemsize)

    def _ask(self, wave: list[_Chunk], hop: _Hop) -> list[_Chunk]:
        """Ask, others first, and wait for all. Returns what is to be asked for again, beyond what has
        come."""
        own, asked = self._owners.host, list[tuple[_Chunk, ListsAsk]]()

        def ask(request: Request) -> None:
            for chunk in sorted(wave, key=lambda chunk: chunk.host == own):
                question = self._question(chunk, hop)
                one = ListsAsk(request, question, self._item)
                asked.append((chunk, one))
                if chunk.host == own:
                    self._own.answer(one, question)
                else:
                    assert self._exchange is not None
                    self._exchange.ask(chunk.host, one)

        request = in_pieces(None, ask)
        try:
            request.result()
        except BaseException:
            request.cancel()
            raise
        remote = sum(len(chunk.positions) for chunk in wave if chunk.host != own)
        counts = self._counts
        self._counts = HostsSamplerStats(
            counts.batches, counts.edges_asked, counts.nodes_remote + remote, counts.exchanges + (remote > 0)
        )
        return [rest for chunk, one in asked if (rest := self._take(chunk, one, hop)) is not None]

    def _take(self, chunk: _Chunk, ask: ListsAsk, hop: _Hop) -> _Chunk | None:
        """Keep an answer; what it lacks."""
        assert ask.answer is not None
        degrees, begins, neighbours = ask.answer
        hop.degrees[chunk.positions], hop.begins[chunk.positions] = degrees, begins
        hop.come.append((chunk, neighbours))
        ends, come = np.cumsum(picked(degrees, hop.fanout)), chunk.skip + len(neighbours)
        if come == int(ends[-1]):
            return None
        first = int(np.searchsorted(ends, come, side="right"))
        skip = come - (int(ends[first - 1]) if first else 0)
        return _Chunk(chunk.host, chunk.positions[first:], skip)

    def _fill(
        self, hops: Hops, begin: int, end: int, fanout: int, key: np.uint64, picks: NDArray[np.int64],
        row: NDArray[np.int64], col: NDArray[np.int64], edge: NDArray[np.int64],
    ) -> int:  # fmt: skip
        hop = self._hop
        starts, counts = np.empty(end - begin, np.int64), picked(hop.degrees, fanout)
        lay_out_hop(hop.nodes, begin, hop.degrees, hop.begins, fanout, key, picks, starts, col, edge)
        for chunk, neighbours in hop.come:
            place_lists(chunk.positions, starts, counts, chunk.skip, neighbours, row)
        del self._hop, hop
        found = int(enter_hop(hops.slots, hops.nodes, end, row, self.node_count))
        if found < 0:
            place = -found - 1
            raise FormatError(
                f"edge {edge[place]:,} of graph {self.graph.name!r} comes from node {row[place]} of "
                f"{self.node_count:,}: run `featstore verify` on the part of who owns node "
                f"{hops.nodes[col[place]]}"
            )
        return found

    def _bad_offsets(self, node: int) -> FormatError:  # the owners look at them
        return FormatError(f"the list of node {node} cannot be")

    def _reserve_hop(self, hops: Hops, hop: int, nodes_max: int, edges: int, picks: int) -> None:
        room_bytes = 8 * (nodes_max + sum(hops.counts)) + table_size(nodes_max) * hops.slots.itemsize * 3 // 2
        come_bytes = (
            _NODE_BYTES * len(self._hop.nodes) + self._hop.come_bytes + 16 * table_size(max(1, picks))
        )
        joining_bytes = 8 * (edges + hops.edge_count)
        self._reserve(room_bytes + max(come_bytes, joining_bytes), f"sample hop {hop + 1}")

    def _reserve(self, scratch_bytes: int, what: str) -> None:
        if scratch_bytes > self._memory_bytes:
            raise BudgetError(
                scratch_bytes, self._memory_bytes, f"{what} of this mini-batch (or pass fewer seeds)"
            )

    # Explaining, ending.

    def stats(self) -> HostsSamplerStats:
        """What has been counted so far."""
        return self._counts

    def close(self) -> None:
        """Nothing is sampled any more. May be called more than once."""
        self._closed = True

    def __enter__(self) -> HostsSampler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<HostsSampler of {self.graph!r}, fanouts {list(self.fanouts)}>"
