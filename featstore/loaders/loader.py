"""One loader: the same training loop under every mode.

    with store.loader(seeds=train, fanouts=(10, 5), batch_size=1024, memory="2GiB") as loader:
        for epoch in range(3):
            for batch in loader:
                step(batch.x, batch.edge_index, batch.n_id[: batch.batch_size])

What the modes (:mod:`featstore.loaders.modes`) differ in is which rows are wanted when, and what that costs.
"""

from __future__ import annotations

import atexit
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from featstore import arguments as args
from featstore.base.called import called
from featstore.base.closers import Closers
from featstore.base.environment import MEMORY
from featstore.base.logs import LOG
from featstore.base.sheets import Sheet, Shown
from featstore.base.state import position_of, state_of
from featstore.errors import ArgumentError
from featstore.loaders.batch import Batch
from featstore.loaders.host.links import LinksOfRanks
from featstore.loaders.host.mode import HostMode
from featstore.loaders.making import Making
from featstore.loaders.options import Given, LoaderOptions
from featstore.loaders.prefetch import LoaderBase, Sampler
from featstore.loaders.report import LoaderReport, report_sheet
from featstore.loaders.said import SAMPLED_BY
from featstore.loaders.watch import Watch, spans
from featstore.reader.options import as_memory
from featstore.storage.store import as_store
from featstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

_open_loaders: weakref.WeakSet[Loader] = weakref.WeakSet()


def _close_all() -> None:
    """Close what a program left open, before readers are closed: an iteration under way would wait for these
    for ever. After what the program has registered since it made its first loader, which may ask one for its
    state."""
    for loader in list(_open_loaders):
        try:
            loader.close()
        except Exception:
            traceback.print_exc()


atexit.register(_close_all)


class Loader(Shown, LoaderBase):
    """Mini-batches with the rows of their nodes; made by :meth:`featstore.Store.loader`. A context manager.

    Each iteration is an epoch of :class:`~featstore.loaders.batch.Batch`. Break off in the middle, and the
    next iteration begins the next epoch. It belongs to the process that made it.

    Args:
        store: the open store.
        batches: mini-batches as :meth:`featstore.Trace.record` takes them (PyG's loaders, arrays of node ids,
            pairs of ids and sample ...), without features: an iterable that can be gone through once an
            epoch, or a function of the epoch's number that makes one. What has a ``set_epoch`` is told the
            epoch. Not with ``seeds``. Memory of node ids may be used again for the next one; whatever else
            a mini-batch has is handed out as it is, several of them later, and must stay.
        options: see :class:`featstore.loaders.options.LoaderOptions`.

    Raises ArgumentError for an option that the mode does not have; what sampling, compiling and reading
    raise.
    """

    def __init__(
        self, store: OpenStore, batches: Sampler | LinksOfRanks | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        self.store = as_store(store)
        given = Given(options)
        given_batches = () if batches is None else (batches,)
        self._called = called(f"{self.store!r}.loader", *given_batches, **given.said)  # keeps none of them
        self.memory_bytes = as_memory(given.get("memory", MEMORY))
        aside = given.get("validation_memory")
        self._left = 0 if aside is None else parse_bytes(aside, "validation_memory")
        if self._left >= self.memory_bytes:
            raise ArgumentError("validation_memory= is a part of memory=, and leaves nothing of it")
        self._watch = Watch() if args.as_flag(given.get("progress", False), "progress") else None
        given.tell = None if self._watch is None else self._watch.line.step
        self._opened = Closers()
        try:
            making = Making(
                self.store, batches, given, self.memory_bytes - self._left, self._left, self._opened
            )
            self._ranks = making.ranks
            with making.shares.told_of_all():  # where ranks share them, too
                self._mode = making.mode()
            self._shares = making.shares
            self.mode, self.mode_because, self.costs = making.taken
        except BaseException:
            self._opened.close()
            raise
        LOG.info("%s: mode %s, because %s", self.store.path, self.mode, self.mode_because)
        if self._watch is not None and self._watch.line.stage:
            self._watch.line.end(f"mode {self.mode}: prepared")
        self._shared = given.get("shared", False)
        self._ranks_said: Any = {
            name: given.said[name] for name in ("rank", "world_size") if name in given.said
        }
        self._in_order, self._samples = bool(given.get("seeds_in_order")), making.samples
        self._epoch = self._next = 0
        self._over = 0  # seeds, or mini-batches, of this epoch that other numbers of ranks have had
        self._resumed = False  # a state was loaded since the last iteration
        self._stands = True  # the mode, at the beginning of that epoch
        self._loaded: Mapping[str, Any] | None = None  # a state after which nothing was handed out
        self._misfit = False  # it was found to be of something else
        _open_loaders.add(self)

    # Going through it.

    def __iter__(self) -> Iterator[Batch]:
        """The mini-batches of the epoch where training stands; then the next epoch is that."""
        self.check_open()
        if not (self._resumed or self._stands):  # the iteration before was broken off, or failed as it began
            if self._loaded is None:
                self.set_epoch(self._epoch + bool(self._next))
            else:
                self.load_state_dict(self._loaded)
        self._resumed = self._stands = False
        self._mode.begin(self._epoch, self._next)
        if self._watch is not None:
            self._watch.begin(self.report())
        with self._shares.told_of_all(), self._stepping_back(self._next, self._loaded):
            for made in spans(self._mode.epoch(), "featstore: wait for a mini-batch"):
                batch = self._mode.whole(made)
                del made
                batch.index = self._mode.number(self._next)
                self._next += 1
                self._loaded = None
                if self._watch is not None and self._watch.due():
                    self._tell()
                yield batch
                del batch
        if self._watch is not None:
            self._tell(end=True)
        if self._over:
            self._mode.end_rest()
        self._epoch, self._next, self._over = self._epoch + 1, 0, 0
        self._stands, self._loaded = True, None

    @contextmanager
    def _stepping_back(self, begun: int, loaded: Mapping[str, Any] | None) -> Iterator[None]:
        """Where a step fails of which this rank has had its mini-batch, it stands before that, as others;
        where that is the first after a state was loaded, with that state."""
        try:
            yield
        except Exception as error:
            self._misfit = isinstance(error, ArgumentError)
            if self._mode.ahead:
                self._mode.ahead, self._next = False, self._next - 1
                self._loaded = loaded if self._next == begun else None
            raise

    def _tell(self, end: bool = False) -> None:
        assert self._watch is not None
        try:
            length = len(self)
        except ArgumentError:  # nobody knows
            length = None
        self._watch.tell(self.report(), self._epoch, self._next, length, end)

    def __len__(self) -> int:
        """Mini-batches of an epoch, this rank's. Raises ArgumentError where that is not known."""
        return self._mode.length()

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one to begin."""
        return self._epoch

    @property
    def rank(self) -> int:
        """Which of ``world_size`` processes this is."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._ranks.world_size

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch, from its beginning. Mode compiled repeats the recorded
        epochs. Where a state of this epoch was loaded, and not gone on with yet, nothing changes: a loop that
        calls it in each epoch can be resumed as it is."""
        self.check_open()
        epoch = args.as_count(epoch, "epoch", 0)
        if epoch == self._epoch and (self._resumed or (self._loaded is not None and not self._misfit)):
            return
        if self._over:
            self._mode.go_on(epoch, 0)
        elif not self._stands or epoch != self._epoch:
            self._mode.set_epoch(epoch)
        self._epoch, self._next, self._over = epoch, 0, 0
        self._resumed, self._stands, self._loaded = False, True, None

    # Resuming.

    @property
    def _identity(self) -> dict[str, str]:
        """What a state belongs to."""
        what = {"store": self.store.uuid, "mode": self.mode, SAMPLED_BY: self._samples}
        return what | {"seeds": "in order"} if self._in_order else what

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: small, plain data for a checkpoint, the same on every rank but for ``at``.
        What was handed out counts as seen. It belongs to the same store, mini-batches, seed and mode."""
        self.check_open()
        at = {
            "ranks": self._ranks.shares, "step": self._mode.per_step, "over": self._over,
            "in_mode": self._mode.at(self._mode.state(), self._epoch, self._next) if self._next else None,
        }  # fmt: skip
        return state_of(self._identity, self._epoch, self._next, at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken: the next iteration begins with the mini-batch after the
        last one handed out then.

        Where there are as many ranks as then, the same mini-batches follow. With another number of ranks, or
        of seeds a mini-batch, what is left of the epoch is divided among those that there are now; mode
        compiled can do that after whole steps of theirs, and mode partitions, ranks that share a loader, and
        hosts between epochs. Raises ArgumentError for a state of something else, and where it cannot be gone
        on with."""
        self.check_open()
        names = ("ranks", "step", "over", "in_mode")
        epoch, after, at = position_of(state, self._identity, names)
        step, over = (args.as_count(at[name], f"{name} of the state", 0) for name in ("step", "over"))
        ranks, in_mode = args.as_count(at["ranks"], "ranks of the state"), at["in_mode"]
        if in_mode is not None:
            in_mode = self._mode.at(
                args.as_mapping(in_mode, "in_mode of the state", "what state_dict() gave"), epoch, after
            )
        here = self._mode.per_step
        alike = ranks == self._ranks.shares and (step == here or 0 in (step, here))  # 0: nobody knows
        self._stands = False
        if not after and in_mode is None:
            after, over = self._begin(epoch, over)
        elif not alike:
            self._mode.check_within(over + (after - 1) * step)
            after, over = self._mode.go_on(epoch, over + after * step, in_mode)
        else:
            if over or self._over:
                self._begin(epoch, over)
            self._mode.load_state(in_mode)
        self._epoch, self._next, self._over, self._resumed = epoch, after, over, True
        self._loaded, self._misfit = dict(state), False

    def _begin(self, epoch: int, over: int) -> tuple[int, int]:
        """Stand in an epoch of which so much is over; see :meth:`featstore.loaders.modes.Mode.go_on`."""
        if over or self._over:
            return self._mode.go_on(epoch, over)
        self._mode.set_epoch(epoch)
        return 0, 0

    # What else there is.

    def validation(self, batches: Sampler | None = None, **options: Unpack[LoaderOptions]) -> Loader:
        """Another loader, of mini-batches to validate with, within this one's ``memory``: it has what
        ``validation_memory`` set aside, once. Its options are those of any loader but ``memory``. Where ranks
        share this one, they share one with ``seeds=``, too, unless it says otherwise; of what is not shared
        each has a part of that memory. It is closed with this one, at the latest. Raises ArgumentError where
        nothing was set aside, or it is in use."""
        self.check_open()
        if not self._left:
            raise ArgumentError(
                "a loader to validate with has the memory that was set aside for it, once: say "
                "validation_memory= where the loader is made"
            )
        if "memory" in options:
            raise ArgumentError("memory= of this loader is the validation_memory= that was set aside")
        options["memory"] = self._left
        if isinstance(self._mode, HostMode):  # whose memory is the host's
            alone = options.get("world_size") == 1
            if options.get("seeds") is not None and not alone:
                options.setdefault("shared", self._shared)
            if alone or not options.get("shared"):
                options["memory"] = self._left // self._mode.ranks
            elif options.keys().isdisjoint(self._ranks_said):
                options |= self._ranks_said
        made = Loader(self.store, batches, **options)
        self._opened.callback(made.close)
        self._left = 0
        return made

    def save_cache(self, name: str = "cache") -> None:
        """Save with the store which rows are in the buffers now, to begin with by ``warm=name``; of mode
        online; an iteration under way ends. Where ranks share the loader it is for between epochs: local rank
        0 does it, and on others nothing happens."""
        self.check_open()
        if self.mode != "online":
            raise ArgumentError(f"save_cache is of mode 'online', not of {self.mode!r}")
        self._mode.save_cache(name)

    def report(self) -> LoaderReport:
        """What has been measured so far."""
        return self._mode.report()

    def close(self) -> None:
        """Give everything back; an iteration under way ends with ClosedError. May be called more than
        once."""
        if self.here:
            self._closed = True
            self._opened.close()

    def _sheet(self) -> Sheet:
        facts = {
            "store": str(self.store.path),
            "mode": f"{self.mode}, because {self.mode_because}" if self.mode_because else self.mode,
            "memory": format_bytes(self.memory_bytes),
            "epoch": f"{self._epoch}, of which {self._next:,} mini-batches are handed out",
        }
        if self.world_size > 1:
            facts["rank"] = f"{self.rank} of {self.world_size}"
        if self._closed or not self.here:
            return Sheet("Loader", facts | {"state": "closed" if self._closed else "of another process"})
        measured = report_sheet(self.report())
        return Sheet("Loader", {**facts, **measured.facts}, measured.grids)

    def __repr__(self) -> str:
        return self._called
