"""The steps of a pack, which share its state: each table's order, maps and rows, and then the commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from featstore.base.dtypes import dtype_name, node_dtype
from featstore.base.files import RegularFile
from featstore.errors import BudgetError, CorruptionError, SourceError
from featstore.layout import TableLayout
from featstore.packing import permute, spill
from featstore.packing.convert import ValueReport, target_dtype
from featstore.packing.inputs import Inputs, changed_file, described, identity
from featstore.packing.keys.packed import PackedKeys
from featstore.packing.ordering import Orders, check_edge_rows, load
from featstore.packing.progress import PackStages, Progress
from featstore.packing.request import Options
from featstore.packing.row_ids import read_ids, write_ids
from featstore.packing.sources.foreign import ZarrRows
from featstore.packing.sources.opening import FeatureSource
from featstore.packing.sources.shards import ShardedRows
from featstore.packing.typed import TypedOrders
from featstore.storage.edge_types import EDGE_FEATURES
from featstore.storage.manifest import (
    KEYS_FEATURE,
    ArrayEntry,
    GraphEntry,
    OrderEntry,
    TableEntry,
    array_chunk,
)
from featstore.storage.table_writer import (
    TableWriter,
    catalogue_rows,
    write_array,
    write_rows_metadata,
    zarr_group_json,
)
from featstore.storage.transaction import Transaction, graph_features

_DISK_SLACK_BYTES = 1 << 20


def pack_fingerprint(inputs: Inputs, options: Options) -> dict[str, Any]:
    """What a resumed pack must be equal in."""
    return {
        "tables": {n: s.fingerprint() for n, s in inputs.tables.items()}, "order": dict(options.order),
        "partitions": dict(options.partitions), "dtype": dict(options.dtype), "seed": options.seed,
        "memory": options.memory_bytes, "topology": [options.topology, options.hubs, options.hub_rank],
        "train": {n: identity(t) if not isinstance(t, str) else t for n, t in options.train.items()},
        "arrays": {n: identity(a) for n, a in inputs.arrays.items()},
        "graphs": {n: identity(g) for n, g in inputs.graphs.items()}, "graph_key": dict(options.graph_key),
        "permutation": {n: identity(p) for n, p in options.permutation.items()},
        **({"edge_ids": True} if options.edge_ids else {}),
        **({"types": inputs.types} if inputs.types else {}),
        **({"values": values} if (values := _values_fingerprint(inputs)) else {}),
        **({"node_keys": {n: dict(k.fingerprint) for n, k in inputs.keys.items()}} if inputs.keys else {}),
    }  # fmt: skip


def _values_fingerprint(inputs: Inputs) -> dict[str, Any]:
    """Of weights and times, by graph."""
    return {n: {one.part: one.source.fingerprint() for one in v} for n, v in inputs.values.items()}


class Packing:
    """One run of a pack: the state that its steps share."""

    def __init__(
        self,
        transaction: Transaction,
        inputs: Inputs,
        options: Options,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.transaction, self.disk, self.catalogue = transaction, transaction.disk, transaction.catalogue
        self.generation = transaction.generation
        self.inputs = inputs
        self.tables = inputs.tables
        self.options = options
        self._stages = PackStages(progress)
        self.warnings: list[str] = []  # what the user is to hear once the store is there
        self._given = dict(inputs.tables)  # some are replaced, when their rows are counted
        self._began: dict[str, Any] = {}  # what told the inputs from others then
        self._ids: dict[str, Path] = {}  # of tables whose rows are placed by ids

    def run(self) -> None:
        self._began = pack_fingerprint(self.inputs, self.options)
        self.transaction.start(self._began)
        self.disk.mkdir(self.generation.spill)
        for table in self.tables:
            self._read_ids(table)
        keys = PackedKeys(
            self.inputs.keys, self.disk, self.generation.spill, self.options.memory_bytes, self._stages
        )
        with closing(keys):
            self._check_space(keys.bytes)
            self._run(keys)

    def _run(self, keys: PackedKeys) -> None:
        edge_source = self._edge_source()
        rows = None if edge_source is None else edge_source.rows
        inputs, orders_class = self.inputs, TypedOrders if self.inputs.types else Orders
        orders = orders_class(self.transaction, inputs, self.options, self._stages, keys, rows)
        orders.prepare({name: self._layout(name, keys) for name in inputs.types and sorted(inputs.ordered)})
        entries = {table: self._table(table, orders, keys) for table in self.tables}
        graphs: dict[str, GraphEntry] = {}
        for name in inputs.types or self.tables:
            progress = self.transaction.journal.table(name)
            for file in progress.graph_files:
                self.catalogue.add(file.path, file.bytes, file.digest)
            if progress.graph is not None:
                graphs[name] = progress.graph
        for name in (
            inputs.types if graphs and self.options.edge_ids else ()
        ):  # of which nobody may have known the rows before
            check_edge_rows(graphs[name].edges, entries[name].rows if name in entries else None, name)
        if edge_source is not None:  # of which nobody may have known the rows before
            check_edge_rows(next(iter(graphs.values())).edges, entries[EDGE_FEATURES].rows)
        root = f"{self.generation.name}/arrays"
        array_entries = {n: write_array(self.catalogue, f"{root}/{n}", a) for n, a in inputs.arrays.items()}
        groups = ["arrays"] if inputs.arrays else []
        groups += ["graphs", *(f"graphs/{g}" for g in graphs)] if graphs else []
        key_entries = keys.write(self.catalogue, self.generation.name)
        groups += ["keys"] if key_entries else []
        sources = {n: described(s) for n, s in self.tables.items()}
        self._check_unchanged()
        self.transaction.commit(
            groups, tables=entries, arrays=array_entries,
            features=graph_features(graphs.values()) + [KEYS_FEATURE] * bool(key_entries),
            provenance={"seed": self.options.seed, "sources": sources}, graphs=graphs,
            featureless=inputs.featureless, keys=key_entries,
        )  # fmt: skip

    def _check_unchanged(self) -> None:
        """Raise SourceError where an input is another one now than when the pack began."""
        other = changed_file(self._began) or self._changed_folder()
        if other is not None:
            raise SourceError(
                f"{other} has changed since this pack began, and may have been read in part before and in "
                "part after: pack again, with overwrite=True (--overwrite)"
            )

    def _changed_folder(self) -> str | None:
        """What is of several files, of which one is another now than when the pack began."""
        looked_at: list[tuple[str, FeatureSource, Any]] = [
            (f"table {name!r}", one, self._began["tables"][name]) for name, one in self._given.items()
        ]
        for name, values in self.inputs.values.items():
            looked_at += [
                (f"{one.part} of graph {name!r}", one.source, self._began["values"][name][one.part])
                for one in values
            ]
        return next(
            (
                what for what, source, before in looked_at
                if (isinstance(source, ShardedRows) or (isinstance(source, ZarrRows) and source.is_folder))
                and source.fingerprint() != before
            ),
            None,
        )  # fmt: skip

    def _edge_source(self) -> FeatureSource | None:
        """The table whose rows the ids of the only graph's edges are to number, if there is one."""
        alone = self.options.edge_ids and len(self.inputs.graphs) == 1 and not self.inputs.types
        return self.tables.get(EDGE_FEATURES) if alone else None

    def _check_space(self, more_bytes: int) -> None:
        """Raise DiskFullError before the first byte if the disk cannot hold the store and the largest
        spill."""
        needed, largest = _DISK_SLACK_BYTES + more_bytes, 0
        for name, source in self.tables.items():
            rows = source.rows or 0
            size = rows * self._row_bytes(name)
            permuted = (
                name in self.inputs.ordered
                or self.options.order[name] not in ("auto", "given")
                or name in self._ids
            )
            needed += size + size // 1024 + rows * (24 if permuted else 0)
            spills = permuted and size > self.options.memory_bytes // 2
            largest = max(largest, size if spills else 0)
        needed += largest
        if self.transaction.resumed:
            there = self.transaction.bytes_there(self.generation.directory, self.generation.spill)
            needed = max(_DISK_SLACK_BYTES, needed - there)
        self.transaction.check_space(needed)

    def _row_bytes(self, name: str) -> int:
        source = self.tables[name]
        return source.row_values * target_dtype(source.dtype, self.options.dtype.get(name)).itemsize

    def _read_ids(self, name: str) -> None:
        """Read the ids of a table's rows, if it has a column of them, and keep them beside the spill."""
        source = self.tables[name]
        if source.chosen is None or not source.chosen.placing:
            return
        total = None if source.rows is None else 8 * source.rows
        self._stages.begin("ids", name, total)
        memory = self.options.memory_bytes - source.held_bytes
        try:
            ids = read_ids(source, memory, lambda count: self._stages.add(8 * count))
        except BudgetError as error:
            raise BudgetError(
                error.needed_bytes + source.held_bytes, self.options.memory_bytes, error.what
            ) from None
        if ids is not None:
            self._ids[name] = self.generation.spill / f"{name}.ids"
            write_ids(ids, self.disk, self._ids[name])

    def _layout(self, name: str, keys: PackedKeys) -> TableLayout:
        source = self._counted(name)
        assert source.rows is not None
        keys.check(name, source.rows)
        return TableLayout.choose(source.rows, self._row_bytes(name))

    def _table(self, name: str, orders: Orders, keys: PackedKeys) -> TableEntry:
        """Write one table whole; returns its entry."""
        layout, progress = self._layout(name, keys), self.transaction.journal.table(name)
        source = self.tables[name]
        base = f"{self.generation.name}/tables/{name}"
        self.catalogue.directory(f"{base}/rows")
        dtype = target_dtype(source.dtype, self.options.dtype.get(name))
        self.catalogue.write(f"{base}/zarr.json", zarr_group_json())
        if progress.order is not None:
            orders.check(name, layout.rows, progress)
        if progress.order is None or (progress.graph is None and self.options.topology):
            orders.make(name, base, layout, progress)
        order = progress.order
        assert order is not None
        for file in progress.order_files + progress.graph_files:
            self.catalogue.add(file.path, file.bytes, file.digest)
        report = ValueReport(source.dtype, dtype)
        with self.transaction.resuming():
            report.restore(progress.report)
        entry = table_entry(base, layout, source.row_shape, dtype, order)
        write_rows_metadata(self.catalogue, entry, dtype)
        if layout.rows:
            if not progress.done:
                write_rows(self.transaction, self._job(name, entry, report), entry)
            catalogue_rows(self.catalogue, entry)
        if report.overflowed:
            self.warnings.append(
                f"table {name!r}: {report.overflowed:,} numbers are too large for {dtype_name(dtype)}, and "
                "are infinite in the store: cast to a wider dtype, such as float32 or bfloat16, or scale them"
            )
        statistics = report.result() | {"rows_digest": f"{progress.written_digest:016x}"}
        return msgspec.structs.replace(entry, statistics=statistics)

    def _job(self, name: str, entry: TableEntry, report: ValueReport) -> permute.PermuteJob:
        ids = None
        if name in self._ids:
            width = node_dtype(entry.rows).itemsize
            needed = entry.rows * width * (3 if entry.order.row_of_node is None else 5)
            if needed > self.options.memory_bytes:
                raise BudgetError(
                    needed, self.options.memory_bytes, f"place the rows of table {name!r} by their ids"
                )
            ids = np.empty(entry.rows, node_dtype(entry.rows))
            with RegularFile(self._ids[name], ids.nbytes) as file:
                file.read_into(ids, 0)
        maps = permute.RowMaps.of(
            load(self.catalogue, entry.order.row_of_node), load(self.catalogue, entry.order.node_of_row), ids
        )
        held = maps.held_bytes
        return permute.PermuteJob(
            self.disk, name, self.tables[name], entry.layout, report, maps, self.generation.spill,
            lambda chunk: self.generation.store / entry.chunk_path(chunk), self.options.memory_bytes - held,
            held, self.transaction.journal, self.transaction.journal.table(name), self._stages,
        )  # fmt: skip

    def _counted(self, name: str) -> FeatureSource:
        """The table's source with a known number of rows: an iterator's rows are spooled to the disk if need
        be."""
        source = self.tables[name]
        if source.rows is None:
            self._stages.begin("count", name)
            self.tables[name] = source = permute.spool(
                source,
                self.disk,
                self.generation.spill / f"{name}.spool",
                self.options.memory_bytes,
                self._stages,
            )
        return source


def table_entry(
    base: str, layout: TableLayout, row_shape: Sequence[int], dtype: np.dtype[Any], order: OrderEntry
) -> TableEntry:
    """The entry of a table in the directory ``base``, without statistics."""
    return TableEntry(
        path=f"{base}/rows", rows=layout.rows, row_shape=list(row_shape), dtype=dtype_name(dtype),
        row_bytes=layout.row_bytes, rows_per_chunk=layout.rows_per_chunk,
        page_checksums=ArrayEntry(f"{base}/page_checksums", [layout.pages], "uint32"), order=order,
        statistics={},
    )  # fmt: skip


def write_rows(transaction: Transaction, job: permute.PermuteJob, entry: TableEntry) -> None:
    """Write the chunk files and the checksums; what was read must be what was written."""
    with transaction.resuming():
        permute.check_progress(job)
    checksum_path = transaction.generation.store / str(array_chunk(entry.page_checksums))
    writer = TableWriter(transaction.disk, job.layout, job.chunk_path, checksum_path)
    try:
        if job.maps.row_of_source is None:
            permute.as_given(job, writer)
        elif permute.fits_in_memory(job):
            permute.in_memory(job, writer)
        else:
            spill.spill(job, writer)
        writer.finish()
    finally:
        writer.close()
    if job.progress.written_digest != job.progress.source_digest:
        raise CorruptionError(
            job.name,
            None,
            f"rows of digest {job.progress.source_digest:016x}",
            f"{job.progress.written_digest:016x}",
            "the rows changed between the source and the store: check the memory and the disk, and "
            "pack anew with --overwrite",
        )
    job.progress.done = True
    permute.save_progress(job)
