"""Training from mini-batches that nobody knows beforehand: sampled, their rows extracted through feature
buffers, handed over.

The stages of GNNDrive (Jiang et al., ICPP 2024): *samplers* (a thread that goes through the given iterable,
whose own workers may sample in parallel), *extractors* (claim slots in the feature buffer, start the reads of
what is in none), the *trainer* (the loop), and the *releaser* (rows are copied out of the buffer when they
are there, and their slots given back). Several mini-batches are extracted at once, so that the device has
reads while others are assembled and trained on; all queues are bounded.

**Memory.** One budget covers the readers, the rows handed over, edges and the like of mini-batches that are
sampled here, and, with all the rest, the buffers' slots.
How large mini-batches are is seen from those that come. One that is larger waits until others are gone; where
there is no room for it beside the loop's, or its table is new, the budget is divided anew, and the buffers
begin empty. With less memory fewer mini-batches are under way, and with little each goes through few slots in
pieces, into the memory of the one that the loop has given up. The least is the reader and two of the largest
mini-batches. One for which that is too little is a BudgetError, at its turn: those before it have been handed
out, and a state taken then goes on with it.

**Order.** Mini-batches are handed over as they were sampled, so that a run can be repeated; with
``overtake=True`` whichever has its rows first. What is in the buffer never changes what a mini-batch holds,
only how long it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from featstore import arguments as args
from featstore.base.environment import MEMORY
from featstore.base.sequences import known_length
from featstore.base.state import position_of, state_of
from featstore.base.warning import warn
from featstore.errors import ArgumentError, SourceError
from featstore.loaders.batch import Batch, filled, wants_tensors
from featstore.loaders.online.epoch import OnlineEpoch
from featstore.loaders.online.extraction import EXTRACTED, Extraction
from featstore.loaders.online.report import OnlineStages
from featstore.loaders.prefetch import Prefetch, PrefetchingLoader, Sampler, check_repeatable, epoch_of
from featstore.loaders.report import LoaderReport
from featstore.reader.options import READING, as_memory
from featstore.sampling.minibatch import Ids
from featstore.storage.store import as_store
from featstore.tiers.chosen import FIRST_POLICY
from featstore.tiers.saved import cache_path
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore
    from featstore.tiers import TierSpec


class OnlineLoader(PrefetchingLoader):
    """Iterates over a sampler's mini-batches with the rows of their nodes; see the module's text. A context
    manager.

    Each iteration is an epoch. Break off in the middle, and the next iteration begins the next epoch. There
    is one iteration at a time: a new one ends the one before. A loader belongs to the process that made it.

    Args:
        store: the open store.
        batches: mini-batches as :meth:`featstore.Trace.record` takes them (PyG's, ours, arrays of node ids,
            pairs of ids and sample ...): an iterable that can be gone through once an epoch, or a function of
            the epoch's number that makes one. Where it has a ``set_epoch``, or its samplers or data set have
            one, that is called, so that fixed seeds get fresh neighbours. (A copy of a data set in workers
            that persist does not hear of it.) It should not fetch features itself.
        memory: budget for all that is held here, in this process, bytes or ``"2GiB"``.
        policy: of the feature buffers: a name of :data:`featstore.tiers.slots.layout.POLICIES` but ``"min"``;
            or ``"auto"`` for that which would have hit most so far (:mod:`featstore.tiers.slots.choose`),
            looked at once enough has been seen, and between epochs. In budgets below about 75 MiB that is
            ``"s3-fifo"`` throughout.
        static: for policy ``"static"``: node ids (or a mapping of tables to them) of the rows to keep, all of
            them or it is a BudgetError; by default those of the highest degree, as many as fit, where the
            store knows degrees.
        warm: the name of a saved cache (:meth:`save_cache`) whose rows are loaded before the first
            mini-batch.
        overtake: hand over whichever mini-batch has its rows first.
        nodes: a function from a mini-batch to its node ids, or to {table: ids}, where no rule finds them.
        device: where tensors go, in its default stream; None for host memory. Several devices may be given as
            a list: they share the rows kept on them, and mini-batches go to the first.
        device_memory: for rows kept on each device (:mod:`featstore.tiers.device`), bytes or ``"2GiB"``,
            beside ``memory``, which is the host's. The mini-batches themselves take memory there as well.
        device_policy: of these rows: a name of :data:`featstore.tiers.slots.layout.POLICIES` but ``"static"``
            and ``"min"``.
        tensors: hand out torch tensors; by default where there is a device, or the mini-batches are PyG
            objects.
        extracted: how many mini-batches are extracted at once, at most: fewer where they would pin most of
            the slots, and one where it has not slots for all of its rows.
        reader_memory: what of ``memory`` the reader takes beyond maps and checksums, to stage pages and to
            plan; by default a ninth, 29 MiB at most, and less where memory is scarce. See
            :mod:`featstore.tune.tuning`.
        engine, queue_depth, verify: as for :class:`featstore.reader.reader.Reader`.

    Raises SourceError, IdError; BudgetError (at the first mini-batch, or a larger one, that finds no room);
    what sampling and reading raise.
    """

    report_stages: OnlineStages

    def __init__(
        self, store: OpenStore, batches: Sampler, *, memory: int | str = MEMORY, policy: str = "auto",
        static: Any = None, warm: str | None = None, overtake: bool = False,
        nodes: Callable[[Any], Any] | None = None, device: Any = None,
        device_memory: int | str | None = None, device_policy: str = FIRST_POLICY, halo: TierSpec | None =
        None,
        tensors: bool | None = None, extracted: int = EXTRACTED, reader_memory: int | str | None = None,
        **reader: Any,
    ) -> None:  # fmt: skip
        super().__init__(OnlineStages())
        self.store, self._batches = as_store(store), args.as_batches(batches, "batches")
        self.nodes = None if nodes is None else args.as_function(nodes, "nodes")
        devices = list(device) if isinstance(device, list | tuple) else [] if device is None else [device]
        if device is not None and not devices:
            raise ArgumentError("device must be a device, or a list of at least one, not an empty list")
        devices = [args.as_device(one, "device") for one in devices]
        self.overtake, self._device = args.as_flag(overtake, "overtake"), devices[0] if devices else None
        self._tensors = None if tensors is None else args.as_flag(tensors, "tensors")
        self._named_alone: str | None = None  # the only table so far, that mini-batches have named
        if tensors:
            args.need_torch("tensors=True")
        if tensors is False and devices:
            raise SourceError("tensors=False hands out arrays, which are in host memory: leave out device=")
        args.check_options(reader, (*args.options_of(OnlineLoader), *READING), "OnlineLoader")
        self.extraction = Extraction(
            store,
            as_memory(memory),
            policy=policy,
            static=static,
            warm=warm,
            extracted=args.as_count(extracted, "extracted"),
            reader_memory=None if reader_memory is None else parse_bytes(reader_memory, "reader_memory"),
            devices=devices,
            device_memory=0 if device_memory is None else parse_bytes(device_memory, "device_memory"),
            device_policy=device_policy,
            halo=halo,
            reader=reader,
        )
        if devices:
            from featstore.base.transfers import Transfer

            self._transfer = Transfer(devices[0])
            self.extraction.output_memory = self._transfer.memory
        self._report: LoaderReport | None = None
        #: Whether mini-batches are sampled here, so that what they hold beside rows is of the budget, too.
        self.samples = False
        #: Told of the epoch and number of each mini-batch before its rows are asked for.
        self.on_begin: Callable[[int, int], None] = lambda epoch, index: None
        self._epoch = 0
        self._begun = False  # this epoch was, and its rest is not wanted unless a state says so

    def __len__(self) -> int:
        length = known_length(self._batches)
        if length is None:
            raise ArgumentError("the mini-batches have no length")
        return length

    # Iterating.

    def _begin_prefetch(self) -> Prefetch:
        with self._alone("another iteration of this loader has begun"):
            if self._begun:
                self._epoch, self._next = self._epoch + 1, 0
            if self._next == 0:
                self.extraction.decide()
            self._begun = True
            batches, before = self._mini_batches(self._epoch), self._prefetch
            last = before if isinstance(before, OnlineEpoch) else None
            self._prefetch = OnlineEpoch(self, self.extraction, batches, self._next, last)
            return self._prefetch

    def _taken(self, made: Any) -> Any:
        assert isinstance(self._prefetch, OnlineEpoch)
        self.number = self._prefetch.numbers.popleft()
        return super()._taken(made)

    def is_stopping(self) -> bool:
        """Whether the iteration under way is being ended."""
        return self._prefetch is not None and self._prefetch.stopping

    def _mini_batches(self, epoch: int) -> Iterable[Any]:
        if epoch > 0:
            check_repeatable(self._batches)
        return epoch_of(self._batches, epoch)

    # Resuming.

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch, from its beginning."""
        epoch = args.as_count(epoch, "epoch", 0)
        with self._alone("an epoch has been set since this iteration began"):
            self._epoch, self._next, self._begun = epoch, 0, False

    def state(self) -> dict[str, Any]:
        """Where training stands: the epoch, and the mini-batches of it that were handed out. It belongs to
        the same ``batches``, which must give the same mini-batches in the same epoch."""
        if self.overtake:
            raise SourceError(
                "with overtake=True mini-batches have no order that could be gone on with: save "
                "between epochs"
            )
        return state_of({"store": self.store.uuid}, self._epoch, self._next)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken: mini-batches handed out then are sampled again and let go, without
        reading their rows."""
        epoch, after, _ = position_of(state, {"store": self.store.uuid})
        with self._alone("a state has been loaded since this iteration began"):
            self._epoch, self._next, self._begun = epoch, after, False

    # What it does.

    def report(self) -> LoaderReport:
        """Per stage the time busy and waiting, hits and misses, bytes read."""
        return self._report or self._measured()

    def _measured(self) -> LoaderReport:
        return self.report_stages.report(self.extraction.counted())

    def memory(self) -> dict[str, int]:
        """Bytes of the budget by what they are for; empty before the first mini-batch."""
        return self.extraction.memory()

    @property
    def policy(self) -> dict[str, str]:
        """The policy of each table's buffer now; empty before the first mini-batch."""
        return {name: buffer.policy_name for name, buffer in list(self.extraction.buffers.items())}

    def save_cache(self, name: str = "cache") -> None:
        """Save with the store which rows are in the buffers now, to be loaded by ``warm=name``."""
        cache_path(self.store, name)
        with self._alone("the cache was saved since this iteration began"):
            self.extraction.save(name)

    def beginning(self, index: int) -> None:
        """The rows of this mini-batch are asked for next."""
        self.on_begin(self._epoch, index)

    def finished(self, ids: Ids, sample: Any, rows: dict[str, Any], index: int, *, named: bool) -> Any:
        """What the training loop gets. ``named``: it has said of which types the ids are."""
        x: dict[str, Any] = dict(rows)
        if wants_tensors(self._tensors, sample, self._device):
            from featstore.base.tensors import as_tensor

            x = {name: as_tensor(one) if isinstance(one, np.ndarray) else one for name, one in x.items()}
            if self._transfer is not None:
                x = self._transfer(x)
        if len(self.extraction.buffers) == 1 and not (named and self.store.edge_types):
            self._named_alone = next(iter(self.extraction.buffers)) if named else None
            batch = Batch(index, next(iter(ids.values())), next(iter(x.values())), sample)
        else:
            alone, self._named_alone = self._named_alone, None
            if alone is not None:
                warn(
                    f"mini-batch {index:,} is the first with several tables, and those before, of "
                    f"{alone!r} alone, had arrays as x and n_id: from here on both are mappings "
                    "by table. They are so from the first on where each names all tables, of some with no ids"
                )
            batch = Batch(index, ids, x, sample)
        return filled(batch, x, self._device)

    # Ending.

    def close(self) -> None:
        self._closed = True
        if self.here:
            with self._lock:
                if self._prefetch is not None:
                    self._prefetch.close()
                if self._report is None:
                    self._report = self._measured()
            self.extraction.close()
            if self._transfer is not None:
                self._transfer.close()

    def __repr__(self) -> str:
        return f"<OnlineLoader of {str(self.store.path)!r}, {self.policy or 'before its first mini-batch'}>"
