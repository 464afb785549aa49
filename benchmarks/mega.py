"""Mega-batches: how fast they load, and an epoch of training in a tenth of the data's memory, beside
np.memmap.

    python benchmarks/mega.py --dir /a/directory/on/the/ssd

*Loading*: a whole epoch of mega-batches that nobody trains on, against fio's sequential bandwidth over the
same files in the same round; every byte read counts, topology and hubs too. *Bytes*: what an epoch reads,
against features + topology + the hubs' lists once a mega-batch. *Training*: an epoch of a two-layer GraphSAGE
in a process of its own, in a memory cgroup of what the bare process takes (Python and its imports, measured)
plus a tenth of features and topology; and the same model, fan-outs and mini-batches over np.memmap in the
same cgroup, for as many mini-batches as a time limit allows, from which its epoch is extrapolated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from child_mega import BATCH, FANOUTS
from graphs import GraphFiles, generate
from harness import (
    HERE,
    Claim,
    Contender,
    Report,
    Sample,
    Settings,
    measure_rounds,
    note,
    paired_ratio,
    shared_options,
)
from peers import fio
from system import drop_caches, free_memory_bytes, memory_group, run_child, touch_memory
from tables import remove

import featstore
from featstore.loaders.mega.sets import PartitionSets
from featstore.units import format_bytes, parse_bytes

COLUMNS = 128
EDGES_A_NODE = 15
SPEED_BAR, BYTES_BAR, EPOCH_BAR = 0.95, 1.03, 10.0
MEMORY_SHARE = 0.1
LOADER_SHARE = 0.5  # of that memory; the rest is for activations, gradients, labels
LOAD, LIMIT = "an epoch of mega-batches, loaded", "fio, sequential, 512 KiB"
LARGE_MEMORY = "512MiB"
LARGE = f"the same, within {LARGE_MEMORY}"
OTHER = "fio, sequential, another file"


def pack(files: GraphFiles, path: Path) -> featstore.Store:
    """The store, made or found made."""
    if not (path / "featstore.json").exists():
        note("packing")
        graph = files.load("indptr", mapped=True), files.load("indices", mapped=True)
        featstore.pack(path, files.path("features"), graph=graph, order="ldg", memory="1GiB").close()
    return featstore.open(path)


def row_files(store: featstore.Store) -> list[Path]:
    table = store.tables["features"]
    return [store.path / table.entry.chunk_path(chunk) for chunk in range(table.layout.chunks)]


def load_epoch(store: featstore.Store, train: Any, options: dict[str, Any]) -> Sample:
    """Load an epoch and check some of what came."""
    with PartitionSets(store, train=train, **options) as loader:
        begin = time.perf_counter()
        read, megas = 0, 0
        for mega in loader:
            read, megas = read + mega.read_bytes, megas + 1
            seen = time.perf_counter()
        seconds = seen - begin
        graph = store.graphs["features"]
        hubs = int(graph.hub_rows(len(loader.hub_rows["features"]))[1][-1]) * graph.entry.sources.row_bytes
        needed = (
            store.tables["features"].data_bytes
            + graph.edges * graph.entry.sources.row_bytes
            + 8 * store.tables["features"].rows
        )
        return Sample(read / 1e6, seconds, None, {
            "read_bytes": read, "needed_bytes": needed + hubs * megas, "mega_batches": megas,
            "kept_share": mega.kept_share, "resident": loader.resident, "partitions": loader.partitions,
            "hubs": len(loader.hub_rows["features"]),
        })  # fmt: skip


def measure_loading(
    report: Report, store: featstore.Store, source: Path, train: Any, options: dict[str, Any], rounds: int
) -> None:
    files = row_files(store)

    def limit(paths: list[Path]) -> Sample:
        found = fio.sequential_read(paths)
        return Sample(found.bytes / 1e6, found.seconds, found.cpu_seconds)

    large = options | {"memory": parse_bytes(LARGE_MEMORY)}
    load_epoch(store, train, options)
    contenders = [
        Contender(LOAD, "MB/s", "direct I/O", lambda _: load_epoch(store, train, options)),
        Contender(LARGE, "MB/s", "direct I/O", lambda _: load_epoch(store, train, large)),
        Contender(LIMIT, "MB/s", "direct I/O", lambda _: limit(files)),
    ]
    # Between two of them another file is read: the second would find the first one's in a cache of the host.
    turns = [
        (c, Contender(f"{OTHER}, {k}", "MB/s", "direct I/O", lambda _: limit([source])))
        for k, c in enumerate(contenders)
    ]
    series = measure_rounds([one for turn in turns for one in turn], rounds)
    report.series = list(series.values())
    extra = series[LOAD].samples[-1].extra
    report.claims += [
        Claim(
            "loading mega-batches over fio's sequential bandwidth",
            paired_ratio(series[LOAD], series[LIMIT]),
            SPEED_BAR,
        ),
        Claim(
            f"loading within {LARGE_MEMORY} over the same",
            paired_ratio(series[LARGE], series[LIMIT]),
            SPEED_BAR,
        ),
        Claim(
            "bytes of an epoch over features + topology + hubs a mega-batch",
            extra["read_bytes"] / extra["needed_bytes"],
            BYTES_BAR,
            "<=",
        ),
    ]


def measure_training(
    report: Report, files: GraphFiles, store: featstore.Store, seconds_max: float, hubs: int
) -> None:
    graph = store.graphs["features"]
    data = store.tables["features"].data_bytes + graph.edges * graph.entry.sources.row_bytes + 8 * files.nodes
    allowed = int(MEMORY_SHARE * data)
    given: dict[str, Any] = {
        "folder": str(files.folder), "nodes": files.nodes, "columns": files.columns,
        "labels": str(files.path("labels")), "train": str(files.path("train")), "store": str(store.path),
        "memory_bytes": int(allowed * LOADER_SHARE), "resident": None, "replaced": None, "hubs": hubs,
        "batches": 10**6, "seconds_max": seconds_max,
    }  # fmt: skip
    threads = {
        "OMP_NUM_THREADS": "2",
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_MMAP_THRESHOLD_": "1048576",
    }
    with memory_group(free_memory_bytes()) as group:
        bare = run_child(HERE / "child_mega.py", given | {"mode": "bare"}, group, threads)["peak_bytes"]
        charged = group.peak_bytes()
    limit = charged + allowed
    note(
        f"bare process: RSS {format_bytes(bare)}, charged {format_bytes(charged)}; a tenth of the "
        f"data: {format_bytes(allowed)}"
    )
    paths = [*row_files(store), *(files.path(name) for name in ("features", "indptr", "indices"))]
    results = {}
    for mode in ("mega", "memmap", "advised"):
        drop_caches(paths)
        with memory_group(limit) as group:
            results[mode] = run_child(HERE / "child_mega.py", given | {"mode": mode}, group, threads)
            results[mode]["charged_bytes"] = group.peak_bytes()
        note(f"{mode}: {results[mode]}")
    batches = -(-len(files.load("train", mapped=True)) // BATCH)
    tell_training(report, results, batches, limit)
    mega = results["mega"]
    data = store.tables["features"].data_bytes + graph.edges * graph.entry.sources.row_bytes + 8 * files.nodes
    report.claims += [
        Claim(
            f"epoch over np.memmap's{how}, in a cgroup of the bare process + 10 % of the data",
            epoch_of(results[mode], batches) / mega["seconds"],
            bar,
        )
        for mode, how, bar in (("memmap", "", EPOCH_BAR), ("advised", " with MADV_RANDOM", EPOCH_BAR))
    ] + [
        Claim(
            "peak RSS beyond the bare process, of the data",
            (mega["peak_bytes"] - bare) / data,
            MEMORY_SHARE,
            "<=",
        )
    ]
    report.notes += [
        f"Bare process (Python, numpy, torch, featstore): RSS {format_bytes(bare)}, of which its "
        f"cgroup is charged {format_bytes(charged)} (libraries were in the page cache before). "
        f"Mini-batches of {BATCH} seeds, fan-outs {FANOUTS}.",
        "np.memmap's epoch is extrapolated from its first mini-batches. It reads ahead as far as the "
        "device is set to (see the machine), which thrashes in a small group; with MADV_RANDOM it "
        "reads single pages.",
    ]


def epoch_of(result: dict[str, Any], batches: int) -> float:
    """Seconds of an epoch, extrapolated."""
    return float(result["seconds"] / result["batches"] * batches)


def tell_training(report: Report, results: dict[str, dict[str, Any]], batches: int, limit: int) -> None:
    """The table of an epoch."""
    mega, others = results["mega"], [results["memmap"], results["advised"]]

    def line(name: str, ours: Any, theirs: Callable[[dict[str, Any]], Any]) -> list[Any]:
        return [name, ours, *(theirs(other) for other in others)]

    report.table(
        "An epoch of training",
        ["", "mega-batches", "np.memmap", "np.memmap, MADV_RANDOM"],
        [
            line(
                "epoch, seconds",
                round(mega["seconds"], 1),
                lambda o: f"{epoch_of(o, batches):,.0f} (from {o['batches']:.1f} of {batches} mini-batches)",
            ),
            line("waiting for mini-batches, seconds", round(mega["wait_seconds"], 1), lambda _: ""),
            line(
                "loading beside it, seconds (building the subgraph, with its reads)",
                f"{mega['load_seconds']:.1f} ({mega['build_seconds']:.1f})",
                lambda _: "",
            ),
            line(
                "sampling and gathering, seconds (beside it; over np.memmap in its way)",
                round(mega["sample_seconds"] + mega["gather_seconds"], 1),
                lambda o: f"{(o['seconds'] - o['model_seconds']) / o['batches']:.2f} a mini-batch",
            ),
            line(
                "model, seconds",
                round(mega["model_seconds"], 1),
                lambda o: f"{o['model_seconds'] / o['batches']:.2f} a mini-batch",
            ),
            line(
                "mega-batches, of partitions",
                f"{mega['steps']} of {mega['resident']} in {mega['partitions']}",
                lambda _: "",
            ),
            line("neighbours kept", f"{mega['kept_share']:.1%}", lambda _: "all"),
            line(
                "read from the device",
                format_bytes(int(mega["device_read_bytes"])),
                lambda o: format_bytes(int(o["device_read_bytes"])),
            ),
            line("peak RSS", format_bytes(mega["peak_bytes"]), lambda o: format_bytes(o["peak_bytes"])),
            line(
                "peak charged to the cgroup",
                format_bytes(mega["charged_bytes"]),
                lambda o: format_bytes(o["charged_bytes"]),
            ),
            line("allowed by it", format_bytes(limit), lambda _: format_bytes(limit)),
            line("training accuracy over the epoch", f"{mega['accuracy']:.3f}", lambda _: ""),
        ],
    )


@click.command()
@click.option(
    "--memory",
    default="160MiB",
    show_default=True,
    help="Budget of the loader where only loading is measured.",
)
@click.option("--hubs", default=20_000, show_default=True, help="Hubs kept in memory.")
@click.option("--loading-alone", is_flag=True, help="Measure no training.")
@click.option("--seconds", default=60.0, show_default=True, help="Time limit of np.memmap.")
@shared_options(size="2GiB", quick_size="512MiB", rounds=5)
def main(settings: Settings, memory: str, hubs: int, seconds: float, loading_alone: bool) -> None:
    """Loading mega-batches against fio, and an epoch in a tenth of the memory against np.memmap."""
    nodes = settings.size_bytes // (4 * COLUMNS)
    files = generate(settings.workspace / f"graph-{nodes}", nodes, nodes * EDGES_A_NODE, COLUMNS)
    hubs = min(hubs, nodes // 200)
    touch_memory(min(free_memory_bytes() // 2, 4 << 30))
    path = settings.workspace / f"mega-{nodes}.store"
    with pack(files, path) as store:
        graph = store.graphs["features"]
        report = Report("mega", "Mega-batches", {
            "nodes": nodes, "edges": graph.edges, "row_bytes": 4 * COLUMNS, "memory": memory, "hubs": hubs,
            "rounds": settings.rounds, "partitions": store.tables["features"].partition_offsets.size - 1,
            "order": store.tables["features"].entry.order.method,
            "edge_cut": store.tables["features"].entry.order.parameters.get("edge_cut"),
        }, settings.workspace)  # fmt: skip
        options = {"memory": parse_bytes(memory), "hubs": hubs}
        measure_loading(
            report, store, files.path("features"), np.load(files.path("train")), options, settings.rounds
        )
        report.claims += [
            Claim(
                "mega-batches in an epoch", median(s.extra["mega_batches"] for s in report.series[0].samples)
            )
        ]
        if not loading_alone:
            measure_training(report, files, store, 5.0 if settings.quick else seconds, hubs)
    if not settings.keep:
        remove(path)
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
