"""All hosts go through the same steps, or are told: however unequal their seeds are, whatever one of them
resumes, and whatever goes wrong.

Hosts are threads, as in ``test_split_topology.py``."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_child
from test_sampled_ahead import HOSTS, NODES, write_parts
from test_split_topology import each, hosts, split

import featstore
from featstore.errors import ArgumentError, ClosedError, FeatstoreWarning, IdError, PeerError, SourceError
from featstore.hosts import loaders, split_store
from featstore.hosts.places import HostPlace
from featstore.sampling.batches import RankedBatches
from featstore.sampling.ranked import NO_SEED, owned_share


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = write_parts(tmp_path_factory.mktemp("in-step"), pack, edge_ids=False)
    with featstore.open(made / "t") as store:
        split(store, HOSTS, made / "split-types", split_topology=True)
        split(store, 1, made / "one", split_topology=True)
        warm_up(store, ("b", np.arange(9)))
    with featstore.open(made / "s") as store:
        warm_up(store, np.arange(9), "online", "compiled", "rolling", "partitions")
    with featstore.open_split(made / "one", memory="24MiB") as store:
        warm_up(store, ("b", np.arange(9)))
    return made


def warm_up(store: Any, seeds: Any, *modes: str) -> None:
    """Have kernels compiled, outside of any time-out."""
    for mode in modes or ("online",):
        with store.loader(mode=mode, seeds=seeds, fanouts=(3, 2), memory="24MiB") as loader:
            list(loader)


def said(store: Any, seeds: Any, batch_size: int = 8, **more: Any) -> dict[str, Any]:
    options = {"seeds": seeds, "fanouts": (3, 2), "batch_size": batch_size, "memory": "24MiB"}
    return options | {"rank": store.place.host, "world_size": HOSTS} | more


def owned(stores: list[Any], table: str, counts: tuple[int, int]) -> np.ndarray:
    """Seeds, of which hosts own so many each."""
    owner = stores[0].owners[table].hosts
    return np.concatenate([np.flatnonzero(owner == host)[:count] for host, count in enumerate(counts)])


@given(data=st.data(), hosts=st.integers(1, 4), ranks=st.integers(1, 3), batch_size=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_shares_of_hosts(data: Any, hosts: int, ranks: int, batch_size: int) -> None:
    """All have equal steps; each seed is at least once in some mini-batch of its host, in none twice, and in
    none is nothing."""
    counts = data.draw(st.lists(st.integers(1, 15), min_size=hosts, max_size=hosts))
    owner = np.repeat(np.arange(hosts), counts)
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(len(owner))
    shares = [owned_share(order, owner, batch_size, k, ranks, hosts) for k in range(hosts * ranks)]
    each_rank = -(-max(counts) // ranks)
    assert {len(share.seeds) for share in shares} == {each_rank}
    seen = list[int]()
    for rank, share in enumerate(shares):
        for begin in range(0, each_rank, batch_size):
            batch = share.seeds[begin : begin + batch_size]
            batch = batch[batch != NO_SEED]
            assert len(batch)
            assert len(set(batch.tolist())) == len(batch)
            assert (owner[batch] == rank // ranks).all()
            seen += batch.tolist()
    assert set(seen) == set(range(len(owner)))
    assert {share.padded for share in shares} == {len(seen) - len(owner)}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("whole", "online"), ("split", "online"), ("types", "online"), ("split-types", "online"),
     ("whole", "compiled"), ("whole", "rolling")],
)  # fmt: skip
@pytest.mark.parametrize("counts", [(5, 4), (9, 3)])
def test_fewer_seeds_than_a_mini_batch_has(
    folder: Path, kind: str, mode: str, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every host has as many mini-batches as the one with most seeds, and all of its seeds are in them."""
    monkeypatch.setattr("featstore.loaders.over_hosts._UNEVEN", 9.0)  # which would be told
    typed = kind.endswith("types")

    def train(store: Any) -> Any:
        given_seeds = ("b", seeds) if typed else seeds
        with store.loader(mode=mode, **said(store, given_seeds), **more) as loader:
            batches = list(map(seeds_of, loader))
            return batches, loader.report().padded

    def seeds_of(batch: Any) -> list[int]:
        nodes = batch.n_id["b"] if typed else batch.n_id
        return [int(node) for node in nodes[: batch.batch_size]]

    more: dict[str, Any] = {} if mode == "online" else {"disk": "200MiB", "name": f"few{counts[1]}"}
    with hosts(folder / kind, HOSTS, memory="24MiB") as (stores, _):
        seeds = owned(stores, "b" if typed else "features", counts)
        own = stores[0].owners["b" if typed else "features"].hosts
        made = each(stores, train)
    found = [one[0] for one in made]
    assert [len(one) for one in found] == [-(-max(counts) // 8)] * HOSTS, made
    for host, batches in enumerate(found):
        assert all(len(set(batch)) == len(batch) > 0 for batch in batches)
        assert {seed for batch in batches for seed in batch} == set(seeds[own[seeds] == host].tolist())
    if mode == "online":
        assert made[0][1] == sum(len(batch) for one in found for batch in one) - len(seeds)


def test_very_uneven_seeds_are_told(folder: Path) -> None:
    """Of those that come again, and of those that are left out."""
    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        seeds = owned(stores, "features", (40, 3))

        def make(store: Any, size: int = 2, **more: Any) -> Any:
            store.loader(**said(store, seeds, size, **more)).close()

        assert each(stores, lambda store: make(store, 40)) == [None, None]  # of one mini-batch each

        for error in each(stores, make):
            assert isinstance(error, FeatstoreWarning)
            assert "3 to 40: so that all have as many mini-batches, seeds of the others come" in str(error)
        for error in each(stores, lambda store: make(store, drop_last=True)):
            assert isinstance(error, FeatstoreWarning)
            assert "seeds of the others are left out" in str(error)


@pytest.mark.parametrize("kind", ["whole", "split"])
def test_an_error_of_a_node_does_not_end_an_epoch_early(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IdError is an IndexError, which Python takes for the end of a sequence."""
    plainly = RankedBatches.__getitem__

    def failing(self: Any, index: Any) -> Any:
        if index == 2:
            raise IdError("there is no such node")
        return plainly(self, index)

    monkeypatch.setattr(RankedBatches, "__getitem__", failing)

    def train(store: Any) -> None:
        with store.loader(**said(store, np.arange(NODES))) as loader:
            for _ in loader:
                pass

    with hosts(folder / kind, HOSTS, memory="24MiB") as (stores, _):
        for error in each(stores, train):
            assert isinstance(error, IdError)


# What hosts resume.


@pytest.mark.parametrize("mode", ["online", "rolling"])
def test_hosts_that_begin_elsewhere_are_told(folder: Path, mode: str) -> None:
    """Each of them, with the first mini-batch or those after it; where both begin alike, nobody is."""
    more = {} if mode == "online" else {"disk": "200MiB", "name": "elsewhere"}

    def train(store: Any) -> None:
        with store.loader(mode=mode, **said(store, np.arange(NODES)), **more) as loader:
            for epochs in ((2, 2), (3, 4), *[(5, 5)] * 50):
                loader.set_epoch(epochs[store.place.host])
                for _ in loader:
                    time.sleep(0.001)

    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        found = each(stores, train)
    told = [one for one in found if isinstance(one, FeatstoreWarning)]
    assert told, found  # the first one that sees it ends here, as warnings are errors
    assert all(
        f"begins epoch {n}" in str(one) or "this host epoch" in str(one) for one in told for n in (3, 4)
    )
    assert {isinstance(one, FeatstoreWarning | PeerError | type(None)) for one in found} == {True}


def test_hosts_in_other_epochs_of_partitions_do_not_wait_for_ever(folder: Path) -> None:
    """Each would wait for how many mini-batches the other's part has."""

    def train(store: Any) -> int:
        with store.loader(mode="partitions", **said(store, np.arange(NODES))) as loader:
            for _ in loader:
                pass
            loader.set_epoch(5 + 2 * store.place.host)
            return sum(1 for _ in loader)

    with hosts(folder / "whole", HOSTS, memory="24MiB", timeout=60.0) as (stores, _):
        found = each(stores, train)
    assert all(isinstance(error, PeerError) for error in found), found
    assert all("begins epoch" in str(error) and "each waits for" in str(error) for error in found), found


def test_the_one_that_looks_late_says_the_same(folder: Path) -> None:
    """By then the other has found that each waits for the other, and has closed its loader."""
    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        exchange = stores[1]._exchange
        number = 6  # of the epoch, of the loader 0
        exchange.loaders.heard_steps(0, number, loaders._ASKED)
        exchange.loaders.heard_steps(0, 0, loaders._CLOSED)
        exchange.loaders.say_steps(0, 5, 3)
        with pytest.raises(PeerError, match=r"begins epoch 6.* each waits for the other"):
            exchange.loaders.steps_of_all(0, 5, lambda: False)


def test_a_state_that_is_refused_changes_nothing(folder: Path) -> None:
    """The rest of an epoch of other mini-batches cannot be divided; then the epoch that is named comes."""

    def train(store: Any) -> Any:
        with store.loader(**said(store, np.arange(NODES), 16)) as loader:
            loader.set_epoch(3)
            next(iter(loader))
            state = loader.state_dict()
        with store.loader(**said(store, np.arange(NODES))) as loader:
            first = [batch.n_id.tolist() for batch in loader]
            loader.set_epoch(0)
            with pytest.raises(ArgumentError, match="save between epochs"):
                loader.load_state_dict(state)
            loader.set_epoch(0)
            return first == [batch.n_id.tolist() for batch in loader]

    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        assert each(stores, train) == [True] * HOSTS


def test_nobody_waits_for_a_host_that_has_closed_its_loader(folder: Path) -> None:
    """Its store stays open, and with it the lines."""

    def train(store: Any) -> int:
        count = 0
        with store.loader(mode="partitions", **said(store, np.arange(NODES))) as loader:
            for _ in range(1 if store.place.host else 4):
                count += sum(1 for _ in loader)
        return count

    with hosts(folder / "whole", HOSTS, memory="24MiB", timeout=60.0) as (stores, _):
        found = each(stores, train)
    assert isinstance(found[0], PeerError), found
    assert "has closed its loader 0, and begins epoch" in str(found[0])
    assert isinstance(found[1], int)


def test_an_endless_number_of_passes_is_of_one_part(folder: Path) -> None:
    with featstore.open_split(folder / "one", memory="24MiB") as store:
        given = {"seeds": ("b", np.arange(9)), "fanouts": (3, 2), "memory": "24MiB", "mode": "partitions"}
        with pytest.raises(ArgumentError, match="passes='auto' follows each rank's own clock"):
            store.loader(passes="auto", **given)


def test_hosts_in_other_loaders_of_partitions_do_not_wait_for_ever(folder: Path) -> None:
    """One trains while the other validates, and the other way round."""

    def train(store: Any) -> None:
        options = [said(store, np.arange(NODES), size, mode="partitions") for size in (8, 9)]
        with store.loader(**options[0]) as one, store.loader(**options[1]) as two:
            for _ in range(3):
                list(one if store.place.host else two)

    with hosts(folder / "whole", HOSTS, memory="64MiB", timeout=60.0) as (stores, _):
        found = each(stores, train)
    assert all(isinstance(error, PeerError) for error in found), found


def test_who_waits_for_another_host_to_begin_may_close(folder: Path) -> None:
    with hosts(folder / "split", HOSTS) as (stores, _):
        given = {"mode": "partitions"}
        loaders = [each(stores[:1], lambda s: s.loader(**said(s, np.arange(NODES), **given)))[0]]
        waiting = Thread(target=lambda: raised.append(each(loaders, list)[0]))
        raised: list[Any] = []
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive(), "the other has no loader"
        loaders[0].close()
        waiting.join(5)
        assert isinstance(raised[0], ClosedError), raised


def test_one_that_is_slow_is_no_other_epoch(folder: Path) -> None:
    """Epochs that all go back to, in whatever order they are reached."""

    def train(store: Any) -> list[int]:
        with store.loader(mode="partitions", **said(store, np.arange(NODES))) as loader:
            counts = []
            for epoch in (3, 1, 1, 0):
                loader.set_epoch(epoch)
                counts.append(sum(1 for _ in loader))
            return counts

    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        one, two = each(stores, train)
    assert one == two


# What hosts say.


def test_hosts_that_sample_differently_are_found(folder: Path) -> None:
    """Options that other modes compared already."""

    def train(store: Any) -> None:
        with store.loader(**said(store, np.arange(NODES), replace=store.place.host == 1)) as loader:
            for _ in range(50):
                for _ in loader:
                    pass

    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        found = each(stores, train)
    assert all(isinstance(error, PeerError) and "other options" in str(error) for error in found), found


def test_another_rank_is_refused(folder: Path) -> None:
    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        with pytest.raises(ArgumentError, match="rank=1 is another process: this is rank 0"):
            stores[0].loader(**said(stores[0], np.arange(NODES), rank=1))
        stores[0].place = HostPlace(0, HOSTS, 0, 2, 0)
        with pytest.raises(ArgumentError, match="each host has 2 ranks"):
            stores[0].loader([np.arange(3)], rank=0, world_size=4, memory="24MiB")


def test_other_time_outs_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is idle is heard of too rarely for who is less patient."""
    plainly = split_store.as_timeout
    waits = iter([20.0, 30.0])
    monkeypatch.setattr(split_store, "as_timeout", lambda value: plainly(next(waits)))
    with (
        pytest.raises(SourceError, match="timeout_seconds differ"),
        hosts(folder / "whole", HOSTS, memory="24MiB"),
    ):
        pass


def test_in_a_forked_process_rows_of_others_are_refused(folder: Path) -> None:
    """Its threads are not there, and nothing would ever come."""

    def refused() -> bool:
        for make in (
            lambda: store.reader(memory="8MiB"),
            lambda: store.sampler((2,)),
            lambda: store.loader(**said(store, np.arange(NODES))),
        ):
            with pytest.raises(ClosedError, match="process"):
                make()
        return True

    with hosts(folder / "split", HOSTS, memory="24MiB") as (stores, _):
        store = stores[0]
        assert in_child(refused) == 0


def test_mode_auto_names_what_has_no_effect(folder: Path) -> None:
    with hosts(folder / "whole", HOSTS, memory="24MiB") as (stores, _):
        store = stores[0]
        with pytest.warns(FeatstoreWarning, match="disk=, epochs= have no effect"):
            store.loader(disk="1GiB", epochs=3, **said(store, np.arange(NODES))).close()
