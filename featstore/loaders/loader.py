"""One loader: the same training loop under every mode.

    with store.loader(seeds=train, fanouts=(10, 5), batch_size=1024, memory="2GiB") as loader:
        for epoch in range(3):
            for batch in loader:
                step(batch.x, batch.edge_index, batch.n_id[: batch.batch_size])

What the modes (:mod:`featstore.loaders.modes`) differ in is which rows are wanted when, and what that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from featstore import arguments as args
from featstore.compile.budget import parse_disk
from featstore.errors import ArgumentError, BudgetError, SourceError
from featstore.loaders.batch import Batch
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.trace import CompiledTrace
from featstore.loaders.host.mode import HostMode
from featstore.loaders.host.place import place_of
from featstore.loaders.mega.loader import MegaBatches
from featstore.loaders.modes import (
    MODES,
    CompiledMode,
    Mode,
    PartitionsMode,
    Recorded,
    RollingMode,
)
from featstore.loaders.online.loader import OnlineLoader
from featstore.loaders.prefetch import LoaderBase, Sampler, check_repeatable
from featstore.loaders.ranks import rank_of, warn_of_ranks
from featstore.loaders.ranks import world_size as ranks_there
from featstore.loaders.report import LoaderReport
from featstore.loaders.rolling import RollingLoader
from featstore.loaders.state import loader_state, position_of
from featstore.loaders.train import compiled_once
from featstore.reader.options import check_reading
from featstore.sampling.batches import RankedBatches, bytes_in_memory, open_sampler
from featstore.storage.packs import check_pack_name
from featstore.storage.relations import graph_of
from featstore.storage.store import as_store
from featstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

#: Options that not every mode has, and those that have them.
_OF_MODES = {
    "nodes": ("online", "compiled", "rolling"),
    "policy": ("online",),
    "static": ("online",),
    "device": ("online", "compiled", "rolling"),
    "device_memory": ("online", "compiled", "rolling"),
    "disk": ("compiled", "rolling"),
    "name": ("compiled", "rolling"),
    "residency": ("compiled", "rolling"),
    "reuse": ("compiled",),
    "hubs": ("partitions",),
    "resident": ("partitions",),
    "replaced": ("partitions",),
    "passes": ("partitions",),
    "weights": ("partitions",),
}
_SHARE = ("world_size", "batch_size", "drop_last")  # how seeds are divided among ranks
_SAMPLER_SHARE = 4  # of the memory, at most, is for a sampler


@dataclass(frozen=True)
class _How:
    """Options of any mode, options of the mode, and options of its readers."""

    tensors: bool | None
    own: dict[str, Any]
    reading: dict[str, Any]


class Loader(LoaderBase):
    """Mini-batches with the rows of their nodes; made by :meth:`featstore.Store.loader`. A context manager.

    Each iteration is an epoch of :class:`~featstore.loaders.batch.Batch`. Break off in the middle, and the
    next iteration begins the next epoch. It belongs to the process that made it.

    Args:
        store: the open store.
        batches: mini-batches as :meth:`featstore.Trace.record` takes them (PyG's loaders, arrays of node ids,
            pairs of ids and sample ...), without features: an iterable that can be gone through once an
            epoch, or a function of the epoch's number that makes one. Not with ``seeds``.
        seeds: training nodes, ids or a mask of all nodes, or the name of an array in the store: the store
            samples itself.
        fanouts: with ``seeds``: neighbours per node and hop, -1 for all.
        batch_size: with ``seeds``: seeds of a mini-batch.
        seed: with ``seeds``: of the order and the neighbours.
        drop_last: with ``seeds``: leave out what is left over after whole mini-batches of all ranks. Else the
            last mini-batch may be smaller, and up to ``world_size - 1`` seeds of an epoch stand twice, so
            that every rank has as many steps. :meth:`report` says how many.
        rank, world_size: with ``seeds``: which of how many processes that train together; by default as
            ``torch.distributed`` or ``torchrun`` say. Each has its share of every epoch's order. ``memory``
            is that of one process; in mode partitions every rank loads the same ones.
        shared: with ``seeds``: the ranks of this host have one loader between them, which holds the rows
            once; ``memory`` is then the host's. True under ``torchrun``; else a name that they have in common
            and no other run has. All make it, and go through it in lock-step: :mod:`featstore.loaders.host`.
        graph: with ``seeds``: the name of the graph, where the store has several.
        mode: ``"online"``: rows are read as mini-batches come, through a buffer. ``"compiled"``: the
            mini-batches of epoch 0 are recorded once, their rows laid out for them, and repeated every epoch.
            ``"rolling"``: fresh ones every epoch, laid out while the epoch before trains. ``"partitions"``
            (needs ``seeds``): random collections of partitions are loaded whole, and neighbours outside of
            them left out. ``"auto"``: ``"online"``, whose mini-batches are as given; ``mode_because`` says
            so.
        memory: budget of all of this, bytes or a size; a batch that the loop keeps comes on top.
        tensors: ``x`` as a torch tensor; by default where there is a device or the samples are PyG's.
        engine, queue_depth, verify: as for :class:`featstore.Reader`.
        nodes, policy, static: of mode online (``nodes`` of compiled and rolling, too): see
            :class:`featstore.OnlineLoader`.
        device, device_memory: rows and tensors there; not of mode partitions.
        disk, name, residency: of the modes compiled and rolling: see :func:`featstore.compile_trace`.
        reuse: of mode compiled: take what was compiled under this ``name``, if it is there.
        hubs, resident, replaced, passes, weights: of mode partitions: see
            :class:`featstore.loaders.mega.loader.MegaBatches`.

    Raises ArgumentError for an option that the mode does not have; what sampling, compiling and reading
    raise.
    """

    def __init__(
        self, store: OpenStore, batches: Sampler | None = None, *, seeds: Any = None,
        fanouts: Sequence[int] | None = None, batch_size: int | None = None, seed: int | None = None,
        drop_last: bool | None = None, rank: int | None = None, world_size: int | None = None,
        shared: bool | str = False, graph: str | None = None, mode: str = "auto", memory: int | str = "1GiB",
        tensors: bool | None = None, engine: str = "auto", queue_depth: int = 128, verify: bool = True,
        nodes: Callable[[Any], Any] | None = None, policy: str | None = None, static: Any = None,
        device: Any = None, device_memory: int | str | None = None, disk: int | str | None = None,
        name: str | None = None, residency: str | None = None, reuse: bool | None = None,
        hubs: int | None = None, resident: int | None = None, replaced: int | None = None,
        passes: int | str | None = None, weights: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.store, self.memory_bytes = as_store(store), parse_bytes(memory, "memory")
        args.as_choice(mode, "mode", (*MODES, "auto"))
        self.mode = "online" if mode == "auto" else mode
        self.mode_because = (
            "mini-batches as they come need nothing prepared and lose no neighbours"
            if mode == "auto"
            else "asked for"
        )
        if nodes is not None:
            args.as_function(nodes, "nodes")
        optional = {
            "nodes": nodes, "policy": policy, "static": static, "device": device,
            "device_memory": device_memory, "disk": disk, "name": name, "residency": residency,
            "reuse": reuse, "hubs": hubs, "resident": resident, "replaced": replaced, "passes": passes,
            "weights": weights,
        }  # fmt: skip
        check_reading(engine, queue_depth, verify)
        reading = {"engine": engine, "queue_depth": queue_depth, "verify": verify}
        if tensors is not None and args.as_flag(tensors, "tensors"):
            args.need_torch("tensors=True")
        how = _How(tensors, self._of_mode(optional), reading)
        said = {
            "seeds": seeds, "fanouts": fanouts, "batch_size": batch_size, "seed": seed, "graph": graph,
            "drop_last": drop_last, "rank": rank, "world_size": world_size,
        }  # fmt: skip
        self._opened, self._rank, self._ranks = ExitStack(), 0, 1
        self._here: tuple[int, ...] = (0,)  # the ranks whose mini-batches are made here
        if batches is not None:
            self._given(said | {"shared": shared or None}, batches)
        elif seeds is None or fanouts is None:
            raise ArgumentError("give batches, or seeds= and fanouts= for the store to sample")
        else:
            said |= self._share(said)
        place = place_of(shared, self._rank, self._ranks, how.own)
        try:
            if place is None:
                self._mode: Mode = self._make(batches, said, how, self.memory_bytes)
            else:
                alike = said | how.own | reading | {"mode": mode, "memory": memory, "store": store.uuid}
                make = partial(self._for_host, said, how)
                self._mode = HostMode(place, self._rank, alike, self.memory_bytes, bool(tensors), make)
            self._opened.callback(self._mode.close)
        except BaseException:
            self._opened.close()
            raise
        self._epoch = self._next = 0
        self._resumed = False  # a state was loaded since the last iteration

    # Which options there are.

    def _of_mode(self, optional: dict[str, Any]) -> dict[str, Any]:
        """The options that were given. Raises ArgumentError for those of other modes."""
        own = {name: value for name, value in optional.items() if value is not None}
        for name in own:
            if self.mode not in _OF_MODES[name]:
                raise ArgumentError(
                    f"{name}= is of mode {' or '.join(map(repr, _OF_MODES[name]))}, not of {self.mode!r}"
                )
        return own

    def _given(self, said: dict[str, Any], batches: Any) -> None:
        """Mini-batches were given."""
        for name, value in said.items():
            if value is not None:
                raise ArgumentError(f"{name}= is for the store to sample: give batches or seeds, not both")
        if self.mode == "partitions":
            raise ArgumentError(
                "mode='partitions' samples inside the partitions that are in memory: give seeds= and "
                "fanouts= instead of batches"
            )
        args.as_batches(batches, "batches")
        check_repeatable(batches)
        warn_of_ranks("a loader of mini-batches that are given", batches)

    def _share(self, said: dict[str, Any]) -> dict[str, Any]:
        """What is this rank's: its number, of how many, seeds of a mini-batch, and what becomes of the
        rest."""
        rank, world, last = said["rank"], said["world_size"], said["drop_last"]
        size = 1024 if said["batch_size"] is None else args.as_count(said["batch_size"], "batch_size")
        self._ranks = ranks_there() if world is None else args.as_count(world, "world_size")
        if rank is None and self._ranks != ranks_there():
            raise ArgumentError(f"world_size={world} says how many ranks there are: say which this is, rank=")
        self._rank = rank_of() if rank is None else args.as_count(rank, "rank", 0, self._ranks - 1)
        self._here = (self._rank,)
        return {
            "rank": None, "world_size": self._ranks, "batch_size": size,
            "seed": 0 if said["seed"] is None else args.as_integer(said["seed"], "seed"),
            "drop_last": last is not None and args.as_flag(last, "drop_last"),
        }  # fmt: skip

    def _for_host(self, said: dict[str, Any], how: _How, ranks: tuple[int, ...], memory: int) -> Mode:
        """The mini-batches of these ranks in turn, for a :class:`HostMode`."""
        self._here = ranks
        return self._make(None, said, replace(how, tensors=False), memory)

    def _make(self, batches: Any, said: dict[str, Any], how: _How, memory: int) -> Mode:
        """The mode, within this memory."""
        if self.mode == "partitions":
            return self._partitions(said, how, memory)
        left = memory
        if batches is None:
            batches = self._sample(said, memory)
            left -= min(bytes_in_memory(graph_of(self.store, said["graph"])), memory // _SAMPLER_SHARE)
        make = {"online": self._online, "compiled": self._compiled, "rolling": self._rolling}
        mode = make[self.mode](batches, left, how)
        mode.sampled = batches if isinstance(batches, RankedBatches) else None
        return mode

    def _sample(self, said: dict[str, Any], memory: int) -> RankedBatches:
        """The store's own mini-batches, the share of the ranks here, within a share of the memory."""
        seeds, share = said["seeds"], {name: said[name] for name in _SHARE}
        how = {"seed": said["seed"], "graph": said["graph"], "memory": memory // _SAMPLER_SHARE}
        try:
            sampler = open_sampler(self.store, args.as_fanouts(said["fanouts"]), **how)
        except BudgetError as error:
            raise BudgetError(error.needed_bytes * _SAMPLER_SHARE, memory, error.what) from error
        nodes = self.store.arrays[seeds] if isinstance(seeds, str) else seeds
        made = RankedBatches(sampler, nodes, ranks=self._here, own=True, **share)
        self._opened.callback(made.close)
        if not len(made):
            raise ArgumentError(
                f"drop_last= leaves no mini-batch of {made.batch_size:,} seeds for {self._ranks} ranks: "
                "give fewer a batch"
            )
        return made

    # The modes.

    def _online(self, batches: Sampler, memory: int, how: _How) -> Mode:
        loader = OnlineLoader(
            self.store, batches, memory=memory, tensors=how.tensors, **how.own, **how.reading
        )
        return Mode(loader)

    def _compiled(self, batches: Sampler, memory: int, how: _How) -> Mode:
        own, (device, name) = how.own, self._check_compiling(how.own)
        reuse = args.as_flag(own.pop("reuse", False), "reuse")
        recorded = Recorded(batches, own.pop("nodes", None))
        compiled_once(self.store, recorded.epoch, name, reuse=reuse, memory=memory, **own)
        trace = CompiledTrace(self.store, name)
        self._opened.callback(trace.close)
        loader = CompiledLoader(trace, memory=memory, device=device, tensors=how.tensors, **how.reading)
        return CompiledMode(loader)

    def _rolling(self, batches: Sampler, memory: int, how: _How) -> Mode:
        own, (device, name) = how.own, self._check_compiling(how.own)
        recorded = Recorded(batches, own.pop("nodes", None))
        options = {"device": device, "tensors": how.tensors, **how.reading}
        loader = RollingLoader(
            self.store, recorded.epoch, memory=memory, loader=options, name=name, **own
        )  # fmt: skip
        return RollingMode(loader)

    def _partitions(self, said: dict[str, Any], how: _How, memory: int) -> Mode:
        own = how.own
        if isinstance(own.get("passes"), str) and self._ranks > 1:
            raise ArgumentError("passes='auto' follows each rank's own clock: give ranks a number of passes")
        weights = args.as_flag(own.pop("weights", False), "weights")
        fanouts = args.as_fanouts(said["fanouts"])
        mega = MegaBatches(
            self.store, memory=memory, train=said["seeds"], graph=said["graph"], seed=said["seed"],
            **own, **how.reading
        )  # fmt: skip
        share = {name: said[name] for name in _SHARE} | {"weights": weights, "tensors": bool(how.tensors)}
        return PartitionsMode(mega, fanouts, self._here, **share)

    def _check_compiling(self, own: dict[str, Any]) -> tuple[Any, str]:
        """Take device and name out of the options of compiling; raise for what it would refuse, before
        anything is recorded for it. Each rank has a name of its own, and ranks that share a loader have one
        together."""
        device, name = own.pop("device", None), own.pop("name", "loader")
        check_pack_name(name)
        parse_disk(own.get("disk"), self.store)
        args.as_choice(own.get("residency", "min"), "residency", ("min", "fixed"))
        if device is not None:
            args.as_device(device, "device")
        if own.get("device_memory") is not None and device is None:
            raise SourceError("device_memory= keeps rows on a device: say on which, with device=")
        if len(self._here) > 1:
            return device, f"{name}-ranks{'_'.join(map(str, self._here))}of{self._ranks}"
        return device, name if self._ranks == 1 else f"{name}-rank{self._rank}"

    # Going through it.

    def __iter__(self) -> Iterator[Batch]:
        """The mini-batches of the epoch where training stands; then the next epoch is that."""
        self.check_open()
        if self._next and not self._resumed:  # the epoch before was broken off
            self.set_epoch(self._epoch + 1)
        self._resumed = False
        for batch in self._mode.epoch():
            batch.index = self._next
            self._next += 1
            yield batch
            del batch
        self._epoch, self._next = self._epoch + 1, 0

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one to begin."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch, from its beginning. Mode compiled repeats the same
        mini-batches in every epoch."""
        self.check_open()
        epoch = args.as_count(epoch, "epoch", 0)
        if (epoch, 0) != (self._epoch, self._next):  # or it stands there already
            self._mode.set_epoch(epoch)
        self._epoch, self._next, self._resumed = epoch, 0, False

    # Resuming.

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: small, plain data for a checkpoint. What was handed out counts as seen. It
        belongs to the same store and options."""
        self.check_open()
        at = self._mode.state() if self._next else None
        return loader_state(self.store.uuid, self._epoch, self._next) | {
            "mode": self.mode, "ranks": self._ranks, "at": at
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken: the next iteration begins with the mini-batch after the
        last one handed out then. Raises ArgumentError for a state of something else, and of another number of
        ranks."""
        self.check_open()
        epoch, after = position_of(state, self.store.uuid)
        args.check_state(state, {"mode": self.mode, "ranks": self._ranks}, "this loader has")
        if after or state.get("at") is not None:
            self._mode.load_state(
                args.as_mapping(state.get("at"), "at of the state", "given by state_dict()")
            )
        else:
            self._mode.set_epoch(epoch)
        self._epoch, self._next, self._resumed = epoch, after, True

    # What it does.

    def report(self) -> LoaderReport:
        """What has been measured so far."""
        return self._mode.report()

    def close(self) -> None:
        """Give everything back; an iteration under way ends with ClosedError. May be called more than
        once."""
        if not self._closed and self.here:
            self._closed = True
            self._opened.close()

    def __repr__(self) -> str:
        return (
            f"<Loader of {str(self.store.path)!r}, mode {self.mode!r}, {format_bytes(self.memory_bytes)}, "
            f"epoch {self._epoch}>"
        )
