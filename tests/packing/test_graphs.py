"""Graphs of a pack: every kind of source becomes the same CSC, in memory and on disk, and what is wrong is
named."""

from __future__ import annotations

import errno
import gzip
import itertools
import os
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from featstore.errors import BudgetError, DeviceError, DiskFullError, FeatstoreWarning, SourceError
from featstore.packing.graphs import build as graphs_build
from featstore.packing.graphs.build import build_csc, range_bounds
from featstore.packing.graphs.csc import NO_IDS, CscGraph, numbers_between
from featstore.packing.graphs.edges import ArrayEdges
from featstore.packing.graphs.opening import open_graph
from featstore.packing.graphs.placing import count_targets, place_sources, sort_runs, sort_with_ids
from featstore.packing.graphs.text_edges import parse_pairs

NODES = 37

# Columns and values beside the ends of edges are warned of; what is said is tested at the end.
pytestmark = pytest.mark.filterwarnings("ignore:.*not stored: ")


def edges_of(count: int = 400, nodes: int = NODES, seed: int = 0) -> NDArray[np.int64]:
    """A multigraph with self-loops, skewed towards node 0."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, nodes, count), (nodes * rng.random(count) ** 3).astype(np.int64)])


def csc_model(edge_index: NDArray[np.int64], nodes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """NumPy twin of the build: sort by target, then source."""
    order = np.lexsort((edge_index[0], edge_index[1]))
    indptr = np.concatenate(([0], np.cumsum(np.bincount(edge_index[1], minlength=nodes))))
    return indptr, edge_index[0][order]


def check(graph: CscGraph, edge_index: NDArray[np.int64], nodes: int = NODES) -> None:
    indptr, indices = csc_model(edge_index, nodes)
    np.testing.assert_array_equal(graph.indptr, indptr)
    np.testing.assert_array_equal(graph.indices, indices)
    assert graph.indptr.dtype == np.int64
    assert graph.indices.dtype in (np.int32, np.int64)
    assert (graph.nodes, graph.edges) == (nodes, edge_index.shape[1])
    assert all(isinstance(value, str | int) for value in graph.source.values())
    for block_edges in (1, 7, 10_000):
        got, expected_node = [], 0
        for node, run_indptr, run in graph.blocks(block_edges):
            assert node == expected_node
            assert run_indptr[0] == 0
            assert run.size == run_indptr[-1]
            assert run.size <= block_edges or run_indptr.size == 2
            expected_node += run_indptr.size - 1
            got.append(run.copy())
        assert expected_node == nodes
        np.testing.assert_array_equal(np.concatenate(got), indices)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(0, 300).filter(lambda count: count != 2),  # as an array that is [2, 2]
    nodes=st.integers(1, 60),
    seed=st.integers(0, 999),
    spare=st.integers(0, 900),
    known=st.booleans(),
    ids=st.booleans(),
)
def test_on_disk_equals_in_memory(
    tmp_path_factory: pytest.TempPathFactory, count: int, nodes: int, seed: int, spare: int, known: bool,
    ids: bool,
) -> None:  # fmt: skip
    edge_index = edges_of(count, nodes, seed)
    if not known:
        nodes = int(edge_index.max(initial=-1)) + 1
    folder = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs_build, "SORTED_EDGES_MIN", 8)
        patch.setattr(graphs_build, "SORTED_EDGES_MAX", 8)
        indptr = csc_model(edge_index, nodes)[0]
        item = 8 if ids else 4
        memory_bytes = 8 * (nodes + 1) + 96 * 8 + item * int(np.diff(indptr).max(initial=0)) + 8 + spare
        graph = open_graph(
            edge_index, nodes=nodes if known else None, memory_bytes=memory_bytes, scratch_dir=folder,
            edge_ids=ids,
        )  # fmt: skip
        if nodes:
            check(graph, edge_index, nodes)
        fits = 8 * (nodes + 1) + 96 * 8 + 8 * nodes + item * count <= memory_bytes
        assert isinstance(graph.indices, np.memmap) == (not fits and count > 0)
        assert len(list(folder.iterdir())) == (1 + ids) * int(not fits)
        check_same = open_graph(edge_index, nodes=nodes)
        assert isinstance(graph.edge_ids, np.ndarray) == ids
        if isinstance(graph.edge_ids, np.ndarray):  # equal edges in their order
            twin = np.lexsort((np.arange(count), edge_index[0], edge_index[1]))
            np.testing.assert_array_equal(graph.edge_ids, twin)
    np.testing.assert_array_equal(check_same.indptr, graph.indptr)
    np.testing.assert_array_equal(check_same.indices, graph.indices)


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    """So small that 2,600 bytes of memory are enough to build 400 edges, but only on disk."""
    patch.setattr(graphs_build, "SORTED_EDGES_MIN", 16)
    patch.setattr(graphs_build, "SORTED_EDGES_MAX", 16)


def test_kernels_against_numpy() -> None:
    sources, targets = edges_of()
    degrees = np.zeros(NODES, np.int64)
    assert count_targets(sources, targets, NODES, NODES, degrees) == -1
    np.testing.assert_array_equal(degrees, np.bincount(targets, minlength=NODES))
    for place, bad in ((5, -1), (9, NODES)):
        for which in (0, 1):
            pair = edges_of()
            pair[which, place] = bad
            assert count_targets(pair[0], pair[1], NODES, NODES, degrees) == place
    indptr, indices = csc_model(np.stack([sources, targets]), NODES)
    for dtype in (np.int32, np.int64):
        out, cursors = np.full(sources.size, -1, dtype), indptr[:-1].copy()
        assert place_sources(sources, targets, NO_IDS, 0, cursors, out, NO_IDS)
        np.testing.assert_array_equal(out, sources[np.argsort(targets, kind="stable")])
        np.testing.assert_array_equal(cursors, indptr[1:])
        assert not place_sources(sources[:1], np.array([NODES]), NO_IDS, 0, cursors, out, NO_IDS)
        assert not place_sources(sources[:1], np.array([NODES - 1]), NO_IDS, 0, cursors, out, NO_IDS)
        sort_runs(indptr, 0, out, NO_IDS)
        np.testing.assert_array_equal(out, indices)
        ids, cursors = np.full(sources.size, -1, dtype), indptr[:-1].copy()
        assert place_sources(sources, targets, np.arange(sources.size), 0, cursors, out, ids)
        sort_runs(indptr, 0, out, ids)
        np.testing.assert_array_equal(out, indices)
        np.testing.assert_array_equal(ids, np.lexsort((np.arange(sources.size), sources, targets)))


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.integers(0, 9), max_size=200), seed=st.integers(0, 99))
def test_sort_with_ids_is_its_twin(values: list[int], seed: int) -> None:
    ids = np.random.default_rng(seed).permutation(len(values)).astype(np.int32)
    expected = sorted(zip(values, ids.tolist(), strict=True))
    array = np.array(values, np.int64)
    sort_with_ids(array, ids)
    assert list(zip(array.tolist(), ids.tolist(), strict=True)) == expected


def parse_model(text: bytes, a: int, b: int, parted: bytes = b"") -> list[tuple[int, int]]:
    """Python twin of the text kernel, for well-formed text."""
    pairs = []
    for line in text.split(b"\n"):
        cells = line.replace(b",", b" ").replace(b";", b" ").split()
        if parted and line.strip():
            cells = line.strip(b" \r").split(parted)
        if cells and not cells[0].startswith((b"#", b"%")):
            pairs.append((int(cells[a]), int(cells[b])))
    return pairs


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(-99, 10**17), min_size=3, max_size=5), max_size=12),
    between=st.sampled_from([",", "\t", " ", ";", " , ", "  ", ", "]),
    end=st.sampled_from(["\n", "\r\n", " \n", "\n# note 1 2\n", "\n\n", "\n%\n"]),
    columns=st.permutations([0, 1, 2]),
)
def test_text_kernel_against_python(
    rows: list[list[int]], between: str, end: str, columns: list[int]
) -> None:
    text = end.join(between.join(map(str, row)) for row in rows).encode()
    a, b = np.zeros(len(rows) + 1, np.int64), np.zeros(len(rows) + 1, np.int64)
    for parted in {b"", between.strip(" ").encode()}:
        kind = parted[0] if parted else 0
        pairs, bad = parse_pairs(np.frombuffer(text, np.uint8), columns[0], columns[1], kind, a, b)
        assert bad == -1
        model = parse_model(text, columns[0], columns[1], parted)
        assert list(zip(a[:pairs].tolist(), b[:pairs].tolist())) == model


def test_text_between_tabs_is_one_cell(tmp_path: Path) -> None:
    path = tmp_path / "edges.tsv"
    path.write_text("name\tsource\ttarget\nSmith, 3 J\t1\t2\n\t 2 \t0\r\n#\t5\t6\n\nx\t0\t1\tmore 7\n")
    with pytest.warns(FeatstoreWarning, match="name"):
        graph = open_graph(path, nodes=3)
    check(graph, np.array([[1, 2, 0], [2, 0, 1]]), nodes=3)


def test_columns_of_text_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "cites.csv"
    path.write_text('year,"Cited",citing\n1999,1,0\n2001,2,1\n')
    with pytest.raises(SourceError, match="Say graph_key='source,target'"):
        open_graph(path, nodes=3)
    check(open_graph(path, nodes=3, key="citing, cited"), np.array([[0, 1], [1, 2]]), nodes=3)
    for key in ("citing", "citing,cites", "citing,cited,year", "cited,cited"):
        with pytest.raises(SourceError, match=f"no two columns '{key}'; .*year, cited, citing"):
            open_graph(path, nodes=3, key=key)
    path.write_text("0,1\n1,2\n")
    with pytest.raises(SourceError, match="the first line does not"):
        open_graph(path, nodes=3, key="citing,cited")


@pytest.mark.parametrize("between", [",", ";"])
def test_text_between_commas_of_a_header_is_one_cell(tmp_path: Path, between: str) -> None:
    other = ",;".replace(between, "")
    cells = ["label|source|target", f"class 1{other} 7|1 | 2", " 5 6\t7|\t2\t|0", "|0|1", "# 9|9|9"]
    cells += ["a b|1|0| x y"]
    path = tmp_path / "edges.csv"
    path.write_text("\n".join(cells).replace("|", between))
    with pytest.warns(FeatstoreWarning, match="label"):
        graph = open_graph(path, nodes=3)
    check(graph, np.array([[1, 2, 0, 1], [2, 0, 1, 0]]), nodes=3)
    for wrong in (f"source{between}target\n1 2\n", f"source{between}target\n1{other}2\n"):
        path.write_text(wrong)
        with pytest.raises(SourceError, match="line 2"):
            open_graph(path, nodes=3)
    path.write_text("name, first;source;target\na;0;1\n")
    with pytest.raises(SourceError, match="commas and semicolons"):
        open_graph(path, nodes=3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("edges.txt", "\tsource target w\n0 1 5\n1 2 6\n2 0 7\n"),
        ("edges.txt", "u\tv\t\n0\t1\n1\t2\n2\t0\n"),
        ("edges.csv", "a,b\t\n0,1\n1,2\n2,0\n"),
        ("edges.txt", "Source ID\tTarget ID\n0\t1\n1\t2\n2\t0\n"),
        ("edges.txt", "0 1\t5\n1 2\t6\n2 0\t7\n"),
        ("EDGES.TSV", "0\t1\n1\t2\n2\t0\n"),
        ("edges.txt", "Target ID\tSource ID\n1\t0\n2\t1\n0\t2\n"),
        ("edges.csv", "Source ID,Target ID,Weight\n0,1,5\n1,2,6\n2,0,7\n"),
        ("edges.csv", "Weight; Target ID; Source ID\n5;1;0\n6;2;1\n7;0;2\n"),
        ("edges.txt", "src dst\tweight\n0 1\t5\n1 2\t6\n2 0\t7\n"),
        ("edges.tsv", "name, title\tsource\ttarget\nA, B\t0\t1\nC\t1\t2\nD E\t2\t0\n"),
    ],
)
def test_blanks_and_tabs_of_headers(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FeatstoreWarning)
        check(open_graph(tmp_path / name, nodes=3), np.array([[0, 1, 2], [1, 2, 0]]), nodes=3)


@pytest.mark.parametrize("line", ["1\t\t2005", "\t1\t2", "1 2\t3", "1,2\t3", "1"])
def test_an_empty_cell_between_tabs_is_no_cell_further_on(tmp_path: Path, line: str) -> None:
    path = tmp_path / "edges.txt"
    for first in ("src\tdst\tyear", "0\t1\t2004"):
        path.write_text(f"{first}\n5\t6\t2004\n{line}\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FeatstoreWarning)
            with pytest.raises(SourceError, match=r"line 3 .*columns 1 and 2"):
                open_graph(path)


@pytest.mark.parametrize("header", [b"", b"src,dst\n", b"# a comment\n"])
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_a_mark_at_the_start_of_edges_is_no_header(tmp_path: Path, header: bytes, suffix: str) -> None:
    path, text = tmp_path / f"edges{suffix}", b"\xef\xbb\xbf" + header + b"0,1\n1,2\n2,0\n"
    path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    check(open_graph(path, nodes=3), np.array([[0, 1, 2], [1, 2, 0]]), nodes=3)
    with pytest.raises(SourceError, match=f"line {2 + bool(header)} goes from node 1 to 2"):
        open_graph(path, nodes=2)


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "1,",
        "1,,2",
        "x,2",
        "1,2.5",
        "1,2x",
        "1 -",
        "1,9223372036854775808",
        "1,12345678901234567890",
        '"1","2"',
    ],
)
def test_malformed_text_names_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "edges.csv"
    path.write_text(f"src,dst\n# comment\n0,1\n{text}\n2,3\n")
    with pytest.raises(SourceError, match=r"edges\.csv: line 4 .*columns 1 and 2"):
        open_graph(path)


@pytest.mark.parametrize("text", [",5", "NA,5", "null 5", "nan\t5", "null,null", "x,5.0"])
def test_a_first_edge_without_an_end_is_no_header(tmp_path: Path, text: str) -> None:
    path = tmp_path / "edges.txt"
    path.write_text(f"{text}\n3,5\n4,1\n".replace(",", "\t" if "\t" in text else ","))
    with pytest.raises(SourceError, match="may be an edge that lacks an end"):
        open_graph(path)


@pytest.mark.parametrize("between", [" ", ",", "\t", ";"])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0-1\n2-3\n4-5\r6-7\r8-9\r", 3), ("0-1\r2-3\r", 1), ("s-t\r0-1\r", 1), ("# a\r0-1\r", 1),
        ("source-target\r0-1\r2-3", 1), ("0-1\n# a\r2-3\n", 2), ("0-1\n\r2-3\n", 2),
    ],
)  # fmt: skip
def test_lines_that_end_with_a_carriage_return_alone_are_refused(
    tmp_path: Path, between: str, text: str, line: int
) -> None:
    """Not passed over as columns, or as a comment."""
    path = tmp_path / "edges.txt"
    path.write_bytes(text.replace("-", between).encode())
    with pytest.raises(SourceError, match=rf"line {line} .*carriage return"):
        open_graph(path)


@pytest.mark.parametrize("end", ["\r\n", "\r\r\n"])
def test_lines_that_end_with_both(tmp_path: Path, end: str) -> None:
    path = tmp_path / "edges.txt"
    path.write_bytes(f"# a{end}0 1{end}{end}2 3\r".encode())
    check(open_graph(path, nodes=NODES), np.array([[0, 2], [1, 3]]))


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".txt", ".el", ".csv.gz", ".txt.gz"])
@pytest.mark.parametrize("header", ["", "src{0}dst\n", "# from to\n\n", "id{0}target{0}source\n", "a{0}b\n"])
def test_text(tmp_path: Path, suffix: str, header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.packing.sources.lines.CSV_BLOCK_BYTES", 100)
    edge_index = edges_of()
    between = "," if "csv" in suffix else "\t"
    if "id" in header:
        lines = [f"7{between}{v}{between}{u}" for u, v in edge_index.T]
    else:
        lines = [f"{u}{between}{v}{between}0.5" for u, v in edge_index.T]
    text = header.format(between) + "\n".join(lines)
    path = tmp_path / f"edges{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    check(open_graph(path, nodes=NODES), edge_index)
    small_blocks(monkeypatch)
    graph = open_graph(path, nodes=NODES, memory_bytes=2600, scratch_dir=tmp_path / "s")
    assert isinstance(graph.indices, np.memmap)
    check(graph, edge_index)


def test_text_refused(tmp_path: Path) -> None:
    path = tmp_path / "edges.tsv.gz"
    path.write_bytes(gzip.compress(b"0\t1\n" * 3000)[:-9])
    with pytest.raises(SourceError, match="cannot be decompressed"):
        open_graph(path)
    path = tmp_path / "edges.txt"
    path.write_text("source target\n0 1\n\n# no edge\n5 99\n")
    with pytest.raises(
        SourceError, match=r"edges\.txt: line 5 goes from node 5 to 99, but node ids are 0 to 36"
    ):
        open_graph(path, nodes=NODES)
    path.write_text("0 -1\n")
    with pytest.raises(SourceError, match="line 1 goes from node 0 to -1"):
        open_graph(path)


@pytest.mark.parametrize("dtype", ["<i8", ">i4", "u2"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["npy", "npz", "npz compressed", "array", "tensor", "pt"])
def test_edge_index(tmp_path: Path, dtype: str, order: Any, transposed: bool, kind: str) -> None:
    edge_index = edges_of()
    given = np.asarray(edge_index.T if transposed else edge_index).astype(dtype, order=order)
    spec: Any = given
    key = None
    if kind == "npy":
        spec = tmp_path / "x.npy"
        np.save(spec, given)
    elif kind.startswith("npz"):
        spec, key = tmp_path / "x.npz", "edges"
        (np.savez if kind == "npz" else np.savez_compressed)(
            spec, edges=given, edge_index=np.zeros((2, 1), int)
        )
    elif kind != "array":
        spec = torch.tensor(given.astype(np.int64))
    if kind == "pt":
        torch.save(spec, tmp_path / "x.pt")
        spec = tmp_path / "x.pt"
    check(open_graph(spec, nodes=NODES, key=key), edge_index)


def test_two_by_two_may_be_either(tmp_path: Path) -> None:
    edges = np.array([[0, 1], [2, 2]])
    np.save(tmp_path / "x.npy", edges)
    np.savez(tmp_path / "x.npz", edge_index=edges)
    torch.save(torch.tensor(edges), tmp_path / "x.pt")
    for spec in (edges, torch.tensor(edges), *(tmp_path / name for name in ("x.npy", "x.npz", "x.pt"))):
        with pytest.raises(SourceError, match=r"\[2, 2\] may be \[2, edges\] or \[edges, 2\].* PyG Data"):
            open_graph(spec)
    (tmp_path / "x.csv").write_text("source,target\n0,2\n1,2\n")
    (tmp_path / "y.csv").write_text("0,2\n1,2\n")
    matrix = sp.coo_array((np.ones(2), edges), shape=(3, 3))
    csc = (np.array([0, 0, 0, 2]), np.array([0, 1]))
    for spec in (tmp_path / "x.csv", tmp_path / "y.csv", matrix, csc):
        assert open_graph(spec).indptr.tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("columns", [("src", "dst"), ("target", "source"), ("a", "b")])
def test_parquet(tmp_path: Path, columns: tuple[str, str]) -> None:
    edge_index = edges_of()
    ends = dict(zip(columns, edge_index))
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"w": np.ones(400), **ends}), path, row_group_size=90)
    expected = edge_index if columns[0] != "target" else edge_index[::-1]
    check(open_graph(path, nodes=NODES), expected)
    check(open_graph(path, nodes=NODES, key=f"{columns[1]},{columns[0]}"), edge_index[::-1])
    with pytest.raises(SourceError, match="no two integer columns"):
        open_graph(path, key="w,src")
    pq.write_table(pa.table({"src": pa.array([1, None]), "dst": [1, 2]}), path)
    with pytest.raises(SourceError, match="a null among edges 0 to 1"):
        open_graph(path)


def test_ogb_folder(tmp_path: Path) -> None:
    edge_index = edges_of()
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "edge.csv.gz").write_bytes(gzip.compress("".join(f"{u},{v}\n" for u, v in edge_index.T).encode()))
    check(open_graph(tmp_path, nodes=NODES), edge_index)
    (raw / "num-node-list.csv.gz").write_bytes(gzip.compress(b"40\n"))
    check(open_graph(raw), edge_index, 40)
    with pytest.raises(SourceError, match="40 nodes, but the features have 37 rows"):
        open_graph(raw, nodes=NODES)
    (raw / "num-node-list.csv.gz").write_bytes(gzip.compress(b"40\n3\n"))
    with pytest.raises(SourceError, match="holds 2 graphs"):
        open_graph(raw)
    with pytest.raises(SourceError, match="OGB folder have no key"):
        open_graph(raw, key="e")
    (raw / "edge.csv.gz").unlink()
    with pytest.raises(SourceError, match=r"no edge\.csv\.gz"):
        open_graph(tmp_path)


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
@pytest.mark.parametrize("compressed", [True, False])
def test_scipy(tmp_path: Path, layout: str, compressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index = np.unique(edges_of(), axis=1)
    matrix = sp.coo_matrix((np.zeros(edge_index.shape[1]), tuple(edge_index)), shape=(NODES, NODES)).asformat(
        layout
    )
    check(open_graph(matrix, nodes=NODES), edge_index)
    sp.save_npz(tmp_path / "x.npz", matrix, compressed=compressed)
    check(open_graph(tmp_path / "x.npz"), edge_index)
    small_blocks(monkeypatch)
    graph = open_graph(tmp_path / "x.npz", nodes=NODES, memory_bytes=2600, scratch_dir=tmp_path / "s")
    assert isinstance(graph.indices, np.memmap)
    check(graph, edge_index)
    with pytest.raises(SourceError, match="37 nodes, but the features have 38 rows"):
        open_graph(tmp_path / "x.npz", nodes=38)
    with pytest.raises(SourceError, match="37 nodes, but the features have 38 rows"):
        open_graph(matrix, nodes=38)
    with pytest.raises(SourceError, match="square"):
        open_graph(matrix.tocsc()[:, :5])


def test_scipy_lil_goes_by_way_of_coo() -> None:
    edge_index = np.unique(edges_of(), axis=1)
    matrix = sp.coo_matrix((np.ones(edge_index.shape[1]), tuple(edge_index)), shape=(NODES, NODES)).tolil()
    check(open_graph(matrix), edge_index)


def test_plain_csc_and_prefixed_csr(tmp_path: Path) -> None:
    edge_index = edges_of()
    indptr, indices = csc_model(edge_index, NODES)
    check(open_graph((indptr.astype(np.int32), indices.astype(np.int16)), nodes=NODES), edge_index)
    check(open_graph((torch.tensor(indptr), torch.tensor(indices))), edge_index)
    path = tmp_path / "x.npz"
    np.savez(path, indptr=indptr, indices=indices.astype(np.int32), features=np.ones((NODES, 2)))
    check(open_graph(path, nodes=NODES), edge_index)
    np.savez(path, adj_indptr=indptr, adj_indices=indices.astype(np.int32))
    check(open_graph(path, nodes=NODES), edge_index[::-1])
    np.savez(path, cites_indptr=indptr, cites_indices=indices.astype(">i4"))
    check(open_graph(path, key="cites"), edge_index[::-1])
    with pytest.raises(SourceError, match=r"no graph .*cites_indices, cites_indptr"):
        open_graph(path)


@pytest.mark.parametrize("dtype", ["i4", ">i8", "u2"])
def test_large_csc_members_are_mapped(tmp_path: Path, dtype: str) -> None:
    edge_index = edges_of(5000)
    indptr, indices = csc_model(edge_index, NODES)
    np.savez_compressed(tmp_path / "x.npz", indptr=indptr, indices=indices.astype(dtype))
    small = 4 * 5000 * np.dtype(dtype).itemsize - 4
    graph = open_graph(tmp_path / "x.npz", memory_bytes=small, scratch_dir=tmp_path / "scratch")
    assert isinstance(graph.indices, np.memmap)
    check(graph, edge_index)
    check(open_graph(tmp_path / "x.npz", memory_bytes=small + 4), edge_index)
    with pytest.raises(BudgetError, match="scratch_dir"):
        open_graph(tmp_path / "x.npz", memory_bytes=small)
    with pytest.raises(BudgetError, match="index pointers"):
        open_graph(tmp_path / "x.npz", memory_bytes=100)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 2, 1, 3], [0, 1, 2], "fall after node 1"),
        ([0, 2**62, -(2**62) - 2**61, 3], [0, 1, 2], "fall after node 1"),
        ([0, 1, 2, 4], [0, 1, 2], "end at 4, but there are 3"),
        ([1, 1, 2, 3], [0, 1, 2], "start at 1"),
        ([0, 1, 2, 3], [0, 3, 2], "edge 1 goes from node 3 to 1"),
        ([0, 0, 3, 3], [0, -1, 2], "edge 1 goes from node -1 to 1"),
        (np.zeros(0, int), [0], "shape"),
        ([0.0, 1.0], [0], "integers"),
        ([0, 1], [0.5], "integers"),
        ([0, 1], [[0]], "shape"),
    ],
)
def test_invalid_csc(tmp_path: Path, indptr: list[Any], indices: list[Any], message: str) -> None:
    pair = np.array(indptr), np.array(indices)
    with pytest.raises(SourceError, match=message):
        open_graph(pair)
    np.savez(tmp_path / "x.npz", indptr=pair[0], indices=pair[1])
    if pair[1].ndim == 1:
        with pytest.raises(SourceError, match=rf"x\.npz.*({message})"):
            open_graph(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (np.zeros((3, 3), int), r"\[2, edges\]"),
        (np.zeros((2, 3)), "integers"),
        (np.zeros(2, int), r"\[2, edges\]"),
        ({"a": 1}, "cannot read a graph from a dict"),
        ((np.zeros(1, int),), r"\(indptr, indices\)"),
        ("absent.npz", "no such file"),
        (np.array([[0], [2**63]], np.uint64), "does not fit int64"),
    ],
)
def test_unusable_specs(spec: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_graph(spec, nodes=3)


def test_unusable_files(tmp_path: Path) -> None:
    (tmp_path / "x.xyz").write_bytes(b"")
    with pytest.raises(SourceError, match="no known kind"):
        open_graph(tmp_path / "x.xyz")
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(SourceError, match="leave key out"):
        open_graph(tmp_path / "x.npy", key="a")
    np.savez(
        tmp_path / "x.npz", row=np.zeros(2, int), col=np.zeros(3, int), format=np.array("coo"), shape=[3, 3]
    )
    with pytest.raises(SourceError, match="no list of edges"):
        open_graph(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", format=np.array("dia"), shape=[3, 3])
    with pytest.raises(SourceError, match="'dia' layout"):
        open_graph(tmp_path / "x.npz")
    with pytest.raises(SourceError, match="is for files"):
        open_graph(np.zeros((2, 1), int), key="a")


def test_first_bad_edge_is_named_in_every_kind(tmp_path: Path) -> None:
    edge_index = edges_of()
    edge_index[1, 123] = NODES
    np.save(tmp_path / "x.npy", edge_index)
    np.savez(tmp_path / "x.npz", edge_index=edge_index)
    pq.write_table(pa.table({"src": edge_index[0], "dst": edge_index[1]}), tmp_path / "x.parquet")
    for spec in (edge_index, tmp_path / "x.npy", tmp_path / "x.npz", tmp_path / "x.parquet"):
        with pytest.raises(SourceError, match=rf"(edge|row) 123 goes from node {edge_index[0, 123]} to 37"):
            open_graph(spec, nodes=NODES)


def test_budget_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index = np.zeros((2, 100_000), np.int64)
    with pytest.raises(BudgetError) as small:
        open_graph(edge_index, nodes=1, memory_bytes=50_000, scratch_dir=tmp_path)
    assert small.value.needed_bytes > 50_000
    with pytest.raises(BudgetError, match="in-edges of one node") as one:
        open_graph(edge_index, nodes=1, memory_bytes=small.value.needed_bytes, scratch_dir=tmp_path)
    check(
        open_graph(edge_index, nodes=1, memory_bytes=one.value.needed_bytes, scratch_dir=tmp_path),
        edge_index,
        1,
    )
    spread = np.stack([np.arange(100_000), np.arange(100_000)])
    with pytest.raises(BudgetError, match="scratch_dir"):
        open_graph(spread, nodes=100_000, memory_bytes=1_200_000)
    monkeypatch.setattr(graphs_build.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(DiskFullError):
        open_graph(spread, nodes=100_000, memory_bytes=1_200_000, scratch_dir=tmp_path / "s")
    assert list((tmp_path / "s").iterdir()) == []


def test_a_stream_that_changes_is_caught(tmp_path: Path) -> None:
    class Fickle(ArrayEdges):
        passes = 0

        def blocks(self, block_edges: int) -> Any:
            self.passes += 1
            for sources, targets in super().blocks(block_edges):
                yield sources, (targets if self.passes == 1 else np.minimum(targets + 1, 9_999))

    targets = np.arange(10_000) % 9_000
    for memory_bytes in (None, 240_000):
        with pytest.raises(SourceError, match="must not change"):
            build_csc(Fickle(targets, targets, "<fickle>"), 10_000, memory_bytes, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_range_bounds_fill_but_never_pass_the_memory() -> None:
    indptr = csc_model(edges_of(), NODES)[0]
    for available in (700, 1000, 5000):
        bounds = range_bounds(indptr, 4, available)
        assert bounds is not None
        assert (bounds[0], bounds[-1]) == (0, NODES)
        for low, high in itertools.pairwise(bounds):
            assert 4 * (indptr[high] - indptr[low]) + 8 * (high - low) <= available
            if high < NODES:
                assert 4 * (indptr[high + 1] - indptr[low]) + 8 * (high + 1 - low) > available
    assert range_bounds(indptr, 4, 100) is None


def test_dtypes_of_indices() -> None:
    graph = open_graph((np.array([0, 2]), np.array([0, 0], np.int64)))
    assert graph.indices.dtype == np.int64
    assert open_graph((np.array([0, 2]), np.array([0, 0], np.uint8))).indices.dtype == np.int32
    with pytest.raises(ValueError, match="block_edges"):
        next(graph.blocks(0))


def test_failed_scratch_writes_are_typed_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge_index = edges_of()
    small_blocks(monkeypatch)
    real, calls = os.pwrite, [0]
    for number, error, expected in (
        (1, errno.ENOSPC, DiskFullError),
        (1, errno.EIO, DeviceError),
        (30, errno.ENOSPC, DiskFullError),
        (30, errno.EIO, DeviceError),
    ):
        calls[0] = 0

        def failing(fd: int, data: Any, offset: int, number: int = number, error: int = error) -> int:
            calls[0] += 1
            if calls[0] == number:
                raise OSError(error, os.strerror(error))
            return real(fd, data[: len(data) // 2 + 1], offset)

        monkeypatch.setattr(os, "pwrite", failing)
        with pytest.raises(expected, match=str(tmp_path)):
            open_graph(edge_index, nodes=NODES, memory_bytes=2600, scratch_dir=tmp_path)
        assert list(tmp_path.iterdir()) == []
    calls[0] = -(10**9)
    check(open_graph(edge_index, nodes=NODES, memory_bytes=2600, scratch_dir=tmp_path), edge_index)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a.csv", "column 3"),
        ("named.csv", "w"),
        ("a.parquet", "w"),
        ("a.npz", "edge_attr"),
        ("m.npz", "data"),
        ("adj.npz", "adj_data"),
        ("csc.npz", "data"),
        ("", "values"),
    ],
)
def test_data_of_edges_that_is_not_stored_is_warned_of(tmp_path: Path, name: str, what: str) -> None:
    path: Any = tmp_path / name
    ends = np.array([[0, 1, 2], [1, 2, 0]])
    weighted = sp.coo_matrix((np.array([1.0, 2.0, 1.0]), ends), (3, 3)).tocsr()
    if name == "a.csv":
        path.write_text("0,1,5\n1,2,6\n2,0,7\n")
    elif name == "named.csv":
        path.write_text("source,w,target\n0,5,1\n1,6,2\n2,7,0\n")
    elif name == "a.parquet":
        pq.write_table(pa.table({"source": ends[0], "target": ends[1], "w": np.ones(3)}), path)
    elif name == "a.npz":
        np.savez(path, edge_index=ends, edge_attr=np.ones((3, 2)))
    elif name == "m.npz":
        sp.save_npz(path, weighted)
    elif name in ("adj.npz", "csc.npz"):
        prefix = "adj_" if name == "adj.npz" else ""
        parts = {one: getattr(weighted, one) for one in ("data", "indices", "indptr")}
        np.savez(path, **{f"{prefix}{one}": values for one, values in parts.items()})
        for key in [name[:3]] if prefix else []:
            with pytest.warns(FeatstoreWarning, match="not stored: .*adj_data"):
                open_graph(path, nodes=3, key=key)
    else:
        path = weighted
    with pytest.warns(FeatstoreWarning, match=rf"not stored: .*{what}") as warned:
        graph = open_graph(path, nodes=3)
    assert warned[0].filename == __file__, "a warning is at the line of who called featstore"
    assert len(graph.indices) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_graph(sp.coo_matrix((np.ones(3), ends), (3, 3)), nodes=3)


def test_edge_ids_are_places_in_what_was_given(tmp_path: Path) -> None:
    """In a list of edges, in indices, among the values of a matrix."""
    edge_index = edges_of(60)
    sources, targets = edge_index
    matrix = sp.coo_array((np.ones(60), (sources, targets)), (NODES, NODES))
    csc = csc_model(edge_index, NODES)
    np.savez(tmp_path / "csc.npz", indptr=csc[0], indices=csc[1])
    np.savetxt(tmp_path / "e.csv", edge_index.T, fmt="%d", delimiter=",", header="src,dst")
    csr, columns = matrix.tocsr(), matrix.tocsc()
    ways: list[tuple[Any, np.ndarray]] = [
        (edge_index, edge_index), (tmp_path / "e.csv", edge_index), (matrix, edge_index),
        (csc, np.stack([csc[1], np.repeat(np.arange(NODES), np.diff(csc[0]))])),
        (tmp_path / "csc.npz", np.stack([csc[1], np.repeat(np.arange(NODES), np.diff(csc[0]))])),
        (csr, np.stack([np.repeat(np.arange(NODES), np.diff(csr.indptr)), csr.indices])),
        (columns, np.stack([columns.indices, np.repeat(np.arange(NODES), np.diff(columns.indptr))])),
    ]  # fmt: skip
    for spec, own in ways:
        graph = open_graph(spec, nodes=NODES, edge_ids=True)
        ids = graph.ids_between(0, graph.edges)
        assert sorted(ids.tolist()) == list(range(graph.edges))
        np.testing.assert_array_equal(own[0][ids], graph.indices)
        np.testing.assert_array_equal(own[1][ids], np.repeat(np.arange(NODES), np.diff(graph.indptr)))
    with pytest.raises(SourceError, match="'lil' layout have no order"):
        open_graph(matrix.tolil(), edge_ids=True)


@pytest.mark.parametrize("ids", [False, True])
def test_a_graph_built_on_disk_stays_within_the_memory(tmp_path: Path, ids: bool) -> None:
    """Also where one range of nodes follows another."""
    edge_index = edges_of(400_000, 20_000)
    budget = 2 << 20
    stream = ArrayEdges(*edge_index, "edges")
    warm = ArrayEdges(*edges_of(100), "edges")
    for folder, edges, memory in ((tmp_path / "warm", warm, 200_000), (tmp_path / "own", stream, budget)):
        tracemalloc.start()
        numbers = numbers_between if ids else None
        nodes = 20_000 if edges is stream else NODES
        indptr, indices, found = build_csc(edges, nodes, memory, folder, numbers)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert isinstance(indices, np.memmap)
    assert isinstance(found, np.memmap) == ids
    assert len(indptr) == 20_001
    assert peak < budget + 400_000


@pytest.mark.parametrize("kind", ["edge_index", "csc"])
def test_members_of_an_archive_with_a_value_for_each_edge_are_warned_of(tmp_path: Path, kind: str) -> None:
    beside: dict[str, Any] = {"weight": np.ones(4), "time": np.arange(4), "x": np.ones((3, 4)), "count": 4}
    ends = {"edge_index": np.array([[0, 1, 2, 0], [1, 2, 0, 2]])}
    lists = {"indptr": np.array([0, 1, 2, 4]), "indices": np.array([2, 0, 1, 0])}
    np.savez(tmp_path / "a.npz", **(ends if kind == "edge_index" else lists), **beside)
    with pytest.warns(FeatstoreWarning, match="not stored: time, weight. Give"):
        open_graph(tmp_path / "a.npz", nodes=3)


def test_two_ends_of_an_edge_are_two_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [0, 1], "b": [1, 2]}), tmp_path / "e.parquet")
    for spec in (tmp_path / "e.parquet", pa.table({"a": [0, 1], "b": [1, 2]})):
        with pytest.raises(SourceError, match="no two"):
            open_graph(spec, nodes=3, key="a,a")
    (tmp_path / "e.csv").write_text("a,b,a\n0,1,2\n")
    with pytest.raises(SourceError, match="no two columns 'a,b'"):
        open_graph(tmp_path / "e.csv", nodes=3, key="a,b")
