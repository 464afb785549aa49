"""Partitioners side by side, on the graph of a store: what each would make of it, scored alike.

The stored topology is read in sequential blocks through the store's reader, so comparing takes what the
partitioners take and no more: METIS is left out where it does not fit the memory, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import BudgetError, IdError, SourceError
from featstore.order.orders import make_order
from featstore.order.scores import Scores, score_parts
from featstore.packing.inputs import node_mask
from featstore.reader.graphs import read_offsets
from featstore.reader.reader import Reader
from featstore.storage.relations import check_over_one_table
from featstore.units import format_bytes

if TYPE_CHECKING:
    from featstore.reader.reader import Reader
    from featstore.storage.store import OpenStore

_READER_BYTES = 32 * 2**20  # without the checksums of lists
COMPARED_METHODS = ("metis", "multilevel", "ldg", "bfs")
STORED = "as stored"


@dataclass(frozen=True)
class Comparison:
    """One partitioner's result: ``scores`` is None where it could not run, and ``because`` says why.
    ``seconds`` of partitioning."""

    method: str
    scores: Scores | None
    seconds: float
    because: str = ""


class StoredLists:
    """``sources`` of a stored graph as an array that is read when it is sliced: what partitioners take as
    ``indices``."""

    ndim = 1

    def __init__(self, reader: Reader, table: str, size: int, dtype: np.dtype[Any]) -> None:
        self._reader, self._table = reader, table
        self.size, self.dtype, self.shape = size, dtype, (size,)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            low, high, step = index.indices(self.size)
            if step != 1:
                raise IdError("lists are read in runs; the step must be 1")
            return self._reader.read_runs({self._table: [(low, max(low, high))]})[self._table]
        return self[int(index) : int(index) + 1][0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[0 : self.size], dtype)


@dataclass(frozen=True)
class StoredTopology:
    """A stored graph over rows, as a `GraphLike`."""

    indptr: NDArray[np.int64]
    indices: Any


def compare_orders(
    store: OpenStore,
    *,
    graph: str | None = None,
    methods: Sequence[str] = COMPARED_METHODS,
    parts: int | None = None,
    train: Any = None,
    memory_bytes: int = 2**30,
    seed: int = 0,
) -> list[Comparison]:
    """Score the store's own partitions, and those that ``methods`` would make, on the graph of that name (the
    only one by default).

    ``parts``: how many partitions; as many as the store has by default. ``train``: node ids of training
    nodes, or the name of an array of the store, whose balance is scored too (and kept by "bfs"). Raises
    SourceError where the store has no such graph.
    """
    if (
        not store.graphs
        or (graph is None and len(store.graphs) > 1)
        or (graph is not None and graph not in store.graphs)
    ):
        raise SourceError(
            "comparing orders needs one graph of the store, which has "
            f"{', '.join(map(repr, store.graphs)) or 'none'}: pack it with its topology, or name the "
            "graph"
        )
    name = graph or next(iter(store.graphs))
    check_over_one_table(store.graphs[name])
    table = store.graphs[name].table
    offsets = table.partition_offsets
    own = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
    wanted = len(offsets) - 1 if parts is None else parts
    chosen = None if train is None else _train_mask(store, table, train)
    lists = f"{name}/sources"
    reading = _READER_BYTES + 4 * store.table(lists).layout.pages  # with the lists' checksums
    held = own.nbytes + 12 * table.rows + reading  # and where lists begin, and the parts of an order
    found = []
    with Reader(store, tables=[lists], memory=reading, static=None) as reader:
        dtype = store.table(lists).dtype
        topology: Any = StoredTopology(
            read_offsets(store.graphs[name]), StoredLists(reader, lists, store.graphs[name].edges, dtype)
        )
        found.append(
            Comparison(STORED, score_parts(topology, own, len(offsets) - 1, train=chosen, seed=seed), 0.0)
        )
        for method in methods:
            begin = time.perf_counter()
            try:
                order = make_order(
                    method, topology, rows=table.rows, row_bytes=table.row_bytes, parts=wanted, seed=seed,
                    memory_bytes=memory_bytes - held, train=chosen,
                )  # fmt: skip
            except (BudgetError, SourceError) as error:
                needed = (
                    f"needs {format_bytes(error.needed_bytes + held)}"
                    if isinstance(error, BudgetError)
                    else str(error)
                )
                found.append(Comparison(method, None, time.perf_counter() - begin, needed))
                continue
            seconds = time.perf_counter() - begin
            part = np.empty(table.rows, np.int32)
            assert order.node_of_row is not None
            part[order.node_of_row] = np.repeat(
                np.arange(order.parts, dtype=np.int32), np.diff(order.partition_offsets)
            )
            found.append(
                Comparison(method, score_parts(topology, part, order.parts, train=chosen, seed=seed), seconds)
            )
    return found


def _train_mask(store: OpenStore, table: Any, train: Any) -> NDArray[np.bool_]:
    mask = node_mask(store.arrays[train] if isinstance(train, str) else train, table.rows)
    node_of_row = table.node_of_row()
    return mask if node_of_row is None else mask[node_of_row]
