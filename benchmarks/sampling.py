"""Neighbour sampling from a stored graph, against the same sampler over the graph in memory.

    python benchmarks/sampling.py --dir /a/directory/on/the/ssd

A made-up graph of 16 edges a node with a few very long lists, node ids shuffled and rows in random order, so
that nothing on disk lies where it helps. All contenders make the same mini-batches, and each is compared with
the one made in memory. The stored graph is read with direct I/O, so nothing is cached but what the sampler
itself holds: in one contender no list at all, in the other about a tenth of all lists, of the most wanted
hubs. The share of neighbours that this tenth serves is reported, as are the reads.

The bound is the disk: what fio takes in the same round, at the same queue depth, for as many random reads of
4 KiB from the same files as a mini-batch has distinct pages that the cache has not. For small mini-batches
and large ones, asked for one at a time and by several threads at once.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
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
from peers import fio
from system import cpu_seconds

import featstore
from featstore.errors import BudgetError
from featstore.sampling.neighbors import NeighborSampler, SampledSubgraph
from featstore.sampling.stored import StoredSampler
from featstore.sampling.under_way import UNDER_WAY_MAX
from featstore.units import PAGE_BYTES

FANOUTS = (15, 10, 5)
SEEDS = 1024
SMALL_SEEDS = 64
BATCHES = 4  # a sample
DEPTH = 128
DISK_BAR = 1.25
EDGES_PER_NODE = 16
CACHE_SHARE = 0.1
HUBS = 0.05
TIER_SHARE = 0.78  # of what a budget is larger by, what comes to the cache


def skewed_graph(nodes: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """CSC of an undirected graph; one end of each edge follows a power law."""
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(nodes).astype(np.int32)
    half = nodes * EDGES_PER_NODE // 2
    popular = shuffled[np.minimum((nodes * rng.random(half) ** 2.2).astype(np.int64), nodes - 1)]
    any_node = rng.integers(0, nodes, half).astype(np.int32)
    targets, sources = np.concatenate([popular, any_node]), np.concatenate([any_node, popular])
    indptr = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(targets, minlength=nodes), out=indptr[1:])
    return indptr, sources[np.argsort(targets, kind="stable")]


def packed(path: Path, nodes: int) -> featstore.Store:
    if not path.exists():
        note("making the graph")
        permutation = np.random.default_rng(1).permutation(nodes)
        rows = np.zeros((nodes, 1), np.float32)
        graph = skewed_graph(nodes)
        featstore.pack(
            path, rows, graph=graph, order="permutation", permutation=permutation, hubs=HUBS, memory="1GiB"
        ).close()
    return featstore.open(path)


def seeds_of(nodes: int, number: int, seeds: int = SEEDS) -> NDArray[np.int64]:
    return np.random.default_rng([2, number]).choice(nodes, seeds, replace=False)


def smallest_memory(store: featstore.Store, batches: range, seeds: int = SEEDS) -> int:
    """The smallest budget in which these mini-batches can be made, without a cache."""
    memory_bytes = 1
    while True:
        try:
            with store.sampler(FANOUTS, memory=memory_bytes) as sampler:
                for number in batches:
                    sampler.sample(seeds_of(sampler.node_count, number, seeds), number)
            return memory_bytes
        except BudgetError as error:
            memory_bytes = error.needed_bytes


def in_memory(sampler: NeighborSampler) -> Contender:
    def run(number: int) -> Sample:
        edges, seconds, cpu = 0, 0.0, 0.0
        for index in range(number * BATCHES, (number + 1) * BATCHES):
            seeds = seeds_of(sampler.node_count, index)
            cpu_begin, begin = cpu_seconds(), time.perf_counter()
            batch = sampler.sample(seeds, index)
            seconds, cpu = seconds + time.perf_counter() - begin, cpu + cpu_seconds() - cpu_begin
            edges += len(batch.row)
        return Sample(edges, seconds, cpu, {"batch_seconds": seconds / BATCHES})

    return Contender("graph in memory", "edges/s", "arrays in memory", run)


def stored(name: str, sampler: StoredSampler, truth: NeighborSampler) -> Contender:
    def run(number: int) -> Sample:
        edges, seconds, cpu = 0, 0.0, 0.0
        before = sampler.stats()
        for index in range(number * BATCHES, (number + 1) * BATCHES):
            seeds = seeds_of(sampler.node_count, index)
            cpu_begin, begin = cpu_seconds(), time.perf_counter()
            batch = sampler.sample(seeds, index)
            seconds, cpu = seconds + time.perf_counter() - begin, cpu + cpu_seconds() - cpu_begin
            edges += len(batch.row)
            check(batch, truth.sample(seeds, index))
        after = sampler.stats()
        extra = {
            "batch_seconds": seconds / BATCHES,
            "batch_reads": (after.reads - before.reads) / BATCHES,
            "batch_bytes_read": (after.bytes_read - before.bytes_read) / BATCHES,
            "cached_share": (after.edges_cached - before.edges_cached)
            / (after.edges_asked - before.edges_asked),
        }
        return Sample(edges, seconds, cpu, extra)

    return Contender(name, "edges/s", "direct I/O", run)


class AtTheDisk:
    """Mini-batches of so many seeds from a sampler with a tenth of the lists, and fio beside it."""

    def __init__(
        self, store: featstore.Store, truth: NeighborSampler, settings: Settings, seeds: int
    ) -> None:
        self.store, self.truth, self.settings, self.seeds = store, truth, settings, seeds
        self.batches = BATCHES * UNDER_WAY_MAX * (1 if seeds == SEEDS else 4)
        least = smallest_memory(store, range(2), seeds)
        scratch = least - smallest_memory(store, range(1), 1)
        # of the cache, what several at once hold, too
        tenth_bytes = int(CACHE_SHARE * settings.size_bytes / TIER_SHARE)
        self.memory_bytes = least + tenth_bytes + (UNDER_WAY_MAX - 1) * scratch * 5 // 4

    def pages(self, sampler: StoredSampler, batch: SampledSubgraph) -> int:
        """Distinct pages of the neighbours that the sampler does not hold."""
        graph, cache = sampler.graph, sampler._cache
        held = np.zeros(sampler.node_count, bool)
        held[cache.index.rows] = True
        asking, map_ = batch.node[batch.col], graph.table.row_of_node()
        asking = asking if map_ is None else map_[asking]
        edges = batch.edge_id[(batch.edge_id >= len(cache.first)) & ~held[asking]]
        return len(np.unique(edges // (PAGE_BYTES // cache.first.itemsize)))

    def measure(self) -> list[tuple[str, list[dict[str, float]]]]:
        """What each way of asking came to, by round."""
        layout = self.store.table("features/sources")
        files = [self.store.path / layout.entry.chunk_path(k) for k in range(layout.layout.chunks)]
        found: dict[str, list[dict[str, float]]] = {"one at a time": [], "several at once": []}
        with self.store.sampler(FANOUTS, memory=self.memory_bytes, queue_depth=DEPTH) as sampler:
            self._run(sampler, UNDER_WAY_MAX, 10**6)
            for number in range(self.settings.rounds):
                rate = fio.random_read(files, self.settings.seconds, depth=DEPTH, seed=number + 1)
                for threads, name in ((1, "one at a time"), (UNDER_WAY_MAX, "several at once")):
                    made = self._run(sampler, threads, number * self.batches)
                    if not made["pages"]:
                        note(f"{self.seeds} seeds, {name}: all lists are in memory, nothing is read")
                        continue
                    made["disk_seconds"] = made["pages"] / rate.operations_per_second
                    made["ratio"] = made["seconds"] / made["disk_seconds"]
                    found[name].append(made)
                    note(f"{self.seeds} seeds, {name}: {made['ratio']:.2f} of the disk's time")
        return list(found.items())

    def _run(self, sampler: StoredSampler, threads: int, first: int) -> dict[str, float]:
        numbers = range(first, first + self.batches)
        seeds = [seeds_of(sampler.node_count, number, self.seeds) for number in numbers]
        before, begin = sampler.stats(), time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            made = list(pool.map(sampler.sample, seeds, numbers))
        seconds, after = time.perf_counter() - begin, sampler.stats()
        for one, number, batch in zip(seeds[:2], numbers, made, strict=False):
            check(batch, self.truth.sample(one, number))
        asked = after.edges_asked - before.edges_asked
        return {
            "seconds": seconds / self.batches, "edges": asked / self.batches,
            "pages": float(np.mean([self.pages(sampler, batch) for batch in made[:4]])),
            "bytes_read": (after.bytes_read - before.bytes_read) / self.batches,
            "cached_share": (after.edges_cached - before.edges_cached) / asked,
        }  # fmt: skip


def at_the_disk(store: featstore.Store, truth: NeighborSampler, settings: Settings, report: Report) -> None:
    """Small and large mini-batches beside fio."""
    rows = []
    for seeds in (SMALL_SEEDS, SEEDS):
        for name, rounds in AtTheDisk(store, truth, settings, seeds).measure():
            if not rounds:  # a graph so small that its scratch holds it
                continue
            middle = {key: float(np.median([one[key] for one in rounds])) for key in rounds[0]}
            rows.append([
                seeds, name, f"{middle['edges']:,.0f}", f"{middle['seconds'] * 1e3:.1f}",
                f"{middle['pages']:,.0f}", f"{middle['bytes_read'] / 1e6:,.0f}",
                f"{middle['cached_share']:.1%}", f"{middle['disk_seconds'] * 1e3:.1f}",
                f"{middle['ratio']:.2f}",
            ])  # fmt: skip
            bar = DISK_BAR if name == "several at once" else None
            text = f"{seeds} seeds, {name}: time of a mini-batch over fio's of its distinct pages"
            report.claims.append(Claim(text, middle["ratio"], bar, "<="))
    report.table("A mini-batch beside the disk, a tenth of the lists in memory", (
        "seeds", "asked for", "edges", "ms", "distinct pages", "MB read", "edges cached", "fio, ms", "ratio",
    ), rows)  # fmt: skip


def check(batch: SampledSubgraph, expected: SampledSubgraph) -> None:
    for part in ("node", "row", "col"):
        if not np.array_equal(getattr(batch, part), getattr(expected, part)):
            raise AssertionError(f"the mini-batch differs in {part}")


def figures(name: str, sampler: StoredSampler | None, samples: list[Sample]) -> list[Any]:
    """A row of the table: means over the rounds."""
    mean = {key: float(np.mean([s.extra[key] for s in samples])) for key in samples[0].extra}
    edges = sum(s.amount for s in samples) / len(samples) / BATCHES
    row = [name, f"{edges:,.0f}", f"{mean['batch_seconds'] * 1e3:.0f}"]
    if sampler is None:
        return [*row, "", "", "", ""]
    cache_mib = sampler.memory()["neighbour_cache"] / 2**20
    return [
        *row, f"{mean['batch_reads']:,.0f}", f"{mean['batch_bytes_read'] / 1e6:,.0f}", f"{cache_mib:,.0f}",
        f"{mean['cached_share']:.1%}",
    ]  # fmt: skip


@click.command()
@shared_options(size="256MiB", quick_size="16MiB", rounds=5)
def main(settings: Settings) -> None:
    """Mini-batches of three hops from a stored graph, against the graph in memory."""
    edges = settings.size_bytes // 4
    nodes = edges // EDGES_PER_NODE
    with packed(settings.workspace / f"graph{nodes}.store", nodes) as store:
        truth = NeighborSampler(*store.graphs["features"].csc(), FANOUTS)
        memory_bytes = smallest_memory(store, range((settings.rounds + 1) * BATCHES))
        larger_bytes = memory_bytes + int(CACHE_SHARE * settings.size_bytes / TIER_SHARE)
        with (
            store.sampler(FANOUTS, memory=memory_bytes) as plain,
            store.sampler(FANOUTS, memory=larger_bytes) as cached,
        ):
            samplers = {
                "graph in memory": None, "stored graph, no cache": plain,
                f"stored graph, {CACHE_SHARE:.0%} cached": cached,
            }  # fmt: skip
            contenders = [
                in_memory(truth) if one is None else stored(name, one, truth)
                for name, one in samplers.items()
            ]
            for contender in contenders:
                contender.run(settings.rounds)
            series = measure_rounds(contenders, settings.rounds)
            rows = [figures(name, samplers[name], one.samples) for name, one in series.items()]
            engine = plain.engine
        report = Report("sampling", "Neighbour sampling from a stored graph", {
            "nodes": nodes, "edges": edges, "topology_bytes": settings.size_bytes, "fanouts": list(FANOUTS),
            "seeds": SEEDS, "memory_bytes": memory_bytes, "memory_bytes_cached": larger_bytes,
            "rounds": settings.rounds, "engine": engine,
        }, settings.workspace)  # fmt: skip
        if fio.available():
            at_the_disk(store, truth, settings, report)
    report.series = list(series.values())
    columns = ("sampler", "edges a mini-batch", "ms", "reads", "MB read", "cache MiB", "edges cached")
    report.table("A mini-batch", columns, rows)
    for name in list(samplers)[1:]:
        ratio = 1 / paired_ratio(series[name], series["graph in memory"])
        report.claims.append(Claim(f"time of a mini-batch: {name} over graph in memory", ratio))
    report.notes = [
        f"{SEEDS} seeds, fan-outs {list(FANOUTS)}; every mini-batch was equal to the one made in "
        f"memory. The sampler's budget was {memory_bytes / 2**20:,.0f} MiB without a cache, "
        f"{larger_bytes / 2**20:,.0f} MiB with; in memory the graph takes "
        f"{(settings.size_bytes + 8 * nodes) / 2**20:,.0f} MiB.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
