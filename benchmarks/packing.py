"""Packing: a random permutation of a table under a memory budget that it does not fit, and the same table in
the order given.

    python benchmarks/packing.py --dir /a/directory/on/the/ssd

Each pack runs in a process of its own, whose peak memory (VmHWM) and whose bytes read and written
(/proc/self/io) are those of the pack; the source is not in the page cache. The limit is fio for the same
bytes, direct and synced at the end: reading them and then writing them, and, because reading and writing of a
spill overlap, reading beside writing. The rows of each store are compared with the truth.

A generated graph with small rows is packed, too, partitioned and all, on every core and on one: there the
cores bind. Both stores must have the same digests.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from graphs import GraphFiles, generate
from harness import (
    HERE,
    Claim,
    Contender,
    Report,
    Sample,
    Series,
    Settings,
    measure_rounds,
    paired_ratio,
    shared_options,
)
from peers import fio
from system import drop_caches, free_memory_bytes, run_child, touch_memory
from tables import ROW_BYTES, Tables, check_rows, remove

import featstore
from featstore.base.system import available_cores
from featstore.units import format_bytes, parse_bytes

RSS_SLACK_BYTES = 150 * 2**20
SPEED_BAR = 0.6
CHECKED_ROWS = 20_000
SMALL_ROWS = 250_000  # of 64 B: with 10 MiB of memory they go through spill files
PERMUTED, GIVEN = "featstore pack, permuted", "featstore pack, as given"
GRAPH, ALONE = "featstore pack with a graph", "featstore pack with a graph, one core"
NODES, QUICK_NODES, EDGES_A_NODE, GRAPH_MEMORY_BYTES = 4_000_000, 100_000, 10, 2 << 30
SMALL_GRAPH_MEMORY_BYTES = 64 << 20
CORES_BAR = 1.6
AFTER, BESIDE = "fio, reads then writes", "fio, reads beside writes"
COLD = "cold (page cache dropped)"


class Packing:
    """The source, the permutation, and the contenders."""

    def __init__(self, tables: Tables, memory_bytes: int, settings: Settings) -> None:
        self.tables, self.memory_bytes, self.workspace = tables, memory_bytes, settings.workspace
        self.source = tables.flat()
        self.nodes = QUICK_NODES if settings.quick else NODES
        self.digests: list[str] = []
        self.permutation = settings.workspace / "permutation.npy"
        np.save(self.permutation, np.random.default_rng(0).permutation(tables.rows).astype(np.int32))

    @property
    def table_bytes(self) -> int:
        return self.tables.rows * ROW_BYTES

    def pack(self, permutation: Path | None) -> Sample:
        """Pack in a child process and check the store. The amount is the table, in MB."""
        out = self.workspace / "packed.store"
        drop_caches([self.source])
        result = run_pack(self.source, permutation, out, self.memory_bytes)
        ids = np.random.default_rng(2).integers(0, self.tables.rows, CHECKED_ROWS)
        with featstore.open(out) as store, store.reader(memory="512MiB", static=None) as reader:
            check_rows(ids, reader.read(ids), len(ids))
        remove(out)
        return Sample(self.table_bytes / 1e6, result["seconds"], result["cpu_seconds"], result)

    def pack_graph(self, files: GraphFiles, cores: int | None) -> Sample:
        """Pack a graph and its rows in a child process. The amount is its edges, in millions."""
        out, graph = self.workspace / "graph.store", files.path("graph").with_suffix(".npz")
        if not graph.exists():
            np.savez(graph, indptr=files.load("indptr"), indices=files.load("indices"))
        drop_caches([graph, files.path("features")])
        result = run_pack(files.path("features"), None, out, GRAPH_MEMORY_BYTES, graph, cores)
        with featstore.open(out) as store:
            entries = [one.entry for one in store.tables.values()]
            entries += [one.entry.sources for one in store.graphs.values()]
            digests = [one.statistics["rows_digest"] for one in entries]
        if self.digests not in ([], digests):
            raise AssertionError("another number of cores has made another store")
        self.digests = digests
        remove(out)
        edges = EDGES_A_NODE * self.nodes / 1e6
        return Sample(edges, result["seconds"], result["cpu_seconds"], result)

    def fio_after(self, passes: int) -> Sample:
        """fio reads the table ``passes`` times, then writes it so often."""
        target = self.workspace / "fio.out"
        read = fio.sequential_read([self.source])
        write = fio.sequential_write(target, passes * self.table_bytes)
        remove(target)
        seconds = passes * self.table_bytes * (1 / read.bytes_per_second + 1 / write.bytes_per_second)
        extra = {
            "read_bytes_per_second": read.bytes_per_second,
            "write_bytes_per_second": write.bytes_per_second,
        }
        return Sample(self.table_bytes / 1e6, seconds, None, extra)

    def fio_beside(self, passes: int) -> Sample:
        """fio reads the table ``passes`` times while it writes it so often."""
        target = self.workspace / "fio.out"
        seconds = fio.read_beside_write(
            self.source, passes * self.table_bytes, target, passes * self.table_bytes
        )
        remove(target)
        return Sample(self.table_bytes / 1e6, seconds)

    def contenders(self) -> list[Contender]:
        files = generate(self.workspace / f"graph-{self.nodes}", self.nodes, EDGES_A_NODE * self.nodes, 16)
        found = [
            Contender(name, "M edges/s", COLD, lambda _, n=cores: self.pack_graph(files, n))  # type: ignore[misc]
            for name, cores in ((GRAPH, None), (ALONE, 1))
        ]
        for name, passes, permutation in ((PERMUTED, 2, self.permutation), (GIVEN, 1, None)):
            found += [
                Contender(name, "MB/s of table", COLD, lambda _, p=permutation: self.pack(p)),  # type: ignore[misc]
                Contender(
                    f"{AFTER}, {passes}x",
                    "MB/s of table",
                    "direct I/O",
                    lambda _, n=passes: self.fio_after(n),
                ),  # type: ignore[misc]
                Contender(
                    f"{BESIDE}, {passes}x",
                    "MB/s of table",
                    "direct I/O",
                    lambda _, n=passes: self.fio_beside(n),
                ),  # type: ignore[misc]
            ]
        return found


def run_pack(
    source: Path, permutation: Path | None, out: Path, memory_bytes: int, graph: Path | None = None,
    cores: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Pack in a child process; returns what it measured. ``cores`` None: all that there are."""
    remove(out)
    return run_child(HERE / "child_pack.py", {
        "source": str(source), "permutation": None if permutation is None else str(permutation),
        "out": str(out), "memory_bytes": memory_bytes, "graph": None if graph is None else str(graph),
        "cores": cores,
    })  # fmt: skip


def compile_kernels(workspace: Path) -> None:
    """Pack a small table both ways, and a graph, so that the machine code is on disk before a process is
    measured."""
    source, order, out = workspace / "small.npy", workspace / "small-order.npy", workspace / "small.store"
    np.save(source, np.zeros((SMALL_ROWS, 16), np.float32))
    np.save(order, np.arange(SMALL_ROWS, dtype=np.int32)[::-1])
    for permutation in (None, order):
        run_pack(source, permutation, out, 10 << 20)
    files = generate(workspace / f"graph-{QUICK_NODES}", QUICK_NODES, EDGES_A_NODE * QUICK_NODES, 16)
    graph = files.path("graph").with_suffix(".npz")
    np.savez(graph, indptr=files.load("indptr"), indices=files.load("indices"))
    for cores in (None, 1):  # each has kernels of its own; in so little memory parts are those of a large one
        run_pack(files.path("features"), None, out, SMALL_GRAPH_MEMORY_BYTES, graph, cores)
    for path in (source, order, out):
        remove(path)


def middle(series: Series, key: str) -> float:
    return float(median(s.extra[key] for s in series.samples))


def ratio_for_bytes(ours: Series, limit: Series, passes: int, table_bytes: int, serial: bool) -> float:
    """Median over the rounds of: time that fio takes for the bytes we read and wrote, over our time."""
    ratios = []
    for a, b in zip(ours.samples, limit.samples, strict=True):
        if serial:
            seconds = (
                a.extra["read_bytes"] / b.extra["read_bytes_per_second"]
                + a.extra["write_bytes"] / b.extra["write_bytes_per_second"]
            )
        else:
            seconds = b.seconds * max(a.extra["read_bytes"], a.extra["write_bytes"]) / (passes * table_bytes)
        ratios.append(seconds / a.seconds)
    return float(median(ratios))


def fill(report: Report, series: dict[str, Series], packing: Packing) -> None:
    table_bytes, budget = packing.table_bytes, packing.memory_bytes
    rows: list[list[Any]] = []
    for name, passes in ((PERMUTED, 2), (GIVEN, 1)):
        ours, text = series[name], name.removeprefix("featstore pack, ")
        read, written = middle(ours, "read_bytes") / table_bytes, middle(ours, "write_bytes") / table_bytes
        peak = max(s.extra["peak_bytes"] for s in ours.samples)
        slack = 0.06  # checksums, maps, manifest
        serial = ratio_for_bytes(ours, series[f"{AFTER}, {passes}x"], passes, table_bytes, serial=True)
        beside = ratio_for_bytes(ours, series[f"{BESIDE}, {passes}x"], passes, table_bytes, serial=False)
        report.claims += [
            Claim(f"{text}: reads of the table", read, passes + slack, "<=", "tables"),
            Claim(f"{text}: writes of the table", written, passes + slack, "<=", "tables"),
            Claim(f"{text}: speed over fio's, reads then writes", serial, SPEED_BAR),
            Claim(f"{text}: speed over fio's, reads beside writes", beside),
            Claim(
                f"{text}: peak memory beyond the budget",
                (peak - budget) / 2**20,
                RSS_SLACK_BYTES / 2**20,
                "<=",
                "MiB",
            ),
        ]
        device = median(
            s.extra.get("device_read_bytes", 0) + s.extra.get("device_write_bytes", 0) for s in ours.samples
        )
        rows.append(
            [
                text,
                median(s.seconds for s in ours.samples),
                middle(ours, "cpu_seconds"),
                read,
                written,
                device / table_bytes,
                format_bytes(peak),
                format_bytes(middle(ours, "base_bytes")),
            ]
        )
    report.table(
        "By pack",
        [
            "pack",
            "s",
            "CPU s",
            "tables read",
            "tables written",
            "tables moved (whole device)",
            "peak RSS",
            "of that before the pack",
        ],
        rows,
    )
    whole, alone = series[GRAPH], series[ALONE]
    report.claims.append(
        Claim("with a graph: on one core over all cores", paired_ratio(whole, alone), CORES_BAR)
    )
    report.notes = [
        f"The graph has {packing.nodes:,} nodes with rows of 64 B and {EDGES_A_NODE} stored edges a node; "
        f"{available_cores()} cores have packed it within "
        f"{median(s.seconds for s in whole.samples):.1f} s, one within "
        f"{median(s.seconds for s in alone.samples):.1f}, to the same digests of rows and lists.",
        "Bytes are those of /proc/self/io of the packing process, threads included; the column of the "
        "whole device counts everybody's.",
        "Peak RSS is VmHWM of a fresh process, whose interpreter, libraries and machine code are in it; "
        f"the budget is {format_bytes(budget)}, the table {format_bytes(table_bytes)}.",
    ]
    report.series = list(series.values())


@click.command()
@shared_options(size="4GiB", quick_size="256MiB", rounds=3)
@click.option("--memory", help="Budget of the pack. [default: an eighth of the table]")
def main(settings: Settings, memory: str | None) -> None:
    """Packs against fio: a random permutation out of core, and the order given."""
    tables = Tables.of_size(settings.workspace, settings.size_bytes)
    memory_bytes = parse_bytes(memory) if memory else settings.size_bytes // 8
    touch_memory(min(free_memory_bytes() // 2, 2 * settings.size_bytes))
    packing = Packing(tables, memory_bytes, settings)
    report = Report("packing", "Packing", {
        "table_bytes": packing.table_bytes, "row_bytes": ROW_BYTES, "memory_bytes": memory_bytes,
        "rounds": settings.rounds,
    }, settings.workspace)  # fmt: skip
    compile_kernels(settings.workspace)
    series = measure_rounds(packing.contenders(), settings.rounds)
    fill(report, series, packing)
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
