"""The loader: mini-batches of a compiled trace, with their rows, one after the other.

A thread of its own goes ahead of the training loop: it reads a mini-batch's record, starts the reads that
bring its rows straight to their places, copies what is in memory beside them, puts what stays into its slot,
and hands over. While one mini-batch is assembled the reads of the next are under way, as far as memory
allows: at most ``depth`` mini-batches exist at once, the one that the loop works on among them.

Slots are given away in the order of the mini-batches, so a schedule by next use holds for that order alone; a
fixed set may be gone through in any. A round ends where it began: the rows that were in memory at first are
there again, in other slots, which a map turns round, or they are read again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore import arguments as args
from featstore.base.buffers import Outputs, empty_rows
from featstore.base.ids import as_integers
from featstore.base.memory import check_machine
from featstore.base.native import address_of
from featstore.base.rows import move_rows
from featstore.errors import ArgumentError, BudgetError, CorruptionError, SourceError
from featstore.layout.records import TableRecord, check_record, decode_record
from featstore.loaders.compiled.options import check_loader_options
from featstore.loaders.compiled.report import CompiledStages, LoaderReport
from featstore.loaders.walk import Walk, WalkingLoader
from featstore.trace.sample_decoder import decode
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.engine.request import Request
    from featstore.loaders.compiled.trace import CompiledTrace


@dataclass(frozen=True)
class CompiledBatch:
    """A mini-batch whose graph sample is no PyG object. ``x``: rows of its nodes, in the order of the trace's
    ids, an array or tensor, or a dict of them by table where there are several. ``sample``: what was
    recorded. ``index``: its number in the trace."""

    index: int
    x: Any
    sample: Any


class _Ahead:
    """A mini-batch on its way."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.record: Request | None = None
        self.requests: list[Request] = []
        self.tables: list[TableRecord] = []
        self.sample: Any = None
        self.out: list[NDArray[np.uint8]] = []


class CompiledLoader(WalkingLoader):
    """Iterates over a compiled trace's mini-batches; made by
    :meth:`featstore.loaders.compiled.trace.CompiledTrace.loader`. A context manager.

    Each iteration is a round over all of them; iterating again begins the next round. Break off in the
    middle, and the next iteration begins a new round. There is one iteration at a time: a new one ends the
    one before. A loader belongs to the process that made it; the compiled trace may be forked and pickled.

    Args:
        compiled: the compiled trace.
        memory: the loader's budget; by default what it was compiled for. Raises BudgetError where that is too
            small.
        order: numbers of mini-batches, in the order to go through them (a fixed residency alone allows one);
            None: as recorded.
        device: where tensors go; None for host memory, which will not do where the trace was compiled with
            ``device_memory``.
        tensors: hand out torch tensors; by default where there is a device, or the samples are PyG objects.
        engine, queue_depth, verify: as for :class:`featstore.reader.reader.Reader`.
    """

    report_stages: CompiledStages

    def __init__(
        self, compiled: CompiledTrace, *, memory: int | str | None = None, order: Sequence[int] | None = None,
        device: Any = None, tensors: bool | None = None, **reader: Any,
    ) -> None:  # fmt: skip
        super().__init__(CompiledStages())
        if not hasattr(compiled, "pack"):
            raise ArgumentError(
                f"compiled must be a compiled trace (store.compiled), not {args.shown(compiled)}"
            )
        check_loader_options(
            CompiledLoader, {"memory": memory, "order": order, "device": device, "tensors": tensors, **reader}
        )
        self.compiled = compiled
        self._memory_bytes = compiled.memory_bytes if memory is None else parse_bytes(memory, "memory")
        self._order = self._checked_order(order)
        self._tensors, self._device = tensors, device
        self.depth = 0
        self._report: LoaderReport | None = None
        needed = compiled.needed_bytes(2)
        if needed > self._memory_bytes:
            raise BudgetError(
                needed,
                self._memory_bytes,
                "hold this compiled trace's slots, two mini-batches and its readers",
            )
        check_machine(needed, "hold this compiled trace's slots, two mini-batches and its readers")
        self.depth = 3 if compiled.needed_bytes(3) <= self._memory_bytes else 2
        self._tables = list(compiled.entry.tables.items())
        self._limits = [compiled.limits(name) for name, _ in self._tables]
        if device is None and any(limit.device_slots for limit in self._limits):
            raise SourceError(
                "this trace was compiled with rows on a device: give device= ('cpu' keeps them in host "
                "memory)"
            )
        self._pack, self._base = compiled.open_readers(reader)
        try:
            self._slots = [
                empty_rows(limit.slots, compiled.row_bytes(n))
                for (n, _), limit in zip(self._tables, self._limits, strict=True)
            ]
            self._outputs = [
                Outputs(t.batch_rows_max * compiled.row_bytes(n), self.depth) for n, t in self._tables
            ]
            self._turns = [compiled.turn(name) for name, _ in self._tables]
            self._cache = None if device is None else _DeviceRows(self, device)
            self._offsets = compiled.offsets()
            self._round = 0
            self._next = 0
            self._pending = ""  # what must be done before the next round: "turn", "restart", or nothing
            self._begin()
        except BaseException:
            self.close()
            raise

    def _checked_order(self, order: Sequence[int] | None) -> NDArray[np.int64] | None:
        if order is None:
            return None
        if self.compiled.entry.residency != "fixed":
            raise SourceError(
                "this trace was compiled with a schedule by next use, which holds for its own order: "
                "give no order, or compile it with residency='fixed'"
            )
        found = as_integers(order, "order must be numbers of mini-batches", ArgumentError)
        count = self.compiled.entry.batches
        if found.ndim != 1 or (len(found) and (found.min() < 0 or found.max() >= count)):
            raise ArgumentError(f"order must be numbers of mini-batches from 0 to {count - 1}")
        return found.astype(np.int64)

    def __len__(self) -> int:
        return self.compiled.entry.batches if self._order is None else len(self._order)

    # Memory.

    def _load_resident(self) -> None:
        """Bring what is in memory before the first mini-batch, slot by slot."""
        for number, (_, table) in enumerate(self._tables):
            rows = self._limits[number].slots
            if rows:
                out = self._rows(number, self._slots[number])
                self._pack.read_runs({table.resident: [(0, rows)]}, out={table.resident: out})

    def _rows(self, number: int, data: NDArray[np.uint8]) -> NDArray[Any]:
        """Bytes as rows of a table."""
        table = self.compiled.pack.tables[self._tables[number][1].packed]
        return data.view(table.dtype).reshape(len(data) // table.row_bytes, *table.row_shape)

    def _turn(self) -> None:
        """Between two rounds: find the first rows where they are now, and bring back those that are gone."""
        for number, (_, table) in enumerate(self._tables):
            turn, held = self._turns[number], self._maps[number]
            lost = np.flatnonzero(turn < 0)
            taken = np.zeros(len(turn), bool)
            taken[turn[turn >= 0]] = True
            free = np.flatnonzero(~taken)[: len(lost)]
            turned = turn.copy()
            turned[lost] = free
            self._maps[number] = held[turned]
            if len(lost):
                out = self._rows(number, self._slots[number])
                self._pack.submit(
                    {table.resident: lost},
                    out={table.resident: out},
                    at={table.resident: self._maps[number][lost]},
                ).result()

    # Iterating.

    def _walked(self, walk: Walk) -> None:
        with self._lock:
            if self._walk is walk:
                self._pending = "turn"

    def _begin_walk(self) -> Walk:
        with self._alone("another iteration of this loader has begun"):
            self._prepare()
            order = np.arange(len(self)) if self._order is None else self._order
            self._pending = "restart"
            walk = self._walk = _Walk(self, order[self._next :])
            return walk

    def _prepare(self) -> None:
        """Have in memory what a round begins with, or the rest of one that is gone on with."""
        pending, self._pending = self._pending, "restart"
        if pending == "turn":
            self._round += 1
            self._next = 0
            self._turn()
        elif pending == "restart":
            self._next = 0
            self._begin()
        elif self.compiled.entry.residency == "min":
            self._replay(self._next)

    def _begin(self) -> None:
        self._maps = [np.arange(limit.slots, dtype=np.int32) for limit in self._limits]
        self._load_resident()

    def report(self) -> LoaderReport:
        """Per stage the time busy and waiting, bytes by where they came from, forecast against
        measurement."""
        return self._report or self._measured()

    # Resuming.

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: the mini-batches handed out so far of which round, small enough for a
        checkpoint."""
        return {"compiled": self.compiled.pack.uuid, "round": self._round, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken: the next iteration begins with the mini-batch after the last one
        handed out then."""
        args.check_state(state, {"compiled": self.compiled.pack.uuid}, "this loader")
        after = args.as_count(state.get("next"), "next of the state, a mini-batch,", 0, len(self))
        number = args.as_count(state.get("round"), "round of the state", 0)
        with self._alone("a state has been loaded since this iteration began"):
            self._round, self._next = number, after
            if self._next == len(self):
                self._round, self._next = self._round + 1, 0
            self._begin()
            self._pending = ""

    def _replay(self, end: int) -> None:
        """Put into the slots what mini-batches 0 to ``end`` would have left there: of each slot its last
        admission."""
        last = [np.full(limit.slots, -1, np.int64) for limit in self._limits]
        for index in range(end):
            for number, record in enumerate(self._record(index)[0]):
                last[number][record.admit_slot] = index
        for index in np.unique(np.concatenate([a[a >= 0] for a in last])) if last else ():
            for number, record in enumerate(self._record(int(index))[0]):
                wanted = last[number][record.admit_slot] == index
                self._fetch_places(number, record, record.admit_place[wanted], record.admit_slot[wanted])

    def _fetch_places(
        self, number: int, record: TableRecord, places: NDArray[np.int32], slots: NDArray[np.int32]
    ) -> None:
        slot_of_place = np.full(record.host_count, -1, np.int32)
        slot_of_place[places] = slots
        name, table = self._tables[number]
        out = self._rows(number, self._slots[number])
        first = record.packed_first
        for reader, source, rows, at in (
            (
                self._pack,
                table.packed,
                np.arange(first, first + len(record.packed_place)),
                record.packed_place,
            ),
            (self._pack, table.shared, record.shared_row, record.shared_place),
            (self._base, name, record.base_row, record.base_place),
        ):
            chosen = slot_of_place[at] >= 0
            if chosen.any():
                if reader is None:
                    raise self._no_base()
                reader.submit(
                    {source: rows[chosen]}, out={source: out}, at={source: slot_of_place[at[chosen]]}
                ).result()

    def _no_base(self) -> CorruptionError:
        path, advice = self.compiled.pack.path, "pack the trace anew with --overwrite"
        return CorruptionError(
            path, None, "no rows of the base store, as its manifest says", "a record with some", advice
        )

    # One mini-batch, step by step; called by the walk's thread.

    def _ask_record(self, ahead: _Ahead) -> None:
        low, high = int(self._offsets[ahead.index]), int(self._offsets[ahead.index + 1])
        name = self.compiled.entry.records
        ahead.record = self._pack.submit_runs({name: [(low, high)]})

    def _record(self, index: int) -> tuple[list[TableRecord], NDArray[np.uint8]]:
        ahead = _Ahead(index)
        self._ask_record(ahead)
        return self._checked_record(ahead)

    def _checked_record(self, ahead: _Ahead) -> tuple[list[TableRecord], NDArray[np.uint8]]:
        assert ahead.record is not None
        name = self.compiled.entry.records
        data = ahead.record.result()[name]
        path = self.compiled.pack.path / self.compiled.pack.tables[name].entry.path
        tables, sample = decode_record(data, len(self._tables), path)
        for record, limits, (_, table) in zip(tables, self._limits, self._tables, strict=True):
            check_record(record, limits, path)
            if record.count > table.batch_rows_max:
                advice = "pack the trace anew with --overwrite"
                raise CorruptionError(
                    path, None, f"at most {table.batch_rows_max} rows", f"{record.count}", advice
                )
        return tables, sample

    def _ask_rows(self, ahead: _Ahead) -> None:
        """Decode the record and start the reads, each row to its place."""
        begin = time.perf_counter()
        ahead.tables, sample = self._checked_record(ahead)
        waited = time.perf_counter()
        packed: dict[str, list[Any]] = {}
        base: dict[str, list[Any]] = {}
        for number, ((name, table), record) in enumerate(zip(self._tables, ahead.tables, strict=True)):
            out = self._outputs[number].take(record.host_count * self.compiled.row_bytes(name))
            ahead.out.append(out)
            rows, first = self._rows(number, out), record.packed_first
            if len(record.packed_place):
                packed[table.packed] = [
                    np.arange(first, first + len(record.packed_place)),
                    rows,
                    record.packed_place,
                ]
            if len(record.shared_row):
                packed[table.shared] = [record.shared_row, rows, record.shared_place]
            if len(record.base_row):
                base[name] = [record.base_row, rows, record.base_place]
        for reader, wanted in ((self._pack, packed), (self._base, base)):
            if wanted:
                if reader is None:
                    raise self._no_base()
                ids, outs, places = ({n: v[i] for n, v in wanted.items()} for i in range(3))
                request = reader.submit(ids, out=outs, at=places)
                self.report_stages.reading(request)
                ahead.requests.append(request)
        decoding = time.perf_counter()
        ahead.sample = decode(sample)
        self.report_stages.add("graph", time.perf_counter() - decoding)
        self.report_stages.add("record wait", waited - begin)
        self.report_stages.add("plan", decoding - waited)

    def _assemble(self, ahead: _Ahead) -> None:
        """Wait for the reads, copy what is in memory, keep what stays."""
        begin = time.perf_counter()
        for request in ahead.requests:
            request.result()
        arrived = time.perf_counter()
        for number, record in enumerate(ahead.tables):
            row_bytes = self.compiled.row_bytes(self._tables[number][0])
            out, slots, held = (
                address_of(ahead.out[number]),
                address_of(self._slots[number]),
                self._maps[number],
            )
            move_rows(slots, held[record.hit_slot], out, record.hit_place, row_bytes)
            move_rows(out, record.admit_place, slots, held[record.admit_slot], row_bytes)
            move_rows(out, record.copy_from, out, record.copy_place, row_bytes)
            self.report_stages.rows(self._tables[number][0], record, row_bytes)
        self.report_stages.add("read wait", arrived - begin)
        self.report_stages.add("assemble", time.perf_counter() - arrived)

    def _finished(self, ahead: _Ahead) -> Any:
        """What the training loop gets."""
        begin = time.perf_counter()
        x: dict[str, Any] = {
            name: self._rows(number, ahead.out[number]) for number, (name, _) in enumerate(self._tables)
        }
        pyg = type(ahead.sample).__module__.startswith("torch_geometric.")
        if self._tensors or (self._tensors is None and (pyg or self._device is not None)):
            from featstore.base.tensors import as_tensor

            x = {name: as_tensor(rows) for name, rows in x.items()}
        if self._cache is not None:
            x = self._cache.complete(x, ahead.tables)
        self.report_stages.add("hand over", time.perf_counter() - begin)
        if pyg:
            from featstore.loaders.deliver import fill_pyg

            return fill_pyg(ahead.sample, x, self._device)
        return CompiledBatch(ahead.index, next(iter(x.values())) if len(x) == 1 else x, ahead.sample)

    # Ending.

    def _measured(self) -> LoaderReport:
        stats = [reader.stats() for reader in (self._pack, self._base) if reader is not None]
        forecast = self.compiled.forecast_seconds / max(1, self.compiled.entry.batches)
        return self.report_stages.report(stats, forecast)

    def close(self) -> None:
        self._closed = True
        readers = [r for r in (getattr(self, "_pack", None), getattr(self, "_base", None)) if r is not None]
        if os.getpid() == self._pid:  # in a forked child there is nothing under way
            with self._lock:
                if self._walk is not None:
                    self._walk.close()
                if self._report is None and hasattr(self, "_slots"):
                    self._report = self._measured()
        for reader in readers:
            reader.close()
        self._slots, self._outputs, self._cache = [], [], None

    def __repr__(self) -> str:
        return (
            f"<CompiledLoader of {len(self)} mini-batches of {str(self.compiled.pack.path)!r}, "
            f"{self.depth} at once>"
        )


class _Walk(Walk):
    """One round."""

    def __init__(self, loader: CompiledLoader, order: NDArray[np.int64]) -> None:
        super().__init__(loader.check_process, loader.report_stages, loader.depth, 1, "featstore-compiled")
        self._loader, self._order = loader, order

    def _go(self) -> None:
        loader = self._loader
        waiting = deque(_Ahead(int(index)) for index in self._order)
        asked: deque[_Ahead] = deque()  # records on their way
        under_way: deque[_Ahead] = deque()  # rows on their way

        def arrived() -> (
            bool
        ):  # the first can be assembled before there is room: the device is to have reads as long as it can
            return bool(under_way) and all(request.done() for request in under_way[0].requests)

        try:
            while waiting or asked or under_way:
                while waiting and len(asked) < 2:
                    loader._ask_record(waiting[0])
                    asked.append(waiting.popleft())
                while asked and self._take_room(arrived):
                    loader._ask_rows(asked[0])
                    for read in asked[0].requests:
                        read.add_done_callback(lambda _: self._changed.set())
                    under_way.append(asked.popleft())
                    if waiting:
                        loader._ask_record(waiting[0])
                        asked.append(waiting.popleft())
                if self._stop:
                    return
                done = under_way.popleft()
                loader._assemble(done)
                self._hand_over(loader._finished(done))
                del done  # the rows are the loop's now
        finally:
            for ahead in [*asked, *under_way]:  # they write into memory that goes with them
                for request in [ahead.record, *ahead.requests]:
                    if request is not None:
                        request.abandon()


class _DeviceRows:
    """Rows that are on the accelerator for good, and what brings the others beside them."""

    def __init__(self, loader: CompiledLoader, device: Any) -> None:
        from featstore.base.tensors import as_tensor, to_device

        self._device, self._to_device = device, to_device
        self._names = [name for name, _ in loader._tables]
        self._rows = {}
        for number, (name, table) in enumerate(loader._tables):
            count = loader._limits[number].device_slots
            rows = loader._pack.read_runs({table.device: [(0, count)]})[table.device]
            self._rows[name] = to_device(as_tensor(rows), device)

    def complete(self, x: dict[str, Any], records: list[TableRecord]) -> dict[str, Any]:
        """All rows of a mini-batch, on the device."""
        from featstore.loaders.deliver import merged

        done = {}
        for name, record in zip(self._names, records, strict=True):
            host = self._to_device(x[name], self._device)
            done[name] = host if record.host_count == record.count else merged(host, self._rows[name], record)
        return done
