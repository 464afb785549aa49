"""Whole mini-batches: what a training loop gets beside the rows of the nodes.

Each mini-batch that a sampler makes *wants* rows of nodes, by node ids, and, where a table of edges was
named, rows of edges, by their numbers (:class:`WantedRows`). When the rows are there, they become one
:class:`~featstore.loaders.batch.Batch`, with arrays of the store that were asked for (:class:`Whole`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore import arguments as args
from featstore.base.dtypes import dtype_from_name
from featstore.errors import ArgumentError, SourceError
from featstore.loaders.batch import Batch, of_pyg
from featstore.loaders.prefetch import Sampler, epoch_of
from featstore.sampling.dgl_graphs import is_named
from featstore.sampling.minibatch import Ids, split
from featstore.storage.relations import EDGE_FEATURES, edge_tables, graph_of_array
from featstore.storage.store import OpenStore, StoredGraph
from featstore.trace.told_ids import RECORDED_IDS, has_recorded_ids, same_nodes


class WantedRows:
    """Mini-batches as pairs of the ids wanted by table, and the sample.

    ``nodes``: finds the node ids. ``edges``: (table of nodes, table of edges), or None. ``recorded``: they
    are recorded, and what a training loop gets must know their node ids. ``check`` is called before each.
    ``attached``: the tables of nodes of one of which each has to have ids.
    """

    def __init__(
        self, batches: Sampler, nodes: Callable[[Any], Any] | None, edges: tuple[str, str] | None,
        recorded: bool, check: Callable[[], None] | None = None, attached: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.sampler, self._nodes, self._edges, self.recorded = batches, nodes, edges, recorded
        self._check, self._attached = check, attached

    def epoch(self, number: int) -> Iterable[Any]:
        return _Epoch(self, number)

    def of(self, made: Any) -> tuple[Ids, Any]:
        """(ids, sample) of a mini-batch."""
        if self._check is not None:
            self._check()
        ids, sample = split(made, self._nodes)
        if self._attached and not of_pyg(sample) and not {*ids} & {"", *self._attached}:
            raise _no_nodes(ids)
        if self.recorded and not _knows_ids(sample, ids):
            sample = with_recorded_ids(sample, ids[""] if list(ids) == [""] else dict(ids))
        if self._edges is None:
            return ids, sample
        nodes, edges = self._edges
        if list(ids) not in ([""], [nodes]):
            raise SourceError(
                f"edge_table= is for mini-batches with nodes of one table, {nodes!r}; these have "
                f"{', '.join(map(repr, ids))}: name the rows of edges by nodes=, {{table: ids}}"
            )
        numbers = field_of(sample["sample"] if has_recorded_ids(sample) else sample, "e_id")
        if numbers is None:
            raise SourceError(
                f"edge_table={edges!r} is read by e_id, the numbers of edges that it was packed with, which "
                "these mini-batches do not have: PyG's loaders bring it, so does "
                "FeatstoreSampler.from_data(data, fanouts), and the store's own sampling where edge ids were "
                "packed"
            )
        return {nodes: next(iter(ids.values())), edges: split(numbers)[0][""]}, sample


def tells_ids(sampler: Sampler) -> bool:
    """Whether mini-batches are such that are recorded with the ids of their rows."""
    of = getattr(sampler, "__self__", sampler)  # a function of the epoch's number is one of WantedRows
    return isinstance(of, WantedRows) and of.recorded


class _Epoch:
    """The mini-batches of one epoch."""

    def __init__(self, wanted: WantedRows, number: int) -> None:
        self._wanted, self._number = wanted, number

    def __iter__(self) -> Iterator[Any]:
        return (self._wanted.of(made) for made in epoch_of(self._wanted.sampler, self._number))


class Whole:
    """Makes what a loader of any mode has made a :class:`~featstore.loaders.batch.Batch`.

    ``edge_table``: whose rows are ``edge_attr``. ``attach``: names of arrays of the store with a value for
    each node, or for each edge by its number (``of_edges``), which are held in memory. Raises ArgumentError,
    UnknownNameError, SourceError.
    """

    def __init__(self, store: OpenStore, edge_table: str | None, attach: Any) -> None:
        self.edge_table, self.edges = edge_table, None
        self._nodes = nodes = store.node_types
        alone = store.manifest.compiled  # a trace that is opened without the store that it was compiled for
        self._with_rows = {*store.tables} - {*store.featureless} if alone is None else {*alone.tables}
        self._edge_tables = edge_tables(store)
        if edge_table is not None:
            args.known_name(edge_table, store.tables, "edge_table: the store has no table")
            if edge_table in nodes:
                raise ArgumentError(
                    f"edge_table: {edge_table!r} is a table of nodes, judging by its name; one of edges is "
                    f"called {EDGE_FEATURES!r}"
                )
            if len(nodes) != 1:
                raise ArgumentError(
                    f"edge_table= goes with one table of nodes; the store has {', '.join(map(repr, nodes))}"
                )
            self.edges = nodes[0], edge_table
        self._store, self.attached = store, list[str]()
        self.of_edges: set[str] = set()  # of these those of edges
        names = [attach] if isinstance(attach, str) else args.as_sequence(attach, "attach", "names of arrays")
        for name in names:
            args.known_name(name, store.manifest.arrays, "attach: the store has no array")
            rows = store.tables[nodes[0]].rows if len(nodes) == 1 else None
            shape = store.manifest.arrays[name].shape
            if not self._is_of_edges(store, name) and (rows is None or shape[:1] != [rows]):
                raise ArgumentError(
                    f"attach: array {name!r} has the shape {list(shape)}; what is attached has a value for "
                    f"each of {'one table of nodes' if rows is None else f'{rows:,} nodes'}, or for each edge"
                )
            self.attached.append(name)

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """What is attached, by name; in memory from the first time on."""
        return {name: self._store.arrays[name] for name in self.attached}

    def _is_of_edges(self, store: OpenStore, name: str) -> bool:
        """Whether an array has a value for each edge. Raises SourceError where nobody knows which."""
        graph = graph_of_array(store, name)
        if graph is None:
            return False
        if not graph.has_edge_ids:
            raise SourceError(
                f"attach: array {name!r} is of edges, and {graph.where()} does not keep their numbers: pack "
                "it with edge_ids=True (--edge-ids)"
            )
        self.of_edges.add(name)
        return True

    def wanted(
        self, batches: Sampler, nodes: Callable[[Any], Any] | None, recorded: bool,
        check: Callable[[], None] | None,
    ) -> WantedRows | None:  # fmt: skip
        """Mini-batches as pairs of the ids wanted by table, and the sample; None where they are as whoever
        reads their rows takes them."""
        attached = self._nodes if {*self.attached} - self.of_edges else ()
        if not recorded and self.edges is None and not attached:
            return None
        return WantedRows(batches, nodes, self.edges, recorded, check, attached)

    def recorded(self, batches: Sampler, nodes: Callable[[Any], Any] | None) -> WantedRows:
        """The same, which say whose rows they want wherever they are kept."""
        wanted = self.wanted(batches, nodes, True, None)
        assert wanted is not None
        return wanted

    def check_sampled(self, graph: StoredGraph) -> None:
        """Raise SourceError where the store samples from a graph whose edges do not number the rows of
        edges."""
        if self.edge_table is None:
            return
        rows = graph.store.tables[self.edge_table].rows
        numbered = graph.has_edge_ids
        if not numbered or rows != graph.edges:
            why = (
                f"has {graph.edges:,} edges, and the table {rows:,} rows"
                if numbered
                else "does not keep the numbers of its edges: pack it with edge_ids=True (--edge-ids)"
            )
            raise SourceError(f"edge_table={self.edge_table!r} is read by e_id, and {graph.where()} {why}")

    def check_compiled(self, tables: Container[str], sampled: bool) -> None:
        """Raise ArgumentError where what was compiled before has no rows of edges that are wanted now, or has
        some that are not; whoever brings mini-batches may have wanted these by name."""
        wanted = self.wanted_edge_tables
        for name in wanted:
            if name not in tables:
                raise ArgumentError(
                    f"what was compiled has no rows of edge_table={name!r}: leave it out, or compile anew"
                )
        others = [name for name in self._edge_tables if name in tables and name not in wanted]
        if sampled and others:
            raise ArgumentError(
                f"what was compiled has rows of edge_table={others[0]!r}: say so again, or compile anew"
            )

    @property
    def wanted_edge_tables(self) -> list[str]:
        """The tables of edges whose rows mini-batches have."""
        return [] if self.edge_table is None else [self.edge_table]

    @property
    def held_bytes(self) -> int:
        """Memory of the arrays."""
        entries = [self._store.manifest.arrays[name] for name in self.attached]
        return sum(math.prod(one.shape) * dtype_from_name(one.dtype).itemsize for one in entries)

    def batch(self, made: Any) -> Batch:
        """One mini-batch; PyG's objects bring their rows along."""
        batch = as_batch(made)
        if isinstance(batch.n_id, Mapping) and not isinstance(batch.x, Mapping):
            name = self._only_of(batch.n_id)
            if name in self._edge_tables and {*self.attached} - self.of_edges:
                raise _no_nodes([name])
            batch.n_id = batch.n_id[name]
        edges = self.edge_table
        if edges is not None and isinstance(batch.x, Mapping) and edges in batch.x:
            edge_attr, (batch.x,) = batch.x[edges], (r for name, r in batch.x.items() if name != edges)
            batch.edge_attr = edge_attr
            if isinstance(batch.n_id, Mapping):
                batch.n_id = next(ids for name, ids in batch.n_id.items() if name != edges)
        like = next(iter(batch.x.values()), None) if isinstance(batch.x, Mapping) else batch.x
        for name, array in self.arrays.items():
            ids = self._nodes_of(batch) if name not in self.of_edges else _edges_of(batch.sample, name)
            put_values(batch, name, values_of(array, ids, like, name, edges=name in self.of_edges))
        return batch

    def _only_of(self, ids: Mapping[str, Any]) -> str:
        """The table whose rows came alone: others have none, or there are no nodes of theirs."""
        found = [name for name in ids if name in self._with_rows]
        return max(found or ids, key=lambda name: len(ids[name]))

    def _nodes_of(self, batch: Batch) -> Any:
        """The ids of a mini-batch's nodes. Raises ArgumentError where it has none of the table of nodes."""
        if not isinstance(batch.n_id, Mapping):
            return batch.n_id
        found = next((ids for table, ids in batch.n_id.items() if table in self._nodes), None)
        if found is None:
            raise _no_nodes(batch.n_id)
        return found


def put_values(batch: Batch, name: str, values: Any) -> None:
    """Have values of nodes or edges by this name, in PyG's object, too. Raises ArgumentError."""
    if hasattr(batch, name):
        raise name_taken(name)
    setattr(batch, name, values)
    if of_pyg(batch.sample):
        setattr(batch.sample, name, values)


def name_taken(name: str) -> ArgumentError:
    return ArgumentError(f"attach: these mini-batches have {name!r} already; leave it out")


def _no_nodes(ids: Iterable[str]) -> ArgumentError:
    return ArgumentError(
        f"attach: these mini-batches have rows of {', '.join(map(repr, ids))}, and what is attached has "
        "values of nodes: leave it out"
    )


def _edges_of(sample: Any, name: str) -> Any:
    """The numbers of a mini-batch's edges. Raises SourceError."""
    found = field_of(sample, "e_id")
    if found is None:
        raise SourceError(
            f"attach: {name!r} is found by e_id, the numbers of edges, which these mini-batches do not have: "
            "leave it out"
        )
    return found


def values_of(array: NDArray[Any], ids: Any, like: Any, name: str, *, edges: bool = False) -> Any:
    """The values of nodes, or of ``edges``, by their numbers, as an array or, where their rows ``like`` are
    one, a tensor beside them. Raises SourceError for numbers that there are not."""
    numbers = np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(array):
        wrong = numbers[(numbers < 0) | (numbers >= len(array))]
        raise SourceError(
            f"attach: {name!r} has {len(array):,} values, by numbers of {'edges' if edges else 'nodes'}, and "
            f"{'an e_id' if edges else 'an n_id'} of these mini-batches is {int(wrong[0]):,}: leave it out, "
            f"or such {'edges' if edges else 'nodes'}"
        )
    values: Any = array[numbers]
    if like is None or isinstance(like, np.ndarray):
        return values
    from featstore.base.tensors import as_tensor, to_device

    return to_device(as_tensor(values), like.device)


def as_batch(made: Any) -> Batch:
    """What a loader of any mode has made, as one class."""
    if isinstance(made, Batch):
        if has_recorded_ids(made.sample):
            made.n_id, made.sample, made.told_ids = made.sample[RECORDED_IDS], made.sample["sample"], True
        return made
    if hasattr(made, "node_types"):
        kinds = [t for t in made.node_types if "n_id" in made[t]]
        rows = {t: made[t].x for t in kinds if "x" in made[t]}  # some types have no features
        return Batch(0, {t: made[t].n_id for t in kinds}, rows, made)
    return Batch(0, made.n_id, made.x, made)


def with_recorded_ids(sample: Any, ids: Any) -> Any:
    """A sample and the ids whose rows are wanted, where it does not know them."""
    return {RECORDED_IDS: ids, "sample": sample}


def _knows_ids(sample: Any, ids: Ids) -> bool:
    """Whether a sample has the ids whose rows are wanted, which ``nodes=`` may say, or who made a pair."""
    if isinstance(sample, Mapping):
        return is_named(sample)
    return of_pyg(sample) or same_nodes(getattr(sample, "node", None), ids)


def field_of(sample: Any, name: str) -> Any:
    """What a sampler's mini-batch, an object or a mapping, has under a name; None for nothing."""
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
