"""What a user gives a pack: tables, graphs, arrays and options, given once or by table, in any of the forms
there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_mapping
from featstore.base.dtypes import dtype_name
from featstore.base.files import load_given
from featstore.base.ids import plain_array
from featstore.base.system import is_regular
from featstore.base.training_nodes import checked_train
from featstore.errors import SourceError
from featstore.packing.graphs.csc import CscGraph
from featstore.packing.keys.sources import KeySource, as_key_column, is_of_id, key_source
from featstore.packing.sources.arrays import array_of
from featstore.packing.sources.base import file_fingerprint, sample_crc32
from featstore.packing.sources.opening import FeatureSource, is_headless, is_text, open_rows
from featstore.packing.sources.pyg import (
    edges_of_relation,
    is_pyg,
    is_relation,
    pyg_inputs,
    relation_of,
    unnumbered,
)
from featstore.storage.manifest import ROW_BYTES_MAX, check_name
from featstore.storage.relations import is_edge_table

#: What a table is called when no name is given.
DEFAULT_TABLE = "features"


#: Arguments of a pack that say how a table is read, each given once for all tables or by table.
INPUT_OPTIONS = ("raw_dtype", "dtype", "cast", "shape", "offset", "key", "columns", "id")


@dataclass(frozen=True)
class Inputs:
    """What is packed: sources, graphs and arrays by name, dtypes to cast to, what the user should hear,
    which tables and arrays are of edges, and the keys of nodes."""

    tables: dict[str, FeatureSource]
    graphs: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    casts: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    edge_rows: list[str] = field(default_factory=list)
    keys: dict[str, KeySource] = field(default_factory=dict)


def parse_inputs(
    features: Any, graph: Any, arrays: Mapping[str, Any] | None, reading: Mapping[str, Any], *,
    numbered: bool = True, node_keys: Any = None,
) -> Inputs:  # fmt: skip
    """Tables, graphs and arrays out of what the user gave; ``reading`` has the arguments of `READING`.
    ``numbered``: stored graphs may have the ids of their edges."""
    own_graphs: dict[str, Any] = {}
    own_arrays: dict[str, NDArray[Any]] = {}
    data, taken = features, pyg_inputs(features, graph is not None) if is_pyg(features) else None
    if taken is not None:
        features, own_graphs, own_arrays = taken.tables, taken.graphs, taken.arrays
    elif not isinstance(features, Mapping):
        features = {DEFAULT_TABLE: features}
    if not features:
        raise SourceError("there is nothing to pack: no table of features was given")
    for name in features:
        check_name(name, "table")
    # What is asked for by name replaces what the data bring: naming some relations leaves out the others.
    graphs = own_graphs if graph is None else by_table(graph, features, "graph")
    relations = ["__".join(relation_of(spec)) for spec in graphs.values() if is_relation(spec)]
    graphs = {name: edges_of_relation(spec, name if is_pyg(data) else None) for name, spec in graphs.items()}
    given = {what: by_table(reading.get(what), features, what) for what in INPUT_OPTIONS}
    keys = by_table(node_keys, features, "node_keys")
    given["id"] |= {name: as_key_column(given["id"].get(name)) for name in keys if is_of_id(keys[name])}
    tables, casts = {}, {}
    for name, spec in features.items():
        asked = {what: values[name] for what, values in given.items() if values.get(name) is not None}
        tables[name], cast = _opened(name, spec, asked)
        if cast is not None:
            casts[name] = cast
    named = {} if arrays is None else as_mapping(arrays, "arrays", "names to arrays")
    small = own_arrays | {name: small_array(name, value) for name, value in named.items()}
    for name in small:
        check_name(name, "array")
    warnings, edge_rows = [], {name: "" for name in tables if is_edge_table(name, tables)}
    if taken is not None:
        edge_rows |= taken.edge_rows
        kept = [*relations, *taken.relations] if numbered else []
        warnings = [*taken.warnings, *unnumbered(taken.edge_rows, kept)]
    keyed = {name: key_source(value, tables[name]) for name, value in keys.items()}
    return Inputs(tables, graphs, small, casts, warnings, list(edge_rows), keyed)


def _opened(name: str, spec: Any, asked: dict[str, Any]) -> tuple[FeatureSource, str | None]:
    """A table's source, and the dtype to cast it to."""
    own, cast = dtypes_asked(spec, name, asked)
    source = open_rows(
        spec,
        dtype=own,
        shape=asked.get("shape"),
        key=asked.get("key"),
        columns=asked.get("columns"),
        id=asked.get("id"),
        offset=asked.get("offset", 0),
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
        return file_fingerprint("file", path) if is_regular(path) else {"path": os.path.abspath(path)}
    if isinstance(value, tuple):
        return {str(k): identity(part) for k, part in enumerate(value)}
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = np.empty(0, object)
    if array.dtype.hasobject:  # a SciPy matrix, a PyG object: the type and size have to do
        return {"type": type(value).__name__, "shape": list(getattr(value, "shape", []))}
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "sample": sample_crc32(np.atleast_1d(array)),
    }


def described(source: FeatureSource) -> dict[str, Any]:
    """What the manifest keeps of a source: nothing that depends on the machine."""
    return {
        "name": os.path.basename(source.name),
        "dtype": str(source.dtype),
        "shape": [source.rows, *source.row_shape],
        **({} if source.chosen is None else source.chosen.described()),
    }
