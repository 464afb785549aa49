"""What PyG's loaders take of a store with edge types: seeds of a type, arrays of nodes, tables of edges."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.errors import ArgumentError, BudgetError, FeatstoreWarning
from featstore.sampling.link_batches import LinkBatches
from featstore.sampling.links import LinkSampler, Negatives
from featstore.sampling.minibatch import OF_LINKS
from featstore.sampling.typed_options import TypedOptions
from featstore.sampling.typed_store import TypedInMemory, TypedSeeds, typed_bytes
from featstore.storage.edge_types import EdgeType, joined_name
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


def typed_link_batches(
    store: OpenStore, given: Any, fanouts: Any, said: Mapping[str, Any], memory_bytes: int, seed: int, *,
    negatives: Negatives | None, **links: Any,
) -> tuple[LinkBatches, EdgeType, int]:  # fmt: skip
    """Mini-batches around links of an edge type, which ``given`` is, or a pair of it and the links (None for
    all edges, by their numbers where the graph keeps these); that type; and what the graphs in memory take.
    Raises ArgumentError, BudgetError, UnknownNameError."""
    if isinstance(given, tuple) and len(given) == 3:
        given = (given, None)
    if not (isinstance(given, tuple) and len(given) == 2 and given[0] in store.edge_types):
        known = ", ".join(map(repr, store.edge_types))
        raise ArgumentError(
            f"edge_label_index is an edge type of the store, or a pair of one and links, not {shown(given)}; "
            f"it has {known}"
        )
    link_type, ends = given
    options = TypedOptions(store, said, seeds_have_times=True)
    needed = typed_bytes(store) + options.needed_bytes
    if needed >= memory_bytes:
        raise BudgetError(needed + 1, memory_bytes, "hold the graphs, which links are sampled from")
    held = TypedInMemory(store, link_type[0], fanouts, seed, options=options.read())
    sampler = LinkSampler(held.sampler, link_type=link_type, negatives=negatives)
    if ends is None:
        ends = edges_of(*held.sampler.graphs[link_type], held.sampler.edge_ids.get(link_type))
    elif hasattr(ends, "cpu"):
        ends = ends.cpu().numpy()
    return LinkBatches(sampler, ends, **links), link_type, needed


def edges_of(
    indptr: NDArray[np.int64], indices: NDArray[Any], edge_ids: NDArray[Any] | None
) -> NDArray[np.int64]:
    """int64 [2, edges]: all edges of a CSC graph, sources above targets, by their numbers where it has
    these."""
    links = np.empty((2, len(indices)), np.int64)
    places = slice(None) if edge_ids is None else edge_ids
    links[0, places] = indices
    links[1, places] = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return links


def put_links(data: Any, sample: Any, link_type: EdgeType) -> None:
    """Put what a mini-batch has of its links to where PyG's ``HeteroData`` have it."""
    import torch

    ends = {"src_index": [link_type[0]], "dst_pos_index": [link_type[2]], "dst_neg_index": [link_type[2]]}
    ends["seed_time"] = list(dict.fromkeys((link_type[0], link_type[2])))
    for name in OF_LINKS:
        if sample.get(name) is not None:
            for key in ends.get(name, [link_type]):
                data[key][name] = torch.as_tensor(sample[name])


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
