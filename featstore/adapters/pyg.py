"""PyG adapter: a store in place of the data of a ``NeighborLoader``, :class:`NeighborLoader`; or as PyTorch
Geometric's remote backend, for loaders of PyG's own.

These ask three objects, and each has its class here:

* :class:`FeatstoreSampler`, a ``BaseSampler``: which nodes and edges make a mini-batch. It wraps
  :class:`featstore.sampling.neighbors.NeighborSampler` and needs neither pyg-lib nor torch-sparse.
* :class:`FeatstoreFeatures`, a ``FeatureStore``: the rows of those nodes. ``NodeLoader`` calls
  ``multi_get_tensor`` once a mini-batch with all attributes, which becomes one ``reader.read`` with all
  tables.
* :class:`FeatstoreGraph`, a ``GraphStore``: the topology, for those who ask for it whole (``NodeLoader`` does
  not).

**Which batch is this?** ``NodeLoader`` tells its sampler the seeds, not the number of the mini-batch. A
fingerprint of the seeds takes its place, so that the same seeds in the same epoch give the same neighbours in
any worker. Call :meth:`FeatstoreSampler.set_epoch` before each epoch (featstore's loaders do): shuffled seeds
differ by themselves, fixed ones need it for fresh neighbours. The epoch lies in shared memory, so workers
that persist see it.

**Workers.** With fork, workers see the parent's arrays. With spawn, the topology is moved once into shared
memory and each worker maps it. Features are best read where the reader lives, in the main process: give
``NodeLoader`` the option ``filter_per_worker=False``, and all workers share one cache and one memory budget.
Without it each worker reads for itself and takes a budget of its own: a spawned one opens a reader when it
first needs one, a forked one shares what the static tier held at the fork.

**Edges.** PyG takes ``e_id`` for the number of an edge in the user's ``edge_index`` and picks data of edges
by it, while a sampler's edges are numbered as in the lists that it samples from. See
:mod:`featstore.adapters.edge_numbers`. Edge features in a store are not fetched: PyG asks a custom feature
store for rows of nodes only.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.adapters.indices import attribute_tensor, join, like_ids, row_ids, shaped
from featstore.adapters.pyg_links import LinkNeighborLoader
from featstore.adapters.pyg_loader import NeighborLoader
from featstore.adapters.pyg_sampler import FeatstoreSampler
from featstore.arguments import as_count, as_mapping, known_name, shown
from featstore.errors import ArgumentError, MissingPackageError, SourceError, UnknownNameError
from featstore.sampling.neighbors import graph_arrays
from featstore.storage.relations import feature_tables, is_edge_table

try:
    import torch
    from torch_geometric.data import FeatureStore, GraphStore
    from torch_geometric.data.feature_store import TensorAttr
    from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout
except ImportError as error:
    raise MissingPackageError(f"the PyG adapter needs {error.name}: pip install 'featstore[pyg]'") from error

__all__ = [
    "FeatstoreFeatures",
    "FeatstoreGraph",
    "FeatstoreSampler",
    "LinkNeighborLoader",
    "NeighborLoader",
    "RowAttr",
]

AttrKey = tuple[str | None, str]


class RowAttr(TensorAttr):  # type: ignore[misc]
    """A ``TensorAttr`` whose index may be a NumPy array: PyG's own compares it with ``!=``, which is then an
    array."""

    def is_set(self, key: str) -> bool:
        """Whether the field ``key`` has a value."""
        return getattr(self, key) is not getattr(TensorAttr, key)


def _tables_of(reader: Any) -> dict[str, Any]:
    """What a reader has to read, by name, with ``rows`` and ``row_shape``."""
    if reader is None:
        return {}
    if hasattr(reader, "table"):  # which of some columns is another than the store's
        return {name: reader.table(name) for name in reader.tables}
    return {name: reader.store.tables[name] for name in reader.tables}


def _of_nodes(reader: Any) -> list[str]:
    """The tables of a reader whose rows are features of nodes."""
    if reader is None:
        return []
    if hasattr(reader, "store"):
        known = feature_tables(reader.store)
        return [name for name in reader.tables if name in known]
    return [name for name in reader.tables if reader.table(name).of_nodes]


class FeatstoreFeatures(FeatureStore):  # type: ignore[misc]
    """Rows of a store, and small arrays in memory, as a PyG ``FeatureStore``. Read-only.

    ``reader``: a store's reader, a client of a :class:`featstore.SharedBuffer`, or None where all attributes
    are ``arrays``. ``tables``: which attribute is which table, ``{(group, attribute): table}`` with group
    None in homogeneous graphs; by default a table ``features`` is ``(None, "x")`` and any other table ``t``
    of nodes that have features is ``(t, "x")``. ``arrays``: further attributes held in memory and indexed
    there, such as ``{(None, "y"): labels}``, each [nodes, ...].

    PyG asks for all attributes by ids of nodes, in homogeneous graphs whatever their group. So SourceError is
    raised for attributes of one group with different numbers of rows, for those of edges without a group, and
    where the same ids are to be those of several groups.

    ``get_tensor`` and ``multi_get_tensor`` return torch tensors for torch ids and NumPy arrays for NumPy ids,
    in the order asked; an index can also be a slice, an int, a mask, or None (everything: that needs the
    memory). Raises KeyError for an unknown attribute, IdError for ids out of range, and what the reader
    raises.
    """

    def __init__(
        self,
        reader: Any,
        tables: Mapping[AttrKey, str] | None = None,
        arrays: Mapping[AttrKey, NDArray[Any] | torch.Tensor] | None = None,
    ) -> None:
        super().__init__(RowAttr)
        if reader is not None and not (
            hasattr(reader, "read") and (hasattr(reader, "store") or hasattr(reader, "table"))
        ):
            raise ArgumentError(
                f"reader must be a store's reader, a client of a shared buffer, or None, not {shown(reader)}"
            )
        for name, given in (("tables", tables), ("arrays", arrays)):
            for key in {} if given is None else as_mapping(given, name, "(group, attribute) to what it is"):
                if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[1], str):
                    raise ArgumentError(
                        f"{name}: an attribute is a pair (group or None, attribute), not {key!r}"
                    )
        known = _tables_of(reader)
        if tables is None:
            tables = {((None if name == "features" else name), "x"): name for name in _of_nodes(reader)}
        for name in tables.values():
            known_name(name, sorted(known), "the store has no table")
        both = set(tables) & set(arrays or {})
        if both:
            raise SourceError(
                f"attribute {sorted(both, key=str)[0]} is given as a table and as an array; keep one"
            )
        _check_attributes({**tables, **dict.fromkeys(arrays or {}, "")}, known)
        self.__dict__["_opened"] = reader
        self.__dict__["_pickled"] = b""
        self.__dict__["_tables"] = dict(tables)
        self.__dict__["_shapes"] = {
            name: (int(table.rows), *table.row_shape) for name, table in known.items()
        }
        self.__dict__["_arrays"] = {key: attribute_tensor(array) for key, array in (arrays or {}).items()}
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Raise SourceError where the attributes of a group are not of the same nodes."""
        first: dict[str | None, tuple[AttrKey, int]] = {}
        rows = {key: self._shapes[table][0] for key, table in self._tables.items()}
        for key, count in (rows | {key: len(array) for key, array in self._arrays.items()}).items():
            other, expected = first.setdefault(key[0], (key, count))
            if count != expected:
                raise SourceError(
                    f"attribute {key} has {count:,} rows, {other} has {expected:,}: both are of the "
                    "same nodes"
                )

    @property
    def _reader(self) -> Any:
        """The reader; in a spawned worker it is opened when it is first needed, which may be never."""
        if self._opened is None and self._pickled:
            self.__dict__["_opened"] = pickle.loads(self._pickled)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        pickled = self._pickled if self._opened is None else pickle.dumps(self._opened)
        return self.__dict__ | {"_opened": None, "_pickled": pickled}

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """One new attribute object for each attribute (new, because the loader writes ``index`` into
        them)."""
        return [RowAttr(group, name) for group, name in (*self._tables, *self._arrays)]

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Any]:
        """All attributes of one mini-batch with one request: ids of attributes that share a table are
        joined."""
        _check_groups(attrs)
        wanted: dict[str, list[Any]] = {}
        places: list[tuple[str, int] | None] = []
        for attr in attrs:
            table = self._tables.get(_key(attr))
            if table is None:
                places.append(None)
                continue
            parts = wanted.setdefault(table, [])
            same = [place for place, (index, _) in enumerate(parts) if index is attr.index]
            if not same:
                parts.append((attr.index, row_ids(attr.index, self._shapes[table][0])))
            places.append((table, same[0] if same else len(parts) - 1))
        rows = self._read({table: [ids for _, ids in parts] for table, parts in wanted.items()})
        return [
            self._from_array(attr) if place is None else shaped(rows[place[0]][place[1]], attr.index)
            for attr, place in zip(attrs, places)
        ]

    def _read(self, wanted: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Rows for each table's list of ids, by a single ``reader.read``."""
        if not wanted:
            return {}
        rows = self._reader.read({table: join(parts) for table, parts in wanted.items()})
        split: dict[str, list[Any]] = {}
        for table, parts in wanted.items():
            ends = np.cumsum([0, *map(len, parts)])
            split[table] = [
                like_ids(rows[table][low:high], ids) for low, high, ids in zip(ends, ends[1:], parts)
            ]
        return split

    def _from_array(self, attr: TensorAttr) -> Any:
        array = self._array(attr)
        ids = row_ids(attr.index, len(array))
        picked = array[torch.as_tensor(ids).to(array.device)]
        return shaped(like_ids(picked, ids), attr.index)

    def _array(self, attr: TensorAttr) -> torch.Tensor:
        if _key(attr) not in self._arrays:
            known = ", ".join(str(key) for key in (*self._tables, *self._arrays))
            raise UnknownNameError(f"the feature store has no attribute {_key(attr)}; it has {known}")
        array: torch.Tensor = self._arrays[_key(attr)]
        return array

    def _get_tensor(self, attr: TensorAttr) -> Any:
        return self._multi_get_tensor([attr])[0]

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        table = self._tables.get(_key(attr))
        shape = self._shapes[table] if table is not None else tuple(self._array(attr).shape)
        if attr.index is None:
            return shape
        if isinstance(attr.index, int | np.integer):
            return shape[1:]
        return len(row_ids(attr.index, shape[0])), *shape[1:]

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        raise SourceError(
            f"cannot write {_key(attr)}: a store is read-only; pack a new one with featstore.pack"
        )

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise SourceError(
            f"cannot remove {_key(attr)}: a store is read-only; pack a new one with featstore.pack"
        )


class FeatstoreGraph(GraphStore):  # type: ignore[misc]
    """CSC arrays in memory as a PyG ``GraphStore``, the partner of :class:`FeatstoreFeatures`. Read-only.

    ``indptr``: int64[n + 1], ``indices``: int32 or int64 [e], the sources of the edges into each node.
    ``edge_type``: None in a homogeneous graph, else PyG's (source, relation, target); ``source_nodes``: how
    many nodes the source's type has, where it is not that of the target, or PyG asks the feature store for
    it. Edges have no numbers but their positions in ``indices``: what a sampler of PyG's over it calls
    ``e_id`` is such a position. Raises SourceError, ArgumentError.
    """

    def __init__(
        self, indptr: NDArray[Any], indices: NDArray[Any], edge_type: tuple[str, str, str] | None = None,
        source_nodes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        indptr, indices = graph_arrays(indptr, indices)
        if edge_type is not None and (
            not isinstance(edge_type, tuple)
            or len(edge_type) != 3
            or not all(isinstance(one, str) for one in edge_type)
        ):
            raise ArgumentError(
                f"edge_type must be PyG's (source, relation, target) or None, not {shown(edge_type)}"
            )
        nodes = len(indptr) - 1
        source_nodes = None if source_nodes is None else as_count(source_nodes, "source_nodes", 0)
        if edge_type is None or edge_type[0] == edge_type[2]:
            if source_nodes not in (None, nodes):
                raise ArgumentError(
                    f"source_nodes={source_nodes}: the edges join nodes of one type, of which indptr has "
                    f"{nodes:,}; leave it out"
                )
            source_nodes = nodes
        self.__dict__.update(
            _indptr=indptr, _indices=indices, _edge_type=edge_type, _size=(source_nodes, nodes)
        )

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """The one edge type, in CSC layout."""
        return [EdgeAttr(self._edge_type, EdgeLayout.CSC, size=self._size)]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(row int64[e], colptr int64[n + 1]), copied; None for another edge type or layout."""
        if edge_attr.edge_type != self._edge_type or edge_attr.layout != EdgeLayout.CSC:
            return None
        return torch.from_numpy(self._indices.astype(np.int64)), torch.from_numpy(
            self._indptr.astype(np.int64)
        )

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        raise SourceError("cannot write edges: this graph store is read-only")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise SourceError("cannot remove edges: this graph store is read-only")


def _check_attributes(attributes: Mapping[AttrKey, str], tables: Mapping[str, Any]) -> None:
    """Raise SourceError for attributes of edges in a homogeneous graph: PyG would ask for them by ids of
    nodes."""
    for (group, name), table in attributes.items():
        if group is None and ("edge" in name or is_edge_table(table, tables)):
            raise SourceError(
                f"attribute {name!r} is of edges (table {table!r}), and PyG asks a feature store by "
                "ids of nodes only: leave it out, and read rows of edges from the store by their own "
                "ids"
            )


def _check_groups(attrs: list[TensorAttr]) -> None:
    """Raise SourceError where ids of one kind of nodes are asked of several, as PyG does in a homogeneous
    graph."""
    first = attrs[0].index if attrs else None
    groups = {attr.group_name for attr in attrs if isinstance(first, torch.Tensor) and attr.index is first}
    if len(groups) > 1:
        known = sorted(group for group in groups if group is not None)
        beside = "the nodes without a type and of " if None in groups else ""
        raise SourceError(
            f"rows of {beside}{known} were asked for by the same ids: in a homogeneous graph PyG asks for "
            f"all attributes; say with tables={{(None, attribute): table}} which are of this graph's "
            "nodes, or ask for each type with an index of its own"
        )


def _key(attr: TensorAttr) -> AttrKey:
    return attr.group_name, attr.attr_name
