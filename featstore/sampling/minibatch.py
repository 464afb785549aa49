"""What a mini-batch is made of: its node ids by type, and the graph sample. Any sampler's mini-batches,
looked at from outside.

The rules, the first that fits:

1. ``nodes=`` was given: the ids are what it returns for the mini-batch, the sample is the mini-batch.
2. An array or tensor: these are the ids, and there is no sample.
3. What DGL's data loaders give, input nodes first and blocks last: the ids are the input nodes, the sample
   is a mapping of the parts by DGL's names (:func:`featstore.sampling.dgl_graphs.named`).
4. A pair whose first is an array, a tensor or a mapping of them: ids and sample. A sample of None is none.
5. A mapping with ``n_id`` or ``input_nodes``: the ids are there, the sample is the mapping. Another mapping
   of arrays: ids by node type, and no sample.
6. PyG's ``HeteroData``: each node type's ``n_id``; the sample is the object.
7. An object with ``n_id`` (PyG's ``Data``), ``node`` (our
   :class:`~featstore.sampling.neighbors.SampledSubgraph`) or ``input_nodes``: the ids are there, the sample
   is the object.

Ids without a type have the type ``""``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.ids import plain_array
from featstore.base.modules import loaded
from featstore.errors import ArgumentError, SourceError
from featstore.sampling import dgl_graphs

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

_KEYS = ("n_id", "input_nodes")
_ATTRIBUTES = ("n_id", "node", "input_nodes")
_ID_MAX = 2**63 - 1

#: What a mini-batch around links has beside others, by PyG's names.
OF_LINKS = (
    "input_id", "edge_label_index", "edge_label", "edge_label_time", "src_index", "dst_pos_index",
    "dst_neg_index", "seed_time",
)  # fmt: skip

Ids = dict[str, NDArray[Any]]


def split(batch: Any, nodes: Callable[[Any], Any] | None = None) -> tuple[Ids, Any]:
    """(node ids by type, sample) of a mini-batch; see the module's text. Raises SourceError."""
    ids, sample = _found(batch, nodes)
    by_type = dict(ids) if isinstance(ids, Mapping) else {"": ids}
    for name in by_type:
        if type(name) is not str or not name.isprintable():
            raise SourceError(f"node types are printable text, not {name!r}")
    _check_edges(batch, by_type)
    return {name: _checked(one, name) for name, one in by_type.items()}, sample


def table_of(store: OpenStore, node_type: str, who: str) -> str:
    """The table of a node type: that of its name; where there is no type, the only table that is no edge
    table (see :mod:`featstore.storage.relations`). Raises SourceError, in which ``who`` is said."""
    if node_type in store.tables:
        return node_type
    known = ", ".join(map(repr, store.tables))
    if node_type:
        raise SourceError(f"{who} node type {node_type!r}; the store's tables are {known}")
    nodes = store.node_types
    if len(nodes) == 1:
        return nodes[0]
    what = "several tables of nodes" if nodes else "tables of edges alone"
    raise SourceError(
        f"{who} node ids without a type, and the store has {what}: {known}; say which with nodes=, a "
        f"function from a mini-batch to {{table: ids}}"
    )


def _found(batch: Any, nodes: Callable[[Any], Any] | None) -> tuple[Any, Any]:
    if nodes is not None:
        return nodes(batch), batch
    if _is_ids(batch):
        return batch, None
    dgls = dgl_graphs.named(batch)
    if dgls is not None:
        return dgls["input_nodes"], dgls
    if isinstance(batch, tuple | list) and len(batch) == 2 and (_is_ids(batch[0]) or _is_typed(batch[0])):
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        for key in _KEYS:
            if key in batch:
                return batch[key], batch
        if _is_typed(batch):
            return batch, None
    pyg = loaded("torch_geometric.data", "HeteroData")
    if pyg is not None and isinstance(batch, pyg.HeteroData):
        return _hetero_ids(batch), batch
    for name in _ATTRIBUTES:
        if not isinstance(batch, Mapping | tuple | list) and getattr(batch, name, None) is not None:
            return getattr(batch, name), batch
    raise SourceError(
        f"no node ids were found in a {type(batch).__name__}: pass nodes=, a function from the "
        f"mini-batch to its node ids or to {{node type: ids}}, or record pairs (node ids, sample)"
    )


def _check_edges(batch: Any, by_type: dict[str, Any]) -> None:
    """Raise SourceError for a sampled mini-batch that has lost its edges, and for rows asked for by a
    sampler's own edge numbers."""
    pyg = loaded("torch_geometric.data", "HeteroData")
    sampled = pyg is not None and isinstance(batch, pyg.Data) and "num_sampled_edges" in batch
    if sampled and "edge_index" not in batch and "adj_t" not in batch:
        raise SourceError(
            "this mini-batch was sampled and has no edge_index, because the Data that the loader was "
            "made with has none: give that Data one, which may be empty (data.edge_index = "
            "torch.empty((2, 0), dtype=torch.long)); the sampled edges take its place"
        )
    edge_id = getattr(batch, "edge_id", None)
    name = next((name for name, one in by_type.items() if edge_id is not None and one is edge_id), None)
    if name is not None:
        raise SourceError(
            f"rows of {name!r} are asked for by edge_id, which counts edges in the sampler's own "
            "order: rows of other edges would come out. Give e_id, the user's own numbers, which the "
            "samplers of a store have that was packed with edge_ids=True; or index an array of your own "
            "with it that has your number of each edge in the sampler's indices"
        )


def _is_ids(value: Any) -> bool:
    torch = loaded("torch", "Tensor")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _is_typed(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0 and all(map(_is_ids, value.values()))


def _hetero_ids(batch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, store in zip(batch.node_types, batch.node_stores, strict=True):
        if "n_id" in store:
            found[name] = store["n_id"]
        elif len(store) and store.num_nodes:
            raise SourceError(
                f"node type {name!r} of this HeteroData has {store.num_nodes} nodes and no n_id: take "
                "a loader that keeps n_id, or pass nodes="
            )
        else:
            found[name] = np.empty(0, np.int64)
    return found


def _checked(ids: Any, name: str) -> NDArray[Any]:
    """Ids as an array of integers; a tensor's without a copy where that is possible."""
    what = f"node ids of type {name!r}" if name else "node ids"
    try:
        array = plain_array(ids.detach().cpu() if hasattr(ids, "detach") else ids, what)
    except ArgumentError as error:
        raise SourceError(str(error)) from None
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.dtype} {list(array.shape)}"
        raise SourceError(
            f"{what} must be integers in one dimension, not {found}; pass nodes= to say where they are"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > _ID_MAX:
        raise SourceError(f"{what} must be from 0 to 2**63 - 1, but go from {low} to {high}")
    return array
