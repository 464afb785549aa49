"""What a user gives a pack: tables, graphs, arrays and options, given once or by table, in any of the forms
there are."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_mapping
from featstore.base.dtypes import dtype_name
from featstore.base.files import load_given
from featstore.base.ids import is_tensor, plain_array
from featstore.base.system import is_regular
from featstore.base.training_nodes import checked_train
from featstore.errors import ArgumentError, SourceError
from featstore.packing.graphs.csc import CscGraph
from featstore.packing.graphs.values import EdgeValues
from featstore.packing.keys.sources import KeySource, as_key_column, is_of_id, key_source
from featstore.packing.relations import (
    NoFeatures,
    edge_type_of,
    graphs_by_type,
    is_number_of_nodes,
    values_by_graph,
)
from featstore.packing.sources.arrays import array_of
from featstore.packing.sources.base import file_fingerprint, sample_crc32
from featstore.packing.sources.data_sets import data_set_inputs, is_data_set
from featstore.packing.sources.opening import FeatureSource, is_headless, is_text, open_rows
from featstore.packing.sources.pyg import (
    edges_of_relation,
    is_pyg,
    is_relation,
    pyg_inputs,
    relation_of,
    unnumbered,
)
from featstore.packing.sources.text import ogb_folder
from featstore.storage.edge_types import EdgeType, is_edge_table
from featstore.storage.manifest import ROW_BYTES_MAX, check_name

#: What a table is called when no name is given.
DEFAULT_TABLE = "features"


#: Arguments of a pack that say how a table is read, each given once for all tables or by table.
INPUT_OPTIONS = ("raw_dtype", "dtype", "cast", "shape", "offset", "key", "columns", "id")


#: Orders that make none.
WITHOUT_PARTITIONS = ("given", "permutation", "degree")


@dataclass(frozen=True)
class Inputs:
    """What is packed: sources, graphs and arrays by name, dtypes to cast to, what the user should hear, and
    which tables and arrays are of edges; the edge types of graphs, by name, if they have any, the tables of
    nodes without features, the values of edges by graph, and the keys of nodes by table."""

    tables: dict[str, FeatureSource]
    graphs: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    casts: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    edge_rows: list[str] = field(default_factory=list)
    types: dict[str, EdgeType] = field(default_factory=dict)
    featureless: list[str] = field(default_factory=list)
    values: dict[str, list[EdgeValues]] = field(default_factory=dict)
    keys: dict[str, KeySource] = field(default_factory=dict)

    @property
    def ordered(self) -> set[str]:
        """The tables that a graph can order: those that it joins."""
        if not self.types:
            return set(self.graphs)
        return {end for source, _, target in self.types.values() for end in (source, target)}


def parse_inputs(
    features: Any, graph: Any, arrays: Mapping[str, Any] | None, reading: Mapping[str, Any], *,
    numbered: bool = True, edge_values: Mapping[str, Any] | None = None, node_keys: Any = None,
) -> Inputs:  # fmt: skip
    """Tables, graphs and arrays out of what the user gave; ``reading`` has the arguments of `READING`.
    ``numbered``: stored graphs may have the ids of their edges. ``edge_values``: weights and times, by
    part."""
    own_graphs: dict[Any, Any] = {}
    own_arrays: dict[str, NDArray[Any]] = {}
    data, taken = features, None
    if is_pyg(features):
        taken = pyg_inputs(features, graph is not None, _is_typed(graph, features))
    elif is_data_set(features):
        taken = data_set_inputs(features, graph is not None)
    if taken is not None:
        features, own_graphs, own_arrays = taken.tables, taken.graphs, taken.arrays
    elif not isinstance(features, Mapping):
        features = {DEFAULT_TABLE: features}
    if not features:
        raise SourceError("there is nothing to pack: no table of features was given")
    for name in features:
        check_name(name, "table", ArgumentError)
    features = _counted_by_keys(features, node_keys)
    # What is asked for by name replaces what the data bring: naming some relations leaves out the others.
    graphs, types, relations = _graphs(own_graphs if graph is None else graph, features, is_pyg(data))
    given = {what: by_table(reading.get(what), features, what) for what in INPUT_OPTIONS}
    bare = [name for name, spec in features.items() if is_number_of_nodes(spec)]
    _check_bare(bare, types, reading)
    keys = by_table(node_keys, features, "node_keys")
    given["id"] |= {name: as_key_column(given["id"].get(name)) for name in keys if is_of_id(keys[name])}
    tables: dict[str, FeatureSource] = {}
    casts: dict[str, str] = {}
    for name, spec in features.items():
        if name in bare:
            tables[name] = NoFeatures(name, spec)
            continue
        asked = {what: values[name] for what, values in given.items() if values.get(name) is not None}
        if taken is not None and name in taken.counts:
            asked["rows"] = taken.counts[name]
        tables[name], cast = _opened(name, spec, asked)
        if cast is not None:
            casts[name] = cast
    values, used = values_by_graph(edge_values or {}, graphs, data)
    named = {} if arrays is None else as_mapping(arrays, "arrays", "names to arrays")
    own_arrays = {name: array for name, array in own_arrays.items() if name not in used}
    small = own_arrays | {name: small_array(name, value) for name, value in named.items()}
    for name in small:
        check_name(name, "array", ArgumentError)
    warnings, edge_rows = [], {name: "" for name in tables if is_edge_table(name, tables)}
    if types:
        edge_rows = _rows_of_edges(tables, types)
    if taken is not None:
        edge_rows |= {name: relation for name, relation in taken.edge_rows.items() if name not in used}
        kept = [*relations, *(taken.relations if graph is None else ())] if numbered else []
        rows = {name: relation for name, relation in taken.edge_rows.items() if name not in used}
        warnings = [*taken.warnings, *unnumbered(rows, kept)]
    keyed = {name: key_source(value, tables[name]) for name, value in keys.items()}
    return Inputs(tables, graphs, small, casts, warnings, list(edge_rows), types, bare, values, keyed)


def _counted_by_keys(features: Mapping[str, Any], node_keys: Any) -> Mapping[str, Any]:
    """Tables given as None are nodes without features, as many as they have keys. Raises SourceError."""
    counted = dict(features)
    for name in (name for name, spec in features.items() if spec is None):
        keys = node_keys.get(name) if isinstance(node_keys, Mapping) else None
        if keys is None or is_of_id(keys):
            raise SourceError(
                f"table {name!r} is None: give its rows; or where nodes have no features their number, or "
                f"their keys, node_keys={{{name!r}: ...}}"
            )
        source = key_source(keys, NoFeatures(name, 0))
        counted[name] = sum(map(len, source.blocks())) if source.rows is None else source.rows
    return counted


def _is_typed(graph: Any, data: Any) -> bool:
    """Whether graphs that are given in place of those of PyG data have edge types."""
    if not isinstance(graph, Mapping) or is_relation(graph):
        return False
    kinds = list(getattr(data, "node_types", ()))
    return any(edge_type_of(key, kinds) is not None for key in graph)


def _graphs(
    given: Any, features: Mapping[str, Any], pyg: bool
) -> tuple[dict[str, Any], dict[str, EdgeType], list[str]]:
    """(graphs by name, their edge types, and the relations of PyG data that they are)."""
    if isinstance(given, Mapping) and not is_relation(given):
        graphs, types = graphs_by_type(given, features)
        if types:
            return graphs, types, list(types)
        given = graphs
    plain = by_table(given, features, "graph")
    relations = ["__".join(relation_of(spec)) for spec in plain.values() if is_relation(spec)]
    return (
        {name: edges_of_relation(spec, name if pyg else None) for name, spec in plain.items()},
        {},
        relations,
    )


def _check_bare(bare: list[str], types: Mapping[str, EdgeType], reading: Mapping[str, Any]) -> None:
    """Raise SourceError where nodes without features have no edge types, or are to be read in some way."""
    ends = {end for source, _, target in types.values() for end in (source, target)}
    for name in bare:
        if name not in ends:
            raise SourceError(
                f"table {name!r} is given as a number of nodes, and no edge type has such nodes: give "
                f"graph={{({name!r}, relation, other type): ...}}"
            )
        asked = [what for what, value in reading.items() if isinstance(value, Mapping) and name in value]
        if asked:
            raise SourceError(f"{asked[0]} is given for table {name!r}, whose nodes have no features")


def _rows_of_edges(tables: Mapping[str, Any], types: Mapping[str, EdgeType]) -> dict[str, str]:
    """The tables of edges, and of which edge type. Raises SourceError for one whose edges are not packed."""
    rows = {name: name for name in tables if name in types}
    ends = {end for source, _, target in types.values() for end in (source, target)}
    for name in tables.keys() - rows.keys() - ends:
        if is_edge_table(name, tables):
            raise SourceError(
                f"table {name!r} has rows of edges, judging by its name, and its edge type is not packed: "
                "graphs that have edge types tell types of nodes from types of edges; give its edges, or "
                "leave it out"
            )
    return rows


def _opened(name: str, spec: Any, asked: dict[str, Any]) -> tuple[FeatureSource, str | None]:
    """A table's source, and the dtype to cast it to."""
    if is_data_set(spec):
        raise SourceError(
            f"table {name!r}: {spec} is a whole data set, with tables of its own; give it alone, without a "
            "name"
        )
    own, cast = dtypes_asked(spec, name, asked)
    source = open_rows(
        spec,
        dtype=own,
        shape=asked.get("shape"),
        key=asked.get("key"),
        columns=asked.get("columns"),
        id=asked.get("id"),
        offset=asked.get("offset", 0),
        rows=asked.get("rows"),
    )
    if not 1 <= source.row_bytes <= ROW_BYTES_MAX:
        raise SourceError(
            f"table {name!r} has rows of {source.row_bytes:,} bytes; the format allows up to "
            f"{ROW_BYTES_MAX:,}"
        )
    return source, cast


def dtypes_asked(spec: Any, name: str, asked: Mapping[str, Any]) -> tuple[Any, Any]:
    """(the source's own dtype, the dtype to cast to): what ``dtype`` means depends on the file."""
    raw, dtype, cast = (asked.get(what) for what in ("raw_dtype", "dtype", "cast"))
    offset = asked.get("offset", 0)
    headless = is_headless(spec, offset if isinstance(offset, int) else 0)
    if dtype is not None and headless and asked.get("shape") is not None and raw is None:
        return dtype, cast
    if dtype is not None and cast is not None:
        raise SourceError(f"table {name!r}: dtype= and cast= both ask for a cast; give one of them")
    cast = dtype if cast is None else cast
    if raw is None and cast is not None and is_text(spec):
        raw = "float64"  # else the cast would find numbers that float32 had rounded already
    return raw, cast


def by_table(value: Any, tables: Mapping[str, Any], what: str) -> dict[str, Any]:
    """An option that may be given once for all tables, or by table name."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or is_relation(value):
        if what in ("graph", "permutation", "node_keys") and len(tables) > 1:
            raise SourceError(
                f"there are several tables; say whose {what} it is: {what}={{{next(iter(tables))!r}: ...}}"
            )
        return dict.fromkeys(tables, value)
    for name in value:
        if name not in tables:
            raise SourceError(
                f"{what} is given for a table {name!r} that is not packed; there are "
                f"{', '.join(map(repr, tables))}"
            )
    return dict(value)


def small_array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, str | os.PathLike):
        try:
            value = load_given(value)
        except (OSError, ValueError) as error:
            raise SourceError(f"cannot read array {name!r} from {os.fspath(value)}: {error}") from None
    found = array_of(value, f"array {name!r}")
    array = plain_array(value, f"array {name!r}") if found is None else found
    try:
        dtype_name(array.dtype)
    except SourceError as error:
        raise SourceError(f"array {name!r}: {error}") from None
    return array


def node_mask(train: Any, rows: int) -> NDArray[np.bool_]:
    """Training nodes, ids or a mask already, as bool [rows]. Raises ArgumentError, IdError."""
    mask = np.zeros(rows, bool)
    mask[checked_train(train, rows)] = True
    return mask


def identity(value: Any) -> dict[str, Any]:
    """What tells a graph, permutation or array from another one of the same name, when a pack is resumed."""
    if isinstance(value, CscGraph):
        return dict(value.source)
    if isinstance(value, str | os.PathLike):
        path = Path(value)
        if is_regular(path):
            return file_fingerprint("file", path)
        raw = ogb_folder(path, "edge.csv.gz")
        files = [] if raw is None else [raw / name for name in ("edge.csv.gz", "num-node-list.csv.gz")]
        return {
            "path": os.path.abspath(path),
            "files": [file_fingerprint("file", one) for one in files if is_regular(one)],
        }
    if isinstance(value, tuple):
        return {str(k): identity(part) for k, part in enumerate(value)}
    if isinstance(value, Mapping):
        return {str(k): identity(part) for k, part in value.items()}
    parts = _parts_of(value)
    if parts:
        return {name: identity(part) for name, part in parts.items()}
    names = getattr(value, "column_names", None) or getattr(value, "columns", None)
    # a frame: column by column, without a copy
    if names is not None and hasattr(value, "__getitem__") and len(set(names)) == len(names):
        return {str(k): identity(value[k]) for k in names}
    try:
        array = np.asarray(value.detach().cpu() if is_tensor(value) else value)
    except (TypeError, ValueError, RuntimeError):
        array = np.array(None, object)
    if array.dtype.hasobject and array.ndim:  # of text
        array = array.reshape(-1)
        some = array[np.unique(np.linspace(0, len(array) - 1, 1000, dtype=np.int64))] if len(array) else array
        text = "\n".join(repr(one) if isinstance(one, str | bytes | int | float) else "" for one in some)
        return {"text": len(array), "sample": zlib.crc32(text.encode("utf-8", "surrogatepass"))}
    if array.dtype.hasobject:  # the type and size have to do
        return {"type": type(value).__name__, "shape": list(getattr(value, "shape", []))}
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "sample": sample_crc32(array[None] if array.ndim < 2 else array),
    }


#: What tensors of some layouts consist of, beside their values.
_SPARSE = {
    "torch.sparse_csc": ("ccol_indices", "row_indices"), "torch.sparse_csr": ("crow_indices", "col_indices"),
    "torch.sparse_coo": ("indices",),
}  # fmt: skip


def _parts_of(value: Any) -> dict[str, Any]:
    """The arrays that a sparse matrix consists of, or the edges of PyG data."""
    if type(value).__module__.partition(".")[0] == "scipy":
        names = [("indptr", "indices", "data"), ("row", "col", "data"), ("offsets", "data")]
        own = next((some for some in names if all(hasattr(value, one) for one in some)), ())
        return {one: getattr(value, one) for one in own} or {"coo": value.tocoo()}
    if is_tensor(value):
        layout = str(value.layout)
        value = value.coalesce() if layout == "torch.sparse_coo" else value
        return {one: getattr(value, one)() for one in _SPARSE.get(layout, ())}
    if is_pyg(value):
        found = [getattr(one, "edge_index", getattr(one, "adj_t", None)) for one in value.edge_stores]
        return {str(k): one for k, one in enumerate(found) if one is not None}
    return {}


def changed_file(fingerprint: Any) -> str | None:
    """The path of a file that is another one now than when a fingerprint was taken; None where all are
    those."""
    if isinstance(fingerprint, Mapping):
        path = fingerprint.get("path")
        if path is not None and "mtime_ns" in fingerprint:
            now = file_fingerprint("", Path(str(path)))
            if any(now[one] != fingerprint[one] for one in ("size_bytes", "mtime_ns")):
                return str(path)
        fingerprint = list(fingerprint.values())
    if isinstance(fingerprint, list):
        return next((found for one in fingerprint if (found := changed_file(one)) is not None), None)
    return None


def described(source: FeatureSource) -> dict[str, Any]:
    """What the manifest keeps of a source: nothing that depends on the machine."""
    return {
        "name": os.path.basename(source.name),
        "dtype": str(source.dtype),
        "shape": [source.rows, *source.row_shape],
        **({} if source.chosen is None else source.chosen.described()),
    }
