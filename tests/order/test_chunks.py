"""Threads that stay in a kernel for a pass: they wait for edges however long those take, and end with it,
whatever ends it."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from order_support import csc, cut_into

from featstore.errors import SourceError
from featstore.order.ldg import ldg_partition

NODES, EDGES, PARTS = 3000, 60_000, 6
CHUNK_NODES = 50


def graph_of(seed: int = 0) -> Any:
    return csc(NODES, *np.random.default_rng(seed).integers(0, NODES, (2, EDGES)))


class Edges:
    """Sources of edges that are read as from a file; ``reading`` is called before each read, with its
    number."""

    def __init__(self, indices: np.ndarray, reading: Any) -> None:
        self._indices, self._reading = indices, reading
        self.dtype, self.size, self.ndim, self.reads = indices.dtype, indices.size, 1, 0

    def __getitem__(self, which: slice) -> np.ndarray:
        self._reading(self.reads)
        self.reads += 1
        return self._indices[which]


class Read:
    """A graph whose edges are read."""

    def __init__(self, graph: Any, reading: Any) -> None:
        self.indptr, self.indices = graph.indptr, Edges(graph.indices, reading)


def parts_of(graph: Any, threads: int, passes: int = 3) -> np.ndarray:
    with cut_into(CHUNK_NODES):
        return ldg_partition(graph, PARTS, seed=1, passes=passes, threads=threads)


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "featstore-order"]


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_threads_wait_for_edges_awake_or_asleep(seconds: float) -> None:
    graph = graph_of()
    slow = Read(graph, lambda _: time.sleep(seconds))
    np.testing.assert_array_equal(parts_of(slow, 3), parts_of(graph, 1))
    assert slow.indices.reads >= 3 * NODES // (16 * CHUNK_NODES), "else nobody has waited"
    assert helpers() == []


@pytest.mark.parametrize("at", [0, 1, 5])
def test_they_end_where_reading_fails(at: int) -> None:
    def failing(number: int) -> None:
        if number == at:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        parts_of(Read(graph_of(), failing), 3)
    assert helpers() == []


def test_they_end_at_an_interrupt() -> None:
    def interrupting(number: int) -> None:
        if number == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        parts_of(Read(graph_of(), interrupting), 3)
    assert helpers() == []


@pytest.mark.parametrize("threads", [1, 3])
def test_of_bad_edges_in_several_chunks_the_first_is_named(threads: int) -> None:
    graph = graph_of()
    chunk = graph.indptr[::CHUNK_NODES]
    for number in (3, 5, 12):  # of one batch, in the order in which no thread takes them
        graph.indices[chunk[number] + number] = NODES + number
    first = int(chunk[3]) + 3
    with pytest.raises(SourceError, match=rf"indices\[{first}\] is {NODES + 3}"):
        parts_of(graph, threads)
    assert helpers() == []
