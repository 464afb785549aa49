"""What PyG's loaders take of a store with edge types: seeds of a type, arrays of nodes, tables of edges."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from featstore.adapters.links_over_hosts import links_of_hosts
from featstore.arguments import as_sequence, shown
from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import is_tensor
from featstore.errors import ArgumentError, BudgetError, FeatstoreWarning, SourceError
from featstore.hosts.split_store import WholeStore
from featstore.hosts.typed_sampler import TypedHostsSampler
from featstore.loaders.batch import Batch, device_of_rows
from featstore.loaders.samplers import least_on_disk, sampler_over_hosts, typed_on_disk
from featstore.loaders.shares import MemoryShares
from featstore.reader.graphs import read_links
from featstore.sampling.disk_sampler import DiskSampler
from featstore.sampling.link_batches import LinkBatches
from featstore.sampling.links import LinkSampler, Negatives
from featstore.sampling.minibatch import OF_LINKS
from featstore.sampling.reverse import reverses
from featstore.sampling.typed_options import TypedOptions
from featstore.sampling.typed_store import TypedInMemory, TypedSeeds, typed_bytes
from featstore.storage.edge_types import EdgeType, joined_name
from featstore.storage.relations import graph_of_array, type_of_array
from featstore.storage.store import OpenStore, StoredGraph

NO_TENSOR = "torch has no tensors of their dtype; attach=[...] says which you want, and ends this warning"
_LINK_BYTES = 48  # of all edges as links: the two ends, their order, and what shuffling takes
#: What an edge type of a mini-batch has by itself.
_OF_EDGES = ("edge_index", "edge_attr", "e_id", "num_sampled_edges", "adj_t", *OF_LINKS, "x", "n_id")
#: What a node type of a mini-batch has by itself.
_TAKEN = (
    "x", "n_id", "num_nodes", "num_sampled_nodes", "batch_size", "batch", "input_id", "seed_time",
    "edge_index", "edge_attr", "e_id",
)  # fmt: skip


def typed_seeds(store: OpenStore, given: Any) -> TypedSeeds:
    """Seeds as PyG says them: a type, for all its nodes, or a pair of it and ids, a mask or the name of an
    array. Raises ArgumentError, UnknownNameError, IdError."""
    if isinstance(given, str) and given in store.node_types:
        given = (given, None)
    if isinstance(given, tuple) and len(given) == 2:
        kind, ids = given
        if is_tensor(ids):
            ids = ids.cpu().numpy()
        if isinstance(ids, str) and f"{kind}.{ids}" in store.manifest.arrays:
            ids = f"{kind}.{ids}"  # PyG names a node type's attribute without the type
        given = (kind, np.asarray(ids) if isinstance(ids, list) else ids)
    return TypedSeeds.of(store, given, repeated=True)


def unwrapped(given: Any, edge_types: Sequence[EdgeType]) -> Any:
    """Numbers of neighbours as a sequence, or by edge type, out of PyG's ``NumNeighbors``."""
    if type(given).__name__ != "NumNeighbors":
        return given
    if not isinstance(given.values, Mapping):
        return list(given.values)
    default = {} if given.default is None else dict.fromkeys(edge_types, given.default)
    return default | {key.to_tuple(): one for key, one in given.values.items()}


def canonical(given: Any) -> Any:
    """Numbers of neighbours whose edge types may be pairs of node types, as PyG takes them."""
    if not isinstance(given, Mapping):
        return given
    return {
        (key[0], "to", key[1]) if isinstance(key, tuple) and len(key) == 2 else key: one
        for key, one in given.items()
    }


def without_numbers(store: OpenStore, subgraph: Any, mode: str | None = None) -> list[EdgeType]:
    """The edge types whose mini-batches have edges without a number: those that another one leads back; in
    mode partitions where rows are on several hosts all."""
    if mode == "partitions" and store.on_disk is not store:
        return list(store.edge_types)
    if getattr(subgraph, "value", subgraph) != "bidirectional":
        return []
    return [of for of, back in reverses(store.edge_types).items() if back != of]


def typed_attached(store: OpenStore, attach: Any, unnumbered: Sequence[EdgeType]) -> Any:
    """Names of the arrays that mini-batches have: all ``TYPE.NAME`` with a value for each node or edge of the
    type, unless some are named; a warning for those that mini-batches have no place for, or whose edges have
    no numbers."""
    if attach is not None:
        return _given_names(store, attach)
    from featstore.base.tensors import has_tensor

    found: list[str] = []
    wrong: list[str] = []
    lost: list[str] = []
    no_tensor: list[str] = []
    for name, entry in store.manifest.arrays.items():
        if not has_tensor(dtype_from_name(entry.dtype)):
            no_tensor.append(name)
            continue
        kind, rest = type_of_array(store, name)
        graph = graph_of_array(store, name)
        if graph is not None:
            known = graph.has_edge_ids
            numbers = known and graph.edge_type not in unnumbered
            fits = rest.isidentifier() and rest not in _OF_EDGES
            (wrong if not fits else found if numbers else lost).append(name)
        elif kind in store.node_types and entry.shape[:1] == [store.tables[kind].rows]:
            (found if rest.isidentifier() and rest not in _TAKEN else wrong).append(name)
    for names, why in (
        (wrong, "the name means something else there; pack it under another one"),
        (lost, "values of edges without numbers: pack the graph with edge_ids=True, and take no "
               "subgraph_type='bidirectional', nor mode='partitions' where rows are on several hosts"),
        (no_tensor, NO_TENSOR),
    ):  # fmt: skip
        if names:
            text = f"mini-batches do not have {', '.join(names)}: {why}"
            warnings.warn(text, FeatstoreWarning, stacklevel=3)
    return found


def _given_names(store: OpenStore, attach: Any) -> Sequence[Any]:
    """Names of arrays that were given. Raises ArgumentError where one means something else."""
    names = [attach] if isinstance(attach, str) else as_sequence(attach, "attach", "names of arrays")
    for name in names:
        if isinstance(name, str) and name in store.manifest.arrays:
            of_edges = graph_of_array(store, name) is not None
            if type_of_array(store, name)[1] in (_OF_EDGES if of_edges else _TAKEN):
                raise ArgumentError(
                    f"attach: {name!r} means something else in PyG's HeteroData; leave it out"
                )
    return names


def typed_links(store: OpenStore, given: Any) -> tuple[EdgeType, Any]:
    """The edge type of links, which ``given`` is, or a pair of it and the links, integers [2, l] or the name
    of such an array; and these, None for all edges. Raises ArgumentError, UnknownNameError."""
    given = _named_type(store, given)
    if not (isinstance(given, tuple) and len(given) == 2 and given[0] in store.edge_types):
        known = ", ".join(map(repr, store.edge_types))
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple):
            raise ArgumentError(f"edge_label_index: the store has no edge type {given[0]}; it has {known}")
        raise ArgumentError(
            f"edge_label_index is an edge type of the store, or a pair of one and links, not {shown(given)}; "
            f"it has {known}"
        )
    link_type, ends = given
    if isinstance(ends, str):
        ends = store.arrays[ends]
    return link_type, ends.cpu().numpy() if hasattr(ends, "cpu") else ends


def typed_link_batches(
    store: OpenStore, link_type: EdgeType, ends: Any, fanouts: Any, said: Mapping[str, Any],
    memory_bytes: int, ranks: tuple[Sequence[int], int], *, seed: int, negatives: Negatives | None,
    reading: Mapping[str, Any], **links: Any,
) -> tuple[LinkBatches, MemoryShares]:  # fmt: skip
    """Mini-batches around links of an edge type, ``ends`` or all its edges, by their numbers where the graph
    keeps these, of ``ranks``, those here and how many there are; and the shares of memory. Raises
    ArgumentError, BudgetError."""
    graph, options = store.graphs[joined_name(link_type)], TypedOptions(store, said, seeds_have_times=True)
    told = check_links_numbered(graph, ends, links)
    if isinstance(store, WholeStore) and store.splits_topology:
        of = store, link_type[0], fanouts
        sampler, shares = sampler_over_hosts(
            options, MemoryShares(memory_bytes),
            lambda **asked: TypedHostsSampler(*of, seed=seed, **asked),
        )  # fmt: skip
    else:
        sampler, ends, shares = link_sampler(
            graph, ends, memory_bytes, typed_bytes(store) + options.needed_bytes,
            lambda: TypedInMemory(store, link_type[0], fanouts, seed, options=options.read()),
            typed_on_disk(store, link_type[0], fanouts, options, seed=seed, **reading),
        )  # fmt: skip
    around = LinkSampler(sampler, link_type=link_type, negatives=negatives)
    own = links_of_hosts(store, (link_type[0], link_type[2]), around, ends, *ranks)
    return LinkBatches(around, ends, numbered=told, **links, **own), shares


def _named_type(store: OpenStore, given: Any) -> Any:
    """A pair of an edge type and links, or None for all edges, of what may be the type alone, and may name it
    by its two types of nodes, as PyG takes it. Raises ArgumentError where several may be meant."""
    if isinstance(given, tuple) and given and isinstance(given[0], str):
        given = (given, None)
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple)):
        return given
    named, links = given
    if len(named) == 2:
        found = [one for one in store.edge_types if (one[0], one[2]) == named]
        if len(found) > 1:
            raise ArgumentError(
                f"edge_label_index: {named} may be any of {', '.join(map(repr, found))}; name all three"
            )
        named = found[0] if found else named
    return named, links


def link_sampler(
    graph: StoredGraph, ends: Any, memory_bytes: int, whole_bytes: int, in_memory: Callable[[], Any],
    on_disk: Callable[[int], DiskSampler],
) -> tuple[Any, Any, MemoryShares]:  # fmt: skip
    """What samples around links: over graphs in memory, which take ``whole_bytes``, where these fit a
    sampler's share, else from disk within that; the links, all edges of ``graph`` for None; and the shares of
    what memory these leave. Raises BudgetError."""
    links_bytes = _LINK_BYTES * graph.edges if ends is None else 0
    if links_bytes >= memory_bytes:
        what = f"hold all edges of {graph.where()} as links (or give some as edge_label_index)"
        raise BudgetError(links_bytes + 1, memory_bytes, what)
    shares = MemoryShares(memory_bytes - links_bytes, graph_bytes=whole_bytes, beside_bytes=links_bytes)
    if whole_bytes > shares.sampler_bytes:
        shares = replace(shares, least_bytes=least_on_disk(on_disk))
    with shares.told_of_all():
        fits = whole_bytes <= shares.sampler_bytes
        sampler = in_memory() if fits else on_disk(shares.sampler_bytes)
    try:
        return sampler, read_links(graph) if ends is None else ends, shares
    except BaseException:
        if isinstance(sampler, DiskSampler):
            sampler.close()
        raise


def check_links_numbered(graph: StoredGraph, ends: Any, given: Mapping[str, Any]) -> bool:
    """Whether it is known which link each is: of all edges (``ends`` None) where the graph keeps their
    numbers. Raises SourceError for labels or times of links of which it is not."""
    known = ends is not None or graph.has_edge_ids
    told = [name for name in ("labels", "times") if given.get(name) is not None]
    if told and not known:
        names = " and ".join(f"edge_label{'_time' if one == 'times' else ''}=" for one in told)
        raise SourceError(
            f"{names} of all edges go by their numbers, which the graph does not keep, and would be of other "
            "edges: give edge_label_index=, or pack with edge_ids=True"
        )
    return known


def put_links(data: Any, batch: Batch, link_type: EdgeType) -> None:
    """Put what a mini-batch has of its links to where PyG's ``HeteroData`` have it, where its rows are."""
    import torch

    from featstore.base.tensors import to_device

    sample, device = batch.sample, device_of_rows(batch)
    ends = {"src_index": [link_type[0]], "dst_pos_index": [link_type[2]], "dst_neg_index": [link_type[2]]}
    ends["seed_time"] = list(dict.fromkeys((link_type[0], link_type[2])))
    for name in OF_LINKS:
        if sample.get(name) is not None:
            for key in ends.get(name, [link_type]):
                data[key][name] = to_device(torch.as_tensor(sample[name]), device)


def numbered(store: OpenStore, unnumbered: Sequence[EdgeType]) -> list[str]:
    """The tables of edges whose rows mini-batches have; a warning for those whose rows nobody could find."""
    there = {joined_name(edge_type) for edge_type in store.edge_types} & set(store.tables)
    found = [
        name for name in store.tables
        if name in there and store.graphs[name].has_edge_ids
        and store.graphs[name].edge_type not in unnumbered
        and store.graphs[name].edges == store.tables[name].rows
    ]  # fmt: skip
    missing = sorted(there - set(found))
    if missing:
        warnings.warn(
            f"mini-batches have no edge_attr of {', '.join(missing)}: the graph does not number the rows, or "
            "edges are among them that have none: pack it with edge_ids=True, and take no "
            "subgraph_type='bidirectional', nor mode='partitions' where rows are on several hosts",
            FeatstoreWarning,
            stacklevel=3,
        )
    return found
