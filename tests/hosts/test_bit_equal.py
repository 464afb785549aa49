"""The same mini-batches over two tables of nodes, through any number of hosts of a store that was split: rows
and losses are equal to the last bit, whatever the dtypes, the rows' sizes and the split."""

from __future__ import annotations

import importlib.util
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from equal_hosts import BY, CASES, CITES, WRITES, be_alone, be_equal, pack_and_split
from fault_hosts import all_of, forked_from
from test_split_topology import each, hosts, split
from test_split_training import graph_and_rows

import featstore
from featstore.hosts import messages as ms
from featstore.hosts.halo import halo_ids_of

V1 = Path(__file__).parents[2] / "formats/v1"
DTYPES = ("float32", "float16", "bfloat16", "uint8")


# Losses.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("bit-equal")
    graph_and_rows(made, pack, 1)  # by which processes have their kernels
    for case in CASES:
        pack_and_split(made, case, pack, 1, 2, 4)
    return made


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, list[str]]:
    """The losses of each case in one process, of what NumPy reads."""
    assert all_of(forked_from(folder), be_alone, 1, str(folder)) == [0]
    told: dict[str, list[str]] = json.loads((folder / "alone.0").read_text())
    assert set(told) == set(CASES)
    for losses in told.values():
        assert len(set(losses)) == 12
        assert np.isfinite([float.fromhex(loss) for loss in losses]).all()
    return told


def test_cases_are_of_all_dtypes_and_of_rows_from_8_bytes_to_40_kilobytes() -> None:
    found = [one for case in CASES.values() for one in case.values()]
    sizes = {(dtype, bytes_of(dtype) * int(np.prod(shape))) for dtype, shape in found}
    assert {dtype for dtype, _ in sizes} == set(DTYPES)
    assert {size for _, size in sizes} >= {8, 40_000}
    assert all(8 <= size <= 40_000 for _, size in sizes)
    assert all(len({dtype for dtype, _ in case.values()}) == 2 for case in CASES.values())


@pytest.mark.parametrize("count", [1, 2, 4])
def test_losses_over_two_tables_are_those_of_one_process(
    folder: Path, wanted: dict[str, list[str]], count: int
) -> None:
    """On every host, whatever it keeps of others' rows, which come where there are others."""
    assert all_of(forked_from(folder), be_equal, count, count, str(folder)) == [0] * count
    for rank in range(count):
        told = json.loads((folder / f"equal{count}.told.{rank}").read_text())
        assert len(told) == 3 * len(CASES)
        for what, one in told.items():
            assert one["losses"] == wanted[what.split()[0]], (rank, what)
            assert (one["received"] > 0) == (count > 1), (rank, what)


# Any split.


def bytes_of(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


@cache
def independent() -> Any:
    """The reader that was written from the specification alone."""
    spec = importlib.util.spec_from_file_location("reader_of_splits", V1 / "reader.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same_bits(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> bool:
    """Asked so, a failure does not go through megabytes to show where they differ."""
    alike = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    return alike and found.tobytes() == wanted.tobytes()


def any_rows(nodes: int, kind: tuple[str, int], seed: int) -> np.ndarray[Any, Any]:
    """Rows of any bits, of about so many bytes each."""
    dtype, row_bytes = np.dtype(getattr(ml_dtypes, kind[0], kind[0])), kind[1]
    width = row_bytes // dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 256, nodes * width * dtype.itemsize, np.uint8)
    return bits.view(dtype).reshape(nodes, width)


def any_edges(nodes: dict[str, int], typed: bool, degree: int, seed: int) -> dict[Any, np.ndarray[Any, Any]]:
    """Of three edge types, or of papers alone; few nodes are named often."""
    random, made = np.random.default_rng(seed), {}
    for of in (WRITES, CITES, BY) if typed else (CITES,):
        count = degree * nodes[of[2]]
        sources = (nodes[of[0]] * random.random(count) ** 2).astype(np.int64)
        made[of] = np.stack([sources, random.integers(0, nodes[of[2]], count)])
    return made


def check_owners(
    parts: Path, rows: dict[str, Any], edges: dict[Any, Any], graphs: dict[Any, str], count: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Who owns what, as the files say: each part has the rows of its host, and its halo are the nodes of
    other hosts that edges to its own come from."""
    owner: dict[str, np.ndarray[Any, Any]] = independent().Store(parts / "topology").tables
    for name, values in rows.items():
        assert owner[name].shape == (len(values),)
        assert owner[name].max() < count
    for host in range(count):
        with featstore.open(parts / f"host-{host}") as part, part.reader(memory="8MiB") as reader:
            for name, values in rows.items():
                own = np.flatnonzero(owner[name] == host)
                found = reader.read({name: np.arange(len(own))})[name]
                assert same_bits(found, values[own])
            for of, (sources, targets) in edges.items():
                named = np.unique(sources[owner[of[2]][targets] == host])
                wanted = named[owner[of[0]][named] != host]
                assert np.array_equal(part.arrays[f"{graphs[of]}.halo_ids"], wanted), of
    return owner


def ids_of(here: Any, nodes: dict[str, int], number: int) -> dict[str, np.ndarray[Any, Any]]:
    """Of a host's requests one: ids of both tables, many of them twice, and at last its halo and no other."""
    rng = np.random.default_rng([number, here.place.host])
    if number == 3:
        return {name: rng.permutation(halo_ids_of(here.tables[name])) for name in nodes}
    return {name: rng.integers(0, count, rng.integers(0, 70)) for name, count in nodes.items()}


def check_reads(here: Any, rows: dict[str, Any], owner: dict[str, Any], copies: bool) -> None:
    """All that one host reads is the source's, and what others own comes from these."""
    remote, nodes = 0, {name: len(values) for name, values in rows.items()}
    with here.reader(memory="8MiB") as reader:
        for number in range(4):
            ids = ids_of(here, nodes, number)
            found = reader.read(ids)
            for name, values in rows.items():
                assert same_bits(found[name], values[ids[name]]), (number, name)
                others = owner[name][ids[name]] != here.place.host
                assert others.all() or number < 3, "a halo is of other hosts"
                remote += int(others.sum())
    received = here.received()[0]
    assert received <= remote if copies else received == remote


#: A dtype, and bytes of a row.
KINDS = st.tuples(st.sampled_from(DTYPES), st.sampled_from([8, 40_000]) | st.integers(8, 40_000))
COUNTS = st.integers(24, 90)


@settings(max_examples=6)
@example(
    seed=0, count=4, partitions=12, nodes=(60, 80), kinds=(("bfloat16", 40_000), ("float16", 8)), typed=True,
    degree=3, copies=None, split_topology=False, body_bytes=0,
)  # fmt: skip
@example(
    seed=1, count=2, partitions=9, nodes=(70, 50), kinds=(("float32", 8), ("float16", 40_000)), typed=False,
    degree=5, copies="0.5x", split_topology=True, body_bytes=40_000,
)  # fmt: skip
@given(
    seed=st.integers(0, 2**20), count=st.integers(1, 4), partitions=st.integers(4, 20),
    nodes=st.tuples(COUNTS, COUNTS), kinds=st.tuples(KINDS, KINDS), typed=st.booleans(),
    degree=st.integers(0, 6), copies=st.sampled_from([None, "0.5x"]), split_topology=st.booleans(),
    body_bytes=st.sampled_from([0, 40_000, 1 << 16]),
)  # fmt: skip
def test_rows_of_two_tables_are_the_sources_whatever_the_split(
    tmp_path_factory: pytest.TempPathFactory, pack: Any, seed: int, count: int, partitions: int,
    nodes: tuple[int, int], kinds: tuple[tuple[str, int], ...], typed: bool, degree: int, copies: str | None,
    split_topology: bool, body_bytes: int,
) -> None:  # fmt: skip
    """With messages as long as they are by default, and with those that a long row fills."""
    place = tmp_path_factory.mktemp("any")
    sizes = dict(zip(("paper", "author"), nodes, strict=True))
    rows = {
        name: any_rows(sizes[name], kind, seed + at)
        for at, (name, kind) in enumerate(zip(sizes, kinds, strict=True))
    }
    edges = any_edges(sizes, typed, degree, seed)
    graphs = {of: "__".join(of) if typed else of[2] for of in edges}
    given: dict[str, Any] = {"graph": edges, "order": "ldg", "partitions": partitions}
    if not typed:
        given = {key: {"paper": value} for key, value in (given | {"graph": edges[CITES]}).items()}
    with pack(place / "s", rows, **given) as store:
        split(store, count, place / "parts", halo_disk=copies, split_topology=split_topology)
    owner = check_owners(place / "parts", rows, edges, graphs, count)
    with hosts(place / "parts", count, body_bytes=ms.padded(body_bytes)) as (stores, _):
        for here in stores:
            assert all(np.array_equal(here.owners[name].hosts, owner[name]) for name in rows)
        found = each(stores, lambda here: check_reads(here, rows, owner, copies is not None))
        assert found == [None] * count, found
    shutil.rmtree(place)
