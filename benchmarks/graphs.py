"""A generated graph that is larger than the memory it is trained in: communities, hubs near and far, node ids
that say nothing.

Every node draws partners: most of them in its own community, the first of which are drawn more often than the
last; some in communities nearby; some among all nodes, by a power law, which makes hubs. Each pair is stored
both ways. Node ids are shuffled, so that whatever locality a reader finds it has to have found by
partitioning. The label of a node is that of its community; its features are noise with a little of its
label's mean, so that neighbours help.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT  # noqa: F401  (makes featstore importable)
from numba import njit
from numpy.typing import NDArray

from featstore.base.hashing import GOLDEN, mix64

CLASSES = 16
_COMMUNITY_ROWS = 1000
_BLOCK_ROWS = 100_000


@dataclass(frozen=True)
class GraphFiles:
    """Where a generated graph lies: ``.npy`` files of CSC, features, labels (uint8) and training nodes."""

    folder: Path
    nodes: int
    columns: int

    @property
    def row_bytes(self) -> int:
        return 4 * self.columns

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    def load(self, name: str, mapped: bool = False) -> NDArray[Any]:
        return np.load(self.path(name), mmap_mode="r" if mapped else None)


@njit(cache=True)
def _draw(nodes: int, pairs: int, seed: int, shuffled: Any, source: Any, target: Any) -> None:
    communities = max(1, nodes // _COMMUNITY_ROWS)
    size = nodes // communities
    for i in range(pairs):
        word = mix64(np.uint64(seed) * GOLDEN + np.uint64(3 * i))
        other = mix64(word + np.uint64(1))
        u = np.float64(other >> np.uint64(11)) / 9007199254740992.0
        kind = np.float64(word >> np.uint64(11)) / 9007199254740992.0
        v = i % nodes
        community = min(v // size, communities - 1)
        if kind < 0.7:  # own community, its first nodes more often
            w = community * size + np.int64(u * u * size)
        elif kind < 0.8:  # a community nearby
            step = np.int64(mix64(other + np.uint64(2)) % np.uint64(8)) + 1
            w = ((community + step) % communities) * size + np.int64(u * size)
        else:  # a hub: the share of rank r falls as a power law
            w = np.int64(nodes * u**4) * 7919 % nodes
        source[i], target[i] = shuffled[min(w, nodes - 1)], shuffled[v]


@njit(cache=True)
def _count(ends: Any, counts: Any) -> None:
    for i in range(ends.size):
        counts[ends[i] + 1] += 1


@njit(cache=True)
def _place(source: Any, target: Any, cursors: Any, indices: Any) -> None:
    for i in range(source.size):
        indices[cursors[target[i]]] = source[i]
        cursors[target[i]] += 1


@njit(cache=True)
def _sort(indptr: Any, indices: Any) -> None:
    for v in range(indptr.size - 1):
        indices[indptr[v] : indptr[v + 1]].sort()


def generate(
    folder: Path, nodes: int, edges: int, columns: int, train_share: float = 0.1, seed: int = 0
) -> GraphFiles:
    """Make the graph, or find it made: ``edges`` stored edges, ``columns`` float32 features a node."""
    files = GraphFiles(folder, nodes, columns)
    if files.path("train").exists():
        return files
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(nodes).astype(np.int32)
    source, target = np.empty(edges // 2, np.int32), np.empty(edges // 2, np.int32)
    _draw(nodes, edges // 2, seed, shuffled, source, target)
    indptr = np.zeros(nodes + 1, np.int64)
    _count(source, indptr)
    _count(target, indptr)
    np.cumsum(indptr, out=indptr)
    indices, cursors = np.empty(indptr[-1], np.int32), indptr[:-1].copy()
    _place(source, target, cursors, indices)
    _place(target, source, cursors, indices)
    _sort(indptr, indices)
    labels = np.empty(nodes, np.uint8)
    labels[shuffled] = np.arange(nodes) // _COMMUNITY_ROWS * 2654435761 % 2**32 % CLASSES
    _save(files, indptr, indices, labels, train_share, rng)
    return files


def of_file(folder: Path, path: Path, columns: int, train_share: float = 0.1, seed: int = 0) -> GraphFiles:
    """The same of a graph that there is: an ``.npz`` file with ``indptr``, ``indices`` and ``labels``. Its
    features are noise with a little of their label's mean, and its training nodes drawn, as those of one that
    is generated."""
    found = np.load(path)
    files = GraphFiles(folder, len(found["indptr"]) - 1, columns)
    if not files.path("train").exists():
        folder.mkdir(parents=True, exist_ok=True)
        labels = (found["labels"] % CLASSES).astype(np.uint8)
        rng = np.random.default_rng(seed)
        _save(files, found["indptr"], found["indices"].astype(np.int32), labels, train_share, rng)
    return files


def _save(
    files: GraphFiles, indptr: Any, indices: Any, labels: Any, train_share: float, rng: np.random.Generator
) -> None:
    nodes, columns = files.nodes, files.columns
    for name, array in (("indptr", indptr), ("indices", indices), ("labels", labels)):
        np.save(files.path(name), array)
    means = 0.2 * rng.standard_normal((CLASSES, columns), np.float32)
    features = np.lib.format.open_memmap(files.path("features"), "w+", np.float32, (nodes, columns))
    for low in range(0, nodes, _BLOCK_ROWS):
        block = labels[low : low + _BLOCK_ROWS]
        features[low : low + len(block)] = (
            rng.standard_normal((len(block), columns), np.float32) + means[block]
        )
    features.flush()
    del features
    np.save(files.path("train"), np.sort(rng.choice(nodes, int(nodes * train_share), replace=False)))
