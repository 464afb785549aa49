"""A split straight from features and graph, without a store of all rows before it.

What a split asks of a store is its order and its graph, which are packed first, with a checksum in place of
each row: a store ``OUT.order`` beside the split, removed when that is complete, as is ``OUT.order.journal``,
which says of
what input both are: a split that is gone on with is asked for the same. Then each part is written from the
features themselves: they are passed over once more for each host, and what is a host's own is put in order
as a pack does it, in memory or through a spill of that part alone. So no disk is needed for a store and
parts at once. Partitions are as many as those of a pack, which follow from the bytes of the rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from featstore.arguments import as_callback, as_choice, as_flag, as_path
from featstore.base.progress import watched
from featstore.base.system import is_there
from featstore.base.warning import warn
from featstore.errors import ArgumentError, IncompleteStoreError, SourceError, StoreExistsError
from featstore.order.orders import METHODS, default_partitions
from featstore.packing.inputs import WITHOUT_PARTITIONS, Inputs, by_table, parse_inputs
from featstore.packing.packing import pack
from featstore.packing.progress import Progress
from featstore.packing.request import Options, check_pack
from featstore.packing.sources.base import FeatureSource, dtype_text
from featstore.packing.split.checks import Joined, checked
from featstore.packing.split.directory import (
    REPLACES,
    Standing,
    check_place,
    check_standing,
    host_parts,
    is_complete,
    is_order,
    journal_path,
    journal_there,
    order_path,
    remove_order,
    standing,
)
from featstore.packing.split.sources import RowChecksums
from featstore.packing.split.split import SplitRequest
from featstore.packing.steps import pack_fingerprint
from featstore.storage.disk import Disk
from featstore.storage.generations import collect, writer_lock
from featstore.storage.journal import Journal, State
from featstore.storage.manifest import MANIFEST_NAME
from featstore.storage.store import OpenStore

__all__ = ["split_features"]

_MEMORY = "memory"


@watched
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
    edge_ids: bool | None = None,
    edge_weights: Any = None,
    edge_times: Any = None,
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
    progress: bool | Callable[[Progress], None] | None = None,
    disk: Disk | None = None,
) -> Path:
    """Split features and their graph by hosts into the directory ``out``, as :func:`featstore.pack` and then
    :func:`featstore.split` would, without a store of all rows in between; returns the path. The same rows,
    lists, orders and owners come out, under another family.

    A store of the order and the graph stands at ``out`` with ``.order`` appended until the split is
    complete: 4 bytes a row, 12 a node, and the graph. Beyond that and the parts the disk has room for a
    part's rows once more, where they are more than half of ``memory``. Features are read once for their
    checksums, so that parts of other features are never taken for these, and once for each host.

    Args:
        features: tables as :func:`featstore.pack` takes them, also of edge types, whose rows are counted and
            can be read again: neither iterators nor ids in a column.
        hosts, out, train, seed, halo_disk, split_topology, memory: as :func:`featstore.split`.
        graph, graph_key, edge_ids, edge_weights, edge_times: as :func:`featstore.pack`.
        arrays, order, partitions, hubs, raw_dtype, shape, offset, key, columns: as :func:`featstore.pack`;
            ``order`` is not ``"permutation"``. Rows are not cast.
        resume: go on with an unfinished split in ``out``, of the same features, graph and options, as
            ``out`` with ``.order.journal`` appended tells, and of rows that are what they were; not with one
            that replaces another. With another memory what was begun of the order, or of a part's rows, is
            made anew.
        overwrite: replace the split in ``out``, one store after the other.
        progress, disk: as :func:`featstore.split`.

    Raises what these two raise.
    """
    reading = {"raw_dtype": raw_dtype, "shape": shape, "offset": offset, "key": key, "columns": columns}
    asked = SplitRequest(
        hosts, out, train, seed, halo_disk, split_topology, memory, resume, overwrite,
        as_callback(progress, "progress"), disk,
    )  # fmt: skip
    edge_ids = None if edge_ids is None else as_flag(edge_ids, "edge_ids")
    values = {"weights": edge_weights, "times": edge_times}
    inputs = parse_inputs(
        features, graph, arrays, reading, numbered=edge_ids is not False,
        edge_values={part: value for part, value in values.items() if value is not None},
    )  # fmt: skip
    asked.sources = {name: _usable(name, source) for name, source in inputs.tables.items()}
    counts = _partitions(inputs, _orders(inputs, order), partitions)
    types = {name: [dtype_text(one.dtype), list(one.row_shape)] for name, one in asked.sources.items()}
    asked.beside = {"features": types}  # all else is in the store of the order
    path = order_path(asked.place)
    options = {
        "order": order, "partitions": counts or None, "hubs": hubs, "graph_key": graph_key, "seed": seed,
        "memory": memory, "edge_ids": edge_ids,
    }  # fmt: skip
    journal = _journal(inputs, asked, options)
    check_place(asked.place, path)
    checked(asked, Joined.of_inputs(inputs))
    for text in inputs.warnings:
        warn(text)
    with asked.writing():  # from before the journal is written: it is of one who writes
        _pack_order(path, inputs, asked, options | {"progress": asked.progress, "disk": disk}, journal)
        try:
            with OpenStore(path) as base:
                asked.run(base)  # where all was written before, the order was left
        except BaseException:
            if not standing(asked.place):  # nothing was begun that could be gone on with
                remove_order(asked.place, journal)
            raise
        if not remove_order(asked.place, journal):
            warn(f"{path}, which has the order of the split, is not needed any more, but is read: remove it")
    return Path(as_path(out, "out"))


def _orders(inputs: Inputs, given: Any) -> dict[str, Any]:
    """The order of each table of which one is said. Raises ArgumentError."""
    orders = by_table(given, inputs.tables, "order")
    for method in orders.values():
        if isinstance(method, str) and method == "permutation":
            raise ArgumentError("order='permutation' is of a pack: pack the features, and split the store")
        as_choice(method, "order", METHODS)
    return orders


def _partitions(inputs: Inputs, orders: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """How many partitions each table is to have; given once, it is of those that a graph orders."""
    if given is not None and not isinstance(given, Mapping):
        given = dict.fromkeys([n for n in inputs.tables if n in inputs.ordered] or inputs.tables, given)
    counts = by_table(given, inputs.tables, "partitions")
    if inputs.types and counts:  # of types that are joined, it is given for all or for none
        return counts
    return _default_partitions(inputs, orders) | counts


def _default_partitions(inputs: Inputs, orders: Mapping[str, Any]) -> dict[str, int]:
    """How many partitions a pack makes of each table that a graph orders, where nobody says: those of types
    that are joined are as many of each."""
    ordered = [
        name for name in inputs.tables
        if name in inputs.ordered and orders.get(name, "auto") not in WITHOUT_PARTITIONS
    ]  # fmt: skip
    found: dict[str, int] = {}
    for together in [ordered] if inputs.types else [[name] for name in ordered]:
        sources = [inputs.tables[name] for name in together]
        rows = sum(source.rows or 0 for source in sources)
        all_bytes = sum((source.rows or 0) * source.row_bytes for source in sources)
        found |= dict.fromkeys(together, default_partitions(rows, max(1, -(-all_bytes // max(1, rows)))))
    return found


def _usable(name: str, source: FeatureSource) -> FeatureSource:
    """A source that can be passed over for each host. Raises SourceError."""
    if (
        source.rows is None
        or not source.replayable
        or (source.chosen is not None and source.chosen.id is not None)
    ):
        raise SourceError(
            f"table {name!r} ({source.name}) cannot be split straight: its rows have to be counted, in the "
            "order of node ids, and read once for each host. Pack it, and split the store"
        )
    return source


def _journal(inputs: Inputs, asked: SplitRequest, options: dict[str, Any]) -> Journal:
    """What the features and the order are made of, which is kept until the split is complete: the store of
    the order knows nothing of the features, and parts that are finished have no journal of their own."""
    asked_of_pack = Options.of(
        inputs, permutation=None, topology=True, hub_rank="degree", train=None, **options
    )
    check_pack(asked_of_pack, inputs, resume=False, overwrite=False)
    options["edge_ids"] = asked_of_pack.edge_ids  # of PyG data, too, which the pack of the order does not see
    made_of = pack_fingerprint(inputs, asked_of_pack)
    return Journal(asked.disk or Disk(), journal_path(asked.place), State(made_of))


def _before(
    path: Path, asked: SplitRequest, journal: Journal, there: Mapping[str, Standing]
) -> dict[str, Any] | None:  # fmt: skip
    """What the run was made of that this one goes on with; None where it does not. Raises StoreExistsError,
    IncompleteStoreError, SourceError where an earlier run left what cannot be gone on with, or replaced."""
    then = journal_there(asked.place, journal.disk)
    if there and not asked.resume:
        check_standing(asked.place, dict(there), resume=False, overwrite=asked.overwrite)
    if is_there(path) and then is not None and not (asked.resume or asked.overwrite):
        raise StoreExistsError(
            f"{path} has the order of an unfinished split; go on with --resume (the same input and options), "
            "or start anew with --overwrite"
        )
    if not asked.resume:
        return None
    if not is_there(path):
        check_standing(asked.place, dict(there), resume=True, overwrite=False)
    if then is None:
        raise IncompleteStoreError(
            f"{journal.path}, which says what the split in {asked.place} is made of, is gone: the split was "
            "completed, or start anew with --overwrite"
        )
    made_of = then.state.fingerprint
    if REPLACES in made_of:
        raise StoreExistsError(
            f"the split in {asked.place} was replacing another when it was stopped, and parts of that one "
            "may stand among its own: start anew with --overwrite"
        )
    then.check({**journal.state.fingerprint, _MEMORY: made_of.get(_MEMORY)})
    if there and not is_there(path):
        raise IncompleteStoreError(
            f"{path}, which has the order of the split in {asked.place}, is gone: the split was completed, "
            "or start anew with --overwrite"
        )
    return made_of


def _pack_order(
    path: Path, inputs: Inputs, asked: SplitRequest, options: dict[str, Any], journal: Journal
) -> None:
    """Have the store of the order, unless an earlier run of the same input has left it."""
    there = standing(asked.place)
    left, said = is_there(path / MANIFEST_NAME), journal_there(asked.place, journal.disk) is not None
    if left and (not is_order(path) or not (said or asked.resume)):
        raise StoreExistsError(
            f"{path} is needed for the order of the split, and holds another store, which is left alone: "
            "give another out="
        )
    before = _before(path, asked, journal, there)
    resume = asked.resume and is_there(path)
    if resume and not left and is_complete(there):
        remove_order(asked.place, journal)  # it was stopped while that was being removed
        raise StoreExistsError(f"there is nothing to resume in {asked.place}: its split was completed")
    if asked.resume and not there:
        asked.resume = False  # it was stopped before the first of its stores was begun
    if left and resume:
        return
    tables = {
        name: source.rows if name in inputs.featureless else RowChecksums(source)
        for name, source in inputs.tables.items()
    }
    values: dict[str, dict[str, FeatureSource]] = {}
    for name, of_graph in inputs.values.items():
        for one in of_graph:
            values.setdefault(f"edge_{one.part}", {})[name] = one.source
    graphs = {inputs.types.get(name, name): one for name, one in inputs.graphs.items()}
    given = {"graph": graphs, "arrays": inputs.arrays, **values, **options}
    if left and asked.overwrite:  # another generation would be another store
        if not remove_order(asked.place, journal):
            raise StoreExistsError(f"{path}, which has the order of an earlier split, is read: close it")
    elif is_there(path) and not said:
        raise StoreExistsError(
            f"{path} is needed for the order of the split, and is taken: give another out="
        )
    if asked.overwrite and host_parts(there):  # a topology alone is replaced before any part is begun
        journal.state.fingerprint[REPLACES] = host_parts(there)
    if resume and before is not None and before.get(_MEMORY) != journal.state.fingerprint[_MEMORY]:
        warn(f"the order in {path} is made anew: it was begun with another memory= (--memory)")
        with writer_lock(path):  # how far it was is of its memory
            collect(path, journal.disk, unfinished=True)
        resume = False
    journal.save()
    try:
        pack(path, tables, resume=resume, overwrite=asked.overwrite, **given)
    except IncompleteStoreError:
        if not resume:
            raise
        pack(path, tables, **given)  # nothing of it was worth keeping
    finally:
        if not is_there(path):
            journal.remove()
