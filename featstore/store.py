"""The front door: an open store, and what can be done with it.

What reads and trains is loaded when it is asked for, so that opening a store takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import check_options, options_of
from featstore.errors import ArgumentError
from featstore.storage.store import OpenStore, StoredGraph, Table

if TYPE_CHECKING:
    from featstore.compiled import Compiled
    from featstore.loaders.mega.loader import MegaBatches
    from featstore.reader.reader import Reader
    from featstore.sampling.stored import StoredSampler

__all__ = ["Graph", "Store", "Table"]


class Graph(StoredGraph):
    """The topology over a table's rows: ``edges`` stored edges, ``hubs`` rows whose lists stand in a second,
    contiguous copy."""

    def offsets(self) -> NDArray[np.int64]:
        """int64 [rows + 1], all of it: 8 bytes a row. Raises BudgetError, CorruptionError, DeviceError,
        FormatError."""
        from featstore.reader.graphs import read_offsets

        return read_offsets(self)

    def csc(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The whole topology in memory, as a sampler takes it: (indptr int64 [nodes + 1], indices [edges]) by
        node id, each list in the order in which it is stored. For graphs that fit: about 3 times 8 bytes a
        node and 4 an edge. Raises BudgetError, CorruptionError, DeviceError, FormatError."""
        from featstore.reader.graphs import read_csc

        return read_csc(self)


class Store(OpenStore):
    """An open store; see :func:`featstore.open`. ``tables``, ``graphs`` and ``arrays`` are mappings by
    name."""

    graphs: Mapping[str, Graph]
    _graph_class: ClassVar[type[StoredGraph]] = Graph

    def reader(self, **options: Any) -> Reader:
        """A reader over this store's tables; the options are those of :class:`featstore.Reader`."""
        from featstore.reader.reader import Reader

        self.check_open()
        check_options(options, options_of(Reader), "a reader")
        return Reader(self, **options)

    def sampler(self, fanouts: Sequence[int], **options: Any) -> StoredSampler:
        """A neighbour sampler over a graph in this store; the options are those of
        :class:`featstore.sampling.stored.StoredSampler`."""
        from featstore.sampling.stored import StoredSampler

        self.check_open()
        check_options(options, options_of(StoredSampler), "a sampler")
        if "memory" not in options:
            raise ArgumentError("a sampler needs a budget: give memory=, bytes or a size such as '512MiB'")
        return StoredSampler(self, fanouts, **options)

    def mega_batches(self, **options: Any) -> MegaBatches:
        """A loader that trains from random collections of partitions; the options are those of
        :class:`featstore.loaders.mega.loader.MegaBatches`."""
        from featstore.loaders.mega.loader import MegaBatches

        self.check_open()
        check_options(options, options_of(MegaBatches), "a loader of mega-batches")
        return MegaBatches(self, **options)

    def compiled(self, name: str = "default") -> Compiled:
        """A compiled trace of this store; see :class:`featstore.loaders.compiled_trace.Compiled`."""
        from featstore.compiled import Compiled

        self.check_open()
        return Compiled(self, name)
