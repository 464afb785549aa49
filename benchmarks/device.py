"""An epoch with the model on an accelerator (CUDA): what of it is fetching rows, and what keeping some there
saves.

    python benchmarks/device.py

Two layers of GraphSAGE over a generated graph. *np.memmap*: four threads sample and take rows
(``torch.index_select`` on the map, all cores), pinned and three mini-batches ahead of the loop, which copies
without waiting; the file is in the page cache. *featstore*, which reads directly, in a quarter of the
features and 256 MiB: mode online with rows copied by the loop, by the loader (``device=``), and with a
quarter and all of the rows kept there (``device_memory=``); mode compiled with ``device=``. *All on the
device*: the same sampling, rows picked by the accelerator, which no store can beat. The first element of each
row is its node id, checked on the device for all seeds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import click
import numpy as np
import torch
from graphs import GraphFiles, generate
from harness import (
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
from numpy.typing import NDArray
from sage import Sage
from system import cpu_seconds, warm_cache

import featstore
from featstore.sampling.neighbors import NeighborSampler

COLUMNS, EDGES_A_NODE = 256, 20
FANOUTS, BATCH, STEPS = (10, 5), 1024, 24
HIDDEN = 256
AHEAD, THREADS = 3, 4
BESIDE = 256 << 20  # of a loader's memory, beside a quarter of the features
LIMIT, MAPPED = "all on the device", "np.memmap, all in memory"


def mean(h: torch.Tensor, row: torch.Tensor, col: torch.Tensor, targets: int) -> torch.Tensor:
    """The mean of neighbours' rows, of each of the first ``targets`` nodes."""
    found = torch.zeros(targets, h.shape[1], device=h.device).index_add_(0, col, h[row])
    degree = torch.zeros(targets, device=h.device).index_add_(0, col, torch.ones_like(col, dtype=h.dtype))
    return found / degree.clamp(min=1)[:, None]


class Training:
    """A model on the device, and an epoch of it over mini-batches of any source: (rows, edges, seeds, nodes
    and edges of each hop)."""

    def __init__(self, files: GraphFiles) -> None:
        self.device = torch.device("cuda")
        torch.manual_seed(0)
        self.model = Sage(COLUMNS, HIDDEN, mean).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.labels = torch.from_numpy(files.load("labels").astype(np.int64)).to(self.device)

    def epoch(self, batches: Iterator[Any]) -> tuple[int, float]:
        """Rows of all mini-batches, and seconds."""
        rows, wrong = 0, torch.zeros((), dtype=torch.int64, device=self.device)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for x, (row, col), seeds, nodes, edges in batches:
            there = torch.from_numpy(seeds).pin_memory().to(self.device, non_blocking=True)
            out = self.model(x, row, col, nodes, edges)
            loss = torch.nn.functional.cross_entropy(out, self.labels[there])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            wrong += (x[: len(seeds), 0].long() != there).sum()
            rows += len(x)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if int(wrong):
            raise AssertionError(f"{int(wrong):,} rows are not the source's")
        return rows, seconds


class Sampled:
    """The mini-batches of epochs, sampled by threads ahead of the loop, with what ``rows`` makes of ids."""

    def __init__(self, files: GraphFiles, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._sampler = NeighborSampler(files.load("indptr"), files.load("indices"), FANOUTS)
        self._seeds, self._rows = files.load("train")[: BATCH * STEPS], rows

    def _one(self, seeds: NDArray[np.int64], number: int, epoch: int) -> Any:
        sample = self._sampler.sample(seeds, number, epoch=epoch)
        edges = torch.from_numpy(np.stack([sample.row, sample.col])).pin_memory()
        ids = sample.node
        counts = sample.num_sampled_nodes, sample.num_sampled_edges
        return self._rows(torch.from_numpy(ids)), edges, ids[: counts[0][0]], *counts

    def epoch(self, epoch: int) -> Iterator[Any]:
        order = np.random.default_rng(epoch).permutation(self._seeds)
        todo: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(THREADS) as threads:
            steps = -(-len(order) // BATCH)
            for number in range(steps + AHEAD):
                if number < steps:
                    seeds = order[number * BATCH : (number + 1) * BATCH]
                    todo.append(threads.submit(self._one, seeds, number, epoch))
                if number >= AHEAD:
                    x, edges, *others = todo.popleft().result()
                    yield x.to("cuda", non_blocking=True), edges.to("cuda", non_blocking=True), *others


def loaded(loader: featstore.Loader) -> Iterator[Any]:
    """An epoch of a loader of ours."""
    for batch in loader:
        x, edges = batch.x, batch.edge_index
        if not x.is_cuda:
            x, edges = x.to("cuda", non_blocking=True), edges.to("cuda", non_blocking=True)
        yield x, edges, batch.n_id[: batch.batch_size], batch.num_sampled_nodes, batch.num_sampled_edges


def contender(
    name: str, cache: str, training: Training, batches: Callable[[int], Iterator[Any]],
    before: Callable[[], None] = lambda: None,
) -> Contender:  # fmt: skip
    def run(number: int) -> Sample:
        before()
        cpu = cpu_seconds()
        rows, seconds = training.epoch(batches(number))
        return Sample(rows, seconds, cpu_seconds() - cpu)

    return Contender(name, "rows/s", cache, run)


class Mapped:
    """``np.memmap``, mapped for an epoch: what is mapped does not leave the page cache."""

    def __init__(self, files: GraphFiles) -> None:
        self.path = files.path("features")
        self._rows = torch.empty(0)
        self._sampled = Sampled(files, lambda ids: self._rows.index_select(0, ids).pin_memory())

    def epoch(self, number: int) -> Iterator[Any]:
        self._rows = torch.from_numpy(np.load(self.path, mmap_mode="c"))
        try:
            yield from self._sampled.epoch(number)
        finally:
            self._rows = torch.empty(0)


def contenders(files: GraphFiles, store: featstore.Store, opened: list[Any]) -> list[Contender]:
    """All of them; loaders are added to ``opened``."""
    training, mapped, size = Training(files), Mapped(files), files.nodes * files.row_bytes
    device = torch.from_numpy(files.load("features")).to("cuda")
    picked = Sampled(files, lambda ids: device[ids.to("cuda")])
    found = [
        contender(LIMIT, "in memory", training, picked.epoch),
        contender(MAPPED, "warm", training, mapped.epoch, lambda: warm_cache([mapped.path])),
    ]
    how: dict[str, Any] = {
        "seeds": files.load("train")[: BATCH * STEPS], "fanouts": FANOUTS, "batch_size": BATCH,
        "memory": size // 4 + BESIDE,
    }  # fmt: skip
    online: dict[str, Any] = {"mode": "online", "device": "cuda"}
    for name, options in {
        "rows copied by the loop": {"mode": "online", "tensors": True},
        "device=": online,
        "device=, a quarter of the rows there": online | {"device_memory": size // 4},
        "device=, all rows there": online | {"device_memory": size},
        "compiled, device=": {"mode": "compiled", "device": "cuda"},
    }.items():
        loader = store.loader(**how, **options)
        opened.append(loader)
        found.append(contender(name, "cold (direct I/O)", training, lambda _, of=loader: loaded(of)))
    note("once through each, for kernels to be compiled and caches of rows to fill")
    for one in found:
        one.run(0)
    return found


@click.command()
@shared_options(size="2GiB", quick_size="512MiB", rounds=3)
def main(settings: Settings) -> None:
    """An epoch with the model on an accelerator."""
    if not torch.cuda.is_available():
        raise click.ClickException("there is no accelerator here: torch.cuda.is_available() says so")
    nodes = settings.size_bytes // (4 * COLUMNS)
    files = generate(settings.workspace / "graph", nodes, nodes * EDGES_A_NODE, COLUMNS)
    features = np.load(files.path("features"), mmap_mode="r+")
    features[:, 0] = np.arange(nodes)
    features.flush()
    del features
    path = settings.workspace / "device.store"
    graph = (files.load("indptr"), files.load("indices"))
    opened: list[Any] = []
    with featstore.pack(path, files.path("features"), graph=graph, memory="1GiB") as store:
        try:
            series = measure_rounds(contenders(files, store, opened), settings.rounds)
            hits = opened[2].report().devices["features"]
        finally:
            for one in opened:
                one.close()
    report = Report("device", "An epoch on an accelerator", {
        "nodes": nodes, "row_bytes": files.row_bytes, "batch": BATCH, "fanouts": list(FANOUTS),
        "steps": STEPS, "hidden": HIDDEN, "rounds": settings.rounds,
        "accelerator": torch.cuda.get_device_name(), "torch": torch.__version__,
    }, settings.workspace)  # fmt: skip
    report.series = list(series.values())
    limit = series[LIMIT]
    for name, one in series.items():
        if name != LIMIT:
            report.claims.append(Claim(f"rows/s, {name}, over all on the device", paired_ratio(one, limit)))
    compiled = "compiled, device="
    compared = {"rows copied by the loop": "device=", "device=": compiled, MAPPED: compiled}
    for base, ours in compared.items():
        report.claims.append(Claim(f"rows/s, {ours} over {base}", paired_ratio(series[ours], series[base])))
    ratio = paired_ratio(series["device=, a quarter of the rows there"], series["device="])
    report.claims.append(Claim("rows/s, a quarter of the rows on the device over none", ratio))
    asked = hits.hits + hits.misses
    accelerator = torch.cuda.get_device_name()
    report.notes = [
        f"{accelerator}, torch {torch.__version__}. A quarter of the rows, kept on the device by S3-FIFO, "
        f"served {hits.hits / max(1, asked):.0%} of those asked for.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
