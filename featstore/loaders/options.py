"""What may be said to the loader, typed in one place: what editors complete and mypy checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from featstore import arguments as args
from featstore.errors import ArgumentError
from featstore.reader.options import check_reading
from featstore.sampling.attributes import SAMPLING_OPTIONS

if TYPE_CHECKING:
    from featstore.tiers import TierSpec
    from featstore.tiers.buffer_tier import Buffer

BATCH_SIZE = 1024  # seeds of a mini-batch, by default
MODES = ("online", "compiled", "rolling", "partitions")


class LoaderOptions(TypedDict, total=False):
    """Options of :meth:`featstore.Store.loader`. None is as good as not given, but for ``mode``, ``memory``,
    ``engine``, ``queue_depth``, ``verify`` and ``shared``, which have no None.

    Attributes:
        seeds: training nodes, ids or a mask of all nodes, or the name of an array in the store: the store
            samples itself.
        fanouts: with ``seeds``: neighbours per node and hop, -1 for all.
        batch_size: with ``seeds``: seeds of a mini-batch; by default 1,024.
        seed: with ``seeds``: of the order and the neighbours; by default 0.
        seeds_in_order: with ``seeds``: they come as they were given, in every epoch, as for evaluation; else
            in another order each epoch. Not in mode partitions.
        graph: with ``seeds``: the name of the graph, where the store has several; its nodes have no types.
            Where the store has several tables of nodes, say with ``nodes`` whose rows are wanted
            (``lambda sample: {"paper": sample.node}``), or leave it out and give the relations that are not
            wanted fan-outs of 0.
        replace, disjoint, subgraph_type, temporal_strategy: with ``seeds``: how neighbours are drawn, and
            what comes out, as of PyG's loader: :class:`featstore.sampling.options.SamplingOptions` has them,
            as ``subgraph`` and ``temporal``. In mode partitions what is in memory is sampled, by weights and
            times that graphs keep.
        weight_attr: with ``seeds``: ``"weights"`` for those that the graph keeps; or the name of an array in
            the store with a weight for each edge, by the numbers that edges were packed with: then the graph
            is held in memory.
        time_attr: with ``seeds``: ``"times"`` for those of edges that the graph keeps; or the name of an
            array with the times of nodes, or of edges likewise.
        input_time: with ``time_attr``: int64, the times of the seeds, in their order (of a mask, ascending);
            by default their own, where nodes have times. With times, or ``disjoint=True``, a node may be a
            seed several times; ``input_id`` int64 [b] of a mini-batch says which of the list its seeds are.
        time_window: with ``time_attr``: nothing that is more than so much earlier than its seed.
        rank, world_size: which of how many processes that train together; by default as
            ``torch.distributed`` or ``torchrun`` say. Each has its share of every epoch: of the seeds, or of
            the mini-batches that are given every ``world_size``-th (unless a torch ``DistributedSampler`` or
            the like among them divides already). ``memory`` is that of one process.
        shared: with ``seeds``, and of ``LinkNeighborLoader``: the ranks of this host have one loader between
            them, which holds the rows once; ``memory`` is then the host's. True under ``torchrun``; else a
            name that they have in common and no other run has, with ``rank`` and ``world_size`` unless
            ``torch.distributed`` has begun or the environment says them. All make it, and go through it in
            lock-step:
            :mod:`featstore.loaders.host`.
        drop_last: leave out what is left over after whole mini-batches of all ranks. Else the last
            mini-batch may be smaller, and up to ``world_size - 1`` seeds (or mini-batches) of an epoch stand
            twice, so that every rank has as many steps; over hosts as many as make each host's as many as
            those of the host with most. :meth:`Loader.report` says how many.
        mode: ``"online"``: rows are read as mini-batches come, through a buffer. ``"compiled"``: the
            mini-batches of epoch 0 are recorded once, their rows laid out for them, and repeated every epoch.
            ``"rolling"``: fresh ones every epoch, laid out while the epoch before trains. ``"partitions"``
            (needs ``seeds``): random collections of partitions are loaded whole, and neighbours outside of
            them left out. ``"auto"``, the default: what is fastest of those that change nothing of what is
            learned, and write no more than ``disk=`` offers, see :mod:`featstore.loaders.costs.choose`;
            ``mode_because`` says why, ``costs`` what each would cost.
        repeat, epochs, train_seconds: for the choice of ``"auto"``, as for
            :func:`featstore.loaders.costs.costs.loader_costs`.
        memory: budget of all of this, bytes or a size; by default 1 GiB. A mini-batch that the loop keeps
            comes on top.
        validation_memory: of ``memory``, for :meth:`Loader.validation`.
        attach: names of arrays in the store with a value for each node (labels, for example), or for each
            edge of a graph that keeps the numbers of its edges (weights): each mini-batch has them by these
            names, the values of its nodes or edges, as arrays or tensors like ``x``: of ``n_id``, whose rows
            ``x`` has, and which ``nodes=`` says where it is given (of types that it does not name, the
            sampler's); of objects of PyG's and DGL's, of their own.
        edge_table: name of a table of edges: each mini-batch has its rows as ``edge_attr``, by the ``e_id``
            that the mini-batch brings, the numbers of edges that the table was packed with. The store's own
            sampling brings it where the graph was packed with edge ids. In mode partitions, too, these rows
            are read for each mini-batch.
        nodes: a function from a mini-batch to its node ids, or to {table: ids}, where no rule finds them.
        tensors: ``x`` as a torch tensor; by default where there is a device, or the samples are PyG's or
            DGL's.
        device: where tensors go. In the modes online and partitions several may be given, as a list: they
            share the rows kept on them.
        device_memory: for rows kept on each device, bytes or a size, beside ``memory``.
        device_policy: of the modes online and partitions: of these rows, a name of
            :data:`featstore.tiers.slots.layout.POLICIES` but ``"static"`` and ``"min"``.
        progress: a line on standard error tells how it goes: mini-batches and bytes a second, hits, stages,
            the slowest of them, and before that how far preparing is, of the modes compiled and rolling
            (where ranks share a loader, local rank 0's alone). False by default.
        engine, queue_depth, threads, verify: as for :class:`featstore.Reader`.
        policy: of mode online: of the buffer, a name of :data:`featstore.tiers.slots.layout.POLICIES` but
            ``"min"``, or ``"auto"``, the default, for that which hits most.
        static: of mode online, for policy ``"static"``: node ids (or a mapping of tables to them) to keep.
        halo: of mode online, for a store that is split by hosts: what keeps rows of other hosts beside the
            buffer of all rows, in a part of ``memory``. With ``seeds``, or a list of mini-batches, bytes or
            a size, for those that are wanted soonest, found by looking ahead (:mod:`featstore.hosts.ahead`);
            or :class:`featstore.Buffer` or :class:`featstore.MassiveGNN`. Nothing by default: the buffer of
            all rows holds what it has room for.
        warm: of mode online: the name of a saved cache (:meth:`Loader.save_cache`) to begin with.
        overtake: of mode online: hand over whichever mini-batch has its rows first; ``batch.index`` says
            which it is.
        extracted: of mode online: how many mini-batches are extracted at once, at most.
        reader_memory: of mode online: what of ``memory`` stages pages and plans.
        disk: of the modes compiled and rolling: limit on the rows that are laid out on disk for mini-batches,
            bytes, a size or a share of the table, ``"2x"``; those that stay in memory come on top. Of a
            store that is split by hosts a share of what is on this host's disk, and the rows that are
            gathered there count, too.
        name: of the modes compiled and rolling: of what is compiled; each loader needs its own. By default
            ``"loader"``; with several ranks it says which rank it is, too.
        residency: of the modes compiled and rolling: ``"min"`` or ``"fixed"``, see
            :func:`featstore.compile_trace`.
        reuse: of mode compiled: take what was compiled under this ``name``, if it is there; what was sampled
            otherwise is refused. Without mini-batches and seeds it must be there, and is taken as it is.
        recorded_epochs: of mode compiled: how many epochs are recorded, 1 by default. Epoch e repeats the
            recorded epoch ``e % recorded_epochs``.
        shuffle: of mode compiled with ``residency="fixed"``: the recorded mini-batches of an epoch come in
            another order every time, by ``seed`` and epoch.
        buffer: of mode compiled: a :class:`featstore.Buffer` over the store, for rows that ``disk=`` left
            there.
        hubs, resident, replaced: of mode partitions, see
            :class:`featstore.loaders.mega.sets.PartitionSets`.
        passes, weights: of mode partitions: how often a collection of partitions is gone through while it is
            there, 1 to 4,096 times or ``"auto"``; whether mini-batches have ``weight``, which weighs edges
            against the neighbours that were lost at the border.
    """

    seeds: Any
    fanouts: Sequence[int] | None
    batch_size: int | None
    seed: int | None
    seeds_in_order: bool | None
    graph: str | None
    replace: bool | None
    disjoint: bool | None
    subgraph_type: Any
    weight_attr: str | None
    time_attr: str | None
    temporal_strategy: str | None
    time_window: int | None
    input_time: Any
    rank: int | None
    world_size: int | None
    shared: bool | str
    drop_last: bool | None
    mode: str
    repeat: bool | None
    epochs: int | None
    train_seconds: float | None
    memory: int | str
    validation_memory: int | str | None
    attach: str | Sequence[str] | None
    edge_table: str | None
    nodes: Callable[[Any], Any] | None
    tensors: bool | None
    device: Any
    device_memory: int | str | None
    device_policy: str | None
    progress: bool | None
    engine: str
    queue_depth: int
    threads: int | None
    verify: bool
    policy: str | None
    static: Any
    halo: TierSpec | int | str | None
    warm: str | None
    overtake: bool | None
    extracted: int | None
    reader_memory: int | str | None
    disk: int | str | None
    name: str | None
    residency: str | None
    reuse: bool | None
    recorded_epochs: int | None
    shuffle: bool | None
    buffer: Buffer | None
    hubs: int | None
    resident: int | None
    replaced: int | None
    passes: int | str | None
    weights: bool | None


#: Options that not every mode has, and those that have them.
OF_MODES = {
    "nodes": ("online", "compiled", "rolling"),
    "device_memory": MODES,
    "device": MODES,
    "device_policy": ("online", "partitions"),
    **dict.fromkeys(
        ("policy", "static", "halo", "warm", "overtake", "extracted", "reader_memory"),
        ("online",),
    ),
    "disk": ("compiled", "rolling"),
    "name": ("compiled", "rolling"),
    "residency": ("compiled", "rolling"),
    "reuse": ("compiled",),
    "recorded_epochs": ("compiled",),
    "shuffle": ("compiled",),
    "buffer": ("compiled",),
    **dict.fromkeys(("hubs", "resident", "replaced", "passes", "weights"), ("partitions",)),
}
#: Modes that "auto" may take. It has some options of its own, those that several of these have, and those of
#: online alone, which it then takes; what compiled alone has changes what is learned, and is to be asked for.
AUTO = ("online", "compiled", "rolling")
AUTO_OPTIONS = ("repeat", "epochs", "train_seconds")
#: Options for the store to sample.
SAMPLING = ("seeds", "fanouts", "batch_size", "seed", "seeds_in_order", "graph", *SAMPLING_OPTIONS)


class Given:
    """The options of a loader as they were given: known, of its mode, and each asked for by what it is for.

    Raises ArgumentError for an option that there is not, or that the mode does not have.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        args.check_options(options, list(LoaderOptions.__annotations__), "a loader")
        self.said = {name: value for name, value in options.items() if value is not None or name in _NEVER}
        #: Told how far what is prepared is, as functions for ``progress=`` are.
        self.tell: Callable[..., None] | None = None
        self.mode = args.as_choice(self.said.get("mode", "auto"), "mode", (*MODES, "auto"))
        self.auto = self.mode == "auto"
        for name in self.said:
            modes = ("auto",) if name in AUTO_OPTIONS else OF_MODES.get(name, (*MODES, "auto"))
            conditional = self.auto and {*modes} & {*AUTO} and tuple(modes) != ("compiled",)
            if self.mode not in modes and not conditional:
                seeded = name == "shuffle" and "seeds" in self.said
                raise ArgumentError(
                    f"{name}= is of mode {' or '.join(map(repr, modes))}, not of {self.mode!r}"
                    + (_SHUFFLED if seeded else "")
                )
        self.reading: dict[str, Any] = {"engine": "auto", "queue_depth": 128, "threads": None, "verify": True}
        self.reading |= {name: value for name, value in self.said.items() if name in self.reading}
        check_reading(**self.reading)
        self.tensors: bool | None = self.said.get("tensors")
        if self.tensors is not None and args.as_flag(self.tensors, "tensors"):
            args.need_torch("tensors=True")
        if "nodes" in self.said:
            args.as_function(self.said["nodes"], "nodes")

    def of_mode(self) -> dict[str, Any]:
        """Those that not every mode has, and this one has."""
        return {name: value for name, value in self.said.items() if self.mode in OF_MODES.get(name, ())}

    def get(self, name: str, default: Any = None) -> Any:
        """One of them, or what it is by default."""
        return self.said.get(name, default)


_SHUFFLED = ": seeds are shuffled in every epoch; seeds_in_order=True leaves them in order"
#: What has no None: it is wrong, and refused where it is looked at.
_NEVER = ("mode", "memory", "engine", "queue_depth", "verify", "shared")
