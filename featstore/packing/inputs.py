"""What a user gives a pack: tables, graphs, arrays and options, given once or by table, in any of the forms there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.dtypes import dtype_name
from featstore.errors import SourceError
from featstore.manifest import ROW_BYTES_MAX, check_name
from featstore.packing.graphs import Graph
from featstore.packing.sources import RowSource, open_rows
from featstore.packing.sources_base import file_fingerprint, sample_crc32

#: What a table is called when no name is given.
DEFAULT_TABLE = "features"


def parse_inputs(features: Any) -> tuple[dict[str, RowSource], dict[str, Any], dict[str, NDArray[Any]]]:
    """Tables, graphs and arrays out of what the user gave as features."""
    from featstore.packing.sources_pyg import is_pyg, pyg_arrays, pyg_graphs, pyg_tables

    graphs: dict[str, Any] = {}
    arrays: dict[str, NDArray[Any]] = {}
    if is_pyg(features):
        graphs, arrays, features = dict(pyg_graphs(features)), pyg_arrays(features), pyg_tables(features)
    elif not isinstance(features, Mapping):
        features = {DEFAULT_TABLE: features}
    if not features:
        raise SourceError("there is nothing to pack: no table of features was given")
    tables = {}
    for name, spec in features.items():
        check_name(name, "table")
        tables[name] = spec if isinstance(spec, RowSource) else open_rows(spec)
        if not 1 <= tables[name].row_bytes <= ROW_BYTES_MAX:
            raise SourceError(
                f"table {name!r} has rows of {tables[name].row_bytes:,} bytes; the format allows up to {ROW_BYTES_MAX:,}"
            )
    return tables, graphs, arrays


def by_table(value: Any, tables: Mapping[str, Any], what: str) -> dict[str, Any]:
    """An option that may be given once for all tables, or by table name."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        if what in ("graph", "permutation") and len(tables) > 1:
            raise SourceError(
                f"there are several tables; say whose {what} it is: {what}={{{next(iter(tables))!r}: ...}}"
            )
        return dict.fromkeys(tables, value)
    for name in value:
        if name not in tables:
            raise SourceError(
                f"{what} is given for a table {name!r} that is not packed; there are {', '.join(map(repr, tables))}"
            )
    return dict(value)


def small_array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, str | os.PathLike):
        try:
            value = np.load(value, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise SourceError(f"cannot read array {name!r} from {os.fspath(value)}: {error}") from None
    array = np.asarray(value)
    dtype_name(array.dtype)
    return array


def node_mask(nodes: Any, rows: int) -> NDArray[np.bool_]:
    """Node ids, or a mask already, as bool [rows]. Raises SourceError for what is neither."""
    given = np.asarray(nodes)
    if given.dtype == bool and given.shape == (rows,):
        return given
    if given.ndim != 1 or given.dtype.kind not in "iu" or (len(given) and (given.min() < 0 or given.max() >= rows)):
        raise SourceError(
            f"nodes must be a mask [{rows}] or node ids from 0 to {rows - 1}, not {given.dtype} of shape {given.shape}"
        )
    mask = np.zeros(rows, bool)
    mask[given] = True
    return mask


def identity(value: Any) -> dict[str, Any]:
    """What tells a graph, permutation or array from another one of the same name, when a pack is resumed."""
    if isinstance(value, Graph):
        return dict(value.source)
    if isinstance(value, str | os.PathLike):
        path = Path(value)
        return file_fingerprint("file", path) if path.is_file() else {"path": os.path.abspath(path)}
    if isinstance(value, tuple):
        return {str(k): identity(part) for k, part in enumerate(value)}
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = np.empty(0, object)
    if array.dtype.hasobject:  # a SciPy matrix, a PyG object: the type and size have to do
        return {"type": type(value).__name__, "shape": list(getattr(value, "shape", []))}
    return {"dtype": str(array.dtype), "shape": list(array.shape), "sample": sample_crc32(np.atleast_1d(array))}


def described(source: RowSource) -> dict[str, Any]:
    """What the manifest keeps of a source: nothing that depends on the machine."""
    return {
        "name": os.path.basename(source.name),
        "dtype": str(source.dtype),
        "shape": [source.rows, *source.row_shape],
    }
