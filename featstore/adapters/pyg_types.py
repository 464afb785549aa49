"""What PyG's loaders take of a store with edge types: seeds of a type, arrays of nodes, tables of edges."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from featstore.arguments import shown
from featstore.errors import ArgumentError, BudgetError, FeatstoreWarning
from featstore.loaders.shares import MemoryShares
from featstore.reader.graphs import read_links
from featstore.sampling.disk_sampler import DiskSampler
from featstore.sampling.link_batches import LinkBatches
from featstore.sampling.links import LinkSampler, Negatives
from featstore.sampling.minibatch import OF_LINKS
from featstore.sampling.typed_options import TypedOptions
from featstore.sampling.typed_store import TypedInMemory, TypedSeeds, typed_bytes
from featstore.sampling.typed_stored import TypedStoredSampler
from featstore.storage.edge_types import EdgeType, joined_name
from featstore.storage.store import OpenStore, StoredGraph

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
) -> tuple[LinkBatches, EdgeType, MemoryShares]:  # fmt: skip
    """Mini-batches around links of an edge type, which ``given`` is, or a pair of it and the links (None for
    all edges, by their numbers where the graph keeps these); that type; and the shares of memory. Raises
    ArgumentError, BudgetError, UnknownNameError."""
    if isinstance(given, tuple) and len(given) == 3:
        given = (given, None)
    if not (isinstance(given, tuple) and len(given) == 2 and given[0] in store.edge_types):
        known = ", ".join(map(repr, store.edge_types))
        raise ArgumentError(
            f"edge_label_index is an edge type of the store, or a pair of one and links, not {shown(given)}; "
            f"it has {known}"
        )
    link_type, ends = given
    if hasattr(ends, "cpu"):
        ends = ends.cpu().numpy()
    options = TypedOptions(store, said, seeds_have_times=True)
    from_disk = options.from_disk()

    def on_disk(memory: int) -> TypedStoredSampler:
        return TypedStoredSampler(store, link_type[0], fanouts, memory=memory, seed=seed, options=from_disk)

    sampler, ends, shares = link_sampler(
        store.graphs[joined_name(link_type)], ends, memory_bytes, typed_bytes(store) + options.needed_bytes,
        lambda: TypedInMemory(store, link_type[0], fanouts, seed, options=options.read()), on_disk,
    )  # fmt: skip
    around = LinkSampler(sampler, link_type=link_type, negatives=negatives)
    return LinkBatches(around, ends, **links), link_type, shares


def link_sampler(
    graph: StoredGraph, ends: Any, memory_bytes: int, whole_bytes: int, in_memory: Callable[[], Any],
    on_disk: Callable[[int], DiskSampler],
) -> tuple[Any, Any, MemoryShares]:  # fmt: skip
    """What samples around links: over graphs in memory, which take ``whole_bytes``, where these fit a
    sampler's share, else from disk within that; the links, all edges of ``graph`` for None; and the shares of
    what memory these leave. Raises BudgetError."""
    links_bytes = 16 * graph.edges if ends is None else 0
    if links_bytes >= memory_bytes:
        what = f"hold all edges of {graph.where()} as links (or give some as edge_label_index)"
        raise BudgetError(links_bytes + 1, memory_bytes, what)
    shares = MemoryShares(memory_bytes - links_bytes, graph_bytes=whole_bytes, beside_bytes=links_bytes)
    if whole_bytes > shares.sampler_bytes:
        shares = replace(shares, least_bytes=_least_bytes(on_disk))
    with shares.told_of_all():
        fits = whole_bytes <= shares.sampler_bytes
        sampler = in_memory() if fits else on_disk(shares.sampler_bytes)
    try:
        return sampler, read_links(graph) if ends is None else ends, shares
    except BaseException:
        if isinstance(sampler, DiskSampler):
            sampler.close()
        raise


def _least_bytes(on_disk: Callable[[int], DiskSampler]) -> int:
    """Without which there is no sampler from disk."""
    try:
        on_disk(1).close()
    except BudgetError as error:
        return error.needed_bytes
    return 0


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
