"""Orders of training nodes: a permutation each epoch, breadth-first in each sequence, as random as asked for,
resumable."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.base.hashing import random_words
from featstore.errors import ArgumentError, IdError, SourceError
from featstore.sampling.orders import DEFAULT_SEQUENCES, ROOTS, PartitionOrder, TrainingOrder
from featstore.sampling.proximity import ProximityOrder
from featstore.sampling.shuffling import RANDOM_MARGIN, LabelTest, batch_errors, search_sequences

NODES = 600


def graph_of(edges: Any, nodes: int) -> tuple[Any, Any]:
    """The CSC of (source, target) pairs, sources in the order given."""
    sources, targets = np.array(edges, np.int64).reshape(-1, 2).T
    order = np.argsort(targets, kind="stable")
    return np.searchsorted(targets[order], np.arange(nodes + 1)).astype(np.int64), sources[order].astype(
        np.int32
    )


def clustered_graph(
    nodes: int = NODES, clusters: int = 12, seed: int = 0, lone: int = 20
) -> tuple[Any, Any, Any]:
    """An undirected graph of clusters with few edges between them and some nodes without any, and the nodes'
    clusters."""
    rng = np.random.default_rng(seed)
    cluster = rng.integers(0, clusters, nodes)
    left = rng.integers(0, nodes - lone, nodes * 3)
    # The neighbour: a node of the same cluster, but now and then any node.
    by_cluster = np.argsort(cluster[: nodes - lone], kind="stable")
    begin, end = (
        np.searchsorted(cluster[by_cluster], cluster[left], side=side) for side in ("left", "right")
    )
    near = by_cluster[rng.integers(begin, end)]
    right = np.where(rng.random(len(left)) < 0.01, rng.integers(0, nodes - lone, len(left)), near)
    pairs = np.stack([left, right], axis=1)
    return *graph_of(np.concatenate([pairs, pairs[:, ::-1]]), nodes), cluster


def searches_twin(indptr: Any, indices: Any, train: list[int], roots: list[int], sequences: int) -> Any:
    """Breadth-first searches in turn, from the definition: (the nodes met, in order; depth of each in its
    search; its search)."""
    seen: set[int] = set()
    wanted = set(train)
    roots_left = deque(roots)
    # (node, depth), the head half done
    queues: list[deque[tuple[int, int]]] = [deque() for _ in range(sequences)]
    edges: list[deque[int]] = [deque() for _ in range(sequences)]  # what is left of the head's list
    searches = [0] * sequences
    met: list[tuple[int, int, int]] = []
    for turn in range(len(train)):
        queue, left = queues[turn % sequences], edges[turn % sequences]
        new = None
        while new is None:
            if not queue:
                while roots_left[0] in seen:
                    roots_left.popleft()
                new, depth = roots_left.popleft(), 0
                searches[turn % sequences] += 1
                queue.append((new, 0))
                left.extend(indices[indptr[new] : indptr[new + 1]].tolist())
                seen.add(new)
                continue
            depth = queue[0][1] + 1
            while left and new is None:
                source = left.popleft()
                if source not in seen:
                    seen.add(source)
                    queue.append((source, depth))
                    new = source if source in wanted else None
            if not left and new is None:
                queue.popleft()
                if queue:
                    head = queue[0][0]
                    left.extend(indices[indptr[head] : indptr[head + 1]].tolist())
        met.append((new, depth, searches[turn % sequences]))
    return met


def errors_twin(labels: Any, order: Any, batch_size: int) -> list[float]:
    """Total variation distance of each full mini-batch's labels from the whole's."""
    names, whole = np.unique(labels, return_counts=True)
    batches = max(1, len(order) // batch_size)
    shares = []
    for batch in range(batches):
        own = labels[order[batch * batch_size : (batch + 1) * batch_size]]
        share = np.array([(own == name).mean() for name in names])
        shares.append(0.5 * np.abs(share - whole / len(labels)).sum())
    return shares


@st.composite
def graphs(draw: Any) -> tuple[Any, Any, Any]:
    """A directed multigraph with loops and unreachable parts, and training nodes in any order."""
    nodes = draw(st.integers(1, 40))
    node = st.integers(0, nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=100))
    train = draw(st.lists(node, min_size=1, unique=True))
    return *graph_of(edges, nodes), np.array(train)


def roots_of(order: ProximityOrder, epoch: int) -> list[int]:
    """The shuffled training nodes from which searches begin."""
    words = random_words(order._key(ROOTS, epoch), len(order))
    return order.train[np.argsort(words, kind="stable")].tolist()  # type: ignore[no-any-return]


def rotated(values: list[int]) -> set[tuple[int, ...]]:
    return {tuple(values[shift:] + values[:shift]) for shift in range(len(values))}


@settings(max_examples=120)
@given(
    graph=graphs(),
    sequences=st.integers(1, 7),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
)
def test_sequences_are_breadth_first(graph: Any, sequences: int, seed: int, epoch: int) -> None:
    indptr, indices, train = graph
    order = ProximityOrder(
        (indptr, indices), train, sequences=min(sequences, len(train)), batch_size=4, seed=seed
    )
    order.set_epoch(epoch)
    nodes = order.nodes()
    assert nodes.dtype == np.int64
    assert sorted(nodes) == sorted(train)
    met = searches_twin(indptr, indices, train.tolist(), roots_of(order, epoch), order.sequences)
    for number in range(order.sequences):
        # The sequence is what the searches met in its turns, begun anywhere and gone round.
        own = met[number :: order.sequences]
        assert tuple(nodes[number :: order.sequences].tolist()) in rotated([node for node, _, _ in own])
        # Within one search, depth never falls: the twin searches breadth first.
        for (_, before, search), (_, after, same) in pairwise(own):
            assert after >= before or same != search


def test_one_sequence_is_the_textbook_search() -> None:
    indptr, indices, _ = clustered_graph()
    order = ProximityOrder((indptr, indices), np.arange(NODES), sequences=1, batch_size=8, seed=3)
    expected: list[int] = []
    seen: set[int] = set()
    for root in roots_of(order, 0):
        queue = deque([root] if root not in seen else [])
        seen.add(root)
        while queue:
            node = queue.popleft()
            expected.append(node)
            for source in indices[indptr[node] : indptr[node + 1]].tolist():
                if source not in seen:
                    seen.add(source)
                    queue.append(source)
    assert tuple(order.nodes().tolist()) in rotated(expected)


@settings(max_examples=35)
@given(
    labels=st.lists(st.integers(-2, 5), min_size=1, max_size=60),
    batch_size=st.integers(1, 70),
    seed=st.integers(0, 100),
)
def test_shuffling_error_equals_numpy(labels: list[int], batch_size: int, seed: int) -> None:
    by_node = np.array([9, *labels, 9])  # the first and the last do not train
    train = np.arange(1, len(labels) + 1)
    order = np.random.default_rng(seed).permutation(len(labels))
    test = LabelTest(by_node, train, batch_size, len(by_node))
    expected = errors_twin(by_node[train], order, batch_size)
    errors = np.empty(len(expected))
    batch_errors(test.classes, order, batch_size, test.whole, errors)
    np.testing.assert_allclose(errors, expected, atol=1e-12)
    assert test.error(order) == pytest.approx(np.mean(expected))
    assert test.bound == pytest.approx(np.sqrt(batch_size / len(labels)))
    assert LabelTest(by_node, train, batch_size, len(by_node), 4).bound == pytest.approx(2 * test.bound)


class TestNumberOfSequences:
    def test_smallest_that_passes(self) -> None:
        indptr, indices, cluster = clustered_graph()
        order = ProximityOrder((indptr, indices), np.arange(NODES), labels=cluster, batch_size=60, seed=1)
        search = order.search
        assert search is not None
        assert 1 < order.sequences == search.sequences <= 60
        assert search.errors[order.sequences] <= search.allowed < search.errors[order.sequences - 1]
        assert search.allowed == max(search.bound, RANDOM_MARGIN * search.random_error)
        assert order.shuffling_error() == search.errors[order.sequences]

    def test_labels_without_a_pattern_need_one(self) -> None:
        indptr, indices, _ = clustered_graph()
        order = ProximityOrder(
            (indptr, indices), np.arange(NODES), labels=np.zeros(NODES, int), batch_size=60
        )
        assert order.sequences == 1

    def test_floor_of_random_orders(self) -> None:
        """With tiny mini-batches no order meets the bound; as good as random is then enough."""
        indptr, indices, cluster = clustered_graph()
        order = ProximityOrder((indptr, indices), np.arange(NODES), labels=cluster, batch_size=8)
        assert order.search is not None
        assert order.search.random_error > order.search.bound
        assert order.search.errors[order.sequences] <= RANDOM_MARGIN * order.search.random_error

    def test_warns_where_none_is_enough(self) -> None:
        labels = np.arange(100) // 50
        test = LabelTest(labels, np.arange(100), 5, 100)
        with pytest.warns(
            UserWarning, match=r"even 4 sequences have a shuffling error of 0\.500.*larger mini-batches"
        ):
            search = search_sequences(test, lambda _: np.arange(100), 4, 0)
        assert search.sequences == 4
        assert search.errors == {1: 0.5, 2: 0.5, 4: 0.5}

    def test_without_labels(self) -> None:
        indptr, indices, _ = clustered_graph()
        assert ProximityOrder((indptr, indices), np.arange(NODES), batch_size=16).sequences == 16
        order = ProximityOrder((indptr, indices), np.arange(NODES), batch_size=512)
        assert order.sequences == DEFAULT_SEQUENCES
        with pytest.raises(SourceError, match="pass labels="):
            order.shuffling_error()


def orders(seed: int = 0) -> list[TrainingOrder]:
    indptr, indices, cluster = clustered_graph()
    train = np.random.default_rng(7).permutation(NODES)[:401]
    return [
        ProximityOrder((indptr, indices), train, sequences=5, batch_size=20, seed=seed),
        ProximityOrder((indptr, indices), train, sequences=5, batch_size=20, seed=seed, redraw=False),
        PartitionOrder(cluster, train, sequences=1, batch_size=20, seed=seed),
        PartitionOrder(cluster, train, sequences=4, batch_size=20, seed=seed),
    ]


@pytest.fixture(params=range(4), ids=["proximity", "shifted", "partitions", "mixed partitions"])
def kind(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class TestEveryOrder:
    def test_a_permutation_that_differs_by_epoch_and_seed(self, kind: int) -> None:
        order = orders()[kind]
        passes = [list(order) for _ in range(3)]
        assert order.epoch == 3
        for one in passes:
            assert len(one) == len(order) == 401
            assert sorted(one) == list(range(401))
            assert all(type(position) is int for position in one)
        assert passes[0] != passes[1] != passes[2] != passes[0]
        again = orders()[kind]
        assert [list(again) for _ in range(3)] == passes
        assert list(orders(seed=1)[kind]) != passes[0]

    def test_nodes_are_the_epochs(self, kind: int) -> None:
        order = orders()[kind]
        for epoch in (0, 5, 2):
            order.set_epoch(epoch)
            nodes = order.nodes()
            np.testing.assert_array_equal(nodes, order.train[list(order)])
            assert nodes.dtype == np.int64

    @settings(max_examples=25)
    @given(kind=st.integers(0, 3), epoch=st.integers(0, 5), done=st.integers(0, 401))
    def test_resume(self, kind: int, epoch: int, done: int) -> None:
        order = orders()[kind]
        order.set_epoch(epoch)
        iterator = iter(order)
        head = [next(iterator) for _ in range(done)]
        state = pickle.loads(pickle.dumps(order.state_dict()))
        rest = list(iterator)
        following = list(order)
        order.set_epoch(epoch)
        assert sorted(head + rest) == list(range(401))
        resumed = orders()[kind]
        resumed.load_state_dict(state)
        assert resumed.epoch == state["epoch"] == epoch + (done == 401)
        resumed.set_epoch(state["epoch"])  # as a loop over epochs would
        assert not rest or list(resumed) == rest
        assert list(resumed) == following
        # What a loader asked for ahead of training is told apart by hand.
        resumed.load_state_dict(order.state_dict(epoch=epoch, position=done))
        assert list(resumed) == (rest if done < 401 else following)
        last = -(-401 // order.batch_size) * order.batch_size  # mini-batches done times their size
        resumed.load_state_dict(order.state_dict(epoch=epoch, position=last))
        assert list(resumed) == following
        with pytest.raises(ArgumentError, match="position"):
            order.state_dict(epoch=epoch, position=last + 1)

    def test_a_state_of_another_graph_is_refused(self, tmp_path: Path) -> None:
        """Of as many nodes, and the same training nodes: what it calls trained on would be others."""
        indptr, indices, _ = clustered_graph()
        others = np.roll(indices, 1)
        said: dict[str, Any] = {"sequences": 4, "batch_size": 20}
        train = np.arange(0, NODES, 3)
        state = ProximityOrder((indptr, indices), train, **said).state_dict(epoch=2, position=40)
        ProximityOrder((indptr.copy(), indices.copy()), train, **said).load_state_dict(state)
        with pytest.raises(SourceError, match="graph"):
            ProximityOrder((indptr, others), train, **said).load_state_dict(state)
        made = []
        for name, edges in (("a", indices), ("b", others)):
            rows = np.zeros((NODES, 1), np.float32)
            featstore.pack(tmp_path / name, rows, graph=(indptr, edges)).close()
            with featstore.open(tmp_path / name) as store:
                made.append(ProximityOrder(store, train, **said).state_dict(epoch=2, position=40))
        with featstore.open(tmp_path / "b") as store:
            order = ProximityOrder(store, train, **said)
            order.load_state_dict(made[1])
            with pytest.raises(SourceError, match="graph"):
                order.load_state_dict(made[0])

    def test_begins_anew_after_a_break(self, kind: int) -> None:
        order = orders()[kind]
        first = list(zip(range(10), order))
        assert list(zip(range(10), order)) == first
        assert order.epoch == 0
        assert order.state_dict()["next"] in (10, 11)  # zip takes one more

    def test_an_abandoned_iterator_moves_nothing(self, kind: int) -> None:
        order = orders()[kind]
        old = iter(order)
        next(old)
        order.set_epoch(4)
        assert len(list(old)) == 400
        assert order.state_dict()["next"] == 0
        assert order.epoch == 4

    def test_refuses_a_state_of_another(self, kind: int) -> None:
        order = orders()[kind]
        state = order.state_dict()
        for change in (
            {"of": state["of"] | {"seed": 9}},
            {"of": state["of"] | {"train": 1}},
            {"version": 2},
            {"of": state["of"] | {"order": "random"}},
            {"next": 402},
            {"epoch": -1},
            {"at": {"position": 3}},
        ):
            with pytest.raises(SourceError, match="the state"):
                order.load_state_dict({**state, **change})
        with pytest.raises(SourceError, match="the state"):
            order.load_state_dict(orders()[(kind + 1) % 4].state_dict())
        with pytest.raises(SourceError, match="both"):
            order.state_dict(epoch=1)
        with pytest.raises(SourceError, match="epoch"):
            order.set_epoch(-1)

    def test_pickles(self, kind: int) -> None:
        order = orders()[kind]
        order.set_epoch(2)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(order)).nodes(), order.nodes())

    def test_positions_are_not_writable(self, kind: int) -> None:
        with pytest.raises(ValueError, match="read-only"):
            orders()[kind].positions()[0] = 1


def test_shifts_only_rotate_where_sequences_are_kept() -> None:
    kept, redrawn = orders()[1], orders()[0]
    first, fresh = kept.positions(), redrawn.positions()
    shifted = []
    for epoch in range(1, 6):
        kept.set_epoch(epoch)
        redrawn.set_epoch(epoch)
        for number in range(5):
            rotations = rotated(first[number::5].tolist())
            assert tuple(kept.positions()[number::5].tolist()) in rotations
            assert tuple(redrawn.positions()[number::5].tolist()) not in rotations
            shifted.append((kept.positions()[number::5] != first[number::5]).any())
    np.testing.assert_array_equal(first, fresh)
    assert sum(shifted) > 20  # of 25; a shift by 0 is one in 80


def test_neighbours_are_near() -> None:
    """What the order is for: mini-batches close in time are of fewer clusters than random ones."""
    indptr, indices, cluster = clustered_graph()
    order = ProximityOrder((indptr, indices), np.arange(NODES), sequences=2, batch_size=20, seed=2)

    def clusters_seen(nodes: Any) -> float:
        return float(np.mean([len(set(cluster[nodes[i : i + 40]])) for i in range(0, NODES, 40)]))

    assert clusters_seen(order.nodes()) < 0.8 * clusters_seen(np.random.default_rng(0).permutation(NODES))


class TestGraphs:
    def test_memory_maps_and_wide_ids(self, tmp_path: Path) -> None:
        indptr, indices, _ = clustered_graph()
        np.save(tmp_path / "indptr.npy", indptr)
        np.save(tmp_path / "indices.npy", indices)
        mapped = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices"))
        expected = ProximityOrder((indptr, indices), np.arange(NODES), batch_size=8).nodes()
        for graph in (mapped, (indptr, indices.astype(np.int64))):
            np.testing.assert_array_equal(
                ProximityOrder(graph, np.arange(NODES), batch_size=8).nodes(), expected
            )

    @pytest.mark.parametrize("order", ["given", "permutation"])
    def test_a_stored_graph_gives_the_same(self, pack: Any, tmp_path: Path, order: str) -> None:
        indptr, indices, cluster = clustered_graph()
        options = (
            {"permutation": np.random.default_rng(5).permutation(NODES)} if order == "permutation" else {}
        )
        store = pack(
            tmp_path / "s", np.zeros((NODES, 1), np.float32), graph=(indptr, indices), order=order, **options
        )
        train = np.arange(0, NODES, 2)
        with store:
            csc = store.graphs["features"].csc()
            for graph in (store, store.graphs["features"]):
                ours = ProximityOrder(graph, train, labels=cluster, batch_size=30, seed=4)
                theirs = ProximityOrder(csc, train, labels=cluster, batch_size=30, seed=4)
                assert ours.sequences == theirs.sequences
                assert list(ours) == list(theirs)
                assert list(ours) == list(theirs)

    def test_a_mask(self) -> None:
        indptr, indices, _ = clustered_graph()
        mask = np.random.default_rng(0).random(NODES) < 0.3
        order = ProximityOrder((indptr, indices), mask, batch_size=8)
        np.testing.assert_array_equal(order.train, np.flatnonzero(mask))

    @pytest.mark.parametrize("bad", [-1, NODES])
    def test_bad_sources(self, bad: int) -> None:
        indptr, indices, _ = clustered_graph()
        indices[1000] = bad
        with pytest.raises(SourceError, match=r"edge 1,000 .* no node"):
            ProximityOrder((indptr, indices), np.arange(NODES), batch_size=8).nodes()

    @pytest.mark.parametrize("bad", [-5, 10**9])
    def test_bad_offsets(self, bad: int) -> None:
        indptr, indices, _ = clustered_graph()
        indptr[77] = bad
        with pytest.raises(SourceError, match="offsets"):
            ProximityOrder((indptr, indices), np.arange(NODES), batch_size=8).nodes()

    def test_refusals(self) -> None:
        indptr, indices, cluster = clustered_graph()
        graph, train = (indptr, indices), np.arange(NODES)
        for arguments, error, match in (
            ((graph, [0, 0]), IdError, "different"),
            ((graph, [NODES]), IdError, f"node {NODES} is out of range"),
            ((graph, []), SourceError, "at least one"),
            ((indptr, train), SourceError, "graph must be"),
            (((indptr, indices[1:]), train), SourceError, "indptr"),
        ):
            with pytest.raises(error, match=match):
                ProximityOrder(*arguments, batch_size=8)
        for options, match in (
            ({"batch_size": 0}, "batch_size"),
            ({"sequences": 0}, "sequences"),
            ({"sequences": NODES + 1}, "sequences"),
            ({"sequences": "some"}, "sequences"),
            ({"labels": cluster[:5]}, "labels"),
            ({"labels": cluster + 0.5}, "labels"),
        ):
            with pytest.raises(SourceError, match=match):
                ProximityOrder(graph, train, **{"batch_size": 8, **options})


class TestPartitions:
    @settings(max_examples=35)
    @given(
        partition=st.lists(st.integers(0, 9), min_size=1, max_size=80),
        sequences=st.integers(1, 4),
        seed=st.integers(0, 9),
    )
    def test_partitions_stand_together_in_sequences(
        self, partition: list[int], sequences: int, seed: int
    ) -> None:
        part = np.array(partition)
        train = np.flatnonzero(np.random.default_rng(seed).random(len(part)) < 0.7)
        train = train if len(train) else np.array([0])
        order = PartitionOrder(part, train, sequences=min(sequences, len(train)), batch_size=4, seed=seed)
        nodes = order.nodes()
        assert order.partitions == len(set(part[train].tolist()))
        # One sequence after the other, each partition is one run: it begins once.
        row = np.concatenate([part[nodes[number :: order.sequences]] for number in range(order.sequences)])
        assert 1 + np.count_nonzero(np.diff(row)) == order.partitions
        assert sorted(nodes) == sorted(train)

    def test_shuffled_inside_and_among(self) -> None:
        part = np.repeat(np.arange(8), 50)
        order = PartitionOrder(part, np.arange(400), sequences=1, batch_size=10)
        firsts = set()
        for epoch in range(6):
            order.set_epoch(epoch)
            nodes = order.nodes()
            firsts.add(int(part[nodes[0]]))
            assert (np.diff(nodes[:50]) < 0).any()
        assert len(firsts) > 1

    def test_sequences_from_labels(self) -> None:
        """Each partition of one label: the more of them at a time, the better shuffled."""
        part = np.repeat(np.arange(12), 50)
        order = PartitionOrder(part, np.arange(NODES), labels=part // 3, batch_size=60)
        assert order.search is not None
        assert 1 < order.sequences <= 12
        assert (
            order.search.errors[order.sequences]
            <= order.search.allowed
            < order.search.errors[order.sequences - 1]
        )
        assert order.shuffling_error() == order.search.errors[order.sequences]

    @pytest.mark.parametrize("packed", ["ldg", "given"])
    def test_a_store(self, pack: Any, tmp_path: Path, packed: str) -> None:
        indptr, indices, _ = clustered_graph()
        options: dict[str, Any] = {"order": "ldg", "partitions": 6} if packed == "ldg" else {}
        with pack(
            tmp_path / "s", np.zeros((NODES, 1), np.float32), graph=(indptr, indices), **options
        ) as store:
            table = store.tables["features"]
            rows = table.row_of_node()
            rows = np.arange(NODES) if rows is None else rows
            offsets = table.partition_offsets
            part = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[rows]
            train = np.random.default_rng(3).permutation(NODES)[:200]
            expected = PartitionOrder(part, train, batch_size=10, seed=8).nodes()
            for given_as in (store, table):
                np.testing.assert_array_equal(
                    PartitionOrder(given_as, train, batch_size=10, seed=8).nodes(), expected
                )

    def test_refusals(self) -> None:
        with pytest.raises(SourceError, match="partitions must be"):
            PartitionOrder(np.zeros(5), [1], batch_size=2)
        with pytest.raises(IdError):
            PartitionOrder(np.zeros(5, int), [5], batch_size=2)
        with pytest.raises(SourceError, match="labels"):
            PartitionOrder(np.zeros(5, int), [1], batch_size=2, labels=[1])


class TestLoaders:
    """The loaders' own batches are the order's, cut."""

    @pytest.mark.parametrize("workers", [0, 1])
    def test_torch(self, kind: int, workers: int) -> None:
        torch = pytest.importorskip("torch")
        order, twin = orders()[kind], orders()[kind]
        loader = torch.utils.data.DataLoader(
            torch.from_numpy(order.train), batch_size=20, sampler=order, num_workers=workers
        )
        assert len(loader) == 21
        for epoch in range(2):
            twin.set_epoch(epoch)
            batches = [batch.tolist() for batch in loader]
            assert batches == [twin.nodes()[i : i + 20].tolist() for i in range(0, 401, 20)]

    def test_resume_in_the_middle(self, kind: int) -> None:
        torch = pytest.importorskip("torch")
        order, twin = orders()[kind], orders()[kind]
        twin.set_epoch(3)
        order.load_state_dict(order.state_dict(epoch=3, position=7 * 20))
        loader = torch.utils.data.DataLoader(torch.from_numpy(order.train), batch_size=20, sampler=order)
        assert [b.tolist() for b in loader] == [
            twin.nodes()[i : i + 20].tolist() for i in range(140, 401, 20)
        ]

    def test_pyg(self, kind: int) -> None:
        pytest.importorskip("torch_geometric")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # PyG's own, on import
            import torch
            from torch_geometric.data import Data
            from torch_geometric.loader import NeighborLoader

            from featstore.adapters.pyg import FeatstoreSampler
            from featstore.sampling.neighbors import NeighborSampler
        indptr, indices, _ = clustered_graph()
        order, twin = orders()[kind], orders()[kind]
        # Any sampler will do; this one needs no compiled extension of PyG.
        data = Data(x=torch.arange(NODES)[:, None], edge_index=torch.empty(2, 0, dtype=torch.long))
        loader = NeighborLoader(
            data, [3, 2], input_nodes=torch.from_numpy(order.train), batch_size=20, sampler=order,
            neighbor_sampler=FeatstoreSampler(NeighborSampler(indptr, indices, [3, 2])),
        )  # fmt: skip
        for epoch in range(2):
            twin.set_epoch(epoch)
            seeds = [batch.n_id[: batch.batch_size].tolist() for batch in loader]
            assert seeds == [twin.nodes()[i : i + 20].tolist() for i in range(0, 401, 20)]


@pytest.mark.parametrize("kind", ["proximity", "partitions"])
def test_the_next_epoch_s_order_is_drawn_beside(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same as one that is drawn when it is wanted; an error is told by whoever wants it."""

    def made() -> Any:
        if kind == "proximity":
            return ProximityOrder(
                clustered_graph(300)[:2], np.arange(0, 300, 2), batch_size=10, sequences=5, seed=4
            )
        return PartitionOrder(np.arange(300) // 20, np.arange(0, 300, 2), batch_size=10, sequences=5, seed=4)

    expected = []
    for epoch in range(4):
        one = made()
        one.set_epoch(epoch)
        expected.append(one.positions().tolist())
    order, threads = made(), []
    draw = order._draw

    def watched(epoch: int) -> Any:
        threads.append((epoch, threading.current_thread().name))
        if epoch == 3 and threads[-1][1] == "featstore-order":
            raise SourceError("not now")
        return draw(epoch)

    monkeypatch.setattr(order, "_draw", watched)
    assert [list(order) for _ in range(2)] == expected[:2]
    state = order.state_dict()
    assert list(order) == expected[2]
    assert list(order) == expected[3], "drawn again, where it is wanted"
    main = threading.current_thread().name
    ahead = "featstore-order"
    assert threads[:4] == [(0, main), (1, ahead), (2, ahead), (3, ahead)]
    assert (3, main) in threads
    order.load_state_dict(state)
    assert list(order) == expected[2]
    copied = pickle.loads(pickle.dumps(made()))
    assert list(copied) == expected[0]
    order.set_epoch(1)  # not the one that is drawn ahead
    assert list(order) == expected[1]
