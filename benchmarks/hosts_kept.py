"""Which rows hosts ask others for, by what each keeps, counted on recorded mini-batches: of ``hosts.py``."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import featstore
from featstore.engine.request import answered
from featstore.hosts.ahead import Ahead, AheadTier, Upcoming
from featstore.hosts.halo import Halo
from featstore.hosts.massivegnn import HaloScores
from featstore.hosts.window import STEPS_MAX
from featstore.sampling.batches import RankedBatches, open_sampler
from featstore.testing import ArraySource

FANOUTS = (10, 5)
COLUMNS = 128
SHARES = (0.05, 0.15, 0.25, 0.35, 0.5)
DELTAS, GAMMAS = (16, 32, 64, 128, 512, 1024), (0.95, 0.995, 0.9995)
NEVER = 2**20  # mini-batches from one replacement to the next: there is none
Counts = NDArray[np.int64]  # rows asked for, by mini-batch


class Recorded(NamedTuple):
    """Of a host: its halo, and of each rank the remote rows of each mini-batch, ascending."""

    halo: Halo
    streams: list[list[NDArray[np.int64]]]

    @property
    def asked(self) -> Counts:
        """Of all ranks, where nothing is kept."""
        return sum_of([np.array([len(one) for one in stream]) for stream in self.streams])

    def slots(self, share: float) -> int:
        return int(share * len(self.halo.ids))


def sum_of(counts: list[Counts]) -> Counts:
    """By mini-batch, of several."""
    return np.sum(counts, axis=0, dtype=np.int64)


def record(
    store: featstore.Store, parts: Path, hosts: int, ranks: int, batch: int, epochs: int
) -> list[Recorded]:
    """What each host's mini-batches want of others."""
    with featstore.open(parts / "topology") as topology, topology.reader(memory="256MiB") as reader:
        owner = reader.read(np.arange(topology.table("features").rows))
    degrees = np.diff(store.graphs["features"].csc()[0])
    sampler = open_sampler(store, FANOUTS, memory="4GiB", in_memory=True)
    made = []
    for host in range(hosts):
        with featstore.open(parts / f"host-{host}") as part:
            ids = part.arrays["features.halo_ids"].astype(np.int64)
        own = range(host * ranks, (host + 1) * ranks)
        batches = RankedBatches(
            sampler, store.arrays["train"], batch, ranks=tuple(own), world_size=hosts * ranks, owner=owner,
            hosts=hosts,
        )  # fmt: skip
        streams: list[list[NDArray[np.int64]]] = [[] for _ in own]
        for epoch in range(epochs):
            batches.set_epoch(epoch)
            for index in range(len(batches)):
                nodes = batches[index].node
                streams[index % ranks].append(np.sort(nodes[owner[nodes] != host]))
        made.append(Recorded(Halo(ids, degrees[ids]), streams))
    return made


def of_massivegnn(one: Recorded, nodes: int, share: float, gamma: float, delta: int) -> Counts:
    """Rows that a host asks for: a buffer for each rank, together of so large a share of the halo. Those that
    fill it are of the first mini-batch."""
    counts = []
    for stream in one.streams:
        scores = HaloScores(one.halo, nodes, share / len(one.streams), gamma, delta)
        asked = np.zeros(len(stream), np.int64)
        asked[0] = scores.slots
        for step, wanted in enumerate(stream):
            in_halo, found = scores.look(wanted)
            _, coming = scores.score(in_halo, found)
            extra = np.setdiff1d(one.halo.ids[coming], wanted[found < 0], assume_unique=True)
            asked[step] += int((found < 0).sum()) + len(extra)
        counts.append(asked)
    return sum_of(counts)


def steps_of(one: Recorded) -> list[NDArray[np.int64]]:
    """What all ranks of a host want in each step."""
    return [np.unique(np.concatenate(step)) for step in zip(*one.streams, strict=True)]


def of_ahead(one: Recorded, store: featstore.Store, slots: int) -> Counts:
    """Rows that a host asks for which looks ahead, in as many bytes as MassiveGNN takes for so many rows."""
    steps, table = steps_of(one), store.table("features")
    memory = slots * table.row_bytes + HaloScores.bytes_for(table.rows, len(one.halo.ids), slots)
    disk = ArraySource(store, {"features": np.zeros((table.rows, COLUMNS), np.float32)})
    asked, tier = np.zeros(len(steps), np.int64), (ahead := Ahead([table], memory)).over(disk, memory)
    try:
        for step, wanted in enumerate(steps):
            _look_ahead(ahead.coming, steps, step)
            ahead.begin(step)
            before = disk.asked
            tier.submit({"features": wanted}, out=None).result()
            asked[step] = disk.asked - before
    finally:
        tier.close()
    return asked


def _look_ahead(coming: Upcoming, steps: list[NDArray[np.int64]], step: int) -> None:
    while coming.wants(step):
        coming.add(steps[coming.added] if coming.added < len(steps) else steps[0][:0])


class _Empty(ArraySource):
    """Rows come at once, and are whatever is in the memory that they come into."""

    def submit(self, ids: Any, *, out: Any, at: Any = None) -> Any:
        return answered(out)


def seconds_of_ahead(
    one: Recorded, narrow: featstore.Store, slots: int, rng: np.random.Generator
) -> tuple[float, float, int]:
    """What it takes a host to look ahead; what it takes with finding rows that stay, and choosing among those
    that come; and for how many ids, of two windows of steps, in no order. Rows are of 4 bytes: nothing is
    said of moving larger ones."""
    recorded = [rng.permutation(step) for step in steps_of(one)]
    steps = [recorded[k % len(recorded)] for k in range(5 * STEPS_MAX)]
    table, most = narrow.table("features"), max(map(len, steps))
    coming = Upcoming(STEPS_MAX * most, [slots], [0, table.rows])
    tier = AheadTier(_Empty(narrow, {}), coming, {"features": np.empty(slots * table.row_bytes, np.uint8)})
    rows, begin, looked = np.empty((most, 1), np.float32), 0.0, 0.0
    try:
        for step, wanted in enumerate(steps[: 3 * STEPS_MAX]):
            if step == STEPS_MAX:  # slots are full
                begin, looked = time.perf_counter(), 0.0
            before = time.perf_counter()
            _look_ahead(coming, steps, step)
            coming.begin(step)
            looked += time.perf_counter() - before
            tier.submit({"features": wanted}, out={"features": rows}).result()
        return looked, time.perf_counter() - begin, sum(map(len, steps[STEPS_MAX : 3 * STEPS_MAX]))
    finally:
        tier.close()


def of_min(one: Recorded, nodes: int, slots: int) -> Counts:
    """Rows that a host asks for which knows all that will be wanted: of what is there, what is wanted soonest
    stays."""
    steps = steps_of(one)
    never = len(steps)
    following, uses = np.full(nodes, never, np.int64), []
    for step in range(len(steps) - 1, -1, -1):
        uses.append(following[steps[step]].copy())
        following[steps[step]] = step
    due, kept = np.full(nodes, never, np.int64), np.empty(0, np.int64)
    there, asked = np.zeros(nodes, bool), np.zeros(len(steps), np.int64)
    for step, (wanted, following_uses) in enumerate(zip(steps, reversed(uses), strict=True)):
        new = wanted[~there[wanted]]
        asked[step] = len(new)
        due[wanted] = following_uses
        both = np.concatenate([kept, new])
        there[both] = False
        both = both[due[both] < never]
        if len(both) > slots:
            both = both[np.argpartition(due[both], slots)[:slots]]
        kept = both
        there[kept] = True
    return asked


class Kept(NamedTuple):
    """Rows asked of other hosts, of all hosts together, by mini-batch (``counts``, by who keeps them), and
    over those without a buffer; ``grid`` of MassiveGNN by delta and gamma."""

    grid: dict[tuple[int, float], float]
    counts: dict[str, Counts]

    def share(self, name: str) -> float:
        return float(self.counts[name].sum() / self.counts["no buffer"].sum())

    @property
    def best_of(self) -> tuple[int, float]:
        return min(self.grid, key=lambda key: self.grid[key])

    @property
    def evicts(self) -> bool:
        """Whether the best of the grid asks for other rows than no eviction does."""
        return not np.array_equal(self.counts["best"], self.counts["no eviction"])

    def hit_rates(self, name: str, parts: int = 10) -> list[float]:
        """Of each tenth of the mini-batches: the share of the wanted rows that was not asked for."""
        asked, wanted = self.counts[name], self.counts["no buffer"]
        tenths = zip(np.array_split(asked, parts), np.array_split(wanted, parts), strict=True)
        return [float(1 - one.sum() / of.sum()) for one, of in tenths]


def kept(recorded: list[Recorded], store: featstore.Store, share: float) -> Kept:
    nodes = store.table("features").rows

    def massive(delta: int, gamma: float) -> Counts:
        return sum_of([of_massivegnn(one, nodes, share, gamma, delta) for one in recorded])

    of_grid = {key: massive(*key) for key in product(DELTAS, GAMMAS)}
    best = min(of_grid, key=lambda key: int(of_grid[key].sum()))
    none = sum_of([one.asked for one in recorded])
    counts = {
        "no buffer": none,
        "no eviction": massive(NEVER, 0.95),
        "best": of_grid[best],
        "ahead": sum_of([of_ahead(one, store, one.slots(share)) for one in recorded]),
        "least": sum_of([of_min(one, nodes, one.slots(share)) for one in recorded]),
    }
    return Kept({key: float(one.sum() / none.sum()) for key, one in of_grid.items()}, counts)


_at_hand: Any = None  # what forked processes work on: recorded mini-batches, and where the store is


def _kept_here(share: float) -> Kept:
    recorded, path = _at_hand
    with featstore.open(path) as store:
        return kept(recorded, store, share)


def kept_by_share(recorded: list[Recorded], path: Path) -> dict[float, Kept]:
    """For each of :data:`SHARES`, in as many processes as there are cores."""
    global _at_hand
    _at_hand = recorded, path
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(len(SHARES), os.cpu_count() or 1), forked) as pool:
        largest_first = sorted(SHARES, reverse=True)
        found = dict(zip(largest_first, pool.map(_kept_here, largest_first), strict=True))
    _at_hand = None
    return {share: found[share] for share in SHARES}
