"""The loader of mode partitions: mini-batches drawn from random collections of partitions that are in memory
(:mod:`featstore.loaders.mega.sets`), beside the training.

A thread of its own goes ahead of the training loop: it samples a mini-batch inside the mega-batch in
memory, copies its rows out, and hands over. As soon as it has made the last one of a mega-batch it takes the
next, and has the one after that loaded over it, whatever the loop still works on. Two mini-batches exist at
once, the one that the loop works on and the one made ahead, and the budget counts two of the largest
(:mod:`featstore.loaders.mega.sizes`).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore import arguments as args
from featstore.base.buffers import Outputs, aligned_buffer
from featstore.base.state import position_of, state_of
from featstore.errors import ArgumentError, SourceError
from featstore.loaders.batch import Batch
from featstore.loaders.mega.drawing import Drawing, DrawOptions, Sampling
from featstore.loaders.mega.edge_rows import EdgeRows
from featstore.loaders.mega.largest import HELD_BATCHES, LargestDrawn
from featstore.loaders.mega.options import DrawnWith
from featstore.loaders.mega.partition_set import PartitionSet
from featstore.loaders.mega.parts import Parts
from featstore.loaders.mega.resident import OnDevices, device_of
from featstore.loaders.mega.sets import PartitionSets
from featstore.loaders.prefetch import Prefetch, PrefetchingLoader, Stages
from featstore.loaders.report import LoaderReport, reading_latencies, reading_seconds
from featstore.storage.store import OpenStore, as_store

if TYPE_CHECKING:
    from featstore.tiers.device_tier import Device

PASSES_MAX = 16  # of "auto"
_MEDIAN_OF_LOADS, _MEDIAN_OF_STEPS = 8, 64


class Position(NamedTuple):
    """The next mini-batch to be handed out: of which step and pass, its number, the size of those before it
    in the pass, and how often the mega-batch is gone through (None: to be chosen)."""

    step: int = 0
    pass_: int = 0
    number: int = 0
    batch_size: int = 0
    passes: int | None = None


#: What stands in a state of the fields of Position after the first.
_PLACE = ("pass", "batch", "batch_size", "passes")


class PartitionsLoader(PrefetchingLoader):
    """Iterates over mini-batches sampled inside mega-batches, an epoch at a time; made by
    :meth:`featstore.Store.loader` in mode ``"partitions"``. A context manager.

    Equal seeds give equal mini-batches (but for ``passes="auto"``). Break off in the middle, and the next
    iteration goes on there. There is one iteration at a time: a new one ends the one before. A loader belongs
    to the process that made it.

    Args:
        store: the open store, packed with a graph and partitions.
        fanouts: neighbours per node and hop, -1 for all; of a store with types by edge type, too.
        batch_size: seeds of a mini-batch.
        passes: how often each mega-batch is gone through, or ``"auto"``: as often as its successor takes to
            load.
        weights: weigh edges so that neighbours lost at the border do not bias a mean.
        tensors: ``x`` as a torch tensor; by default where there is a device.
        device: where tensors go; None for host memory. Several may be given as a list with
            ``device_memory``: they share the rows kept on them, and mini-batches go to the first.
        device_memory: for rows kept on each device, over the partitions in memory
            (:mod:`featstore.loaders.mega.resident`), bytes or a size, beside ``memory``, which is the host's.
            The mini-batches take memory there as well.
        device_policy: which rows these are, as for :class:`featstore.tiers.device_tier.Device`.
        ranks, world_size, drop_last: whose mini-batches are drawn here, see
            :func:`featstore.sampling.ranked.share_of`: number 0 of each of these ranks, then number 1 of
            each.
        edge_table: the table whose rows edges have, or the names of several, read by their numbers; each
            mini-batch has them beside those of its nodes.
        said: samplers' options, :data:`featstore.sampling.attributes.SAMPLING_OPTIONS`, or what came of them.
        sets: ``memory``, ``train``, ``graph``, ``hubs``, ``resident``, ``replaced``, ``seed``, ``node_ids``,
            ``engine``, ``queue_depth`` and ``verify`` of :class:`featstore.loaders.mega.sets.PartitionSets`;
            ``memory`` covers the mini-batches as well.

    Raises what PartitionSets raises.
    """

    report_stages: _StepStages

    def __init__(
        self, store: OpenStore, fanouts: Any, *, batch_size: int = 1024, passes: int | str = 1,
        weights: bool = False, tensors: bool | None = None, device: Any = None, drop_last: bool = False,
        device_memory: int | str | None = None, device_policy: str | None = None, world_size: int = 1,
        ranks: Sequence[int] = (0,), edge_table: str | Sequence[str] | None = None,
        said: Mapping[str, Any] | DrawnWith | None = None, **sets: Any,
    ) -> None:  # fmt: skip
        super().__init__(_StepStages())
        if not isinstance(passes, str) or passes != "auto":
            passes = args.as_count(passes, "passes, unless 'auto',", 1, 2**12)
        world_size = args.as_count(world_size, "world_size")
        keeps = device_of(device, device_memory, device_policy)
        device = keeps.devices[0] if keeps is not None else device
        self.passes, self._device = passes, None if device is None else args.as_device(device, "device")
        if tensors is False and device is not None:
            raise SourceError("tensors=False hands out arrays, which are in host memory: leave out device=")
        self._tensors = device is not None or (tensors is not None and args.as_flag(tensors, "tensors"))
        if self._tensors:
            args.need_torch("tensors=True")
        parts = Parts(as_store(store), sets.get("graph"))
        self._options = DrawOptions(
            parts.fanouts(fanouts), args.as_count(batch_size, "batch_size"),
            args.as_flag(weights, "weights"), 0, world_size, args.as_flag(drop_last, "drop_last"),
        )  # fmt: skip
        self.ranks = tuple(args.as_count(rank, "rank", 0, world_size - 1) for rank in ranks)
        train = parts.as_seeds(sets.get("train"))
        self._drawn_with = said if isinstance(said, DrawnWith) else DrawnWith(parts, said, train)
        self.drawn = LargestDrawn(
            self._options.batch_size, parts.seed_table(train), parts.drawn(self._options.fanouts),
            None if keeps is None else OnDevices.host_bytes(keeps, parts), **self._drawn_with.drawn,
        )  # fmt: skip
        sets |= {"drawn_with": self._drawn_with, "train": train}
        self._edges = EdgeRows(store, edge_table, **sets) if edge_table else None
        if self._edges is None:
            self.sets = PartitionSets(store, drawn=self.drawn, **sets)
        else:
            self.sets = self._edges.beside(self.drawn, sets)
        self._others = parts.empty_rows()
        self._on_devices = None if keeps is None else self._keep(keeps)
        nodes, _ = self.drawn.nodes_and_edges(self.sets.places, self.sets.sizes.edges_max)
        memory = aligned_buffer
        if self._device is not None:
            from featstore.base.transfers import Transfer

            self._transfer = Transfer(self._device)
            memory = self._transfer.memory
        self._outputs = {
            name: Outputs(nodes[name] * table.row_bytes, HELD_BATCHES, memory)
            for name, table in self.sets.loaded.items()
        }
        self._epoch, self._place = 0, Position()
        self._padded = self._dropped = 0  # seeds of this epoch that stand twice, and that are left out
        self._load_seconds: list[float] = []  # of the last mega-batches
        self._edges_stored = self._edges_kept = 0  # of those that mini-batches were drawn from
        self.loaded_bytes = self.sets_begun = 0  # bytes read for these, and how many

    def _keep(self, device: Device) -> OnDevices:
        """Rows on devices, over the partitions in memory."""
        try:
            return OnDevices(device, self.sets.as_tier(), list(self.sets.loaded.values()))
        except BaseException:
            self.sets.close()
            if self._edges is not None:
                self._edges.reader.close()
            raise

    def memory(self) -> dict[str, int]:
        """Bytes of the budget: ``planned``, by the sum of all that is held, and ``unused``."""
        memory = self.sets.memory()
        return memory if self._edges is None else memory | {"edge_rows": self._edges.memory_bytes}

    def __len__(self) -> int:
        """Mini-batches of the current epoch, of all the ranks that are drawn for here. Raises ArgumentError
        for ``passes="auto"``."""
        return len(self.ranks) * len(self.seeds_of_batches(self._epoch)[0])

    def seeds_of_batches(self, epoch: int) -> tuple[NDArray[np.int64], int, int]:
        """Seeds of each mini-batch of an epoch, of one rank, int64 [mini-batches]; and how many seeds of all
        ranks stand twice, and are left out. Raises ArgumentError for ``passes="auto"``."""
        if self.passes == "auto":
            raise ArgumentError("how many mini-batches an epoch has with passes='auto' is known afterwards")
        size, passes = self._options.batch_size, int(self.passes)
        shares = [self._options.share(np.empty(count, np.int64)) for count in self.sets.seed_counts(epoch)]
        each: list[int] = []
        for share in shares:
            whole, rest = divmod(len(share.seeds), size)
            each += ([size] * whole + [rest] * (rest > 0)) * passes
        padded, dropped = (passes * sum(counts) for counts in zip(*(s[1:] for s in shares), strict=True))
        return np.array(each, np.int64), padded, dropped

    # Iterating.

    def _begin_prefetch(self) -> Prefetch:
        with self._alone("another iteration of this loader has begun"):
            self._check_size()
            known = (0, 0) if self.passes == "auto" else self.seeds_of_batches(self._epoch)[1:]
            self._padded, self._dropped = known
            self._prefetch = _Prefetch(self, self._epoch, self._place)
            return self._prefetch

    def _check_size(self) -> None:
        place, size = self._place, self._options.batch_size
        if place.number and place.batch_size != size:
            raise ArgumentError(
                f"this pass was begun with mini-batches of {place.batch_size}, it cannot go on with {size}"
            )

    def _taken(self, made: Any) -> Any:
        batch, self._place = made
        return batch

    def _prefetched(self, prefetch: Prefetch) -> None:
        with self._lock:
            if self._prefetch is prefetch:
                self._epoch, self._place = self._epoch + 1, Position()

    # What the thread asks for.

    def begin(self, future: Future[PartitionSet], place: Position) -> tuple[list[Drawing], int]:
        """The mini-batches of a mega-batch that has been loaded, of each rank, and how often it is gone
        through."""
        mega = future.result()
        if mega.load_seconds:
            self._load_seconds = [*self._load_seconds, mega.load_seconds][-_MEDIAN_OF_LOADS:]
        self.report_stages.add("load", mega.load_seconds)
        self.report_stages.add("build", mega.build_seconds)
        self.loaded_bytes += mega.read_bytes
        self.sets_begun += 1
        self._edges_stored += mega.edges_stored
        self._edges_kept += mega.partition_edges
        taken = self.sets.take(mega.epoch, mega.step)
        if self._on_devices is not None:
            self._on_devices.resident.hold(taken)
        sampling = Sampling(taken, self.sets.parts, self.drawn.seeds, self._options, self._drawn_with)
        drawings = [Drawing(sampling, replace(self._options, rank=r), self._outputs) for r in self.ranks]
        passes = self._choose_passes(drawings[0].per_pass) if place.passes is None else place.passes
        if self.passes == "auto":  # known as they begin
            self._padded += drawings[0].share.padded * passes
            self._dropped += drawings[0].share.dropped * passes
        return drawings, passes

    def _choose_passes(self, per_pass: int) -> int:
        """HierBatching's rule (appendix B): as often as loading takes longer than one pass of training."""
        if self.passes != "auto":
            return int(self.passes)
        steps = self.report_stages.step_seconds
        if not steps or not self._load_seconds:
            return 1
        pass_seconds = float(np.median(steps)) * per_pass
        return max(1, min(PASSES_MAX, int(np.median(self._load_seconds) / max(1e-9, pass_seconds))))

    def draw(self, drawing: Drawing, order: NDArray[np.int64], pass_: int, number: int) -> Batch:
        """A mini-batch, as the training loop gets it."""
        begin = time.perf_counter()
        sample = drawing.sample(order, pass_, number)
        sampled = time.perf_counter()
        on_devices = self._on_devices
        rows: Any = drawing.gather(sample) if on_devices is None else on_devices.gather(sample.local)
        rows |= self._others | ({} if self._edges is None else self._edges.of(sample))
        gathered = time.perf_counter()
        if self._tensors:
            from featstore.base.tensors import as_tensor

            rows = {n: as_tensor(one) if isinstance(one, np.ndarray) else one for n, one in rows.items()}
            if self._transfer is not None:
                rows = self._transfer(rows)
        several = len(rows) > 1 or self.sets.parts.typed
        batch = Batch(number, sample.node, rows if several else next(iter(rows.values())), sample)
        if self._transfer is not None:
            batch.bring_edges()
        for stage, low, high in (
            ("sample", begin, sampled), ("gather", sampled, gathered),
            ("hand over", gathered, time.perf_counter()),
        ):  # fmt: skip
            self.report_stages.add(stage, high - low)
        return batch

    # Resuming.

    def set_epoch(self, epoch: int) -> None:
        """Begin at the start of this epoch when iterated next."""
        epoch = args.as_count(epoch, "epoch", 0)
        with self._alone("an epoch has been set since this iteration began"):
            self._epoch, self._place = epoch, Position()

    @property
    def _identity(self) -> dict[str, Any]:
        """What a state belongs to."""
        sets = self.sets
        return {
            "store": sets.store.uuid, "seed": sets.seed, "resident": sets.sizes.resident,
            "replaced": sets.sizes.replaced, "hubs": sum(map(len, sets.hub_rows.values())),
            "train": zlib.crc32(sets.train.tobytes()),
        } | ({"seeds": self.drawn.seeds} if sets.parts.typed else {})  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Where training stands. What was handed out counts as seen. Its ``next`` is the mega-batch."""
        step, *place = self._place
        return state_of(self._identity, self._epoch, step, dict(zip(_PLACE, place, strict=True)))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken. Raises ArgumentError, a ValueError, where it belongs to
        another store, seed or size of mega-batch."""
        epoch, step, at = position_of(state, self._identity, _PLACE, most=self.sets.steps)
        pass_, number, size = (args.as_count(at[key], f"{key} of the state", 0) for key in _PLACE[:-1])
        passes = None if at["passes"] is None else args.as_count(at["passes"], "passes of the state")
        with self._alone("a state has been loaded since this iteration began"):
            self._epoch, self._place = epoch, Position(step, pass_, number, size, passes)

    # What it does, and ending.

    def report(self) -> LoaderReport:
        """What has been measured so far."""
        batches, seconds, _ = self.report_stages.snapshot()
        stats = [self.sets.stats()] + ([] if self._edges is None else [self._edges.reader.stats()])
        return LoaderReport(
            batches, seconds | reading_seconds(stats), sum(one.bytes_read for one in stats),
            sum(one.reads for one in stats), padded=self._padded, dropped=self._dropped,
            forecast_seconds=self.sets.forecast_seconds(),
            devices={} if self._on_devices is None else self._on_devices.stats(),
            edges_stored=self._edges_stored, edges_kept=self._edges_kept, latencies=reading_latencies(stats),
        )  # fmt: skip

    def close(self) -> None:
        self._closed = True
        if self.here:
            with self._lock:
                if self._prefetch is not None:
                    self._prefetch.close()
                    self._prefetch = None
            if self._transfer is not None:
                self._transfer.close()
            if self._on_devices is not None:
                self._on_devices.close()
        self.sets.close()
        if self._edges is not None:
            self._edges.reader.close()

    def __repr__(self) -> str:
        return (
            f"<PartitionsLoader of {str(self.sets.store.path)!r}, {self.sets.resident} of "
            f"{self.sets.partitions} partitions at once>"
        )


class _StepStages(Stages):
    """Stages that also remember how long the loop's last steps took."""

    def __init__(self) -> None:
        super().__init__()
        self.step_seconds: list[float] = []

    def add(self, stage: str, seconds: float) -> None:
        super().add(stage, seconds)
        if stage == "train":
            self.step_seconds = [*self.step_seconds, seconds][-_MEDIAN_OF_STEPS:]


class _Prefetch(Prefetch):
    """One epoch, from a place on: pairs of a mini-batch and the place after it."""

    def __init__(self, loader: PartitionsLoader, epoch: int, place: Position) -> None:
        name = "featstore-partitions"
        super().__init__(loader.check_process, loader.report_stages, HELD_BATCHES, 1, name)
        self._loader, self._epoch, self._place = loader, epoch, place

    def _go(self) -> None:
        first, sets = self._place, self._loader.sets
        for step in range(first.step, sets.steps):
            place = first if step == first.step else Position(step)
            future = sets.ask(self._epoch, step)
            if not self._wait(future):
                return
            drawings, passes = self._loader.begin(future, place)
            for pass_ in range(place.pass_, passes):
                if not self._draw(drawings, pass_, place.number if pass_ == place.pass_ else 0, passes):
                    return
            del drawings  # what they hold of this mega-batch, before as much is held of the next

    def _wait(self, future: Future[PartitionSet]) -> bool:
        """Wait for a mega-batch; False after a stop, when nobody waits for it any more."""
        begin = time.perf_counter()
        future.add_done_callback(lambda _: self._changed.set())
        while not (self._stop or future.done()):
            self._changed.wait()
        self._stages.add("load wait", time.perf_counter() - begin)
        return not self._stop

    def _draw(self, drawings: list[Drawing], pass_: int, begin: int, passes: int) -> bool:
        """Hand over the mini-batches of a pass, those of the ranks in turn; False after a stop."""
        orders = [drawing.order(pass_) for drawing in drawings]
        first = drawings[0]
        for number in range(begin, first.per_pass):
            after = Position(
                first.mega.step, pass_ + (number + 1) // first.per_pass, (number + 1) % first.per_pass,
                first.options.batch_size, passes,
            )  # fmt: skip
            for drawing, order in zip(drawings, orders, strict=True):
                if not self._take_room(lambda: False):
                    return False
                self._hand_over((self._loader.draw(drawing, order, pass_, number), after))
        return True
