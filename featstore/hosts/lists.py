"""Neighbours that this host samples for others, and for itself, among the lists of its own nodes; for the
questions see :mod:`featstore.hosts.questions`.

What is picked follows from offsets in memory. What is drawn by weights or within times follows from whole
lists of these (:mod:`featstore.sampling.lists_on_disk`), which are read for some nodes at a time, of one
question after the other. Then only those neighbours are read, and numbers of edges, that were sampled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import node_dtype
from featstore.engine.request import Request, answered, chained
from featstore.errors import OF_STORE, ArgumentError, BudgetError, FormatError
from featstore.hosts.asks import AnswerPlace
from featstore.hosts.exchange import IDS_MAX
from featstore.hosts.own_draws import begins_of, close_drawn, longest_of, pick_own
from featstore.hosts.owners import Owners
from featstore.hosts.questions import Draw, ListsAnswer, ListsAsk, Question
from featstore.plan.budget import TableNeed, own_bytes
from featstore.reader.lookup import table_need
from featstore.reader.reader import Reader
from featstore.sampling.cache import NO_MAP
from featstore.sampling.lists_on_disk import ASKING_NODE_BYTES, LONGEST_BYTES, Asking, DrawnHow, ListsOnDisk
from featstore.sampling.picking import empty_picks, table_size
from featstore.storage.store import OpenStore, StoredGraph

_DRAW_NODES, _DRAW_EDGES = 1024, 1 << 13  # that are drawn at once, unless one node draws more
_PICKS_BYTES = 1 << 16  # of a node, unless one picks more
_DRAW_BYTES = ASKING_NODE_BYTES * _DRAW_NODES + 16 * _DRAW_EDGES + _PICKS_BYTES
_READ_BYTES = 1 << 18  # of lists that are looked at whole, unless one is longer
_TAKEN_AT_ONCE = 1 << 13  # neighbours


class OwnLists:
    """The whole lists of this host's nodes, of one graph: offsets in memory, neighbours and what else is kept
    of edges there as far as :meth:`fill` has room, the rest on disk. ``reader``: has the tables of
    :func:`lists_of`; it is not closed. ``drawing``: is held by who draws, so that scratch is for one. Raises
    CorruptionError, DeviceError, FormatError."""

    def __init__(
        self, part: OpenStore, name: str, owners: Owners, reader: Reader, drawing: threading.Lock
    ) -> None:
        family = part.manifest.family
        assert family is not None
        self.name, self._owners, self._reader = name, owners, reader
        split = family.split_graphs[name]
        assert split.lists is not None
        self._lists = lists = lists_of(part, name)
        lists.open(reader)
        self._offsets = lists.offsets
        row_of_node = lists.graph.table.row_of_node()
        self._row_of_node = NO_MAP if row_of_node is None else row_of_node
        self._run_rows, self._run_edges = part.load(split.lists.run_rows), part.load(split.lists.run_edges)
        if len(self._run_rows) and (self._run_rows[0] != 0 or (np.diff(self._run_rows) <= 0).any()):
            raise FormatError(
                f"the runs of the lists of {lists.graph.where()} do not begin with row 0 and ascend: run "
                "`featstore verify`"
            )
        self.dtype = node_dtype(family.first_rows[split.as_graph.table_of_sources][-1])
        self._has = Draw.WEIGHTS * (lists.weights is not None) | Draw.TIMES * (lists.times is not None)
        self._has |= Draw.NUMBERS * (lists.ids is not None)
        self._drawing, self._longest = drawing, int(longest_of(self._offsets))
        self.too_long: tuple[int, int] | None = None  # for draws by values: memory that is needed, and given
        for draw in (Draw(0), Draw.TREES, *([self._has | Draw.TREES] if self._has else [])):
            self.serve(np.array([0, 1, 0, 0, 0, int(draw)]), AnswerPlace(0, 0))  # so that kernels are there

    @staticmethod
    def held_bytes(part: OpenStore, name: str) -> int:
        """What lists take beside a reader and what :meth:`fill` takes."""
        assert part.manifest.family is not None
        split = part.manifest.family.split_graphs[name]
        assert split.lists is not None
        order = part.tables[split.table].entry.order
        map_bytes = 0 if order.row_of_node is None else node_dtype(split.lists.offsets.rows - 1).itemsize
        return (8 + map_bytes) * split.lists.offsets.rows + 16 * split.lists.run_rows.shape[0]

    @property
    def drawing_bytes(self) -> int:
        """Scratch for one question."""
        longest = self._longest
        picks_bytes = max(0, 16 * table_size(min(longest, IDS_MAX // 2)) - _PICKS_BYTES)
        return _DRAW_BYTES + picks_bytes + 8 * max(0, longest - _DRAW_EDGES)

    @property
    def whole_bytes(self) -> int:
        """What one takes beside it that draws by weights or times, of its longest list; 0 where none are."""
        return LONGEST_BYTES * self._longest + _READ_BYTES if self._has & (Draw.WEIGHTS | Draw.TIMES) else 0

    def check_memory(self, draw: Draw) -> None:
        """Raise BudgetError where there is none for the longest list, which is drawn from by its values."""
        if self.too_long is not None and draw & (Draw.WEIGHTS | Draw.TIMES):
            what = (
                f"look at the longest list of a node of graph {self.name!r} on a host, by whose weights or "
                f"times neighbours are drawn {OF_STORE}"
            )
            raise BudgetError(*self.too_long, what)

    def read_by(self, reader: Reader) -> None:
        """From now on lists are read by this one."""
        self._reader = reader

    def stored_bytes(self) -> int:
        """What all of it takes: neighbours, and what else there is of edges."""
        return self._lists.whole_bytes

    def fill(self, room_bytes: int, values: bool) -> int:
        """Hold neighbours, or what else there is of edges (``values``), as far as there is room; the bytes
        that are."""
        parts: list[Any] = list(self._lists.values) if values else [self._lists.cache]
        held = 0
        for part in parts:
            part.fill(self._reader, room_bytes - held)
            held += part.memory_bytes
        return held

    def serve(self, asked: NDArray[np.int64], place: AnswerPlace) -> tuple[Request, int]:
        """Sample the neighbours that a question asks for, and begin to read them into ``place``, whose
        ``ids`` are scratch; the request, and the bytes that the answer will have. Raises ArgumentError for
        what does not fit there, IdError for nodes of others, CorruptionError, DeviceError, FormatError."""
        question = Question.parsed(asked, self.dtype.itemsize)
        nodes, fanout, edges_max = question.nodes, question.fanout, question.edges_max
        count = len(nodes)
        room = min(len(place.ids) - count, (len(place.body) - question.bytes_of(0)) // question.edge_bytes)
        if not fanout * count <= edges_max <= room:
            raise ArgumentError(f"{edges_max:,} neighbours of {count:,} nodes are more than had been agreed")
        lacking = question.draw & (Draw.WEIGHTS | Draw.TIMES | Draw.NUMBERS) & ~self._has
        if lacking:
            raise ArgumentError(f"graph {self.name!r} keeps no {lacking.name} of its edges here")
        self.check_memory(question.draw)
        rows = self._owners.local(nodes, place.ids[:count])
        if len(self._row_of_node):
            rows[:] = self._row_of_node[rows]
        head = ListsAnswer.of(place.body[: question.bytes_of(0)], question, self.dtype)
        positions = place.ids[count : count + edges_max]
        if question.draw.picks:
            filled = pick_own(
                self._offsets, rows, self._run_rows, self._run_edges, nodes, fanout, question.key,
                question.skip, empty_picks(fanout, edges_max), head.lengths, head.begins, positions,
            )  # fmt: skip
            if filled < 0:
                raise FormatError(f"the list of node {nodes[-1 - filled]} of graph {self.name!r} is too long")
            places = np.empty(0, np.uint32)
        else:
            places = np.empty(edges_max, np.uint32)
            with self._drawing:
                filled = self._draw(question, rows, head, positions, places)
        body = place.body[: question.bytes_of(filled)]
        answer = ListsAnswer.of(body, question, self.dtype)
        answer.places[:] = places[: len(answer.places)]
        return self._read(positions[:filled], answer), len(body)

    def _draw(
        self, question: Question, rows: NDArray[np.int64], head: ListsAnswer, positions: NDArray[np.int64],
        places: NDArray[np.uint32],
    ) -> int:  # fmt: skip
        """Draw with options, for some nodes after the other; of fan-out -1 until there is no more room."""
        lists, draw, fanout = self._lists, question.draw, question.fanout
        replace, by_times = bool(draw & Draw.REPLACE), bool(draw & Draw.TIMES)
        tables = lists.weights if draw & Draw.WEIGHTS else None, lists.times if by_times else None, None
        how = DrawnHow(replace, bool(draw & Draw.LAST), bool(draw & Draw.TREES))
        head.lengths[:] = -1
        filled = 0
        for low, high in self._blocks(rows, fanout):
            here = rows[low:high]
            edges, degree_max = lists.size(here, 0, len(here), fanout, replace)
            at, taken, edge = (
                lists.places(here, fanout, replace),
                head.lengths[low:high],
                np.empty(edges, np.int64),
            )
            of = question.of.at(slice(low, high))
            lists.draw(
                Asking(here, *of), fanout, question.key, how, degree_max, tables, self._reader, _room, at,
                edge[:0], edge, taken,
            )  # fmt: skip
            skip = question.skip if low == 0 else 0
            filled += int(
                close_drawn(self._offsets, here, at, taken, edge, skip, positions[filled:], places[filled:])
            )
            if fanout < 0 and filled == len(positions):
                break
        begins_of(rows, self._offsets, self._run_rows, self._run_edges, head.begins)
        return filled

    def _blocks(self, rows: NDArray[np.int64], fanout: int) -> Iterator[tuple[int, int]]:
        """Nodes that are drawn at once."""
        low = 0
        while low < len(rows) or len(rows) == 0:
            here, fits = rows[low : low + _DRAW_NODES], _DRAW_EDGES // max(1, fanout)
            if fanout < 0:
                ends = np.cumsum(self._offsets[here + 1] - self._offsets[here])
                fits = int(np.searchsorted(ends, _DRAW_EDGES, side="right"))
            high = low + min(len(here), max(1, fits))
            yield low, high
            low = high
            if low == len(rows):
                return

    def _read(self, positions: NDArray[np.int64], answer: ListsAnswer) -> Request:
        """Have the neighbours at these positions, and the numbers of the edges."""
        lists = self._lists
        parts = [(lists.sources, lists.cache.first, answer.neighbours)]
        if len(answer.numbers):
            assert lists.ids is not None
            parts.append((lists.ids.table, lists.ids.first, answer.numbers))
        wanted, out, at = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        later = list[tuple[NDArray[Any], NDArray[np.int32], NDArray[Any]]]()  # of another dtype
        for table, held, into in parts:
            missed = _take(held, positions, into)
            if not len(missed):
                continue
            wanted[table], out[table], at[table] = positions[missed], into, missed
            if held.dtype != into.dtype:
                out[table] = np.empty(len(missed), held.dtype)
                at[table] = np.arange(len(missed), dtype=np.int32)
                later.append((into, missed, out[table]))
        if not wanted:
            return answered(answer)
        read = self._reader.submit(wanted, out=out, at=at)

        def put() -> ListsAnswer:
            for into, missed, rows in later:
                into[missed] = rows
            return answer

        return chained(read, put)


class ListsOfHost:
    """All lists of a host, by the graphs' names in order, over one reader, within ``memory_bytes``, of which
    that is what they have taken. ``options``: of the reader. Raises BudgetError, CorruptionError,
    DeviceError, FormatError."""

    def __init__(
        self, part: OpenStore, owners: Mapping[str, Owners], memory_bytes: int, **options: Any
    ) -> None:
        names, needs, held = _needs(part, options)
        assert part.manifest.family is not None
        tables = [table for name in names for table in lists_of(part, name).tables]
        least, drawing = own_bytes(1, needs), threading.Lock()

        def reader(memory: int) -> Reader:
            return Reader(
                part, tables=tables, memory=memory, static=None, static_memory=0, **options
            )  # fmt: skip

        self._reader = reader(least)  # how long lists are is known when offsets have been read
        self.graphs: dict[str, OwnLists] = {}
        try:
            for name in names:
                owns = owners[part.manifest.family.split_graphs[name].table]
                self.graphs[name] = OwnLists(part, name, owns, self._reader, drawing)
            graphs = self.graphs.values()
            needed = held + least + max(one.drawing_bytes for one in graphs)
            if needed > memory_bytes:
                raise BudgetError(needed, memory_bytes, "pick among the longest list of a node")
            fitting = [one.whole_bytes for one in graphs if needed + one.whole_bytes <= memory_bytes]
            for one in graphs:  # who draws otherwise needs less
                if needed + one.whole_bytes > memory_bytes:
                    one.too_long = needed + one.whole_bytes, memory_bytes
            needed += max(fitting, default=0)
            own = own_bytes(memory_bytes - needed + own_bytes(1, []), needs)
            own = own if own <= memory_bytes - needed + least else least
            self._reader.close()
            self._reader = reader(own)
            room = memory_bytes - needed + least - own
            for one in graphs:
                one.read_by(self._reader)
            for values in (False, True):
                for one in sorted(graphs, key=OwnLists.stored_bytes):  # small relations first
                    room -= one.fill(room, values)
            self.memory_bytes = memory_bytes - room
        except BaseException:
            self._reader.close()
            raise

    def say_too_long(self, needed: Callable[[int], int], given_bytes: int) -> None:
        """Tell whoever draws by weights or times of a list that there is too little memory for how much it
        takes of all, given that of these lists."""
        for one in self.graphs.values():
            if one.too_long is not None:
                one.too_long = needed(one.too_long[0]), given_bytes

    @staticmethod
    def least_bytes(part: OpenStore, **options: Any) -> int:
        """Memory without any neighbour in it, where no list is long."""
        _, needs, held = _needs(part, options)
        return held + _DRAW_BYTES + own_bytes(1, needs)

    def serve(self, asked: NDArray[np.int64], place: AnswerPlace) -> tuple[Request, int]:
        """As :class:`featstore.hosts.line.ServeLists`."""
        graphs = list(self.graphs.values())
        if len(asked) == 0 or not 0 <= asked[0] < len(graphs):
            raise ArgumentError("has asked for neighbours of a graph that there is not")
        return graphs[int(asked[0])].serve(asked, place)

    def answer(self, ask: ListsAsk, question: Question) -> None:
        """ListsAnswer a question of this host's own."""
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


def lists_of(part: OpenStore, name: str) -> ListsOnDisk:
    """A graph's whole lists in a part, with all that is kept of their edges; nothing is read."""
    family = part.manifest.family
    assert family is not None
    split = family.split_graphs[name]
    graph = StoredGraph(part, f"{name}/lists", split.as_graph)
    return ListsOnDisk(graph, None, weights=graph.has_weights, times=graph.has_times, whole_edges=split.edges)


def _needs(part: OpenStore, options: Mapping[str, Any]) -> tuple[list[str], list[TableNeed], int]:
    """(names of graphs, what a reader of their lists needs, what the lists take beside it)."""
    names, verify = graphs_of(part), bool(options.get("verify", True))
    needs = [table_need(part.table(table), verify) for name in names for table in lists_of(part, name).tables]
    return names, needs, sum(OwnLists.held_bytes(part, name) for name in names)


def _take(held: NDArray[Any], positions: NDArray[np.int64], into: NDArray[Any]) -> NDArray[np.int32]:
    """Take what is at these positions, as far as it is held; where it is not, of the positions. In pieces,
    which bound what is needed beside these."""
    if not len(held):
        return np.arange(len(positions), dtype=np.int32)
    missed = [np.empty(0, np.int32)]
    for low in range(0, len(positions), _TAKEN_AT_ONCE):
        some = positions[low : low + _TAKEN_AT_ONCE]
        there = some < len(held)
        into[low : low + len(some)] = held[np.where(there, some, 0)]
        missed.append((np.flatnonzero(~there) + low).astype(np.int32))
    return np.concatenate(missed)


def _room(least_bytes: int, most_bytes: int) -> int:
    """How many bytes of lists are read at once."""
    return max(least_bytes, min(most_bytes, _READ_BYTES))
