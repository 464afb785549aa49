"""An open store: the manifest, its small arrays, and readers over its tables.

Opening parses the manifest, holds its generation against ``featstore gc`` with a shared lock on the generation's directory,
and checks that every listed file is there with its size. It reads no rows and takes milliseconds. A store can be pickled and
survives fork: the copy opens the same generation, even if a newer one has been committed since.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.arrays import load_array
from featstore.dtypes import dtype_from_name
from featstore.errors import ClosedError, CorruptionError, DeviceError, FormatError, IncompleteStoreError
from featstore.layout import TableLayout
from featstore.manifest import (
    MANIFEST_NAME,
    ArrayEntry,
    FileEntry,
    GraphEntry,
    TableEntry,
    array_chunk,
    parse,
    read_manifest,
    uuid_of,
)

_WHOLE_BYTES = 16 * 2**20  # of a reader that reads a table whole, its checksums besides

if TYPE_CHECKING:
    from featstore.compiled.opened import Compiled
    from featstore.mega.loader import MegaBatches
    from featstore.reader import Reader
    from featstore.stored_sampling import StoredSampler


class Table:
    """A table of a store: ``rows`` rows of shape ``row_shape`` and type ``dtype``, ``row_bytes`` each."""

    def __init__(self, store: Store, name: str, entry: TableEntry) -> None:
        self._store = store
        self.name = name
        self.entry = entry
        self.rows = entry.rows
        self.row_shape = tuple(entry.row_shape)
        self.dtype = dtype_from_name(entry.dtype)
        self.row_bytes = entry.row_bytes

    @property
    def layout(self) -> TableLayout:
        return self.entry.layout

    @property
    def data_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def partition_offsets(self) -> NDArray[np.int64]:
        """int64 [partitions + 1]: partition p is rows offsets[p] to offsets[p + 1]."""
        offsets: NDArray[np.int64] = self._store.load(self.entry.order.partition_offsets)
        if offsets[0] != 0 or offsets[-1] != self.rows or (np.diff(offsets) < 0).any():
            raise FormatError(f"the partition offsets of table {self.name!r} do not run from 0 to {self.rows}")
        return offsets

    def row_of_node(self) -> NDArray[Any] | None:
        """[rows], the row of each node id; None where row = node id."""
        return self._map(self.entry.order.row_of_node, "row_of_node")

    def node_of_row(self) -> NDArray[Any] | None:
        """[rows], the node id of each row; None where row = node id."""
        return self._map(self.entry.order.node_of_row, "node_of_row")

    def rows_by_degree(self, count: int | None = None) -> NDArray[Any] | None:
        """Rows by descending degree, the first ``count`` of them; None where the store was packed without a graph."""
        return self._map(self.entry.order.rows_by_degree, "rows_by_degree", count)

    def _map(self, entry: ArrayEntry | None, what: str, first: int | None = None) -> NDArray[Any] | None:
        if entry is None:
            return None
        values = self._store.load(entry, first)
        if len(values) and (values.min() < 0 or values.max() >= self.rows):
            raise FormatError(f"{what} of table {self.name!r} points outside the table's {self.rows:,} rows")
        return values

    def __repr__(self) -> str:
        return f"<Table {self.name!r}: {self.rows:,} rows of {self.row_shape} {self.entry.dtype}, {self.row_bytes:,} bytes each>"


class StoredGraph:
    """The topology over a table's rows; see :class:`featstore.manifest.GraphEntry`. ``edges`` are stored edges, ``hubs`` the
    number of rows whose lists stand in a second, contiguous copy."""

    def __init__(self, store: Store, name: str, entry: GraphEntry) -> None:
        self._store = store
        self.name = name
        self.entry = entry
        self.table = store.tables[entry.table]
        self.edges = entry.edges
        self.hubs = 0 if entry.hubs is None else entry.hubs.rows.shape[0]

    def offsets(self) -> NDArray[np.int64]:
        """int64 [rows + 1], all of it: 8 bytes a row. Raises CorruptionError and FormatError."""
        return _checked_offsets(self._whole("offsets"), self.edges, f"graph {self.name!r}")

    def csc(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The whole topology in memory, as a sampler takes it: (indptr int64 [nodes + 1], indices [edges]) by node id, each
        list in the order in which it is stored. For graphs that fit: about 3 times 8 bytes a node and 4 an edge."""
        sources = self._whole("sources")
        if len(sources) and (sources.min() < 0 or sources.max() >= self.table.rows):
            raise FormatError(f"graph {self.name!r} has sources outside the {self.table.rows:,} rows of its table")
        return rows_to_nodes(self.offsets(), sources, self.table.row_of_node(), self.table.node_of_row())

    def _whole(self, part: str) -> NDArray[Any]:
        """All of one of the graph's tables."""
        table = self._store.table(f"{self.name}/{part}")
        memory = _WHOLE_BYTES + 4 * table.layout.pages
        with self._store.reader(tables=[table.name], memory=memory, static=None) as reader:
            values: NDArray[Any] = reader.read_runs([(0, table.rows)])
        return values

    def hub_rows(self, count: int | None = None) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ``count`` most wanted hubs (all by default): their rows [hubs], and the offsets of their lists, int64 [hubs + 1]."""
        if self.entry.hubs is None:
            return np.empty(0, np.int32), np.zeros(1, np.int64)
        count = self.hubs if count is None else min(count, self.hubs)
        rows = self._store.load(self.entry.hubs.rows)[:count]
        if count and (rows.min() < 0 or rows.max() >= self.table.rows or len(np.unique(rows)) != count):
            raise FormatError(f"the hubs of graph {self.name!r} are not distinct rows of its table")
        offsets = self._store.load(self.entry.hubs.offsets)
        return rows, _checked_offsets(offsets, self.entry.hubs.sources.rows, f"the hubs of graph {self.name!r}")[
            : count + 1
        ]

    def __repr__(self) -> str:
        return f"<StoredGraph {self.name!r}: {self.table.rows:,} nodes, {self.edges:,} edges, {self.hubs:,} hubs>"


def _checked_offsets(offsets: NDArray[np.int64], edges: int, what: str) -> NDArray[np.int64]:
    if offsets[0] != 0 or offsets[-1] != edges or (np.diff(offsets) < 0).any():
        raise FormatError(f"the offsets of {what} do not run from 0 to {edges}")
    return offsets


def rows_to_nodes(
    offsets: NDArray[np.int64],
    sources: NDArray[Any],
    row_of_node: NDArray[Any] | None,
    node_of_row: NDArray[Any] | None,
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """A CSC over rows as one over node ids; lists keep their order."""
    if row_of_node is None or node_of_row is None:
        return offsets, sources
    degrees = np.diff(offsets)[row_of_node]
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(degrees, dtype=np.int64)])
    place = np.repeat(offsets[row_of_node] - indptr[:-1], degrees)
    place += np.arange(len(place))
    return indptr, node_of_row[sources[place]]


class _Arrays(Mapping[str, NDArray[Any]]):
    """The store's small arrays; each is read and verified when asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._store.load(self._store.manifest.arrays[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.manifest.arrays)

    def __len__(self) -> int:
        return len(self._store.manifest.arrays)


class Store:
    """An open store; see :func:`featstore.open`. ``tables``, ``graphs`` and ``arrays`` are mappings by name."""

    def __init__(self, path: str | os.PathLike[str], _manifest: bytes | None = None) -> None:
        self.path = Path(os.path.abspath(path))
        self._lock: int | None = None
        self._mutex = threading.Lock()
        self._open(_manifest)

    def _open(self, pinned: bytes | None) -> None:
        # The generation may be replaced and collected between reading the manifest and locking it: then look again.
        for _ in range(5):
            if pinned is None:
                self.manifest, self._text = read_manifest(self.path)
            else:
                self.manifest, self._text = parse(pinned, self.path), pinned
            self._lock = self._hold()
            if self._lock is not None:
                break
            if pinned is not None:
                raise IncompleteStoreError(
                    f"generation {self.manifest.generation} of {self.path} has been removed; open the store anew"
                )
        else:
            raise CorruptionError(self.path / self.manifest.generation, None, "the generation's directory", "nothing")
        if uuid_of(self._text, self.uuid) != self.uuid:
            raise FormatError(
                f"{self.path / MANIFEST_NAME} has been changed since it was written: its uuid is not that of its content"
            )
        self._sizes = {entry.path: entry for entry in self.manifest.files}
        self._check_files()
        self.tables: dict[str, Table] = {n: Table(self, n, e) for n, e in self.manifest.tables.items()}
        self.graphs: dict[str, StoredGraph] = {n: StoredGraph(self, n, e) for n, e in self.manifest.graphs.items()}
        self.arrays: Mapping[str, NDArray[Any]] = _Arrays(self)

    def _hold(self) -> int | None:
        """A descriptor of the generation's directory with a shared lock; None if the directory is gone."""
        directory = self.path / self.manifest.generation
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise CorruptionError(directory, None, "the generation's directory", "something else") from None
        except OSError as error:
            raise DeviceError(error.errno or 5, directory, None, "open") from error
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.path.exists(directory) and os.path.samestat(os.fstat(descriptor), os.stat(directory)):
            return descriptor
        os.close(descriptor)
        return None

    def _check_files(self) -> None:
        real = os.path.realpath(self.path)
        folders = {entry.path.rpartition("/")[0] for entry in self.manifest.files}
        for folder in folders:
            if os.path.realpath(self.path / folder) != os.path.join(real, folder):
                raise FormatError(f"{self.path / folder} leads out of the store through a symbolic link")
        for entry in self.manifest.files:
            path = self.path / entry.path
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                raise CorruptionError(path, None, f"a file of {entry.bytes:,} bytes", "no file") from None
            except OSError as error:
                raise DeviceError(error.errno or 5, path, None, "look at") from error
            if not stat.S_ISREG(status.st_mode):
                raise CorruptionError(path, None, "a regular file", "a link or something else")
            size = status.st_size
            if size != entry.bytes:
                raise CorruptionError(path, None, f"a file of {entry.bytes:,} bytes", f"{size:,} bytes")

    @property
    def uuid(self) -> str:
        return self.manifest.uuid

    def table(self, name: str) -> Table:
        """A table, or one that a graph consists of (``GRAPH/offsets``, ``GRAPH/sources``, ``GRAPH/hubs``). Raises KeyError."""
        if name in self.tables:
            return self.tables[name]
        if name in self.manifest.all_tables:
            return Table(self, name, self.manifest.all_tables[name])
        raise KeyError(f"the store has no table {name!r}; it has {', '.join(map(repr, self.manifest.all_tables))}")

    def file_entry(self, path: str) -> FileEntry:
        """What the manifest says of a file (path relative to the store)."""
        return self._sizes[path]

    def load(self, entry: ArrayEntry, first: int | None = None) -> NDArray[Any]:
        """A small array, or its ``first`` elements along axis 0. The whole file is verified against its digest in either
        case, block by block. Raises CorruptionError and DeviceError."""
        chunk = array_chunk(entry)
        return load_array(self.path, entry, None if chunk is None else self._sizes[chunk], first)

    def reader(self, **options: Any) -> Reader:
        """A reader over this store's tables; the options are those of :class:`featstore.reader.Reader`."""
        from featstore.reader import Reader

        if self._lock is None:
            raise ClosedError("the store is closed; open it again")
        return Reader(self, **options)

    def sampler(self, fanouts: Sequence[int], **options: Any) -> StoredSampler:
        """A neighbour sampler over a graph in this store; the options are those of
        :class:`featstore.stored_sampling.StoredSampler`."""
        from featstore.stored_sampling import StoredSampler

        if self._lock is None:
            raise ClosedError("the store is closed; open it again")
        return StoredSampler(self, fanouts, **options)

    def mega_batches(self, **options: Any) -> MegaBatches:
        """A loader that trains from random collections of partitions; the options are those of
        :class:`featstore.mega.loader.MegaBatches`."""
        from featstore.mega.loader import MegaBatches

        if self._lock is None:
            raise ClosedError("the store is closed; open it again")
        return MegaBatches(self, **options)

    def compiled(self, name: str = "default") -> Compiled:
        """A compiled trace of this store; see :class:`featstore.compiled.opened.Compiled`."""
        from featstore.compiled.opened import Compiled

        if self._lock is None:
            raise ClosedError("the store is closed; open it again")
        return Compiled(self, name)

    def close(self) -> None:
        """Let the generation go. Readers that are open keep their files."""
        with self._mutex:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self._text)

    def __repr__(self) -> str:
        return f"<Store {str(self.path)!r}, {self.manifest.generation}: {', '.join(map(repr, self.tables.values()))}>"
