"""What PyG's loaders take of a store with edge types: seeds of a type, arrays of nodes, tables of edges."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np

from featstore.errors import FeatstoreWarning
from featstore.sampling.typed_store import TypedSeeds
from featstore.storage.edge_types import joined_name
from featstore.storage.store import OpenStore

#: What a node type of a mini-batch has by itself.
_TAKEN = ("x", "n_id", "num_nodes", "num_sampled_nodes", "batch_size", "batch", "input_id", "seed_time")


def typed_seeds(store: OpenStore, given: Any) -> TypedSeeds:
    """Seeds as PyG says them: a type, for all its nodes, or a pair of it and ids, a mask or the name of an
    array. Raises ArgumentError, UnknownNameError, IdError."""
    if isinstance(given, str) and given in store.node_types:
        given = (given, None)
    if isinstance(given, tuple) and len(given) == 2:
        torch = sys.modules.get("torch")
        kind, ids = given
        if torch is not None and isinstance(ids, torch.Tensor):
            ids = ids.cpu().numpy()
        if isinstance(ids, str) and f"{kind}.{ids}" in store.manifest.arrays:
            ids = f"{kind}.{ids}"  # PyG names a node type's attribute without the type
        given = (kind, np.asarray(ids) if isinstance(ids, list) else ids)
    return TypedSeeds.of(store, given)


def typed_attached(store: OpenStore, attach: Any) -> Any:
    """Names of the arrays that mini-batches have: all ``TYPE.NAME`` with a value for each node of the type,
    unless some are named; a warning for those that mini-batches have no place for."""
    if attach is not None:
        return attach
    found: list[str] = []
    wrong: list[str] = []
    for name, entry in store.manifest.arrays.items():
        kind, _, rest = name.partition(".")
        if kind in store.node_types and entry.shape[:1] == [store.tables[kind].rows]:
            (found if rest.isidentifier() and rest not in _TAKEN else wrong).append(name)
    if wrong:
        warnings.warn(
            f"mini-batches do not have {', '.join(wrong)}: the name means something else there; pack it "
            "under another one",
            FeatstoreWarning,
            stacklevel=3,
        )
    return found


def numbered(store: OpenStore) -> list[str]:
    """The tables of edges whose rows mini-batches have; a warning for those whose rows nobody could find."""
    there = {joined_name(edge_type) for edge_type in store.edge_types} & set(store.tables)
    found = [
        name for name in store.tables
        if name in there and store.graphs[name].has_edge_ids
        and store.graphs[name].edges == store.tables[name].rows
    ]  # fmt: skip
    missing = sorted(there - set(found))
    if missing:
        warnings.warn(
            f"mini-batches have no edge_attr of {', '.join(missing)}: the graph does not number the rows; "
            "pack it with edge_ids=True",
            FeatstoreWarning,
            stacklevel=3,
        )
    return found
