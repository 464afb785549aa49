"""One store of a family, being written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.layout import TableLayout
from featstore.packing.convert import ValueReport
from featstore.packing.permute import PermuteJob, RowMaps
from featstore.packing.sources.base import FeatureSource
from featstore.packing.split.plan import SplitPlan
from featstore.packing.steps import table_entry, write_rows
from featstore.reader.reader import Reader
from featstore.storage.belongings import SPILL
from featstore.storage.journal import TableProgress
from featstore.storage.manifest import (
    FAMILY_FEATURE,
    RELATIONS_FEATURE,
    SPLIT_GRAPHS_FEATURE,
    SPLIT_VALUES_FEATURE,
    ArrayEntry,
    FamilyEntry,
    GraphEntry,
    OrderEntry,
    TableEntry,
    edge_parts,
)
from featstore.storage.store import Table
from featstore.storage.table_writer import (
    catalogue_rows,
    write_array,
    write_rows_metadata,
    write_vector,
    zarr_group_json,
)
from featstore.storage.transaction import Transaction, graph_features

_NUMBERS_AT_ONCE = 1 << 19


def pieces(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Numbers as blocks of some."""
    for low in range(0, len(values), _NUMBERS_AT_ONCE):
        yield values[low : low + _NUMBERS_AT_ONCE]


class StoredRows(FeatureSource):
    """Rows of a table of a store, by their numbers, ascending."""

    def __init__(self, reader: Reader, table: Table, rows: NDArray[np.int64]) -> None:
        super().__init__(f"table {table.name!r}", len(rows), table.row_shape, table.dtype)
        self._reader, self._table, self._own = reader, table.name, rows

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        block = self._empty(self._block_rows_used(start, block_rows))
        for first in range(start, len(self._own), block_rows):
            rows = self._own[first : first + block_rows]
            yield self._reader.read(rows, out=block[: len(rows)])

    def fingerprint(self) -> dict[str, str | int]:
        return {"kind": "rows of a store", "uuid": self._reader.store.uuid, "table": self._table}


class FamilyStore:
    """One store of a family, being written; ``name``: its directory, for progress."""

    def __init__(self, plan: SplitPlan, transaction: Transaction, name: str) -> None:
        self.plan, self.transaction = plan, transaction
        self.catalogue, self.generation = transaction.catalogue, transaction.generation
        self._name = name

    def table(
        self, name: str, source: FeatureSource, order: OrderEntry, maps: RowMaps, memory_bytes: int
    ) -> TableEntry:
        """Write a table; ``maps`` say where the source's rows go, and whose they are."""
        base = f"{self.generation.name}/tables/{name}"
        assert source.rows is not None
        self.catalogue.directory(f"{base}/rows")
        self.catalogue.directory(f"{base}/page_checksums")
        self.catalogue.write(f"{base}/zarr.json", zarr_group_json())
        layout = TableLayout.choose(source.rows, source.row_bytes)
        entry = table_entry(base, layout, source.row_shape, source.dtype, order)
        write_rows_metadata(self.catalogue, entry, source.dtype)
        if maps.row_of_source is not None:
            self._begun_with(name, memory_bytes)
        report, progress = ValueReport(source.dtype, source.dtype), self.transaction.journal.table(name)
        with self.transaction.resuming():
            report.restore(progress.report)
        if layout.rows:
            if not progress.done:
                if maps.row_of_source is not None:
                    self.transaction.disk.mkdir(self.generation.spill)
                job = PermuteJob(
                    self.transaction.disk, name, source, layout, report, maps,
                    self.generation.spill, lambda chunk: self.generation.store / entry.chunk_path(chunk),
                    memory_bytes, self.plan.memory_bytes - memory_bytes, self.transaction.journal, progress,
                    self.plan.stages, f"{self._name}: {name}",
                )  # fmt: skip
                write_rows(self.transaction, job, entry)
            catalogue_rows(self.catalogue, entry)
        statistics = report.result() | {"rows_digest": f"{progress.written_digest:016x}"}
        return msgspec.structs.replace(entry, statistics=statistics)

    def _begun_with(self, name: str, memory_bytes: int) -> None:
        """A table's rows are put in order within this memory: of what was begun within another, nothing is
        kept, as buckets would be others."""
        tables = self.transaction.journal.state.tables
        progress = self.transaction.journal.table(name)
        if not progress.done and progress.memory_bytes not in (0, memory_bytes):
            progress = tables[name] = TableProgress(memory_bytes=memory_bytes)
            self.transaction.journal.save()  # it told of files that are removed
            self.transaction.disk.rmtree(self.generation.spill, SPILL)  # of this table: those before are done
        if not progress.done:
            progress.memory_bytes = memory_bytes

    def order(
        self, name: str, method: str, parameters: dict[str, Any], offsets: NDArray[np.int64],
        **maps: NDArray[Any] | None,
    ) -> OrderEntry:  # fmt: skip
        base = f"{self.generation.name}/tables/{name}"
        entries = {
            what: None if values is None else write_array(self.catalogue, f"{base}/{what}", values)
            for what, values in maps.items()
        }
        partitions = write_array(self.catalogue, f"{base}/partition_offsets", offsets)
        return OrderEntry(method, parameters, partitions, **entries)

    def vector(
        self, path: str, blocks: Iterator[NDArray[Any]], rows: int, dtype: np.dtype[Any]
    ) -> TableEntry:
        """A table of numbers of a graph, in the directory ``path`` of the generation."""
        self.plan.stages.begin("topology", f"{self._name}: {path.partition('/')[2]}")
        return write_vector(self.catalogue, f"{self.generation.name}/{path}", blocks, rows, dtype)

    def array(self, name: str, values: NDArray[Any]) -> ArrayEntry:
        return write_array(self.catalogue, f"{self.generation.name}/{name}", values)

    def commit(
        self, tables: dict[str, TableEntry], graphs: dict[str, GraphEntry], arrays: dict[str, ArrayEntry],
        family: FamilyEntry, provenance: dict[str, Any], featureless: list[str] | None = None,
    ) -> None:  # fmt: skip
        """Make it the store's content; ``featureless``: tables whose nodes have no features."""
        groups = ["arrays"] if arrays else []
        groups += ["graphs", *(f"graphs/{name}" for name in graphs)] if graphs else []
        lists = {name: one.lists for name, one in family.split_graphs.items() if one.lists is not None}
        groups += [f"graphs/{name}/lists" for name in lists]
        self.transaction.commit(
            groups, tables=tables, arrays=arrays, graphs=graphs, family=family, provenance=provenance,
            featureless=featureless or [],
            features=[
                *graph_features(graphs.values()), FAMILY_FEATURE,
                *([SPLIT_GRAPHS_FEATURE] if family.split_graphs else []),
                *([SPLIT_VALUES_FEATURE] if any(map(edge_parts, lists.values())) else []),
                *([RELATIONS_FEATURE] if not graphs and _has_relations(family) else []),
            ],
        )  # fmt: skip

    def blocks(self, table: Table, step: int) -> Iterator[NDArray[Any]]:
        """A table's rows as they are, in blocks."""
        with self.plan.reader(table) as reader:
            for low in range(0, table.rows, step):
                yield reader.read_runs([(low, min(low + step, table.rows))])


def _has_relations(family: FamilyEntry) -> bool:
    return any(isinstance(graph.relation, str) for graph in family.split_graphs.values())
