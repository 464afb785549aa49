"""The sampler of a loader whose store samples, within the loader's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from featstore.errors import BudgetError
from featstore.hosts.sampler import HostsSampler
from featstore.hosts.split_store import WholeStore
from featstore.loaders.shares import MemoryShares, rows_at_most, wanted_bytes
from featstore.sampling.batches import GraphSampler, RankedBatches, open_sampler, sampler_needs
from featstore.sampling.stored import StoredSampler
from featstore.sampling.typed_store import TypedInMemory, TypedSeeds, typed_bytes
from featstore.storage.relations import graph_of
from featstore.storage.store import OpenStore, StoredGraph, Table


def sampler_within(
    store: OpenStore, fanouts: tuple[int, ...], shares: MemoryShares, *, seed: int, graph: str | None,
    check: Callable[[StoredGraph], None],
) -> tuple[GraphSampler, Table, MemoryShares]:  # fmt: skip
    """A sampler over the graph, when that has passed ``check``; the table that this is over; and the shares
    with what the sampler takes."""
    of = graph_of(store, graph)
    check(of)
    if isinstance(store, WholeStore) and store.splits_topology:
        shares = replace(shares, graph_bytes=shares.memory_bytes)
        with shares.told_of_all():
            memory = shares.sampler_bytes
            return HostsSampler(store, fanouts, seed=seed, graph=graph, memory=memory), of.table, shares
    whole, least = sampler_needs(store, fanouts, graph)
    shares = replace(shares, graph_bytes=whole, least_bytes=least)
    with shares.told_of_all():
        memory = shares.sampler_bytes
        return open_sampler(store, fanouts, seed=seed, graph=graph, memory=memory), of.table, shares


def rows_first(made: RankedBatches, table: Table, shares: MemoryShares) -> MemoryShares:
    """Give the sampler less where its share leaves too little for two mini-batches, but enough for
    mini-batches half as large again as the first."""
    sampler = made.sampler
    if not isinstance(sampler, StoredSampler):  # with the graph in memory, or of other hosts
        return shares
    memory, share = shares.memory_bytes, shares.sampler_bytes
    most = rows_at_most(made.batch_size, sampler.fanouts, table.rows)
    if wanted_bytes(memory, most, table) <= shares.rows_bytes:
        return shares
    with shares.told_of_all():
        wanted = wanted_bytes(memory, len(made[0].node), table)
    shares = replace(shares, rows_wanted_bytes=wanted, least_bytes=sampler.least_bytes)
    if shares.sampler_bytes < min(share, shares.graph_bytes):
        sampler.close()
        with shares.told_of_all():
            made.sampler = open_sampler(
                sampler.store, sampler.fanouts, seed=sampler.seed, graph=sampler.graph.name,
                memory=shares.sampler_bytes,
            )  # fmt: skip
    return shares


def typed_sampler_within(
    store: OpenStore, seeds: TypedSeeds, fanouts: Any, shares: MemoryShares, seed: int
) -> tuple[TypedInMemory, MemoryShares]:
    """A sampler over all edge types of the store, whose graphs are held in memory, and the shares of what is
    left. Raises BudgetError."""
    graph_bytes, beside = typed_bytes(store), shares.beside_bytes
    if graph_bytes >= shares.memory_bytes:
        what = "hold the graphs of all edge types, which are sampled from memory"
        raise BudgetError(graph_bytes + 1 + beside, shares.memory_bytes + beside, what)
    left = shares.memory_bytes - graph_bytes
    shares = replace(shares, memory_bytes=left, beside_bytes=beside + graph_bytes)
    return TypedInMemory(store, seeds.node_type, fanouts, seed), shares
