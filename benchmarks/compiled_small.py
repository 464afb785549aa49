"""Small mini-batches of a compiled trace: does loading them keep up with the disk?

    python benchmarks/compiled_small.py --dir /a/directory/on/the/ssd

A table of rows of 4 KiB, and recorded mini-batches of 0.2 %, 1 % and 3 % of its nodes, some asked for far
more often than others, each with a sample of three edges a node. They are compiled with residency "min" and
"fixed", with a tenth of the table in memory, and gone through by a loop that does nothing with them: bytes
read (the kernel's count for the process) over fio's sequential rate on the same files, in turns. A pass of
fio over other files stands between the passes, for a cache of the host. All reads are direct, and the page
cache is dropped before each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from compiled_data import TABLE, files_of, fio_read, load_epoch
from harness import Claim, Contender, Report, Settings, measure_rounds, note, paired_ratio, shared_options
from numpy.typing import NDArray
from system import free_memory_bytes, touch_memory
from tables import remove, true_rows

import featstore
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.trace import CompiledTrace

ROW_BYTES = 4096
SHARES = (0.002, 0.01, 0.03)  # of the nodes, in a mini-batch
CACHE_SHARE, ASKED_SHARE = 0.1, 2.0  # of the table: rows in memory, and rows that an epoch asks for
SKEW = 2.0  # node = nodes * u ** SKEW, u uniform
EDGES_A_NODE = 3
MEMORY = 2**30
FIO_BAR, FIXED_BAR = 0.95, 1.0


def recorded(nodes: int, share: float) -> Iterator[tuple[NDArray[np.int64], dict[str, Any]]]:
    """An epoch's mini-batches: distinct node ids, and a sample as a sampler's would be."""
    rng, count = np.random.default_rng(1), int(share * nodes)
    scattered = rng.permutation(nodes)
    for _ in range(int(ASKED_SHARE / share)):
        drawn = np.unique((nodes * rng.random(2 * count) ** SKEW).astype(np.int64))
        ids = scattered[rng.permutation(drawn)[:count]]
        row, col = rng.integers(0, len(ids), (2, EDGES_A_NODE * len(ids)), np.int32)
        yield ids, {"seeds": np.arange(len(ids) // 20, dtype=np.int32), "row": row, "col": col}


class Loading:
    """The mini-batches of one size, compiled both ways, and what is measured of them."""

    def __init__(self, store: featstore.Store, workspace: Path, share: float) -> None:
        self.share, self.percent, self._store = share, f"{100 * share:g} %", store
        self._loaders: dict[str, CompiledLoader] = {}
        self._compiled: dict[str, CompiledTrace] = {}
        nodes, path = store.tables[TABLE].rows, workspace / "small.trace"
        with featstore.Trace.record(recorded(nodes, share), path, overwrite=path.exists()) as trace:
            for residency in ("min", "fixed"):
                made = featstore.compile_trace(
                    store, trace, f"small-{residency}", memory=MEMORY, train_memory=MEMORY, overwrite=True,
                    cache=int(CACHE_SHARE * nodes * ROW_BYTES), residency=residency,
                )  # fmt: skip
                made.close()  # type: ignore[union-attr]
                compiled = CompiledTrace(store, f"small-{residency}")
                self._compiled[residency] = compiled
                self._loaders[residency] = CompiledLoader(compiled, tensors=False)
                self._check(trace, self._loaders[residency])

    @staticmethod
    def _check(trace: featstore.Trace, loader: CompiledLoader) -> None:
        """Raise AssertionError for a row that is not its node's."""
        for index, batch in enumerate(loader):
            ids = next(iter(trace.ids(index).values()))
            if not np.array_equal(batch.x.view(np.uint32), true_rows(ids, ROW_BYTES // 4).view(np.uint32)):
                raise AssertionError(f"mini-batch {index} has wrong rows")
            del batch

    def contenders(self) -> list[Contender]:
        """An epoch of each, and fio over the files of the first."""
        files = {
            k: [p for name in c.pack.tables for p in files_of(c.pack, name)]
            for k, c in self._compiled.items()
        }

        def other(residency: str) -> Contender:
            return Contender(f"between, {self.percent}, {residency}", "MB/s", "", lambda _: fio_read(
                files_of(self._store, TABLE)))  # fmt: skip

        passes = [
            Contender(f"compiled, {k}, {self.percent}", "MB/s", "dropped",
                      lambda _, k=k: load_epoch(self._loaders[k], files[k]))
            for k in files
        ]  # fmt: skip
        passes.append(Contender(f"fio, {self.percent}", "MB/s", "dropped", lambda _: fio_read(files["min"])))
        return [one for own in passes for one in (own, other(own.name))]

    def tell(self, report: Report, rounds: int) -> None:
        """Measure, and put into the report."""
        series = measure_rounds(self.contenders(), rounds)
        ours, fixed = (series[f"compiled, {k}, {self.percent}"] for k in ("min", "fixed"))
        fio = series[f"fio, {self.percent}"]
        batches = len(self._loaders["min"])
        of = f"mini-batches of {self.percent}"
        slower = [a.seconds / b.seconds for a, b in zip(ours.samples, fixed.samples, strict=True)]
        report.claims += [
            Claim(f"{of}: bytes a second over fio's", paired_ratio(ours, fio), FIO_BAR),
            Claim(f"{of}: the same, residency fixed", paired_ratio(fixed, fio)),
            Claim(f"{of}: time over residency fixed", median(slower), FIXED_BAR, "<="),
        ]
        batches = len(self._loaders["min"])
        rows = int(self.share * self._store.tables[TABLE].rows)
        report.table(
            f"{of}: {batches} of {rows:,} rows",
            ["residency", "MB read", "ms a mini-batch", "CPU ms a mini-batch"],
            [
                [
                    residency,
                    one.samples[0].amount,
                    1e3 / batches * median(s.seconds for s in one.samples),
                    1e3 / batches * median(s.cpu_seconds or 0.0 for s in one.samples),
                ]
                for residency, one in (("min", ours), ("fixed", fixed))
            ],
        )
        report.series += [ours, fixed, fio]

    def close(self) -> None:
        for loader, compiled in zip(self._loaders.values(), self._compiled.values(), strict=True):
            loader.close()
            compiled.close()
            remove(compiled.pack.path)


@click.command()
@shared_options(size="800MiB", quick_size="64MiB", rounds=5)
def main(settings: Settings) -> None:
    """Loading mini-batches of 0.2 %, 1 % and 3 % of the nodes, against fio."""
    nodes, path = settings.size_bytes // ROW_BYTES, settings.workspace / "compiled-small.store"
    touch_memory(min(free_memory_bytes() // 2, 4 << 30))
    if not (path / "featstore.json").exists():
        note("packing the store")
        source = np.lib.format.open_memmap(
            settings.workspace / "small.npy", "w+", np.float32, (nodes, ROW_BYTES // 4)
        )
        for begin in range(0, nodes, 4096):
            source[begin : begin + 4096] = true_rows(
                np.arange(begin, min(nodes, begin + 4096)), ROW_BYTES // 4
            )
        source.flush()
        featstore.pack(path, {TABLE: settings.workspace / "small.npy"}, memory="1GiB").close()
        os.remove(settings.workspace / "small.npy")
    report = Report("compiled_small", "Small mini-batches of compiled traces", {
        "nodes": nodes, "row_bytes": ROW_BYTES, "shares": list(SHARES), "cache_share": CACHE_SHARE,
        "asked_share": ASKED_SHARE, "skew": SKEW, "rounds": settings.rounds,
    }, settings.workspace)  # fmt: skip
    with featstore.open(path) as store:
        for share in SHARES:
            loading = Loading(store, settings.workspace, share)
            try:
                loading.tell(report, settings.rounds)
            finally:
                loading.close()
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
