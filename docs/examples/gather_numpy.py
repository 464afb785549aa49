"""Gather feature rows with NumPy alone: pack from an iterator, read, submit, plan, several tables. Runs in
seconds."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import featstore

NODES, WIDTH, AUTHORS = 50_000, 64, 10_000


def blocks() -> Iterator[np.ndarray]:
    """Feature rows as they might come out of an encoder: block by block, never all in memory.

    Row k of what all blocks hold together belongs to node k.
    """
    for first in range(0, NODES, 8192):
        node = np.arange(first, min(first + 8192, NODES), dtype=np.float32)
        yield np.repeat(node[:, None], WIDTH, axis=1)  # so that each row says whose it is


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    # A graph as CSC arrays: the neighbours of node v are indices[indptr[v]:indptr[v + 1]].
    indptr = np.arange(0, 8 * NODES + 1, 8)
    indices = rng.integers(0, NODES, 8 * NODES)
    authors = np.arange(AUTHORS * 3, dtype=np.float16).reshape(AUTHORS, 3)

    # Packing is done once. `memory` bounds all that it holds, whatever the size of the features. order="ldg"
    # puts neighbours close together on disk; ids stay what they are, rows are found through a map.
    store = featstore.pack(
        folder / "citations.fs",
        {"papers": blocks(), "authors": authors},
        graph={"papers": (indptr, indices)},
        order={"papers": "ldg"},
        arrays={"year": rng.integers(1990, 2025, NODES)},
        memory="256MiB",
    )

    # A reader has one budget for all it holds. static="degree" spends what is left of it on the rows of the
    # nodes with most neighbours; 8 MiB are few here, so that some rows must come from the disk.
    with store, store.reader(memory="8MiB", static="degree") as reader:
        # A reader of several tables takes and gives dicts, and reads all tables in one go.
        papers = rng.integers(0, NODES, 2000)  # any order, duplicates too
        rows = reader.read({"papers": papers, "authors": [0, 1, 2]})
        assert (rows["papers"][:, 0] == papers).all()
        assert (rows["authors"] == authors[:3]).all()

        # submit returns at once: the disk works while you compute. A buffer of your own can be used again and
        # again; it belongs to the request until result() has returned.
        buffer = np.empty((len(papers), WIDTH), np.float32)
        request = reader.submit({"papers": papers}, out={"papers": buffer})
        expected = papers * float(WIDTH)  # compute something meanwhile
        request.result()
        assert np.array_equal(buffer.sum(axis=1), expected)

        # plan says what a read would do, and reads nothing.
        plan = reader.plan({"papers": papers})
        print(plan)
        print(
            f"{plan.hits.get('static', 0):,} of {len(papers):,} rows are in memory, the rest takes "
            f"{plan.reads:,} reads"
        )

        # stats says what the reads did, memory where the budget went.
        stats = reader.stats()
        print(
            f"{stats.reads:,} reads, {stats.bytes_read:,} bytes, {stats.hit_rate:.0%} of the rows from memory"
        )
        print({use: f"{size:,} B" for use, size in reader.memory().items()})

    # Small arrays that travel with the store, in the order of node ids.
    with featstore.open(folder / "citations.fs") as store:
        print("years of the first papers:", store.arrays["year"][:5])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
