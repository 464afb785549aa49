"""How good, how fast and how frugal are the partitioners: METIS against annealed LDG on one graph.

    python benchmarks/order_quality.py GRAPH.npz --parts 64 --parts 512

GRAPH.npz holds ``indptr`` and ``indices``, the CSC of incoming edges; without it a graph of communities is generated.
Each measurement runs in a process of its own, several times with different seeds. Its peak memory is the highest
resident set (VmHWM, reset just before) above that of the same process once numpy, numba or pymetis, the machine code
(warmed up on a tiny graph) and the graph are loaded. glibc is told to map every large block by itself, so that memory
freed before the measurement is not reused in it unseen. Prints a table to stdout, writes JSON.

Needs Linux (/proc). The graph is in memory, so there is no disk and no page cache in the times.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from featstore.order import (  # noqa: E402
    edge_cut,
    ldg_memory_bytes,
    ldg_partition,
    metis_memory_bytes,
    metis_partition,
)
from featstore.order.ldg import HEAT, PASSES, SLACK  # noqa: E402
from featstore.units import format_bytes  # noqa: E402

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


def status_bytes(name: str) -> int:
    """A size of this process from /proc/self/status."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name + ":"))


def partition(method: str, graph: Graph, parts: int, seed: int, passes: int) -> NDArray[np.int32]:
    """Run one partitioner; "random" deals the nodes out."""
    if method == "metis":
        return metis_partition(graph, parts, seed)
    if method == "ldg":
        return ldg_partition(graph, parts, seed=seed, passes=passes)
    return (np.random.default_rng(seed).permutation(graph.indptr.size - 1) % parts).astype(np.int32)


def measure(method: str, path: str, parts: int, seed: int, passes: int) -> dict[str, Any]:
    """One measurement in this process, which should do nothing else."""
    graph = load_graph(path)
    nodes, edges = graph.indptr.size - 1, graph.indices.size
    tiny = Graph(np.array([0, 1, 2, 3, 4], np.int64), np.array([1, 0, 3, 2], graph.indices.dtype))
    partition(method, tiny, 2, 0, 1)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    base_bytes = status_bytes("VmRSS")
    begin = time.perf_counter()
    part = partition(method, graph, parts, seed, passes)
    seconds = time.perf_counter() - begin
    peak_bytes = status_bytes("VmHWM") - base_bytes
    promised = {"metis": metis_memory_bytes(nodes, edges, symmetric=True), "ldg": ldg_memory_bytes(nodes, parts)}
    return {
        "method": method, "parts": parts, "seed": seed, "nodes": nodes, "edges": edges, "seconds": seconds,
        "edge_cut": edge_cut(graph, part), "peak_bytes": peak_bytes, "base_bytes": base_bytes,
        "promised_bytes": promised.get(method), "max_over_mean": float(np.bincount(part).max() * parts / nodes),
    }


def measure_apart(method: str, path: str, parts: int, seed: int, passes: int) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, *([path] if path else []), "--parts", str(parts), "--passes", str(passes),
               "--seed", str(seed), "--measure", method]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def git_commit() -> str:
    """The commit that is checked out, or "unknown"."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    models = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
              if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(), "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("numpy", "numba", "pymetis")},
    }


def print_table(runs: list[dict[str, Any]], title: str) -> None:
    """One line for each method and number of parts: medians over the seeds, and the ratios to METIS."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("parts", "method", "edge cut", "range", "of METIS", "peak memory", "of METIS", "promised",
                   "largest part", "seconds"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for parts in dict.fromkeys(run["parts"] for run in runs):
        groups = {method: [run for run in runs if (run["parts"], run["method"]) == (parts, method)]
                  for method in ("metis", "ldg", "random")}
        middle = {method: {key: median(run[key] for run in group) for key in ("edge_cut", "peak_bytes", "seconds")}
                  for method, group in groups.items()}
        for method, group in groups.items():
            cuts, promised = [run["edge_cut"] for run in group], group[0]["promised_bytes"]
            table.add_row(
                str(parts), method, f"{middle[method]['edge_cut']:.4f}", f"{min(cuts):.4f}-{max(cuts):.4f}",
                f"{middle[method]['edge_cut'] / max(middle['metis']['edge_cut'], 1e-9):.2f}",
                format_bytes(middle[method]["peak_bytes"]),
                f"{middle[method]['peak_bytes'] / middle['metis']['peak_bytes']:.3f}",
                format_bytes(promised) if promised else "",
                f"{max(run['max_over_mean'] for run in group):.3f}", f"{middle[method]['seconds']:.2f}")
    Console(width=120).print(table)


@click.command()
@click.argument("graph", required=False, default="", type=click.Path(dir_okay=False))
@click.option("--parts", multiple=True, default=[64, 512], show_default=True, type=click.IntRange(1))
@click.option("--passes", default=PASSES, show_default=True, type=click.IntRange(1), help="Passes of LDG.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Seeds 0, 1 ... of each method.")
@click.option("--out", default="order_quality.json", show_default=True, type=click.Path(dir_okay=False))
@click.option("--seed", default=0, hidden=True)
@click.option("--measure", "method", hidden=True)
def main(graph: str, parts: tuple[int, ...], passes: int, seeds: int, out: str, seed: int, method: str | None) -> None:
    """Edge cut, peak memory and time of METIS and LDG on GRAPH, an .npz file with indptr and indices."""
    if method is not None:
        click.echo(json.dumps(measure(method, graph, parts[0], seed, passes)))
        return
    runs = []
    for count in parts:
        for name in ("metis", "ldg", "random"):
            for number in range(seeds):
                runs.append(measure_apart(name, graph, count, number, passes))
                if sys.stderr.isatty():
                    click.echo(f"{name} {count} parts, seed {number}: {runs[-1]['edge_cut']:.4f}", err=True)
    name = Path(graph).name if graph else "generated communities"
    size = f"{runs[0]['nodes']:,} nodes, {runs[0]['edges']:,} stored edges"
    print_table(runs, f"{name}: {size}; medians of {seeds} seeds")
    report = {
        "benchmark": "order_quality", "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(), "machine": machine(), "graph": name,
        "cache_state": "graph in memory, machine code warm",
        "parameters": {"parts": list(parts), "passes": passes, "slack": SLACK, "heat": HEAT, "seeds": seeds},
        "runs": runs,
    }
    Path(out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
