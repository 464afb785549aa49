"""Neighbours that hosts sample for each other, where each has the lists of its own nodes alone.

Who samples a mini-batch sends, for a hop, the nodes that the other host owns, with the key of the hop; the
owner picks with that key, which is all that picking depends on (:mod:`featstore.sampling.picking`), and
sends the neighbours that were picked, never a whole list. For each node it also sends its degree and where
its list
begins in the store that was split: from these, whoever asked knows which places were picked, and so every
edge's number.

All numbers of a question are int64: the graph's number, the fan-out, the key, how many neighbours of the
first node are there already, how many may come, and the nodes. The answer is the degrees, the beginnings,
and the neighbours. Questions are cut so that the answer fits a message. Only where a fan-out is -1 is that
not known beforehand: then as many neighbours come as fit, and the rest is asked for again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import check_offsets
from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.engine.request import Request, answered, chained
from featstore.errors import ArgumentError, FormatError
from featstore.hosts.asks import AnswerPlace, Ask
from featstore.hosts.messages import HEADER_BYTES, Kind, message
from featstore.hosts.owners import Owners
from featstore.plan.budget import TableNeed, own_bytes
from featstore.reader.lookup import table_need
from featstore.reader.reader import Reader
from featstore.sampling.cache import NO_MAP, NeighbourCache
from featstore.sampling.picking import empty_picks, pick_edges
from featstore.storage.store import OpenStore, StoredGraph

_HEAD = 5  # numbers of a question before its nodes
_NODE_BYTES = 16  # of an answer, for each node
_DEGREE_END = 1 << 32


@njit(cache=True, nogil=True)
def pick_own(
    offsets: Any, row_of_node: Any, run_rows: Any, run_edges: Any, nodes: Any, local: Any, fanout: Any,
    key: Any, skip: Any, picks: Any, degrees: Any, begins: Any, positions: Any,
) -> Any:  # fmt: skip
    """Pick among the lists of a host's ``nodes``, which are ``local`` in its own store: positions of edges
    into ``positions``, as many as fit where ``fanout`` is -1. ``degrees`` and ``begins`` are filled for each
    node. ``skip``: edges of the first node that are left out, of fan-out -1.

    Returns how many positions there are, or -1 - i for a node whose list cannot be.
    """
    filled = 0
    for i in range(nodes.shape[0]):
        row = local[i] if row_of_node.shape[0] == 0 else np.int64(row_of_node[local[i]])
        low = offsets[row]
        degree = offsets[row + 1] - low
        if degree >= 4294967296:
            return -1 - i
        run = np.searchsorted(run_rows, row, side="right") - 1
        degrees[i] = degree
        begins[i] = run_edges[run] + low - offsets[run_rows[run]]
        if fanout < 0:
            first = skip if i == 0 else 0
            for place in range(first, min(degree, first + positions.shape[0] - filled)):
                positions[filled] = low + place
                filled += 1
        else:
            filled += pick_edges(key, nodes[i], low, degree, fanout, picks, i, positions[filled:])
    return filled


def picked(degrees: NDArray[np.int64], fanout: int) -> NDArray[np.int64]:
    """How many neighbours are picked of lists so long."""
    return degrees if fanout < 0 else np.minimum(degrees, fanout)


class Question(NamedTuple):
    """Neighbours of nodes of one host: ``nodes`` int64 [n], of which ``skip`` neighbours of the first are
    there already. An answer has at most ``edges_max`` neighbours, each of ``item_bytes``."""

    graph: int
    fanout: int
    key: np.uint64
    skip: int
    nodes: NDArray[np.int64]
    edges_max: int
    item_bytes: int

    @property
    def answer_bytes(self) -> int:
        """At most."""
        return _NODE_BYTES * len(self.nodes) + self.item_bytes * self.edges_max

    def edges(self, degrees: NDArray[np.int64]) -> int:
        """How many neighbours the answer has where lists are so long."""
        return min(self.edges_max, int(picked(degrees, self.fanout).sum()) - self.skip)

    def numbers(self) -> NDArray[np.int64]:
        """As it is sent."""
        key = int(self.key) - (1 << 64) * (int(self.key) >> 63)
        return np.concatenate(
            [np.array([self.graph, self.fanout, key, self.skip, self.edges_max]), self.nodes]
        )


class PickedLists(NamedTuple):
    """``degrees``, ``begins``: int64 [n]. ``neighbours``: [edges], node ids."""

    degrees: NDArray[np.int64]
    begins: NDArray[np.int64]
    neighbours: NDArray[Any]

    @classmethod
    def of(cls, body: NDArray[np.uint8], nodes: int, dtype: np.dtype[Any]) -> PickedLists:
        """What lies in the body of a message; its neighbours may be incomplete."""
        numbers = body[: _NODE_BYTES * nodes].view(np.int64)
        rest = body[_NODE_BYTES * nodes :]
        return cls(
            numbers[:nodes], numbers[nodes:], rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)
        )


class ListsAsk(Ask):
    """A question to one host. ``answer`` is there when it has ended well."""

    kind = Kind.PICK

    def __init__(self, request: Request, question: Question, dtype: np.dtype[Any]) -> None:
        self._question, self._dtype = question, dtype
        self.answer: PickedLists | None = None
        super().__init__(request)

    @property
    def rows(self) -> int:
        return len(self._question.nodes)

    def message(self) -> NDArray[np.uint8]:
        numbers = self._question.numbers()
        raw = message(numbers.nbytes)
        raw[HEADER_BYTES:] = numbers.view(np.uint8)
        return raw

    def wrong(self, body: NDArray[np.uint8]) -> str:
        question = self._question
        if len(body) >= _NODE_BYTES * self.rows:
            degrees = PickedLists.of(body, self.rows, self._dtype).degrees
            if ((degrees >= 0) & (degrees < _DEGREE_END)).all():
                expected = _NODE_BYTES * self.rows + question.item_bytes * question.edges(degrees)
                if len(body) == expected:
                    return ""
        return f"has answered {len(body):,} bytes that are not the neighbours of {self.rows:,} nodes"

    def _put(self, body: NDArray[np.uint8]) -> None:
        self.answer = PickedLists.of(body.copy(), self.rows, self._dtype)


class OwnLists:
    """The whole lists of this host's nodes, of one graph: offsets in memory, neighbours there as far as
    ``room_bytes`` have room, the rest on disk. ``reader``: has the tables of :func:`list_tables`; it is not
    closed. Raises BudgetError, CorruptionError, DeviceError, FormatError."""

    def __init__(self, part: OpenStore, name: str, owners: Owners, reader: Reader, room_bytes: int) -> None:
        family = part.manifest.family
        assert family is not None
        self.name, self._owners, self._reader = name, owners, reader
        split = family.split_graphs[name]
        assert split.lists is not None
        graph = StoredGraph(part, f"{name}/lists", split.as_graph)
        self._offsets_table, self._table = list_tables(name)
        where = f"the lists of {graph.where()}"
        offsets: NDArray[np.int64] = reader.read_runs({self._offsets_table: [(0, graph.table.rows + 1)]})[
            self._offsets_table
        ]
        check_offsets(offsets, 0, graph.edges, f"the offsets of {where}")
        self._offsets = offsets
        row_of_node = graph.table.row_of_node()
        self._row_of_node = NO_MAP if row_of_node is None else row_of_node
        self._run_rows, self._run_edges = part.load(split.lists.run_rows), part.load(split.lists.run_edges)
        if len(self._run_rows) and (self._run_rows[0] != 0 or (np.diff(self._run_rows) <= 0).any()):
            raise FormatError(
                f"the runs of {where} do not begin with row 0 and ascend: run `featstore verify`"
            )
        self.dtype = node_dtype(family.first_rows[split.as_graph.table_of_sources][-1])
        self._cache = NeighbourCache(graph, offsets)
        self._cache.fill(reader, room_bytes)
        self.serve(np.array([0, 1, 0, 0, 0]), AnswerPlace(0, 0))  # so that the kernel is there

    @staticmethod
    def held_bytes(part: OpenStore, name: str) -> int:
        """What lists take beside a reader and neighbours in memory."""
        assert part.manifest.family is not None
        split = part.manifest.family.split_graphs[name]
        assert split.lists is not None
        order = part.tables[split.table].entry.order
        map_bytes = 0 if order.row_of_node is None else node_dtype(split.lists.offsets.rows - 1).itemsize
        return (8 + map_bytes) * split.lists.offsets.rows + 16 * split.lists.run_rows.shape[0]

    @property
    def cached_bytes(self) -> int:
        """Neighbours in memory."""
        return self._cache.memory_bytes

    def serve(self, asked: NDArray[np.int64], place: AnswerPlace) -> tuple[Request, int]:
        """Pick the neighbours that a question asks for, and begin to read them into ``place``, whose ``ids``
        are scratch; the request, and the bytes that the answer will have. Raises ArgumentError for what does
        not fit there, IdError for nodes of others, FormatError."""
        fanout, skip, edges_max = int(asked[1]), int(asked[3]), int(asked[4])
        key, nodes = asked[2:3].view(np.uint64)[0], asked[_HEAD:]
        count, item = len(nodes), self.dtype.itemsize
        room = min(len(place.ids) - count, (len(place.body) - _NODE_BYTES * count) // item)
        if not (fanout * count <= edges_max <= room and fanout >= -1 and skip >= 0 <= edges_max):
            raise ArgumentError(f"{edges_max:,} neighbours of {count:,} nodes are more than had been agreed")
        local = self._owners.local(nodes, place.ids[:count])
        head = PickedLists.of(place.body[: _NODE_BYTES * count], count, self.dtype)
        positions = place.ids[count : count + edges_max]
        filled = pick_own(
            self._offsets, self._row_of_node, self._run_rows, self._run_edges, nodes, local, fanout, key,
            skip, empty_picks(fanout, edges_max), head.degrees, head.begins, positions,
        )  # fmt: skip
        if filled < 0:
            raise FormatError(f"the list of node {nodes[-1 - filled]} of graph {self.name!r} is too long")
        end = _NODE_BYTES * count + filled * item
        out = place.body[_NODE_BYTES * count : end].view(self.dtype)
        return self._read(positions[:filled], out), end

    def _read(self, positions: NDArray[np.int64], out: NDArray[Any]) -> Request:
        first = self._cache.first
        if len(first) == int(self._offsets[-1]):
            np.take(first, positions, out=out, mode="clip")  # "raise" would take a second buffer
            return answered(out)
        there = np.flatnonzero(positions < len(first))
        out[there] = first[positions[there]]
        if len(there) == len(positions):
            return answered(out)
        missing = np.flatnonzero(positions >= len(first))
        read = self._reader.submit(
            {self._table: positions[missing]}, out={self._table: out}, at={self._table: missing}
        )
        return chained(read, lambda: out)


class ListsOfHost:
    """All lists of a host, by the graphs' names in order, over one reader. ``options``: of that."""

    def __init__(
        self, part: OpenStore, owners: Mapping[str, Owners], memory_bytes: int, **options: Any
    ) -> None:
        names, needs, held = _needs(part, options)
        assert part.manifest.family is not None
        self.memory_bytes = memory_bytes
        own = own_bytes(memory_bytes - own_bytes(1, needs) + own_bytes(1, []) - held, needs)
        tables = [table for name in names for table in list_tables(name)]
        self._reader = Reader(part, tables=tables, memory=own, static=None, static_memory=0, **options)
        room = memory_bytes - held - own
        self.graphs: dict[str, OwnLists] = {}
        try:
            for name in names:
                owns = owners[part.manifest.family.split_graphs[name].table]
                self.graphs[name] = OwnLists(part, name, owns, self._reader, room)
                room -= self.graphs[name].cached_bytes
        except BaseException:
            self._reader.close()
            raise

    @staticmethod
    def least_bytes(part: OpenStore, **options: Any) -> int:
        """Memory without any neighbour in it."""
        _, needs, held = _needs(part, options)
        return held + own_bytes(1, needs)

    @staticmethod
    def most_bytes(part: OpenStore, **options: Any) -> int:
        """Memory with all neighbours in it."""
        names, needs, held = _needs(part, options)
        whole = sum(part.table(list_tables(name)[1]).data_bytes for name in names)
        return held + own_bytes(1 << 60, needs) + whole

    def serve(self, asked: NDArray[np.int64], place: AnswerPlace) -> tuple[Request, int]:
        """As :class:`featstore.hosts.line.ServeLists`."""
        graphs = list(self.graphs.values())
        if len(asked) < _HEAD or not 0 <= asked[0] < len(graphs):
            raise ArgumentError("has asked for neighbours in a way that contradicts itself")
        return graphs[int(asked[0])].serve(asked, place)

    def answer(self, ask: ListsAsk, question: Question) -> None:
        """PickedLists a question of this host's own."""
        place = AnswerPlace(question.answer_bytes, len(question.nodes) + question.edges_max)
        read, byte_count = self.serve(question.numbers(), place)
        read.add_done_callback(partial(_own_answer, ask, place.body[:byte_count]))

    def close(self) -> None:
        self._reader.close()


def _own_answer(ask: ListsAsk, body: NDArray[np.uint8], read: Any) -> None:
    error = read.exception()
    if error is None:
        ask.fill(body)
    else:
        ask.end(error)


def graphs_of(part: OpenStore) -> list[str]:
    """The graphs whose lists are split, in the order in which messages number them."""
    family = part.manifest.family
    return [] if family is None else sorted(family.split_graphs)


def list_tables(name: str) -> tuple[str, str]:
    """The tables of a graph's whole lists: offsets, sources."""
    return f"{name}/lists/offsets", f"{name}/lists/sources"


def _needs(part: OpenStore, options: Mapping[str, Any]) -> tuple[list[str], list[TableNeed], int]:
    """(names of graphs, what a reader of their lists needs, what the lists take beside it)."""
    names, verify = graphs_of(part), bool(options.get("verify", True))
    needs = [table_need(part.table(table), verify) for name in names for table in list_tables(name)]
    return names, needs, sum(OwnLists.held_bytes(part, name) for name in names)
