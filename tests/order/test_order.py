"""Orders: permutations, degree, parts to rows, the choice of a method, and the memory each may take."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from order_support import Csc, csc

import featstore.order
from featstore.errors import BudgetError, SourceError
from featstore.order import (
    Order,
    default_partitions,
    degree_counts,
    degree_order,
    edge_cut,
    given_order,
    ldg_memory_bytes,
    make_order,
    metis_memory_bytes,
    order_of_parts,
    orders,
    parts,
    permutation,
    permutation_order,
    stream,
)


def random_graph(nodes: int, edges: int, seed: int, symmetric: bool = False) -> Csc:
    rng = np.random.default_rng(seed)
    sources, targets = (nodes * rng.random((2, edges)) ** 2).astype(np.int64)
    if symmetric:
        sources, targets = np.concatenate([sources, targets]), np.concatenate([targets, sources])
    return csc(nodes, sources, targets, ascending=False)


EMPTY = Csc(np.zeros(1, np.int64), np.zeros(0, np.int32))


def test_given_order_is_the_identity() -> None:
    order = given_order(7)
    assert (order.method, order.node_of_row, order.rows, order.parts) == ("given", None, 7, 1)
    assert order.partition_offsets.tolist() == [0, 7]
    assert given_order(0).rows == 0
    with pytest.raises(SourceError, match="-1"):
        given_order(-1)


# --- permutations
# -----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    hnp.arrays(np.int64, st.integers(0, 30), elements=st.integers(-2, 30)),
    st.sampled_from([np.int32, np.int64, np.int8]),
)
def test_a_permutation_is_taken_or_its_first_fault_named(ids: np.ndarray, dtype: Any) -> None:
    rows, seen, fault = ids.size, {}, None
    for row, node in enumerate(ids.tolist()):
        if not 0 <= node < rows:
            fault = f"node {node} in row {row}, but nodes are 0 to {rows - 1}"
        elif node in seen:
            fault = f"node {node} twice, in row {seen[node]} and in row {row}"
        if fault:
            break
        seen[node] = row
    if fault is None:
        order = permutation_order(ids.astype(dtype), rows)
        assert order.node_of_row is not None
        assert order.node_of_row.dtype == np.int32
        assert order.node_of_row.tolist() == ids.tolist()
    else:
        with pytest.raises(SourceError, match=fault):
            permutation_order(ids.astype(dtype), rows)


def test_a_permutation_is_taken_from_a_file_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permutation, "CHECK_ROWS", 10)
    ids = np.random.default_rng(0).permutation(95).astype(np.uint64)
    np.save(tmp_path / "order.npy", ids)
    order = permutation_order(tmp_path / "order.npy", 95)
    assert order.method == "permutation"
    assert order.node_of_row is not None
    assert order.node_of_row.tolist() == ids.tolist()
    assert order.partition_offsets.tolist() == [0, 95]
    ids[90] = ids[33]
    with pytest.raises(SourceError, match=f"node {ids[33]} twice, in row 33 and in row 90"):
        permutation_order(ids, 95)
    ids[50] = 2**64 - 1
    with pytest.raises(SourceError, match=f"node {2**64 - 1} in row 50"):
        permutation_order(ids, 95)


def test_the_result_does_not_share_memory_with_what_was_given() -> None:
    ids = np.arange(5, dtype=np.int32)
    order = permutation_order(ids, 5)
    ids[:] = 0
    assert order.node_of_row is not None
    assert order.node_of_row.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [np.arange(4), np.arange(6), np.arange(5.0), np.arange(5).reshape(5, 1)])
def test_a_permutation_of_wrong_shape_or_dtype_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(SourceError, match=r"must be integers of shape \(5,\)"):
        permutation_order(bad, 5)


def test_a_file_that_is_no_permutation_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "many.npz", a=np.arange(5))
    (tmp_path / "text.npy").write_text("0 1 2")
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    for name, message in [
        ("none.npy", "cannot read"),
        ("text.npy", "cannot read"),
        ("many.npz", "several arrays"),
        ("objects.npy", "cannot read|must be integers"),
    ]:
        with pytest.raises(SourceError, match=message):
            permutation_order(tmp_path / name, 5)


# --- degrees, parts, cut
# ----------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(0, 80), st.integers(0, 1000), st.integers(1, 90))
def test_degrees_cut_and_order_are_those_of_numpy(
    nodes: int, edges: int, seed: int, block_edges: int
) -> None:
    graph = random_graph(nodes, edges, seed)
    counts = degree_counts(graph, block_edges=block_edges)
    assert counts.dtype == np.uint32
    expected = np.bincount(graph.indices, minlength=nodes)
    assert counts.tolist() == expected.tolist()
    order = degree_order(graph)
    assert order.node_of_row is not None
    assert order.node_of_row.tolist() == np.lexsort((np.arange(nodes), -expected)).tolist()
    part = np.random.default_rng(seed).integers(0, 4, nodes).astype(np.int32)
    dense = np.zeros((nodes, nodes))
    np.add.at(dense, (np.repeat(np.arange(nodes), np.diff(graph.indptr)), graph.indices), 1)
    between = dense[part[:, None] != part[None, :]].sum()
    assert edge_cut(graph, part, block_edges=block_edges) == between / max(edges, 1)


def test_degree_ties_go_by_node_id_and_counts_saturate() -> None:
    graph = Csc(np.array([0, 2, 3, 3, 5, 5]), np.array([3, 1, 3, 1, 4], np.int64))
    order = degree_order(graph)
    assert order.node_of_row is not None
    assert order.node_of_row.tolist() == [1, 3, 4, 0, 2]
    counts = np.array([2**32 - 2, 0], np.uint32)
    assert stream.count_block(np.zeros(5, np.int32), counts, 0, 2) == -1
    assert counts.tolist() == [2**32 - 1, 0]


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_several_threads_count_the_same(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    rng = np.random.default_rng(threads)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 9, 40))])
    graph = Csc(indptr, rng.integers(0, 40, indptr[-1]).astype(np.int32))
    part = rng.integers(0, 4, 40).astype(np.int32)
    alone = [
        (degree_counts(graph, block_edges=n).tolist(), edge_cut(graph, part, block_edges=n)) for n in (1, 7)
    ]
    monkeypatch.setattr(stream, "_SHARED_MIN", 0)
    monkeypatch.setattr(stream, "available_cores", lambda: threads)
    for block_edges in (1, 7, 1000):
        found = degree_counts(graph, block_edges=block_edges)
        assert (
            found.tolist() == alone[0][0] == alone[1][0] == np.bincount(graph.indices, minlength=40).tolist()
        )
        assert edge_cut(graph, part, block_edges=block_edges) == alone[0][1] == alone[1][1]
    spoilt = Csc(
        indptr, np.where(np.arange(indptr[-1]) == indptr[-1] - 2, 40, graph.indices).astype(np.int32)
    )
    for call in (lambda: degree_counts(spoilt, block_edges=7), lambda: edge_cut(spoilt, part, block_edges=7)):
        with pytest.raises(SourceError, match=rf"indices\[{indptr[-1] - 2}\] is 40"):
            call()


def test_an_empty_graph_has_an_empty_order() -> None:
    assert degree_order(EMPTY).rows == 0
    assert edge_cut(EMPTY, np.zeros(0, np.int32)) == 0.0
    for method in ("given", "degree", "metis", "multilevel", "ldg", "auto"):
        order = make_order(method, EMPTY, rows=0, row_bytes=4, memory_bytes=1 << 30)
        assert order.rows == 0
        assert order.partition_offsets.tolist() == [0, 0]


def test_edges_to_nowhere_and_wrong_parts_are_refused() -> None:
    graph = Csc(np.array([0, 1, 2]), np.array([1, 2], np.int32))
    for call in (lambda: degree_counts(graph), lambda: edge_cut(graph, np.zeros(2, np.int32))):
        with pytest.raises(SourceError, match=r"indices\[1\] is 2"):
            call()
    with pytest.raises(SourceError, match="one entry for each of 2 nodes"):
        edge_cut(graph, np.zeros(3, np.int32))
    with pytest.raises(SourceError, match="block_edges must be at least 1"):
        degree_counts(graph, block_edges=0)


@settings(max_examples=25, deadline=None)
@given(hnp.arrays(np.int32, st.integers(0, 50), elements=st.integers(0, 6)), st.integers(7, 12))
def test_rows_of_parts_are_a_stable_sort(part: np.ndarray, part_count: int) -> None:
    node_of_row, offsets = order_of_parts(part, part_count)
    assert node_of_row.dtype == np.int32
    assert offsets.dtype == np.int64
    assert node_of_row.tolist() == np.argsort(part, kind="stable").tolist()
    assert offsets.tolist() == np.searchsorted(np.sort(part), np.arange(part_count + 1)).tolist()


def test_a_part_number_out_of_range_is_named() -> None:
    with pytest.raises(SourceError, match="node 1 is in part 3"):
        order_of_parts(np.array([0, 3], np.int32), 3)
    with pytest.raises(SourceError, match="node 0 is in part -1"):
        order_of_parts(np.array([-1], np.int32), 3)
    with pytest.raises(SourceError, match="at least 1"):
        order_of_parts(np.zeros(0, np.int32), 0)


def test_ids_grow_to_64_bits_when_they_must() -> None:
    assert parts.node_dtype(2**31 - 1) == np.int32
    assert parts.node_dtype(2**31) == np.int64


@pytest.mark.parametrize(
    ("rows", "row_bytes", "expected"),
    [
        (0, 400, 1),
        (10, 400, 1),
        (1_000_000, 512, 976),  # parts of 512 KiB
        (34_493, 33_660, 538),  # of 64 rows, more than 2 MiB
        (169_343, 160, 51),
        (2_449_029, 400, 1024),  # no more while that are few rows each
        (111_059_956, 512, 27_114),  # of 4096 rows, 2 MiB
        (111_059_956, 4, 847),
        (200, 1 << 20, 3),
        (63, 1 << 30, 1),
    ],
)
def test_default_partitions(rows: int, row_bytes: int, expected: int) -> None:
    assert default_partitions(rows, row_bytes) == expected


# --- make_order
# -------------------------------------------------------------------------------------------------------

GRAPH = random_graph(500, 3000, 1, symmetric=True)


def made(method: str, graph: Csc | None = GRAPH, **changed: Any) -> Order:
    arguments = {"rows": 500, "row_bytes": 100, "parts": 5, "memory_bytes": 1 << 30} | changed
    return make_order(method, graph, **arguments)


@pytest.mark.parametrize("method", ["metis", "multilevel", "ldg", "bfs"])
def test_partitioned_orders_carry_their_provenance(method: str) -> None:
    order = made(method, seed=9)
    assert (order.method, order.rows, order.parts) == (method, 500, 5)
    assert order.node_of_row is not None
    assert sorted(order.node_of_row.tolist()) == list(range(500))
    part = np.empty(500, np.int32)
    for p in range(5):
        members = order.node_of_row[order.partition_offsets[p] : order.partition_offsets[p + 1]]
        assert members.tolist() == sorted(members.tolist())
        part[members] = p
    assert order.parameters["edge_cut"] == edge_cut(GRAPH, part)
    assert order.parameters["seed"] == 9
    assert order.parameters["chosen_because"] == "it was asked for"
    expected = {
        "metis": {"pymetis"},
        "multilevel": {"pymetis", "passes", "slack"},
        "ldg": {"passes", "slack"},
        "bfs": set(),
    }
    assert set(order.parameters) >= expected[method]
    assert order.node_of_row.tolist() == made(method, seed=9).node_of_row.tolist()  # type: ignore[union-attr]


def test_auto_chooses_by_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*args: Any, **kwargs: Any) -> tuple[str, str]:
        order = made("auto", *args, **kwargs)
        return order.method, str(order.parameters["chosen_because"])

    assert chosen(None) == ("given", "there is no graph to order by")
    assert chosen(parts=1) == ("given", "the rows fit one partition")
    assert chosen(permutation=np.arange(500)) == ("permutation", "a permutation was given")
    assert chosen() == ("metis", "METIS needs up to 17.5 MiB and the memory budget is 1.0 GiB")
    method, why = chosen(memory_bytes=10 << 20)
    assert method == "ldg"
    assert why.startswith(
        "METIS may need 16.8 MiB, more than the memory budget of 10.0 MiB, and METIS on clusters 16."
    )
    large, why = (
        random_graph(20_000, 400_000, 0),
        "METIS may need 117.1 MiB, more than the memory budget of 30.0 MiB",
    )
    assert chosen(large, rows=20_000, memory_bytes=30 << 20) == ("multilevel", why)
    assert chosen(large, rows=20_000)[0] == "metis"
    monkeypatch.setattr(orders, "METIS_EDGES_MAX", 399_999)
    why = "METIS takes several times as long for 400,000 edges, for about the same cut"
    assert chosen(large, rows=20_000) == ("multilevel", why)
    monkeypatch.setattr(orders, "metis_installed", lambda: False)
    assert chosen() == ("ldg", "pymetis is not installed")


def test_whether_the_graph_is_symmetric_decides_where_memory_is_short() -> None:
    directed = random_graph(500, 6000, 1)
    needed = metis_memory_bytes(500, 6000, symmetric=True)
    assert made("auto", memory_bytes=needed).method == "metis"
    assert made("auto", directed, memory_bytes=needed).method == "multilevel"
    assert made("auto", directed, memory_bytes=metis_memory_bytes(500, 6000)).method == "metis"
    with pytest.raises(BudgetError, match="methods 'multilevel' and 'ldg' need far less") as caught:
        made("metis", directed, memory_bytes=1)
    assert caught.value.needed_bytes == metis_memory_bytes(500, 6000)


@pytest.mark.parametrize("method", ["auto", "ldg", "metis", "multilevel", "bfs", "degree", "permutation"])
def test_too_small_a_budget_says_the_smallest_that_works(method: str) -> None:
    arguments = {"permutation": np.arange(500)} if method == "permutation" else {}
    with pytest.raises(BudgetError) as caught:
        made(method, memory_bytes=100, **arguments)
    assert caught.value.given_bytes == 100
    needed = caught.value.needed_bytes
    assert made(method, memory_bytes=needed, **arguments).rows == 500
    with pytest.raises(BudgetError):
        made(method, memory_bytes=needed - 1, **arguments)


@pytest.mark.parametrize("method", ["ldg", "bfs", "degree", "permutation"])
def test_memory_stays_within_the_budget(method: str) -> None:
    rows = 100_000
    graph = random_graph(rows, 200_000, 0)
    arguments = {"permutation": np.arange(rows)} if method == "permutation" else {}
    call = {"rows": rows, "parts": 50, **arguments}
    made(method, graph, memory_bytes=1 << 30, **call)
    with pytest.raises(BudgetError) as caught:
        made(method, graph, memory_bytes=1, **call)
    needed = caught.value.needed_bytes
    peaks_bytes = []
    for _ in range(2):  # what else the process does in the meantime is counted, too, but not twice
        tracemalloc.start()
        made(method, graph, memory_bytes=needed, **call)
        peaks_bytes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert 4 * rows < min(peaks_bytes) <= needed


def test_training_nodes_are_handed_to_the_blocks_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    train = np.arange(500) % 3 == 0
    order = made("bfs", train=train)
    assert order.parameters["train_nodes"] == 167
    assert "train_nodes" not in made("bfs").parameters
    assert order.node_of_row is not None
    counts = np.add.reduceat(train[order.node_of_row], order.partition_offsets[:-1].tolist())
    assert counts.sum() == 167
    assert counts.max() <= 1.3 * 167 / 5
    for bad in (train[:-1], train.astype(np.int8)):
        with pytest.raises(SourceError, match=r"train must be bool of shape \(500,\)"):
            made("bfs", train=bad)


def test_block_size_follows_the_budget_but_the_order_does_not() -> None:
    small = ldg_memory_bytes(500, 5, 4096)
    few, many = made("ldg", memory_bytes=small), made("ldg", memory_bytes=1 << 30)
    assert few.node_of_row is not None
    assert many.node_of_row is not None
    assert few.node_of_row.tolist() == many.node_of_row.tolist()
    assert few.parameters == many.parameters


@pytest.mark.parametrize(
    ("method", "changed", "message"),
    [
        ("best", {}, "unknown order method 'best'; the methods are auto, given"),
        ("ldg", {"permutation": np.arange(500)}, "use method 'permutation'"),
        ("permutation", {}, "needs a permutation"),
        ("ldg", {"graph": None}, "'ldg' needs a graph"),
        ("degree", {"graph": None}, "'degree' needs a graph"),
        ("given", {"rows": 400}, "the graph has 500 nodes, but there are 400 rows"),
        ("ldg", {"parts": 0}, "number of partitions must be from 1"),
        ("ldg", {"parts": 2**20 + 1}, "1,048,577 partitions for 500 rows: give at most 1,048,576"),
    ],
)
def test_what_does_not_go_together_is_refused(method: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        made(method, **changed)


def test_the_package_imports_its_names_late() -> None:
    assert sorted(featstore.order.__all__) == dir(featstore.order)
    for name in featstore.order.__all__:
        assert getattr(featstore.order, name).__module__.startswith("featstore.order.")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = featstore.order.nothing  # type: ignore[attr-defined]
    root = Path(featstore.order.__file__).parents[2]
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import featstore.order; print('numba' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(root)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"
