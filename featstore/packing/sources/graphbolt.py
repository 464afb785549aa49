"""GraphBolt's data sets on disk: a folder with ``metadata.yaml``, before GraphBolt has preprocessed it.

It names files: edges (``csv`` of two columns without names, ``numpy`` ``[2, edges]``), features of nodes and
edges, and each task's sets for training, validation and testing. A pack takes all of it:

- nodes: a table for each type, ``features`` where there are no types. Of several features of a type ``feat``
  is the table, as is the only one; types without features are numbers of nodes.
- edges: a graph for each type; a table ``source__relation__target`` (``edge_features``) likewise.
- all else are arrays: further features and those of the sampling graph, ``paper.year``; sets,
  ``train.paper.seeds``, with the name of the task before it where there are several,
  ``classify.train.paper.seeds``. An edge type is joined by ``__`` in names.

What is no array (``dataset_name``, ``num_classes`` ...) is not stored, which is warned of. ``in_memory`` only
says how GraphBolt reads a file. Any other field is an error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import need_package
from featstore.base.files import load_given, read_small
from featstore.base.system import is_regular
from featstore.errors import SourceError
from featstore.packing.sources.arrays import tensor_to_numpy
from featstore.packing.sources.files import npy_rows
from featstore.packing.sources.foreign import TorchFileRows, load_tensor
from featstore.packing.sources.pyg import PygEdges
from featstore.packing.sources.whole import WholeData

__all__ = ["graphbolt_inputs", "is_graphbolt"]

_METADATA = "metadata.yaml"
_YAML_BYTES_MAX = 16 << 20
_SETS = {"train_set": "train", "validation_set": "validation", "test_set": "test"}
_FILE = ("name", "type", "domain", "format", "path", "in_memory")


def is_graphbolt(spec: Any) -> bool:
    """Whether something is the path of a data set of GraphBolt's: the folder, or its ``metadata.yaml``."""
    if not isinstance(spec, str | os.PathLike):
        return False
    path = Path(spec)
    return is_regular(path / _METADATA) or (path.name == _METADATA and is_regular(path))


def graphbolt_inputs(spec: str | os.PathLike[str], graph_given: bool) -> WholeData:
    """What is taken of a data set; without its edges where graphs were given. Raises SourceError,
    MissingPackageError."""
    path = Path(spec)
    return _DataSet(path if path.name == _METADATA else path / _METADATA).whole(graph_given)


class _DataSet:
    """A ``metadata.yaml`` as it is gone through. ``kinds``: names of tables by type of nodes or edges."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        yaml = need_package("yaml", "yaml", f"{path}: reading this")
        text = read_small(path, _YAML_BYTES_MAX)
        try:
            found = yaml.safe_load(text) if len(text) <= _YAML_BYTES_MAX else None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise SourceError(f"{path}: cannot be read as YAML ({error}); mend it") from error
        self.lost: list[str] = []
        self.root = self._mapping(found, "", ("graph", "feature_data", "tasks", "graph_topology"), rest=True)
        if "graph_topology" in self.root:
            raise SourceError(
                f"{path}: has graph_topology, so GraphBolt has preprocessed it; give the folder above, whose "
                f"{_METADATA} names edges"
            )
        self.graph = self._mapping(self.root.get("graph"), "graph", ("nodes", "edges", "feature_data"))
        nodes = self._list(self.graph, "nodes", "graph", ("type", "num"))
        self.edges = self._list(self.graph, "edges", "graph", ("type", "format", "path"))
        self.typed = any("type" in one for one in (*nodes, *self.edges))
        self.nodes: dict[str, int] = {}
        self.nodes = {self._type(one, "nodes"): self._count(one) for one in nodes}
        kinds = [self._type(one, "edges") for one in self.edges]
        if len(self.nodes) < len(nodes) or len(set(kinds)) < len(kinds) or not nodes:
            raise self._wrong(
                "graph: types of nodes and edges stand there once each, and nodes at least once"
            )
        self.kinds = {("node", kind): kind or "features" for kind in self.nodes}
        self.kinds |= {("edge", kind): kind.replace(":", "__") or "edge_features" for kind in kinds}
        self.arrays: dict[str, NDArray[Any]] = {}
        self.edge_rows: dict[str, str] = {}

    def whole(self, graph_given: bool) -> WholeData:
        given = self._list(self.root, "feature_data", "", _FILE)
        tables: dict[str, Any] = {kind: number for kind, number in self.nodes.items() if kind}
        for (domain, kind), name in self.kinds.items():
            mine = [one for one in given if self._whose(one) == (domain, kind)]
            chosen = self._chosen(mine, name)
            if chosen is not None:
                tables[name] = self._rows(chosen, self.nodes[kind] if domain == "node" else None)
            elif not kind and domain == "node":
                raise self._wrong("feature_data has no features of nodes, so there is no table to pack")
            for one in mine:
                if one is not chosen:
                    self._keep(one)
        for one in self._list(self.graph, "feature_data", "graph", _FILE):
            self._keep(one)
        self._tasks()
        relations = {kind: tuple(kind.split(":")) if kind else "features" for kind in map(_type, self.edges)}
        graphs: dict[Any, Any] = {relations[_type(one)]: self._edges(one) for one in self.edges}
        edge_rows = {n: n if k else "" for (d, k), n in self.kinds.items() if d == "edge" and n in tables}
        warnings = [] if not self.lost else [f"not stored of {self.path}: {', '.join(self.lost)}"]
        joined = [kind.replace(":", "__") for kind in relations]
        return WholeData(
            tables, {} if graph_given else graphs, self.arrays, warnings, edge_rows | self.edge_rows,
            [] if graph_given else joined,
        )  # fmt: skip

    # Parts of the file.

    def _wrong(self, what: str) -> SourceError:
        return SourceError(f"{self.path}: {what}; see GraphBolt's OnDiskDataset for its format")

    def _mapping(self, value: Any, where: str, known: tuple[str, ...], rest: bool = False) -> dict[str, Any]:
        """A mapping; of other fields plain values are not stored, and anything else is an error."""
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self._wrong(f"{where or 'the file'} should be a mapping of names")
        for name, one in value.items():
            plain = rest and isinstance(one, str | int | float | None)
            if plain and name not in known:
                self.lost.append(f"{where}{'.' if where else ''}{name} ({one!r})")
            elif name not in known:
                raise self._wrong(f"{where or 'the file'} has a field {name!r}, which is not known")
        return dict(value)

    def _list(
        self, parent: dict[str, Any], name: str, where: str, known: tuple[str, ...], rest: bool = False
    ) -> list[dict[str, Any]]:
        value = parent.get(name) or []
        where = f"{where}.{name}" if where else name
        if not isinstance(value, list):
            raise self._wrong(f"{where} should be a list")
        return [self._mapping(one, f"{where}[{k}]", known, rest) for k, one in enumerate(value)]

    def _type(self, one: dict[str, Any], where: str) -> str:
        kind = _type(one)
        parts = 3 if where == "edges" else 1
        if self.typed != bool(kind) or (kind and len(kind.split(":")) != parts):
            raise self._wrong(
                f"graph.{where}: type {one.get('type')!r}, where {'all or none' if self.typed else 'none'} "
                "of nodes and edges have one (author, author:writes:paper)"
            )
        ends = kind.split(":")[::2] if kind and where == "edges" else []
        if not self.nodes.keys() >= set(ends):
            raise self._wrong(
                f"graph.edges: {kind!r} joins nodes of {' and '.join(ends)}, which are not in nodes"
            )
        return kind

    def _count(self, one: dict[str, Any]) -> int:
        count = one.get("num")
        if type(count) is not int or count < 0:
            raise self._wrong(f"graph.nodes: num should be a number of nodes, not {count!r}")
        return count

    # Features.

    def _whose(self, one: dict[str, Any]) -> tuple[str, str]:
        """The domain and type that a feature is of. Raises SourceError where there are none such."""
        whose = str(one.get("domain")), _type(one)
        if whose not in self.kinds or not isinstance(one.get("name"), str):
            raise self._wrong(
                f"feature_data: {one.get('name')!r} is of domain {whose[0]!r}, type {whose[1]!r}, and the "
                "graph has no such nodes or edges"
            )
        return whose

    def _chosen(self, given: list[dict[str, Any]], table: str) -> dict[str, Any] | None:
        """Which feature is the table's: the only one, or that called ``feat``."""
        names = [one["name"] for one in given]
        if len(set(names)) < len(names):
            raise self._wrong(
                f"feature_data: {Counter(names).most_common(1)[0][0]!r} of {table!r} stands twice"
            )
        if len(given) > 1 and "feat" not in names:
            raise self._wrong(
                f"feature_data: {table!r} has {', '.join(map(repr, names))}, and none is called feat; call "
                "the one feat whose rows are to be read from disk, the others are kept as arrays"
            )
        return next((one for one in given if len(given) == 1 or one["name"] == "feat"), None)

    def _rows(self, one: dict[str, Any], count: int | None) -> Any:
        path, form = self._file(one)
        rows = npy_rows(path) if form == "numpy" else TorchFileRows(path)
        if count is not None and rows.rows != count:
            raise self._wrong(f"{path.name} has {rows.rows:,} rows, and there are {count:,} nodes")
        return rows

    def _keep(self, one: dict[str, Any]) -> None:
        domain, kind = self._whose(one)
        table = self.kinds[domain, kind]
        name = f"{table}.{one['name']}" if kind else one["name"]
        array = self._array(one, name)
        if domain == "node" and len(array) != self.nodes[kind]:
            raise self._wrong(f"{name} has {len(array):,} rows, and there are {self.nodes[kind]:,} nodes")
        if domain == "edge":
            self.edge_rows[name] = table if kind else ""

    def _array(self, one: dict[str, Any], name: str) -> NDArray[Any]:
        path, form = self._file(one)
        if name in self.arrays:
            raise self._wrong(f"there are two arrays {name!r}")
        try:
            found = load_given(path, mapped=True) if form == "numpy" else load_tensor(path, None)[0]
        except (OSError, ValueError) as error:
            raise SourceError(f"cannot read array {name!r} from {path}: {error}") from None
        self.arrays[name] = found if form == "numpy" else tensor_to_numpy(found, str(path))
        if not isinstance(self.arrays[name], np.ndarray) or self.arrays[name].ndim < 1:
            raise self._wrong(f"{path} holds no array with rows")
        return self.arrays[name]

    def _file(self, one: dict[str, Any], forms: tuple[str, ...] = ("numpy", "torch")) -> tuple[Path, str]:
        path, form = one.get("path"), one.get("format")
        if not isinstance(path, str) or form not in forms:
            raise self._wrong(
                f"format {form!r}, path {path!r}: a file has a path, and is of {' or '.join(forms)}"
            )
        return self.folder / path, form

    # Edges and tasks.

    def _edges(self, one: dict[str, Any]) -> Any:
        path, form = self._file(one, ("csv", "numpy"))
        if form == "csv":
            return path
        rows = npy_rows(path)
        if rows.rows != 2 or len(rows.row_shape) != 1:
            raise self._wrong(f"{path.name} is [{rows.rows}, ...], and edges are [2, edges]")
        # two edges would be ambiguous to whoever does not know this
        return load_given(path).view(PygEdges) if rows.row_shape == (2,) else path

    def _tasks(self) -> None:
        tasks = self._list(self.root, "tasks", "", (*_SETS, "name"), rest=True)
        for number, task in enumerate(tasks):
            name = task.get("name")
            if len(tasks) > 1 and not isinstance(name, str):
                raise self._wrong(f"tasks[{number}] has no name, and there are several")
            begin = f"{name}." if len(tasks) > 1 else ""
            if len(tasks) == 1 and name is not None:
                self.lost.append(f"tasks[0].name ({name!r})")
            for field, short in _SETS.items():
                for of_type in self._list(task, field, f"tasks[{number}]", ("type", "data")):
                    kind, where = _type(of_type), f"tasks[{number}].{field}"
                    if self.typed != bool(kind) or {("node", kind), ("edge", kind)}.isdisjoint(self.kinds):
                        raise self._wrong(f"{where}: the graph has no type {kind!r}")
                    kind = kind.replace(":", "__")
                    for one in self._list(of_type, "data", where, ("name", "format", "path", "in_memory")):
                        if not isinstance(one.get("name"), str):
                            raise self._wrong(f"{where} has data without a name")
                        self._array(one, f"{begin}{short}.{kind}{'.' if kind else ''}{one['name']}")


def _type(one: Mapping[str, Any]) -> str:
    kind = one.get("type")
    return "" if kind is None else str(kind)
