"""A split straight from features and graph: what packing and then splitting give, without a store of all rows
in between."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_split import DTYPES, graph_of, rows_of, tree, values

import featstore
from featstore.errors import ArgumentError, IncompleteStoreError, SourceError, StoreExistsError
from featstore.packing import permute
from featstore.storage.disk import Disk

sys.path.append(str(Path(__file__).parents[1] / "crash"))
from disks import FailingDisk, Lost

NODES = 400


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "fsync", lambda *_: None)
    monkeypatch.setattr(Disk, "fsync_dir", lambda *_: None)
    warnings.simplefilter("ignore", featstore.errors.FeatstoreWarning)  # a graph of no communities


def inputs(kind: int) -> dict[str, Any]:
    tables = {"paper": values(NODES, 9, DTYPES[kind], 1), "author": values(60, 1, DTYPES[4], 2)}
    return {
        "features": tables, "graph": {"paper": graph_of(NODES, 5, kind)}, "hubs": 0.05,
        "arrays": {"train": np.arange(0, NODES, 3)}, "order": {"paper": "ldg", "author": "given"},
        "partitions": {"paper": 16},
    }  # fmt: skip


def same_store(one: featstore.Store, two: featstore.Store) -> None:
    """All that is read of two stores, and all that they say of themselves but whose they are."""
    assert list(one.tables) == list(two.tables)
    for name, table in one.tables.items():
        other = two.tables[name]
        assert table.entry.statistics == other.entry.statistics, name
        assert rows_of(one, name).tobytes() == rows_of(two, name).tobytes(), name
        for what in ("row_of_node", "node_of_row", "rows_by_degree"):
            assert np.array_equal(getattr(table, what)(), getattr(other, what)())
        assert np.array_equal(table.partition_offsets, other.partition_offsets)
    assert set(one.arrays) == set(two.arrays)
    for name in one.arrays:
        assert np.array_equal(one.arrays[name], two.arrays[name]), name
    for name, graph in one.graphs.items():
        for left, right in zip(graph.csc(), two.graphs[name].csc(), strict=True):
            assert np.array_equal(left, right)
    mine, its = one.manifest.family, two.manifest.family
    assert mine is not None
    assert its is not None
    assert (mine.first_rows, mine.remote_edges) == (its.first_rows, its.remote_edges)
    # every file but the manifest, which says whose part it is
    left, right = ({p: data for p, data in tree(s.path).items() if p != "featstore.json"} for s in (one, two))
    assert left == right


@pytest.mark.parametrize(("kind", "spills"), [(0, False), (1, True)])
def test_parts_are_those_of_a_pack_and_a_split(
    tmp_path: Path, kind: int, spills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File by file; the topology's, too. Of the order nothing is left."""
    given = inputs(kind)
    options: dict[str, Any] = {"train": "train", "halo_disk": "1x", "split_topology": spills}
    featstore.pack(tmp_path / "s", **given).close()
    featstore.split(tmp_path / "s", 3, tmp_path / "a", **options)
    if spills:
        monkeypatch.setattr(permute, "fits_in_memory", lambda _: False)
        monkeypatch.setattr(permute, "SOURCE_BLOCK_BYTES", 512)
    found = featstore.split_features(hosts=3, out=tmp_path / "b", **given, **options)
    assert found == tmp_path / "b"
    for name in ("topology", "host-0", "host-1", "host-2"):
        assert featstore.verify(tmp_path / "b" / name).ok
        with featstore.open(tmp_path / "a" / name) as one, featstore.open(tmp_path / "b" / name) as two:
            same_store(one, two)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "s"]


def test_partitions_are_as_many_as_of_a_pack(tmp_path: Path) -> None:
    """By default they follow from the size of rows, of which the order knows nothing."""
    x = np.zeros((2000, 300), np.float32)
    given = {"features": x, "graph": graph_of(2000, 3, 0), "order": "ldg"}
    with featstore.pack(tmp_path / "s", **given) as store:
        wanted = store.tables["features"].partition_offsets
    featstore.split_features(hosts=1, out=tmp_path / "b", **given)
    with featstore.open(tmp_path / "b/host-0") as part:
        assert np.array_equal(part.tables["features"].partition_offsets, wanted)
    assert len(wanted) > 3


def test_one_that_is_interrupted_goes_on(tmp_path: Path) -> None:
    """Wherever it was stopped, with the same bytes in the end."""
    given, out = inputs(0), tmp_path / "out"
    featstore.split_features(hosts=2, out=tmp_path / "whole", **given)
    wanted, at, finished, stopped = tree(tmp_path / "whole"), 40, False, set()
    while not finished:
        out = tmp_path / f"out{at}"
        try:
            featstore.split_features(hosts=2, out=out, disk=FailingDisk(at), **given)
            finished = True
        except Lost:
            ends = [n for n in ("topology", "host-0", "host-1") if (out / n / "featstore.json").exists()]
            stopped.add(len(ends))
            try:
                featstore.split_features(hosts=2, out=out, resume=True, **given)
            except (IncompleteStoreError, StoreExistsError):  # nothing was kept, or all had been done
                if len(ends) < 3:
                    featstore.split_features(hosts=2, out=out, **given)
        found = {path: data for path, data in tree(out).items() if ".journal" not in path}
        assert found == wanted, at
        at += 211
    assert stopped >= {0, 1, 2}


def test_another_input_is_not_gone_on_with(tmp_path: Path) -> None:
    given, out = inputs(0), tmp_path / "out"

    def stop(progress: Any) -> None:
        if progress.table == "host-1: paper":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        featstore.split_features(hosts=2, out=out, progress=stop, **given)
    assert (tmp_path / "out.order/featstore.json").exists()
    other = given | {"features": given["features"] | {"paper": given["features"]["paper"] + 1}}
    with pytest.raises(StoreExistsError, match="another split"):
        featstore.split_features(hosts=2, out=out, resume=True, **other)
    with pytest.raises(StoreExistsError, match="another split"):
        featstore.split_features(hosts=2, out=out, resume=True, **given | {"partitions": {"paper": 8}})
    with pytest.raises(StoreExistsError):
        featstore.split_features(hosts=2, out=out, **given)
    featstore.split_features(hosts=2, out=out, resume=True, **given)
    assert not (tmp_path / "out.order").exists()
    with pytest.raises(IncompleteStoreError, match="completed"):
        featstore.split_features(hosts=2, out=out, resume=True, **given)
    featstore.split_features(hosts=2, out=out, overwrite=True, **other)
    with featstore.open(out / "topology") as topology, featstore.open(out / "host-0") as part:
        owned = rows_of(topology, "paper") == 0
        assert rows_of(part, "paper").tobytes() == other["features"]["paper"][owned].tobytes()


def test_what_cannot_be_split_straight_is_refused(tmp_path: Path) -> None:
    given, out = inputs(0), tmp_path / "out"
    with pytest.raises(SourceError, match="cannot be split straight"):
        featstore.split_features(iter([np.zeros((3, 2))]), 1, out)
    with pytest.raises(ArgumentError, match="order='permutation' is of a pack"):
        featstore.split_features(given["features"], 1, out, order="permutation")
    featstore.pack(tmp_path / "out.order", np.ones((5, 2), np.float32)).close()
    before = tree(tmp_path / "out.order")
    for option in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(StoreExistsError, match="holds another store, which is left alone"):
            featstore.split_features(hosts=2, out=out, **given, **option)
    assert tree(tmp_path / "out.order") == before
