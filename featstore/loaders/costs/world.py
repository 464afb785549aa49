"""What the costs of every mode follow from: the mini-batches that were looked at, the tables, the budgets,
and what the device and the cores of this machine take."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.hashing import mix64
from featstore.base.system import available_cores
from featstore.loaders.costs.hits import Uses
from featstore.loaders.costs.prices import Prices, measured
from featstore.loaders.costs.seen import Looked
from featstore.loaders.shares import MemoryShares
from featstore.plan.budget import TableNeed, own_bytes
from featstore.plan.cost import DeviceModel
from featstore.reader.lookup import table_need
from featstore.reader.reader import Reader

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, Table

_PLANNED = 16  # mini-batches whose reads are planned
_COPIED_BYTES = 32 << 20
_BUSY = 0.85  # of cores that bind: stages hand over to each other. Online and rolling loading: 0.82 to 0.88


@dataclass(frozen=True)
class Scattered:
    """Reads of rows of a table that lie anywhere, of one mini-batch."""

    reads: float
    bytes_read: float


@dataclass(frozen=True)
class World:
    """See the module's text.

    ``shares``: of a loader's memory. ``disk_bytes``: the limit that was given, None
    for none. ``free_bytes``: that the disk has. ``train_seconds``: of a step, 0 where nobody said.
    """

    store: OpenStore
    seen: Looked
    shares: MemoryShares
    disk_bytes: int | None
    free_bytes: int
    train_seconds: float
    reading: Mapping[str, Any]

    @property
    def memory_bytes(self) -> int:
        """Of a loader, without the sampler's share."""
        return self.shares.rows_bytes

    @property
    def batches(self) -> int:
        """Mini-batches of an epoch."""
        return self.seen.epoch_batches

    @cached_property
    def tables(self) -> dict[str, Table]:
        return {name: self.store.table(name) for name in self.seen.ids}

    @cached_property
    def uses(self) -> dict[str, Uses]:
        """By table."""
        seen = self.seen.ids.items()
        return {name: Uses.of(ids, self.batches, self.tables[name].rows) for name, ids in seen}

    @property
    def asked_bytes(self) -> float:
        """Bytes of the rows of a mini-batch."""
        return sum(self.seen.mean_asked(n) * t.row_bytes for n, t in self.tables.items())

    @cached_property
    def model(self) -> DeviceModel:
        """Of the device and engine that would read."""
        with self._reader() as reader:
            return reader.model

    @property
    def _needs(self) -> list[TableNeed]:
        return [table_need(t, self.reading["verify"], by_row=False) for t in self.tables.values()]

    def _reader(self, memory_bytes: int | None = None) -> Reader:
        """In so much memory; by default in as much as a loader's, so that its reads are as long."""
        memory = own_bytes(self.memory_bytes, self._needs) if memory_bytes is None else memory_bytes
        return Reader(
            self.store, tables=list(self.tables), memory=memory, static=None, static_memory=0, **self.reading
        )

    @cached_property
    def prices(self) -> Prices:
        """Of reads, as the table with the most bytes has them."""
        return self.prices_in(None)

    def prices_in(self, memory_bytes: int | None) -> Prices:
        """The same of a reader with other memory, whose reads are of other lengths."""
        name = max(self.tables, key=lambda n: self.seen.mean_asked(n) * self.tables[n].row_bytes)
        with self._reader(memory_bytes) as reader:
            return measured(reader, self.tables[name], [ids for ids in self.seen.ids[name] if len(ids)])

    def prices_beside(self, beside_bytes: int | None) -> Prices:
        """The same of a reader that has so much for staging and planning; by default what a loader's has."""
        if beside_bytes is None:
            return self.prices
        return self.prices_in(own_bytes(0, self._needs, beside_bytes))

    def busy(self, reads: float, bytes_read: float) -> float:
        """Seconds of the device."""
        return self.prices.busy(reads, bytes_read)

    def written(self, bytes_written: float) -> float:
        """Seconds of the device."""
        return bytes_written * self.model.written_byte_seconds

    def scattered(self, table: str, share: float, beside_bytes: int | None = None) -> Scattered:
        """Reads of the ``share`` of a mini-batch's rows that is wanted least often; of a reader that has
        ``beside_bytes`` for staging and planning, by default what a loader's has."""
        if share <= 0:
            return Scattered(0, 0)
        names, uses = np.unique(np.concatenate(self.seen.ids[table]), return_counts=True)
        reads = bytes_read = 0
        some = self.seen.ids[table][:: -(-self.seen.batches // _PLANNED)]
        memory = None if beside_bytes is None else own_bytes(0, self._needs, beside_bytes)
        with self._reader(memory) as reader:
            for ids in some:
                plan = reader.plan({table: _least_used(ids, names, uses, share)})
                reads, bytes_read = reads + plan.reads, bytes_read + plan.bytes_read
        return Scattered(reads / len(some), bytes_read / len(some))

    @cached_property
    def copy_byte_seconds(self) -> float:
        """Of a core, for a byte of rows that is copied from anywhere in memory."""
        row_bytes = max(t.row_bytes for t in self.tables.values())
        rows = np.ones((max(1, _COPIED_BYTES // row_bytes), row_bytes), np.uint8)
        picked = np.random.default_rng(0).permutation(len(rows))[: max(1, len(rows) // 2)]
        out = np.ones((len(picked), row_bytes), np.uint8)
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            np.take(rows, picked, axis=0, out=out, mode="clip")
            times.append(time.perf_counter() - begin)
        return min(times) / out.nbytes

    @property
    def sampling_device(self) -> float:
        """Seconds of the device for an epoch's sampling, which shares it with all else that reads: what
        sampling waited for. 0 where mini-batches are given: nobody knows what they wait for."""
        waited = self.seen.batch_seconds - self.seen.batch_cpu_seconds
        return self.batches * max(0.0, waited) if self.shares.graph_bytes else 0.0

    @property
    def handing_seconds(self) -> float:
        """Of a core, for an epoch's mini-batches whatever their size: their requests, and what threads tell
        each other."""
        return self.batches * HANDED_REQUESTS * self.prices.request_cpu_seconds

    def epoch(self, stages: Mapping[str, float], cores: float, device: float) -> float:
        """Seconds of an epoch whose stages work beside each other, and ask so many seconds of the cores and
        of the device. A training step is on these cores, too, unless it is elsewhere: then it is little of
        them that it takes."""
        return max(*stages.values(), cores / (_BUSY * available_cores()), device)

    def whole_memory(self, needed_bytes: int) -> int:
        """The smallest ``memory=`` of which a loader gets so many bytes beside a sampler's share."""
        shares = self.shares
        if not shares.graph_bytes:
            return needed_bytes
        return max(shares.memory_for_rows(needed_bytes), shares.memory_for_sampler(shares.least_bytes))


HANDED_REQUESTS = 4  # that cost as much as handing a mini-batch through a loader


def _least_used(
    ids: NDArray[np.int64], names: NDArray[np.int64], uses: NDArray[np.int64], share: float
) -> NDArray[np.int64]:
    """The share of the ids that is used least often; of equals, those that a hash says."""
    order = np.lexsort((mix64(ids.astype(np.uint64)), uses[np.searchsorted(names, ids)]))
    return np.sort(ids[order[: round(share * len(ids))]])
