"""Makes the golden stores of format v1, and says what is in them.

    python formats/v1/make_golden.py [DIRECTORY]

The stores under ``golden/`` are what every implementation of the format is held against, so they never
change: a test makes them anew with the code of the day and compares byte for byte. To keep them small *and*
of several chunks, chunk files aim at a few pages here instead of 64 MiB; to keep them independent of
partitioners and of the library's version, the order and the writer's name are given. Values come from integer
arithmetic, because random generators may change.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import featstore
from featstore.compile.decide import Policy
from featstore.compile.placement import Forecast, Location, Placement, forecast
from featstore.layout import TableLayout
from featstore.order import Order
from featstore.packing.split.assignment import Assignment
from featstore.plan.cost import DEFAULT, DeviceModel

GOLDEN = Path(__file__).parent / "golden"
PAPERS = 600
USERS = 1009
CHUNK_BYTES = 8192


@dataclass(frozen=True)
class Golden:
    """A golden store: its tables and arrays in node id order, and the options of the pack. ``batches``: (node
    ids by table, sample) of each mini-batch of a trace that is compiled for it into ``packs/default``, with
    the options ``compiling``. ``hosts``: the owners of each table's rows, by which the store is split; then
    the golden store is a directory of several. ``split_topology``: graphs are split, too. ``featureless``:
    tables of zeros that are given as numbers of nodes."""

    tables: Mapping[str, np.ndarray[Any, Any]]
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    batches: Sequence[tuple[Mapping[str, np.ndarray[Any, Any]], Any]] = ()
    compiling: Mapping[str, Any] = field(default_factory=dict)
    hosts: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    split_topology: bool = False
    featureless: Sequence[str] = ()


def numbers(shape: tuple[int, ...], dtype: Any, step: int = 37) -> np.ndarray[Any, Any]:
    """Whole numbers from 0 to 100 that every numeric dtype can hold, in an order without a pattern of page
    size."""
    count = int(np.prod(shape))
    index = np.arange(count, dtype=np.int64)
    return ((index * step + index * index % 89) % 101).astype(dtype).reshape(shape)


def sizes() -> Golden:
    """Rows of awkward sizes; tables of no row, of one row and of several chunks; arrays of 0, 1, 2 axes and
    of none."""
    return Golden(
        tables={
            "byte": numbers((20_000,), np.uint8),
            "forty": numbers((1_200, 10), np.float32),
            "seven": numbers((500, 3, 7), np.uint8),
            "wide": numbers((5, 1025), np.float32),
            "empty": numbers((0, 4), np.float32),
            "one": numbers((1, 3), np.float64),
            "page": numbers((7, 1024), np.int32),
        },
        arrays={
            "scalar": np.array(-7, np.int64),
            "labels": numbers((300,), np.int16),
            "matrix": numbers((6, 5), np.float64),
            "nothing": np.zeros((0, 3), np.float32),
            "long": numbers((3_000,), np.int32),
        },
    )


def order() -> Golden:
    """Permuted tables: one with partitions (one of them empty), degrees and five chunks, one of a single
    chunk."""
    index = np.arange(PAPERS)
    edges = np.stack([index * index % PAPERS, (7 * index + 1) % PAPERS])
    return Golden(
        tables={"paper": numbers((PAPERS, 32), np.float16), "author": numbers((150, 3), np.int16, step=11)},
        options={
            "graph": {"paper": edges},
            "topology": False,
            "order": {"paper": "ldg", "author": "permutation"},
            "permutation": {"author": (np.arange(150) * 77 + 5) % 150},
        },
    )


def dtypes() -> Golden:
    """A table of each dtype that the format names, and of some that it keeps as opaque bytes."""
    core = [
        "bool",
        "int8",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float64",
        "complex64",
        "complex128",
    ]
    tables = {name: numbers((9, 3), np.dtype(name)) for name in core}
    tables["bool"] = numbers((9, 3), np.int64) % 2 == 0
    tables["bfloat16"] = numbers((130, 17), ml_dtypes.bfloat16)
    tables["big_endian"] = numbers((9, 2), np.dtype(">i4"))
    tables["datetime"] = numbers((9, 2), np.int64).astype("M8[s]")
    tables["text"] = np.array([f"n{i}" for i in range(9)], "U4")
    record = np.zeros(9, np.dtype([("id", "<u4"), ("at", "<f4", (2,)), ("tag", "S3")]))
    record["id"], record["at"] = numbers((9,), np.uint32), numbers((9, 2), np.float32)
    record["tag"] = [f"t{i}".encode() for i in range(9)]
    tables["record"] = record
    dates = numbers((4,), np.int64).astype("M8[D]")
    return Golden(tables=tables, arrays={"dates": dates}, options={"columns": {"record": "*"}})


def graph_edges() -> dict[str, np.ndarray[Any, Any]]:
    """The edges [2, edges] of `graph`, by table: self-loops and edges that occur twice, nodes without
    edges."""
    index = np.arange(5 * USERS)
    sources, targets = index * index % USERS, (13 * index + index // 7) % USERS
    row_of_node = np.argsort(_NODE_OF_ROW[USERS](np.arange(USERS)))
    # rows 60 to 130, a partition, gather nothing
    kept = (row_of_node[targets] < 60) | (row_of_node[targets] >= 131)
    tags = np.arange(40)
    return {
        "user": np.stack([sources[kept], targets[kept]]),
        "tag": np.stack([tags * 3 % 11, tags // 4]),
        "alone": np.zeros((2, 0), np.int64),
    }


def graph() -> Golden:
    """Graphs: over a permuted table with a partition of no rows and one of no edges; in chunks; with hubs; of
    no edges."""
    return Golden(
        tables={
            "user": numbers((USERS, 5), np.float32),
            "tag": numbers((13, 2), np.int16),
            "alone": numbers((3, 1), np.uint8),
            "plain": numbers((4,), np.uint8),
        },
        options={
            "graph": graph_edges(),
            "order": {"user": "ldg", "tag": "given", "alone": "given", "plain": "given"},
            "hubs": 0.05,
            "hub_rank": "external",
        },
    )


def edges() -> Golden:
    """A graph that keeps the numbers of its edges: over a permuted table, with hubs, with edges
    that occur twice; and a table of their rows."""
    index = np.arange(1200)
    sources, targets = index * index % PAPERS, (11 * index + index // 5) % 450
    return Golden(
        tables={
            "paper": numbers((PAPERS, 2), np.int16),
            "edge_features": numbers((1200,), np.uint8),
        },
        options={
            "graph": {"paper": np.stack([np.append(sources[:-50], sources[:50]),
                                         np.append(targets[:-50], targets[:50])])},
            "order": {"paper": "ldg", "edge_features": "given"},
            "hubs": 0.02,
        },
    )  # fmt: skip


def typed() -> Golden:
    """A typed graph: two edge types, one between two types of nodes, with weights and times, hubs and edge
    ids; nodes without features; rows of edges of one type."""
    index = np.arange(900)
    writes = np.stack([index * index % 150, (7 * index + index // 5) % 300])
    cites = np.stack([index * index % PAPERS, (11 * index + index // 7) % 450])
    return Golden(
        tables={
            "paper": numbers((PAPERS, 2), np.int16),
            "author": np.zeros(150, np.uint8),
            "author__writes__paper": numbers((900,), np.uint8),
        },
        options={
            "graph": {"author__writes__paper": writes, "paper__cites__paper": cites},
            "order": {"paper": "permutation", "author": "permutation", "author__writes__paper": "given"},
            "permutation": {"paper": (np.arange(PAPERS) * 77 + 5) % PAPERS, "author": np.arange(150)[::-1]},
            "edge_weights": {"author__writes__paper": numbers((900,), np.float32) / 4},
            "edge_times": {
                "author__writes__paper": numbers((900,), np.int64, step=11) // 9 - 4,
                "paper__cites__paper": numbers((900,), np.int64) * 2**33,
            },
            "hubs": 0.02,
        },
        featureless=["author"],
    )  # fmt: skip


def _some_everywhere(
    misses: Any, table_rows: int, *rest: Any, extent_bytes_max: int, **_: Any
) -> tuple[Placement, Forecast]:
    """X mini-batches miss once are packed or, some, left; those missed more often are shared."""
    placement = Placement(4, (int(Location.PACKED), int(Location.SHARED)), 1, 0.25, int(Location.BASE))
    layout, model = (next(r for r in rest if isinstance(r, kind)) for kind in (TableLayout, DeviceModel))
    expected = forecast(placement, misses, table_rows, layout, model, extent_bytes_max=extent_bytes_max)
    return placement, replace(expected, seconds=0.0, bytes_read=0, reads=0)


def _descending(group: Any, mask: Any) -> Any:
    """Stands in for the order of shared rows."""
    return group.rows[mask][::-1].astype(np.int64)


def compiled() -> Golden:
    """A compiled trace: rows from memory, a device, packed, shared and base tables; rows wanted twice;
    mini-batches of nothing; two tables, one of them permuted, beside one that no mini-batch wants; chunks;
    rows that are gone when a round ends."""
    batches = []
    for number in range(8):
        index = np.arange(0 if number == 5 else 90 + 9 * number, dtype=np.int64)
        near, far = index * 5 + number * 35, index * index * 7 + index * (number // 2) * 13 + number * 3
        papers = np.where(index % 3 == 0, near, far) % PAPERS
        authors = (index[: 11 * (number % 4)] * (number + 3) + number) % 70
        batches.append(
            (
                {"paper": papers, "author": authors},
                {"number": number, "edges": np.stack([index[:9], index[:9] + 1])},
            )
        )
    return Golden(
        tables={
            "paper": numbers((PAPERS, 32), np.float16),
            "author": numbers((70, 3), np.int16, step=11),
            "venue": numbers((9,), np.uint8),
        },
        options={"order": {"paper": "permutation", "author": "given", "venue": "given"},
                 "permutation": {"paper": (np.arange(PAPERS) * 77 + 5) % PAPERS}},
        batches=batches,
        compiling={"cache": 2600, "device_memory": 600, "memory": "16MiB",
                   "policy": Policy("golden", _some_everywhere, _descending)},
    )  # fmt: skip


def split() -> Golden:
    """A store split by two hosts: a permuted table with a graph, hubs and an empty partition, and one of a
    single record, which one host alone owns."""
    index = np.arange(PAPERS)
    edges = np.stack([(index * index) % PAPERS, (7 * index + index // 5) % PAPERS])
    record = np.array([(7, b"abc")], np.dtype([("id", "<u4"), ("tag", "S3")]))
    return Golden(
        tables={"paper": numbers((PAPERS, 4), ml_dtypes.bfloat16), "note": record},
        arrays={"labels": numbers((PAPERS,), np.int16)},
        options={
            "graph": {"paper": np.concatenate([edges, edges[:, ::3] // 2], axis=1)},
            "order": {"paper": "ldg", "note": "given"},
            "hubs": 0.01,
            "columns": {"note": "*"},
        },
        hosts={"paper": (index // 150 + index // 7) % 3 % 2},
    )


def keys() -> Golden:
    """Keys: strings of one to four bytes a character and of none, over a permuted table, in several chunks;
    numbers, some of them negative; and of a table without rows."""
    index = np.arange(PAPERS)
    texts = [f"10.{1000 + i * i % 7919}/{'é€𝄞x'[i % 4] * (i % 9)}{i}" for i in index.tolist()]
    texts[17] = ""
    return Golden(
        tables={
            "paper": numbers((PAPERS, 2), np.int16),
            "user": numbers((300,), np.uint8),
            "nobody": np.zeros((0, 2), np.uint8),
        },
        options={
            "order": {"paper": "permutation", "user": "given", "nobody": "given"},
            "permutation": {"paper": (index * 77 + 5) % PAPERS},
            "node_keys": {
                "paper": texts,
                "user": (np.arange(300) - 40) ** 3 * 10**11 + 7,
                "nobody": np.zeros(0, np.int64),
            },
        },
    )


STORES = {
    "sizes": sizes,
    "order": order,
    "dtypes": dtypes,
    "graph": graph,
    "edges": edges,
    "typed": typed,
    "keys": keys,
    "compiled": compiled,
}


#: Golden stores that are directories of several.
def split_values() -> Golden:
    """A store whose topology is split, with the numbers, weights and times of its edges."""
    one = split()
    edges = one.options["graph"]["paper"]
    index = np.arange(edges.shape[1])
    values = {"edge_weights": (index % 5).astype(np.float32) / 4, "edge_times": index * 13 % 50 - 20}
    options = {"graph": {"paper": edges}, "order": "ldg", "hubs": 0, "edge_ids": True} | values
    papers = {"paper": numbers((PAPERS, 1), np.int16)}
    return replace(one, tables=papers, arrays={}, options=options, split_topology=True)


FAMILIES = {
    "split": split,
    "split-topology": lambda: replace(split(), split_topology=True),
    "split-values": split_values,
}

_NODE_OF_ROW: Mapping[int, Callable[[Any], Any]] = {
    PAPERS: lambda row: (row * 7 + 3) % PAPERS,
    USERS: lambda row: (row * 100 + 41) % USERS,
}
_PARTITIONS = {PAPERS: [0, 150, 150, 400, PAPERS], USERS: [0, 60, 60, 131, USERS]}


def _partitioned(*_: Any, rows: int, permutation: Any = None, **__: Any) -> Order:
    """Stands in for the partitioners: a fixed permutation in four partitions, or the order that was given."""
    if permutation is not None:
        offsets = np.array([0, rows], np.int64)
        return Order(
            "permutation", np.asarray(permutation, np.int32), offsets, {"chosen_because": "it was asked for"}
        )
    if rows not in _PARTITIONS:
        return Order("given", None, np.array([0, rows], np.int64), {"chosen_because": "it was asked for"})
    node_of_row = _NODE_OF_ROW[rows](np.arange(rows)).astype(np.int32)
    offsets = np.array(_PARTITIONS[rows], np.int64)
    parameters: dict[str, int | float | str] = {
        "parts": 4,
        "seed": 0,
        "slack": 1.05,
        "chosen_because": "it was asked for",
    }
    return Order("ldg", node_of_row, offsets, parameters)


def make(name: str, directory: Path) -> Path:
    """Make one golden store as ``directory/name``, replacing what is there."""
    golden, out = (STORES | FAMILIES)[name](), directory / name
    if out.exists():
        shutil.rmtree(out)
    choose = TableLayout.choose
    with ExitStack() as patches:
        patches.enter_context(mock.patch("featstore.storage.transaction.__version__", "golden"))
        patches.enter_context(mock.patch("featstore.packing.ordering.make_order", _partitioned))
        small = staticmethod(lambda rows, row_bytes: choose(rows, row_bytes, chunk_bytes=CHUNK_BYTES))
        patches.enter_context(mock.patch.object(TableLayout, "choose", small))
        if golden.hosts:
            _split(golden, out)
        else:
            tables = {n: len(t) if n in golden.featureless else t for n, t in golden.tables.items()}
            featstore.pack(out, tables, arrays=golden.arrays, **golden.options).close()
        if golden.batches:
            _compile(golden, out)
    for lock in out.rglob("lock"):
        lock.unlink()  # says which process wrote; no part of a store
    return out


def _split(golden: Golden, out: Path) -> None:
    def given(graph: Any, dealt: Any, *_: Any, **__: Any) -> Assignment:
        return Assignment(np.concatenate([golden.hosts[one.table] for one in dealt]).astype(np.uint8))

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("featstore.packing.split.plan.assign", given),
    ):
        featstore.pack(Path(folder) / "s", golden.tables, arrays=golden.arrays, **golden.options).close()
        featstore.split(Path(folder) / "s", 2, out, split_topology=golden.split_topology)


def _compile(golden: Golden, out: Path) -> None:
    build = sys.modules[featstore.compile_trace.__module__]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(build, "device_model", return_value=DEFAULT),
    ):
        featstore.Trace.record(golden.batches, Path(folder) / "trace").close()
        found = featstore.compile_trace(out, Path(folder) / "trace", **golden.compiling)
    assert isinstance(found, featstore.Store)
    found.close()


if __name__ == "__main__":
    for each in STORES | FAMILIES:
        print(make(each, Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN))
