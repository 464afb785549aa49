"""How good, how fast and how frugal are the partitioners: METIS against the multilevel partitioner and
annealed LDG on one graph.

    python benchmarks/order_quality.py GRAPH.npz --parts 64 --parts 1024
    python benchmarks/order_quality.py GRAPH.npz --generated 4194304 --parts 64 --parts 1024

An ``.npz`` file holds ``indptr`` and ``indices``, the CSC of incoming edges; without it a graph of
communities is generated. ``--generated`` adds a power-law graph of so many nodes and fifteen times as many
stored edges. Each measurement runs in a process of its own, the methods in turns, several times with
different seeds.
Its peak memory is the highest resident set (VmHWM, reset just before) above that of the same process once
numpy, numba or pymetis, the machine code (warmed up on a tiny graph) and the graph are loaded. glibc is told
to map every large block by itself, so that memory freed before the measurement is not reused in it unseen.

Needs Linux (/proc). The graph is in memory, so there is no disk and no page cache in the times.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import click
import graphs as graphs_made
import numpy as np
from harness import HERE, Claim, Report, Settings, note, shared_options
from system import run_child

from featstore.order.ldg import HEAT, PASSES, SLACK
from featstore.units import format_bytes

ALONE = ", one core"
METHODS = ("metis", "multilevel", f"multilevel{ALONE}", "ldg", f"ldg{ALONE}", "random")
LARGE_EDGES = 20_000_000  # graphs with more of them are partitioned with one seed

#: glibc gives every large block pages of its own, and gives them back.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measure_apart(method: str, path: str, parts: int, seed: int, passes: int) -> dict[str, Any]:
    """One measurement in a process of its own."""
    given = {"method": method, "path": path, "parts": parts, "seed": seed, "passes": passes}
    return run_child(HERE / "child_partition.py", given, environment=MALLOC)


def middle(runs: list[dict[str, Any]], parts: int, method: str) -> dict[str, float]:
    """Medians over the seeds."""
    group = [run for run in runs if (run["parts"], run["method"]) == (parts, method)]
    return {key: float(median(run[key] for run in group)) for key in ("edge_cut", "peak_bytes", "seconds")}


def fill(report: Report, runs: list[dict[str, Any]], title: str) -> None:
    """Claims and a table: one line for each method and number of parts, medians over the seeds and ratios to
    METIS."""
    rows = []
    for parts in dict.fromkeys(run["parts"] for run in runs):
        metis = middle(runs, parts, "metis")
        for method, name in (("multilevel", "multilevel"), ("ldg", "LDG")):
            found = middle(runs, parts, method)
            cuts = found["edge_cut"] / max(metis["edge_cut"], 1e-9)
            report.claims += [
                Claim(
                    f"{title}, {parts} parts: edge cut of {name} over METIS's",
                    cuts,
                    1.03 if method == "multilevel" else None,
                    "<=",
                ),
                Claim(
                    f"{title}, {parts} parts: peak memory of {name} over METIS's",
                    found["peak_bytes"] / metis["peak_bytes"],
                ),
            ]
            alone = middle(runs, parts, f"{method}{ALONE}")["seconds"]
            report.claims += [
                Claim(
                    f"{title}, {parts} parts: METIS's time over that of {name} on one core",
                    metis["seconds"] / alone, 2.5 if method == "multilevel" else None,
                ),
                Claim(
                    f"{title}, {parts} parts: {name} on one core over all cores",
                    alone / found["seconds"], 1.6 if method == "multilevel" else None,
                ),
            ]  # fmt: skip
        for method in METHODS:
            group = [run for run in runs if (run["parts"], run["method"]) == (parts, method)]
            one, cuts, promised = (
                middle(runs, parts, method),
                [run["edge_cut"] for run in group],
                group[0]["promised_bytes"],
            )
            rows.append([
                parts, method, f"{one['edge_cut']:.4f}", f"{min(cuts):.4f} to {max(cuts):.4f}",
                one["edge_cut"] / max(metis["edge_cut"], 1e-9), format_bytes(one["peak_bytes"]),
                one["peak_bytes"] / metis["peak_bytes"], format_bytes(promised) if promised else "",
                max(run["max_over_mean"] for run in group), one["seconds"],
            ])  # fmt: skip
    report.table(
        f"{title}: {runs[0]['nodes']:,} nodes, {runs[0]['edges']:,} stored edges; graph in memory",
        [
            "parts",
            "method",
            "edge cut",
            "range",
            "of METIS's",
            "peak memory",
            "of METIS's",
            "promised",
            "largest part over the mean",
            "s",
        ],
        rows,
    )


def power_law(folder: Path, nodes: int) -> Path:
    """A generated graph, as an ``.npz`` file."""
    (folder / "power-law").mkdir(exist_ok=True)
    files = graphs_made.generate(folder / "power-law", nodes, 15 * nodes, 1)
    path = folder / f"power_law_{nodes}.npz"
    np.savez(path, indptr=np.load(files.path("indptr")), indices=np.load(files.path("indices")))
    return path


def edges_of(path: Path) -> int:
    """How many stored edges a graph has."""
    with np.load(path) as arrays:
        return int(arrays["indptr"][-1])


@click.command()
@click.argument("graphs", nargs=-1, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--parts", multiple=True, default=[64, 512], show_default=True, type=click.IntRange(1))
@click.option("--generated", type=click.IntRange(1000), help="Nodes of a generated power-law graph.")
@click.option("--passes", default=PASSES, show_default=True, type=click.IntRange(1), help="Passes of LDG.")
@shared_options(size="1", quick_size="1", rounds=7)
def main(
    settings: Settings, graphs: tuple[Path, ...], parts: tuple[int, ...], generated: int | None, passes: int
) -> None:
    """Edge cut, peak memory and time of METIS, multilevel and LDG on GRAPHS, .npz files with indptr and
    indices; or on a generated one.

    A round is a seed; --size means nothing here.
    """
    report = Report(settings.out.stem if settings.out else "order_quality", "Partitioners", {
        "parts": list(parts), "passes": passes, "slack": SLACK, "heat": HEAT, "seeds": settings.rounds,
        "graphs": [graph.name for graph in graphs] or ["generated communities"],
    }, settings.workspace)  # fmt: skip
    if generated is not None:
        graphs = (*graphs, power_law(settings.workspace, generated))
    for graph in graphs or (None,):
        runs = []
        seeds = settings.rounds if graph is None or edges_of(graph) <= LARGE_EDGES else 1
        for count in parts:
            for number in range(seeds):
                for name in METHODS:  # in turns, so that all have the same machine
                    runs.append(
                        measure_apart(name, "" if graph is None else str(graph), count, number, passes)
                    )
                    note(f"{name}, {count} parts, seed {number}: {runs[-1]['edge_cut']:.4f}")
        fill(report, runs, "generated communities" if graph is None else graph.stem)
    report.notes = [
        "Medians over the seeds, each run in a process of its own. Multilevel is given a quarter of "
        "the memory that METIS may need, or the least it takes. Peak memory is the highest resident "
        "set above that of the process with libraries, machine code and graph loaded. METIS has one core, as "
        f"always. Graphs of more than {LARGE_EDGES:,} edges: one seed.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
