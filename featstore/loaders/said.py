"""What tells the mini-batches that a store samples from others: by what was said of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from featstore.hosts.split_store import WholeStore
from featstore.loaders.host.links import LinksOfRanks
from featstore.loaders.options import Given
from featstore.sampling.attributes import plainly
from featstore.sampling.link_batches import LinkBatches
from featstore.sampling.typed import typed_fanouts
from featstore.sampling.typed_store import TypedSeeds, by_edge_type, typed_graphs
from featstore.storage.store import OpenStore

#: What a digest of that is called in states.
SAMPLED_BY = "a digest of seeds or links, seed, fanouts, graph and options of sampling"


def samples_of(
    store: OpenStore, given: Given, batches: Any, others: Mapping[str, Any] | None = None
) -> str:  # fmt: skip
    """Of the seeds, the graph and how it is sampled, however these were said, but not of how seeds are cut
    into mini-batches; of mini-batches around links all that was said of them, as each is drawn at once. Empty
    where others were given. ``others``: in place of some options."""
    if isinstance(batches, LinkBatches | LinksOfRanks) and batches.alike:
        text = told(dict(batches.alike) | dict(others or {}))
    elif given.get("seeds") is None:
        return ""
    else:
        graph = given.get("graph")
        fanouts = given.get("fanouts")
        if store.edge_types and graph is None:
            seeds: Any = TypedSeeds.of(store, given.get("seeds"), repeated=True)
            seeds, graphs = (seeds.node_type, seeds.ids), typed_graphs(store)
            fanouts = typed_fanouts(by_edge_type(graphs, fanouts), list(graphs))
        else:
            seeds = _ids(store, given.get("seeds"))
            if len(store.graphs) == 1 and graph in store.graphs and not store.edge_types:
                graph = None  # it need not be said
        what = {"seeds": seeds, "fanouts": fanouts, "graph": graph}
        what = {"seed": given.get("seed", 0)} | what | dict(others or {})
        text = repr(sorted((name, told(one)) for name, one in what.items()) + said_alike(given.said))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded_of(
    store: OpenStore, given: Given, batches: Any, ranks: Sequence[int], of_a_step: Mapping[str, Any]
) -> list[str]:
    """What tells mini-batches that were recorded from others, drawn by whatever number: first of those that
    are asked for, then of such as do as well, recorded with ``nodes=`` that are not said again. Empty where
    nobody knows. ``ranks``: whose they are. ``of_a_step``: how seeds are cut."""
    if isinstance(store, WholeStore):  # hosts may have other numbers in each run
        ranks = [store.place.share(rank) for rank in ranks]
    samples = samples_of(store, given, batches, {"seed": None})
    text = f"{samples} {list(ranks)} {sorted(of_a_step.items())} {bool(given.get('seeds_in_order'))}"
    named = [True] if given.get("nodes") is not None else [False, True]  # by a function that nobody knows
    digests = [hashlib.sha256(f"{text} {one}".encode()).hexdigest()[:16] for one in named]
    return digests if samples else []


def _ids(store: OpenStore, seeds: Any) -> Any:
    """Seeds however they were said: by name, or as a mask."""
    seeds = store.arrays[seeds] if isinstance(seeds, str) and seeds in store.arrays else seeds
    mask = str(getattr(seeds, "dtype", "")).endswith("bool")  # torch's, too
    return np.flatnonzero(np.asarray(seeds)) if mask else seeds


def said_alike(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of the options of sampling that are not as by default: names, and what tells them from others."""
    return sorted((name, told(one)) for name, one in plainly(said).items())


def told(option: Any) -> str:
    """What tells an option from others: of an array the checksum of its values."""
    if isinstance(option, Mapping):
        return repr(sorted((repr(name), told(one)) for name, one in option.items()))
    if isinstance(option, str) or not hasattr(option, "__len__"):
        return str(option)
    if isinstance(option, list | tuple) and any(hasattr(one, "__len__") for one in option):
        return repr([told(one) for one in option])
    values = np.ascontiguousarray(option)
    if values.dtype.hasobject:
        return repr(values.tolist())
    if values.dtype.kind in "iu":  # however they were given
        values = values.astype(np.int64, copy=False)
    digest = hashlib.sha256(f"{values.shape}".encode())
    digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
