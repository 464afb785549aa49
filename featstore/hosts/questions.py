"""Questions for neighbours that another host samples, and its answers.

Who samples a mini-batch sends, for a hop, the nodes that the other host owns, with the key of the hop; the
owner draws with that key, which is all that drawing depends on, and sends the neighbours that were drawn,
never a whole list. For each node it also sends where its list begins in the store that was split, and

- where neighbours are **picked**, uniformly and without replacement (:mod:`featstore.sampling.picking`), the
  length of its list: from that, whoever asked knows which places of it were picked;
- where they are **drawn**, with any options (:mod:`featstore.sampling.choosing`), how many were, and the
  place of each in its list, uint32: weights and times are the owner's alone.

With that every edge has its number in the store that was split. The user's numbers of the edges, int64, come
beside them where they are wanted.

All numbers of a question are int64: the graph's number, the fan-out, the key, how many neighbours of the
first node are there already, how many may come, flags, the nodes, and of each its tree, and the first and the
last time that are allowed, as the flags say. The answer is lengths or counts, the beginnings, the user's
numbers, the neighbours, and the places. Questions are cut so that the answer fits a message. Only where a
fan-out is -1 is that not known beforehand: then as many neighbours come as fit, and the rest is asked for
again. Nodes that an owner did not look at then have the count -1.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from featstore.engine.request import Request
from featstore.errors import ArgumentError
from featstore.hosts.asks import Ask
from featstore.hosts.messages import HEADER_BYTES, Kind, message
from featstore.sampling.options import SamplingOptions

_HEAD = 6  # numbers of a question before its nodes
HEAD_BYTES = 8 * _HEAD
ANSWER_NODE_BYTES = 16
_PLACE = np.dtype(np.uint32)
_DEGREE_END = 1 << 32
_NONE = np.empty(0, np.int64)


class Draw(IntFlag):
    """How neighbours are drawn, and what comes with them."""

    REPLACE = 1
    LAST = 2
    TREES = 4
    WEIGHTS = 8
    TIMES = 16
    NUMBERS = 32

    @classmethod
    def of(cls, options: SamplingOptions, *, weights: bool, times: bool, numbers: bool) -> Self:
        """By options, and what is kept of a graph's edges that they go by."""
        said = {
            cls.REPLACE: options.replace, cls.LAST: times and options.temporal == "last",
            cls.TREES: options.has_trees, cls.WEIGHTS: weights, cls.TIMES: times, cls.NUMBERS: numbers,
        }  # fmt: skip
        return cls(sum(flag for flag, there in said.items() if there))

    @property
    def picks(self) -> bool:
        """Whether what is drawn follows from the lengths of lists alone."""
        return not self & ~Draw.NUMBERS

    def counts(self, lengths: NDArray[np.int64], fanout: int) -> NDArray[np.int64]:
        """How many neighbours nodes have in all, by the ``lengths`` of an answer; -1 of those that the owner
        has not looked at."""
        return lengths if fanout < 0 or not self.picks else np.minimum(lengths, fanout)


class OfNodes(NamedTuple):
    """Who asks: ``nodes`` int64 [n], and of each its ``trees``, and the first and the last time that these
    allow, ``lows`` and ``highs``; [0] where a draw has none."""

    nodes: NDArray[np.int64]
    trees: NDArray[np.int64] = _NONE
    lows: NDArray[np.int64] = _NONE
    highs: NDArray[np.int64] = _NONE

    def at(self, positions: Any) -> OfNodes:
        """Some of them."""
        return OfNodes(*(one[positions] if len(one) else one for one in self))


class Question(NamedTuple):
    """Neighbours ``of`` nodes of one host, of which ``skip`` neighbours of the first are there already. An
    answer has at most ``edges_max`` neighbours, each of ``item_bytes``."""

    graph: int
    fanout: int
    key: np.uint64
    skip: int
    edges_max: int
    draw: Draw
    of: OfNodes
    item_bytes: int

    @property
    def nodes(self) -> NDArray[np.int64]:
        """int64 [n]: those that are asked about."""
        return self.of.nodes

    @staticmethod
    def node_bytes(draw: Draw) -> int:
        """Of a question, for each node."""
        return 8 * (1 + bool(draw & Draw.TREES) + 2 * bool(draw & Draw.TIMES))

    @property
    def edge_bytes(self) -> int:
        """Of an answer, for each neighbour."""
        return ListsAnswer.bytes_of_edge(self.draw, self.item_bytes)

    @property
    def answer_bytes(self) -> int:
        """At most."""
        return self.bytes_of(self.edges_max)

    def bytes_of(self, edges: int) -> int:
        """Of an answer of so many neighbours."""
        return ANSWER_NODE_BYTES * len(self.nodes) + self.edge_bytes * edges

    def edges(self, lengths: NDArray[np.int64]) -> int:
        """How many neighbours the answer has where lists are so long."""
        return min(
            self.edges_max, int(np.maximum(0, self.draw.counts(lengths, self.fanout)).sum()) - self.skip
        )

    def numbers(self) -> NDArray[np.int64]:
        """As it is sent."""
        key = int(self.key) - (1 << 64) * (int(self.key) >> 63)
        head = np.array([self.graph, self.fanout, key, self.skip, self.edges_max, int(self.draw)])
        return np.concatenate([head, *self.of])

    @classmethod
    def parsed(cls, asked: NDArray[np.int64], item_bytes: int) -> Question:
        """A question as it was sent. Raises ArgumentError for what is none."""
        if len(asked) < _HEAD or not 0 <= asked[5] < 64 or asked[1] < -1 or min(asked[3], asked[4]) < 0:
            raise _contradiction()
        draw = Draw(int(asked[5]))
        each = cls.node_bytes(draw) // 8
        count, odd = divmod(len(asked) - _HEAD, each)
        if odd:
            raise _contradiction()
        parts = iter(np.split(asked[_HEAD:], [count * k for k in range(1, each)]))
        of = OfNodes(
            next(parts), next(parts) if draw & Draw.TREES else _NONE,
            *((next(parts), next(parts)) if draw & Draw.TIMES else (_NONE, _NONE)),
        )  # fmt: skip
        key = asked[2:3].view(np.uint64)[0]
        return cls(int(asked[0]), int(asked[1]), key, int(asked[3]), int(asked[4]), draw, of, item_bytes)


class ListsAnswer(NamedTuple):
    """``lengths``, ``begins``: int64 [n]; the user's ``numbers`` of the edges, int64 [edges], or [0];
    ``neighbours``: [edges], node ids; ``places`` uint32 [edges], or [0]."""

    lengths: NDArray[np.int64]
    begins: NDArray[np.int64]
    numbers: NDArray[np.int64]
    neighbours: NDArray[Any]
    places: NDArray[np.uint32]

    @staticmethod
    def bytes_of_edge(draw: Draw, item_bytes: int) -> int:
        """For each neighbour of so many bytes."""
        return item_bytes + 8 * bool(draw & Draw.NUMBERS) + (0 if draw.picks else _PLACE.itemsize)

    @property
    def held_bytes(self) -> int:
        """Of all of it, as it has come in one piece."""
        return sum(part.nbytes for part in self)

    @classmethod
    def of(cls, body: NDArray[np.uint8], question: Question, dtype: np.dtype[Any]) -> ListsAnswer:
        """What lies in the body of a message that answers a question."""
        count = len(question.nodes)
        edges = (len(body) - ANSWER_NODE_BYTES * count) // question.edge_bytes
        numbered = edges if question.draw & Draw.NUMBERS else 0
        sizes = [8 * count, 8 * count, 8 * numbered, edges * dtype.itemsize]
        parts = np.split(body[: question.bytes_of(edges)], np.cumsum(sizes))
        types = np.int64, np.int64, np.int64, dtype, _PLACE
        return cls(*(part.view(one) for part, one in zip(parts, types, strict=True)))


class ListsAsk(Ask):
    """A question to one host. ``answer`` is there when it has ended well."""

    kind = Kind.PICK

    def __init__(self, request: Request, question: Question, dtype: np.dtype[Any]) -> None:
        self._question, self._dtype = question, dtype
        self.answer: ListsAnswer | None = None
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
        if len(body) >= ANSWER_NODE_BYTES * self.rows:
            lengths = body[: 8 * self.rows].view(np.int64)
            least = 0 if question.draw.picks or question.fanout >= 0 else -1
            sound = ((lengths >= least) & (lengths < _DEGREE_END)).all()
            looked_at = lengths >= 0
            sound = sound and (looked_at[:-1] >= looked_at[1:]).all() and looked_at[:1].all()
            if question.fanout >= 0 and not question.draw.picks:
                sound = sound and (lengths <= question.fanout).all()
            if sound and len(body) == question.bytes_of(question.edges(lengths)):
                return ""
        return f"has answered {len(body):,} bytes that are not the neighbours of {self.rows:,} nodes"

    def _put(self, body: NDArray[np.uint8]) -> None:
        self.answer = ListsAnswer.of(body.copy(), self._question, self._dtype)


def _contradiction() -> ArgumentError:
    return ArgumentError("has asked for neighbours in a way that contradicts itself")
