"""The manifest: what a store consists of, in one JSON file.

``featstore.json`` names a generation (a directory), its tables and arrays, and every file with size and
digest. Replacing it by rename is the one commit point of the format (see
:mod:`featstore.storage.generations`). It may come from a stranger, so nothing in it is used before it has
been read (:mod:`featstore.storage.manifest_reading`) and checked (:mod:`featstore.storage.manifest_checks`).

``formats/v1/spec.md`` is the normative text, ``formats/v1/manifest.schema.json`` the schema.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any, Literal

import msgspec

from featstore.arguments import shown
from featstore.base.dtypes import Scalar, dtype_from_name
from featstore.base.keys import KeyKind
from featstore.errors import FeatstoreError, FormatError
from featstore.layout import TableLayout
from featstore.storage.edge_types import EdgeType

MANIFEST_NAME = "featstore.json"
FORMAT_VERSION = 1
#: Flags this library understands. An unknown reader feature refuses the store, an unknown writer feature
#: makes it read-only.
GRAPHS_FEATURE = "graphs"
EDGE_IDS_FEATURE = "edge_ids"
COMPILED_FEATURE = "compiled"
FAMILY_FEATURE = "family"
GATHERED_FEATURE = "gathered"
SPLIT_GRAPHS_FEATURE = "split-graphs"
RELATIONS_FEATURE = "relations"
EDGE_VALUES_FEATURE = "edge_values"
KEYS_FEATURE = "keys"
SPLIT_VALUES_FEATURE = "split-values"
READER_FEATURES = frozenset((
    GRAPHS_FEATURE, EDGE_IDS_FEATURE, COMPILED_FEATURE, FAMILY_FEATURE, GATHERED_FEATURE,
    SPLIT_GRAPHS_FEATURE, RELATIONS_FEATURE, EDGE_VALUES_FEATURE, KEYS_FEATURE, SPLIT_VALUES_FEATURE,
))  # fmt: skip
WRITER_FEATURES: frozenset[str] = frozenset()

MANIFEST_BYTES_MAX = 256 * 2**20
#: Of a manifest, what is not the list of files, and of that what is for people: a list of little lists takes
#: twenty times its text.
CATALOGUE_BYTES_MAX = 8 * 2**20
PROVENANCE_BYTES_MAX = 2**20
#: A table of fewer rows may have so many partitions, most of them empty.
PARTITIONS_OF_FEW_ROWS = 2**20
ROW_BYTES_MAX = 64 * 2**20
ROWS_MAX = 2**40
#: Of a split store: as many as a table of uint16 can number.
HOSTS_MAX = 2**16
AXES_MAX = 31
#: What decoding raises for bytes that are not JSON of what was asked for.
NOT_JSON = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
GENERATION_NAME = re.compile(r"g[0-9]{6,}")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: path relative to the store, size in bytes, digest (see :mod:`featstore.base.checksum`)."""

    path: str
    bytes: int
    digest: str


class ArrayEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A small array: a zarr v3 array of one chunk, in the directory ``path``."""

    path: str
    shape: list[int]
    dtype: str


class OrderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How rows are ordered. ``row_of_node`` and ``node_of_row`` are absent where row = node id."""

    method: str
    parameters: dict[str, Scalar]
    partition_offsets: ArrayEntry
    row_of_node: ArrayEntry | None = None
    node_of_row: ArrayEntry | None = None
    rows_by_degree: ArrayEntry | None = None


class TableEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of rows: a zarr v3 array of ``rows`` by ``row_shape`` in chunks of ``rows_per_chunk``, in the
    directory ``path``."""

    path: str
    rows: int
    row_shape: list[int]
    dtype: str
    row_bytes: int
    rows_per_chunk: int
    page_checksums: ArrayEntry
    order: OrderEntry
    statistics: dict[str, Scalar]

    @property
    def layout(self) -> TableLayout:
        return TableLayout(self.rows, self.row_bytes, self.rows_per_chunk)

    def chunk_path(self, chunk: int) -> str:
        """Path of a chunk file, relative to the store."""
        return f"{self.path}/c." + ".".join([str(chunk)] + ["0"] * (zarr_axes(self.row_shape, self.dtype)))


class HubsEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A second copy of the lists of some rows: ``sources[offsets[h]:offsets[h + 1]]`` are those of row
    ``rows[h]``, the most wanted rows first, as ``method`` ranks them; with all else that the graph has of
    its edges."""

    method: str
    rows: ArrayEntry
    offsets: ArrayEntry
    sources: TableEntry
    edge_ids: TableEntry | msgspec.UnsetType = msgspec.UNSET
    weights: TableEntry | msgspec.UnsetType = msgspec.UNSET
    times: TableEntry | msgspec.UnsetType = msgspec.UNSET


class GraphEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The topology over a table's rows, CSC of incoming edges in the order of the rows:
    ``sources[offsets[r]:offsets[r + 1]]`` are the rows that row r gathers from, and ``edge_ids`` of these
    places the numbers that the user knows the edges by, where they are kept, as are ``weights`` and
    ``times``: where there are times, each list ascends by them.

    Of an edge type, ``relation``, the sources are rows of ``source_table``; else of ``table``."""

    table: str
    edges: int
    offsets: TableEntry
    sources: TableEntry
    hubs: HubsEntry | None = None
    edge_ids: TableEntry | msgspec.UnsetType = msgspec.UNSET
    relation: str | msgspec.UnsetType = msgspec.UNSET
    source_table: str | msgspec.UnsetType = msgspec.UNSET
    weights: TableEntry | msgspec.UnsetType = msgspec.UNSET
    times: TableEntry | msgspec.UnsetType = msgspec.UNSET

    @property
    def edge_type(self) -> EdgeType | None:
        """(source type, relation, target type); None where edges have no type."""
        if self.source_table is msgspec.UNSET or self.relation is msgspec.UNSET:
            return None
        return self.source_table, self.relation, self.table

    @property
    def table_of_sources(self) -> str:
        """Name of the table whose rows the sources are."""
        return self.table if self.source_table is msgspec.UNSET else self.source_table


def edge_parts(entry: GraphEntry | HubsEntry | WholeListsEntry) -> dict[str, TableEntry]:
    """What is kept of each edge beside its source: ``edge_ids``, ``weights``, ``times``, of which there is
    any."""
    parts = {"edge_ids": entry.edge_ids, "weights": entry.weights, "times": entry.times}
    return {name: table for name, table in parts.items() if table is not msgspec.UNSET}


class KeysEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the user calls the nodes of a table: ``values`` by node id, numbers, or the bytes of strings that
    ``offsets`` cut; and an index to find them by. ``hashes`` ascend, ``ids`` are the nodes that they are of,
    and ``starts[i]`` of 2**b + 1 says how many hashes there are whose upper b bits are less than i."""

    kind: KeyKind
    values: TableEntry
    hashes: TableEntry
    ids: TableEntry
    starts: TableEntry
    offsets: TableEntry | msgspec.UnsetType = msgspec.UNSET

    @property
    def parts(self) -> dict[str, TableEntry]:
        """Its tables by name."""
        found = {"values": self.values, "hashes": self.hashes, "ids": self.ids, "starts": self.starts}
        return found if self.offsets is msgspec.UNSET else found | {"offsets": self.offsets}


class CompiledTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a compiled trace has of one table of its base store: names of tables and of an array in the same
    manifest.

    ``packed``: each mini-batch's own rows. ``shared``: rows of groups of mini-batches. ``resident``: what is
    in memory before the first mini-batch, slot by slot; ``turn``: int32, in which slot that row is after the
    last one, or -1. ``device``: rows that are on the accelerator for good. ``batch_rows_max``: rows of the
    largest mini-batch.
    """

    packed: str
    shared: str
    resident: str
    device: str
    turn: str
    base_rows: int
    batch_rows_max: int
    placement: dict[str, Any]


EPOCHS, MADE_OF = "epochs", "sampled_by"  # arrays of compiled traces: where epochs begin; of what sampling


class CompiledEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trace compiled for a base store, by the names of the base store's tables. ``records``: a table of
    bytes; record i is bytes ``offsets[i]`` to ``offsets[i + 1]`` of it, ``offsets`` being an array of this
    manifest. ``memory_bytes``: the loader's budget. With the reader feature ``gathered`` the rows that were
    left out are rows of tables of this manifest, which have the names of the base store's."""

    base_uuid: str
    trace_uuid: str
    residency: Literal["min", "fixed"]
    batches: int
    memory_bytes: int
    records: str
    offsets: str
    tables: dict[str, CompiledTable]
    forecast: dict[str, Any]


#: Of a family, the store of topology, beside `host-0`, `host-1` and so on.
TOPOLOGY = "topology"
#: Of a part: table ``TABLE.halo`` of copies of other hosts' rows, arrays ``TABLE.halo_nodes`` of the nodes
#: that they are of, ``GRAPH.halo_ids`` and ``GRAPH.halo_uses``, and where graphs are split, too,
#: ``GRAPH.halo_degrees``.
HALO, HALO_NODES, HALO_IDS, HALO_USES = "halo", "halo_nodes", "halo_ids", "halo_uses"
HALO_DEGREES = "halo_degrees"


class WholeListsEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The lists of a host's nodes, whole, whoever owns the sources: ``sources[offsets[r]:offsets[r + 1]]``
    are the node ids, in the base store, that the part's row r gathers from. ``edge_ids``, ``weights``,
    ``times``: what the base store keeps of each edge; they need the reader feature ``split-values``.
    ``run_rows``, ``run_edges``: int64 [runs]. The rows from ``run_rows[k]`` on, up to the next run's, stand
    side by side in the base store, and their lists there begin with number ``run_edges[k]`` of its sources.
    """

    offsets: TableEntry
    sources: TableEntry
    run_rows: ArrayEntry
    run_edges: ArrayEntry
    edge_ids: TableEntry | msgspec.UnsetType = msgspec.UNSET
    weights: TableEntry | msgspec.UnsetType = msgspec.UNSET
    times: TableEntry | msgspec.UnsetType = msgspec.UNSET


class SplitGraphEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A graph over ``table`` of which each host has the lists of its own nodes; ``edges``: of the whole
    graph. ``lists``: of a part. ``relation``, ``source_table``: of an edge type, as those of a graph."""

    table: str
    edges: int
    lists: WholeListsEntry | None = None
    relation: str | msgspec.UnsetType = msgspec.UNSET
    source_table: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def as_graph(self) -> GraphEntry:
        """The lists of a part as those of a graph, whose sources are node ids of the base store."""
        lists = self.lists
        assert lists is not None
        return GraphEntry(
            self.table, lists.sources.rows, lists.offsets, lists.sources, None, lists.edge_ids,
            self.relation, self.source_table, lists.weights, lists.times,
        )  # fmt: skip


class FamilyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Of a store that came of a split: a family is one store of topology and one part for each of ``hosts``.

    ``uuid``, ``host``: of a part, the uuid of its family's topology and its own number; of the topology
    absent. ``base_uuid``: of the store that was split. ``first_rows``: by table, [hosts + 1]: laid end to
    end, the rows of host h are rows ``first_rows[h]`` to ``first_rows[h + 1]``. ``remote_edges``: by graph,
    [hosts]: edges of the whole graph that go to a host's nodes from those of others. ``split_graphs``: all
    graphs, where none is in the topology; needs the reader feature ``split-graphs``.
    """

    hosts: int
    base_uuid: str
    first_rows: dict[str, list[int]]
    remote_edges: dict[str, list[int]]
    uuid: str | None = None
    host: int | None = None
    split_graphs: dict[str, SplitGraphEntry] = msgspec.field(default_factory=dict)

    @property
    def copies(self) -> set[str]:
        """Names that tables of copies of other hosts' rows have in a part: no nodes of its own."""
        return {f"{n}.{HALO}" for n in self.first_rows if self.host is not None} - self.first_rows.keys()


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A store's catalogue; see the module's text. ``graphs``, edge ids of any, ``compiled``, ``family`` and
    ``keys`` need the reader features of these names; ``featureless``, names of tables of nodes that have no
    features, needs ``relations``."""

    format: Literal["featstore"]
    version: int
    reader_features: list[str]
    writer_features: list[str]
    uuid: str
    generation: str
    tables: dict[str, TableEntry]
    arrays: dict[str, ArrayEntry]
    files: list[FileEntry]
    provenance: dict[str, Any]
    graphs: dict[str, GraphEntry] = msgspec.field(default_factory=dict)
    compiled: CompiledEntry | None = None
    family: FamilyEntry | None = None
    featureless: list[str] = msgspec.field(default_factory=list)
    keys: dict[str, KeysEntry] = msgspec.field(default_factory=dict)

    @property
    def edge_types(self) -> list[EdgeType]:
        """The edge types of graphs that have one."""
        found = (graph.edge_type for graph in self.graphs.values())
        return [edge_type for edge_type in found if edge_type is not None]

    @property
    def all_tables(self) -> dict[str, TableEntry]:
        """Every table, those that graphs consist of too: ``GRAPH/offsets``, ``GRAPH/sources``,
        ``GRAPH/hubs``, and ``GRAPH/edge_ids``, ``GRAPH/hub_edge_ids`` and so on (:func:`edge_parts`); of
        whole lists ``GRAPH/lists/offsets`` and so on; and of keys ``TABLE/keys/values`` and
        so on."""
        inner: dict[str, TableEntry] = {}
        for name, graph in self.graphs.items():
            inner |= {f"{name}/offsets": graph.offsets, f"{name}/sources": graph.sources}
            inner |= {f"{name}/{part}": table for part, table in edge_parts(graph).items()}
            if graph.hubs is not None:
                inner[f"{name}/hubs"] = graph.hubs.sources
                inner |= {f"{name}/hub_{part}": table for part, table in edge_parts(graph.hubs).items()}
        for name, split in self.family.split_graphs.items() if self.family is not None else ():
            if split.lists is not None:
                lists = {"offsets": split.lists.offsets, "sources": split.lists.sources}
                inner |= {f"{name}/lists/{n}": t for n, t in (lists | edge_parts(split.lists)).items()}
        for name, keys in self.keys.items():
            inner |= {f"{name}/keys/{part}": table for part, table in keys.parts.items()}
        return self.tables | inner

    @property
    def read_only_because(self) -> str:
        """Why this library must not write to the store; empty if it may."""
        unknown = sorted(set(self.writer_features) - WRITER_FEATURES)
        return f"it uses writer features this version does not know: {', '.join(unknown)}" if unknown else ""


def zarr_axes(row_shape: list[int], dtype: str) -> int:
    """Axes of a table's zarr array after the first: those of a row, and one for the bytes of an opaque
    dtype."""
    return len(row_shape) + dtype.startswith("numpy:")


def array_chunk(entry: ArrayEntry) -> str | None:
    """Path of an array's only chunk file, relative to the store; None for an array without elements."""
    if math.prod(entry.shape) == 0:
        return None
    axes = zarr_axes(entry.shape, entry.dtype)
    return f"{entry.path}/c" + "".join([".0"] * axes)


def array_bytes(entry: ArrayEntry) -> int:
    """Size of an array's data in bytes."""
    return math.prod(entry.shape) * dtype_from_name(entry.dtype).itemsize


def check_name(name: str, what: str, error: type[FeatstoreError] = FormatError) -> None:
    """Raise ``error`` for a name (of a table, an array, a compiled trace, a saved cache) that could not be a
    file or a directory of its own everywhere."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "zarr.json":
        raise error(
            f"{what} name {shown(name)} is not allowed: use letters, digits, '_', '.' and '-', at most "
            "128, not starting with '.' or '-'"
        )


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as it stands on disk: JSON, two spaces, keys in the order of the fields."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def uuid_of(text: bytes, uuid: str) -> str:
    """The uuid that a manifest's text should carry: the SHA-256 of the text without white space and with
    an empty uuid, as a UUID of version 8 (RFC 9562). It is what protects the manifest itself against
    accidents."""
    compact = msgspec.json.format(text, indent=-1)
    digest = hashlib.sha256(compact.replace(f'"uuid":"{uuid}"'.encode(), b'"uuid":""', 1)).hexdigest()
    variant = "89ab"[int(digest[16], 16) % 4]
    return f"{digest[:8]}-{digest[8:12]}-8{digest[13:16]}-{variant}{digest[17:20]}-{digest[20:32]}"


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its uuid: derived from all it says, so that equal packs are equal to the byte."""
    blank = msgspec.structs.replace(manifest, uuid="")
    return msgspec.structs.replace(manifest, uuid=uuid_of(msgspec.json.encode(blank), ""))
