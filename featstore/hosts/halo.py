"""The halo of a host: the nodes of other hosts that its own nodes' lists name."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.errors import ArgumentError, FormatError
from featstore.reader.graphs import degrees_of
from featstore.storage.manifest import HALO_DEGREES, HALO_IDS
from featstore.storage.store import Table


class Halo(NamedTuple):
    """Of a table: ``ids`` int64, ascending, the nodes of other hosts that own lists name; ``degrees`` of
    these in the whole graph."""

    ids: NDArray[np.int64]
    degrees: NDArray[np.int64]


def halo_ids_of(table: Table) -> NDArray[np.int64]:
    """The nodes of this host's halo, of a table of a split store, ascending; none without a graph, and of
    nodes without features. Raises ArgumentError."""
    names, part = _arrays_of(table), table.tables_on_disk[0].store
    return np.unique(np.concatenate([np.empty(0, np.int64), *(part.arrays[name] for name in names)]))


def halo_count_of(table: Table) -> int:
    """How many nodes that are; they are not read where one graph alone leads from the table."""
    names = _arrays_of(table)
    if len(names) != 1:
        return len(halo_ids_of(table))
    return int(table.tables_on_disk[0].store.manifest.arrays[names[0]].shape[0])


def _arrays_of(table: Table) -> list[str]:
    """Names of the part's arrays that have them. Raises ArgumentError."""
    part = table.tables_on_disk[0].store
    if part is table.store:
        raise ArgumentError(f"a halo is of a store that is split by hosts, not of {shown(table.store.path)}")
    read = {} if table.name in part.featureless else part.graphs
    return [f"{n}.{HALO_IDS}" for n, g in read.items() if g.source_table.name == table.name]


def halo_of(table: Table) -> Halo:
    """The same with degrees, of all graphs that lead to the table's nodes; where graphs are split, too, the
    part has them."""
    ids = halo_ids_of(table)
    degrees = np.zeros(len(ids), np.int64)
    if not len(ids):
        return Halo(ids, degrees)
    part = table.tables_on_disk[0].store
    for name in (name for name, graph in part.graphs.items() if graph.table.name == table.name):
        if f"{name}.{HALO_DEGREES}" in part.arrays:
            known = part.arrays[f"{name}.{HALO_DEGREES}"]
            if known.shape != ids.shape:
                raise FormatError(
                    f"the array {name}.{HALO_DEGREES} of {part.path} has {len(known):,} degrees of "
                    f"{len(ids):,} nodes: restore the part from a copy, or split the store again"
                )
            degrees += known
            continue
        degrees += degrees_of(table.store.graphs[name], ids)
    return Halo(ids, degrees)
