"""The manifest: what a store consists of, in one JSON file, parsed and checked at the border.

``featstore.json`` names a generation (a directory), its tables and arrays, and every file with size and
digest. Replacing it by rename is the one commit point of the format (see
:mod:`featstore.storage.generations`). It may come from a stranger, so nothing in it is used before it has
been validated: versions and feature flags, names, that every path is relative and stays inside the
generation, that tables' layouts are possible, that every file needed is listed and of the size the layout
gives.

``formats/v1/spec.md`` is the normative text, ``formats/v1/manifest.schema.json`` the schema.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from featstore.arguments import shown
from featstore.base.dtypes import dtype_from_name
from featstore.base.files import read_small
from featstore.base.system import asking, is_there
from featstore.errors import (
    DeviceError,
    FeatstoreError,
    FormatError,
    FormatVersionError,
    IncompleteStoreError,
)
from featstore.layout import TableLayout

MANIFEST_NAME = "featstore.json"
FORMAT_VERSION = 1
#: Flags this library understands. An unknown reader feature refuses the store, an unknown writer feature
#: makes it read-only.
GRAPHS_FEATURE = "graphs"
COMPILED_FEATURE = "compiled"
READER_FEATURES: frozenset[str] = frozenset({GRAPHS_FEATURE, COMPILED_FEATURE})
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
ELEMENTS_MAX = 2**48
TABLE_BYTES_MAX = 2**62
AXES_MAX = 31
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_GENERATION = re.compile(r"g[0-9]{6,}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

_SHORT_BYTES = 2**16  # of a field that is looked at before the others
_ROW_DTYPES = ("int32", "int64")

Scalar = str | int | float | bool | None


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
    ``rows[h]``, the most wanted rows first, as ``method`` ranks them."""

    method: str
    rows: ArrayEntry
    offsets: ArrayEntry
    sources: TableEntry


class GraphEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The topology over a table's rows, CSC of incoming edges in the order of the rows:
    ``sources[offsets[r]:offsets[r + 1]]`` are the rows that row r gathers from."""

    table: str
    edges: int
    offsets: TableEntry
    sources: TableEntry
    hubs: HubsEntry | None = None


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


class CompiledEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trace compiled for a base store, by the names of the base store's tables. ``records``: a table of
    bytes; record i is bytes ``offsets[i]`` to ``offsets[i + 1]`` of it, ``offsets`` being an array of this
    manifest. ``memory_bytes``: the loader's budget."""

    base_uuid: str
    trace_uuid: str
    residency: Literal["min", "fixed"]
    batches: int
    memory_bytes: int
    records: str
    offsets: str
    tables: dict[str, CompiledTable]
    forecast: dict[str, Any]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A store's catalogue; see the module's text. ``graphs`` and ``compiled`` need the reader features of
    these names."""

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

    @property
    def all_tables(self) -> dict[str, TableEntry]:
        """Every table, those that graphs consist of too: ``GRAPH/offsets``, ``GRAPH/sources``,
        ``GRAPH/hubs``."""
        inner: dict[str, TableEntry] = {}
        for name, graph in self.graphs.items():
            inner |= {f"{name}/offsets": graph.offsets, f"{name}/sources": graph.sources}
            if graph.hubs is not None:
                inner[f"{name}/hubs"] = graph.hubs.sources
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


def encode(manifest: Manifest) -> bytes:
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


def read_manifest(store: Path) -> tuple[Manifest, bytes]:
    """The manifest of a store, validated, and its bytes.

    Raises IncompleteStoreError where there is no committed store, FormatVersionError where it needs a newer
    featstore and FormatError where it cannot be trusted.
    """
    path = store / MANIFEST_NAME
    try:
        text = read_small(path, MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        raise IncompleteStoreError(_what_is_there(store)) from None
    except DeviceError as error:
        if error.errno != errno.ENOTDIR:
            raise
        raise IncompleteStoreError(f"{store} is a file, not a featstore store (a directory)") from None
    return parse(text, path), text


def _what_is_there(store: Path) -> str:
    if not is_there(store):
        return f"there is no store at {store}"
    with asking(store, "list"):
        entries = list(store.iterdir())
    if any(_GENERATION.fullmatch(entry.name) for entry in entries):
        return (
            f"{store} holds an unfinished pack and no committed store; run the same `featstore pack` "
            "again with --resume, or with --overwrite to start anew"
        )
    return f"{store} is not a featstore store: it has no {MANIFEST_NAME}"


def parse(text: bytes, path: Path) -> Manifest:
    """A manifest from its bytes, validated; errors name ``path``."""
    if len(text) > MANIFEST_BYTES_MAX:
        raise FormatError(f"{path} is larger than {MANIFEST_BYTES_MAX:,} bytes; it cannot be a manifest")
    parts = _parts(text, path)
    if _plain(parts.format) != "featstore":
        raise FormatError(f"{path} is not a featstore manifest")
    version, features = _plain(parts.version), _plain(parts.reader_features)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"{path} has no usable format version: {version!r}")
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{path} has format version {version}; this featstore reads up to {FORMAT_VERSION}: "
            "install a newer one"
        )
    if isinstance(features, list):
        unknown = sorted({str(f) for f in features} - READER_FEATURES)
        if unknown:
            raise FormatVersionError(
                f"{path} needs reader features this featstore lacks: {', '.join(unknown)}; install a "
                "newer one"
            )
    provenance, catalogue = memoryview(parts.provenance).nbytes, len(text) - memoryview(parts.files).nbytes
    if provenance > PROVENANCE_BYTES_MAX or catalogue > CATALOGUE_BYTES_MAX:
        raise FormatError(
            f"{path} has {provenance:,} bytes of provenance (at most {PROVENANCE_BYTES_MAX:,}) and "
            f"{catalogue:,} bytes beside its list of files (at most {CATALOGUE_BYTES_MAX:,}); it "
            "cannot be a manifest"
        )
    try:
        msgspec.json.decode(parts.files, type=list[FileEntry])  # else looking for keys makes much of little
        _check_keys(text, path)
        manifest = msgspec.json.decode(text, type=Manifest)
        _validate(manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is malformed: {error}") from None
    except FormatError as error:
        raise FormatError(f"{path} cannot be trusted: {error}") from None
    return manifest


class _Parts(msgspec.Struct):
    """The texts of a manifest's fields: what tells which reader it needs, and what may be long."""

    format: msgspec.Raw = msgspec.Raw(b"null")
    version: msgspec.Raw = msgspec.Raw(b"null")
    reader_features: msgspec.Raw = msgspec.Raw(b"null")
    provenance: msgspec.Raw = msgspec.Raw(b"null")
    files: msgspec.Raw = msgspec.Raw(b"[]")


def _parts(text: bytes, path: Path) -> _Parts:
    """The parts of a manifest that is JSON; nothing is made of what they say."""
    try:
        return msgspec.json.decode(text, type=_Parts)
    except msgspec.ValidationError:
        raise FormatError(f"{path} is not JSON of one object, and so not a featstore manifest") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not JSON: {error}") from None


def _check_keys(text: bytes, path: Path) -> None:
    """Raise FormatError where an object has a key twice."""
    try:
        json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}") from None


def _plain(raw: msgspec.Raw) -> Any:
    """A short field's value; None for one that is not short."""
    try:
        return json.loads(bytes(raw)) if memoryview(raw).nbytes <= _SHORT_BYTES else None
    except (ValueError, RecursionError):  # a number of too many digits, say
        return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice in one object")  # caught around json.loads: a FormatError


def _validate(manifest: Manifest) -> None:
    if not _GENERATION.fullmatch(manifest.generation):
        raise FormatError(f"generation {manifest.generation!r} is not a 'g' and six or more digits")
    files: dict[str, FileEntry] = {}
    for entry in manifest.files:
        _check_path(entry.path, manifest.generation)
        if entry.bytes < 0 or not _DIGEST.fullmatch(entry.digest):
            raise FormatError(f"file {entry.path!r} has an impossible size or digest")
        if entry.path in files:
            raise FormatError(f"file {entry.path!r} is listed twice")
        files[entry.path] = entry
    for name, table in manifest.tables.items():
        check_name(name, "table")
        _check_table(name, table, manifest.generation, files)
    for name, array in manifest.arrays.items():
        check_name(name, "array")
        _check_array(f"array {name!r}", array, manifest.generation, files)
    if manifest.graphs and GRAPHS_FEATURE not in manifest.reader_features:
        raise FormatError(f"there are graphs, but the reader feature {GRAPHS_FEATURE!r} is not named")
    for name, graph in manifest.graphs.items():
        check_name(name, "graph")
        _check_graph(name, graph, manifest, files)
    if manifest.compiled is not None:
        _check_compiled(manifest, manifest.compiled)


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
        if not 0 <= table.batch_rows_max <= records.rows:  # a row's place alone takes four bytes of a record
            raise FormatError(
                f"the compiled trace's mini-batches of {table.batch_rows_max} rows of {name!r} have no "
                f"room in {records.rows} bytes of records"
            )


def _check_graph(name: str, graph: GraphEntry, manifest: Manifest, files: dict[str, FileEntry]) -> None:
    what = f"graph {name!r}"
    nodes = manifest.tables.get(graph.table)
    if nodes is None:
        raise FormatError(f"{what} is over the table {graph.table!r}, which does not exist")

    def check(part: str, table: TableEntry, rows: int | None, dtypes: tuple[str, ...]) -> None:
        _check_table(f"{name}/{part}", table, manifest.generation, files)
        if (
            table.row_shape
            or table.dtype not in dtypes
            or table.rows != (table.rows if rows is None else rows)
        ):
            raise FormatError(
                f"{what}: {part} should be {rows} numbers of type {' or '.join(dtypes)}, not "
                f"{table.rows} x {table.row_shape} {table.dtype}"
            )
        if table.order.row_of_node is not None:
            raise FormatError(f"{what}: {part} are permuted, which they must not be")

    check("offsets", graph.offsets, nodes.rows + 1, ("int64",))
    check("sources", graph.sources, graph.edges, _ROW_DTYPES)
    if graph.hubs is None:
        return
    check("hubs", graph.hubs.sources, None, _ROW_DTYPES)
    hubs = graph.hubs.rows.shape[0] if len(graph.hubs.rows.shape) == 1 else -1
    if not 0 <= hubs <= nodes.rows:
        raise FormatError(f"{what} has hubs of the impossible shape {graph.hubs.rows.shape}")
    _check_vector(f"{what}'s hubs", graph.hubs.rows, _ROW_DTYPES, hubs, manifest.generation, files)
    _check_vector(f"{what}'s hub offsets", graph.hubs.offsets, "int64", hubs + 1, manifest.generation, files)


def _check_path(path: str, generation: str) -> None:
    parts = path.split("/")
    if parts[0] != generation or len(parts) < 2 or not all(_PART.fullmatch(part) for part in parts):
        raise FormatError(f"path {path!r} does not stay inside the generation {generation!r}")


def _need_file(files: dict[str, FileEntry], path: str, size: int, what: str) -> None:
    entry = files.get(path)
    if entry is None:
        raise FormatError(f"{what} needs the file {path!r}, which is not listed")
    if entry.bytes != size:
        raise FormatError(f"{what} needs {size:,} bytes in {path!r}, but {entry.bytes:,} are listed")


def _check_array(what: str, array: ArrayEntry, generation: str, files: dict[str, FileEntry]) -> None:
    _check_path(array.path, generation)
    if (
        len(array.shape) > AXES_MAX
        or any(not 0 <= n <= ELEMENTS_MAX for n in array.shape)
        or math.prod(n for n in array.shape if n) > ELEMENTS_MAX
    ):
        raise FormatError(f"{what} has the impossible shape {array.shape}")
    chunk = array_chunk(array)
    if chunk is not None:
        _need_file(files, chunk, array_bytes(array), what)


def _check_table(name: str, table: TableEntry, generation: str, files: dict[str, FileEntry]) -> None:
    what = f"table {name!r}"
    _check_path(table.path, generation)
    item_bytes = dtype_from_name(table.dtype).itemsize
    if (
        not 0 <= table.rows <= ROWS_MAX
        or len(table.row_shape) > AXES_MAX
        or any(not 1 <= n <= ROW_BYTES_MAX for n in table.row_shape)
    ):
        raise FormatError(f"{what} has the impossible shape [{table.rows}, {table.row_shape}]")
    if (
        table.row_bytes != math.prod(table.row_shape) * item_bytes
        or not 1 <= table.row_bytes <= ROW_BYTES_MAX
    ):
        raise FormatError(
            f"{what} says {table.row_bytes} bytes a row, its shape {table.row_shape} of {table.dtype} "
            "says otherwise"
        )
    if table.rows * table.row_bytes >= TABLE_BYTES_MAX:
        raise FormatError(
            f"{what} has {table.rows} rows of {table.row_bytes} bytes, more than the format allows"
        )
    try:
        layout = table.layout
    except ValueError as error:
        raise FormatError(f"{what}: {error}") from None
    if layout.chunks > len(files):
        raise FormatError(f"{what} has {layout.chunks} chunks, but only {len(files)} files are listed in all")
    for chunk in range(layout.chunks):
        _need_file(files, table.chunk_path(chunk), layout.chunk_bytes, what)
    _check_vector(f"{what}'s page checksums", table.page_checksums, "uint32", layout.pages, generation, files)
    order = table.order
    if (order.row_of_node is None) != (order.node_of_row is None):
        raise FormatError(f"{what} has one of the maps row_of_node and node_of_row, but not the other")
    for label, entry in (
        ("row_of_node", order.row_of_node),
        ("node_of_row", order.node_of_row),
        ("rows_by_degree", order.rows_by_degree),
    ):
        if entry is not None:
            _check_vector(f"{what}'s {label}", entry, _ROW_DTYPES, table.rows, generation, files)
    offsets = order.partition_offsets
    if len(offsets.shape) != 1 or not 2 <= offsets.shape[0] <= max(table.rows, PARTITIONS_OF_FEW_ROWS) + 1:
        raise FormatError(f"{what}'s partition offsets have the impossible shape {offsets.shape}")
    _check_vector(f"{what}'s partition offsets", offsets, "int64", offsets.shape[0], generation, files)


def _check_vector(
    what: str,
    entry: ArrayEntry,
    dtypes: str | tuple[str, ...],
    length: int,
    generation: str,
    files: dict[str, FileEntry],
) -> None:
    allowed = (dtypes,) if isinstance(dtypes, str) else dtypes
    if entry.shape != [length] or entry.dtype not in allowed:
        raise FormatError(
            f"{what}: expected {length} numbers of type {' or '.join(allowed)}, found {entry.shape} of "
            f"{entry.dtype}"
        )
    _check_array(what, entry, generation, files)
