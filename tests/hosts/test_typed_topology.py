"""Topology of edge types that is split among hosts: mini-batches are those that are sampled from all of it,
edge by edge, whoever owns the nodes, and loaders train on them in every mode.

Hosts are threads, as in ``test_split_topology.py``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_split_topology import each, hosts, split

import featstore
from featstore.errors import BudgetError, ClosedError, FormatError, SourceError
from featstore.hosts.typed_sampler import TypedHostsSampler
from featstore.sampling.typed_stored import TypedStoredSampler

READER = Path(__file__).parents[2] / "formats/v1/reader.py"
WRITES, CITES, IN, HAS = (
    ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue"),
    ("venue", "has", "paper"),
)  # fmt: skip
EDGES = {WRITES: 700, CITES: 1500, IN: 300, HAS: 400}
NODES = {"paper": 300, "author": 130, "venue": 9}


def packed(path: Path, seed: int, order: Any = "ldg", share: float = 1) -> featstore.Store:
    """Papers, authors, and venues without features; some papers gather nothing, some edges stand twice."""
    rng = np.random.default_rng(seed)
    edges = {
        of: np.stack([rng.integers(0, NODES[end], int(count * share)) for end in (of[0], of[2])])
        for of, count in EDGES.items()
    }
    tables: dict[str, Any] = {
        "paper": rng.standard_normal((300, 7), np.float32), "author": rng.integers(0, 99, (130, 3), np.int16),
        "venue": 9,
    }  # fmt: skip
    arrays = {"paper.y": np.arange(300) % 7, "paper.train": np.arange(1, 300, 3)}
    return featstore.pack(
        path, tables, graph=edges, arrays=arrays, order=order, hubs=0.1, memory="64MiB", overwrite=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("typed-topology")
    with packed(made / "s", 5) as store:
        for count in (1, 2, 3):
            copies = "1x" if count == 3 else None
            split(store, count, made / f"parts{count}", train="paper.train", halo_disk=copies)
        split(store, 2, made / "whole2", train="paper.train", split_topology=False)
    with hosts(made / "parts1", 1) as ((alone,), _):  # compile, outside of any time-out
        sample_on(alone, 1)
    return made


def sampler_on(store: Any, fanouts: Any, memory: int | str = "8MiB", seed: int = 0) -> TypedHostsSampler:
    return TypedHostsSampler(store, "paper", fanouts, memory=memory, seed=seed)


def sample_on(store: Any, times: int) -> None:
    with sampler_on(store, (4, 4)) as sampler:
        for index in range(times):
            sampler.sample(np.random.default_rng(index).permutation(300)[:60], index)


def same(one: Any, two: Any) -> None:
    for name in ("node", "row", "col", "edge_id"):
        mine, its = getattr(one, name), getattr(two, name)
        assert set(mine) == set(its)
        for of in mine:
            np.testing.assert_array_equal(mine[of], its[of], f"{name} {of}")
    assert one.num_sampled_nodes == two.num_sampled_nodes
    assert one.num_sampled_edges == two.num_sampled_edges


FANOUT = st.sampled_from([0, 1, 3, -1])


@settings(max_examples=5)
@given(
    seed=st.integers(0, 2**20), count=st.integers(1, 3), order=st.sampled_from(["ldg", "given"]),
    body_bytes=st.sampled_from([192, 1 << 10, 1 << 16]), share=st.sampled_from([0.02, 1]),
    fanouts=st.one_of(
        st.lists(FANOUT, min_size=1, max_size=3),
        st.fixed_dictionaries({of: st.tuples(FANOUT, FANOUT) for of in EDGES}),
    ),
)  # fmt: skip
def test_mini_batches_are_those_of_the_whole_topology(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, seed: int, count: int, order: str,
    body_bytes: int, share: float, fanouts: Any,
) -> None:  # fmt: skip
    """Whatever fits a message, and whoever owns the seeds."""
    place = tmp_path_factory.mktemp("any")
    with packed(place / "s", seed, order, share) as store:
        split(store, count, place / "parts")
        with (
            hosts(place / "parts", count, body_bytes=body_bytes) as (stores, _),
            TypedStoredSampler(store, "paper", fanouts, memory="32MiB", seed=seed) as whole,
        ):

            def check(here: featstore.SplitStore) -> int:
                rng = np.random.default_rng([seed, here.place.host])
                with sampler_on(here, fanouts, seed=seed) as sampler:
                    for index in range(3):
                        seeds = rng.permutation(300)[: 1 + 12 * index]
                        same(sampler.sample(seeds, index, epoch=2), whole.sample(seeds, index, epoch=2))
                return 1

            assert each(stores, check) == [1] * count
        for name in ("topology", *(f"host-{host}" for host in range(count))):
            assert featstore.verify(place / "parts" / name).ok


def test_the_specification_has_them(folder: Path) -> None:
    """What another program reads: lists with nodes of the whole store, whose numbers are theirs there; and
    degrees of the halo of a type, which several relations name."""
    spec = importlib.util.spec_from_file_location("v1_reader", READER)
    assert spec is not None
    assert spec.loader is not None
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    with featstore.open(folder / "s") as store:
        degrees = {name: np.diff(graph.csc()[0]) for name, graph in store.graphs.items()}
        seen = dict.fromkeys(store.graphs, 0)
        for host in range(3):
            part = reader.Store(folder / f"parts3/host-{host}")
            for name, (offsets, sources, _) in part.lists.items():
                seen[name] += len(sources)
                assert len(offsets) == len(part.rows[store.graphs[name].table.name]) + 1
            of_papers = [f"{'__'.join(of)}.halo_ids" for of in EDGES if of[0] == "paper"]
            papers = np.unique(np.concatenate([part.arrays[one] for one in of_papers]))
            for of in (WRITES, CITES, HAS):
                name = "__".join(of)
                np.testing.assert_array_equal(part.arrays[f"{name}.halo_degrees"], degrees[name][papers])
        assert seen == {name: graph.edges for name, graph in store.graphs.items()}


def test_loaders_give_what_they_give_over_the_whole_topology(folder: Path) -> None:
    """Rows, arrays, nodes and edges on each of two hosts, in every mode, and with rows of others kept by
    looking ahead or as MassiveGNN does it."""
    ways: dict[str, dict[str, Any]] = {
        "online": {}, "ahead": {"halo": "30KiB"}, "massivegnn": {"halo": featstore.MassiveGNN(0.25, delta=2)},
        "compiled": {"mode": "compiled", "name": "c"}, "rolling": {"mode": "rolling", "name": "r"},
        "partitions": {"mode": "partitions"},
    }  # fmt: skip

    def batches(store: featstore.SplitStore) -> list[tuple[str, tuple[bytes, ...]]]:
        made: list[tuple[str, tuple[bytes, ...]]] = []
        for name, more in ways.items():
            options = {
                "rank": store.place.host,
                "world_size": 2,
                "attach": "paper.y",
                "memory": "48MiB",
            } | more
            options |= {} if name in ("online", "ahead", "massivegnn", "partitions") else {"name": name}
            seeds = ("paper", store.arrays["paper.train"])
            with store.loader(seeds=seeds, fanouts=(3, -1), batch_size=9, **options) as loader:
                for batch in loader:
                    assert (batch.y["paper"] == batch.n_id["paper"] % 7).all()
                    parts = [*batch.n_id.values(), *batch.edge_index.values(), *batch.x.values()]
                    made.append((name, tuple(np.asarray(part).tobytes() for part in parts)))
        return made

    found = []
    for parts in (folder / "parts2", folder / "whole2"):
        with hosts(parts, 2) as (stores, _):
            found.append(each(stores, batches))
            received = [store.received_lists()[0] for store in stores]
            assert [one > 0 for one in received] == [parts.name == "parts2"] * 2
    assert found[0] == found[1]
    assert {name for name, _ in found[0][0]} == set(ways)


def test_other_hosts_are_asked_once_a_hop_about_all_relations(folder: Path) -> None:
    with hosts(folder / "parts3", 3) as (stores, _), sampler_on(stores[0], (3, 3)) as sampler:
        sampler.sample(np.arange(0, 300, 9))
        stats = sampler.stats()
        assert (stats.batches, stats.exchanges) == (1, 2)
        assert 0 < stats.nodes_remote < stats.edges_asked
        assert stores[0].received_lists()[0] == stats.nodes_remote


def test_what_cannot_be_had_says_so(folder: Path) -> None:
    with hosts(folder / "parts2", 2) as (stores, _):
        here = stores[0]
        with pytest.raises(BudgetError) as small, sampler_on(here, (-1, -1), 9000) as sampler:
            sampler.sample(np.arange(200))
        assert small.value.needed_bytes > small.value.given_bytes == 9000
        with pytest.raises(SourceError, match="a fan-out of 40,000 is more than the"):
            sampler_on(here, {of: (40_000 if of == CITES else 2,) for of in EDGES})
        sampler = sampler_on(here, (2,))
        sampler.close()
        with pytest.raises(ClosedError, match="is closed"):
            sampler.sample(np.arange(3))
        given: dict[str, Any] = {"seeds": ("paper", np.arange(9)), "fanouts": (2,), "memory": "48MiB"}
        with pytest.raises(SourceError, match="'induced' looks at whole lists"):
            here.loader(**given, subgraph_type="induced", rank=0, world_size=2)
        with pytest.raises(SourceError, match=r"each host has the lists of its own nodes alone"):
            here.graphs["author__writes__paper"].csc()


def test_a_loader_without_room_for_its_seeds_says_so_at_once(folder: Path) -> None:
    with hosts(folder / "parts1", 1) as ((alone,), _):
        options: dict[str, Any] = {"seeds": ("paper", None), "fanouts": (3,), "batch_size": 64}
        memory = 1
        for _ in range(14):  # for relation after relation of a hop
            try:
                with alone.loader(memory=memory, **options) as loader:
                    assert len(list(loader)) == len(loader)
                    break
            except BudgetError as error:
                assert error.given_bytes == memory < error.needed_bytes
                memory = error.needed_bytes
        else:
            pytest.fail("what was named is not enough")


def test_the_room_that_seeds_need_is_known_before(folder: Path) -> None:
    """Of all relations that lead to them."""
    with hosts(folder / "parts1", 1) as ((alone,), _):
        with pytest.raises(BudgetError) as small:
            sampler_on(alone, (1,), 1).check_room({"paper": 90})
        with (
            sampler_on(alone, (1,), small.value.needed_bytes) as sampler,
            pytest.raises(BudgetError, match="have neighbours of other hosts"),
        ):
            sampler.sample(np.arange(90))


def test_neighbours_that_are_no_nodes_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the type that sources are of: there are fewer venues than papers."""
    with hosts(folder / "parts1", 1) as ((alone,), _):
        lists = alone.lists()[0].graphs["venue__has__paper"]

        def wrong(positions: Any, out: Any) -> Any:
            out.neighbours[:] = 9
            return featstore.engine.request.answered(out)

        monkeypatch.setattr(lists, "_read", wrong)
        with pytest.raises(FormatError, match=r"of graph 'venue__has__paper' comes from node 9 of 9"):
            sample_on(alone, 1)
