"""The loader: mini-batches of a compiled trace, with their rows, one after the other.

A thread of its own goes ahead of the training loop: it reads a mini-batch's record, starts the reads that
bring its rows straight to their places, copies what is in memory beside them, puts what stays into its slot,
and hands over (:mod:`~featstore.loaders.compiled.assembly`). While one mini-batch is assembled the reads of
the next are under way, as far as memory allows: at most ``depth`` mini-batches exist at once, the one that
the loop works on among them. Small ones are read in groups of consecutive ones: one request for their
records, one for their rows, which lie in one piece of memory that is used again when the loop has none of
them any more.

Slots (:mod:`~featstore.loaders.compiled.slots`) are given away in the order of the mini-batches, so a
schedule by next use holds for that order alone; a fixed set may be gone through in any. A round ends where it
began: the rows that were in memory at first are there again, or they are read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore import arguments as args
from featstore.base.ids import as_integers
from featstore.base.memory import check_machine
from featstore.base.state import position_of, state_of
from featstore.compile.budget import ASKED_AHEAD, MAP_BYTES, read_together
from featstore.errors import ArgumentError, BudgetError, SourceError
from featstore.loaders.compiled.assembly import Assembly, Pending
from featstore.loaders.compiled.options import check_loader_options
from featstore.loaders.compiled.report import CompiledStages
from featstore.loaders.compiled.slots import ResidentSlots
from featstore.loaders.compiled.sources import CompiledSources
from featstore.loaders.prefetch import Prefetch, PrefetchingLoader
from featstore.loaders.report import LoaderReport
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.loaders.compiled.trace import CompiledTrace
    from featstore.tiers import Tier
    from featstore.tiers.buffer_tier import Buffer

#: Numbers of mini-batches, or a function of the round's number that gives them.
Order = Sequence[int] | NDArray[np.int64] | Callable[[int], Sequence[int] | NDArray[np.int64]]
_HOLD = "hold this compiled trace's slots, two mini-batches and its readers"


class CompiledLoader(PrefetchingLoader):
    """Iterates over a compiled trace's mini-batches; made by
    :meth:`featstore.Store.loader`, mode compiled. A context manager.

    Each iteration is a round over all of them; iterating again begins the next round. Break off in the
    middle, and the next iteration begins a new round. There is one iteration at a time: a new one ends the
    one before. A loader belongs to the process that made it; the compiled trace may be forked and pickled.

    Args:
        compiled: the compiled trace.
        memory: the loader's budget; by default what it was compiled for. Raises BudgetError where that is too
            small.
        order: numbers of mini-batches, in the order to go through them (a fixed residency alone allows one),
            or a function of the round's number that gives as many in every round; None: as recorded.
        device: where tensors go; None for host memory, which will not do where the trace was compiled with
            ``device_memory``.
        tensors: hand out torch tensors; by default where there is a device, or the samples are PyG's or
            DGL's.
        buffer: a :class:`featstore.Buffer` over the base store, for rows that were left there (``disk=``)
            and that the schedule does not keep; in the memory that it names, or what is left of ``memory``
            beside the mini-batches that may exist at once. Raises ArgumentError where no row was left there.
        engine, queue_depth, verify: as for :class:`featstore.reader.reader.Reader`.
    """

    report_stages: CompiledStages

    def __init__(
        self, compiled: CompiledTrace, *, memory: int | str | None = None, order: Order | None = None,
        device: Any = None, tensors: bool | None = None, buffer: Buffer | None = None, **reader: Any,
    ) -> None:  # fmt: skip
        super().__init__(CompiledStages())
        if not hasattr(compiled, "pack"):
            raise ArgumentError(
                f"compiled must be a compiled trace (store.compiled), not {args.shown(compiled)}"
            )
        own = {"memory": memory, "order": order, "device": device, "tensors": tensors, "buffer": buffer}
        check_loader_options(CompiledLoader, own | reader)
        device = None if device is None else args.as_device(device, "device")
        self.compiled = compiled
        self._memory_bytes = compiled.memory_bytes if memory is None else parse_bytes(memory, "memory")
        self._order = self._checked_order(order)
        self._epoch = 0
        first = self._order(0) if callable(self._order) else self._order
        self._length = compiled.entry.batches if first is None else len(self._numbers(first))
        self._report: LoaderReport | None = None
        buffer_bytes, self.depth = self._memory_of(buffer)
        if device is None and any(compiled.limits(name).device_slots for name in compiled.entry.tables):
            raise SourceError(
                "this trace was compiled with rows on a device: give device= ('cpu' keeps them in host "
                "memory)"
            )
        self._buffer: Tier | None = None
        self._slots: ResidentSlots | None = None
        self._assembly: Assembly | None = None
        self._pack, self._base = compiled.open_readers(reader)
        try:
            if buffer is not None:
                assert self._base is not None
                self._buffer = buffer.over(self._base, buffer_bytes)
            sources = CompiledSources(compiled, self._pack, self._buffer or self._base)
            self._slots = ResidentSlots(sources, read_together(self.depth))
            self._assembly = Assembly(sources, self._slots, self.report_stages, self.depth, device, tensors)
            self._transfer = self._assembly.transfer
            self._pending = ""  # what must be done before the next round: "begin", "restart", or nothing
            self._slots.load()
        except BaseException:
            self.close()
            raise

    def _memory_of(self, buffer: Buffer | None) -> tuple[int, int]:
        """Memory of the buffer, and how many mini-batches may exist at once. Raises BudgetError."""
        least = said = 0
        if buffer is not None:
            tables = self.compiled.base_tables()
            if not tables:
                raise ArgumentError(
                    f"buffer= keeps rows of the base store, of which {self.compiled.pack.path} reads none: "
                    "all of its rows are in the compiled trace"
                )
            said = buffer.host_bytes(tables) or 0
            least = said or buffer.least_bytes(tables)
        needed = self.compiled.needed_bytes(2) + least
        hold = f"{_HOLD}{' and its buffer' if least else ''}"
        if needed > self._memory_bytes:
            raise BudgetError(needed, self._memory_bytes, hold)
        check_machine(needed, hold)
        maps = MAP_BYTES * sum(self.compiled.limits(name).slots for name in self.compiled.entry.tables)
        depth = self.compiled.depth_within(self._memory_bytes, least + maps)
        left = self._memory_bytes - self.compiled.needed_bytes(depth) - maps
        return said or max(least, left), depth

    def _checked_order(self, order: Order | None) -> Order | None:
        if order is None:
            return None
        if self.compiled.entry.residency != "fixed":
            raise SourceError(
                "this trace was compiled with a schedule by next use, which holds for its own order: "
                "give no order, or compile it with residency='fixed'"
            )
        return order if callable(order) else self._numbers(order)

    def _numbers(self, order: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        found = as_integers(order, "order must be numbers of mini-batches", ArgumentError)
        count = self.compiled.entry.batches
        if found.ndim != 1 or (len(found) and (found.min() < 0 or found.max() >= count)):
            raise ArgumentError(f"order must be numbers of mini-batches from 0 to {count - 1}")
        return found.astype(np.int64)

    def _round(self) -> NDArray[np.int64]:
        """The mini-batches of this round, in their order."""
        if self._order is None:
            return np.arange(self.compiled.entry.batches)
        if not callable(self._order):
            return np.asarray(self._order)
        found = self._numbers(self._order(self._epoch))
        if len(found) != len(self):
            raise ArgumentError(
                f"order gave {len(found):,} mini-batches for round {self._epoch}, {len(self):,} for round 0"
            )
        return found

    def __len__(self) -> int:
        return self._length

    # Iterating.

    def _prefetched(self, prefetch: Prefetch) -> None:
        with self._lock:
            if self._prefetch is prefetch:
                self._pending = "begin"

    def _begin_prefetch(self) -> Prefetch:
        with self._alone("another iteration of this loader has begun"):
            self._prepare()
            order = self._round()
            self._pending = "restart"
            assert self._assembly is not None
            prefetch = self._prefetch = _Prefetch(self, self._assembly, order[self._next :])
            return prefetch

    def _prepare(self) -> None:
        """Have in memory what a round begins with, or the rest of one that is gone on with."""
        assert self._slots is not None
        pending, self._pending = self._pending, "restart"
        if pending == "begin":
            self._epoch += 1
            self._next = 0
            self._slots.begin_round()
        elif pending == "restart":
            self._next = 0
            self._slots.load()
        elif self.compiled.entry.residency == "min":
            self._slots.restore(self._next)

    def report(self) -> LoaderReport:
        """Per stage the time busy and waiting, bytes by where they came from, forecast against
        measurement."""
        return self._report or self._measured()

    # Resuming.

    @property
    def identity(self) -> dict[str, str]:
        """What a state belongs to."""
        return {"compiled": self.compiled.pack.uuid}

    def state(self) -> dict[str, Any]:
        """Where the loader is: the mini-batches handed out so far of which round."""
        return state_of(self.identity, self._epoch, self._next)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken: the next iteration begins with the mini-batch after the last one
        handed out then."""
        epoch, after, _ = position_of(state, self.identity, most=len(self))
        with self._alone("a state has been loaded since this iteration began"):
            assert self._slots is not None
            self._pending = "restart"  # where loading fails
            self._epoch, self._next = epoch, after
            if self._next == len(self):
                self._epoch, self._next = self._epoch + 1, 0
            self._slots.load()
            self._pending = ""

    # Ending.

    def _measured(self) -> LoaderReport:
        stats = [reader.stats() for reader in (self._pack, self._base) if reader is not None]
        forecast = self.compiled.forecast_seconds / max(1, self.compiled.entry.batches)
        hits = 0 if self._buffer is None else self._buffer.hits()
        rows, size = self.compiled.remote()
        return replace(self.report_stages.report(stats, forecast, hits), remote_rows=rows, remote_bytes=size)

    def close(self) -> None:
        self._closed = True
        if self.here:  # in a forked child there is nothing under way
            with self._lock:
                if self._prefetch is not None:
                    self._prefetch.close()
                    self._prefetch = None  # which knows the memory of mini-batches
                if self._report is None:
                    self._report = self._measured()
            if self._buffer is not None:
                self._buffer.close()
            if self._assembly is not None:
                self._assembly.close()
        for reader in (self._pack, self._base):
            if reader is not None:
                reader.close()
        self._slots = self._assembly = None

    def __repr__(self) -> str:
        return (
            f"<CompiledLoader of {len(self)} mini-batches of {str(self.compiled.pack.path)!r}, "
            f"{self.depth} at once>"
        )


class _Prefetch(Prefetch):
    """One round."""

    def __init__(self, loader: CompiledLoader, assembly: Assembly, order: NDArray[np.int64]) -> None:
        self._group = read_together(loader.depth)
        groups = loader.depth // self._group
        super().__init__(loader.check_process, loader.report_stages, groups, 1, "featstore-compiled")
        self._assembly, self._order = assembly, order

    def _go(self) -> None:
        assembly, size = self._assembly, self._group
        waiting = deque(self._order[at : at + size].tolist() for at in range(0, len(self._order), size))
        asked: deque[Pending] = deque()  # records on their way
        under_way: deque[Pending] = deque()  # rows on their way

        def arrived() -> bool:
            """The first can be assembled before there is room: the device is to have reads as long as it
            can."""
            return bool(under_way) and under_way[0].arrived()

        try:
            while waiting or asked or under_way:
                while waiting and len(asked) < ASKED_AHEAD:  # before rows that the device would read first
                    asked.append(assembly.begin(waiting.popleft()))
                if asked and self._take_room(arrived):
                    assembly.decode(asked[0])
                    assembly.submit_rows(asked[0])
                    for read in asked[0].requests:
                        read.add_done_callback(lambda _: self._changed.set())
                    under_way.append(asked.popleft())
                    continue
                if self._stop:
                    return
                done = under_way.popleft()
                assembly.wait(done)
                self._assemble(done)
                del done  # the rows are the loop's now
        finally:
            for pending in [*asked, *under_way]:  # they write into memory that goes with them
                pending.abandon()

    def _assemble(self, done: Pending) -> None:
        """Hand over a group's mini-batches one by one; the last takes the group's memory along."""
        while done.members and not self._stop:
            member = done.members.pop(0)
            self._assembly.assemble(member)
            self._hand_over(self._assembly.finished(member), 0 if done.members else 1)
            del member
