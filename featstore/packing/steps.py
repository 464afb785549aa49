"""The steps of a pack, which share its state: each table's order, maps and rows, and then the commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import dtype_name, node_dtype
from featstore.base.files import RegularFile
from featstore.errors import BudgetError, CorruptionError
from featstore.layout import TableLayout
from featstore.packing import permute, spill
from featstore.packing.convert import ValueReport, target_dtype
from featstore.packing.inputs import described, identity
from featstore.packing.keys.packed import PackedKeys
from featstore.packing.keys.sources import KeySource
from featstore.packing.ordering import Orders, check_edge_rows, load
from featstore.packing.progress import PackStages, Progress
from featstore.packing.request import Options
from featstore.packing.row_ids import read_ids, write_ids
from featstore.packing.sources.opening import FeatureSource
from featstore.storage.manifest import (
    KEYS_FEATURE,
    ArrayEntry,
    GraphEntry,
    OrderEntry,
    TableEntry,
    array_chunk,
    graph_features,
)
from featstore.storage.relations import EDGE_FEATURES
from featstore.storage.table_writer import (
    TableWriter,
    catalogue_rows,
    write_array,
    write_rows_metadata,
    zarr_group_json,
)
from featstore.storage.transaction import Transaction
from featstore.units import PAGE_BYTES

_DISK_SLACK_BYTES = 1 << 20


def pack_fingerprint(
    tables: Mapping[str, FeatureSource], graphs: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]],
    options: Options, keys: Mapping[str, KeySource] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """What a resumed pack must be equal in."""
    return {
        "tables": {n: s.fingerprint() for n, s in tables.items()}, "order": dict(options.order),
        "partitions": dict(options.partitions), "dtype": dict(options.dtype), "seed": options.seed,
        "memory": options.memory_bytes, "topology": [options.topology, options.hubs, options.hub_rank],
        "train": {n: identity(t) if not isinstance(t, str) else t for n, t in options.train.items()},
        "arrays": {n: identity(a) for n, a in arrays.items()},
        "graphs": {n: identity(g) for n, g in graphs.items()}, "graph_key": dict(options.graph_key),
        "permutation": {n: identity(p) for n, p in options.permutation.items()},
        **({"edge_ids": True} if options.edge_ids else {}),
        **({"node_keys": {n: dict(k.fingerprint) for n, k in keys.items()}} if keys else {}),
    }  # fmt: skip


class Packing:
    """One run of a pack: the state that its steps share."""

    def __init__(
        self, transaction: Transaction, tables: dict[str, FeatureSource], graphs: dict[str, Any],
        options: Options, progress: Callable[[Progress], None] | None,
        keys: Mapping[str, KeySource] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.transaction, self.disk, self.catalogue = transaction, transaction.disk, transaction.catalogue
        self.generation = transaction.generation
        self.tables = tables
        self.graphs = graphs
        self.options = options
        self._stages = PackStages(progress)
        self.warnings: list[str] = []  # what the user is to hear once the store is there
        self._ids: dict[str, Path] = {}  # of tables whose rows are placed by ids
        self._keys = keys

    def run(self, arrays: dict[str, NDArray[Any]]) -> None:
        self.transaction.start(pack_fingerprint(self.tables, self.graphs, arrays, self.options, self._keys))
        self.disk.mkdir(self.generation.spill)
        for table in self.tables:
            self._read_ids(table)
        keys = PackedKeys(
            self._keys, self.disk, self.generation.spill, self.options.memory_bytes, self._stages
        )
        with closing(keys):
            self._check_space(keys.bytes)
            self._run(arrays, keys)

    def _run(self, arrays: dict[str, NDArray[Any]], keys: PackedKeys) -> None:
        edge_source = self._edge_source()
        rows = None if edge_source is None else edge_source.rows
        orders = Orders(self.transaction, self.graphs, arrays, self.options, self._stages, keys, rows)
        entries: dict[str, TableEntry] = {}
        graphs: dict[str, GraphEntry] = {}
        for table in self.tables:
            entries[table] = self._table(table, orders, keys)
            found = self.transaction.journal.table(table).graph
            if found is not None:
                graphs[table] = found
        if edge_source is not None:  # of which nobody may have known the rows before
            check_edge_rows(next(iter(graphs.values())).edges, entries[EDGE_FEATURES].rows)
        root = f"{self.generation.name}/arrays"
        array_entries = {n: write_array(self.catalogue, f"{root}/{n}", a) for n, a in arrays.items()}
        groups = ["arrays"] if arrays else []
        groups += ["graphs", *(f"graphs/{g}" for g in graphs)] if graphs else []
        key_entries = keys.write(self.catalogue, self.generation.name)
        groups += ["keys"] if key_entries else []
        sources = {n: described(s) for n, s in self.tables.items()}
        self.transaction.commit(
            groups, tables=entries, arrays=array_entries,
            features=graph_features(graphs.values()) + [KEYS_FEATURE] * bool(key_entries),
            provenance={"seed": self.options.seed, "sources": sources}, graphs=graphs, keys=key_entries,
        )  # fmt: skip

    def _edge_source(self) -> FeatureSource | None:
        """The table whose rows the ids of the only graph's edges are to number, if there is one."""
        alone = self.options.edge_ids and len(self.graphs) == 1
        return self.tables.get(EDGE_FEATURES) if alone else None

    def _check_space(self, more_bytes: int) -> None:
        """Raise DiskFullError before the first byte if the disk cannot hold the store and the largest
        spill."""
        needed, largest = _DISK_SLACK_BYTES + more_bytes, 0
        for name, source in self.tables.items():
            rows = source.rows or 0
            size = rows * self._row_bytes(name)
            permuted = (
                name in self.graphs or self.options.order[name] not in ("auto", "given") or name in self._ids
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

    def _table(self, name: str, orders: Orders, keys: PackedKeys) -> TableEntry:
        """Write one table whole; returns its entry."""
        source, progress = self._counted(name), self.transaction.journal.table(name)
        base = f"{self.generation.name}/tables/{name}"
        self.catalogue.directory(f"{base}/rows")
        dtype = target_dtype(source.dtype, self.options.dtype.get(name))
        assert source.rows is not None
        keys.check(name, source.rows)
        layout = TableLayout.choose(source.rows, source.row_values * dtype.itemsize)
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
        writer.finish(-(-job.layout.data_bytes // PAGE_BYTES))
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
