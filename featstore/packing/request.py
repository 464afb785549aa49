"""What a pack is asked for: its options, by table, and what of the memory budget is handed out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from featstore.arguments import as_choice, as_count, as_flag, as_number, known_name
from featstore.base.ids import plain_array
from featstore.errors import ArgumentError, SourceError
from featstore.order.orders import METHODS
from featstore.packing.convert import CASTS
from featstore.packing.inputs import WITHOUT_PARTITIONS, Inputs, by_table
from featstore.packing.memory import without_slack
from featstore.packing.relations import by_graph
from featstore.packing.topology import HUB_RANKS, HUB_SHARE
from featstore.units import parse_bytes

__all__ = ["Options", "check_pack"]


@dataclass(frozen=True)
class Options:
    """How to pack; the arguments of :func:`pack` of the same names."""

    memory_bytes: int
    order: Mapping[str, str]
    permutation: Mapping[str, Any]
    partitions: Mapping[str, int]
    dtype: Mapping[str, str]
    seed: int
    topology: bool = False
    hubs: float = 0.0
    hub_rank: str = "degree"
    train: Mapping[str, Any] = field(default_factory=dict)
    graph_key: Mapping[str, str] = field(default_factory=dict)
    edge_ids: bool = False

    @classmethod
    def of(
        cls, inputs: Inputs, *, memory: int | str, order: Any, permutation: Any, partitions: Any, seed: int,
        topology: bool, hubs: float, hub_rank: str, train: Any, graph_key: Any, edge_ids: bool | None,
    ) -> Options:  # fmt: skip
        """From the arguments of a pack, given once or by table. Raises SourceError."""
        tables, stored = inputs.tables, as_flag(topology, "topology")
        if inputs.types and isinstance(graph_key, Mapping):
            graph_key = by_graph(graph_key, inputs.graphs, "graph_key")
        keys = by_table(graph_key, inputs.graphs or tables, "graph_key")
        if keys and not set(keys) <= set(inputs.graphs):
            raise SourceError(
                f"graph_key is given for table {next(iter(keys))!r}, which has no graph; give graph= as well"
            )
        nodes = {n: one for n, one in tables.items() if n not in inputs.edge_rows} or tables
        given = by_table(permutation, tables, "permutation").items()

        def of_nodes(value: Any, what: str) -> dict[str, Any]:
            """By table; what is given once is of those that graphs order, and not of rows of edges."""
            return by_table(value, tables if isinstance(value, Mapping) else nodes, what)

        return cls(
            without_slack(parse_bytes(memory, "memory")),
            dict.fromkeys(tables, "auto") | of_nodes(order, "order"),
            {n: p if isinstance(p, str | os.PathLike) else plain_array(p, "permutation") for n, p in given},
            {
                n: as_count(p, "partitions", 1, 2**31 - 1)
                for n, p in of_nodes(partitions, "partitions").items()
            },
            inputs.casts,
            as_count(seed, "seed", 0),
            stored,
            as_number(hubs, "hubs", 0, 1),
            hub_rank,
            {
                n: t if t is None or isinstance(t, str) else plain_array(t, "train")
                for n, t in of_nodes(train, "train").items()
            },
            keys,
            stored and bool(inputs.graphs and inputs.edge_rows)
            if edge_ids is None
            else as_flag(edge_ids, "edge_ids"),
        )


def check_pack(options: Options, inputs: Inputs, *, resume: Any, overwrite: Any) -> None:
    """Raise ArgumentError for an option that is none, or that has no effect."""
    as_flag(resume, "resume")
    as_flag(overwrite, "overwrite")
    as_choice(options.hub_rank, "hub_rank", HUB_RANKS)
    for order in options.order.values():
        as_choice(order, "order", METHODS)
    for dtype in options.dtype.values():
        as_choice(dtype, "dtype", CASTS, ", or None for rows as they are")
    for train in options.train.values():
        if isinstance(train, str):
            known_name(train, inputs.arrays, "train is a name of one of arrays=, and there is no array")
    _refuse_without_effect(options, inputs)
    if inputs.types:
        _check_typed(options, inputs)


def _check_typed(options: Options, inputs: Inputs) -> None:
    """Raise ArgumentError for what cannot be of graphs that have edge types."""
    if options.hub_rank != HUB_RANKS[0]:
        raise ArgumentError(
            "hub_rank='external' is of a graph over one table: of graphs with edge types, hubs are the nodes "
            "of highest degree"
        )
    if inputs.featureless and not options.topology:
        raise ArgumentError(
            f"{', '.join(map(repr, inputs.featureless))} have no features, and topology=False leaves out the "
            "graphs, so nothing of them would be stored"
        )
    together = [name for name in inputs.tables if name in inputs.ordered]
    together = [name for name in together if options.order[name] not in WITHOUT_PARTITIONS]
    for what, given in (("order", options.order), ("partitions", options.partitions)):
        if len({given.get(name) for name in together if name not in options.permutation}) > 1:
            raise ArgumentError(
                f"{what}= differs among {', '.join(map(repr, together))}: partitions of the types that edge "
                "types join are made together; give the same for all of them (or 'given' for some)"
            )


def _refuse_without_effect(options: Options, inputs: Inputs) -> None:
    """Raise ArgumentError for what was asked and would not be done."""
    graphs = inputs.graphs
    for name in options.permutation:
        if options.order[name] not in ("auto", "permutation"):
            raise ArgumentError(
                f"permutation= is given for table {name!r}, whose order is {options.order[name]!r}: leave "
                "one of the two out"
            )
    for name in options.partitions:
        method = options.order[name]
        if method == "auto" and (name in options.permutation or name not in inputs.ordered):
            method = "permutation" if name in options.permutation else "given"
        if method in WITHOUT_PARTITIONS:
            raise ArgumentError(
                f"partitions= is given for table {name!r}, whose order is {method!r}, which makes none: "
                "leave it out, or give a graph and an order that does, such as order='ldg'"
            )
    for name, train in options.train.items():
        if train is not None and options.order[name] != "bfs":
            raise ArgumentError(
                f"train= is given for table {name!r}, whose order is {options.order[name]!r}: only "
                "order='bfs' looks at training nodes; to keep them in the store, give "
                "arrays={'train': ...}"
            )
    stored = options.topology and bool(graphs)
    if options.hubs not in (0, HUB_SHARE) and not stored:
        raise ArgumentError("hubs= is for a graph that is stored: give graph=, and topology=True")
    if inputs.values and not stored:
        part = next(iter(inputs.values.values()))[0].part
        raise ArgumentError(f"edge_{part}= is for a graph that is stored: give graph=, and topology=True")
    if options.edge_ids and not stored:
        raise ArgumentError("edge_ids= is for a graph that is stored: give graph=, and topology=True")
    if options.hub_rank != HUB_RANKS[0] and not stored:
        raise ArgumentError("hub_rank= is for a graph that is stored: give graph=, and topology=True")
