"""Rows of several hosts, gathered on the disk of one.

What a trace asks for is known before it is compiled. Of a store that is split by hosts the rows of its nodes
come once each, this host's from its disk, others' from them, a block at a time, into tables of the compiled
trace itself, in the order in which the whole table has them; and the trace is compiled for these. So training
asks other hosts for nothing, and what is written is one store, whole or not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.dtypes import node_dtype
from featstore.compile.survey import mark_rows
from featstore.compile.write_records import new_table, table_writer
from featstore.errors import BudgetError, IdError, SourceError
from featstore.hosts.copies import DiskCopies
from featstore.hosts.source import HostsRows
from featstore.hosts.split_store import WholeStore
from featstore.plan.budget import own_bytes
from featstore.reader.lookup import table_need
from featstore.storage.manifest import FORMAT_VERSION, Manifest, TableEntry, encode_manifest, sealed
from featstore.storage.store import OpenStore, Table
from featstore.storage.table_writer import WRITE_THREADS, Appender, catalogue_rows
from featstore.storage.transaction import Transaction
from featstore.trace.trace import Trace
from featstore.units import PAGE_BYTES

_WORDS_AT_ONCE = 1 << 14
_BLOCK_BYTES = 4 << 20  # asked for at once, and written at once, at most
_BLOCKS = 2 + WRITE_THREADS + 1  # one on its way, one that has come, and those of the appender
_READER_BYTES = 16 << 20  # for staging and planning, at most
_FINDING_BYTES = 16  # a row, while its place is found
_FIND = "know which rows the mini-batches ask for, and gather those of other hosts"


class GatheredTable(Table):
    """Of a table of all hosts the rows of ``nodes`` (distinct node ids), in this order."""

    def __init__(self, whole: Table, entry: TableEntry, nodes: NDArray[Any]) -> None:
        super().__init__(whole.store, whole.name, entry)
        self.nodes, self._rows = nodes, DiskCopies(nodes, whole.rows, whole.name)

    def find(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """int64 [n], the row of each node."""
        return self._rows.find(ids.astype(np.int64, copy=False))


class Gathering:
    """The rows of a split store that a trace asks for. Made, it knows which; :meth:`brought` has them come.

    ``types``: node types to tables. ``memory_bytes``: of compiling; ``held_bytes`` of it are taken as long as
    node ids are to be found. ``asked``: "remote_rows" and "remote_bytes" that have come from other hosts.
    ``tell(stage, table, bytes)`` is told what has been done. Raises IdError, BudgetError, SourceError.
    """

    def __init__(
        self, store: WholeStore, trace: Trace, types: Mapping[str, str], memory_bytes: int,
        transaction: Transaction, tell: Callable[[str, str, int], None],
    ) -> None:  # fmt: skip
        self._store, self._memory_bytes, self._transaction, self._tell = (
            store,
            memory_bytes,
            transaction,
            tell,
        )
        self._names, self.tables = list(types.values()), dict[str, GatheredTable]()
        self.held_bytes = 0
        self.asked: dict[str, int] = {}  # of other hosts: rows and bytes
        if "records" in types.values():
            raise SourceError("a table that is called 'records' cannot be gathered for a compiled trace")
        for node_type, name in types.items():
            self.tables[name] = self._table(trace, node_type, store.table(name))

    @property
    def data_bytes(self) -> int:
        """Of the rows, which are written once."""
        return sum(table.data_bytes for table in self.tables.values())

    def disk_left(self, limit_bytes: int | None) -> int | None:
        """What a limit leaves for what is made of these rows. Raises SourceError."""
        if limit_bytes is not None and limit_bytes < self.data_bytes:
            raise SourceError(
                f"disk= allows {limit_bytes:,} bytes, but the rows that the mini-batches ask for take "
                f"{self.data_bytes:,} once, and are gathered on this host's disk: give more (a rolling "
                "loader has two episodes there), or ask for fewer rows"
            )
        return None if limit_bytes is None else limit_bytes - self.data_bytes

    # Which rows.

    def _table(self, trace: Trace, node_type: str, whole: Table) -> GatheredTable:
        mapped = whole.entry.order.node_of_row is not None
        map_bytes = node_dtype(whole.rows).itemsize * whole.rows if mapped else 0
        self._check(-(-whole.rows // 64) * 8 + map_bytes)
        nodes = _in_order(self._marked(trace, node_type, whole), whole)
        self._check(
            DiskCopies.bytes_for(whole.rows, len(nodes)) + (nodes.itemsize + _FINDING_BYTES) * len(nodes)
        )
        self.held_bytes += DiskCopies.bytes_for(whole.rows, len(nodes)) + nodes.nbytes
        self._check(self._least_bytes)
        base = f"{self._transaction.name}/tables/{whole.name}"
        entry = new_table(self._transaction.catalogue, base, len(nodes), whole.row_shape, whole.dtype)
        return GatheredTable(whole, entry, nodes)

    def _check(self, bytes_beside: int) -> None:
        if self.held_bytes + bytes_beside > self._memory_bytes:
            raise BudgetError(self.held_bytes + bytes_beside, self._memory_bytes, _FIND)

    def _marked(self, trace: Trace, node_type: str, whole: Table) -> NDArray[np.uint64]:
        """A bit for each node of the table that the trace asks for."""
        bits = np.zeros(-(-whole.rows // 64), np.uint64)
        for batch in range(len(trace)):
            if batch + 1 < len(trace):
                trace.expect(batch + 1)
            ids = trace.ids(batch)[node_type]
            if not mark_rows(ids, whole.rows, bits):
                wrong = ids[(ids < 0) | (ids >= whole.rows)][0]
                raise IdError(
                    f"mini-batch {batch} of the trace has node id {wrong}, but table {whole.name!r} has "
                    f"{whole.rows:,} rows: the trace was sampled from another graph"
                )
        self._tell("deciding", whole.name, 0)
        return bits

    # The rows.

    def _needs_bytes(self) -> int:
        """Of a reader of this host's own rows."""
        wanted = [self._store.table(name) for name in self._names]
        return own_bytes(1, [table_need(one, True) for table in wanted for one in table.tables_on_disk])

    @property
    def _row_bytes(self) -> int:
        """Of the longest row, or a page."""
        return max(PAGE_BYTES, *(self._store.table(name).row_bytes for name in self._names))

    @property
    def _least_bytes(self) -> int:
        """Memory to bring rows, beside what is held."""
        return self._needs_bytes() + _BLOCKS * self._row_bytes

    def brought(self) -> OpenStore:
        """Write the rows, each read or asked for once; returns a store of these tables, which can be read
        before it is committed. Raises PeerError, and what reading and writing raise."""
        spare = self._memory_bytes - self.held_bytes - self._least_bytes
        reader_bytes = self._needs_bytes() + min(_READER_BYTES, spare // 2)
        left = self._memory_bytes - self.held_bytes - reader_bytes
        block_bytes = max(self._row_bytes, min(_BLOCK_BYTES, left // _BLOCKS))
        source = self._store.source(list(self.tables), memory=reader_bytes, static=None, static_memory=0)
        try:
            for table in self.tables.values():
                self._write(source, table, block_bytes)
            self.asked = {"remote_rows": source.remote_rows, "remote_bytes": source.remote_bytes}
        finally:
            source.close()
        return self._opened()

    def _write(self, source: HostsRows, table: GatheredTable, block_bytes: int) -> None:
        if not table.rows:
            return
        catalogue = self._transaction.catalogue
        writer = table_writer(catalogue, table.entry)
        try:
            appender = Appender(writer, 0, block_bytes)
            for rows in _blocks(source, table, block_bytes):
                appender.append(rows)
                self._tell("gather", table.name, len(rows))
            appender.finish()
            writer.finish()
        finally:
            writer.close()
        catalogue_rows(catalogue, table.entry)

    def _opened(self) -> OpenStore:
        manifest = Manifest(
            format="featstore", version=FORMAT_VERSION, reader_features=[], writer_features=[], uuid="",
            generation=self._transaction.name, tables={n: t.entry for n, t in self.tables.items()}, arrays={},
            files=sorted(self._transaction.catalogue.files.values(), key=lambda file: file.path),
            provenance={},
        )  # fmt: skip
        return OpenStore(self._transaction.generation.store, encode_manifest(sealed(manifest)))


def _in_order(bits: NDArray[np.uint64], whole: Table) -> NDArray[Any]:
    """The nodes whose bits are set, in the order of their rows: in it each host's disk has them, too."""
    dtype = node_dtype(whole.rows)
    found = [np.empty(0, dtype)]
    node_of_row = whole.node_of_row()
    for low in range(0, len(bits), _WORDS_AT_ONCE):
        if node_of_row is None:
            some = bits[low : low + _WORDS_AT_ONCE].astype("<u8", copy=False).view(np.uint8)
            nodes = np.flatnonzero(np.unpackbits(some, bitorder="little")) + 64 * low
        else:
            nodes = node_of_row[64 * low : 64 * (low + _WORDS_AT_ONCE)].astype(np.int64, copy=False)
            nodes = nodes[bits[nodes >> 6] >> (nodes & 63).astype(np.uint64) & np.uint64(1) > 0]
        found.append(nodes.astype(dtype))
    return np.concatenate(found)


def _blocks(source: HostsRows, table: GatheredTable, block_bytes: int) -> Iterator[NDArray[np.uint8]]:
    """The rows of a table as bytes, in blocks; the next is on its way while one is in use."""
    each = block_bytes // table.row_bytes
    buffers = [aligned_buffer(each * table.row_bytes) for _ in range(2)]

    def ask(turn: int) -> tuple[Any, NDArray[np.uint8]] | None:
        ids = table.nodes[turn * each : (turn + 1) * each].astype(np.int64)
        if not len(ids):
            return None
        data = buffers[turn % 2][: len(ids) * table.row_bytes]
        out = data.view(table.dtype).reshape(len(ids), *table.row_shape)
        return source.submit({table.name: ids}, out={table.name: out}), data

    turn, ahead = 0, ask(0)
    try:
        while ahead is not None:
            (request, data), turn = ahead, turn + 1
            request.result()
            ahead = ask(turn)
            yield data
    finally:
        if ahead is not None:
            ahead[0].exception()  # it writes into memory that goes
