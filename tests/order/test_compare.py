"""Partitioners side by side: the stored graph read in runs gives the scores that the graph in memory
gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import featstore
from featstore.errors import IdError, SourceError
from featstore.order.scores import score_parts
from featstore.packing.compare_orders import STORED, StoredLists, compare_orders

NODES, PARTS = 600, 6


@pytest.fixture
def store(tmp_path: Path) -> featstore.Store:
    rng = np.random.default_rng(0)
    community = np.arange(NODES) // 50
    indices = (community[:, None] * 50 + rng.integers(0, 50, (NODES, 6))).astype(np.int32)
    indices[:, 5] = rng.integers(0, NODES, NODES)
    indptr = np.arange(0, 6 * NODES + 1, 6)
    train = np.sort(rng.choice(NODES, 90, replace=False))
    return featstore.pack(
        tmp_path / "s", np.zeros((NODES, 4), np.float32), graph=(indptr, np.sort(indices, 1).ravel()),
        arrays={"train": train}, order="ldg", partitions=PARTS, memory="64MiB",
    )  # fmt: skip


def test_scores_are_those_of_the_graph_in_memory(store: featstore.Store) -> None:
    found = {c.method: c for c in compare_orders(store, train="train")}
    assert list(found) == [STORED, "metis", "multilevel", "ldg", "bfs"]
    table = store.tables["features"]
    indptr, indices = store.graphs["features"].csc()
    part = (np.searchsorted(table.partition_offsets, table.row_of_node(), side="right") - 1).astype(np.int32)
    mask = np.zeros(NODES, bool)
    mask[store.arrays["train"]] = True
    truth = score_parts(SimpleNamespace(indptr=indptr, indices=indices), part, PARTS, train=mask)
    stored = found[STORED].scores
    assert stored is not None
    for name in ("edge_cut", "node_balance", "edge_balance", "train_balance"):
        assert getattr(stored, name) == pytest.approx(getattr(truth, name))
    assert stored.edge_cut == pytest.approx(table.entry.order.parameters["edge_cut"])
    for one in found.values():
        assert one.scores is not None
        assert one.scores.parts == PARTS
    assert found["bfs"].scores.train_balance <= 1.2


def test_what_does_not_fit_says_so(store: featstore.Store) -> None:
    found = {c.method: c for c in compare_orders(store, memory_bytes=1 << 20)}
    assert found["metis"].scores is None
    assert "needs" in found["metis"].because
    assert found[STORED].scores is not None


def test_it_needs_a_graph(tmp_path: Path, store: featstore.Store) -> None:
    plain = featstore.pack(tmp_path / "plain", np.zeros((10, 2), np.float32))
    with pytest.raises(SourceError, match="graph"):
        compare_orders(plain)
    with pytest.raises(SourceError, match="graph"):
        compare_orders(store, graph="other")


def test_stored_lists_slice_as_an_array_does(store: featstore.Store) -> None:
    table = store.table("features/sources")
    with store.reader(tables=[table.name], memory="8MiB", static=None) as reader:
        lists = StoredLists(reader, table.name, table.rows, table.dtype)
        truth = reader.read_runs([(0, table.rows)])
        for part in (slice(None), slice(7, 1000), slice(5, 5), slice(-10, None), slice(3000, 99999)):
            np.testing.assert_array_equal(lists[part], truth[part])
        assert lists[17] == truth[17]
        np.testing.assert_array_equal(np.asarray(lists), truth)
        with pytest.raises(IndexError):
            lists[::2]


def test_pack_spreads_training_nodes(tmp_path: Path, store: featstore.Store) -> None:
    indptr, indices = store.graphs["features"].csc()
    train = store.arrays["train"]
    made = featstore.pack(
        tmp_path / "b", np.zeros((NODES, 4), np.float32), graph=(indptr, indices), order="bfs",
        partitions=PARTS, memory="64MiB", arrays={"train": train}, train="train",
    )  # fmt: skip
    table = made.tables["features"]
    part = np.searchsorted(table.partition_offsets, table.row_of_node()[train], side="right") - 1
    assert np.bincount(part, minlength=PARTS).max() <= 1.25 * len(train) / PARTS
    with pytest.raises(SourceError, match="there is no array"):
        featstore.pack(tmp_path / "c", np.zeros((4, 1)), train="nothing")
    with pytest.raises(IdError, match="out of range"):
        featstore.pack(
            tmp_path / "d",
            np.zeros((NODES, 1)),
            graph=(indptr, indices),
            order="bfs",
            partitions=2,
            train=[NODES],
        )
