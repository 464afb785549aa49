"""Demo graph: where do the demo's nodes, edges, labels and feature rows come from?

Either from a file (:func:`load`) or made up (:func:`generate`). The made-up graph is a degree-corrected
planted partition (Karrer, Newman 2011): each node belongs to one class; its weight is drawn from a Pareto
law, so a few nodes have very many edges and a cache of those pays; an edge joins two nodes of one class with
probability ``homophily``, most of them of one community within it (``locality`` of all edges, in communities
of ``community_nodes``), else any two, all picked by weight. So partitions of it hold many
neighbours together, as those of most graphs that are met do. A feature row is its class's centre times
``signal``, under noise of variance 1: one row says little about the class, the mean of a neighbourhood says
much. So a model that were given wrong neighbours' rows would show it in its accuracy. Node ids are shuffled:
neither class nor degree can be read from an id.

Made-up rows go to a ``.npy`` file in blocks, each from its own random stream, and never stand in memory
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError

__all__ = ["DemoGraph", "GraphRecipe", "generate", "load", "read_topology", "write_topology"]

_BLOCK_BYTES = 8 << 20
_TOPOLOGY = ("indptr", "indices", "labels", "train_idx", "test_idx")


@dataclass(frozen=True)
class GraphRecipe:
    """Sizes of a generated graph. A feature row has ``feature_count`` float32 values."""

    node_count: int = 200_000
    edge_count: int = 2_000_000
    feature_count: int = 256
    class_count: int = 16
    signal: float = 0.1
    homophily: float = 0.8
    locality: float = 0.6
    community_nodes: int = 150
    pareto_shape: float = 1.5
    train_share: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class DemoGraph:
    """A graph in memory, its rows on disk.

    ``indptr`` int64[n + 1] and ``indices`` int32[e]: CSC of the incoming edges. ``labels`` int64[n], -1 =
    none. ``train_idx``, ``test_idx``: int64 node ids. ``features``: path of a .npy file [n, feature_count]
    float32.
    """

    name: str
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    labels: NDArray[np.int64]
    train_idx: NDArray[np.int64]
    test_idx: NDArray[np.int64]
    features: Path
    feature_count: int

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return len(self.indptr) - 1

    @property
    def class_count(self) -> int:
        """Number of classes."""
        return int(self.labels.max()) + 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a float32 feature row."""
        return 4 * self.feature_count


def generate(directory: Path, recipe: GraphRecipe) -> DemoGraph:
    """Make up a graph by ``recipe`` and write its rows to ``directory/features.npy``. The same recipe gives
    the same bytes."""
    rng = np.random.default_rng(recipe.seed)
    labels = rng.integers(0, recipe.class_count, recipe.node_count)
    indptr, indices = _edges(recipe, labels, rng)
    order = rng.permutation(recipe.node_count)
    train_end = round(recipe.node_count * recipe.train_share)
    path = directory / "features.npy"
    _write_rows(path, recipe, labels)
    return DemoGraph(
        name=f"generated ({recipe.node_count:,} nodes)",
        indptr=indptr,
        indices=indices,
        labels=labels,
        train_idx=order[:train_end],
        test_idx=order[train_end:],
        features=path,
        feature_count=recipe.feature_count,
    )


def _edges(
    recipe: GraphRecipe, labels: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Symmetric CSC without loops and duplicates; of ``edge_count`` drawn directed edges a few per cent are
    duplicates."""
    nodes = recipe.node_count
    # A cap on the weight keeps the largest hub below about a fiftieth of all edges of a class.
    weights = np.minimum(rng.pareto(recipe.pareto_shape, nodes) + 1, nodes**0.5)
    by_class = np.argsort(labels, kind="stable")
    ends = np.cumsum(weights[by_class])
    class_ends = np.concatenate(
        [[0.0], ends[np.cumsum(np.bincount(labels, minlength=recipe.class_count)) - 1]]
    )
    pairs = recipe.edge_count // 2
    place = np.searchsorted(ends, rng.random(pairs) * ends[-1], side="right").clip(max=nodes - 1)
    source = by_class[place]
    low, high = class_ends[labels[source]], class_ends[labels[source] + 1]
    kind = rng.random(pairs)
    near, anywhere = kind < recipe.locality, kind >= recipe.homophily
    begin = place[near] // recipe.community_nodes * recipe.community_nodes
    before = np.append(0.0, ends)
    low[near] = np.maximum(low[near], before[begin])
    high[near] = np.minimum(high[near], before[np.minimum(begin + recipe.community_nodes, nodes)])
    low[anywhere], high[anywhere] = 0.0, ends[-1]
    drawn = low + rng.random(pairs) * (high - low)
    target = by_class[np.searchsorted(ends, drawn, side="right").clip(max=nodes - 1)]
    keys = np.unique(np.concatenate([source * nodes + target, target * nodes + source]))
    keys = keys[keys // nodes != keys % nodes]
    indptr = np.searchsorted(keys, np.arange(nodes + 1) * nodes)
    return indptr.astype(np.int64), (keys % nodes).astype(np.int32)


def _write_rows(path: Path, recipe: GraphRecipe, labels: NDArray[np.int64]) -> None:
    """``signal`` times the class's centre plus noise, block by block."""
    shape = (recipe.node_count, recipe.feature_count)
    centres = np.random.default_rng([recipe.seed, 1]).standard_normal(
        (recipe.class_count, shape[1]), dtype=np.float32
    )
    centres *= np.float32(recipe.signal)
    block_rows = max(1, _BLOCK_BYTES // (4 * shape[1]))
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block, begin in enumerate(range(0, shape[0], block_rows)):
            label = labels[begin : begin + block_rows]
            noise = np.random.default_rng([recipe.seed, 2, block])
            rows = noise.standard_normal((len(label), shape[1]), dtype=np.float32)
            rows += centres[label]
            rows.tofile(file)


def load(path: Path, directory: Path) -> DemoGraph:
    """The graph of an .npz file; its rows go to ``directory/features.npy``, as float32. Neighbours are put in
    ascending order, as they are in a store: samplers pick them by place.

    Keys: ``indptr`` int64, ``indices`` int32 (CSC of incoming edges), ``features`` [n, d] or a SciPy CSR
    matrix as ``feat_data``, ``feat_indices``, ``feat_indptr``, ``feat_shape``; ``labels`` (-1 = none),
    ``train_idx``, ``test_idx``. Raises SourceError if the file cannot be read or a key is missing.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in _TOPOLOGY if key not in file]
            missing += [] if "features" in file or "feat_shape" in file else ["features (or feat_data ...)"]
            if missing:
                raise SourceError(
                    f"{path} has no {', '.join(missing)}; a graph needs edges, rows, labels and a split"
                )
            arrays, rows = {key: file[key] for key in _TOPOLOGY}, _rows(file)
        targets = np.repeat(np.arange(len(arrays["indptr"]) - 1), np.diff(arrays["indptr"]))
        order = np.lexsort((arrays["indices"], targets))
    except (OSError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"cannot read {path} as a demo graph (.npz): {error}") from error
    nodes, labels = len(arrays["indptr"]) - 1, arrays["labels"].astype(np.int64)
    if len(rows) != nodes or len(labels) != nodes:
        raise SourceError(f"{path}: {nodes:,} nodes, but {len(rows):,} rows and {len(labels):,} labels")
    np.save(directory / "features.npy", rows)
    train, test = (arrays[key].astype(np.int64) for key in ("train_idx", "test_idx"))
    return DemoGraph(
        name=path.stem,
        indptr=arrays["indptr"].astype(np.int64),
        indices=arrays["indices"][order].astype(np.int32),
        labels=labels,
        train_idx=train[labels[train] >= 0],
        test_idx=test[labels[test] >= 0],
        features=directory / "features.npy",
        feature_count=rows.shape[1],
    )


def _rows(file: Any) -> NDArray[np.float32]:
    """All rows of an open .npz file, float32 [n, d]."""
    rows: NDArray[np.float32]
    if "features" in file:
        rows = file["features"].astype(np.float32)
        return rows
    rows = np.zeros(tuple(file["feat_shape"]), dtype=np.float32)
    rows[np.repeat(np.arange(len(rows)), np.diff(file["feat_indptr"])), file["feat_indices"]] = file[
        "feat_data"
    ]
    return rows


def write_topology(graph: DemoGraph, directory: Path) -> None:
    """Everything but the rows."""
    np.savez(directory / "topology.npz", **{key: getattr(graph, key) for key in _TOPOLOGY})


def read_topology(directory: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Of what :func:`write_topology` wrote the arrays of these names; all where none is named."""
    with np.load(directory / "topology.npz", allow_pickle=False) as file:
        return {key: file[key] for key in names or _TOPOLOGY}
