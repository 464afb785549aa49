"""Readers over several hosts: of some tables, with copies on the host's own disk, and when they are closed.

Hosts are threads, as in ``test_split_topology.py``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_split_topology import each, graph_of, hosts, split

import featstore
from featstore.errors import (
    ArgumentError,
    BudgetError,
    FeatstoreError,
    FeatstoreWarning,
    IdError,
    SourceError,
)
from featstore.hosts import messages as ms
from featstore.hosts.copies import DiskCopies
from featstore.hosts.opening import Opening
from featstore.hosts.places import HostPlace
from featstore.hosts.split_store import WholeStore

NODES, HOSTS = 400, 2
TABLES = {
    "x": np.arange(5 * NODES, dtype=np.float32).reshape(NODES, 5), "y": np.arange(NODES, dtype=np.int64),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("readers-of-hosts")
    graphs = {"x": graph_of(NODES, 5, 3)}
    with pack(
        made / "s", TABLES, graph=graphs, order={"x": "ldg", "y": "given"}, partitions={"x": 8}
    ) as store:
        split(store, HOSTS, made / "plain", split_topology=False)
        split(store, HOSTS, made / "copies", split_topology=False, halo_disk="10x")
    return made


@pytest.mark.parametrize("tiers", [(), (featstore.Buffer("lru"),), (featstore.Static(),)], ids=str)
@pytest.mark.parametrize("tables", [["x"], ["y"], ["y", "x"]], ids=str)
def test_a_reader_is_of_the_tables_that_were_asked_for(folder: Path, tables: list[str], tiers: Any) -> None:
    """Of one alone ids need no name; a table that was not asked for is none."""
    if tiers and isinstance(tiers[0], featstore.Static):
        tiers = (featstore.Static({tables[0]: np.arange(9)}),)

    def read(store: Any) -> None:
        with store.reader(tables=tables, tiers=list(tiers), memory="16MiB") as reader:
            assert reader.tables == tables
            ids = np.arange(NODES)[::-3]
            given = ids if len(tables) == 1 else dict.fromkeys(tables, ids)
            found = reader.read(given)
            found = {tables[0]: found} if len(tables) == 1 else found
            for name in tables:
                np.testing.assert_array_equal(found[name], TABLES[name][ids])
            for other in TABLES.keys() - set(tables):
                with pytest.raises(FeatstoreError, match=f"no table '{other}'|{other}"):
                    reader.read({other: ids})
            with pytest.raises(IdError):
                reader.read(np.array([NODES]) if len(tables) == 1 else {tables[0]: np.array([NODES])})

    with hosts(folder / "plain", HOSTS) as (stores, _):
        for error in each(stores, read):
            assert error is None, error


def test_what_was_read_and_is_held_is_told(folder: Path) -> None:
    """Of this host's own disk, by a reader without tiers of its own."""

    def read(store: Any) -> None:
        with store.reader(tables=["x"], memory="16MiB") as reader:
            reader.read(np.arange(NODES))
            stats, held = reader.stats(), reader.memory()
            assert stats.bytes_read >= store.part.tables["x"].rows * 20
            assert stats.reads > 0
            assert held["hosts tier"] > 0
            assert sum(held.values()) == 16 << 20
            assert 0 <= held["unused"] < 16 << 20

    with hosts(folder / "plain", HOSTS) as (stores, _):
        for error in each(stores, read):
            assert error is None, error


def test_hosts_may_be_given_as_the_last_tier(folder: Path) -> None:
    """As by default, and then options of the disk are said to it alone."""
    ids = np.arange(NODES)[::-3]

    def read(store: Any) -> None:
        last = featstore.Hosts(memory="4MiB", queue_depth=16)
        with store.reader(tables=["x"], tiers=[featstore.Buffer("lru"), last], memory="16MiB") as reader:
            np.testing.assert_array_equal(reader.read(ids), TABLES["x"][ids])
        with pytest.raises(ArgumentError, match="queue_depth= is said twice: give it to the Hosts"):
            store.reader(tables=["x"], tiers=[last], queue_depth=32)
        with pytest.raises(ArgumentError, match="Hosts must be the last"):
            store.reader(tables=["x"], tiers=[last, featstore.Buffer("lru")])

    with hosts(folder / "plain", HOSTS) as (stores, _):
        for error in each(stores, read):
            assert error is None, error


def test_the_topology_alone_has_no_rows_to_train_on(folder: Path) -> None:
    with (
        featstore.open(folder / "plain/topology") as store,
        pytest.raises(SourceError, match=r"its rows say who owns a node. Open the split: .*open_split\("),
    ):
        store.loader(seeds=np.arange(9), fanouts=(2,), memory="16MiB")


def test_a_reason_that_nobody_would_be_told_is_a_warning(folder: Path) -> None:
    """Only local rank 0 has lines to the others."""
    with hosts(folder / "plain", HOSTS) as (stores, _):
        place = stores[1].place
        stores[1].place = place._replace(local_rank=1)
        assert not stores[1].place.leads
        with pytest.warns(FeatstoreWarning, match="local rank 0 has the lines to other hosts"):
            stores[1].close("has seen enough")


def test_rows_of_others_are_there_when_a_reader_is_closed(folder: Path) -> None:
    """What was submitted is whole then, and nothing is written after."""

    def slow(source: int, to: int, number: int, data: np.ndarray) -> np.ndarray:
        if ms.parse_header(data).kind == ms.Kind.ROWS:
            time.sleep(0.3)
        return data

    with hosts(folder / "plain", HOSTS, meddle=slow) as (stores, _):
        out = np.zeros_like(TABLES["x"])
        with stores[0].reader(tables=["x"], memory="16MiB") as reader:
            request = reader.submit(np.arange(NODES), out=out)
            assert not request.done()
        assert request.done()
        np.testing.assert_array_equal(out, TABLES["x"])


def test_copies_are_read_by_their_own_host_alone(folder: Path) -> None:
    """The reader that serves others has the tables that are served, and keeps rows of some."""
    with hosts(folder / "copies", HOSTS) as (stores, _):
        for store in stores:
            assert store.copies["x"].rows > 20
            assert store._serving.tables == ["x", "y"]
            (plan,) = store._serving.plan({"x": np.arange(store.part.tables["x"].rows)}).tables
            assert sum(plan.hits.values()) > 0


def test_more_copies_than_can_be_counted_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("featstore.hosts.copies.COPIES_MAX", 10)
    assert DiskCopies(np.arange(0, 40, 4), 100, "x").find(np.array([8, 9])).tolist() == [2, -1]
    with pytest.raises(SourceError, match="11 rows of other rows' copies, at most 10"):
        DiskCopies(np.arange(0, 44, 4), 100, "x")


def test_what_putting_copies_in_order_takes_is_of_the_budget(folder: Path, monkeypatch: Any) -> None:
    """And not held beside what serves: they are put in order first."""
    monkeypatch.setattr(DiskCopies, "opening_bytes", staticmethod(lambda rows: rows << 16))
    with hosts(folder / "plain", HOSTS, memory="8MiB"):
        pass
    with (
        pytest.raises(BudgetError, match="know the owners") as raised,
        hosts(folder / "copies", HOSTS, memory="8MiB"),
    ):
        pass
    needed = raised.value.needed_bytes
    assert needed > 20 << 16
    with hosts(folder / "copies", HOSTS, memory=f"{2 * needed}") as (stores, _):
        assert sum(stores[0].memory().values()) <= 2 * needed


def test_the_memory_that_opening_is_said_to_need_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows have an order of their own, which is looked up while the owners are read. This process is
    one that has no lines."""
    nodes, rng = 600_000, np.random.default_rng(0)
    edges = rng.integers(0, nodes, (2, nodes))
    featstore.pack(
        tmp_path / "s", np.zeros((nodes, 1), np.int8), graph=edges, order="ldg", partitions=64
    ).close()
    featstore.split(tmp_path / "s", 2, tmp_path / "parts")
    monkeypatch.setattr(WholeStore, "_place", staticmethod(lambda hosts: HostPlace(0, hosts, 1, 2, 0)))
    with pytest.raises(BudgetError) as refused:
        featstore.open_split(tmp_path / "parts", memory=1)
    assert refused.value.given_bytes == 1
    needed = refused.value.needed_bytes
    with featstore.open_split(tmp_path / "parts", memory=needed) as store:
        assert store.owners["features"].hosts.shape == (nodes,)
    with pytest.raises(BudgetError) as refused:
        featstore.open_split(tmp_path / "parts", memory=needed - 1)
    assert refused.value.needed_bytes == needed


@pytest.mark.parametrize("split_topology", [False, True])
def test_the_memory_of_one_that_has_lines_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split_topology: bool
) -> None:
    """Whatever the lines to other hosts take of it: two errors at most, and then it comes to the others."""
    nodes = 300_000
    edges = np.random.default_rng(0).integers(0, nodes, (2, nodes))
    featstore.pack(
        tmp_path / "s", np.zeros((nodes, 8), np.float32), graph=edges, order="ldg", partitions=64
    ).close()
    featstore.split(tmp_path / "s", 4, tmp_path / "parts", split_topology=split_topology)
    monkeypatch.setattr(WholeStore, "_place", staticmethod(lambda hosts: HostPlace(0, hosts, 0, 1, 0)))
    monkeypatch.setattr(Opening, "come", lambda *_: None)
    monkeypatch.setattr(Opening, "open_wire", lambda *_: 1 / 0)
    for memory in (1, 1 << 20, 5 << 20, 7 << 20):
        given, tries = memory, 0
        while True:
            try:
                featstore.open_split(tmp_path / "parts", memory=given)
            except ZeroDivisionError:
                break
            except BudgetError as error:
                assert error.given_bytes == given < error.needed_bytes
                given, tries = error.needed_bytes, tries + 1
        assert tries <= 2
