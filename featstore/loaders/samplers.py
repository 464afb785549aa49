"""The sampler of a loader whose store samples, within the loader's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from featstore.errors import BudgetError, SourceError
from featstore.hosts.sampler import HostsSampler, OverHosts
from featstore.hosts.split_store import WholeStore
from featstore.hosts.typed_sampler import TypedHostsSampler
from featstore.loaders.online.content import Content
from featstore.loaders.shares import (
    AHEAD_FROM,
    EDGE_BYTES_MOST,
    SAMPLER_SHARE,
    MemoryShares,
    edges_at_most,
    rows_at_most,
    wanted_bytes,
)
from featstore.sampling.attributes import NamedOptions
from featstore.sampling.batches import (
    GraphSampler,
    RankedBatches,
    open_sampler,
    sampler_needs,
)
from featstore.sampling.disk_sampler import DiskSampler
from featstore.sampling.link_batches import LinkBatches
from featstore.sampling.stored import StoredSampler
from featstore.sampling.typed_options import TypedOptions
from featstore.sampling.typed_store import TypedInMemory, TypedSeeds, typed_bytes
from featstore.sampling.typed_stored import TypedStoredSampler
from featstore.storage.relations import graph_of
from featstore.storage.store import OpenStore, StoredGraph, Table


def sampler_within(
    store: OpenStore, fanouts: tuple[int, ...], shares: MemoryShares, *, seed: int, graph: str | None,
    check: Callable[[StoredGraph], None], said: Mapping[str, Any], reading: Mapping[str, Any],
) -> tuple[GraphSampler, Table, MemoryShares]:  # fmt: skip
    """A sampler over the graph, when that has passed ``check``, with the options that were ``said``, and of
    ``reading`` where it is from disk; the table that this is over; and the shares with what the sampler
    takes."""
    of = graph_of(store, graph)
    table = store.tables[of.table.name]  # a whole topology has a byte for each node in its place
    check(of)
    options = NamedOptions(store, of, said)
    if isinstance(store, WholeStore) and store.splits_topology:
        made, shares = sampler_over_hosts(
            options, shares, lambda **asked: HostsSampler(store, fanouts, seed=seed, graph=graph, **asked)
        )
        return made, table, shares
    whole, least = sampler_needs(store, fanouts, graph, options)
    shares = replace(shares, graph_bytes=whole, least_bytes=least)
    with shares.told_of_all():
        memory = shares.sampler_bytes
        made = open_sampler(store, fanouts, seed=seed, graph=graph, memory=memory, options=options, **reading)
    return made, table, shares


def sampler_over_hosts(
    options: NamedOptions | TypedOptions, shares: MemoryShares, made: Callable[..., Any]
) -> tuple[Any, MemoryShares]:
    """What samples over lists of several hosts, ``made`` with ``memory=`` and ``options=``, and the shares
    with what it takes. Raises SourceError for options of arrays of edges, by which owners do not draw."""
    if options.of_memory:
        raise SourceError(
            f"{', '.join(options.of_memory)}: where topology is split, owners draw by what their lists keep: "
            "pack what it names with edge_weights= or edge_times=, or split with split_topology=False"
        )
    drawn, shares = options.from_disk(), replace(shares, graph_bytes=shares.memory_bytes)
    with shares.told_of_all():
        return made(memory=shares.sampler_bytes, options=drawn), shares


class Drawn(Protocol):
    """Mini-batches that can be drawn by another sampler."""

    @property
    def drawn_by(self) -> Any: ...

    def draw_by(self, sampler: Any) -> None: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def rows_first(made: Drawn, tables: Mapping[str, Table], shares: MemoryShares) -> MemoryShares:
    """Give the sampler less where its share leaves too little for two mini-batches, and more where that is no
    more than it is opened with: enough for mini-batches half as large again as the first. ``tables``: of the
    mini-batches' nodes, the one or those of their types. Raises BudgetError, also where it has too little for
    the seeds of a mini-batch."""
    sampler = made.drawn_by
    if isinstance(sampler, OverHosts) and isinstance(made, RankedBatches | LinkBatches):
        with shares.told_of_all():
            sampler.check_room(_first_seeds(made, sampler))
    if not isinstance(sampler, DiskSampler) or not len(made):  # the graph is in memory, or of other hosts
        return shares
    memory, of_third = shares.memory_bytes, shares.sampler_bytes <= shares.memory_bytes // SAMPLER_SHARE
    if (
        of_third
        and isinstance(sampler, StoredSampler)
        and isinstance(made, RankedBatches)
        and _wanted_at_most(made, sampler.graph, memory) <= shares.rows_bytes
    ):
        return shares
    first, sampler, shares = _first(made, list(tables), sampler, shares)
    rows = {name: len(ids) for name, ids in first.ids.items()}
    share, wanted = shares.sampler_bytes, wanted_bytes(memory, rows, tables, first.sample_bytes)
    shares = replace(shares, rows_wanted_bytes=wanted, least_bytes=sampler.least_bytes)
    if shares.sampler_bytes > share or shares.sampler_bytes < min(share, shares.graph_bytes):
        _reopened(made, sampler, shares)
    return shares


def kept_ahead(store: OpenStore, share: Any, shares: MemoryShares) -> MemoryShares:
    """The shares with what mini-batches may take that are kept from when they are sampled ahead: of what two
    of them, however large, leave. Those from disk are read several at a time and in order, and not kept."""
    drawn_by = share.drawn_by if isinstance(share, RankedBatches) else None
    if drawn_by is None or (isinstance(drawn_by, DiskSampler) and drawn_by.reads):
        return shares
    rows = max(AHEAD_FROM, shares.rows_wanted_bytes)
    if not store.edge_types:
        graph = getattr(drawn_by, "graph", None) or next(iter(store.graphs.values()))
        rows = max(rows, _wanted_at_most(share, graph, shares.memory_bytes))
    return replace(shares, ahead_from_bytes=rows)


def _first_seeds(made: RankedBatches | LinkBatches, sampler: OverHosts) -> dict[str, int]:
    """How many nodes of each type a mini-batch begins with."""
    if isinstance(made, RankedBatches):
        return {sampler.seed_type: len(made.seeds(0))}
    return {name or sampler.seed_type: count for name, count in made.most_seeds.items()}


def _wanted_at_most(made: RankedBatches, graph: StoredGraph, memory_bytes: int) -> int:
    """What mini-batches want over a graph without types, however few its nodes' lists have in common."""
    table, of = graph.table, (made.batch_size, made.drawn_by.fanouts, graph.table.rows)
    edges = EDGE_BYTES_MOST * edges_at_most(*of, graph.edges)
    return wanted_bytes(memory_bytes, {table.name: rows_at_most(*of)}, {table.name: table}, edges)


def _first(
    made: Drawn, tables: Sequence[str], sampler: DiskSampler, shares: MemoryShares
) -> tuple[Content, DiskSampler, MemoryShares]:
    """The first mini-batch's, by table, and the sampler and the shares with which it could be sampled: from
    disk, that takes more than opening the sampler did."""
    while True:
        try:
            first = made[0]
            nodes = first["n_id"] if isinstance(first, Mapping) else first.node
            by_type = dict(nodes) if isinstance(nodes, Mapping) else {tables[0]: nodes}
            return Content.of(by_type, first, own=True), sampler, shares
        except BudgetError as error:
            given = shares.sampler_bytes
            if error.given_bytes != given:
                raise
            shares = replace(shares, least_bytes=error.needed_bytes)
            if shares.sampler_bytes == given:  # there is no more
                with shares.told_of_all():
                    raise
            sampler = _reopened(made, sampler, shares)


def _reopened(made: Drawn, sampler: DiskSampler, shares: MemoryShares) -> DiskSampler:
    """The sampler with its share."""
    sampler.close()
    with shares.told_of_all():
        sampler = sampler.with_memory(shares.sampler_bytes)
    made.draw_by(sampler)
    return sampler


def typed_sampler_within(
    store: OpenStore, seeds: TypedSeeds, fanouts: Any, shares: MemoryShares, seed: int,
    said: Mapping[str, Any], reading: Mapping[str, Any],
) -> tuple[TypedInMemory | TypedStoredSampler | TypedHostsSampler, MemoryShares]:  # fmt: skip
    """A sampler over all edge types of the store, with the options that were ``said``: over graphs in memory
    where these fit the sampler's share, else from disk, as ``reading`` says, or over lists of several hosts;
    and the shares with what the sampler takes. Raises BudgetError, ArgumentError, SourceError."""
    options = TypedOptions(store, said)
    if isinstance(store, WholeStore) and store.splits_topology:
        of = store, seeds.node_type, fanouts
        return sampler_over_hosts(options, shares, lambda **asked: TypedHostsSampler(*of, seed=seed, **asked))
    whole, node_type = typed_bytes(store) + options.needed_bytes, seeds.node_type
    if whole > shares.sampler_bytes:
        on_disk = typed_on_disk(store, node_type, fanouts, options, seed=seed, **reading)
        divided = replace(shares, graph_bytes=whole, least_bytes=least_on_disk(on_disk))
        if whole > divided.sampler_bytes:
            with divided.told_of_all():
                return on_disk(divided.sampler_bytes), divided
    left = shares.memory_bytes - whole
    shares = replace(shares, memory_bytes=left, beside_bytes=shares.beside_bytes + whole)
    made = TypedInMemory(store, node_type, fanouts, seed, options=options.read())
    return made, shares


def typed_on_disk(
    store: OpenStore, node_type: str, fanouts: Any, options: TypedOptions, *, seed: int = 0, **reading: Any
) -> Callable[[int], TypedStoredSampler]:  # fmt: skip
    """What makes a sampler from disk within so many bytes, over all edge types, which reads as ``reading``
    says; it raises BudgetError, also for options that need the graphs in memory."""
    of_memory = options.of_memory
    said = None if of_memory else options.from_disk()

    def made(memory: int) -> TypedStoredSampler:
        if of_memory:
            what = (
                f"hold the graphs in memory, which {', '.join(of_memory)} is sampled from (or pack what it "
                "names with edge_weights= or edge_times=, which are read from disk)"
            )
            raise BudgetError(typed_bytes(store) + options.needed_bytes, memory, what)
        return TypedStoredSampler(
            store, node_type, fanouts, memory=memory, seed=seed, options=said, **reading
        )

    return made


def least_on_disk(on_disk: Callable[[int], Any]) -> int:
    """Without which there is no sampler from disk."""
    try:
        on_disk(1).close()
    except BudgetError as error:
        return error.needed_bytes
    return 0
