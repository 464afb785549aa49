"""What a split is asked for, looked at before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import known_name
from featstore.errors import ArgumentError, SourceError
from featstore.packing.inputs import Inputs, node_mask
from featstore.storage.edge_types import typed_name
from featstore.storage.manifest import HALO, HALO_DEGREES, HALO_IDS, HALO_USES, check_name
from featstore.storage.store import OpenStore


class SplitAsked(Protocol):
    """Of what a split is asked for, what depends on what is split."""

    hosts: int
    train: Any
    halo_disk: int | str | None
    split_topology: bool


@dataclass(frozen=True)
class Joined:
    """What is split: the ``rows`` of each table, those of ``nodes``, those that graphs have ``joined``, by
    edge types or not, and the arrays by name."""

    rows: Mapping[str, int]
    nodes: frozenset[str]
    joined: frozenset[str]
    typed: bool
    arrays: Mapping[str, Any]

    @classmethod
    def of(cls, store: OpenStore) -> Joined:
        """Of a store."""
        graphs = store.graphs.values()
        return cls(
            {name: table.rows for name, table in store.tables.items()},
            frozenset(store.node_types if store.edge_types else store.tables),
            frozenset(end.name for graph in graphs for end in (graph.table, graph.source_table)),
            bool(store.edge_types), store.arrays,
        )  # fmt: skip

    @classmethod
    def of_inputs(cls, inputs: Inputs) -> Joined:
        """Of what is to be packed, whose rows are all counted."""
        rows = {name: source.rows or 0 for name, source in inputs.tables.items()}
        nodes = rows.keys() - set(inputs.edge_rows) if inputs.types else rows.keys()
        return cls(rows, frozenset(nodes), frozenset(inputs.ordered), bool(inputs.types), inputs.arrays)


def checked(asked: SplitAsked, of: Joined) -> dict[str, NDArray[np.bool_]]:
    """Masks of the training nodes, by table. Raises ArgumentError, IdError, UnknownNameError for what cannot
    be split so."""
    for name, given in (
        ("halo_disk= keeps copies of the halo", asked.halo_disk is not None),
        ("split_topology= is of graphs", asked.split_topology),
    ):
        if given and not of.joined:
            raise ArgumentError(f"{name}, and there is no graph: leave it out")
    for name in () if of.typed else sorted(of.joined):
        if of.rows[name] < asked.hosts:
            raise ArgumentError(
                f"hosts must be at most the {of.rows[name]:,} nodes of table {name!r}, not {asked.hosts:,}"
            )
    most = max((of.rows[name] for name in of.nodes), default=0)
    if most < asked.hosts:
        raise ArgumentError(
            f"hosts must be at most the {most:,} rows of the largest table, or some have none, not "
            f"{asked.hosts:,}"
        )
    return _training(asked.train, of)


def check_store(store: OpenStore, *, copies: bool, split_topology: bool) -> None:
    """Raise SourceError for a store that cannot be split."""
    manifest = store.manifest
    if manifest.family is not None:
        raise SourceError(f"{store.path} is of a split itself; split the store that it came from")
    if manifest.compiled is not None:
        raise SourceError(f"{store.path} is a compiled trace; split the store that it was compiled for")
    for graph in store.graphs.values():
        for what in (HALO_IDS, HALO_USES, *([HALO_DEGREES] if split_topology else [])):
            check_name(f"{graph.name}.{what}", "array", SourceError)
    for name in {graph.source_table.name for graph in store.graphs.values()} if copies else ():
        check_name(f"{name}.{HALO}", "table", SourceError)
        if f"{name}.{HALO}" in store.tables:
            raise SourceError(
                f"halo_disk= makes a table {name}.{HALO}, and {store.path} has one of that name"
            )


def _training(train: Any, of: Joined) -> dict[str, NDArray[np.bool_]]:
    """Masks of the training nodes, by table."""
    if train is None:
        return {}
    dealt = sorted(of.joined)
    if not isinstance(train, Mapping):
        if isinstance(train, str) and of.typed:  # of the type that it is named after
            kind = typed_name(train, dealt)[0]
            dealt = [kind] if kind in dealt else dealt
        if len(dealt) > 1:
            raise ArgumentError(
                f"train must say whose nodes they are, as {{{dealt[0]!r}: ...}}: there are graphs over "
                f"{', '.join(map(repr, dealt))}"
            )
        train = dict.fromkeys(dealt, train)
    found = {}
    for name, given in train.items():
        known_name(name, of.rows, "train= is given for a table, but there is no table")
        if name not in dealt:
            raise ArgumentError(
                f"train= is given for table {name!r}, which has no graph and is dealt out in equal runs of "
                "ids"
            )
        if isinstance(given, str):
            known_name(given, of.arrays, "train= names an array, but there is no array")
            given = of.arrays[given]
        found[name] = node_mask(given, of.rows[name])
    if not found:
        raise ArgumentError(
            "train= is given, and no table has a graph: all are dealt out in equal runs of ids"
        )
    return found
