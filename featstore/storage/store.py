"""An open store on disk: the manifest, its small arrays, and what is known of its tables.

Opening parses the manifest, holds its generation against ``featstore gc`` with a shared lock on the
generation's directory, and checks that every listed file is there with its size. It reads no rows and takes
milliseconds. A store can be pickled and survives fork: the copy opens the same generation, even if a newer
one has been committed since.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import Named, as_count, as_path, known_name, shown
from featstore.base.called import called
from featstore.base.dtypes import dtype_from_name
from featstore.base.sheets import Sheet, Shown
from featstore.errors import (
    ArgumentError,
    ClosedError,
    CorruptionError,
    FormatError,
    IncompleteStoreError,
    NotInMemoryError,
    SourceError,
)
from featstore.layout import TableLayout
from featstore.storage.arrays import load_array
from featstore.storage.edge_types import EdgeType, node_types
from featstore.storage.locks import held_with_others, is_held
from featstore.storage.manifest import (
    MANIFEST_NAME,
    ArrayEntry,
    FileEntry,
    GraphEntry,
    TableEntry,
    array_chunk,
    edge_parts,
    uuid_of,
)
from featstore.storage.manifest_reading import check_files, is_current, parse, read_manifest
from featstore.storage.sheets import array_text, graph_sheet, table_sheet


class Table(Shown):
    """A table of a store: ``rows`` rows of shape ``row_shape`` and type ``dtype``, ``row_bytes`` each. No
    array: its rows are read by a reader, and what takes it for one (``np.asarray(table)``, ``table[ids]``)
    gets NotInMemoryError."""

    def __init__(self, store: OpenStore, name: str, entry: TableEntry) -> None:
        self.store = store
        self.name = name
        self.entry = entry
        self.rows = entry.rows
        self.row_shape = tuple(entry.row_shape)
        self.dtype = dtype_from_name(entry.dtype)
        self.row_bytes = entry.row_bytes

    @property
    def layout(self) -> TableLayout:
        return self.entry.layout

    def __len__(self) -> int:
        """Number of rows."""
        return self.rows

    def __bool__(self) -> bool:
        return True

    # Rows are read by a reader, within its budget: what would take them for an array in memory is told so.

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        raise self._not_in_memory()

    def __getitem__(self, index: Any) -> Any:
        raise self._not_in_memory()

    def __iter__(self) -> Iterator[Any]:
        raise self._not_in_memory()

    def _not_in_memory(self) -> NotInMemoryError:
        return NotInMemoryError(
            f"table {self.name!r} is on disk ({self.data_bytes:,} bytes) and no array in memory: take it as "
            f"an array with a budget, store.table({self.name!r}, memory=...)[ids], or read rows with "
            f"store.reader(memory=...), as reader.read({{{self.name!r}: ids}})"
        )

    @property
    def data_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def tables_on_disk(self) -> Sequence[Table]:
        """The tables whose rows are on this machine's disk: this one, or of a table of several hosts what is
        here of it."""
        return (self,)

    @property
    def partition_offsets(self) -> NDArray[np.int64]:
        """int64 [partitions + 1]: partition p is rows offsets[p] to offsets[p + 1]."""
        from featstore.base.checks import check_offsets

        offsets: NDArray[np.int64] = self.store.load(self.entry.order.partition_offsets)
        check_offsets(offsets, 0, self.rows, f"the partition offsets of {self._where()}")
        return offsets

    def row_of_node(self) -> NDArray[Any] | None:
        """[rows], the row of each node id, a permutation; None where row = node id. Raises CorruptionError,
        FormatError."""
        return self._map(self.entry.order.row_of_node, "row_of_node")

    def node_of_row(self) -> NDArray[Any] | None:
        """[rows], the node id of each row, a permutation; None where row = node id. Raises CorruptionError,
        FormatError."""
        return self._map(self.entry.order.node_of_row, "node_of_row")

    def maps(self) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """(row_of_node, node_of_row), each the other's inverse; None where row = node id. Raises
        CorruptionError, FormatError."""
        from featstore.base.checks import check_inverse

        order = self.entry.order
        if order.row_of_node is None or order.node_of_row is None:
            return None
        row_of_node, node_of_row = self.store.load(order.row_of_node), self.store.load(order.node_of_row)
        check_inverse(row_of_node, node_of_row, f"row_of_node and node_of_row of {self._where()}")
        return row_of_node, node_of_row

    def rows_by_degree(self, count: int | None = None) -> NDArray[Any] | None:
        """Distinct rows by descending degree, the first ``count`` of them; None where the store was packed
        without a graph. Raises CorruptionError, FormatError."""
        first = None if count is None else as_count(count, "count", 0)
        return self._map(self.entry.order.rows_by_degree, "rows_by_degree", first)

    def _map(self, entry: ArrayEntry | None, what: str, first: int | None = None) -> NDArray[Any] | None:
        from featstore.base.checks import check_distinct

        if entry is None:
            return None
        values = self.store.load(entry, first)
        check_distinct(values, self.rows, f"{what} of {self._where()}")
        return values

    def _where(self) -> str:
        return f"table {self.name!r} of {self.store.path}"

    def _sheet(self) -> Sheet:
        return table_sheet(self)

    def __repr__(self) -> str:
        return called(f"{self.store!r}.table", self.name)


class StoredGraph(Shown):
    """The topology over a table's rows; see :class:`featstore.storage.manifest.GraphEntry`. ``table`` has
    the targets' rows, ``source_table`` the sources', which is the same where ``edge_type`` is None;
    ``edges`` are stored edges, ``hubs`` the number of rows whose lists stand in a second, contiguous copy.
    ``has_edge_ids``: the numbers that the user knows the edges by are kept; ``has_times``: lists ascend by
    them."""

    def __init__(self, store: OpenStore, name: str, entry: GraphEntry) -> None:
        self.store = store
        self.name = name
        self.entry = entry
        self.table = store.tables[entry.table]
        self.source_table = store.tables[entry.table_of_sources]
        self.edges = entry.edges
        self.hubs = 0 if entry.hubs is None else entry.hubs.rows.shape[0]
        parts = edge_parts(entry)
        self.has_edge_ids = "edge_ids" in parts
        self.has_weights, self.has_times = "weights" in parts, "times" in parts

    @property
    def edge_type(self) -> EdgeType | None:
        """(source type, relation, target type); None where edges have no type."""
        return self.entry.edge_type

    def hub_rows(self, count: int | None = None) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ``count`` most wanted hubs (all by default): their rows [hubs], and the offsets of their lists,
        int64 [hubs + 1]."""
        if self.entry.hubs is None:
            return np.empty(0, np.int32), np.zeros(1, np.int64)
        count = self.hubs if count is None else min(as_count(count, "count", 0), self.hubs)
        from featstore.base.checks import check_distinct, check_offsets

        rows = self.store.load(self.entry.hubs.rows)[:count]
        check_distinct(rows, self.table.rows, f"a hub of {self.where()}")
        offsets = self.store.load(self.entry.hubs.offsets)
        check_offsets(offsets, 0, self.entry.hubs.sources.rows, f"the offsets of the hubs of {self.where()}")
        return rows, offsets[: count + 1]

    def where(self) -> str:
        """Which graph this is, for messages."""
        return f"graph {self.name!r} of {self.store.path}"

    def __repr__(self) -> str:
        return f"{self.store!r}.graphs[{self.name!r}]"

    def _sheet(self) -> Sheet:
        return graph_sheet(self)


class _Arrays(Mapping[str, NDArray[Any]]):
    """The store's small arrays; each is read and verified when asked for."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store

    def __getitem__(self, name: str) -> NDArray[Any]:
        known = self._store.manifest.arrays
        return self._store.load(known[known_name(name, known, "the store has no array")])

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.manifest.arrays)

    def __len__(self) -> int:
        return len(self._store.manifest.arrays)

    def __repr__(self) -> str:
        arrays = self._store.manifest.arrays.items()
        return f"{{{', '.join(f'{name!r}: <{array_text(entry)}>' for name, entry in arrays)}}}"


class OpenStore:
    """An open store; see :func:`featstore.open`. ``tables``, ``graphs`` and ``arrays`` are mappings by
    name."""

    _graph_class: ClassVar[type[StoredGraph]] = StoredGraph

    def __init__(self, path: str | os.PathLike[str], _manifest: bytes | None = None) -> None:
        self.path = Path(os.path.abspath(as_path(path, "path")))
        self._lock: int | None = None
        self._mutex = threading.Lock()
        self._open(_manifest)

    def _open(self, pinned: bytes | None) -> None:
        # The generation may be replaced and collected between reading the manifest and locking it: then look
        # again.
        for _ in range(5):
            if pinned is None:
                self.manifest, self._text = read_manifest(self.path)
            else:
                self.manifest, self._text = parse(pinned, self.path), pinned
            self._lock = held_with_others(self.path / self.manifest.generation)
            if self._lock is not None and is_current(self.path, self._text, pinned=pinned is not None):
                break
            OpenStore.close(self)  # what is left of it, as files that are not its own are, or another
            if pinned is not None:
                raise IncompleteStoreError(
                    f"generation {self.manifest.generation} of {self.path} has been removed; open the "
                    "store anew"
                )
        else:
            raise CorruptionError(
                self.path / self.manifest.generation, None, "the generation's directory", "nothing"
            )
        if uuid_of(self._text, self.uuid) != self.uuid:
            raise FormatError(
                f"{self.path / MANIFEST_NAME} has been changed since it was written: its uuid is not "
                "that of its content"
            )
        self._sizes = {entry.path: entry for entry in self.manifest.files}
        check_files(self.path, self.manifest.files)
        self.tables: dict[str, Table] = Named(
            "the store has no table", {n: Table(self, n, e) for n, e in self.manifest.tables.items()}
        )
        self.graphs: Mapping[str, StoredGraph] = Named(
            "the store has no graph",
            {n: self._graph_class(self, n, e) for n, e in self.manifest.graphs.items()},
        )
        self.arrays: Mapping[str, NDArray[Any]] = _Arrays(self)
        self.featureless = self.manifest.featureless  # types of nodes of which nobody reads rows

    @property
    def uuid(self) -> str:
        return self.manifest.uuid

    @property
    def edge_types(self) -> list[EdgeType]:
        """The edge types of its graphs, (source type, relation, target type); none where they have none."""
        return [of for graph in self.graphs.values() if (of := graph.edge_type) is not None]

    @property
    def node_types(self) -> list[str]:
        """The tables of nodes: all but those of edges, and of a part the copies of other hosts' rows."""
        copies = self.manifest.family.copies if self.manifest.family else set()
        return [name for name in node_types(self.tables, self.edge_types) if name not in copies]

    @property
    def on_disk(self) -> OpenStore:
        """The store whose rows are on this machine's disk, and beside which is written what is made of them:
        this one, or of a store of several hosts this one's part."""
        return self

    def table(self, name: str) -> Table:
        """A table, or one that a graph consists of (``GRAPH/offsets``, ``GRAPH/sources``, ``GRAPH/hubs``,
        ``GRAPH/edge_ids``, ``GRAPH/hub_edge_ids`` and so on). Raises KeyError."""
        if isinstance(name, str) and name in self.tables:
            return self.tables[name]
        known = self.manifest.all_tables
        return Table(self, name, known[known_name(name, known, "the store has no table")])

    def file_entry(self, path: str) -> FileEntry:
        """What the manifest says of a file (path relative to the store)."""
        return self._sizes[known_name(path, self._sizes, "the store has no file")]

    def load(self, entry: ArrayEntry, first: int | None = None) -> NDArray[Any]:
        """A small array, or its ``first`` elements along axis 0. The whole file is verified against its
        digest in either case, block by block. Raises CorruptionError and DeviceError."""
        if not isinstance(entry, ArrayEntry):
            raise ArgumentError(
                "entry must be an ArrayEntry of the store's manifest; for an array by name: "
                "store.arrays[name]"
            )
        first = None if first is None else as_count(first, "first", 0)
        chunk = array_chunk(entry)
        return load_array(self.path, entry, None if chunk is None else self._sizes[chunk], first)

    def check_open(self) -> None:
        """Raise ClosedError where it is closed."""
        if self._lock is None:
            raise ClosedError("the store is closed; open it again")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        raise NotInMemoryError(
            f"the store {self.path} is on disk and no array in memory: read rows with "
            "store.reader(memory=...), and small arrays with store.arrays[name]"
        )

    def check_held(self) -> None:
        """Raise IncompleteStoreError where the generation that is held is not in its place any more."""
        if self._lock is not None and not is_held(self._lock, self.path / self.manifest.generation):
            raise IncompleteStoreError(
                f"generation {self.manifest.generation} is not there any more: the store at {self.path} was "
                "moved or removed, or packed anew, since it was opened; open it again, where it is now"
            )

    def close(self) -> None:
        """Let the generation go. Readers that are open keep their files."""
        with self._mutex:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self._text)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self.path)!r}>"


def check_on_disk(table: Table) -> None:
    """Raise SourceError for a table of several hosts: a file of this store's with its name holds something
    else."""
    if any(one is not table for one in table.tables_on_disk):
        raise SourceError(
            f"the rows of table {table.name!r} are on several hosts: read them through store.reader(...) or "
            "store.loader(...) of the split store, or this host's own through store.part"
        )


def as_store(value: Any, name: str = "store") -> OpenStore:
    """An open store."""
    if not isinstance(value, OpenStore):
        raise ArgumentError(f"{name} must be an open store (featstore.open), not {shown(value)}")
    value.check_open()
    return value
