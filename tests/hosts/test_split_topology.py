"""Topology that is split, too: mini-batches are those sampled from the whole topology, edge by edge, whoever
owns the nodes; and a host that is gone, or a message that was damaged, is told in time.

The hosts here are threads of one process, as in ``test_exchange.py``; over a network:
``test_split_training.py``, ``test_faults.py``."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wires import Meddle, Wires

import featstore
from featstore.base.dtypes import node_dtype
from featstore.errors import (
    ArgumentError,
    BudgetError,
    ClosedError,
    CorruptionError,
    FeatstoreError,
    PeerError,
    SourceError,
)
from featstore.hosts import messages as ms
from featstore.hosts import split_store
from featstore.hosts.neighbours import lay_out_hop, place_lists
from featstore.hosts.opening import Opening
from featstore.hosts.places import HostPlace
from featstore.hosts.questions import Draw, ListsAnswer, OfNodes, Question
from featstore.sampling.picking import empty_picks

NODES = 300
SECONDS = 20.0
WAIT_SECONDS = 200.0  # for what may have to compile kernels first, beside others that do
_here = threading.local()  # which host a thread is


def graph_of(nodes: int, degree: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """CSC with self-loops, edges that occur twice, hubs, and nodes that gather nothing."""
    random = np.random.default_rng(seed)
    degrees = random.integers(0, 2 * degree + 1, nodes) * (random.random(nodes) < 0.8)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, (nodes * random.random(indptr[-1]) ** 2).astype(np.int32)


def store_of(folder: Path, pack: Any, nodes: int, seed: int, ordered: bool) -> featstore.Store:
    rows = np.random.default_rng(seed).standard_normal((nodes, 5), np.float32)
    order = {"order": "ldg", "partitions": 16} if ordered else {"order": "given"}
    arrays = {"train": np.arange(0, nodes, 3), "label": np.arange(nodes) % 5}
    made: featstore.Store = pack(folder / "s", rows, graph=graph_of(nodes, 5, seed), arrays=arrays, **order)
    return made


def split(store: Any, hosts: int, out: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a graph of no communities cannot be cut evenly
        return featstore.split(store, hosts, out, **{"split_topology": True, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("split-topology")
    with store_of(made, pack, NODES, 7, True) as store:
        for hosts in (1, 2, 3):
            split(store, hosts, made / f"parts{hosts}", train="train")
    with featstore.open_split(made / "parts1", memory="12MiB") as alone:  # compile, outside of any time-out
        sample_on(alone, 1)
    return made


@contextmanager
def hosts(
    parts: Path, count: int, *, meddle: Meddle | None = None, timeout: float = SECONDS, body_bytes: int = 0,
    memory: str = "12MiB",
) -> Iterator[tuple[list[featstore.SplitStore], Wires]]:  # fmt: skip
    """The stores of all hosts, each opened in a thread."""
    wires = Wires(count, meddle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            split_store, "place_among", lambda hosts: HostPlace(_here.host, hosts, 0, 1, _here.host)
        )
        patch.setattr(Opening, "come", lambda self, place, timeout: setattr(self, "place", place))
        patch.setattr(Opening, "open_wire", lambda self: wires.wire(self.place.host))
        if body_bytes:
            patch.setattr(split_store, "body_bytes_for", lambda *_: body_bytes)

        def opened(host: int) -> featstore.SplitStore:
            _here.host = host
            return featstore.open_split(parts, memory=memory, timeout_seconds=timeout)

        with ThreadPoolExecutor(count) as pool:
            stores = [
                one.result(WAIT_SECONDS) for one in [pool.submit(opened, host) for host in range(count)]
            ]
            try:
                yield stores, wires
            finally:
                for one in [pool.submit(store.close) for store in stores]:
                    one.result(SECONDS)


def each(stores: list[Any], do: Callable[[Any], Any]) -> list[Any]:
    """What every host does, all at the same time; errors as results."""

    def tried(store: Any) -> Any:
        try:
            return do(store)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(stores)) as pool:
        return [one.result(WAIT_SECONDS) for one in [pool.submit(tried, store) for store in stores]]


def same(one: Any, two: Any) -> None:
    for name in ("node", "row", "col", "edge_id"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), name)
    assert one.num_sampled_nodes == two.num_sampled_nodes
    assert one.num_sampled_edges == two.num_sampled_edges


# Mini-batches.


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**20), count=st.integers(1, 3), ordered=st.booleans(),
    body_bytes=st.sampled_from([192, 1 << 10, 1 << 16]), nodes=st.integers(40, 200),
    fanouts=st.lists(st.sampled_from([1, 2, 5, -1]), min_size=1, max_size=3),
)  # fmt: skip
def test_mini_batches_are_those_of_the_whole_topology(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, pack: Any, seed: int, count: int, ordered: bool,
    body_bytes: int, nodes: int, fanouts: list[int],
) -> None:  # fmt: skip
    """Whatever fits a message: of 192 bytes, 6 nodes and 12 neighbours."""
    place = tmp_path_factory.mktemp("any")
    with store_of(place, pack, nodes, seed, ordered) as store:
        split(store, count, place / "parts")
        with (
            hosts(place / "parts", count, body_bytes=body_bytes) as (stores, _),
            store.sampler(fanouts, memory="16MiB", seed=seed) as whole,
        ):

            def check(here: featstore.SplitStore) -> int:
                rng = np.random.default_rng([seed, here.place.host])
                with here.sampler(fanouts, memory="8MiB", seed=seed) as sampler:
                    for index in range(3):
                        seeds = rng.permutation(nodes)[: 1 + 12 * index]
                        same(sampler.sample(seeds, index, epoch=2), whole.sample(seeds, index, epoch=2))
                return 1

            assert each(stores, check) == [1] * count


def test_a_loader_gives_what_it_gives_over_the_whole_topology(folder: Path, tmp_path: Path) -> None:
    """Rows, arrays, nodes and edges, on each of two hosts, with rows of others kept by looking ahead or as
    MassiveGNN does it."""
    split(folder / "s", 2, tmp_path / "whole", train="train", split_topology=False)

    def batches(store: featstore.SplitStore) -> list[tuple[bytes, ...]]:
        rank, made = store.place.host, []
        for halo in (None, "30KiB", featstore.MassiveGNN(0.25, delta=2)):
            options: dict[str, Any] = {"halo": halo, "rank": rank, "world_size": 2, "attach": "label"}
            with store.loader(seeds="train", fanouts=(3, -1), batch_size=9, memory="48MiB", **options) as one:
                for _ in range(2):
                    for batch in one:
                        assert (batch.label == batch.n_id % 5).all()
                        parts = (batch.n_id, batch.edge_index, batch.x)
                        made.append(tuple(part.tobytes() for part in parts))
        return made

    found = []
    for parts in (folder / "parts2", tmp_path / "whole"):
        with hosts(parts, 2) as (stores, _):
            found.append(each(stores, batches))
            assert [store.splits_topology for store in stores] == [parts.name == "parts2"] * 2
            received = [store.received_lists()[0] for store in stores]
            if parts.name == "parts2":
                graph = stores[0].graphs["features"]
                for of_all in (graph.csc, graph.edge_ids, graph.weights, graph.times, graph.offsets):
                    with pytest.raises(SourceError, match=r"lists of its own nodes alone; sample with"):
                        of_all()
            assert [one > 0 for one in received] == [parts.name == "parts2"] * 2
    assert found[0] == found[1]
    assert len(found[0][0]) > 30


def test_other_hosts_are_asked_once_a_hop_each(folder: Path) -> None:
    with hosts(folder / "parts3", 3) as (stores, wires):
        before = dict(wires.sent)
        with stores[0].sampler((3, 3), memory="8MiB") as sampler:
            sampler.sample(np.arange(0, NODES, 9))
            assert sampler.stats().exchanges == 2
            assert sampler.stats().nodes_remote > 0
        for peer in (1, 2):
            assert wires.sent[0, peer] - before[0, peer] == 2
        # what is sent are the neighbours that were picked, never a list
        assert stores[0].received_lists()[1] <= sampler.stats().nodes_remote * (16 + 3 * 4)


def test_lists_of_which_some_are_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours from memory, from disk, and of both."""
    from featstore.sampling.cache import NeighbourCache

    fill = NeighbourCache.fill
    with featstore.open(folder / "s") as store, store.sampler((4, 4), memory="16MiB") as whole:
        for room in (0, 400, 1 << 20):
            monkeypatch.setattr(NeighbourCache, "fill", lambda c, reader, _, room=room: fill(c, reader, room))
            with hosts(folder / "parts2", 2) as (stores, _):
                for here in stores:
                    with here.sampler((4, 4), memory="8MiB") as sampler:
                        same(sampler.sample(np.arange(50)), whole.sample(np.arange(50)))


# What goes wrong.


def sample_on(store: featstore.SplitStore, times: int = 2000) -> None:
    with store.sampler((5, 5), memory="8MiB") as sampler:
        for index in range(times):
            sampler.sample(np.random.default_rng(index).permutation(NODES)[:60], index)


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_host_that_is_gone_while_others_sample_is_told_in_time(folder: Path, how: str) -> None:
    with hosts(folder / "parts3", 3, timeout=1.0) as (stores, wires):
        timer = threading.Timer(0.2, getattr(wires, how), [2])
        timer.start()
        errors = each(stores[:2], sample_on)
        timer.join()
        for error in errors:
            assert isinstance(error, PeerError), error
            assert error.host == 2


def test_a_damaged_message_is_found(folder: Path) -> None:
    """And no mini-batch is made of it."""

    def meddle(source: int, to: int, number: int, data: np.ndarray) -> np.ndarray:
        kind = int(data[8:16].view(np.int64)[0])
        if (source, to) == (1, 0) and kind == ms.Kind.ROWS and len(data) > ms.HEADER_BYTES:
            data[ms.HEADER_BYTES + 5] ^= 4
        return data

    with (
        hosts(folder / "parts2", 2, meddle=meddle, timeout=0.5) as (stores, _),
        pytest.raises(PeerError, match="damaged message"),
    ):
        sample_on(stores[0], 1)


def test_answers_that_contradict_themselves_are_refused(folder: Path) -> None:
    """Whole as they were sent, and yet no answer to what was asked: too long, or of lists that cannot be."""

    def lie(change: Callable[[np.ndarray], np.ndarray]) -> Meddle:
        def meddle(source: int, to: int, number: int, data: np.ndarray) -> np.ndarray:
            found = ms.parse_header(data)
            if (source, to) == (1, 0) and found.kind == ms.Kind.ROWS:
                body = change(data[ms.HEADER_BYTES :].copy())
                data = np.concatenate([data[: ms.HEADER_BYTES], body])
                ms.seal(data, found.kind, found.number, found.detail)
            return data

        return meddle

    def degree(value: int) -> Callable[[np.ndarray], np.ndarray]:
        def change(body: np.ndarray) -> np.ndarray:
            body[:8].view(np.int64)[0] = value
            return body

        return change

    def foreign(body: np.ndarray) -> np.ndarray:
        body[-4:].view(np.int32)[0] = NODES
        return body

    cases = [(lambda body: body[:-8], PeerError), (degree(-1), PeerError), (degree(1 << 40), PeerError)]
    for change, error in [*cases, (foreign, FeatstoreError)]:
        with (
            hosts(folder / "parts2", 2, meddle=lie(change), timeout=0.5) as (stores, _),  # type: ignore[arg-type]
            pytest.raises(error, match=r"not the neighbours of|comes from node 300 of 300"),
        ):
            sample_on(stores[0], 1)


def test_an_owner_that_cannot_read_its_lists_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The typed error arrives, and says where."""
    with hosts(folder / "parts2", 2) as (stores, _):

        def broken(*_: Any) -> Any:
            raise CorruptionError("/there", 4096, "one", "another")

        monkeypatch.setattr(stores[1].lists()[0].graphs["features"], "_read", broken)
        with pytest.raises(CorruptionError, match="/there") as found:
            sample_on(stores[0], 1)
        assert "on host 1 (rank 10)" in found.value.__notes__


def test_what_cannot_be_had_says_so(folder: Path, tmp_path: Path) -> None:
    with hosts(folder / "parts2", 2) as (stores, _):
        here = stores[0]
        with pytest.raises(BudgetError) as small, here.sampler((-1, -1), memory=9000) as sampler:
            sampler.sample(np.arange(200))
        with pytest.raises(SourceError, match="a fan-out of 40,000 is more than the"):
            here.sampler((40_000,), memory="8MiB")
        with pytest.raises(SourceError, match="no host has all lists of graph 'features'"):
            list(featstore.ProximityOrder(here, np.arange(9), batch_size=3))
        with pytest.raises(SourceError, match="partitions are those of each host's own part"):
            featstore.PartitionOrder(here, np.arange(9), batch_size=3)
        with pytest.raises(ArgumentError, match="no option 'engine'"):
            here.sampler((2,), memory="8MiB", engine="threads")
        sampler = here.sampler((2,), memory="8MiB")
        sampler.close()
        with pytest.raises(ClosedError, match="is closed"):
            sampler.sample(np.arange(3))
        assert small.value.needed_bytes > 9000
    with featstore.open(folder / "s") as store, pytest.raises(ArgumentError, match="must be True or False"):
        featstore.split(store, 2, tmp_path / "p", split_topology="yes")  # type: ignore[arg-type]


def test_a_loader_without_room_for_its_seeds_says_so_at_once(folder: Path) -> None:
    options: dict[str, Any] = {"seeds": "train", "fanouts": (3,), "batch_size": 64}
    with hosts(folder / "parts1", 1) as (stores, _):
        with pytest.raises(BudgetError, match="of this mini-batch") as found:
            stores[0].loader(memory=1, **options)
        named = [found.value.needed_bytes]
        while len(named) < 8:
            try:
                with stores[0].loader(memory=named[-1], **options) as loader:
                    assert len(list(loader)) == len(loader)
                break
            except BudgetError as error:
                assert error.needed_bytes > named[-1]
                named.append(error.needed_bytes)
        assert 1 < len(named) < 8


def test_memory_is_as_promised(folder: Path) -> None:
    """Parts of the budget add up to it, the smallest works, and less is told."""
    with pytest.raises(BudgetError) as found, hosts(folder / "parts1", 1, memory="1MiB"):
        pass
    needed = found.value.needed_bytes
    with hosts(folder / "parts1", 1, memory=str(needed)) as (stores, _):
        assert sum(stores[0].memory().values()) == needed
        sample_on(stores[0], 1)
    with pytest.raises(BudgetError), hosts(folder / "parts1", 1, memory=str(needed - 1)):
        pass


# Kernels, against plain ones.


@given(st.integers(0, 2**30), st.integers(-1, 6))
def test_a_hop_is_laid_out_as_by_hand(seed: int, fanout: int) -> None:
    """Positions in lists are those that a sampler over the whole graph picks."""
    from featstore.sampling.picking import pick_edges

    random = np.random.default_rng(seed)
    degrees, begins = random.integers(0, 9, 7), random.integers(0, 1000, 7)
    nodes, key = random.permutation(100)[:7], np.uint64(seed)
    counts = degrees if fanout < 0 else np.minimum(degrees, fanout)
    starts, col, edge = np.empty(7, np.int64), *(np.empty(int(counts.sum()), np.int64) for _ in range(2))
    lay_out_hop(nodes, 10, degrees, begins, fanout, key, empty_picks(fanout, 9), starts, col, edge)
    np.testing.assert_array_equal(starts, np.cumsum(counts) - counts)
    np.testing.assert_array_equal(col, 10 + np.repeat(np.arange(7), counts))
    for i in range(7):
        out = np.empty(10, np.int64)
        taken = pick_edges(key, nodes[i], begins[i], degrees[i], fanout, empty_picks(fanout, 9), 0, out)
        np.testing.assert_array_equal(edge[starts[i] :][: counts[i]], out[:taken])
    row, none = np.full(len(col), -1), np.empty(0, np.int64)
    positions = random.permutation(7).astype(np.int32)
    whole = np.concatenate([np.arange(starts[at], starts[at] + counts[at]) for at in positions])
    first = int(random.integers(0, len(whole) + 1))
    place_lists(positions, starts, counts, 0, whole[:first], none, row)
    ends = np.cumsum(counts[positions])
    at = int(np.searchsorted(ends, first, side="right"))
    skip = first - (int(ends[at - 1]) if at else 0)
    place_lists(positions[at:], starts, counts, skip, whole[first:], none, row)
    np.testing.assert_array_equal(row, np.arange(len(row)))


def test_a_question_is_sent_as_it_is() -> None:
    nodes, trees, lows, highs = np.arange(8).reshape(4, 2)
    question = Question(2, -1, np.uint64(2**64 - 3), 5, 4, Draw(0), OfNodes(nodes), 4)
    assert question.numbers().tolist() == [2, -1, -3, 5, 4, 0, 0, 1]
    assert question.edges(np.array([3, 4])) == 2
    assert question.edges(np.array([30, 4])) == 4
    answer = ListsAnswer.of(np.arange(40, dtype=np.uint8), question, node_dtype(9))
    assert [part.nbytes for part in answer] == [16, 16, 0, 8, 0]

    draw = Draw.TREES | Draw.TIMES | Draw.NUMBERS
    question = Question(0, 3, np.uint64(1), 0, 6, draw, OfNodes(nodes, trees, lows, highs), 4)
    assert question.numbers().tolist() == [0, 3, 1, 0, 6, 52, *range(8)]
    again = Question.parsed(question.numbers(), 4)
    assert [one.tolist() for one in again.of] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert again[:6] == question[:6]
    answer = ListsAnswer.of(np.arange(32 + 2 * 16, dtype=np.uint8), question, node_dtype(9))
    assert [part.nbytes for part in answer] == [16, 16, 16, 8, 8]
    assert question.edges(np.array([2, -1])) == 2
    for wrong in ([0, 3, 1], [0, -2, 1, 0, 6, 0], [0, 3, 1, 0, 6, 64], [0, 3, 1, 0, 6, 52, 1]):
        with pytest.raises(ArgumentError, match="contradicts itself"):
            Question.parsed(np.array(wrong), 4)
