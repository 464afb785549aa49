"""Assembling a compiled trace's mini-batches: from records and rows, on disk and in memory, to what the
training loop gets."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import ALIGNMENT, Outputs, aligned_buffer
from featstore.compile.budget import read_together
from featstore.layout.records import TableRecord
from featstore.loaders.batch import Batch, filled, ids_of, wants_tensors
from featstore.loaders.compiled.report import CompiledStages
from featstore.loaders.compiled.slots import ResidentSlots
from featstore.loaders.compiled.sources import CompiledSources, Record, TablePart, none_goes_on
from featstore.trace.sample_decoder import decode
from featstore.trace.told_ids import RECORDED_IDS, has_recorded_ids

_STAGED_BYTES = 16 << 20  # of rows for a device, in host memory at once

if TYPE_CHECKING:
    from featstore.engine.request import Request


class Member:
    """A mini-batch of a group: its number and record, the bytes of its rows by table, and its sample."""

    def __init__(self, index: int, record: Record) -> None:
        self.index = index
        self.tables, self._sample = record
        self.sample: Any = None
        self.out: list[NDArray[np.uint8]] = []

    def decode(self) -> None:
        self.sample = decode(self._sample)


class Pending:
    """Mini-batches that are read together, on their way from when their records are asked for."""

    def __init__(self, indices: Sequence[int], records: Request) -> None:
        self.indices, self.records = indices, records
        self.requests: list[Request] = []
        self.members: list[Member] = []

    def arrived(self) -> bool:
        """Whether all of the rows that are read are there."""
        return all(request.done() for request in self.requests)

    def abandon(self) -> None:
        """Nothing writes into its memory any more."""
        for request in [self.records, *self.requests]:
            request.abandon()


class Assembly:
    """The steps of a group of mini-batches, in the order in which a loader's thread takes them. At most
    ``depth`` mini-batches exist at once; ``device`` and ``tensors`` as for the loader."""

    def __init__(
        self, sources: CompiledSources, slots: ResidentSlots, stages: CompiledStages, depth: int,
        device: Any, tensors: bool | None,
    ) -> None:  # fmt: skip
        self._sources, self._slots, self._stages = sources, slots, stages
        self._device, self._tensors = device, tensors
        group = read_together(depth)
        # a mini-batch's rows begin aligned, where several lie in one piece of memory
        self._step = [math.lcm(ALIGNMENT, row_bytes) // row_bytes for row_bytes in sources.row_bytes]
        self._device_rows = None if device is None else _DeviceRows(sources, device)
        self.transfer = None if self._device_rows is None else self._device_rows.transfer
        memory = aligned_buffer if self.transfer is None else self.transfer.memory
        self._outputs = [
            Outputs(group * self._stepped(n, table.batch_rows_max, group) * row_bytes, depth // group, memory)
            for n, ((_, table), row_bytes) in enumerate(zip(sources.tables, sources.row_bytes, strict=True))
        ]

    def _stepped(self, number: int, rows: int, group: int) -> int:
        """Rows of a table that a mini-batch takes up in a group of so many."""
        return rows if group == 1 else -(-rows // self._step[number]) * self._step[number]

    def begin(self, indices: Sequence[int]) -> Pending:
        """Ask for mini-batches' records."""
        return Pending(indices, self._sources.submit_records(indices))

    def decode(self, group: Pending) -> None:
        """Wait for the records, and look at them."""
        begin = time.perf_counter()
        group.records.exception()  # waits
        waited = time.perf_counter()
        found = self._sources.records(group.indices, group.records)
        group.members = [Member(*one) for one in zip(group.indices, found, strict=True)]
        self._stages.add("record wait", waited - begin)
        self._stages.add("plan", time.perf_counter() - waited)

    def submit_rows(self, group: Pending) -> None:
        """Start the reads, each row to its place."""
        begin = time.perf_counter()
        parts = []
        for number, row_bytes in enumerate(self._sources.row_bytes):
            records = [member.tables[number] for member in group.members]
            ends = np.cumsum([self._stepped(number, r.host_count, len(records)) for r in records]).tolist()
            out = self._outputs[number].take(ends[-1] * row_bytes)
            rows = self._sources.shaped(number, out)
            for member, record, first in zip(group.members, records, [0, *ends], strict=False):
                member.out.append(out[first * row_bytes : (first + record.host_count) * row_bytes])
                parts.append(TablePart(number, record, rows, first))
        group.requests = self._sources.submit(parts)
        for request in group.requests:
            self._stages.reading(request)
        decoding = time.perf_counter()
        for member in group.members:
            member.decode()
        self._stages.add("graph", time.perf_counter() - decoding)
        self._stages.add("plan", decoding - begin)

    def wait(self, group: Pending) -> None:
        """Wait for the reads."""
        begin = time.perf_counter()
        with none_goes_on(group.requests):
            for request in group.requests:
                request.result()
        self._stages.add("read wait", time.perf_counter() - begin)

    def assemble(self, done: Member) -> None:
        """Copy what is in memory, keep what stays."""
        begin = time.perf_counter()
        for number, record in enumerate(done.tables):
            self._slots.exchange(number, record, done.out[number])
            self._stages.rows(self._sources.tables[number][0], record, self._sources.row_bytes[number])
        self._stages.add("assemble", time.perf_counter() - begin)

    def finished(self, done: Member) -> Any:
        """What the training loop gets."""
        begin = time.perf_counter()
        x: dict[str, Any] = {
            name: self._sources.shaped(number, done.out[number])
            for number, (name, _) in enumerate(self._sources.tables)
        }
        told = has_recorded_ids(done.sample)
        ids = done.sample[RECORDED_IDS] if told else ids_of(done.sample)
        sample = done.sample["sample"] if told else done.sample
        if wants_tensors(self._tensors, sample, self._device):
            from featstore.base.tensors import as_tensor

            x = {name: as_tensor(rows) for name, rows in x.items()}
        if self._device_rows is not None:
            x = self._device_rows.complete(x, done.tables)
        self._stages.add("hand over", time.perf_counter() - begin)
        rows = next(iter(x.values())) if len(x) == 1 else x
        return filled(Batch(done.index, ids, rows, sample, told=told), x, self._device)

    def close(self) -> None:
        """Wait for copies to a device that are under way."""
        if self.transfer is not None:
            self.transfer.close()


class _DeviceRows:
    """Rows that are on the accelerator for good, and what brings the others beside them."""

    def __init__(self, sources: CompiledSources, device: Any) -> None:
        import torch

        from featstore.base.tensors import as_tensor
        from featstore.base.transfers import Transfer

        self.transfer = Transfer(device)
        self._rows: dict[str, Any] = {}
        each = zip(sources.tables, sources.limits, sources.row_bytes, strict=True)
        for (name, table), limits, row_bytes in each:
            count, run = limits.device_slots, max(1, _STAGED_BYTES // row_bytes)
            for low in range(0, max(1, count), run):
                high = min(count, low + run)
                rows = as_tensor(sources.pack.read_runs({table.device: [(low, high)]})[table.device])
                with self.transfer.within():  # where they are read
                    if low == 0:
                        shape = (count, *rows.shape[1:])
                        self._rows[name] = torch.empty(shape, dtype=rows.dtype, device=device)
                    self._rows[name][low:high] = rows.to(device)

    def complete(self, x: dict[str, Any], records: list[TableRecord]) -> dict[str, Any]:
        """All rows of a mini-batch, on the device."""
        from featstore.loaders.deliver import merged

        done, there = {}, self.transfer(x)
        for (name, resident), record in zip(self._rows.items(), records, strict=True):
            host = there[name]
            done[name] = host if record.host_count == record.count else merged(host, resident, record)
        return done
