"""The front door: an open store, and what can be done with it.

What reads and trains is loaded when it is asked for, so that opening a store takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import check_options, known_name, need_package, options_of
from featstore.base.called import called
from featstore.base.environment import MEMORY, variable
from featstore.base.sheets import Sheet, Shown
from featstore.errors import ArgumentError
from featstore.reader.options import as_static_bytes, memory_said
from featstore.storage.manifest import GATHERED_FEATURE
from featstore.storage.sheets import store_sheet
from featstore.storage.store import OpenStore, StoredGraph, Table, check_on_disk

if TYPE_CHECKING:
    from featstore.loaders.compiled.trace import CompiledTrace
    from featstore.loaders.costs.result import LoaderCosts
    from featstore.loaders.loader import Loader
    from featstore.loaders.options import LoaderOptions
    from featstore.loaders.prefetch import Sampler
    from featstore.reader.columns import ColumnReader
    from featstore.reader.keys import NodeKeys
    from featstore.reader.reader import Reader
    from featstore.reader.table_array import TableArray
    from featstore.reader.tiered import TieredReader
    from featstore.sampling.stored import StoredSampler
    from featstore.tiers import TierSpec

__all__ = ["Graph", "Store", "Table"]

_SHORT = ("tiers", "policy", "device", "device_memory", "device_policy")


class Graph(StoredGraph):
    """The topology over a table's rows: ``edges`` stored edges, ``hubs`` rows whose lists stand in a second,
    contiguous copy. Of an edge type, ``edge_type``, the targets are of ``table`` and the sources of
    ``source_table``."""

    def offsets(self) -> NDArray[np.int64]:
        """int64 [rows + 1], all of it: 8 bytes a row. Raises BudgetError, CorruptionError, DeviceError,
        FormatError."""
        from featstore.reader.graphs import read_offsets

        return read_offsets(self)

    def csc(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The whole topology in memory, as a sampler takes it: (indptr int64 [nodes + 1], indices [edges]) by
        node id, each list in the order in which it is stored. Of an edge type, ``indptr`` is by ids of the
        target type, ``indices`` are ids of the source type. For graphs that fit: about 3 times 8 bytes a
        node and 4 an edge. Raises BudgetError, CorruptionError, DeviceError, FormatError."""
        from featstore.reader.graphs import read_csc

        return read_csc(self)

    def edge_ids(self) -> NDArray[Any]:
        """The numbers that the user knows the edges by, [edges], in the order of :meth:`csc`: 20 bytes an
        edge while they are read. Raises SourceError where the store does not keep them; BudgetError,
        CorruptionError, DeviceError, FormatError."""
        from featstore.reader.graphs import read_edge_ids

        return read_edge_ids(self, by_node=True)

    def weights(self) -> NDArray[Any]:
        """The edges' weights, float32 or float64 [edges], in the order of :meth:`csc`. Raises SourceError
        where there are none; BudgetError, CorruptionError, DeviceError, FormatError."""
        from featstore.reader.graphs import read_weights

        return read_weights(self)

    def times(self) -> NDArray[np.int64]:
        """The edges' times, int64 [edges], in the order of :meth:`csc`: those of each list ascend. Raises
        SourceError where there are none; BudgetError, CorruptionError, DeviceError, FormatError."""
        from featstore.reader.graphs import read_times

        return read_times(self)


class Store(Shown, OpenStore):
    """An open store; see :func:`featstore.open`. ``tables``, ``graphs`` and ``arrays`` are mappings by
    name."""

    graphs: Mapping[str, Graph]
    _graph_class: ClassVar[type[StoredGraph]] = Graph

    def _sheet(self) -> Sheet:
        return store_sheet(self)

    def __repr__(self) -> str:
        return called("featstore.open", self.path)

    @overload
    def table(self, name: str) -> Table: ...

    @overload
    def table(self, name: str, *, memory: int | str, **options: Any) -> TableArray: ...

    def table(self, name: str, *, memory: int | str | None = None, **options: Any) -> Table | TableArray:
        """What is known of a table, or of one that a graph consists of (``GRAPH/offsets``,
        ``GRAPH/sources``, ``GRAPH/hubs``, ``GRAPH/edge_ids``, ``GRAPH/hub_edge_ids``); with ``memory`` the
        table as an array, whose rows are read as it is indexed:
        :class:`~featstore.reader.table_array.TableArray`.

        ``memory``: budget of the array's reader, bytes or ``"1GiB"``; ``options``: its others, those of
        :meth:`reader`. Raises UnknownNameError, a KeyError, and what :meth:`reader` raises.
        """
        if memory is None and not options:
            return super().table(name)
        return self._table_array(self.table(name), memory, options)

    def _table_array(self, table: Table, memory: int | str | None, options: dict[str, Any]) -> TableArray:
        from featstore.reader.table_array import TableArray

        if memory is None and not variable("FEATSTORE_MEMORY"):
            raise ArgumentError("rows of a table are read within a budget: give memory=, bytes or '1GiB'")
        if "tables" in options:
            raise ArgumentError("tables= is of a reader: an array is of the one table that is named")
        reader: Any = self.reader(memory=MEMORY if memory is None else memory, tables=[table.name], **options)
        return TableArray(reader, table.name, closes=True)

    @overload
    def reader(self, *, tiers: Sequence[TierSpec], **options: Any) -> TieredReader: ...

    @overload
    def reader(self, *, policy: str, **options: Any) -> TieredReader: ...

    @overload
    def reader(self, *, device_memory: int | str, **options: Any) -> TieredReader: ...

    @overload
    def reader(
        self, *, columns: list[Any] | tuple[Any, ...] | slice | Mapping[str, Any], **options: Any
    ) -> ColumnReader: ...

    @overload
    def reader(self, **options: Any) -> Reader: ...

    def reader(self, *, columns: Any = None, **options: Any) -> Any:
        """A reader over this store's tables.

        ``tiers``: what keeps rows in memory over the disk, the fastest first, for example
        ``[featstore.Device("cuda", "4GiB"), featstore.Buffer("s3-fifo"), featstore.Static("degree")]``; the
        last may be ``featstore.Shared(client)``, a buffer of another process, which reads the disk. Or in
        short, in that order: ``device=`` with ``device_memory=`` and ``device_policy=``, ``policy=`` for a
        buffer of rows that were asked for lately, and ``static=`` (see :class:`featstore.Reader`).

        ``columns``: of rows with one axis which of their elements to hand out, as numbers or a slice; of
        records the names of fields; for several tables a mapping of their names to such. Rows are read in
        full, and cut: :class:`~featstore.reader.columns.ColumnReader`.

        The other options are those of :class:`featstore.Reader`; ``memory`` is the budget of all of this.
        """
        if columns is None:
            return self._reader(**options)
        from featstore.reader.columns import ColumnReader

        reader = self._reader(**options)
        try:
            return ColumnReader(reader, columns)
        except BaseException:
            reader.close()
            raise

    def _reader(
        self, *, tiers: Sequence[TierSpec] | None = None, policy: str | None = None, device: Any = None,
        device_memory: int | str | None = None, device_policy: str | None = None, **options: Any,
    ) -> Reader | TieredReader:  # fmt: skip
        from featstore.reader.reader import Reader

        self.check_open()
        if GATHERED_FEATURE in self.manifest.reader_features:
            raise ArgumentError(
                f"{self.path} is a compiled trace, whose rows are those that its mini-batches want and not "
                "rows by node id: go through it by loader(mode='compiled')"
            )
        check_options(options, (*options_of(Reader), *_SHORT, "columns"), "a reader")
        if tiers is None and policy is None and device is None:
            if device_memory is not None or device_policy is not None:
                raise ArgumentError(
                    "device_memory= and device_policy= are of a device: say which, with device="
                )
            if options.get("static", "auto") is None and as_static_bytes(options.get("static_memory")):
                what = "static_memory= is for static rows, and static=None leaves none"
                raise ArgumentError(f"{what}: leave it out")
            return Reader(self, **options)
        from featstore.reader.tiered import TieredReader, short

        if tiers is None:
            tiers = short(self, policy, device, device_memory, device_policy, options)
        elif (policy, device, device_memory, device_policy) != (None,) * 4 or "static" in options:
            raise ArgumentError(f"give tiers= or its short forms ({', '.join(_SHORT[1:])}, static), not both")
        if "static_memory" in options:
            raise ArgumentError(
                "static_memory= is of a reader without tiers over it: Static(rows, memory=) says it"
            )
        return TieredReader(self, tiers, **options)

    def ids(self, table: str, *, memory: int | str = "64MiB") -> NodeKeys:
        """The keys by which you know the nodes of a table that was packed with ``node_keys=``, strings or
        whole numbers: ``lookup(keys)`` gives node ids, ``keys(ids)`` keys, ``len`` their number. ``memory``:
        budget of looking up, bytes or a size. A context manager.

        Raises UnknownNameError; SourceError where the table has no keys; BudgetError, CorruptionError,
        DeviceError, FormatError.
        """
        from featstore.reader.keys import NodeKeys

        self.check_open()
        return NodeKeys(self, table, memory)

    def zarr(self, table: str) -> Any:
        """A table as the zarr v3 array that it is on disk, read-only: ``zarr.Array`` [rows, ...]. Its rows
        are in the order on disk (``table.row_of_node()`` says where a node's is, None: at its id), and what
        it reads is not verified. bfloat16 appears as uint16, records as bytes.

        It is of this store's generation, which stays while the store is open. Raises UnknownNameError;
        MissingPackageError without zarr.
        """
        chosen = self.table(known_name(table, self.tables, "the store has no table"))
        check_on_disk(chosen)
        zarr = need_package("zarr", "zarr", "zarr()")
        return zarr.open_array(str(self.path / chosen.entry.path), mode="r")

    def sampler(self, fanouts: Sequence[int], **options: Any) -> StoredSampler:
        """A neighbour sampler over a graph in this store; the options are those of
        :class:`featstore.sampling.stored.StoredSampler`, in place of whose ``options=`` are ``replace=``,
        ``disjoint=``, ``subgraph_type=``, ``weight_attr=``, ``time_attr=``, ``temporal_strategy=`` and
        ``time_window=``, as of :meth:`loader`. Weights and times of edges are those that the graph keeps."""
        from featstore.sampling.attributes import SAMPLER_OPTIONS, sampler_options
        from featstore.sampling.stored import StoredSampler

        self.check_open()
        own = [name for name in options_of(StoredSampler) if name != "options"]
        check_options(options, (*own, *SAMPLER_OPTIONS), "a sampler")
        if "memory" not in options and variable("FEATSTORE_MEMORY"):
            options["memory"] = memory_said(MEMORY)[0]
        if "memory" not in options:
            raise ArgumentError("a sampler needs a budget: give memory=, bytes or a size such as '512MiB'")
        return StoredSampler(self, fanouts, **sampler_options(self, options))

    def loader(self, batches: Sampler | None = None, **options: Unpack[LoaderOptions]) -> Loader:
        """Mini-batches with the rows of their nodes: the same training loop under every ``mode``.

        ``batches``: mini-batches as :meth:`featstore.Trace.record` takes them, an iterable or a function of
        the epoch's number; or ``seeds=`` and ``fanouts=``, and the store samples itself. Which mode, how much
        memory, which rank and all else: :class:`featstore.loaders.options.LoaderOptions`.
        """
        from featstore.loaders.loader import Loader

        self.check_open()
        return Loader(self, batches, **options)

    def loader_costs(
        self, batches: Sampler | None = None, *, seeds: Any = None, fanouts: Sequence[int] | None = None,
        batch_size: int | None = None, memory: int | str = MEMORY, disk: int | str | None = None,
        **options: Any,
    ) -> LoaderCosts:  # fmt: skip
        """What each mode of :meth:`loader` would cost on this machine, in time, bytes, disk and memory, and
        which one ``mode="auto"`` takes, and why. All parameters are those of
        :func:`featstore.loaders.costs.costs.loader_costs`."""
        from featstore.loaders.costs.costs import loader_costs

        self.check_open()
        check_options(options, options_of(loader_costs), "loader_costs")
        return loader_costs(
            self, batches, seeds=seeds, fanouts=fanouts, batch_size=batch_size, memory=memory, disk=disk,
            **options
        )  # fmt: skip

    def compiled(self, name: str = "default") -> CompiledTrace:
        """A compiled trace of this store, to be looked at; ``loader(mode="compiled", name=name, reuse=True)``
        trains from it. See :class:`featstore.loaders.compiled.trace.CompiledTrace`."""
        from featstore.loaders.compiled.trace import CompiledTrace

        self.check_open()
        return CompiledTrace(self, name)
