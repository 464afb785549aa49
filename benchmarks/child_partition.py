"""One partitioner on one graph, in a process that does nothing else; given and prints a JSON object. See
``order_quality.py``."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT  # noqa: F401  (makes featstore importable)
from numpy.typing import NDArray
from system import status_bytes

from featstore.base.system import available_cores
from featstore.order import (
    edge_cut,
    ldg_memory_bytes,
    ldg_partition,
    metis_memory_bytes,
    metis_partition,
    multilevel_memory_bytes,
    multilevel_partition,
)

COMMUNITY_NODES = 100_000
COMMUNITY_SIZE = 200
COMMUNITY_DEGREE = 14
COMMUNITY_INSIDE = 0.7


@dataclass(frozen=True)
class Graph:
    """The CSC of incoming edges."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]


def community_graph(seed: int) -> Graph:
    """A symmetric graph of equal communities under shuffled node ids; most edges stay inside one."""
    rng = np.random.default_rng(seed)
    nodes, edges = COMMUNITY_NODES, COMMUNITY_NODES * COMMUNITY_DEGREE // 2
    sources = rng.integers(0, nodes, edges)
    near = sources // COMMUNITY_SIZE * COMMUNITY_SIZE + rng.integers(0, COMMUNITY_SIZE, edges)
    targets = np.where(rng.random(edges) < COMMUNITY_INSIDE, near, rng.integers(0, nodes, edges))
    shuffled = rng.permutation(nodes)
    sources, targets = shuffled[sources], shuffled[targets]
    kept = sources != targets
    sources, targets = sources[kept], targets[kept]
    keys = np.unique(np.concatenate([sources * nodes + targets, targets * nodes + sources]))
    indptr = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(keys // nodes, minlength=nodes), out=indptr[1:])
    return Graph(indptr, (keys % nodes).astype(np.int32))


def load_graph(path: str) -> Graph:
    """The graph in an ``.npz`` file, or the generated one for an empty path."""
    if not path:
        return community_graph(seed=0)
    with np.load(path, allow_pickle=False) as arrays:
        return Graph(arrays["indptr"], arrays["indices"])


def multilevel_budget(graph: Graph, parts: int) -> int:
    """A quarter of what METIS may need, or the least that works where that is more."""
    nodes, edges = graph.indptr.size - 1, graph.indices.size
    return max(metis_memory_bytes(nodes, edges, symmetric=True) // 4, multilevel_memory_bytes(nodes, parts))


def partition(method: str, graph: Graph, parts: int, seed: int, passes: int) -> NDArray[np.int32]:
    """Run one partitioner; "random" deals the nodes out."""
    if method == "metis":
        return metis_partition(graph, parts, seed)
    name, threads = method.split(",")[0], 1 if "one core" in method else available_cores()
    if name == "multilevel":
        memory_bytes = multilevel_budget(graph, parts)
        return multilevel_partition(graph, parts, seed=seed, memory_bytes=memory_bytes, threads=threads)
    if name == "ldg":
        return ldg_partition(graph, parts, seed=seed, passes=passes, threads=threads)
    return (np.random.default_rng(seed).permutation(graph.indptr.size - 1) % parts).astype(np.int32)


def measure(method: str, path: str, parts: int, seed: int, passes: int) -> dict[str, Any]:
    """One measurement in this process, which should do nothing else."""
    graph = load_graph(path)
    nodes, edges = graph.indptr.size - 1, graph.indices.size
    tiny = Graph(np.array([0, 1, 2, 3, 4], np.int64), np.array([1, 0, 3, 2], graph.indices.dtype))
    partition(method, tiny, 2, 0, 1)
    if method.startswith("multilevel"):
        # The tiny graph has no clusters; one with more pairs of them than a table holds runs all the code.
        nodes, degree = 20_000, 16
        ends = np.random.default_rng(0).integers(0, nodes, nodes * degree).astype(graph.indices.dtype)
        partition(method, Graph(np.arange(0, nodes * degree + 1, degree), ends), 64, 0, 1)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    base_bytes = status_bytes("VmRSS")
    begin = time.perf_counter()
    part = partition(method, graph, parts, seed, passes)
    seconds = time.perf_counter() - begin
    peak_bytes = status_bytes("VmHWM") - base_bytes
    promised = {
        "metis": metis_memory_bytes(nodes, edges, symmetric=True),
        "multilevel": multilevel_budget(graph, parts),
        "ldg": ldg_memory_bytes(nodes, parts, threads=1 if "one core" in method else available_cores()),
    }
    return {
        "method": method,
        "parts": parts,
        "seed": seed,
        "nodes": nodes,
        "edges": edges,
        "seconds": seconds,
        "edge_cut": edge_cut(graph, part),
        "peak_bytes": peak_bytes,
        "base_bytes": base_bytes,
        "promised_bytes": promised.get(method.split(",")[0]),
        "max_over_mean": float(np.bincount(part).max() * parts / nodes),
    }


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
