"""Mini-batches around links of stores that are split by hosts: each host trains on the links whose targets it
owns, all as many; mini-batches are those of the whole store around the same links.

Hosts are threads, as in ``test_split_topology.py``."""

from __future__ import annotations

import pickle
import shutil
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_hosts import all_of, forked_from
from hypothesis import given
from hypothesis import strategies as st
from mode_hosts import be_linked, taken
from test_split_topology import each, graph_of, hosts, split

import featstore
from featstore.adapters.links_over_hosts import deal_links
from featstore.errors import ArgumentError, BudgetError, FeatstoreWarning, PeerError, SourceError
from featstore.loaders.online.lookahead import check_known_ahead
from featstore.sampling.link_batches import LinkBatches
from featstore.sampling.links import LinkSampler, Negatives

pytest.importorskip("torch_geometric")
LinkNeighborLoader = pytest.importorskip("featstore.adapters.pyg_links").LinkNeighborLoader
NODES, HOSTS = 160, 2
BUYS, LIKES = ("user", "buys", "item"), ("item", "like", "item")
COUNTS = {"user": 90, "item": 120}
NAMES = ("n_id", "e_id", "x", "edge_index", "edge_label_index", "edge_label", "src_index", "dst_neg_index")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    """A graph of one type, and one of two, each split with the whole topology and without."""
    made, rng = tmp_path_factory.mktemp("links-over-hosts"), np.random.default_rng(5)
    indptr, indices = graph_of(NODES, 5, 3)
    known: dict[str, Any] = {
        "edge_ids": True, "edge_weights": rng.random(len(indices)),
        "edge_times": rng.integers(0, 9, len(indices)),
        "arrays": {"links": rng.integers(0, NODES, (2, 70)), "train": np.arange(NODES)},
    }  # fmt: skip
    features = np.arange(3 * NODES, dtype=np.float32).reshape(NODES, 3)
    with pack(made / "one", features, graph=(indptr, indices), order="ldg", partitions=8, **known) as store:
        for name, topology in (("one-whole", False), ("one-split", True)):
            split(store, HOSTS, made / name, split_topology=topology)
        split(store, 1, made / "parts1")  # by which processes get warm
    edges = {
        of: np.stack([rng.integers(0, COUNTS[of[0]], count), rng.integers(0, COUNTS[of[2]], count)])
        for of, count in ((BUYS, 500), (LIKES, 400))
    }
    tables = {name: np.arange(2 * rows, dtype=np.int16).reshape(rows, 2) for name, rows in COUNTS.items()}
    with pack(made / "types", tables, graph=edges, order="given", edge_ids=True) as store:
        for name, topology in (("types-whole", False), ("types-split", True)):
            split(store, HOSTS, made / name, split_topology=topology)
    return made


def owners(topology: featstore.Store) -> np.ndarray:
    """The host of each node."""
    with featstore.Reader(topology, memory="16MiB") as reader:
        return reader.read(np.arange(NODES)).ravel()


def epochs(place: Path, count: int, **said: Any) -> list[list[list[dict[str, Any]]]]:
    """By host and epoch, what mini-batches have."""

    def run(store: Any) -> list[list[dict[str, Any]]]:
        with LinkNeighborLoader(store, **said) as loader:
            found = []
            for epoch in range(count):
                loader.set_epoch(epoch)
                found.append([taken(batch) for batch in loader])
                assert len(found[-1]) == len(loader)
            return found

    with hosts(place, HOSTS, memory="24MiB") as (stores, _):
        made = each(stores, run)
    for one in made:
        assert not isinstance(one, Exception), one
    return made


SAID: list[dict[str, Any]] = [
    {},
    {"neg_sampling": "binary", "shuffle": True},
    {"neg_sampling": Negatives("triplet", 2), "drop_last": True, "disjoint": True},
    {"weight_attr": "weights", "replace": True, "neg_sampling_ratio": 0.5},
    {"time_attr": "times", "edge_label_time": np.arange(70) % 9},
]


@pytest.mark.parametrize("topology", ["whole", "split"])
@pytest.mark.parametrize("said", SAID, ids=lambda one: "-".join(one) or "plain")
def test_they_are_those_of_the_whole_store(folder: Path, topology: str, said: dict[str, Any]) -> None:
    """Around the same links, drawn by the same number, of one epoch after the other."""
    asked: dict[str, Any] = {
        "num_neighbors": [3, 2], "edge_label_index": "links", "batch_size": 8, "memory": "16MiB", "seed": 4,
    } | said  # fmt: skip
    made = epochs(folder / f"one-{topology}", 2, **asked)
    with featstore.open(folder / "one") as store, featstore.open(folder / f"one-{topology}/topology") as top:
        links, owner = store.arrays["links"], owners(top)
        owner = deal_links(*owner[links], HOSTS)
        check_shares(made, owner, drop_last=bool(said.get("drop_last")), shuffled="shuffle" in said)
        alone = {name: value for name, value in asked.items() if name not in ("shuffle", "drop_last")}
        for host, of_host in enumerate(made):
            for epoch, batches in enumerate(of_host):
                for step, batch in enumerate(batches):
                    check_alike(store, alone, links, batch, epoch, step * HOSTS + host)


def test_where_each_rank_is_a_host_nothing_is_shared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said where a machine stands for several hosts, and no error: each may have a device of its own."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(HOSTS))
    said: dict[str, Any] = {"edge_label_index": "links", "memory": "16MiB", "shared": "run"}
    with hosts(folder / "one-whole", HOSTS, memory="24MiB") as (stores, _):
        with pytest.warns(FeatstoreWarning, match="has 2 ranks, and each is a host .* nothing is shared"):
            made = each(stores, lambda store: LinkNeighborLoader(store, [2], **said))
        for loader in made:
            loader.close()


def check_shares(made: Any, owner: np.ndarray, *, drop_last: bool, shuffled: bool) -> None:
    """Each host has its own links, all have as many mini-batches, and each link stands in an epoch."""
    for epoch in range(len(made[0])):
        ids = [np.concatenate([b["None input_id"] for b in of_host[epoch]]) for of_host in made]
        assert len({len(of_host[epoch]) for of_host in made}) == 1
        for host, one in enumerate(ids):
            assert (owner[one] == host).all()
            if not drop_last:
                assert set(one.tolist()) == set(np.flatnonzero(owner == host).tolist())
            elif not shuffled:
                assert len(one) == len(set(one.tolist()))
    if shuffled:
        first, second = (np.concatenate([b["None input_id"] for b in made[0][epoch]]) for epoch in (0, 1))
        assert first.tolist() != second.tolist()


def check_alike(
    store: Any, said: dict[str, Any], links: np.ndarray, batch: dict[str, Any], epoch: int, number: int
) -> None:  # fmt: skip
    """The mini-batch is that of the store around these links."""
    ids, times = batch["None input_id"], said.get("edge_label_time")
    with LinkNeighborLoader(store, **said) as loader:
        around = loader._batches.sampler
        found = around.sample(
            links[:, ids], number, epoch=epoch, times=None if times is None else times[ids], input_id=ids
        )
        assert batch["None n_id"].tolist() == found.subgraph.node.tolist()
        assert batch["None e_id"].tolist() == found.subgraph.e_id.tolist()
        assert batch["None edge_index"].tolist() == [found.subgraph.row.tolist(), found.subgraph.col.tolist()]
        for name in NAMES[4:]:
            mine = getattr(found, name)
            assert (mine is None) == (f"None {name}" not in batch), name
            assert mine is None or batch[f"None {name}"].tolist() == mine.tolist(), name
        assert batch["None x"][:, 0].tolist() == (3 * found.subgraph.node).tolist()


@pytest.mark.parametrize(
    "options", [{}, {"halo": "64KiB"}, {"mode": "compiled"}, {"mode": "rolling"}], ids=str
)
@pytest.mark.parametrize("types", [False, True])
def test_split_topology_gives_what_the_whole_gives(
    folder: Path, tmp_path: Path, types: bool, options: dict[str, Any]
) -> None:
    """Of one type and of several, looking ahead too, in every mode that takes mini-batches."""
    links = np.random.default_rng(1).integers(0, min(COUNTS.values()), (2, 50))
    asked: dict[str, Any] = {
        "num_neighbors": [3, 2], "edge_label_index": (BUYS, links) if types else links, "batch_size": 6,
        "memory": "32MiB", "neg_sampling": "binary", "shuffle": True, **options,
    }  # fmt: skip
    if options.get("mode") == "compiled":
        asked |= {"recorded_epochs": 2}
    name = "types" if types else "one"
    whole, other = (epochs(folder / f"{name}-{topology}", 2, **asked) for topology in ("whole", "split"))
    for mine, its in zip(whole, other, strict=True):
        for one, two in zip(mine, its, strict=True):
            assert len(one) == len(two) > 2
            for first, second in zip(one, two, strict=True):
                assert first.keys() == second.keys()
                for of in first:
                    np.testing.assert_array_equal(first[of], second[of], of)


def cases_of_ranks() -> list[tuple[str, dict[str, Any]]]:
    """Whole topology and split, of one type and of several, each with a case of the other beside it."""
    links = np.random.default_rng(1).integers(0, min(COUNTS.values()), (2, 50))
    one: dict[str, Any] = {
        "num_neighbors": [3, 2], "edge_label_index": "links", "batch_size": 5, "seed": 4, "shuffle": True,
        "neg_sampling": "binary",
    }  # fmt: skip
    types = one | {"edge_label_index": (BUYS, links), "neg_sampling": Negatives("triplet", 2)}
    return [
        ("one-whole", one), ("one-split", one | {"halo": "64KiB"}),
        ("one-whole", one | {"mode": "compiled", "recorded_epochs": 2}),
        ("one-split", one | {"mode": "rolling"}),
        ("types-whole", types), ("types-split", types | {"halo": "64KiB"}),
    ]  # fmt: skip


def test_ranks_that_share_a_loader_train_around_links(folder: Path) -> None:
    """Two of each of two hosts: their mini-batches are those of the whole store around the same links, which
    all stand in an epoch; only the first of a host reads and has lines."""
    cases, world = cases_of_ranks(), 2 * HOSTS
    (folder / "linked.cases").write_bytes(pickle.dumps(cases))
    done = all_of(forked_from(folder), be_linked, world, HOSTS, 2, str(folder), "linked")
    assert done == [0] * world
    told = [pickle.loads((folder / f"linked.told.{rank}").read_bytes()) for rank in range(world)]
    for number, (name, said) in enumerate(cases):
        of = [one[number] for one in told]
        made = [one["made"] for one in of]
        assert [one["received"] > 0 for one in of] == [True, False] * HOSTS
        key = f"{BUYS if 'types' in name else None} input_id"
        for epoch in range(2):
            ids = [np.concatenate([b[key] for b in rank[epoch]]) for rank in made]
            assert len({len(rank[epoch]) for rank in made}) == 1
            total = 50 if "types" in name else 70
            assert set(np.concatenate(ids).tolist()) == set(range(total))
            assert sum(map(len, ids)) == total + of[0]["padded"]
            assert not set(ids[0].tolist()) & set(ids[2].tolist()), "hosts have links of their own"
        if number % 2:  # what looks ahead, is laid out, or asked for of other hosts, is the same
            for mine, its in zip(made, [one[number - 1]["made"] for one in told], strict=True):
                for first, second in zip(chain(*mine), chain(*its), strict=True):
                    assert first.keys() == second.keys()
                    assert all(np.array_equal(first[of], second[of]) for of in first)
        if name == "one-whole" and "mode" not in said:
            with featstore.open(folder / "one") as store:
                alone = {n: value for n, value in said.items() if n != "shuffle"} | {"memory": "16MiB"}
                for rank, of_rank in enumerate(made):
                    for epoch, batches in enumerate(of_rank):
                        for step, batch in enumerate(batches):
                            number = step * world + rank
                            check_alike(store, alone, store.arrays["links"], batch, epoch, number)


def test_all_edges_of_the_whole_topology(folder: Path) -> None:
    made = epochs(folder / "one-whole", 1, num_neighbors=[2], batch_size=64, memory="16MiB")
    with featstore.open(folder / "one") as store:
        edges = store.graphs["features"].edges
    assert set(np.concatenate([b["None input_id"] for one in made for b in one[0]]).tolist()) == set(
        range(edges)
    )


def test_what_is_refused(folder: Path) -> None:
    links = np.arange(20).reshape(2, 10)
    asked: dict[str, Any] = {"num_neighbors": [2], "edge_label_index": links, "memory": "16MiB"}
    with hosts(folder / "one-split", HOSTS) as (stores, _):
        for said, kind, why in (
            ({"rank": 0}, ArgumentError, "rank= divides mini-batches, and hosts have links of their own"),
            ({"world_size": 2, "rank": 1}, ArgumentError, "leave it out"),
            ({"edge_label_index": None}, SourceError, "say which links, edge_label_index="),
            ({"subgraph_type": "induced"}, SourceError, "'induced' looks at whole lists"),
            ({"memory": "1KiB", "batch_size": 10}, BudgetError, "begin the sampling"),
        ):
            with pytest.raises(kind, match=why):
                LinkNeighborLoader(stores[0], **asked | said)
    with hosts(folder / "types-split", HOSTS) as (stores, _):
        for of in (BUYS, (BUYS, None), ("user", "item"), None):
            with pytest.raises(SourceError, match="say which links"):
                LinkNeighborLoader(stores[0], num_neighbors=[2], edge_label_index=of, memory="16MiB")


@given(hosts_=st.integers(1, 5), seed=st.integers(0, 2**20), links=st.integers(0, 60), skew=st.booleans())
def test_links_are_dealt_out_evenly(hosts_: int, seed: int, links: int, skew: bool) -> None:
    """To one or the other end's host, and to a third only where neither could be."""
    sources, targets = np.random.default_rng(seed).integers(0, hosts_, (2, links)).astype(np.uint8)
    targets[: links // 2 if skew else 0] = 0
    pairs = targets
    owner = deal_links(sources, targets, hosts_)
    counts = np.bincount(owner, minlength=hosts_)
    assert counts.max() - counts.min() <= 1
    before = np.bincount(targets, minlength=hosts_)
    for host in np.flatnonzero(before <= len(pairs) // hosts_):  # who has too few keeps all, and gets more
        assert (owner[targets == host] == host).all()
    if hosts_ == 2:  # of one, both of whose ends are elsewhere, no more than there have to be
        for host in (0, 1):
            spare = before[host] - counts[host]
            could = ((targets == host) & (sources != host)).sum()
            third = ((owner != sources) & (owner != targets) & (targets == host)).sum()
            assert third == max(0, spare - could)


def test_what_one_has_too_many_of_goes_to_the_sources_hosts() -> None:
    sources = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2], np.uint8)
    assert deal_links(sources, np.zeros(9, np.uint8), 3).tolist() == sources.tolist()
    few = deal_links(np.array([0, 0, 0, 1, 0, 0], np.uint8), np.zeros(6, np.uint8), 3)
    assert few.tolist() == [0, 0, 2, 1, 2, 1]  # and the last ones to who has none


def until_told(loader: Any) -> list[Any]:
    """Train until another host is heard of: what hosts say of themselves comes beside the mini-batches."""
    deadline, found = time.monotonic() + 20, list[Any]()
    while time.monotonic() < deadline and len(found) < 100_000:
        found += [batch.input_id.tolist() for batch in loader]
    return found


@pytest.mark.parametrize("other", ["", "links", "mode"])
def test_a_host_without_links_and_hosts_that_say_other_ones(folder: Path, other: str) -> None:
    alike = not other
    links = np.array([[3], [5]]) if alike else np.arange(2 * 60).reshape(2, 60)

    def run(store: Any) -> Any:
        second = store.place.host == 1
        given = links[::-1] if other == "links" and second else links
        mode = "rolling" if other == "mode" and second else "online"
        with LinkNeighborLoader(store, [2], given, memory="32MiB", mode=mode) as loader:
            return until_told(loader)

    with hosts(folder / "one-split", HOSTS) as (stores, _):
        found = each(stores, run)
    if alike:
        assert all("1 links are too few for 2 hosts" in str(one) for one in found), found
    else:
        assert all(isinstance(one, PeerError) for one in found), found


def test_hosts_that_have_recorded_other_links_do_not_train_together(folder: Path) -> None:
    """Of one host the compiled trace is gone, and it records other mini-batches than those that others
    repeat."""
    place = folder / "one-whole"

    def run(store: Any) -> Any:
        size = 6 if first else 12
        given: dict[str, Any] = {"mode": "compiled", "recorded_epochs": 1, "memory": "32MiB", "name": "again"}
        links = np.arange(80).reshape(2, 40)
        with LinkNeighborLoader(store, [2], links, batch_size=size, reuse=not first, **given) as loader:
            return until_told(loader) if not first else [batch.input_id.tolist() for batch in loader]

    first = True
    with hosts(place, HOSTS, memory="24MiB") as (stores, _):
        assert all(isinstance(one, list) for one in each(stores, run))
    shutil.rmtree(place / "host-1" / "packs")
    first = False
    with hosts(place, HOSTS, memory="24MiB") as (stores, _):
        found = each(stores, run)
    assert "reuse= finds epochs of 4 mini-batches" in str(found[0])
    assert isinstance(found[1], PeerError), found


class _Told(list[Any]):
    def set_epoch(self, epoch: int) -> None:
        self.reverse()


def test_lists_that_are_told_the_epoch_are_not_looked_at_ahead() -> None:
    """Their next epoch would be looked at while this one is gone through, by the same list."""
    check_known_ahead([np.arange(3)])
    with pytest.raises(ArgumentError, match=r"_Told.* has set_epoch\(\), which says for all"):
        check_known_ahead(_Told([np.arange(3)]))


def test_mini_batches_of_a_host_without_a_store(folder: Path) -> None:
    """Of links that are divided evenly nothing stands twice, and seeds are no more than there are nodes."""
    with featstore.open(folder / "one") as store, store.sampler([2], memory="16MiB") as sampler:
        around = LinkSampler(sampler, negatives=Negatives("binary", 2))
        links, owner = np.arange(40).reshape(2, 20), np.arange(20) % 2
        made = LinkBatches(around, links, 4, owner=owner, hosts=2, ranks=[1], world_size=2)
        assert (len(made), made.padded, made.num_replicas) == (3, 0, 2)
        assert made[0]["input_id"].tolist() == [1, 3, 5, 7]
        assert made.most_seeds == {"": 2 * (4 + 8)}
        assert LinkBatches(around, links, 1000, owner=owner, hosts=2, ranks=[1], world_size=2).most_seeds == {
            "": 60
        }
        uneven = LinkBatches(around, links, 4, owner=np.arange(20) % 4 // 3, hosts=2, ranks=[1], world_size=2)
        assert (len(uneven), uneven.padded, uneven.dropped) == (4, 10, 0)
        with pytest.raises(ArgumentError, match="leaves no mini-batch of 8 links for each of 2 hosts"):
            LinkBatches(
                around,
                links,
                8,
                owner=np.arange(20) % 4 // 3,
                hosts=2,
                ranks=[1],
                world_size=2,
                drop_last=True,
            )
