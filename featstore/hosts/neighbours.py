"""The neighbours of a hop's nodes, of graphs of which each host has the lists of its own nodes.

The nodes are divided among their owners: all others are asked at the same time, about the nodes of a graph in
one message where that holds them, while this host samples from its own lists. What is sampled depends on the
seed, the mini-batch and the node alone.

How many neighbours there are is known when they are there, so questions go out in waves of a quarter of the
memory at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import check_range
from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.engine.request import in_pieces
from featstore.errors import BudgetError, FormatError, SourceError
from featstore.hosts.exchange import IDS_MAX, Exchange
from featstore.hosts.line import received_bytes
from featstore.hosts.owners import Owners
from featstore.hosts.questions import (
    ANSWER_NODE_BYTES,
    HEAD_BYTES,
    Draw,
    ListsAnswer,
    ListsAsk,
    OfNodes,
    Question,
)
from featstore.sampling.picking import empty_picks, pick_edges

if TYPE_CHECKING:
    from featstore.engine.request import Request
    from featstore.hosts.split_store import WholeStore
    from featstore.storage.store import StoredGraph

ASKING_BYTES = 96  # of a hop, for each node that asks
_WAVES = 4  # of the memory, a wave of questions takes one part in so many
_READ_BYTES = 24  # of this host's own answers, for each edge and table that it is read from
_NONE = np.empty(0, np.int64)


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
def place_lists(
    positions: Any, starts: Any, counts: Any, skip: Any, values: Any, begins: Any, out: Any
) -> None:
    """Put the ``values`` of edges of the nodes at ``positions`` of a hop where theirs begin; of the first
    ``skip`` are there already. To each is added what ``begins`` has of the node, where it has any."""
    filled = 0
    for i in range(positions.shape[0]):
        at = positions[i]
        begin = begins[at] if begins.shape[0] > 0 else np.int64(0)
        for place in range(skip, counts[at]):
            if filled == values.shape[0]:
                return
            out[starts[at] + place] = begin + np.int64(values[filled])
            filled += 1
        skip = 0


class _Chunk(NamedTuple):
    """Nodes of one host, at ``positions`` (int32) of the hop, of the first of which ``skip`` neighbours are
    there."""

    host: int
    positions: NDArray[np.int32]
    skip: int


class _Lists(NamedTuple):
    """What is known of a graph: its ``number`` in messages, who has which list, neighbours' dtype, and how
    they are drawn."""

    graph: StoredGraph
    number: int
    owners: Owners
    item: np.dtype[Any]
    draw: Draw


@dataclass
class AskedHop:
    """What has come of a hop so far, ``of`` its nodes; ``lengths`` are those of lists where neighbours are
    picked, else how many are drawn."""

    lists: _Lists
    of: OfNodes
    fanout: int
    key: np.uint64
    lengths: NDArray[np.int64]
    begins: NDArray[np.int64]
    come: list[tuple[_Chunk, ListsAnswer]] = field(default_factory=list)

    @property
    def nodes(self) -> NDArray[np.int64]:
        """int64 [n]: who asks."""
        return self.of.nodes

    @property
    def held_bytes(self) -> int:
        """Memory of it, while more comes."""
        return ASKING_BYTES * len(self.nodes) + sum(answer.held_bytes for _, answer in self.come)

    @property
    def counts(self) -> NDArray[np.int64]:
        """int64 [n]: how many neighbours each has."""
        return self.lists.draw.counts(self.lengths, self.fanout)

    @property
    def edges(self) -> int:
        """How many neighbours there are."""
        return int(self.counts.sum())

    @property
    def picks(self) -> int:
        """How many a node picks at most, whose places follow from the lengths of lists."""
        return max(1, min(self.fanout, int(self.lengths.max(initial=0)))) if self.lists.draw.picks else 1

    def lay_out(
        self, first: int, row: NDArray[np.int64], col: NDArray[np.int64], edge: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """The neighbours into ``row``, who asks into ``col``, from ``first`` on, and the positions of the
        edges in the store that was split into ``edge``. Returns the user's numbers of them, int64, where they
        are wanted. Raises FormatError for positions and numbers that no edge has."""
        counts, numbers = self.counts, np.empty(len(row) if self.lists.draw & Draw.NUMBERS else 0, np.int64)
        starts = np.cumsum(counts) - counts
        if self.lists.draw.picks:
            lay_out_hop(
                self.nodes, first, self.lengths, self.begins, self.fanout, self.key,
                empty_picks(self.fanout, int(self.lengths.max(initial=0))), starts, col, edge,
            )  # fmt: skip
        else:
            col[:] = np.repeat(np.arange(first, first + len(self.nodes)), counts)
        for chunk, answer in self.come:
            each = chunk.positions, starts, counts, chunk.skip
            place_lists(*each, answer.neighbours, _NONE, row)
            if len(answer.places):
                place_lists(*each, answer.places, self.begins, edge)
            if len(answer.numbers):
                place_lists(*each, answer.numbers, _NONE, numbers)
        where = self.lists.graph.where()
        check_range(edge, self.lists.graph.edges, f"the position of an edge of {where}")
        if not self.lists.draw & Draw.NUMBERS:
            return None
        check_range(numbers, self.lists.graph.edges, f"an edge id of {where}")
        return numbers

    def no_node(self, row: Any, target: Any, edge: Any) -> FormatError:
        """For a neighbour of ``target`` that is no node."""
        graph = self.lists.graph
        total = graph.source_table.rows
        return FormatError(
            f"edge {edge:,} of graph {graph.name!r} comes from node {row} of {total:,}: run `featstore "
            f"verify` on the part of who owns node {target}"
        )


_Asked = tuple[AskedHop, _Chunk]


class Neighbours:
    """Asks for those of nodes of ``graphs``' tables, within ``memory_bytes``, as each is drawn. ``fanouts``:
    all that there are. ``nodes_remote``: nodes that others were asked about; ``exchanges``: times that these
    were waited for. Raises SourceError for fan-outs that no message could hold, BudgetError where this host
    has no memory for whole lists that draws look at."""

    def __init__(
        self, store: WholeStore, graphs: Iterable[tuple[StoredGraph, Draw]], fanouts: Iterable[int],
        memory_bytes: int,
    ) -> None:  # fmt: skip
        self._memory_bytes = memory_bytes
        self._own, self._exchange = store.lists()
        names = sorted(store.graphs)
        self._lists = {
            one.name: _Lists(
                one, names.index(one.name), store.owners[one.table.name],
                node_dtype(one.source_table.rows), draw,
            )
            for one, draw in graphs
        }  # fmt: skip
        for name, one in self._lists.items():
            self._own.graphs[name].check_memory(one.draw)  # others say so when they are asked
        draws = [(one.draw, one.item) for one in self._lists.values()]
        node_bytes = max(Question.node_bytes(draw) for draw, _ in draws)
        edge_bytes = max(ListsAnswer.bytes_of_edge(draw, item.itemsize) for draw, item in draws)
        self._nodes_max, self._edges_max = _limits(self._exchange, node_bytes, edge_bytes)
        largest = max(fanouts)
        if largest > self._edges_max:
            raise SourceError(
                f"a fan-out of {largest:,} is more than the {self._edges_max:,} neighbours that a message "
                "between hosts holds: give -1 for all, or the store more memory (open_split(memory=))"
            )
        self.nodes_remote = self.exchanges = 0
        none, no_ids = np.empty(0, np.int32), np.empty(0, np.int64)
        lay_out_hop(no_ids, 0, no_ids, no_ids, 1, np.uint64(0), empty_picks(1, 1), no_ids, no_ids, no_ids)
        for values in (no_ids, np.empty(0, np.int32), np.empty(0, np.uint32)):
            place_lists(none, no_ids, no_ids, 0, values, no_ids, no_ids)

    def draw(self, graph: str) -> Draw:
        """How those of a graph are drawn."""
        return self._lists[graph].draw

    def hop(self, graph: str, of: OfNodes, fanout: int, key: np.uint64) -> AskedHop:
        """A hop of which nothing has come."""
        lengths, begins = np.zeros(len(of.nodes), np.int64), np.zeros(len(of.nodes), np.int64)
        return AskedHop(self._lists[graph], of, fanout, key, lengths, begins)

    def have(self, hops: Sequence[AskedHop], beside_bytes: int = 0) -> None:
        """Have the neighbours of these, from all hosts; ``beside_bytes``: what else the memory holds."""
        todo = self._chunks(hops, beside_bytes)
        while todo:
            held = beside_bytes + sum(hop.held_bytes for hop in hops)
            wave, todo = self._wave(todo, held)
            todo = self._ask(wave) + todo

    def _chunks(self, hops: Sequence[AskedHop], beside_bytes: int) -> list[_Asked]:
        """The nodes of hops by host, as many together as one answer has room for."""
        held = beside_bytes + sum(hop.held_bytes for hop in hops)
        self.reserve(held, "ask for the neighbours of a hop")
        found = []
        for hop in hops:
            most = min(self._nodes_max, self._edges_max // max(1, hop.fanout))
            found += [
                (hop, _Chunk(host, positions[low : low + most], 0))
                for host, positions in enumerate(hop.lists.owners.split(hop.nodes))
                for low in range(0, len(positions), most)
            ]
        return found

    def _wave(self, todo: list[_Asked], held_bytes: int) -> tuple[list[_Asked], list[_Asked]]:
        """What is asked now, and what later."""
        needed = count = 0
        for asked in todo:
            more = self._needed_bytes(asked)
            if count and needed + more > self._memory_bytes // _WAVES:
                break
            needed, count = needed + more, count + 1
        self.reserve(held_bytes + needed, "have neighbours of other hosts")
        return todo[:count], todo[count:]

    def _needed_bytes(self, asked: _Asked) -> int:
        """Of an answer; of this host's own also of making it, and what of it is read."""
        (hop, chunk), edges = asked, self._edges(asked)
        lists, nodes = hop.lists, len(chunk.positions)
        answer = (
            ANSWER_NODE_BYTES * nodes + ListsAnswer.bytes_of_edge(lists.draw, lists.item.itemsize) * edges
        )
        if chunk.host != lists.owners.host:
            return answer
        read = 1 + bool(lists.draw & Draw.NUMBERS)
        return 2 * answer + 8 * (nodes + edges) + _READ_BYTES * read * edges

    def _edges(self, asked: _Asked) -> int:
        """Neighbours of an answer, at most."""
        hop, chunk = asked
        return self._edges_max if hop.fanout < 0 else hop.fanout * len(chunk.positions)

    def _question(self, asked: _Asked) -> Question:
        hop, chunk = asked
        lists, edges = hop.lists, self._edges(asked)
        of, item_bytes = hop.of.at(chunk.positions), lists.item.itemsize
        return Question(lists.number, hop.fanout, hop.key, chunk.skip, edges, lists.draw, of, item_bytes)

    def _ask(self, wave: list[_Asked]) -> list[_Asked]:
        """Ask, others first, and wait for all. Returns what is to be asked for again, beyond what has
        come."""
        answers = list[tuple[_Asked, ListsAsk]]()

        def own(asked: _Asked) -> bool:
            return asked[1].host == asked[0].lists.owners.host

        def ask(request: Request) -> None:
            for asked in sorted(wave, key=own):
                question = self._question(asked)
                one = ListsAsk(request, question, asked[0].lists.item)
                answers.append((asked, one))
                if own(asked):
                    self._own.answer(one, question)
                else:
                    assert self._exchange is not None
                    self._exchange.ask(asked[1].host, one)

        request = in_pieces(None, ask)
        try:
            request.result()
        except BaseException:
            request.cancel()
            raise
        remote = sum(len(asked[1].positions) for asked in wave if not own(asked))
        self.nodes_remote += remote
        self.exchanges += remote > 0
        return [(hop, rest) for (hop, chunk), one in answers if (rest := _take(hop, chunk, one.answer))]

    def reserve(self, scratch_bytes: int, what: str) -> None:
        """Raise BudgetError where that is more than the memory."""
        if scratch_bytes > self._memory_bytes:
            raise BudgetError(
                scratch_bytes, self._memory_bytes, f"{what} of this mini-batch (or pass fewer seeds)"
            )


def _take(hop: AskedHop, chunk: _Chunk, answer: ListsAnswer | None) -> _Chunk | None:
    """Keep an answer; what it lacks."""
    assert answer is not None
    before = hop.lengths[chunk.positions[0]]
    if chunk.skip and answer.lengths[0] != before:
        graph, node = hop.lists.graph, hop.nodes[chunk.positions[0]]
        raise FormatError(
            f"node {node} had {before:,} neighbours of graph {graph.name!r}, and then {answer.lengths[0]:,}: "
            f"run `featstore verify` on the part of host {chunk.host}"
        )
    hop.lengths[chunk.positions], hop.begins[chunk.positions] = answer.lengths, answer.begins
    hop.come.append((chunk, answer))
    counts = hop.lists.draw.counts(answer.lengths, hop.fanout)
    known = int(np.count_nonzero(counts >= 0))  # of those that the owner has looked at
    ends, come = np.cumsum(counts[:known]), chunk.skip + len(answer.neighbours)
    first, skip = known, 0
    if come < int(ends[-1]):
        first = int(np.searchsorted(ends, come, side="right"))
        skip = come - (int(ends[first - 1]) if first else 0)
    return _Chunk(chunk.host, chunk.positions[first:], skip) if first < len(counts) else None


def _limits(exchange: Exchange | None, node_bytes: int, edge_bytes: int) -> tuple[int, int]:
    """How many nodes, of so many bytes there, can be asked about in a message, and how many neighbours an
    answer has."""
    ids_max, body_bytes = IDS_MAX, 8 * IDS_MAX
    if exchange is not None:
        ids_max, body_bytes = exchange.ids_max, exchange.body_bytes
    room = received_bytes(body_bytes, ids_max, 0) - HEAD_BYTES
    nodes = max(1, min(ids_max // 4, room // node_bytes))
    return nodes, max(1, min(ids_max // 2, (body_bytes - ANSWER_NODE_BYTES * nodes) // edge_bytes))
