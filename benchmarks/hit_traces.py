"""What ``hit_rates.py`` replays: graphs, and the rows of their mini-batches under three orders of the
training nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
from graphs import generate
from harness import note
from numba import njit
from numpy.typing import NDArray

from featstore.tiers.slots.layout import NEVER

ORDERS = ("random", "proximity", "partition")
EPOCHS = 3  # the first one is not counted
FANOUTS = (10, 5)
_SEED = 1


@dataclass(frozen=True)
class Plan:
    """A graph and its mini-batches. ``file``: empty for the generated one. ``batch_size``: small, so that 1 %
    of the nodes holds some."""

    title: str
    file: str
    batch_size: int
    partitions: int
    method: str


PLANS = {
    "arxiv": Plan("ogbn_arxiv_tape40", "ogbn_arxiv_tape40", 16, 512, "METIS"),
    "physics": Plan("coauthor_physics", "coauthor_physics", 4, 64, "METIS"),
    "generated": Plan("generated", "", 128, 1024, "LDG"),
}
GENERATED_DEGREE, TRAIN_SHARE = 16, 0.05


@dataclass(frozen=True)
class Graph:
    """CSC, labels and training nodes."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    labels: NDArray[np.int64]
    train: NDArray[np.int64]

    @property
    def nodes(self) -> int:
        return len(self.indptr) - 1


@dataclass(frozen=True)
class Trace:
    """Mini-batches of all epochs.

    ``rows``: of all of them. ``offsets``: where in ``rows`` each mini-batch begins, and the end. ``epochs``:
    the first mini-batch of each epoch, and the end.
    """

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    epochs: NDArray[np.int64]
    sequences: int

    @property
    def largest_rows(self) -> int:
        return int(np.diff(self.offsets).max())

    def part(self, first: int, last: int) -> NDArray[np.int64]:
        """Offsets of the mini-batches of the epochs from ``first`` up to but not including ``last``."""
        return self.offsets[self.epochs[first] : self.epochs[last] + 1]

    def batches(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        part = self.part(epoch, epoch + 1)
        for begin, end in pairwise(part.tolist()):
            yield self.rows[begin:end]


def load(plan: Plan, data: Path | None, workspace: Path, generated_nodes: int) -> Graph:
    """The graph of a plan, from the folder ``data``, or generated."""
    if not plan.file:
        files = generate(
            workspace / f"hits{generated_nodes}",
            generated_nodes,
            GENERATED_DEGREE * generated_nodes,
            1,
            TRAIN_SHARE,
        )
        labels = files.load("labels").astype(np.int64)
        return Graph(files.load("indptr"), files.load("indices"), labels, files.load("train"))
    path = Path("missing") if data is None else data / f"{plan.file}.npz"
    if not path.exists():
        raise click.ClickException(
            f"{plan.file}.npz is wanted: pass the folder that holds it as --data, or choose --sets"
        )
    file = np.load(path)
    return Graph(
        file["indptr"], file["indices"], file["labels"].astype(np.int64), file["train_idx"].astype(np.int64)
    )


def orders(
    graph: Graph, plan: Plan
) -> dict[str, Callable[[], tuple[Callable[[int], NDArray[np.int64]], int]]]:
    """For each order what makes it: a function from the epoch to the training nodes, and the number of
    sequences."""
    import featstore
    from featstore.order.ldg import ldg_partition
    from featstore.order.metis import metis_partition

    def given(order: Any) -> tuple[Callable[[int], NDArray[np.int64]], int]:
        def nodes(epoch: int) -> NDArray[np.int64]:
            order.set_epoch(epoch)
            return np.asarray(order.nodes())

        return nodes, order.sequences

    shared: dict[str, Any] = {"labels": graph.labels, "batch_size": plan.batch_size, "seed": _SEED}

    def partition() -> tuple[Callable[[int], NDArray[np.int64]], int]:
        method = metis_partition if plan.method == "METIS" else ldg_partition
        return given(
            featstore.PartitionOrder(method(graph, plan.partitions, seed=_SEED), graph.train, **shared)
        )

    return {
        "random": lambda: (lambda epoch: np.random.default_rng([_SEED, epoch]).permutation(graph.train), 0),
        "proximity": lambda: given(
            featstore.ProximityOrder((graph.indptr, graph.indices), graph.train, **shared)
        ),
        "partition": partition,
    }


def record(graph: Graph, plan: Plan, order: str) -> Trace:
    """Sample all epochs in an order."""
    from featstore.sampling.neighbors import NeighborSampler

    sampler = NeighborSampler(graph.indptr, graph.indices, FANOUTS, _SEED)
    nodes, sequences = orders(graph, plan)[order]()
    found: list[NDArray[np.int64]] = []
    epochs = [0]
    for epoch in range(EPOCHS):
        train = nodes(epoch)
        for number, low in enumerate(range(0, len(train), plan.batch_size)):
            found.append(sampler.sample(train[low : low + plan.batch_size], number, epoch=epoch).node)
        epochs.append(len(found))
    offsets = np.zeros(len(found) + 1, np.int64)
    np.cumsum([len(rows) for rows in found], out=offsets[1:])
    trace = Trace(np.concatenate(found), offsets, np.array(epochs), sequences)
    note(
        f"{plan.title}, {order}: {sequences} sequences, {len(trace.rows):,} rows, at most "
        f"{trace.largest_rows:,} a mini-batch"
    )
    return trace


@njit(cache=True, nogil=True)
def _next_uses(rows: Any, offsets: Any, later: Any, found: Any) -> None:
    for batch in range(len(offsets) - 2, -1, -1):
        for place in range(offsets[batch], offsets[batch + 1]):
            found[place] = later[rows[place]]
            later[rows[place]] = batch


def next_uses(trace: Trace, nodes: int) -> NDArray[np.int32]:
    """The mini-batch that uses each row of the trace next, or NEVER."""
    found = np.empty(len(trace.rows), np.int32)
    _next_uses(trace.rows, trace.offsets, np.full(nodes, NEVER, np.int32), found)
    return found
