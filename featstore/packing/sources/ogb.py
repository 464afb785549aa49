"""OGB's data sets of graphs with types: the folder of one, or its ``raw``, as OGB unpacks it.

- ``num-node-dict.csv.gz``: how many nodes of each type; ``triplet-list.csv.gz``: the edge types
- ``node-feat/TYPE/node-feat.csv.gz``: a table; types without it are numbers of nodes
- ``relations/A___RELATION___B/edge.csv.gz``: a graph; ``num-edge-list.csv.gz``: how many rows arrays of its
edges have - ``node-label/TYPE/node-label.csv.gz``, and other files of nodes or edges (``node_year``,
  ``edge_reltype``):
  arrays ``[rows, columns]``, ``paper.node-label``, ``A__RELATION__B.edge_reltype``
- ``split/SCHEME/TYPE/train.csv.gz``, ``valid``, ``test``: arrays of node ids, ``paper.SCHEME.train``

Text is parsed as int64 where all of a file is whole numbers, else as float64. A file of ``raw`` or ``split``
that is none of these is an error; what stands beside them (``mapping``, ``processed``) is not stored, which
is warned of.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.system import asking, is_directory, is_regular
from featstore.errors import SourceError
from featstore.packing.sources.lines import line_chunks
from featstore.packing.sources.text import CsvRows, ogb_folder
from featstore.packing.sources.whole import WholeData

__all__ = ["is_typed_ogb", "typed_ogb_inputs"]

_TRIPLETS, _NODES = "triplet-list.csv.gz", "num-node-dict.csv.gz"
_FLAGS = ("nodetype-has-feat.csv.gz", "nodetype-has-label.csv.gz", "nodetype-has-split.csv.gz")
_SPLITS = ("train", "valid", "test")
_END, _LABEL = ".csv.gz", ".node-label"


def is_typed_ogb(spec: Any) -> bool:
    """Whether something is the path of an OGB data set of a graph with types."""
    return isinstance(spec, str | os.PathLike) and ogb_folder(Path(spec), _TRIPLETS) is not None


def typed_ogb_inputs(spec: str | os.PathLike[str], graph_given: bool) -> WholeData:
    """What is taken of a data set; without its edges where graphs were given. Raises SourceError,
    DeviceError."""
    raw = ogb_folder(Path(spec), _TRIPLETS)
    assert raw is not None
    return _DataSet(raw, Path(spec)).whole(graph_given)


class _DataSet:
    """A data set as it is gone through: number of nodes by type, edge types, arrays."""

    def __init__(self, raw: Path, root: Path) -> None:
        self.raw, self.root = raw, root
        if not is_regular(raw / _NODES):
            raise SourceError(f"{raw}: has {_TRIPLETS} and no {_NODES}; download the data set again")
        names, *counts = _cells(raw / _NODES)
        if len(counts) != 1 or len(counts[0]) != len(names) or not all(n.isdecimal() for n in counts[0]):
            raise SourceError(
                f"{raw / _NODES}: should have a line of types and one of their numbers of nodes, and has "
                f"{len(counts)} after the first; a pack takes one graph"
            )
        self.nodes = dict(zip(names, map(int, counts[0]), strict=True))
        self.triplets = [tuple(cells) for cells in _cells(raw / _TRIPLETS)]
        wrong = [t for t in self.triplets if len(t) != 3 or not {t[0], t[-1]} <= self.nodes.keys()]
        if wrong or len(set(self.triplets)) < len(self.triplets) or len(self.nodes) < len(names):
            raise SourceError(
                f"{raw}: {_TRIPLETS} should have lines source,relation,target with types of {_NODES}, each "
                "once" + f", not {wrong[0]}" * bool(wrong)
            )
        self.arrays: dict[str, NDArray[Any]] = {}
        self.tables: dict[str, Any] = dict(self.nodes)
        self.edge_rows: dict[str, str] = {}

    def whole(self, graph_given: bool) -> WholeData:
        files = list(_files(self.raw, Path()))
        edges = {t: Path("relations", "___".join(t), "edge.csv.gz") for t in self.triplets}
        for path in edges.values():
            if path not in files:
                raise SourceError(f"{self.raw / path} is missing; download the data set again")
        counts: dict[str, int] = {}
        for path in files:
            if len(path.parts) == 1 and path.name in (_TRIPLETS, _NODES, *_FLAGS[:2]):
                continue
            if path not in edges.values():
                counts |= self._take(path)
        self._check_flags(_FLAGS[0], {name for name, table in self.tables.items() if isinstance(table, Path)})
        self._check_flags(_FLAGS[1], {n.removesuffix(_LABEL) for n in self.arrays if n.endswith(_LABEL)})
        warnings = self._beside()
        names = {"__".join(t): t for t in self.triplets}
        graphs: dict[Any, Any] = {t: self.raw / path.parent for t, path in edges.items()}
        return WholeData(
            self.tables, {} if graph_given else graphs, self.arrays, warnings, self.edge_rows,
            [] if graph_given else list(names), counts,
        )  # fmt: skip

    def _take(self, path: Path) -> dict[str, int]:
        """A file of nodes or edges: the number of rows of what is a table."""
        kind = path.parts[1] if len(path.parts) == 3 else ""
        stem = path.name.removesuffix(_END)
        if path.parts[0] in ("node-feat", "node-label") and kind in self.nodes:
            if path.name == "node-feat.csv.gz" and path.parts[0] == "node-feat":
                self.tables[kind] = self.raw / path.parent
                return {kind: self.nodes[kind]}
            self._keep(f"{kind}.{stem}", self.raw / path, self.nodes[kind])
            return {}
        if path.parts[0] == "relations" and tuple(kind.split("___")) in self.triplets and stem != "edge-feat":
            name = kind.replace("___", "__")
            if stem == "num-edge-list":
                return {}
            listed = self.raw / path.parent / "num-edge-list.csv.gz"
            edges = int(_numbers(listed).sum()) if is_regular(listed) else None
            self._keep(f"{name}.{stem}", self.raw / path, edges)
            self.edge_rows[f"{name}.{stem}"] = name
            return {}
        raise SourceError(
            f"{self.raw / path}: is no file of an OGB data set with types that is known here; leave it "
            f"out, and give it as a table or an array: features={...}, arrays={...}"
        )

    def _keep(self, name: str, path: Path, rows: int | None) -> NDArray[Any]:
        found = _numbers(path)
        if rows is not None and len(found) != rows:
            raise SourceError(
                f"{path}: has {len(found):,} rows, and the data set says that there are {rows:,}"
            )
        if name in self.arrays:
            raise SourceError(f"{path}: there are two files that would be the array {name!r}")
        self.arrays[name] = found
        return found

    def _check_flags(self, name: str, there: set[str], folder: Path | None = None) -> None:
        path = (folder or self.raw) / name
        if is_regular(path):
            lines = _cells(path)
            said = {t for t, flag in zip(lines[0], lines[-1], strict=False) if flag == "True"}
            if said != there:
                raise SourceError(
                    f"{path}: says {', '.join(sorted(said)) or 'none'}, and there are files of "
                    f"{', '.join(sorted(there)) or 'none'}; download the data set again"
                )

    def _beside(self) -> list[str]:
        """The splits; and a warning of what else stands beside ``raw``."""
        if self.raw == self.root:
            return []
        with asking(self.root, "look at"):
            others = sorted(n for n in os.listdir(self.root) if n not in ("raw", "split") and n[0] != ".")
        split = self.root / "split"
        for scheme in sorted(os.listdir(split)) if is_directory(split) else []:
            split_types = set()
            for path in _files(split / scheme, Path()):
                kind, name = path.parts[0], path.name.removesuffix(_END)
                if path == Path(_FLAGS[2]):
                    continue
                if len(path.parts) != 2 or kind not in self.nodes or name not in _SPLITS:
                    raise SourceError(f"{split / scheme / path}: is no split of this data set; leave it out")
                split_types.add(kind)
                ids = self._keep(f"{kind}.{scheme}.{name}", split / scheme / path, None).reshape(-1)
                if ids.dtype.kind != "i" or (len(ids) and not 0 <= ids.min() <= ids.max() < self.nodes[kind]):
                    raise SourceError(
                        f"{split / scheme / path}: should be ids of {kind!r}, 0 to {self.nodes[kind]:,}"
                    )
                self.arrays[f"{kind}.{scheme}.{name}"] = ids
            self._check_flags(_FLAGS[2], split_types, split / scheme)
        return [f"not stored of {self.root}: {', '.join(others)}"] if others else []


def _files(folder: Path, at: Path) -> Iterator[Path]:
    """Every file below a folder, by name, but for hidden ones."""
    with asking(folder / at, "look at"):
        names = sorted(os.listdir(folder / at))
    for name in names:
        if is_directory(folder / at / name):
            yield from _files(folder, at / name)
        elif name[0] != ".":
            yield at / name


def _cells(path: Path) -> list[list[str]]:
    """The cells of a small file, line by line."""
    text = b"".join(chunk for chunk, _ in line_chunks(path)).decode("utf-8-sig", "replace")
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()] or [[]]


def _numbers(path: Path) -> NDArray[Any]:
    """A file of numbers, [rows, columns]: int64, or float64 where not all are whole."""
    for dtype in (np.int64, np.float64):
        try:
            rows = CsvRows(path, dtype=dtype, columns="*", header=False)
            found = np.concatenate([block.copy() for block in rows.blocks()])
        except SourceError:
            if dtype is np.float64:
                raise
            continue
        rounded = np.isfinite(found) & (found % 1 == 0) & (np.abs(found) >= 2.0**53)
        if dtype is np.float64 and rounded.any():
            raise SourceError(
                f"{path}: row {int(np.flatnonzero(rounded.any(axis=1))[0]):,} has a whole number that "
                "float64 rounds, and not all of the file are whole numbers of int64: write them as such"
            )
        return found
    raise AssertionError
