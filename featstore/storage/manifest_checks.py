"""What must be so of a manifest before anything in it is used: it may come from a stranger.

Versions and feature flags, names, that every path is relative and stays inside the generation, that tables'
layouts are possible, that every file needed is listed and of the size the layout gives.
"""

from __future__ import annotations

import re

from msgspec import UNSET

from featstore.base.dtypes import host_dtype
from featstore.errors import FormatError
from featstore.storage.edge_types import joined_name
from featstore.storage.entry_checks import (
    ROW_DTYPES,
    check_array,
    check_numbers,
    check_path,
    check_table,
    check_vector,
)
from featstore.storage.manifest import (
    COMPILED_FEATURE,
    EDGE_IDS_FEATURE,
    EDGE_VALUES_FEATURE,
    FAMILY_FEATURE,
    GATHERED_FEATURE,
    GENERATION_NAME,
    GRAPHS_FEATURE,
    HALO,
    HALO_DEGREES,
    HALO_IDS,
    HALO_NODES,
    HOSTS_MAX,
    KEYS_FEATURE,
    RELATIONS_FEATURE,
    ROWS_MAX,
    SPLIT_GRAPHS_FEATURE,
    SPLIT_VALUES_FEATURE,
    CompiledEntry,
    FamilyEntry,
    FileEntry,
    GraphEntry,
    KeysEntry,
    Manifest,
    SplitGraphEntry,
    TableEntry,
    WholeListsEntry,
    check_name,
    edge_parts,
)

#: Of an index of keys: by so many upper bits of a hash, at most.
KEY_BITS_MAX = 40
_DIGEST = re.compile(r"[0-9a-f]{64}")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def check_manifest(manifest: Manifest) -> None:
    """Raise FormatError, which says what is wrong, for a manifest that cannot be trusted."""
    if not GENERATION_NAME.fullmatch(manifest.generation):
        raise FormatError(f"generation {manifest.generation!r} is not a 'g' and six or more digits")
    files: dict[str, FileEntry] = {}
    for entry in manifest.files:
        check_path(entry.path, manifest.generation)
        if entry.bytes < 0 or not _DIGEST.fullmatch(entry.digest):
            raise FormatError(f"file {entry.path!r} has an impossible size or digest")
        if entry.path in files:
            raise FormatError(f"file {entry.path!r} is listed twice")
        files[entry.path] = entry
    for name, table in manifest.tables.items():
        check_name(name, "table")
        check_table(name, table, manifest.generation, files)
    for name, array in manifest.arrays.items():
        check_name(name, "array")
        check_array(f"array {name!r}", array, manifest.generation, files)
    if manifest.graphs and GRAPHS_FEATURE not in manifest.reader_features:
        raise FormatError(f"there are graphs, but the reader feature {GRAPHS_FEATURE!r} is not named")
    for name, graph in manifest.graphs.items():
        check_name(name, "graph")
        _check_graph(name, graph, manifest, files)
    _check_featureless(manifest)
    if manifest.keys and KEYS_FEATURE not in manifest.reader_features:
        raise FormatError(f"there are keys, but the reader feature {KEYS_FEATURE!r} is not named")
    for name, keys in manifest.keys.items():
        _check_keys(name, keys, manifest, files)
    if manifest.compiled is not None:
        _check_compiled(manifest, manifest.compiled)
    elif GATHERED_FEATURE in manifest.reader_features:
        raise FormatError(
            f"the reader feature {GATHERED_FEATURE!r} is of a compiled trace, and there is none"
        )
    if manifest.family is not None:
        _check_family(manifest, manifest.family)
        _check_split_graphs(manifest, manifest.family, files)


def _check_family(manifest: Manifest, family: FamilyEntry) -> None:
    if FAMILY_FEATURE not in manifest.reader_features:
        raise FormatError(f"there is a family, but the reader feature {FAMILY_FEATURE!r} is not named")
    hosts, host = family.hosts, family.host
    if not 1 <= hosts <= HOSTS_MAX or not 0 <= (host or 0) < hosts:
        raise FormatError(f"the store says it is of host {host} of {hosts}")
    if (host is None) != (family.uuid is None):
        raise FormatError("a part names the family's topology and its host; topology names neither")
    if not all(_UUID.fullmatch(u) for u in (family.base_uuid, family.uuid) if u is not None):
        raise FormatError(f"the family's uuids are none: {family.base_uuid!r}, {family.uuid!r}")
    copies = family.copies
    if manifest.tables.keys() - copies != family.first_rows.keys():
        raise FormatError("the family's first rows are of other tables than the store has")
    for name in copies & manifest.tables.keys():
        nodes = manifest.arrays.get(f"{name.removesuffix(HALO)}{HALO_NODES}")
        if nodes is None or nodes.shape != [manifest.tables[name].rows]:
            raise FormatError(f"there is no array that says of which nodes the rows of table {name!r} are")
    for name, table in ((name, manifest.tables[name]) for name in family.first_rows):
        first = family.first_rows[name]
        if len(first) != hosts + 1 or first[0] != 0 or first != sorted(first) or first[-1] > ROWS_MAX:
            raise FormatError(f"the first rows of {hosts} hosts of table {name!r} are impossible")
        if table.rows != (first[-1] if host is None else first[host + 1] - first[host]):
            raise FormatError(f"table {name!r} has {table.rows} rows, its family says otherwise")
        if host is None and (table.row_shape or table.dtype != host_dtype(hosts).name):
            raise FormatError(f"table {name!r} does not say which of {hosts} hosts owns a row")
    split = family.split_graphs
    if family.remote_edges.keys() != (split if split and host is None else manifest.graphs).keys():
        raise FormatError("the family's remote edges are of other graphs than the store has")
    for name, counts in family.remote_edges.items():
        if len(counts) != hosts or any(not 0 <= count <= ROWS_MAX for count in counts):
            raise FormatError(f"the remote edges of {hosts} hosts of graph {name!r} are impossible")


def _check_split_graphs(manifest: Manifest, family: FamilyEntry, files: dict[str, FileEntry]) -> None:
    if not family.split_graphs:
        return
    if SPLIT_GRAPHS_FEATURE not in manifest.reader_features:
        raise FormatError(
            f"there are graphs that are split, but the reader feature {SPLIT_GRAPHS_FEATURE!r} is not named"
        )
    host = family.host
    if (manifest.graphs.keys() != family.split_graphs.keys()) if host is not None else manifest.graphs:
        raise FormatError(
            "graphs that are split are in all parts, each its own lists, and not in the topology"
        )
    for name, graph in family.split_graphs.items():
        check_name(name, "graph")
        if graph.table not in family.first_rows or not 0 <= graph.edges <= ROWS_MAX:
            raise FormatError(
                f"the graph {name!r} that is split is over {graph.table!r}, {graph.edges} edges"
            )
        _check_split_relation(name, graph, manifest, family)
        if (graph.lists is None) != (host is None):
            raise FormatError(
                f"the lists of the graph {name!r} that is split are in its parts, and only there"
            )
        if graph.lists is not None:
            own = manifest.graphs[name]
            alike = all(
                getattr(own, of) == getattr(graph, of) for of in ("table", "relation", "source_table")
            )
            if not alike or not own.edges <= graph.lists.sources.rows <= graph.edges:
                raise FormatError(f"the lists of graph {name!r} are not those of its table {graph.table!r}")
            _check_whole_lists(name, graph.table, graph.lists, manifest, files)
            _check_halo_degrees(name, graph.table, manifest)


def _check_split_relation(name: str, graph: SplitGraphEntry, manifest: Manifest, family: FamilyEntry) -> None:
    ends = (graph.relation is UNSET, graph.source_table is UNSET)
    if ends == (True, True):
        return
    if RELATIONS_FEATURE not in manifest.reader_features:
        raise FormatError(f"graph {name!r} is a relation, but the feature {RELATIONS_FEATURE!r} is not named")
    if any(ends) or graph.source_table not in family.first_rows:
        raise FormatError(f"the graph {name!r} that is split joins nodes of {graph.source_table!r}")


def _check_halo_degrees(name: str, table: str, manifest: Manifest) -> None:
    """Of each node of the table's halo, which all graphs that lead from it name."""
    degrees, ids = manifest.arrays.get(f"{name}.{HALO_DEGREES}"), dict[str, int]()
    for other, graph in manifest.graphs.items():
        known = manifest.arrays.get(f"{other}.{HALO_IDS}")
        if known is None or len(known.shape) != 1:
            raise FormatError(f"there is no array of the halo of graph {other!r}")
        if graph.table_of_sources == table:
            ids[other] = known.shape[0]
    shape = [] if degrees is None or degrees.dtype != "int64" else degrees.shape
    if len(shape) != 1 or not max(ids.values(), default=0) <= shape[0] <= sum(ids.values()):
        raise FormatError(f"there is no array of the degrees of the halo of graph {name!r}")


def _check_whole_lists(
    name: str, table: str, lists: WholeListsEntry, manifest: Manifest, files: dict[str, FileEntry]
) -> None:
    what, rows, edges = f"graph {name!r}'s whole lists", manifest.tables[table].rows, lists.sources.rows
    check_numbers(f"{name}/lists/offsets", lists.offsets, rows + 1, ("int64",), manifest, files)
    check_numbers(f"{name}/lists/sources", lists.sources, edges, ROW_DTYPES, manifest, files)
    features = dict.fromkeys(_EDGE_PARTS, SPLIT_VALUES_FEATURE)
    _check_edge_parts(f"{name}/lists", what, edge_parts(lists), edges, features, manifest, files)
    runs = lists.run_rows.shape[0] if len(lists.run_rows.shape) == 1 else -1
    if not min(rows, 1) <= runs <= rows:
        raise FormatError(f"{what} have runs of the impossible shape {lists.run_rows.shape}")
    check_vector(f"{what}' first rows", lists.run_rows, "int64", runs, manifest.generation, files)
    check_vector(f"{what}' first edges", lists.run_edges, "int64", runs, manifest.generation, files)


def _check_compiled(manifest: Manifest, compiled: CompiledEntry) -> None:
    if COMPILED_FEATURE not in manifest.reader_features:
        raise FormatError(
            f"there is a compiled trace, but the reader feature {COMPILED_FEATURE!r} is not named"
        )
    records, offsets = manifest.tables.get(compiled.records), manifest.arrays.get(compiled.offsets)
    if records is None or records.dtype != "uint8" or records.row_shape:
        raise FormatError(f"the records of the compiled trace, {compiled.records!r}, are no table of bytes")
    if (
        offsets is None
        or offsets.dtype != "int64"
        or compiled.batches < 0
        or offsets.shape != [compiled.batches + 1]
    ):
        raise FormatError(
            f"{compiled.offsets!r} is no array of {compiled.batches + 1} offsets of the compiled trace"
        )
    if compiled.memory_bytes < 0:
        raise FormatError(f"the compiled trace wants {compiled.memory_bytes} bytes of memory")
    for name, table in compiled.tables.items():
        check_name(name, "table")
        parts = {
            part: manifest.tables.get(getattr(table, part))
            for part in ("packed", "shared", "resident", "device")
        }
        rows = [(p.row_shape, p.dtype) for p in parts.values() if p is not None]
        if len(rows) < len(parts) or any(r != rows[0] for r in rows):
            raise FormatError(
                f"the compiled trace's tables of {name!r} are not all there, or not of the same rows"
            )
        resident, turn = parts["resident"], manifest.arrays.get(table.turn)
        if resident is None or turn is None or turn.dtype != "int32" or turn.shape != [resident.rows]:
            raise FormatError(f"{table.turn!r} does not say where the resident rows of {name!r} are")
        if not 0 <= table.base_rows <= ROWS_MAX:
            raise FormatError(
                f"the compiled trace's base table {name!r} has the impossible number of "
                f"{table.base_rows} rows"
            )
        if GATHERED_FEATURE in manifest.reader_features:
            own = manifest.tables.get(name)
            if own is None or (own.rows, own.row_shape, own.dtype) != (table.base_rows, *rows[0]):
                raise FormatError(f"the compiled trace has no {table.base_rows} gathered rows of {name!r}")
        if not 0 <= table.batch_rows_max <= records.rows:  # a row's place alone takes four bytes of a record
            raise FormatError(
                f"the compiled trace's mini-batches of {table.batch_rows_max} rows of {name!r} have no "
                f"room in {records.rows} bytes of records"
            )


def _check_featureless(manifest: Manifest) -> None:
    names = manifest.featureless
    if names and RELATIONS_FEATURE not in manifest.reader_features:
        raise FormatError(f"tables are without features, but the feature {RELATIONS_FEATURE!r} is not named")
    if len(set(names)) < len(names):
        raise FormatError("a table without features is listed twice")
    for name in names:
        table = manifest.tables.get(name)
        if table is None or table.dtype != "uint8" or table.row_shape:
            raise FormatError(f"the table {name!r} without features is not there, or not of single uint8")


#: What a graph may have of each edge beside its source: dtypes, and the reader feature.
_EDGE_PARTS = {
    "edge_ids": (ROW_DTYPES, EDGE_IDS_FEATURE),
    "weights": (("float32", "float64"), EDGE_VALUES_FEATURE),
    "times": (("int64",), EDGE_VALUES_FEATURE),
}


def _check_edge_parts(
    base: str, what: str, parts: dict[str, TableEntry], edges: int, features: dict[str, str],
    manifest: Manifest, files: dict[str, FileEntry],
) -> None:  # fmt: skip
    for part, table in parts.items():
        if features[part] not in manifest.reader_features:
            raise FormatError(f"{what} has {part}, but the reader feature {features[part]!r} is not named")
        check_numbers(f"{base}/{part}", table, edges, _EDGE_PARTS[part][0], manifest, files)


def _check_graph(name: str, graph: GraphEntry, manifest: Manifest, files: dict[str, FileEntry]) -> None:
    what = f"graph {name!r}"
    nodes = manifest.tables.get(graph.table)
    if nodes is None:
        raise FormatError(f"{what} is over the table {graph.table!r}, which does not exist")
    _check_relation(name, graph, manifest)
    generation = manifest.generation
    check_numbers(f"{name}/offsets", graph.offsets, nodes.rows + 1, ("int64",), manifest, files)
    check_numbers(f"{name}/sources", graph.sources, graph.edges, ROW_DTYPES, manifest, files)
    parts = edge_parts(graph)
    features = {part: feature for part, (_, feature) in _EDGE_PARTS.items()}
    _check_edge_parts(name, what, parts, graph.edges, features, manifest, files)
    if graph.hubs is None:
        return
    copies, edges = edge_parts(graph.hubs), graph.hubs.sources.rows
    check_numbers(f"{name}/hubs", graph.hubs.sources, edges, ROW_DTYPES, manifest, files)
    if copies.keys() != parts.keys():
        raise FormatError(
            f"{what}: both the lists and the hubs' lists have edge ids, or neither; so of values"
        )
    for part, table in copies.items():
        check_numbers(f"{name}/hub_{part}", table, edges, _EDGE_PARTS[part][0], manifest, files)
    hubs = graph.hubs.rows.shape[0] if len(graph.hubs.rows.shape) == 1 else -1
    if not 0 <= hubs <= nodes.rows:
        raise FormatError(f"{what} has hubs of the impossible shape {graph.hubs.rows.shape}")
    check_vector(f"{what}'s hubs", graph.hubs.rows, ROW_DTYPES, hubs, generation, files)
    check_vector(f"{what}'s hub offsets", graph.hubs.offsets, "int64", hubs + 1, generation, files)


def _check_keys(name: str, keys: KeysEntry, manifest: Manifest, files: dict[str, FileEntry]) -> None:
    nodes = manifest.tables.get(name)
    if nodes is None:
        raise FormatError(f"there are keys of the table {name!r}, which does not exist")
    if (keys.kind == "utf8") != (keys.offsets is not UNSET):
        raise FormatError(
            f"the keys of {name!r} are of kind {keys.kind}: strings, and they alone, have offsets"
        )
    bits = (keys.starts.rows - 1).bit_length() - 1
    if keys.starts.rows != 2**bits + 1 or not 0 <= bits <= KEY_BITS_MAX:
        raise FormatError(f"the index of the keys of {name!r} has {keys.starts.rows} starts")
    sizes = {"hashes": nodes.rows, "ids": nodes.rows, "starts": 2**bits + 1, "offsets": nodes.rows + 1}
    dtypes = {"hashes": ("uint64",), "ids": ROW_DTYPES}
    for part, table in keys.parts.items():
        if part == "values":
            kind, rows = ("uint8", table.rows) if keys.kind == "utf8" else ("int64", nodes.rows)
            check_numbers(f"{name}/keys/values", table, rows, (kind,), manifest, files)
        else:
            dtype = dtypes.get(part, ("int64",))
            check_numbers(f"{name}/keys/{part}", table, sizes[part], dtype, manifest, files)


def _check_relation(name: str, graph: GraphEntry, manifest: Manifest) -> None:
    """Of a graph's edge type."""
    if graph.source_table is UNSET and graph.relation is UNSET:
        return
    if graph.edge_type is None:
        raise FormatError(f"graph {name!r} has both a relation and a table of sources, or neither")
    if RELATIONS_FEATURE not in manifest.reader_features:
        raise FormatError(f"graph {name!r} is a relation, but the feature {RELATIONS_FEATURE!r} is not named")
    if graph.table_of_sources not in manifest.tables:
        raise FormatError(f"the sources of graph {name!r} are rows of no table: {graph.table_of_sources!r}")
    if name != joined_name(graph.edge_type):
        raise FormatError(f"the graph of the edge type {graph.edge_type} is not called {name!r}")
    if any(joined_name(other) in (graph.table, graph.source_table) for other in manifest.edge_types):
        raise FormatError(f"graph {name!r} joins rows of edges")
