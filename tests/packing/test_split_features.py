"""A split straight from features and graph: what packing and then splitting give, without a store of all rows
in between."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_split import DTYPES, graph_of, rows_of, tree, values

import featstore
from featstore.errors import (
    ArgumentError,
    FeatstoreError,
    IncompleteStoreError,
    SourceError,
    StoreExistsError,
    StoreLockedError,
    UnknownNameError,
)
from featstore.packing import permute, spill, spill_files
from featstore.packing.sources.base import to_native
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


def typed_inputs(order: Any = "ldg") -> dict[str, Any]:
    """Papers that cite papers, by numbers of edges that have rows, weights and times; authors; and fields
    without features."""
    random, fields, cited = np.random.default_rng(3), 30, 1000
    edges = random.integers(0, NODES, (2, cited))
    return {
        "features": {
            "paper": values(NODES, 9, DTYPES[0], 1), "author": values(80, 3, DTYPES[2], 2), "field": fields,
            "paper__cites__paper": values(cited, 2, DTYPES[0], 3),
        },
        "graph": {
            ("paper", "cites", "paper"): edges,
            ("author", "writes", "paper"): np.stack(
                [random.integers(0, 80, 600), random.integers(0, NODES, 600)]
            ),
            "paper__of__field": np.stack([np.arange(NODES), random.integers(0, fields, NODES)]),
        },
        "edge_weights": {("paper", "cites", "paper"): random.random(cited, np.float32)},
        "edge_times": {"paper__cites__paper": random.integers(0, 99, cited)},
        "arrays": {"paper.train": np.arange(0, NODES, 3)}, "order": order, "hubs": 0.05,
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


@pytest.mark.parametrize(
    ("order", "divided"), [("auto", False), ({"paper": "ldg", "field": "ldg", "author": "given"}, True)]
)
def test_of_edge_types_too(
    tmp_path: Path, order: Any, divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose partitions, of all types that are joined, follow from the bytes of all rows."""
    monkeypatch.setattr("featstore.order.orders.EXTENT_BYTES_MAX", 4096)
    given = typed_inputs(order)
    options: dict[str, Any] = {
        "train": {"paper": "paper.train"},
        "halo_disk": "1x",
        "split_topology": divided,
    }
    with featstore.pack(tmp_path / "s", **given) as store:
        assert len(store.tables["paper"].partition_offsets) > 3
        assert store.graphs["paper__cites__paper"].has_edge_ids
    featstore.split(tmp_path / "s", 3, tmp_path / "a", **options)
    featstore.split_features(hosts=3, out=tmp_path / "b", **given, **options)
    for name in ("topology", "host-0", "host-1", "host-2"):
        assert featstore.verify(tmp_path / "b" / name).ok
        with featstore.open(tmp_path / "a" / name) as one, featstore.open(tmp_path / "b" / name) as two:
            assert one.node_types == two.node_types
            assert one.manifest.featureless == two.manifest.featureless
            same_store(one, two)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "s"]


def test_partitions_of_types_are_given_as_of_a_pack(tmp_path: Path) -> None:
    given = typed_inputs()
    featstore.split_features(hosts=2, out=tmp_path / "b", partitions=6, **given)
    with featstore.open(tmp_path / "b/topology") as topology:
        assert topology.manifest.family is not None
    with featstore.pack(tmp_path / "s", partitions=6, **given) as store:
        featstore.split(store, 2, tmp_path / "a")
    assert np.array_equal(*(parts_of(tmp_path / name / "host-0", "author") for name in ("a", "b")))
    with pytest.raises(ArgumentError, match="partitions= differs among 'paper', 'author', 'field'"):
        featstore.split_features(hosts=2, out=tmp_path / "c", partitions={"paper": 6}, **given)


def test_edge_types_are_those_that_were_given(tmp_path: Path) -> None:
    """Also where their joined names may be of others."""
    tables = {"user": 9, "user__likes": np.ones((8, 2), np.float32), "item": 7}
    edges = np.array([[0, 5, 7], [1, 2, 6]])
    triple = ("user", "likes__of", "item")
    featstore.split_features(tables, 2, tmp_path / "a", graph={triple: edges}, order="given")
    with featstore.open(tmp_path / "a/topology") as topology:
        assert topology.edge_types == [triple]


def parts_of(path: Path, name: str) -> np.ndarray:
    with featstore.open(path) as part:
        return np.array(part.tables[name].partition_offsets)


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
    given = inputs(0)
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
    paper = given["features"]["paper"].copy()
    paper[NODES // 2 :] += 1
    other = given | {"features": given["features"] | {"paper": paper}}
    changed = {
        "tables": other, "graphs": given | {"graph": {"paper": graph_of(NODES, 5, 7)}},
        "partitions": given | {"partitions": {"paper": 8}}, "hubs": given | {"hubs": 0.0},
        "arrays": given | {"arrays": {"train": np.arange(1, NODES, 3)}},
    }  # fmt: skip
    before = tree(tmp_path)
    for what, inputs_now in changed.items():
        what = "topology" if what == "hubs" else what
        with pytest.raises(SourceError, match=f"cannot resume: the unfinished pack had {what} = "):
            featstore.split_features(hosts=2, out=out, resume=True, **inputs_now)
    with pytest.raises(StoreExistsError, match="another split"):
        featstore.split_features(hosts=2, out=out, resume=True, train="train", **given)
    with pytest.raises(StoreExistsError):
        featstore.split_features(hosts=2, out=out, **given)
    assert tree(tmp_path) == before
    featstore.split_features(hosts=2, out=out, resume=True, **given)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
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


def test_where_nothing_is_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(IncompleteStoreError, match="nothing to resume"):
        featstore.split_features(values(NODES, 9, DTYPES[0], 1), 2, tmp_path / "out", resume=True)
    assert not list(tmp_path.iterdir())


def test_a_store_of_whole_numbers_is_no_order(tmp_path: Path) -> None:
    """Of the same dtype and shape as the rows' checksums there: of a user who is to lose nothing."""
    featstore.pack(tmp_path / "out.order", np.ones(NODES, np.uint32)).close()
    before, given = tree(tmp_path / "out.order"), {"graph": graph_of(NODES, 5, 0), "order": "ldg"}
    for _ in range(2):
        with pytest.raises(StoreExistsError, match="holds another store, which is left alone"):
            featstore.split_features(
                values(NODES, 9, DTYPES[0], 1), 2, tmp_path / "out", overwrite=True, **given
            )
        assert tree(tmp_path / "out.order") == before


def interrupted(out: Path, at: str = "host-1: features", **given: Any) -> None:
    def stop(progress: Any) -> None:
        if at in (progress.table, progress.stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        featstore.split_features(hosts=2, out=out, progress=stop, **given)


@pytest.mark.parametrize("at", ["host-1: paper", "field"])
def test_one_of_edge_types_goes_on_with_what_it_was_of(tmp_path: Path, at: str) -> None:
    """Also where the order was being packed."""
    given, out = typed_inputs(), tmp_path / "out"
    interrupted(out, at, **given)
    heavier = {name: 2 * weights for name, weights in given["edge_weights"].items()}
    with pytest.raises(SourceError, match="the unfinished pack had values"):
        featstore.split_features(hosts=2, out=out, resume=True, **given | {"edge_weights": heavier})
    featstore.split_features(hosts=2, out=out, resume=True, **given)
    featstore.split_features(hosts=2, out=tmp_path / "whole", **given)
    assert tree(out) == tree(tmp_path / "whole")


def test_a_file_that_was_written_anew_is_not_gone_on_with(tmp_path: Path) -> None:
    """Nor another member of the graph's file; without a store of the order, too, while parts are missing."""
    out, path, edges = tmp_path / "out", tmp_path / "x.npy", tmp_path / "e.npz"
    np.save(path, x := values(NODES, 9, DTYPES[0], 1))
    one, two = (np.random.default_rng(seed).integers(0, NODES, (2, 900)) for seed in (1, 2))
    np.savez(edges, one=one, two=two)
    given: dict[str, Any] = {"features": path, "graph": edges, "graph_key": "one", "order": "ldg"}
    interrupted(out, **given)
    with pytest.raises(SourceError, match="cannot resume: the unfinished pack had graph_key"):
        featstore.split_features(hosts=2, out=out, resume=True, **given | {"graph_key": "two"})
    x[NODES // 2 :] += 1
    np.save(path, x)
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    with pytest.raises(SourceError, match="cannot resume: the unfinished pack had tables"):
        featstore.split_features(hosts=2, out=out, resume=True, **given)
    order = (tmp_path / "out.order").rename(tmp_path / "away")
    with pytest.raises(SourceError, match="cannot resume: the unfinished pack had tables"):
        featstore.split_features(hosts=2, out=out, resume=True, **given)
    order.rename(tmp_path / "out.order")
    os.rename(tmp_path / "out.order.journal", tmp_path / "away")
    with pytest.raises(IncompleteStoreError, match=r"says what the split .* is made of, is gone"):
        featstore.split_features(hosts=2, out=out, resume=True, **given)


@pytest.mark.parametrize("at", ["topology", "hosts", "host-0: features", "host-1: features"])
def test_what_was_replacing_another_is_not_gone_on_with(tmp_path: Path, at: str) -> None:
    """Wherever it was stopped, also where features alone are new, or nothing is."""
    out, x = tmp_path / "out", values(NODES, 9, DTYPES[0], 1)
    given: dict[str, Any] = {"graph": graph_of(NODES, 5, 0), "order": "ldg"}
    featstore.split_features(x, 2, out, **given)
    other = x.copy()
    other[NODES // 2 :] += 1
    interrupted(out, at, features=other, overwrite=True, **given)
    with pytest.raises(StoreExistsError, match="was replacing another"):
        featstore.split_features(other, 2, out, resume=True, **given)
    featstore.split_features(other, 2, out, overwrite=True, **given)
    check_rows(out, other)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_topology_that_was_begun_anew_is_gone_on_with(tmp_path: Path) -> None:
    """No part of another split stands beside it."""
    out, x = tmp_path / "out", values(NODES, 9, DTYPES[0], 1)
    given: dict[str, Any] = {"graph": graph_of(NODES, 5, 0), "order": "ldg"}
    interrupted(out, "topology", features=x, seed=1, **given)
    interrupted(out, "host-0: features", features=x, overwrite=True, **given)
    featstore.split_features(x, 2, out, resume=True, **given)
    check_rows(out, x)


def test_a_split_of_a_store_takes_the_place_of_one_that_was_begun_from_features(tmp_path: Path) -> None:
    """It is told that one is there, and leaves nothing of it."""
    out, x = tmp_path / "out", values(NODES, 9, DTYPES[0], 1)
    given: dict[str, Any] = {"graph": graph_of(NODES, 5, 0), "order": "ldg"}
    interrupted(out, features=x, **given)
    featstore.pack(tmp_path / "s", x, **given).close()
    for option in ({}, {"resume": True}):
        with pytest.raises(StoreExistsError, match="was begun straight from features, and is unfinished"):
            featstore.split(tmp_path / "s", 2, out, **option)
    with pytest.raises(UnknownNameError):  # nothing is replaced, and it can be gone on with
        featstore.split(tmp_path / "s", 2, out, train="trian", overwrite=True)
    for name in ("as-it-was", "another"):
        shutil.copytree(tmp_path, tmp_path.with_name(name), dirs_exist_ok=True)
    other = tmp_path.with_name("another")
    shutil.rmtree(other / "out.order")
    featstore.pack(other / "out.order", x).close()
    before = tree(other / "out.order")
    featstore.split(tmp_path / "s", 2, other / "out", overwrite=True)
    assert tree(other / "out.order") == before
    assert not (other / "out.order.journal").exists()
    featstore.split(tmp_path / "s", 2, out, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "s"]
    check_rows(out, x)
    out = tmp_path.with_name("as-it-was") / "out"
    featstore.split_features(x, 2, out, resume=True, **given)
    check_rows(out, x)


@pytest.mark.parametrize("every", [1, 2])
def test_records_with_padding_are_split(tmp_path: Path, every: int) -> None:
    """Whatever lies between their fields: it is no other row. Nor where they do not lie side by side, and
    that is nothing."""
    dtype = np.dtype([("a", "<i2"), ("b", "<f8")], align=True)
    raw = np.random.default_rng(0).integers(1, 255, every * NODES * dtype.itemsize, np.uint8)
    rows = raw.view(dtype)
    rows["b"] = np.random.default_rng(1).standard_normal(every * NODES)
    rows = rows[::every]
    if every > 1:
        for _ in range(5):
            np.full(NODES * dtype.itemsize, 7, np.uint8)  # what memory is given again
            found = to_native(rows, dtype, owned=False).view(np.uint8).reshape(NODES, -1)
            assert not found[:, 2:8].any()
    given: dict[str, Any] = {"graph": graph_of(NODES, 5, 0), "order": "ldg", "halo_disk": "1x"}
    featstore.split_features(rows, 2, tmp_path / "out", **given)
    for host in range(2):
        with featstore.open(tmp_path / "out" / f"host-{host}") as part:
            topology = featstore.open(tmp_path / "out" / "topology")
            owned = rows_of(topology, "features") == host
            topology.close()
            assert (rows_of(part, "features") == rows[owned]).all()


def check_rows(out: Path, features: np.ndarray) -> None:
    """The parts of two hosts have these features."""
    for host in range(2):
        with featstore.open(out / "topology") as topology, featstore.open(out / f"host-{host}") as part:
            owned = rows_of(topology, "features") == host
            assert rows_of(part, "features").tobytes() == features[owned].tobytes()


@pytest.mark.parametrize("copies", [None, "1x"])
def test_rows_that_change_meanwhile_are_no_part(tmp_path: Path, copies: str | None) -> None:
    """Though the sample that a source is known by has none of them."""
    out, x = tmp_path / "out", values(NODES, 9, DTYPES[0], 1)
    given: dict[str, Any] = {"graph": graph_of(NODES, 5, 0), "order": "ldg", "halo_disk": copies}
    interrupted(out, "host-1: features", features=x, **given)
    with featstore.open(out / "topology") as topology:
        mine = int(np.flatnonzero(rows_of(topology, "features") == 1)[7])
    before = x[mine].copy()
    x[mine] += 1
    with pytest.raises(SourceError, match=rf"the row of node {mine:,} is not what it was|cannot resume"):
        featstore.split_features(x, 2, out, resume=True, **given)
    x[mine] = before
    featstore.split_features(x, 2, out, resume=True, **given)
    check_rows(out, x)


def test_who_is_refused_leaves_the_journal_as_it_is(tmp_path: Path) -> None:
    """A second split to the same place, while the first one goes on; that is gone on with as it was."""
    out, x = tmp_path / "out", values(NODES, 9, DTYPES[0], 1)
    given: dict[str, Any] = {"graph": graph_of(NODES, 5, 0), "order": "ldg"}
    tried: list[str] = []

    def meanwhile(progress: Any) -> None:
        for stage in ("topology", "host-0: features"):
            if stage in (progress.table, progress.stage) and stage not in tried:
                tried.append(stage)
                with pytest.raises(StoreLockedError):
                    featstore.split_features(x + 1, 2, out, overwrite=True, **given)
        if progress.table == "host-1: features":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        featstore.split_features(x, 2, out, progress=meanwhile, **given)
    assert len(tried) == 2
    with pytest.raises(SourceError, match="cannot resume"):
        featstore.split_features(x + 1, 2, out, resume=True, **given)
    featstore.split_features(x, 2, out, resume=True, **given)
    check_rows(out, x)


@pytest.mark.parametrize(
    ("first", "then", "at"), [(72, 64, "spill"), (64, 72, "write"), (64, 200, "spill"), (64, 200, "write")]
)
def test_another_memory_goes_on(
    tmp_path: Path, first: int, then: int, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part's rows that were put in order through files, in other buckets, or in memory: the same bytes, and
    statistics."""
    for module in (permute, spill, spill_files):
        monkeypatch.setattr(module, "CHECKPOINT_BYTES", 1 << 20)
    out, x = tmp_path / "out", values(8000, 2400, DTYPES[0], 1)
    x[::7, 3] = np.nan
    given: dict[str, Any] = {
        "features": x,
        "graph": graph_of(8000, 2, 0),
        "order": "ldg",
        "partitions": 64,
    }
    stages: list[str] = []

    def stop(progress: Any) -> None:
        if progress.table == "host-1: features":
            stages.append(progress.stage)
            if progress.stage == at and progress.done_bytes > 5 << 20:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        featstore.split_features(hosts=2, out=out, progress=stop, memory=f"{first}MiB", **given)
    assert "spill" in stages
    featstore.split_features(hosts=2, out=out, resume=True, memory=f"{then}MiB", **given)
    featstore.split_features(hosts=2, out=tmp_path / "whole", memory="512MiB", **given)
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.parametrize("at", ["spill", "write"])
def test_stopped_again_with_another_memory_it_goes_on_with_the_first(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which finds nothing of what the second one has removed."""
    for module in (permute, spill, spill_files):
        monkeypatch.setattr(module, "CHECKPOINT_BYTES", 1 << 20)
    out, x = tmp_path / "out", values(8000, 2400, DTYPES[0], 1)
    given: dict[str, Any] = {
        "features": x,
        "graph": graph_of(8000, 2, 0),
        "order": "ldg",
        "partitions": 64,
    }

    def stop(progress: Any) -> None:
        if progress.table == "host-1: features" and progress.stage == at and progress.done_bytes > 5 << 20:
            raise KeyboardInterrupt

    def stop_at_once(progress: Any) -> None:
        if progress.table == "host-1: features":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        featstore.split_features(hosts=2, out=out, progress=stop, memory="64MiB", **given)
    with pytest.raises(KeyboardInterrupt):
        featstore.split_features(
            hosts=2, out=out, progress=stop_at_once, resume=True, memory="200MiB", **given
        )
    featstore.split_features(hosts=2, out=out, resume=True, memory="64MiB", **given)
    featstore.split_features(hosts=2, out=tmp_path / "whole", memory="512MiB", **given)
    assert tree(out) == tree(tmp_path / "whole")


def test_an_order_that_was_begun_with_another_memory_is_made_anew(tmp_path: Path) -> None:
    given, out = typed_inputs(), tmp_path / "out"
    interrupted(out, "field", **given)
    warnings.simplefilter("always", featstore.errors.FeatstoreWarning)
    with pytest.warns(featstore.errors.FeatstoreWarning, match="was begun with another memory="):
        featstore.split_features(hosts=2, out=out, resume=True, memory="200MiB", **given)
    featstore.split_features(hosts=2, out=tmp_path / "whole", **given)
    assert tree(out) == tree(tmp_path / "whole")


def test_folders_above_are_made_and_a_file_is_told(tmp_path: Path) -> None:
    given: dict[str, Any] = {"graph": graph_of(NODES, 5, 0), "order": "ldg"}
    out, x = tmp_path / "new" / "folder" / "out", values(NODES, 9, DTYPES[0], 1)
    featstore.split_features(x, 2, out, **given)
    check_rows(out, x)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SourceError, match="is a file; give the path of a directory"):
        featstore.split_features(x, 2, tmp_path / "file", **given)


def test_what_cannot_be_is_told_before_anything_is_read(tmp_path: Path) -> None:
    given, out, read = inputs(0), tmp_path / "out", list[Any]()
    no_graph = {"graph": None, "order": "given", "hubs": 0, "partitions": None}
    for wrong, kind, why in (
        ({"train": "trian"}, UnknownNameError, "did you mean 'train'"),
        ({"train": np.ones(NODES + 1, bool)}, FeatstoreError, f"{NODES:,}"),
        ({"train": {"author": np.arange(3)}}, ArgumentError, "has no graph and is dealt out"),
        ({"hosts": NODES + 1}, ArgumentError, f"at most the {NODES} nodes of table 'paper'"),
        (no_graph | {"halo_disk": "1x"}, ArgumentError, "and there is no graph"),
    ):  # fmt: skip
        with pytest.raises(kind, match=why):
            featstore.split_features(out=out, progress=read.append, **{"hosts": 2, **given} | wrong)
    assert not read
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("removing", [False, True])
def test_an_order_that_is_not_needed_any_more_is_removed(tmp_path: Path, removing: bool) -> None:
    """Where it was stopped after the last part, or while the order was being removed."""
    out, x = tmp_path / "out", values(NODES, 9, DTYPES[0], 1)
    given: dict[str, Any] = {"graph": graph_of(NODES, 5, 0), "order": "ldg"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("featstore.packing.split.features.remove_order", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            featstore.split_features(x, 2, out, **given)
    assert (tmp_path / "out.order").exists()
    if removing:
        (tmp_path / "out.order" / "featstore.json").unlink()
        with pytest.raises(StoreExistsError, match="its split was completed"):
            featstore.split_features(x, 2, out, resume=True, **given)
    else:
        featstore.split_features(x, 2, out, resume=True, **given)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    check_rows(out, x)


def test_an_unfinished_order_is_of_its_input(tmp_path: Path) -> None:
    """It is gone on with, or replaced."""
    out, x = tmp_path / "out", values(NODES, 9, DTYPES[0], 1)
    given: dict[str, Any] = {"features": x, "graph": graph_of(NODES, 5, 0), "order": "ldg"}
    other = given | {"graph": graph_of(NODES, 5, 7)}
    interrupted(out, at="topology", **given)
    assert not (tmp_path / "out.order/featstore.json").exists()
    with pytest.raises(SourceError, match="cannot resume: the unfinished pack had graphs"):
        featstore.split_features(hosts=2, out=out, resume=True, **other)
    with pytest.raises(StoreExistsError, match="order of an unfinished split"):
        featstore.split_features(hosts=2, out=out, **other)
    featstore.split_features(hosts=2, out=out, overwrite=True, **other)
    featstore.split_features(hosts=2, out=tmp_path / "wanted", **other)
    assert tree(out) == tree(tmp_path / "wanted")


def test_what_stands_beside_a_split_is_left_alone(tmp_path: Path) -> None:
    out, x = tmp_path / "out", values(NODES, 9, DTYPES[0], 1)
    given: dict[str, Any] = {"features": x, "graph": graph_of(NODES, 5, 0), "order": "ldg"}
    journal, order = tmp_path / "out.order.journal", tmp_path / "out.order"
    order.mkdir()
    for option in ({}, {"overwrite": True}):
        with pytest.raises(StoreExistsError, match="is taken"):
            featstore.split_features(hosts=2, out=out, **given, **option)
    order.rmdir()
    journal.write_text("mine")
    for option in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(StoreExistsError, match="holds something else, which is left alone"):
            featstore.split_features(hosts=2, out=out, **given, **option)
    assert journal.read_text() == "mine"


@pytest.mark.parametrize("edge_ids", [None, False])
def test_numbers_of_edges_are_kept_where_topology_is_split(tmp_path: Path, edge_ids: bool | None) -> None:
    """Where there are rows of edges, unless nobody wants them."""
    given = {
        "features": {"n": values(NODES, 3, DTYPES[0], 1), "edge_features": np.ones((900, 2), np.float32)},
        "graph": {"n": np.random.default_rng(1).integers(0, NODES, (2, 900))}, "order": {"n": "ldg"},
        "edge_ids": edge_ids,
    }  # fmt: skip
    featstore.split_features(hosts=2, out=tmp_path / "out", split_topology=True, **given)
    for host in range(2):
        with featstore.open(tmp_path / f"out/host-{host}") as part:
            assert ("n/lists/edge_ids" in part.manifest.all_tables) == (edge_ids is None)


def test_parts_of_other_features_are_another_family(tmp_path: Path) -> None:
    """Whichever row differs: hosts with parts of both would train on a mixture."""
    given = inputs(0)
    families = set()
    for name, row in (("a", None), ("again", None), ("last", NODES - 1), ("middle", NODES // 2)):
        tables = dict(given["features"])
        if row is not None:
            tables["paper"] = tables["paper"].copy()
            tables["paper"][row] += 1
        featstore.split_features(
            tables, 2, tmp_path / name, **{k: v for k, v in given.items() if k != "features"}
        )
        with featstore.open(tmp_path / name / "topology") as topology:
            families.add(topology.uuid)
    assert len(families) == 3, "equal features give an equal family"
