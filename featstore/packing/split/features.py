"""A split straight from features and graph, without a store of all rows before it.

What a split asks of a store is its order and its graph, which are packed first with one byte a row: a store
``OUT.order`` beside the split, removed when that is complete. Then each part is written from the features
themselves: they are passed over once for each host, and what is a host's own is put in order as a pack does
it, in memory or through a spill of that part alone. So no disk is needed for a store and parts at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from featstore.arguments import as_choice, as_path
from featstore.base.system import is_there
from featstore.base.warning import warn
from featstore.errors import ArgumentError, IncompleteStoreError, SourceError, StoreExistsError
from featstore.order.orders import METHODS, default_partitions
from featstore.packing.inputs import Inputs, by_table, parse_inputs
from featstore.packing.packing import pack
from featstore.packing.progress import Progress
from featstore.packing.sources.base import FeatureSource, stat_of
from featstore.packing.split.directory import standing
from featstore.packing.split.sources import OneByteRows, looked_at
from featstore.packing.split.split import SplitRequest
from featstore.storage.disk import Disk
from featstore.storage.generations import remove_store, writer_lock
from featstore.storage.manifest import MANIFEST_NAME, TOPOLOGY
from featstore.storage.store import OpenStore, Table

__all__ = ["split_features"]

_WITHOUT_PARTITIONS = ("given", "permutation", "degree")


def split_features(
    features: Any,
    hosts: int,
    out: str | os.PathLike[str],
    *,
    graph: Any = None,
    arrays: Mapping[str, Any] | None = None,
    order: Any = "auto",
    partitions: Any = None,
    hubs: float = 0.01,
    graph_key: Any = None,
    raw_dtype: Any = None,
    shape: Any = None,
    offset: Any = 0,
    key: Any = None,
    columns: Any = None,
    train: Any = None,
    seed: int = 0,
    halo_disk: int | str | None = None,
    split_topology: bool = False,
    memory: int | str = "1GiB",
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
    disk: Disk | None = None,
) -> Path:
    """Split features and their graph by hosts into the directory ``out``, as :func:`featstore.pack` and then
    :func:`featstore.split` would, without a store of all rows in between; returns the path. The same rows,
    lists, orders and owners come out, under another family.

    A store of the order and the graph stands at ``out`` with ``.order`` appended until the split is
    complete: a byte a row, 12 a node, and the graph. Beyond that and the parts the disk has room for a
    part's rows once more, where they are more than half of ``memory``. Features are read once for each host.

    Args:
        features: tables as :func:`featstore.pack` takes them, whose rows are counted and can be read again:
            neither iterators nor ids in a column.
        hosts, out, train, seed, halo_disk, split_topology, memory: as :func:`featstore.split`.
        graph, arrays, order, partitions, hubs, graph_key, raw_dtype, shape, offset, key, columns: as
            :func:`featstore.pack`; ``order`` is not ``"permutation"``. Rows are not cast.
        resume: go on with an unfinished split in ``out``, of the same features, graph and options.
        overwrite: replace the split in ``out``, one store after the other.
        progress, disk: as :func:`featstore.split`.

    Raises what these two raise.
    """
    reading = {"raw_dtype": raw_dtype, "shape": shape, "offset": offset, "key": key, "columns": columns}
    asked = SplitRequest(
        hosts, out, train, seed, halo_disk, split_topology, memory, resume, overwrite, progress, disk
    )
    inputs = parse_inputs(features, graph, arrays, reading)
    asked.sources = {name: _usable(name, source) for name, source in inputs.tables.items()}
    orders = by_table(order, inputs.tables, "order")
    for method in orders.values():
        if isinstance(method, str) and method == "permutation":
            raise ArgumentError("order='permutation' is of a pack: pack the features, and split the store")
        as_choice(method, "order", METHODS)
    counts = by_table(partitions, inputs.tables, "partitions")
    for name, source in asked.sources.items():
        if (
            name in inputs.graphs
            and orders.get(name, "auto") not in _WITHOUT_PARTITIONS
            and name not in counts
        ):
            assert source.rows is not None
            counts[name] = default_partitions(source.rows, source.row_bytes)
    asked.beside = {
        "features": {name: looked_at(source) for name, source in asked.sources.items()},
        "graph_bytes": {name: _size_of(given) for name, given in inputs.graphs.items()},
        "order": orders, "partitions": counts, "hubs": hubs,
    }  # fmt: skip
    path = asked.place.with_name(f"{asked.place.name}.order")
    options = {
        "order": order, "partitions": counts or None, "hubs": hubs, "graph_key": graph_key, "seed": seed,
        "memory": memory, "progress": progress, "disk": disk,
    }  # fmt: skip
    _pack_order(path, inputs, asked, options)
    try:
        with OpenStore(path) as base:
            asked.run(base)
    except BaseException:
        if not standing(asked.place):  # nothing was begun that could be gone on with
            _remove(path, disk or Disk())
        raise
    if not _remove(path, disk or Disk()):
        warn(f"{path}, which has the order of the split, is not needed any more, but is read: remove it")
    return Path(as_path(out, "out"))


def _usable(name: str, source: FeatureSource) -> FeatureSource:
    """A source that can be passed over for each host. Raises SourceError."""
    if source.rows is None or not source.replayable or (source.chosen is not None and source.chosen.id):
        raise SourceError(
            f"table {name!r} ({source.name}) cannot be split straight: its rows have to be counted, in the "
            "order of node ids, and read once for each host. Pack it, and split the store"
        )
    return source


def _pack_order(path: Path, inputs: Inputs, asked: SplitRequest, options: dict[str, Any]) -> None:
    """Have the store of the order, unless an earlier run has left it, whose topology is finished."""
    there = standing(asked.place)
    if asked.resume and there and not is_there(path):
        raise IncompleteStoreError(
            f"{path}, which has the order of the split in {asked.place}, is gone: the split was completed, "
            "or start anew with --overwrite"
        )
    left = is_there(path / MANIFEST_NAME)
    if left:
        with OpenStore(path) as store:
            if not all(_is_one_byte(table) for table in store.tables.values()):
                raise StoreExistsError(
                    f"{path} is needed for the order of the split, and holds another store, which is left "
                    "alone: give another out="
                )
    finished = TOPOLOGY in there and there[TOPOLOGY].family is not None and not there[TOPOLOGY].unfinished
    resume = asked.resume and is_there(path)
    if asked.resume and not there:
        asked.resume = False  # it was stopped before the first of its stores was begun
    if left and resume and finished:
        return
    tables = {name: OneByteRows(source) for name, source in inputs.tables.items()}
    given = {"graph": inputs.graphs, "arrays": inputs.arrays, **options}
    if left and (resume or asked.overwrite):  # it may be of another graph, and would be another generation
        _remove(path, asked.disk or Disk())
    try:
        pack(path, tables, resume=resume and not left, **given)
    except IncompleteStoreError:
        if not resume:
            raise
        pack(path, tables, **given)  # nothing of it was worth keeping


def _remove(path: Path, disk: Disk) -> bool:
    """Remove the store of the order; False where it is being read, and stays."""
    with writer_lock(path):
        return remove_store(path, disk) and not is_there(path)


def _is_one_byte(table: Table) -> bool:
    """Whether it is a table of the order alone."""
    return table.entry.dtype == "uint8" and not table.row_shape and not table.entry.statistics.get("maximum")


def _size_of(graph: Any) -> int | None:
    """Bytes of a graph's file or arrays; None of what has neither."""
    if isinstance(graph, str | os.PathLike):
        return stat_of(Path(graph)).st_size
    parts = graph if isinstance(graph, tuple | list) else [graph]
    sizes = [getattr(part, "nbytes", None) for part in parts]
    return None if None in sizes else sum(sizes)  # type: ignore[arg-type]
