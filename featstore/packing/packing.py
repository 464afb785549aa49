"""Packing: from features and a graph to a committed store.

For each table: find the order, write its maps, bring the rows into it (:mod:`featstore.packing.permute`),
write the checksums; then the small arrays; then commit (:mod:`featstore.storage.generations`). Every step
leaves its progress in the journal. Nothing that depends on time, place or memory goes into the store, so that
equal input and seed give equal bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from featstore.arguments import as_callback, as_flag, as_path
from featstore.base.folders import real_path
from featstore.base.progress import watched
from featstore.base.system import is_directory, is_there
from featstore.base.warning import warn
from featstore.errors import BudgetError, SourceError
from featstore.packing.inputs import parse_inputs
from featstore.packing.memory import with_slack
from featstore.packing.progress import Progress
from featstore.packing.request import Options, check_pack
from featstore.packing.steps import Packing
from featstore.packing.topology import HUB_SHARE
from featstore.storage.disk import Disk
from featstore.storage.generations import writing
from featstore.storage.journal import TableProgress
from featstore.storage.transaction import write_generation
from featstore.units import parse_bytes

__all__ = ["Options", "Progress", "pack"]


@watched
def pack(
    out: str | os.PathLike[str],
    features: Any,
    *,
    graph: Any = None,
    arrays: Mapping[str, Any] | None = None,
    order: str | Mapping[str, str] = "auto",
    permutation: Any = None,
    partitions: int | Mapping[str, int] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    cast: str | Mapping[str, str] | None = None,
    raw_dtype: Any = None,
    shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    offset: int | Mapping[str, int] | None = None,
    key: str | Sequence[str] | Mapping[str, Any] | None = None,
    columns: str | int | Sequence[str | int] | Mapping[str, Any] | None = None,
    id: str | int | Mapping[str, str | int] | None = None,
    node_keys: Any = None,
    graph_key: str | Mapping[str, str] | None = None,
    memory: int | str = "1GiB",
    seed: int = 0,
    topology: bool = True,
    hubs: float = HUB_SHARE,
    hub_rank: str = "degree",
    edge_ids: bool | None = None,
    edge_weights: Any = None,
    edge_times: Any = None,
    train: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | Callable[[Progress], None] | None = None,
    disk: Disk | None = None,
) -> Path:
    """Pack feature tables into a store, and return its path; ``featstore.pack`` opens it. ``featstore pack``
    has the same options.

    What is of a table (``graph`` to ``graph_key`` without ``arrays``, and ``train``) may be given once for
    all tables (``graph``, ``permutation`` and ``node_keys`` where there is one), or as a mapping of table
    names to values.

    Args:
        out: the store's directory; made if it does not exist.
        features: one table (a path, an array, an iterator of row blocks, anything
            :func:`featstore.packing.sources.opening.open_rows` takes, or a PyG ``Data``/``HeteroData``
            object or the folder of a data set (GraphBolt, OGB with types), which bring graphs and arrays
            along), or a mapping of table names to tables; where graphs have edge types also to a number of
            nodes, which have no features.
        graph: the graph of the table, as :func:`featstore.packing.graphs.opening.open_graph` takes it, or one
            relation of a ``HeteroData`` (``data["a", "r", "a"]``). It replaces the graphs of such data:
            ``{}`` packs without. Its degrees become the order in which a static cache takes rows. Or a typed
            graph: a mapping of edge types, ``(source type, relation, target type)`` or these joined by
            ``__``, to edges in any of these forms, whose types are names of tables; matrices are ``[sources,
            targets]``. A ``HeteroData`` brings all of its own. The orders of all types that partitioners
            make are then made together, with as many partitions for each.
        arrays: small arrays to keep beside the tables (labels, splits), in node id order: name to array, or
            path of a ``.npy``.
        order: ``"auto"`` (METIS where there is a graph of at most 5 million stored edges and METIS fits the
            memory, else multilevel; LDG without pymetis, or where that does not fit either; as given without
            a graph, and where the table is one partition), ``"given"``, ``"permutation"``, ``"degree"``,
            ``"metis"``, ``"multilevel"``, ``"ldg"``, ``"bfs"``.
        permutation: with order ``"permutation"``: node ids in row order, as an array or the path of a
            ``.npy``.
        partitions: how many parts partitioners make (of the orders all but given, permutation and degree);
            by default parts of at least 512 KiB of features, see
            :func:`featstore.order.orders.default_partitions`.
        dtype: the short form of ``cast``; for a headless file with ``shape`` and no ``raw_dtype``, the short
            form of that.
        cast: convert to ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``; by default rows stay
            as they are.
        raw_dtype: the dtype of a headless file's values, or what text is read as (float32 unless told;
            float64 where it is cast).
        shape: of the whole table, the first number -1 for as many rows as there are: needed for a headless
            file; of an iterator it says that items of shape ``shape[1:]`` are single rows. What names its own
            shape must agree with it.
        offset: byte of a headless file at which its rows begin.
        key: the member of an ``.npz``, zarr group or ``.pt`` file; of a table with named columns the same as
            ``columns``.
        columns: the columns that are features of a table that names them (Parquet, Arrow, ``.csv``, fields of
            structured arrays), by name or position; ``"*"`` for all. Without it all are, and a table with one
            that cannot be or that looks like ids is refused. Fields without it, and of ``"*"`` alone, stay
            together: rows are records.
        id: the column of such a table that says whose row it is: node ids 0 to n-1, each once; rows are
            placed by it. Without it row i is node i. Ids take 12 bytes a row of ``memory``, 16 where the
            number of rows is unknown, 20 where the order is another than by id.
        node_keys: what you know the nodes of a table by, where that is not 0 to n-1: strings or whole
            numbers, one a row, each once; they are kept, and :meth:`featstore.Store.ids` finds nodes by them.
            ``"id"``: the column that ``id=`` names, and rows stay in the order of the file; or an array, a
            list, a column of Arrow, pandas or polars, or the path of a ``.npy``, of Parquet or Arrow with one
            column, or of a ``.txt`` with a key a line. Row i is node i. In text files keys are strings as
            they are written. The ends of the table's edges are keys then, too, where ``graph`` is a list of
            edges: an array of texts or numbers, a mapping (by table) or frame with columns source and target,
            Parquet, Arrow, ``.csv`` or ``.tsv`` whose first line names its columns. Of an edge type they are
            keys of the source type and of the target type, where these have such.
        graph_key: the member or columns of the graph's file with the edges.
        memory: budget for everything the pack holds in memory beyond the bare process, in bytes or as
            ``"512MiB"``.
        seed: of the partitioners. Equal input, options and seed give equal bytes.
        topology: store the graphs too, for sampling and mega-batches from disk (4 or 8 bytes an edge).
        hubs: share of the nodes whose lists of neighbours are stored a second time, side by side, for
            mega-batches.
        hub_rank: which nodes those are: ``"degree"``, or ``"external"`` for most edges into other partitions.
        edge_ids: keep the number that you know each edge by, beside the graph (4 or 8 bytes an edge): its
            place in the list of edges, in ``indices``, or among the values of the matrix that was given.
            Samplers and loaders then say which edges were sampled (``e_id``), and rows of edges can be had by
            them. By default where the pack has anything of edges: a table ``edge_features`` or
            ``src__rel__dst``, features or arrays of edges in PyG data. Row e of ``edge_features`` is then to
            be that of edge e of the only graph; row e of ``src__rel__dst`` that of edge e of that edge type.
        edge_weights: a weight for each edge, by these numbers: float32 or float64, finite and not negative,
            as anything that a table of one number a row may be; or by table or edge type. Of PyG data also
            the name of an attribute, which is then no array of the store. Stored with the graph.
        edge_times: a time for each edge likewise, whole numbers in a unit of your own, stored as int64. Each
            list of neighbours then stands in ascending time.
        train: training nodes, which order ``"bfs"`` spreads evenly, and no other looks at: node ids, each
            once, a mask, or the name of one of ``arrays``.
        resume: go on with the unfinished pack in ``out``; input and options must be the same.
        overwrite: replace the store in ``out``; it stands until the new one is committed.
        progress: called now and then with a :class:`Progress`, from any thread; True for a line on standard
            error that tells how far it is: on a terminal and in a notebook written over, elsewhere every half
            minute.
        disk: what performs all writes; for tests.

    Raises SourceError, BudgetError, DiskFullError, DeviceError, StoreExistsError, StoreLockedError,
    CorruptionError. Warns, as FeatstoreWarning, of what of PyG data is not stored, and of edge rows that no
    stored graph numbers.
    """
    door = disk or Disk()
    reading = {
        "raw_dtype": raw_dtype,
        "dtype": dtype,
        "cast": cast,
        "shape": shape,
        "offset": offset,
        "key": key,
        "columns": columns,
        "id": id,
    }
    edge_ids = None if edge_ids is None else as_flag(edge_ids, "edge_ids")
    values = {"weights": edge_weights, "times": edge_times}
    inputs = parse_inputs(
        features, graph, arrays, reading, numbered=as_flag(topology, "topology") and edge_ids is not False,
        edge_values={part: value for part, value in values.items() if value is not None},
        node_keys=node_keys,
    )  # fmt: skip
    options = Options.of(
        inputs, memory=memory, order=order, permutation=permutation, partitions=partitions, seed=seed,
        topology=topology, hubs=hubs, hub_rank=hub_rank, train=train, graph_key=graph_key, edge_ids=edge_ids,
    )  # fmt: skip
    check_pack(options, inputs, resume=resume, overwrite=overwrite)
    progress = as_callback(progress, "progress")
    out = as_path(out, "out")
    for text in inputs.warnings:
        warn(text)
    store = real_path(out)
    if is_there(store) and not is_directory(store):
        raise SourceError(f"{store} is a file; give the path of a directory to make")
    with (
        writing(store, door),
        write_generation(store, door, resume=resume, overwrite=overwrite, worth=_worth) as transaction,
    ):
        packing = Packing(transaction, inputs, options, progress)
        try:
            packing.run()
        except BudgetError as error:
            raise BudgetError(with_slack(error.needed_bytes), parse_bytes(memory), error.what) from None
    for text in packing.warnings:
        warn(text)
    return Path(out)


def _worth(progress: TableProgress, error: BaseException) -> bool:
    """What took time stays for ``--resume``; another budget is another pack, which ``--resume`` would
    refuse."""
    ordered = progress.order is not None and not isinstance(error, BudgetError)
    return bool(ordered or progress.spill_bytes or progress.written_bytes or progress.done)
