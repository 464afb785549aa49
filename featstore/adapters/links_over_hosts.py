"""Mini-batches around links of a store that is split by hosts: each trains on links whose targets it owns, or
whose sources, and all on equally many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import ArgumentError, SourceError
from featstore.hosts.split_store import WholeStore
from featstore.loaders.ranks import Ranks
from featstore.sampling.links import LinkSampler
from featstore.storage.store import OpenStore


def check_links_of_hosts(store: WholeStore, given: Any, options: Mapping[str, Any]) -> None:
    """Raise ArgumentError, SourceError for what of links a store that is split by hosts does not take."""
    for name in ("rank", "world_size"):
        if options.get(name) is not None:
            raise ArgumentError(
                f"{name}= divides mini-batches, and hosts have links of their own: leave it out"
            )
    world = Ranks.of(None, None, None).world_size
    if store.place.hosts == 1 and world > 1:
        raise SourceError(
            f"the store is split for one host, which has one rank, and the run has {world}: open the whole "
            "store, or split it for several hosts"
        )
    if store.edge_types and options.get("graph") is None and isinstance(given, tuple):
        given = given[1] if len(given) == 2 and isinstance(given[0], tuple) else None  # of a type alone
    if store.splits_topology and given is None:
        raise SourceError(
            "all edges as links are in lists that hosts have each of their own nodes: where topology is "
            "split, say which links, edge_label_index="
        )


def links_of_hosts(
    store: OpenStore, tables: tuple[str, str], around: LinkSampler, links: Any, here: Sequence[int],
    world_size: int,
) -> dict[str, Any]:  # fmt: skip
    """Whose the mini-batches are, for ranks of this host, ``here``, of ``world_size``; and of a store that is
    split which of the links, between nodes of two ``tables``, are of which host. Raises IdError."""
    if not isinstance(store, WholeStore):
        return {"ranks": here, "world_size": world_size}
    place, ends = store.place, around.checked(links)
    if ends.shape[1] < place.hosts:
        raise ArgumentError(f"edge_label_index: {ends.shape[1]} links are too few for {place.hosts} hosts")
    sources, targets = (store.owners[table].hosts[end] for table, end in zip(tables, ends, strict=True))
    return {
        "owner": deal_links(sources, targets, place.hosts), "hosts": place.hosts,
        "ranks": [place.share(rank) for rank in here], "world_size": world_size,
    }  # fmt: skip


def deal_links(sources: NDArray[Any], targets: NDArray[Any], hosts: int) -> NDArray[Any]:
    """The host of each link, whose ends these hosts own, so that all have as many, or one more: that of its
    target; what that has too many of goes to those of the sources, and what these cannot take, the last ones,
    to whoever has too few."""
    owner, links = targets.copy(), len(targets)
    quotas = [links // hosts + (host < links % hosts) for host in range(hosts)]
    for by_source in (True, False):
        spare = quotas - np.bincount(owner, minlength=hosts)
        for host in np.flatnonzero(spare < 0):
            own = np.flatnonzero(owner == host)
            for other in np.flatnonzero(spare > 0):
                some = own[sources[own] == other] if by_source else own
                count = min(-int(spare[host]), int(spare[other]), len(some))
                if count:
                    moved = some[len(some) - count :]
                    owner[moved] = other
                    own = own[owner[own] == host]
                    spare[host], spare[other] = spare[host] + count, spare[other] - count
    return owner
