"""Assembling a compiled trace's mini-batches: from records and rows, on disk and in memory, to what the
training loop gets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import Outputs
from featstore.layout.records import TableRecord
from featstore.loaders.batch import Batch, ids_of
from featstore.loaders.compiled.report import CompiledStages
from featstore.loaders.compiled.slots import ResidentSlots
from featstore.loaders.compiled.sources import CompiledSources, TablePart
from featstore.trace.sample_decoder import decode

if TYPE_CHECKING:
    from featstore.engine.request import Request


class Pending:
    """A mini-batch on its way, from when its record is asked for."""

    def __init__(self, index: int, record: Request) -> None:
        self.index, self.record = index, record
        self.requests: list[Request] = []
        self.tables: list[TableRecord] = []
        self.sample: Any = None
        self.out: list[NDArray[np.uint8]] = []

    def arrived(self) -> bool:
        """Whether all of its rows that are read are there."""
        return all(request.done() for request in self.requests)

    def abandon(self) -> None:
        """Nothing writes into its memory any more."""
        for request in [self.record, *self.requests]:
            request.abandon()


class Assembly:
    """The steps of a mini-batch, in the order in which a loader's thread takes them. At most ``depth``
    mini-batches exist at once; ``device`` and ``tensors`` as for the loader."""

    def __init__(
        self, sources: CompiledSources, slots: ResidentSlots, stages: CompiledStages, depth: int,
        device: Any, tensors: bool | None,
    ) -> None:  # fmt: skip
        self._sources, self._slots, self._stages = sources, slots, stages
        self._device, self._tensors = device, tensors
        self._outputs = [
            Outputs(table.batch_rows_max * row_bytes, depth)
            for (_, table), row_bytes in zip(sources.tables, sources.row_bytes, strict=True)
        ]
        self._device_rows = None if device is None else _DeviceRows(sources, device)

    def begin(self, index: int) -> Pending:
        """Ask for a mini-batch's record."""
        return Pending(index, self._sources.submit_record(index))

    def submit_rows(self, pending: Pending) -> None:
        """Decode the record and start the reads, each row to its place."""
        begin = time.perf_counter()
        pending.tables, sample = self._sources.record(pending.record)
        waited = time.perf_counter()
        parts = []
        for number, record in enumerate(pending.tables):
            out = self._outputs[number].take(record.host_count * self._sources.row_bytes[number])
            pending.out.append(out)
            parts.append(TablePart(number, record, self._sources.shaped(number, out)))
        pending.requests = self._sources.submit(parts)
        for request in pending.requests:
            self._stages.reading(request)
        decoding = time.perf_counter()
        pending.sample = decode(sample)
        self._stages.add("graph", time.perf_counter() - decoding)
        self._stages.add("record wait", waited - begin)
        self._stages.add("plan", decoding - waited)

    def assemble(self, pending: Pending) -> None:
        """Wait for the reads, copy what is in memory, keep what stays."""
        begin = time.perf_counter()
        for request in pending.requests:
            request.result()
        arrived = time.perf_counter()
        for number, record in enumerate(pending.tables):
            out, row_bytes = pending.out[number], self._sources.row_bytes[number]
            self._slots.exchange(number, record, out)
            self._stages.rows(self._sources.tables[number][0], record, row_bytes)
        self._stages.add("read wait", arrived - begin)
        self._stages.add("assemble", time.perf_counter() - arrived)

    def finished(self, pending: Pending) -> Any:
        """What the training loop gets."""
        begin = time.perf_counter()
        x: dict[str, Any] = {
            name: self._sources.shaped(number, pending.out[number])
            for number, (name, _) in enumerate(self._sources.tables)
        }
        pyg = type(pending.sample).__module__.startswith("torch_geometric.")
        if self._tensors or (self._tensors is None and (pyg or self._device is not None)):
            from featstore.base.tensors import as_tensor

            x = {name: as_tensor(rows) for name, rows in x.items()}
        if self._device_rows is not None:
            x = self._device_rows.complete(x, pending.tables)
        self._stages.add("hand over", time.perf_counter() - begin)
        if pyg:
            from featstore.loaders.deliver import fill_pyg

            return fill_pyg(pending.sample, x, self._device)
        rows = next(iter(x.values())) if len(x) == 1 else x
        return Batch(pending.index, ids_of(pending.sample), rows, pending.sample)


class _DeviceRows:
    """Rows that are on the accelerator for good, and what brings the others beside them."""

    def __init__(self, sources: CompiledSources, device: Any) -> None:
        from featstore.base.tensors import as_tensor, to_device

        self._device, self._to_device = device, to_device
        self._rows = {}
        for (name, table), limits in zip(sources.tables, sources.limits, strict=True):
            rows = sources.pack.read_runs({table.device: [(0, limits.device_slots)]})[table.device]
            self._rows[name] = to_device(as_tensor(rows), device)

    def complete(self, x: dict[str, Any], records: list[TableRecord]) -> dict[str, Any]:
        """All rows of a mini-batch, on the device."""
        from featstore.loaders.deliver import merged

        done = {}
        for (name, resident), record in zip(self._rows.items(), records, strict=True):
            host = self._to_device(x[name], self._device)
            done[name] = host if record.host_count == record.count else merged(host, resident, record)
        return done
