"""Tables and graphs of all hosts, as they look from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.storage.manifest import SplitGraphEntry
from featstore.storage.store import OpenStore, StoredGraph, Table


class WholeTable(Table):
    """A table of all hosts: as many rows as all have, of the type that they have. ``own`` is this host's,
    ``copies`` has those of others that it keeps on its disk. ``ordered``: the topology knows the order of all
    rows."""

    def __init__(
        self, store: OpenStore, name: str, own: Table, copies: Table | None, *, ordered: bool
    ) -> None:
        entry = store.manifest.tables[name]
        typed = own.entry
        whole = msgspec.structs.replace(
            entry, dtype=typed.dtype, row_shape=typed.row_shape, row_bytes=typed.row_bytes
        )
        super().__init__(store, name, whole)
        self.own, self.copies, self._ordered = own, copies, ordered

    @property
    def partition_offsets(self) -> NDArray[np.int64]:
        if not self._ordered:
            raise SourceError(
                f"partitions are those of each host's own part, store.part, where topology is split: nobody "
                f"knows those of all rows of table {self.name!r}"
            )
        return super().partition_offsets

    @property
    def tables_on_disk(self) -> Sequence[Table]:
        return (self.own,) if self.copies is None else (self.own, self.copies)


class SplitGraph(StoredGraph):
    """A graph of which each host has the lists of its own nodes; ``table``, ``edges``, and what is kept of
    these are of the whole. ``entry``: of this host's part."""

    def __init__(self, store: OpenStore, name: str, entry: SplitGraphEntry) -> None:
        super().__init__(store, name, entry.as_graph)
        self.edges, self.hubs = entry.edges, 0

    def csc(self) -> NoReturn:
        """Raises SourceError: nobody has all lists."""
        raise SourceError(
            f"topology is split: of {self.where()} each host has the lists of its own nodes alone; sample "
            f"with store.loader(seeds=..., fanouts=...), or take store.part.graphs[{self.name!r}]"
        )

    offsets = edge_ids = weights = times = csc
