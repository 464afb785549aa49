"""Our samplers and loader against PyG's own, with its compiled sampler.

    python benchmarks/pyg.py --data FOLDER --dir /a/directory/on/the/ssd
    python benchmarks/pyg.py --data FOLDER --zram   # the store on compressed RAM; takes root

**Samplers**, over the same graph in memory, with the same seeds, one thread each: ours, ours of graphs with
types over the same edges as one relation, and PyG's compiled one (torch-sparse's ``neighbor_sample``, which
PyG falls back to where pyg-lib is missing). They draw other neighbours, so mini-batches are looked at by
themselves: seeds first, no node twice, each edge one of the graph's, and as many from the seeds as there are
to be. On a real graph of ``--data`` (``ogbn_arxiv_tape40.npz``), if there is that folder, and on a generated
one.

**Loaders**: an epoch of ``NeighborLoader`` over the generated graph, PyG's with all in memory, and ours from
a store, with a tenth of the features' bytes as its memory for rows, graph and all else. Beside ours stands
the bound: what the disk takes for the bytes that were read, at fio's rate for random reads of that length.

Without torch-sparse, which no wheel brings (``pip install --no-build-isolation torch-scatter torch-sparse``
compiles it for a quarter of an hour), there is nothing to measure against, and it says so.
"""

from __future__ import annotations

import os
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import graphs
import numpy as np
from harness import (
    Claim,
    Contender,
    Report,
    Sample,
    Series,
    Settings,
    measure_rounds,
    note,
    paired_ratio,
    shared_options,
)
from numpy.typing import NDArray
from peers import fio
from system import compressed_ram, cpu_seconds

import featstore
from featstore.base.system import available_cores
from featstore.errors import BudgetError
from featstore.measure.calibrate import calibrate
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.typed import TypedNeighborSampler

FANOUTS = (15, 10, 5)
SEEDS = 1024
BATCHES = 8  # a sample
DEPTH = 128
COLUMNS = 256
EDGES_PER_NODE = 16
MEMORY_SHARE = 0.1
LOADER_FANOUTS = (10, 5)
SAMPLER_BAR, TYPED_BAR, LOADER_BAR = 1.0, 1.3, 1.3
REAL = "ogbn_arxiv_tape40.npz"

OURS, TYPED, PYG = "featstore", "featstore, typed", "PyG (torch-sparse)"
Sampled = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # nodes, row, col


class Samplers:
    """The contenders over one graph in CSC."""

    def __init__(self, indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> None:
        import torch

        self.indptr, self.indices = indptr, indices
        nodes, relation = len(indptr) - 1, ("node", "to", "node")
        ours = NeighborSampler(indptr, indices, FANOUTS)
        typed = TypedNeighborSampler({relation: (indptr, indices)}, {"node": nodes}, FANOUTS)
        arrays = torch.from_numpy(indptr), torch.from_numpy(indices.astype(np.int64))
        pygs = torch.ops.torch_sparse.neighbor_sample

        def of_ours(seeds: Any, number: int) -> Sampled:
            made = ours.sample(seeds, number)
            return made.node, made.row, made.col

        def of_typed(seeds: Any, number: int) -> Sampled:
            made = typed.sample("node", seeds, number)
            return made.node["node"], made.row[relation], made.col[relation]

        def of_pyg(seeds: Any, _: int) -> Sampled:
            node, row, col, _edge = pygs(*arrays, torch.from_numpy(seeds), list(FANOUTS), False, True)
            return node.numpy(), row.numpy(), col.numpy()

        self.contenders = [
            Contender(name, "edges/s", "graph in memory", self._measured(run))
            for name, run in ((OURS, of_ours), (TYPED, of_typed), (PYG, of_pyg))
        ]

    def _measured(self, run: Any) -> Any:
        def measured(number: int) -> Sample:
            edges, seconds, cpu = 0, 0.0, 0.0
            for index in range(number * BATCHES, (number + 1) * BATCHES):
                seeds = np.random.default_rng([7, index]).choice(len(self.indptr) - 1, SEEDS, replace=False)
                cpu_begin, begin = cpu_seconds(), time.perf_counter()
                made = run(seeds, index)
                seconds, cpu = seconds + time.perf_counter() - begin, cpu + cpu_seconds() - cpu_begin
                edges += len(made[1])
                if index % BATCHES == 0:
                    self._check(made, seeds)
            return Sample(edges, seconds, cpu, {"batch_seconds": seconds / BATCHES})

        return measured

    def _check(self, made: Sampled, seeds: NDArray[np.int64]) -> None:
        """Raise AssertionError for what is no mini-batch around the seeds."""
        node, row, col = made
        degrees = self.indptr[seeds + 1] - self.indptr[seeds]
        first = int(np.minimum(degrees, FANOUTS[0]).sum())
        right = np.array_equal(node[: len(seeds)], seeds) and len(np.unique(node)) == len(node)
        right = right and bool((col[:first] < len(seeds)).all() and (col[first:] >= len(seeds)).all())
        for at in np.random.default_rng(1).integers(0, len(row), 200):
            target = node[col[at]]
            right = right and node[row[at]] in self.indices[self.indptr[target] : self.indptr[target + 1]]
        if not right:
            raise AssertionError("not a mini-batch around its seeds")


def compare_samplers(report: Report, title: str, indptr: Any, indices: Any, rounds: int) -> None:
    note(title)
    made = Samplers(indptr, indices)
    for contender in made.contenders:
        contender.run(rounds)  # kernels loaded, pages touched
    series = measure_rounds(made.contenders, rounds)
    for one in series.values():
        report.series.append(Series(f"{title}: {one.name}", one.unit, one.cache, one.samples))
    report.table(f"A mini-batch of {title}", ("sampler", "edges", "ms"), [
        [name, f"{np.mean([s.amount for s in one.samples]) / BATCHES:,.0f}",
         f"{np.median([s.extra['batch_seconds'] for s in one.samples]) * 1e3:.2f}"]
        for name, one in series.items()
    ])  # fmt: skip
    report.claims += [
        Claim(f"{title}: edges a second, ours over PyG's", paired_ratio(series[OURS], series[PYG]),
              SAMPLER_BAR),
        Claim(f"{title}: time of typed over untyped", 1 / paired_ratio(series[TYPED], series[OURS]),
              TYPED_BAR, "<="),
    ]  # fmt: skip


def compare_loaders(report: Report, files: graphs.GraphFiles, settings: Settings) -> None:
    """An epoch over the training nodes, from the store and from memory."""
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader as PygLoader

    path = settings.workspace / f"pyg{files.nodes}.store"
    indptr, indices = files.load("indptr"), files.load("indices")
    if not path.exists():
        note("packing")
        featstore.pack(
            path, files.path("features"), graph=(indptr, indices), order="ldg", memory="2GiB"
        ).close()
    features, train = torch.from_numpy(files.load("features")), files.load("train")
    targets = np.repeat(np.arange(files.nodes), np.diff(indptr))
    data = Data(x=features, edge_index=torch.from_numpy(np.stack([indices.astype(np.int64), targets])))
    del targets
    same: dict[str, Any] = {
        "num_neighbors": list(LOADER_FANOUTS), "batch_size": SEEDS, "input_nodes": torch.from_numpy(train),
    }  # fmt: skip
    theirs = PygLoader(data, shuffle=True, **same)
    memory_bytes = int(MEMORY_SHARE * files.nodes * files.row_bytes)
    with featstore.open(path) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, memory_bytes = _that_works(store, memory_bytes, same)
        report.parameters["loader_memory_bytes"] = memory_bytes
        with ours:

            def epoch(loader: Any, report: Any = None) -> Sample:
                before = report() if report is not None else None
                rows, cpu_begin, begin = 0, cpu_seconds(), time.perf_counter()
                for number, batch in enumerate(loader):
                    rows += len(batch.x)
                    if number == 0 and not torch.equal(batch.x, features[batch.n_id]):
                        raise AssertionError("rows that are not the source's")
                seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu_begin
                after = None if report is None else report()
                read, reads = (0, 0) if after is None else (
                    after.bytes_read - before.bytes_read, after.reads - before.reads
                )  # fmt: skip
                return Sample(rows, seconds, cpu, {"bytes_read": read, "reads": reads})

            contenders = [
                Contender("featstore, from the store", "rows/s", "direct I/O",
                          lambda _: epoch(ours, ours.report)),
                Contender("PyG, all in memory", "rows/s", "all in memory", lambda _: epoch(theirs)),
            ]  # fmt: skip
            contenders[1].run(0)
            series = measure_rounds(contenders, settings.rounds)
    report.series += series.values()
    mine, other = series.values()
    read = float(np.median([s.extra["bytes_read"] for s in mine.samples]))
    reads = float(np.median([s.extra["reads"] for s in mine.samples]))
    bound = _bound(path, read, reads, settings)
    rows = [
        [one.name, f"{np.median([s.seconds for s in one.samples]):.2f}",
         f"{np.median([s.extra['bytes_read'] for s in one.samples]) / 1e6:,.0f}",
         f"{bound:.2f}" if one is mine and bound is not None else ""]
        for one in series.values()
    ]  # fmt: skip
    columns = ("loader", "seconds", "MB read", "fio for these, seconds")
    report.table("An epoch of NeighborLoader", columns, rows)
    ratio = float(np.median([
        a.seconds / b.seconds for a, b in zip(mine.samples, other.samples, strict=True)
    ]))  # fmt: skip
    theirs_seconds = float(np.median([s.seconds for s in other.samples]))
    allowed = bound is None or bound <= LOADER_BAR * theirs_seconds  # else no reader could
    share = memory_bytes / (files.nodes * files.row_bytes)
    text = (
        f"an epoch of NeighborLoader: from a store, {share:.0%} of the features' memory, over PyG in memory"
    )
    report.claims.append(Claim(text, ratio, LOADER_BAR if allowed else None, "<="))
    if bound is not None:
        mine_seconds = float(np.median([s.seconds for s in mine.samples]))
        report.claims.append(Claim("the same epoch over fio's time for what it read", mine_seconds / bound))
    if not allowed:
        report.notes.append("The disk alone takes longer for these bytes than the bar allows: it is not set.")


def _that_works(store: featstore.Store, memory_bytes: int, same: dict[str, Any]) -> tuple[Any, int]:
    """Our loader after an epoch, with so much memory, or of few nodes, whose features' tenth is less than any
    loader works with, with as little as works."""
    from featstore.adapters.pyg import NeighborLoader

    while True:
        try:
            made = NeighborLoader(store, shuffle=True, memory=memory_bytes, **same)
            for _ in made:
                pass
            return made, memory_bytes
        except BudgetError as error:
            memory_bytes = error.needed_bytes


def _bound(path: Path, read_bytes: float, reads: float, settings: Settings) -> float | None:
    """Seconds that fio takes for so many bytes in reads as long as these are on the average, by its best
    number of processes."""
    if not fio.available() or not read_bytes:
        return None
    files = sorted(one for one in path.rglob("*") if one.is_file() and one.stat().st_size > 2**20)
    length = max(1, round(read_bytes / reads / 4096)) * 4096
    rates = [
        fio.random_read(files, settings.seconds, block_bytes=length, depth=DEPTH, processes=count)
        for count in (1, available_cores())
    ]
    return read_bytes / max(rate.bytes_per_second for rate in rates)


@click.command()
@click.option("--data", "folder", type=click.Path(path_type=Path, file_okay=False, exists=True),
              help="The folder of the real graphs.")  # fmt: skip
@click.option("--zram", is_flag=True, help="Make a block device of compressed RAM for the store.")
@shared_options(size="2GiB", quick_size="32MiB", rounds=5)
def main(settings: Settings, folder: Path | None, zram: bool) -> None:
    """Samplers and NeighborLoader beside PyG's; --size is that of the generated graph's features."""
    try:
        import torch
        import torch_sparse  # noqa: F401
    except ImportError as error:
        note(f"pyg: not measured: {error.name} is not installed; how to: python benchmarks/pyg.py --help")
        return
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if zram:
            at = stack.enter_context(compressed_ram(8 << 30, settings.workspace / "zram"))
            os.environ["FEATSTORE_CACHE"] = str(at / "cache")
            settings = replace(settings, workspace=at)
            calibrate(at)
        go(settings, folder, zram)


def go(settings: Settings, folder: Path | None, zram: bool) -> None:
    """All of it, in a workspace."""
    nodes = settings.size_bytes // (4 * COLUMNS)
    name, where = ("pyg_fast", ", the store on compressed RAM") if zram else ("pyg", "")
    report = Report(name, f"Beside PyG's compiled sampler{where}", {
        "nodes": nodes, "edges": EDGES_PER_NODE * nodes, "row_bytes": 4 * COLUMNS, "fanouts": list(FANOUTS),
        "loader_fanouts": list(LOADER_FANOUTS), "seeds": SEEDS, "rounds": settings.rounds,
        "zram": zram,
    }, settings.workspace)  # fmt: skip
    if folder is not None:
        found = np.load(folder / REAL)
        compare_samplers(report, "ogbn-arxiv", found["indptr"], found["indices"], settings.rounds)
    files = graphs.generate(settings.workspace / f"pyg{nodes}", nodes, EDGES_PER_NODE * nodes, COLUMNS)
    title = f"a generated graph of {nodes / 1e6:.1f} M nodes"
    compare_samplers(report, title, files.load("indptr"), files.load("indices"), settings.rounds)
    compare_loaders(report, files, settings)
    report.notes.append(
        f"Samplers: {SEEDS} seeds, fan-outs {list(FANOUTS)}, one thread, without replacement. Loaders: "
        f"fan-outs {list(LOADER_FANOUTS)}, a tenth of the nodes as seeds; in one process, without workers: "
        "ours samples and reads in threads of its own, beside the loop, which does nothing."
    )
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
