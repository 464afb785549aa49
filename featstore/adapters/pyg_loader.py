"""PyG's ``NeighborLoader`` over a store: the same call with a store in place of the data, and neither pyg-lib
nor torch-sparse. Sampling, reading and what is held are those of :meth:`featstore.Store.loader`.

What PyG's loader can do and this one cannot is an error that says so. What has no meaning here (workers: the
loader samples and reads in threads of its own) is a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from featstore.adapters.pyg_types import (
    NO_TENSOR,
    canonical,
    numbered,
    typed_attached,
    typed_seeds,
    unwrapped,
    without_numbers,
)
from featstore.arguments import as_fanouts, as_flag, as_function, as_sequence, shown
from featstore.base.dtypes import dtype_from_name
from featstore.base.environment import MEMORY
from featstore.base.ids import plain_array
from featstore.base.process import OneProcess
from featstore.base.tensors import has_tensor, to_device
from featstore.base.threads import close_apart
from featstore.base.training_nodes import checked_train
from featstore.errors import ArgumentError, FeatstoreWarning, MissingPackageError, SourceError
from featstore.loaders.batch import Batch, device_of_rows
from featstore.loaders.loader import Loader
from featstore.loaders.report import LoaderReport
from featstore.sampling.minibatch import OF_LINKS
from featstore.storage.relations import graph_of, graph_of_array, is_edge_table, node_tables
from featstore.storage.store import OpenStore

try:
    import torch
    from torch_geometric.data import Data
except ImportError as error:
    raise MissingPackageError(f"the PyG adapter needs {error.name}: pip install 'featstore[pyg]'") from error

#: What PyG's loader takes and this one has one value of.
_ONLY = {"transform_sampler_output": None, "neighbor_sampler": None, "directed": True}
#: What this one is told by other names, or is given by itself.
_OWN = ("seeds", "fanouts", "seeds_in_order", "nodes", "edge_table", "tensors", "reuse")
#: What torch's loader takes, of which None is all that there is here.
_NONE = ("sampler", "batch_sampler", "collate_fn", "worker_init_fn", "generator", "dataset")
#: What torch's loader takes and has no effect here.
_WITHOUT_EFFECT = (
    "num_workers", "persistent_workers", "prefetch_factor", "pin_memory", "pin_memory_device",
    "multiprocessing_context", "filter_per_worker", "is_sorted", "timeout",
)  # fmt: skip


class NeighborLoader:
    """Mini-batches as PyG's ``torch_geometric.loader.NeighborLoader`` gives them, from a store.

    Each is a ``Data`` with ``x`` [m, row shape ...], ``edge_index`` int64 [2, k], ``n_id`` int64 [m] (the
    seeds first), ``batch_size``, ``input_id`` int64 [b] (places of the seeds in ``input_nodes``; of a mask,
    as in PyG, their ids), ``num_sampled_nodes`` and ``num_sampled_edges``, and the store's arrays that have a
    value for each node (``y``, ``train_mask`` ...), of its nodes; as in PyG, what has as many values as there
    are nodes is taken for theirs. An array whose name means something else in a ``Data`` is left out, with a
    warning. Where the graph keeps the numbers of its edges, there is ``e_id`` int64 [k], ``edge_attr``
    [k, row shape ...], the rows of the store's only table of edges, if it has one, and the arrays that have a
    value for each edge (``edge_weight``, ``edge_time`` ...), of its edges; what of edges mini-batches cannot
    have, a warning says.

    ``replace``, ``disjoint``, ``subgraph_type``, ``weight_attr``, ``time_attr``, ``temporal_strategy`` and
    ``input_time`` are PyG's; ``weight_attr`` and ``time_attr`` are ``"weights"`` and ``"times"`` for those
    that the graph keeps, or names of arrays in the store; of such of edges the graph is held in memory. With
    disjoint subgraphs there is ``batch`` int64 [m], with times ``seed_time`` int64
    [b].

    Of a store with edge types each is a ``HeteroData`` with all of this by type: arrays of nodes are those
    called ``TYPE.NAME``, and ``edge_attr`` is of every edge type whose table and numbers the store has. With
    ``subgraph_type="bidirectional"`` an edge type that another one leads back has no ``e_id``, nor anything
    of edges, as in PyG: edges that the other one brought have no number.

    Args:
        data: an open store with one table of nodes and a graph, or with edge types.
        num_neighbors: neighbours per node and hop, -1 for all; with edge types also a mapping of these.
        input_nodes: seeds: node ids or a mask (tensor, array or list), the name of an array in the store, or
            PyG's pair of None and one of these; None for all nodes. With edge types a pair of a node type and
            one of these (or None), or the type alone for all its nodes.
        transform: is called with each ``Data``, and gives what the loop gets.
        batch_size, shuffle, drop_last: as of torch's ``DataLoader``.
        attach: names of the arrays that mini-batches have, and that are held in ``memory``; by default all
            that have a value for each node or for each edge.
        memory: budget of all of this, see :class:`featstore.loaders.options.LoaderOptions`.
        options: further ones of :meth:`featstore.Store.loader` (``mode=``, ``seed=``, ``rank=`` ...); and
            those of PyG's and torch's loaders.

    Each iteration is an epoch. Under ``torchrun`` each rank has its share of the seeds, all as many. It holds
    threads and memory until :meth:`close`, or until it is collected; a context manager. ``loader`` is the
    store's loader: its ``report()``, ``state_dict()``.

    Raises ArgumentError, SourceError for what PyG's loader can do and this one cannot; what
    :meth:`featstore.Store.loader` raises.
    """

    loader: Loader
    #: As of PyG's loaders: threads of the store's own sample and read.
    num_workers = 0
    __reduce__ = OneProcess.__reduce__
    called = "the loader"

    def __init__(
        self, data: OpenStore, num_neighbors: Sequence[int] | Mapping[Any, Sequence[int]],
        input_nodes: Any = None, *,
        transform: Callable[[Data], Any] | None = None, batch_size: int = 1,
        shuffle: bool | None = False, drop_last: bool | None = False,
        attach: str | Sequence[str] | None = None, memory: int | str = MEMORY, **options: Any,
    ) -> None:  # fmt: skip
        if not isinstance(data, OpenStore):
            raise ArgumentError(f"data must be an open store, featstore.open(path), not {shown(data)}")
        self._transform = None if transform is None else as_function(transform, "transform")
        for name in _OWN:
            if name in options:
                raise ArgumentError(f"NeighborLoader has no option {name!r}: that is of store.loader")
        refuse(options)
        warn_of(options)
        if options.get("mode") == "partitions" and not shuffle:
            raise ArgumentError(
                "mode='partitions' brings those seeds together whose partitions do, in a random order: say "
                "shuffle=True"
            )
        num_neighbors = unwrapped(num_neighbors, data.edge_types)
        fanouts: Any = num_neighbors
        edges: Any
        self._type: str | None = None  # of the seeds, where there are several
        self._unnumbered: list[Any] = []  # edge types whose edges have no numbers
        if data.edge_types and options.get("graph") is None:
            seeds = typed_seeds(data, input_nodes)
            self._type, self._seeds, masked = seeds.node_type, seeds.ids, seeds.masked
            fanouts = canonical(fanouts)
            self._unnumbered = without_numbers(data, options.get("subgraph_type"), options.get("mode"))
            table = data.tables[seeds.node_type]
            names, edges = (
                typed_attached(data, attach, self._unnumbered), numbered(data, self._unnumbered),
            )  # fmt: skip
            given: Any = (seeds.node_type, seeds.ids)
        else:
            if isinstance(num_neighbors, Mapping):
                raise SourceError("num_neighbors by edge type is of a store with edge types; this has none")
            table = graph_of(data, options.get("graph")).table
            self._seeds, masked = seeds_of(data, input_nodes, table.rows)
            given = self._seeds
            names, fanouts = attached(data, table.rows, attach, options), as_fanouts(num_neighbors)
            edges = edge_table_of(data, options.get("graph"), options.get("mode"))
        self.batch_size = batch_size
        self._order = np.argsort(self._seeds, kind="stable")
        self._input_ids = self._seeds if masked else None  # what PyG calls seeds of a mask by
        self._times = _times(data, options, table.rows, self._type, self._seeds)
        self.loader = Loader(
            data, seeds=given, fanouts=fanouts, batch_size=batch_size,
            drop_last=as_flag(drop_last or False, "drop_last"),
            seeds_in_order=not as_flag(shuffle or False, "shuffle"),
            attach=names, memory=memory, tensors=True, edge_table=edges, **options,
        )  # fmt: skip

    @property
    def dataset(self) -> Sequence[int]:
        """The numbers of all seeds, as of PyG's loaders."""
        return range(len(self._seeds))

    def __call__(self, index: Any) -> NoReturn:
        raise no_call(index)

    def __len__(self) -> int:
        """Mini-batches of an epoch, this rank's."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            made = batch.pyg()
            ids = batch.n_id if self._type is None else batch.n_id[self._type]
            seeds = np.asarray(ids[: batch.batch_size])
            places = getattr(batch.sample, "input_id", None)
            if places is None:  # each stands once, and is known by its id
                places = np.searchsorted(self._seeds, seeds, sorter=self._order)
                places = self._order[np.minimum(places, len(self._order) - 1)]
            if not np.array_equal(self._seeds[places], seeds):
                raise SourceError("a mini-batch has seeds that are none of input_nodes")
            to, device = made if self._type is None else made[self._type], device_of_rows(batch)
            input_id = places if self._input_ids is None else self._input_ids[places]
            to.input_id = to_device(torch.from_numpy(input_id), device)
            for edge_type in self._unnumbered:
                made[edge_type].pop("e_id", None)
            if self._times is not None:
                to.seed_time = to_device(torch.from_numpy(self._times[places].astype(np.int64)), device)
            del batch
            yield made if self._transform is None else self._transform(made)
            del made

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch."""
        self.loader.set_epoch(epoch)

    def report(self) -> LoaderReport:
        """What has been read, and how long it took."""
        return self.loader.report()

    def close(self) -> None:
        """Give everything back. May be called more than once."""
        if hasattr(self, "loader"):
            self.loader.close()

    def __enter__(self) -> NeighborLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        close_apart(self.close)

    def __repr__(self) -> str:
        return f"NeighborLoader({self.loader!r})"


def no_call(index: Any) -> SourceError:
    """What a call of a loader is answered with."""
    return SourceError(
        f"loader({shown(index)}) makes a mini-batch of seeds by number, which a store's loader cannot: "
        "make one with these seeds, and iterate over it"
    )


def seeds_of(store: OpenStore, given: Any, nodes: int) -> tuple[NDArray[np.int64], bool]:
    """(node ids, in the order given; those of a mask ascend; whether it was one)."""
    if isinstance(given, tuple) and len(given) == 2 and (given[0] is None or isinstance(given[0], str)):
        kind, given = given
        if kind is not None and kind not in node_tables(store.tables):
            raise SourceError(f"input_nodes of type {kind!r}: the store has no types of edges; give the ids")
    if given is None:
        return np.arange(nodes), False
    if isinstance(given, str):
        given = store.arrays[given]
    found = plain_array(given.cpu() if isinstance(given, torch.Tensor) else given, "input_nodes")
    if found.dtype == bool:
        if found.shape != (nodes,):
            raise ArgumentError(
                f"input_nodes: a mask has a value for each of {nodes:,} nodes, not {found.shape}"
            )
        return np.flatnonzero(found), True
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ArgumentError(f"input_nodes must be node ids or a mask, not {shown(given)}")
    return found.astype(np.int64), False


def refuse(options: dict[str, Any]) -> None:
    """Take what has one value here out of the options. Raises SourceError for another, ArgumentError for what
    is said otherwise here."""
    for name, only in _ONLY.items():
        given = options.pop(name, only)
        given = getattr(given, "value", given)  # of an enumeration
        if given is not only and not (isinstance(given, bool | str) and given == only):
            raise SourceError(
                f"{name}={shown(given)}: a store's loader samples by itself, as with {name}={only!r}; "
                "leave it out"
            )
    for name in _NONE:
        if options.pop(name, None) is not None:
            raise SourceError(
                f"{name}= is of torch's DataLoader, and a store's loader draws by itself; leave it out"
            )


def warn_of(options: dict[str, Any]) -> None:
    """Take what has no effect out of the options, and say so."""
    named = [name for name in _WITHOUT_EFFECT if options.pop(name, None)]
    if named:
        warnings.warn(
            f"{', '.join(named)}: no effect, the loader samples and reads in threads of its own; leave it "
            "out",
            FeatstoreWarning,
            stacklevel=3,
        )


def edge_table_of(store: OpenStore, graph: str | None, mode: str | None) -> str | None:
    """The table whose rows are ``edge_attr``: the only one of edges, where the graph's edges number its rows;
    a warning where there are such tables and none can be had."""
    edges = [name for name in store.tables if is_edge_table(name, store.tables)]
    found = graph_of(store, graph)
    rows = store.tables[edges[0]].rows if edges else 0
    numbered = found.has_edge_ids
    parts = mode == "partitions" and store.on_disk is not store
    if len(edges) == 1 and numbered and rows == found.edges and not parts:
        return edges[0]
    if edges:
        why = (
            f"{', '.join(map(repr, edges))} all have rows of edges"
            if len(edges) > 1
            else f"table {edges[0]!r} has rows of edges, whose numbers the stored graph does not know"
            if not numbered
            else "lists of one host, of which mode 'partitions' samples, have no numbers of edges"
            if parts
            else f"table {edges[0]!r} has {rows:,} rows, the graph {found.edges:,} edges"
        )
        warnings.warn(f"mini-batches have no edge_attr: {why}", FeatstoreWarning, stacklevel=3)
    return None


def attached(store: OpenStore, nodes: int, attach: Any, options: Mapping[str, Any]) -> Any:
    """Names of the arrays that mini-batches have. Raises ArgumentError."""
    names = _of_all(store, nodes, options) if attach is None else attach
    names = [names] if isinstance(names, str) else as_sequence(names, "attach", "names of arrays")
    for name in names:
        known = isinstance(name, str) and name in store.manifest.arrays
        if _means_else(name, of_edges=known and graph_of_array(store, name) is not None):
            raise ArgumentError(f"attach: {name!r} means something else in PyG's Data; leave it out")
    return names


def _times(store: OpenStore, options: dict[str, Any], nodes: int, kind: str | None, seeds: Any) -> Any:
    """The times of all seeds, in their order; None for none."""
    if options.get("time_attr") is None:
        return None
    given = options.get("input_time")
    if given is not None:
        given = given.cpu() if isinstance(given, torch.Tensor) else given
        options["input_time"] = given = plain_array(given, "input_time")
        return given
    name = options["time_attr"] if kind is None else f"{kind}.{options['time_attr']}"
    entry = store.manifest.arrays.get(name) if isinstance(name, str) else None
    if entry is None or entry.shape != [nodes]:
        return None
    return store.arrays[name][checked_train(seeds, nodes, repeated=True)]


def _of_all(store: OpenStore, nodes: int, options: Mapping[str, Any]) -> list[str]:
    """Names of the arrays that have a value for each node, or for each edge; a warning for those that a
    ``Data`` has no place for, and for those of edges without numbers."""
    arrays = store.manifest.arrays
    of_edges = {name: graph for name in arrays if (graph := graph_of_array(store, name)) is not None}
    found = [name for name, entry in arrays.items() if name in of_edges or entry.shape[:1] == [nodes]]
    text = [name for name in found if not has_tensor(dtype_from_name(arrays[name].dtype))]
    if text:
        message = f"mini-batches do not have {', '.join(text)}: {NO_TENSOR}"
        warnings.warn(message, FeatstoreWarning, stacklevel=4)
        found = [name for name in found if name not in text]
    wrong = [name for name in found if _means_else(name, of_edges=name in of_edges)]
    if wrong:
        warnings.warn(
            f"mini-batches do not have {', '.join(wrong)}: the name means something else in PyG's Data; pack "
            "it under another one",
            FeatstoreWarning,
            stacklevel=4,
        )
    parts = options.get("mode") == "partitions" and store.on_disk is not store
    lost = [
        name for name, graph in of_edges.items()
        if name in found and name not in wrong and (parts or not getattr(graph, "has_edge_ids", False))
    ]  # fmt: skip
    if lost:
        warnings.warn(
            f"mini-batches do not have {', '.join(lost)}: values of edges, whose numbers the graph does not "
            "know; pack it with edge_ids=True",
            FeatstoreWarning,
            stacklevel=4,
        )
    return [name for name in found if name not in (*wrong, *lost)]


#: Names that PyG gives to what is of each node.
_OF_NODES = ("y", "pos", "time", "z")
#: Names of what a mini-batch has beside what :class:`Data` and :class:`Batch` call so.
_TAKEN = ("n_id", "e_id", "input_id", "input_type", "batch", "ptr", "adj", "adj_t", "index", "sample")


def _means_else(name: Any, of_edges: bool = False) -> bool:
    """Whether what is called so is no value of each node, or of each edge, in a mini-batch of PyG's."""
    if not isinstance(name, str) or (name == "edge_weight" if of_edges else name in _OF_NODES):
        return False
    taken = name in (*_TAKEN, *OF_LINKS) or name.startswith(("num_", "_"))
    taken = taken or (name.startswith("edge_") and not of_edges)
    return taken or hasattr(Data, name) or hasattr(Batch, name)
