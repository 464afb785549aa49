"""Partitions in memory as a tier over any source of their table's rows, and rows on devices over that.

Ids are rows of the table here, as they are for the reader below: partitions are runs of rows. A row whose
partition is in memory, or that is one of the hubs, is copied from where it lies; others come from below,
which mini-batches, drawn from what is in memory, never ask. So a device holds rows for longer than their
partition stays: one that comes back with a later mega-batch may be there still.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import check_out
from featstore.base.native import address_of
from featstore.base.rows import move_rows
from featstore.engine.request import Request, answered, chained
from featstore.errors import ArgumentError
from featstore.loaders.mega.partition_set import PartitionSet
from featstore.storage.store import Table
from featstore.tiers import RowSource
from featstore.tiers.over import OverSource
from featstore.tiers.static_tier import new_rows
from featstore.tiers.tickets import BufferStats

if TYPE_CHECKING:
    from featstore.tiers.device_tier import Device, DeviceTier

_PARTITION_BYTES = 24  # where each begins, on disk and in memory
_HUB_BYTES = 24  # its row, in two orders, and its place


class ResidentTier(OverSource):
    """The rows of a mega-batch over ``below``. One thread asks for them, and says what is held.

    Args:
        below: gives rows of ``table`` by row.
        offsets: int64 [partitions + 1], the first row of each partition.
        hub_rows: rows of the hubs, which have the first places of each mega-batch.
    """

    name = "partitions"

    def __init__(
        self, below: RowSource, table: Table, offsets: NDArray[np.int64], hub_rows: NDArray[Any]
    ) -> None:
        super().__init__(below)
        self._table, self._offsets = table, offsets
        self._hubs = hub_rows.astype(np.int64)
        self._hub_local = np.argsort(self._hubs).astype(np.int32)
        self._hub_sorted = self._hubs[self._hub_local]
        self._start_of = np.full(len(offsets) - 1, -1, np.int64)  # of each partition, its first local id
        self._starts = self._firsts = np.empty(
            0, np.int64
        )  # of those in memory, by local id: this, and its row
        self._x = np.empty((0, *table.row_shape), dtype_from_name(table.entry.dtype))
        self._hits = 0

    @staticmethod
    def table_bytes(partitions: int, hubs: int) -> int:
        """Memory that it takes beside the rows."""
        return _PARTITION_BYTES * partitions + _HUB_BYTES * hubs

    @property
    def tables(self) -> list[str]:
        return [self._table.name]

    @property
    def memory_bytes(self) -> int:
        """Rows in memory and where they are; a loader's budget counts the rows as what they are, its own."""
        return self._x.nbytes + self.table_bytes(len(self._start_of), len(self._hubs))

    def hold(self, mega: PartitionSet) -> None:
        """These are in memory from now on, and those before are not."""
        self._start_of[:] = -1
        self._start_of[mega.partitions] = mega.starts
        by_start = np.argsort(mega.starts)
        self._starts, self._firsts = mega.starts[by_start], self._offsets[mega.partitions[by_start]]
        self._x = mega.x

    def rows_of(self, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n], the rows that have these places of the mega-batch: a hub that is also there with its
        partition is one row."""
        rows, hubs = np.empty(len(local), np.int64), local < len(self._hubs)
        rows[hubs] = self._hubs[local[hubs]]
        others = local[~hubs]
        slot = np.searchsorted(self._starts, others, side="right") - 1
        rows[~hubs] = others - self._starts[slot] + self._firsts[slot]
        return rows

    def _local(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32 [n], a place of each of these rows, -1 where it is not in memory."""
        partition = np.searchsorted(self._offsets, rows, side="right") - 1
        start = self._start_of[partition]
        local: NDArray[np.int32] = np.where(start < 0, -1, start + rows - self._offsets[partition]).astype(
            np.int32
        )
        if len(self._hubs) and len(self._x):
            at = np.minimum(np.searchsorted(self._hub_sorted, rows), len(self._hubs) - 1)
            hubs = (local < 0) & (self._hub_sorted[at] == rows)
            local[hubs] = self._hub_local[at[hubs]]
        return local

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        name, (wanted,) = self._table.name, ids.values()
        local, rows = self._local(wanted), filled[name]
        here = local >= 0
        to = np.arange(len(wanted), dtype=np.int32) if at is None else at[name]
        raw = check_out(rows, (len(rows), *self._table.row_shape), self._x.dtype)
        move_rows(address_of(self._x), local[here], address_of(raw), to[here], self._table.row_bytes)
        self._hits += int(here.sum())
        if here.all():
            return answered(filled)
        below = self._below.submit({name: wanted[~here]}, out={name: rows}, at={name: to[~here]})
        return chained(below, lambda: filled)

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._local(ids) >= 0

    def hits(self) -> int:
        return self._hits

    def close(self) -> None:
        self._closed = True
        self._x = self._x[:0]


class OnDevices:
    """What mini-batches of partitions are gathered from where a device keeps rows: a device tier over
    ``resident``, in the host memory that :meth:`host_bytes` says."""

    def __init__(self, device: Device, resident: ResidentTier, table: Table) -> None:
        self.resident, self._table = resident, table
        tier = device.over(resident, device.host_bytes([table]))
        self._tier: DeviceTier = tier  # type: ignore[assignment]

    @staticmethod
    def host_bytes(device: Device, table: Table, hubs: int) -> int:
        """Host memory that it takes: slot maps, rows on their way, and where rows of partitions are."""
        return device.host_bytes([table]) + ResidentTier.table_bytes(len(table.partition_offsets), hubs)

    def gather(self, local: NDArray[np.int64]) -> Any:
        """The rows at these places of the mega-batch, a tensor [n, *row shape] on the first device. Raises
        what devices raise."""
        request = self._tier.submit({self._table.name: self.resident.rows_of(local)}, out=None)
        return request.result()[self._table.name]

    def stats(self) -> Mapping[str, BufferStats]:
        """What the devices have counted, by table."""
        return self._tier.stats()

    def close(self) -> None:
        """Let go of the devices' rows. May be called more than once."""
        self._tier.close()
        self.resident.close()


def device_of(device: Any, memory: int | str | None, policy: str | None) -> Device | None:
    """The rows to keep on devices, as a loader's options say; None where there are to be none. Raises
    ArgumentError for options that contradict each other."""
    if memory is None:
        if policy is not None:
            raise ArgumentError("device_policy= is of rows kept on a device: say in how much device_memory=")
        return None
    if device is None:
        raise ArgumentError("device_memory= keeps rows on a device: say on which, with device=")
    from featstore.tiers.device_tier import Device

    return Device(device, memory, **({} if policy is None else {"policy": policy}))
