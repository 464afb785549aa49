"""Packing: from features and a graph to a committed store.

For each table: find the order, write its maps, bring the rows into it (:mod:`featstore.packing.permute`),
write the checksums; then the small arrays; then commit (:mod:`featstore.storage.generations`). Every step
leaves its progress in the journal. Nothing that depends on time, place or memory goes into the store, so that
equal input and seed give equal bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore._version import __version__
from featstore.arguments import as_path
from featstore.base.dtypes import dtype_name, node_dtype
from featstore.base.files import RegularFile
from featstore.base.folders import real_path
from featstore.base.system import asking, is_directory, is_there
from featstore.base.warning import warn
from featstore.errors import BudgetError, CorruptionError, DiskFullError, FeatstoreError, SourceError
from featstore.layout import TableLayout
from featstore.order import Order, make_order
from featstore.order.orders import degree_memory_bytes, degree_order
from featstore.packing import permute, spill
from featstore.packing.convert import ValueReport, target_dtype
from featstore.packing.graphs.csc import Graph
from featstore.packing.graphs.opening import open_graph
from featstore.packing.inputs import described, identity, node_mask, parse_inputs
from featstore.packing.progress import Progress, Stages
from featstore.packing.request import Options, check_pack, with_slack
from featstore.packing.row_ids import inverse, read_ids, write_ids
from featstore.packing.sources.opening import RowSource
from featstore.packing.topology import HUB_SHARE, topology_memory_bytes, write_topology
from featstore.packing.topology import Job as TopologyJob
from featstore.storage.arrays import load_array
from featstore.storage.belongings import GENERATION, SPILL
from featstore.storage.disk import Disk
from featstore.storage.generations import Generation, begin, collect, commit, writing
from featstore.storage.journal import Journal, State, TableProgress
from featstore.storage.manifest import (
    FORMAT_VERSION,
    GRAPHS_FEATURE,
    ArrayEntry,
    Manifest,
    OrderEntry,
    TableEntry,
    array_chunk,
    sealed,
)
from featstore.storage.table_writer import (
    Catalogue,
    TableWriter,
    catalogue_rows,
    write_array,
    write_rows_metadata,
    zarr_group_json,
)
from featstore.units import PAGE_BYTES, parse_bytes

__all__ = ["Options", "Progress", "pack"]

_DISK_SLACK_BYTES = 1 << 20


def pack(
    out: str | os.PathLike[str],
    features: Any,
    *,
    graph: Any = None,
    arrays: Mapping[str, Any] | None = None,
    order: str | Mapping[str, str] = "auto",
    permutation: Any = None,
    partitions: int | Mapping[str, int] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    cast: str | Mapping[str, str] | None = None,
    raw_dtype: Any = None,
    shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    offset: int | Mapping[str, int] | None = None,
    key: str | Sequence[str] | Mapping[str, Any] | None = None,
    columns: str | int | Sequence[str | int] | Mapping[str, Any] | None = None,
    id: str | int | Mapping[str, str | int] | None = None,
    graph_key: str | Mapping[str, str] | None = None,
    memory: int | str = "1GiB",
    seed: int = 0,
    topology: bool = True,
    hubs: float = HUB_SHARE,
    hub_rank: str = "degree",
    train: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
    disk: Disk | None = None,
) -> Path:
    """Pack feature tables into a store, and return its path; ``featstore.pack`` opens it. ``featstore pack``
    has the same options.

    What is of a table (``graph`` to ``graph_key`` without ``arrays``, and ``train``) may be given once for
    all tables, or as a mapping of table names to values.

    Args:
        out: the store's directory; made if it does not exist.
        features: one table (a path, an array, an iterator of row blocks, anything
            :func:`featstore.packing.sources.opening.open_rows` takes, or a PyG ``Data``/``HeteroData``
            object, which brings its graph and arrays along), or a mapping of table names to such.
        graph: the graph of the table, as :func:`featstore.packing.graphs.opening.open_graph` takes it, or one
            relation of a ``HeteroData`` (``data["a", "r", "a"]``). It replaces the graphs of PyG data: ``{}``
            packs without. Its degrees become the order in which a static cache takes rows.
        arrays: small arrays to keep beside the tables (labels, splits), in node id order: name to array, or
            path of a ``.npy``.
        order: ``"auto"`` (METIS where there is a graph and METIS fits the memory, else multilevel; as given
            without a graph), ``"given"``, ``"permutation"``, ``"degree"``, ``"metis"``, ``"multilevel"``,
            ``"ldg"``, ``"bfs"``.
        permutation: with order ``"permutation"``: node ids in row order, as an array or the path of a
            ``.npy``.
        partitions: how many parts partitioners make; by default parts of at least 512 KiB of features, see
            :func:`featstore.order.orders.default_partitions`.
        dtype: the short form of ``cast``; for a headless file with ``shape`` and no ``raw_dtype``, the short
            form of that.
        cast: convert to ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``; by default rows stay
            as they are.
        raw_dtype: the dtype of a headless file's values, or what text is read as (float32 unless told;
            float64 where it is cast).
        shape: of the whole table, the first number -1 for as many rows as there are: needed for a headless
            file; of an iterator it says that items of shape ``shape[1:]`` are single rows. What names its own
            shape must agree with it.
        offset: byte of a headless file at which its rows begin.
        key: the member of an ``.npz``, zarr group or ``.pt`` file; of a table with named columns the same as
            ``columns``.
        columns: the columns that are features of a table that names them (Parquet, Arrow, ``.csv``), by name
            or position; ``"*"`` for all. Without it all are, and a table with one that cannot be or that
            looks like ids is refused.
        id: the column of such a table that says whose row it is: node ids 0 to n-1, each once; rows are
            placed by it. Without it row i is node i. Ids take 12 bytes a row of ``memory``, 16 where the
            number of rows is unknown, 20 where the order is another than by id.
        graph_key: the member or columns of the graph's file with the edges.
        memory: budget for everything the pack holds in memory beyond the bare process, in bytes or as
            ``"512MiB"``.
        seed: of the partitioners. Equal input, options and seed give equal bytes.
        topology: store the graphs too, for sampling and mega-batches from disk (4 or 8 bytes an edge).
        hubs: share of the nodes whose lists of neighbours are stored a second time, side by side, for
            mega-batches.
        hub_rank: which nodes those are: ``"degree"``, or ``"external"`` for most edges into other partitions.
        train: training nodes, which order ``"bfs"`` spreads evenly: node ids, a mask, or the name of one of
            ``arrays``.
        resume: go on with the unfinished pack in ``out``; input and options must be the same.
        overwrite: replace the store in ``out``; it stands until the new one is committed.
        progress: called now and then with a :class:`Progress`, from any thread.
        disk: what performs all writes; for tests.

    Raises SourceError, BudgetError, DiskFullError, DeviceError, StoreExistsError, StoreLockedError,
    CorruptionError. Warns, as FeatstoreWarning, of what of PyG data is not stored, and of edge rows that no
    stored graph numbers.
    """
    door = disk or Disk()
    reading = {
        "raw_dtype": raw_dtype,
        "dtype": dtype,
        "cast": cast,
        "shape": shape,
        "offset": offset,
        "key": key,
        "columns": columns,
        "id": id,
    }
    inputs = parse_inputs(features, graph, arrays, reading)
    tables = inputs.tables
    options = Options.of(
        inputs, memory=memory, order=order, permutation=permutation, partitions=partitions, seed=seed,
        topology=topology, hubs=hubs, hub_rank=hub_rank, train=train, graph_key=graph_key,
    )  # fmt: skip
    check_pack(options, inputs.arrays, resume=resume, overwrite=overwrite, progress=progress)
    out = as_path(out, "out")
    for text in inputs.warnings:
        warn(text)
    store = real_path(out)
    if is_there(store) and not is_directory(store):
        raise SourceError(f"{store} is a file; give the path of a directory to make")
    with writing(store, door):
        generation, resumed = begin(store, door, resume=resume, overwrite=overwrite)
        packing = _Packing(door, generation, tables, inputs.graphs, options, progress)
        try:
            packing.run(inputs.arrays, resumed)
        except BudgetError as error:
            # another budget is another pack: --resume would refuse it
            packing.abandon(resumed, order_counts=False)
            raise BudgetError(with_slack(error.needed_bytes), parse_bytes(memory), error.what) from None
        except BaseException:
            packing.abandon(resumed)
            raise
        collect(store, door)
    return Path(out)


class _Packing:
    """One run of a pack: the state that its steps share."""

    def __init__(
        self, disk: Disk, generation: Generation, tables: dict[str, RowSource], graphs: dict[str, Any],
        options: Options, progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        self.disk = disk
        self.generation = generation
        self.tables = tables
        self.graphs = graphs
        self.options = options
        self.catalogue = Catalogue(disk, generation.store)
        self._stages = Stages(progress)
        self._ids: dict[str, Path] = {}  # of tables whose rows are placed by ids
        self._journal: Journal | None = None
        self._arrays: dict[str, NDArray[Any]] = {}

    @property
    def journal(self) -> Journal:
        assert self._journal is not None
        return self._journal

    def run(self, arrays: dict[str, NDArray[Any]], resumed: bool) -> None:
        name = self.generation.name
        self._arrays = arrays
        self._start(resumed, arrays)
        for table in self.tables:
            self._read_ids(table)
        self._check_space(resumed)
        entries, graphs = {}, {}
        for table in self.tables:
            entries[table] = self._table(table)
            found = self.journal.table(table).graph
            if found is not None:
                graphs[table] = found
        array_entries = {n: write_array(self.catalogue, f"{name}/arrays/{n}", a) for n, a in arrays.items()}
        groups = [f"{name}/arrays"] if arrays else []
        groups += [f"{name}/graphs", *(f"{name}/graphs/{g}" for g in graphs)] if graphs else []
        for group in [name, f"{name}/tables", *groups]:
            self.catalogue.write(f"{group}/zarr.json", zarr_group_json())
        self.catalogue.fsync_directories()
        self.disk.fsync_dir(self.generation.store)
        features = [GRAPHS_FEATURE] if graphs else []
        manifest = sealed(
            Manifest(
                format="featstore", version=FORMAT_VERSION, reader_features=features, writer_features=[],
                uuid="", generation=name, tables=entries, arrays=array_entries,
                files=sorted(self.catalogue.files.values(), key=lambda f: f.path),
                provenance={"writer": f"featstore {__version__}", "seed": self.options.seed,
                            "sources": {n: described(s) for n, s in self.tables.items()}},
                graphs=graphs,
            )
        )  # fmt: skip
        commit(self.generation.store, self.disk, manifest)
        self.disk.unlink(self.generation.journal)
        self.disk.rmtree(self.generation.spill, SPILL)

    def abandon(self, resumed: bool, order_counts: bool = True) -> None:
        """After an error: leave nothing behind where nothing was achieved; otherwise the journal stays for
        --resume."""
        tables = self._journal.state.tables.values() if self._journal else ()
        if resumed or any(
            (t.order and order_counts) or t.spill_bytes or t.written_bytes or t.done for t in tables
        ):
            return
        with suppress(FeatstoreError, OSError):  # the error that brought us here is the one to tell
            self.disk.unlink(self.generation.journal)
            self.disk.rmtree(self.generation.spill, SPILL)
            self.disk.rmtree(self.generation.directory, GENERATION)

    def _start(self, resumed: bool, arrays: dict[str, NDArray[Any]]) -> None:
        fingerprint: dict[str, Any] = {
            "tables": {n: s.fingerprint() for n, s in self.tables.items()}, "order": dict(self.options.order),
            "partitions": dict(self.options.partitions), "dtype": dict(self.options.dtype),
            "seed": self.options.seed, "memory": self.options.memory_bytes,
            "topology": [self.options.topology, self.options.hubs, self.options.hub_rank],
            "train": {n: identity(t) if not isinstance(t, str) else t for n, t in self.options.train.items()},
            "arrays": {n: identity(a) for n, a in arrays.items()},
            "graphs": {n: identity(g) for n, g in self.graphs.items()},
            "graph_key": dict(self.options.graph_key),
            "permutation": {n: identity(p) for n, p in self.options.permutation.items()},
        }  # fmt: skip
        if resumed:
            journal = Journal.load(self.disk, self.generation.journal)
            journal.check(fingerprint)
            self._journal = journal
        else:
            self.catalogue.directory(f"{self.generation.name}/tables")
            self._journal = Journal(self.disk, self.generation.journal, State(fingerprint))
        if not resumed:
            self._journal.save()
        self.disk.mkdir(self.generation.spill)

    def _check_space(self, resumed: bool) -> None:
        """Raise DiskFullError before the first byte if the disk cannot hold the store and the largest
        spill."""
        needed, largest = _DISK_SLACK_BYTES, 0
        for name, source in self.tables.items():
            rows = source.rows or 0
            size = rows * self._row_bytes(name)
            permuted = (
                name in self.graphs or self.options.order[name] not in ("auto", "given") or name in self._ids
            )
            needed += size + size // 1024 + rows * (24 if permuted else 0)
            spills = permuted and size > self.options.memory_bytes // 2
            largest = max(largest, size if spills else 0)
        if resumed:
            there = (
                p
                for root in (self.generation.directory, self.generation.spill)
                for p in root.rglob("*")
                if p.is_file()
            )
            with asking(self.generation.directory, "look at the files of"):
                needed = max(
                    _DISK_SLACK_BYTES, needed + largest - sum(p.stat().st_blocks * 512 for p in there)
                )
        else:
            needed += largest
        free = self.disk.free_bytes(self.generation.store)
        if needed > free:
            raise DiskFullError(self.generation.store, needed, free)

    def _row_bytes(self, name: str) -> int:
        source = self.tables[name]
        return source.row_values * target_dtype(source.dtype, self.options.dtype.get(name)).itemsize

    def _read_ids(self, name: str) -> None:
        """Read the ids of a table's rows, if it has a column of them, and keep them beside the spill."""
        source = self.tables[name]
        if source.chosen is None or source.chosen.id is None:
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

    def _table(self, name: str) -> TableEntry:
        """Write one table whole; returns its entry."""
        source, progress = self._counted(name), self.journal.table(name)
        base = f"{self.generation.name}/tables/{name}"
        self.catalogue.directory(f"{base}/rows")
        dtype = target_dtype(source.dtype, self.options.dtype.get(name))
        assert source.rows is not None
        layout = TableLayout.choose(source.rows, source.row_values * dtype.itemsize)
        self.catalogue.write(f"{base}/zarr.json", zarr_group_json())
        if progress.order is None or (progress.graph is None and self.options.topology):
            self._order_and_topology(name, base, layout, progress)
        order = progress.order
        assert order is not None
        for file in progress.order_files + progress.graph_files:
            self.catalogue.add(file.path, file.bytes, file.digest)
        report = ValueReport(source.dtype, dtype)
        report.restore(progress.report)
        entry = TableEntry(
            path=f"{base}/rows", rows=layout.rows, row_shape=list(source.row_shape), dtype=dtype_name(dtype),
            row_bytes=layout.row_bytes, rows_per_chunk=layout.rows_per_chunk,
            page_checksums=ArrayEntry(f"{base}/page_checksums", [layout.pages], "uint32"), order=order,
            statistics={},
        )  # fmt: skip
        write_rows_metadata(self.catalogue, entry, dtype)
        if layout.rows:
            checksum_path = self.generation.store / str(array_chunk(entry.page_checksums))
            if not progress.done:
                self._write_rows(self._job(name, entry, report), checksum_path)
            catalogue_rows(self.catalogue, entry)
        statistics = report.result() | {"rows_digest": f"{progress.written_digest:016x}"}
        return msgspec.structs.replace(entry, statistics=statistics)

    def _job(self, name: str, entry: TableEntry, report: ValueReport) -> permute.Job:
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
            self._load(entry.order.row_of_node), self._load(entry.order.node_of_row), ids
        )
        held = maps.held_bytes
        return permute.Job(
            self.disk, name, self.tables[name], entry.layout, report, maps, self.generation.spill,
            lambda chunk: self.generation.store / entry.chunk_path(chunk), self.options.memory_bytes - held,
            held, self.journal, self.journal.table(name), self._stages,
        )  # fmt: skip

    def _load(self, entry: ArrayEntry | None) -> NDArray[Any] | None:
        if entry is None:
            return None
        chunk = array_chunk(entry)
        return load_array(
            self.generation.store, entry, None if chunk is None else self.catalogue.files[chunk]
        )

    def _counted(self, name: str) -> RowSource:
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

    def _order_and_topology(self, name: str, base: str, layout: TableLayout, progress: TableProgress) -> None:
        """What is made of the table's graph, which is gone again before its rows are written."""
        self._stages.begin("graph" if name in self.graphs else "order", name)
        graph = self._graph(name, layout.rows)
        if progress.order is None:
            self._stages.begin("order", name)
            self._make_order(name, base, layout, progress, graph)
        else:
            for file in progress.order_files:
                self.catalogue.add(file.path, file.bytes, file.digest)
        if graph is not None and self.options.topology:
            self._stages.begin("topology", name)
            self._write_topology(name, graph, progress)

    def _write_topology(self, name: str, graph: Graph, progress: TableProgress) -> None:
        order = progress.order
        assert order is not None
        row_of_node, by_degree = self._load(order.row_of_node), self._load(order.rows_by_degree)
        offsets = self._load(order.partition_offsets)
        assert offsets is not None and by_degree is not None  # noqa: PT018
        held = graph.indptr.nbytes + (0 if isinstance(graph.indices, np.memmap) else graph.indices.nbytes)
        held += by_degree.nbytes + (0 if row_of_node is None else row_of_node.nbytes)
        before = set(self.catalogue.files)
        job = TopologyJob(
            self.catalogue, f"{self.generation.name}/graphs/{name}", name, graph, row_of_node, offsets,
            by_degree, self.options.hubs, self.options.hub_rank, self.options.memory_bytes - held,
            self.generation.spill,
        )  # fmt: skip
        try:
            progress.graph = write_topology(job)
        except BudgetError as error:
            raise BudgetError(error.needed_bytes + held, self.options.memory_bytes, error.what) from None
        progress.graph_files = [f for path, f in self.catalogue.files.items() if path not in before]
        self.catalogue.fsync_directories()
        self.journal.save()

    def _make_order(
        self, name: str, base: str, layout: TableLayout, progress: TableProgress, graph: Graph | None
    ) -> None:
        """Find the table's order, and its rows by descending degree where there is a graph; write both,
        durably."""
        memory = self.options.memory_bytes
        if graph is not None:
            held = graph.indptr.nbytes + (0 if isinstance(graph.indices, np.memmap) else graph.indices.nbytes)
            needed = held + degree_memory_bytes(layout.rows)
            if self.options.topology:  # what comes next must not find the order made for nothing
                maps = 2 * node_dtype(layout.rows).itemsize * layout.rows
                least = topology_memory_bytes(layout.rows, self.options.hub_rank, permuted=True)
                needed = max(needed, held + maps + least)
            if needed > memory:
                raise BudgetError(needed, memory, f"hold the graph of table {name!r} and rank its nodes")
            memory -= held
        order = make_order(
            self.options.order[name], graph, rows=layout.rows, row_bytes=layout.row_bytes,
            parts=self.options.partitions.get(name), permutation=self.options.permutation.get(name),
            seed=self.options.seed, memory_bytes=memory, train=self._train(name, layout.rows),
        )  # fmt: skip
        before = set(self.catalogue.files)
        row_of_node = None if order.node_of_row is None else inverse(order.node_of_row)
        by_degree = None
        if graph is not None:
            nodes = degree_order(graph).node_of_row
            by_degree = nodes if row_of_node is None or nodes is None else row_of_node[nodes]
        progress.order = self._write_order(base, order, row_of_node, by_degree)
        progress.order_files = [f for path, f in self.catalogue.files.items() if path not in before]
        self.catalogue.fsync_directories()
        self.journal.save()

    def _train(self, name: str, rows: int) -> NDArray[np.bool_] | None:
        """The training nodes of a table as a mask, bool [rows]."""
        given = self.options.train.get(name)
        if given is None:
            return None
        if isinstance(given, str) and given not in self._arrays:
            raise SourceError(
                f"train names the array {given!r}, which is not among those given: "
                f"{', '.join(map(repr, self._arrays)) or 'none'}"
            )
        return node_mask(self._arrays[given] if isinstance(given, str) else given, rows)

    def _graph(self, name: str, rows: int) -> Graph | None:
        if name not in self.graphs:
            return None
        spec = self.graphs[name]
        if isinstance(spec, Graph):
            if spec.nodes != rows:
                raise SourceError(
                    f"the graph of table {name!r} has {spec.nodes:,} nodes, its features {rows:,} rows"
                )
            return spec
        return open_graph(
            spec, nodes=rows, memory_bytes=self.options.memory_bytes // 2, scratch_dir=self.generation.spill,
            key=self.options.graph_key.get(name),
        )  # fmt: skip

    def _write_order(
        self, base: str, order: Order, row_of_node: NDArray[Any] | None, by_degree: NDArray[Any] | None
    ) -> OrderEntry:
        def maybe(name: str, values: NDArray[Any] | None) -> ArrayEntry | None:
            return None if values is None else write_array(self.catalogue, f"{base}/{name}", values)

        return OrderEntry(
            method=order.method,
            parameters=dict(order.parameters),
            partition_offsets=write_array(
                self.catalogue, f"{base}/partition_offsets", order.partition_offsets
            ),
            row_of_node=maybe("row_of_node", row_of_node),
            node_of_row=maybe("node_of_row", order.node_of_row),
            rows_by_degree=maybe("rows_by_degree", by_degree),
        )

    def _write_rows(self, job: permute.Job, checksum_path: Path) -> None:
        """Write the chunk files and the checksums; what was read must be what was written."""
        writer = TableWriter(self.disk, job.layout, job.chunk_path, checksum_path)
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
        permute.save(job)
