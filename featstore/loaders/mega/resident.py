"""Partitions in memory as a tier over any source of their tables' rows, and rows on devices over that.

Ids are rows of a table here, as they are for the reader below: partitions are runs of rows. A row whose
partition is in memory, or that is one of the hubs, is copied from where it lies; others come from below,
which mini-batches, drawn from what is in memory, never ask. So a device holds rows for longer than their
partition stays: one that comes back with a later mega-batch may be there still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import check_out
from featstore.base.native import address_of
from featstore.base.rows import move_rows
from featstore.engine.request import Request, answered, chained
from featstore.errors import ArgumentError
from featstore.loaders.mega.partition_set import PartitionSet, ResidentRows
from featstore.loaders.mega.parts import Hubs, Parts
from featstore.storage.store import Table
from featstore.tiers import RowSource
from featstore.tiers.over import OverSource
from featstore.tiers.static_tier import new_rows
from featstore.tiers.tickets import BufferStats

if TYPE_CHECKING:
    from featstore.tiers.device_tier import Device, DeviceTier

_PARTITION_BYTES = 24  # where each begins, on disk and in memory
_HUB_BYTES = 24  # its row, in two orders, and its place


class _OfTable:
    """Where the rows of one table are in memory; ``hub_rows`` have the first places of each mega-batch."""

    def __init__(self, table: Table, hub_rows: NDArray[Any]) -> None:
        self.table, self._offsets = table, table.partition_offsets
        self._hubs = hub_rows.astype(np.int64)
        self._hub_local = np.argsort(self._hubs).astype(np.int32)
        self._hub_sorted = self._hubs[self._hub_local]
        # Of each partition, its first local id; of those in memory, by local id: this, and its row.
        self._start_of = np.full(len(self._offsets) - 1, -1, np.int64)
        self._starts = self._firsts = np.empty(0, np.int64)
        self.x = np.empty((0, *table.row_shape), dtype_from_name(table.entry.dtype))

    @property
    def memory_bytes(self) -> int:
        """Rows in memory and where they are."""
        return self.x.nbytes + ResidentTier.table_bytes(len(self._start_of), len(self._hubs))

    def hold(self, partitions: NDArray[np.int64], rows: ResidentRows) -> None:
        """These partitions are in memory from now on, and those before are not."""
        assert rows.x is not None
        self._start_of[:] = -1
        self._start_of[partitions] = rows.starts
        by_start = np.argsort(rows.starts)
        self._starts, self._firsts = rows.starts[by_start], self._offsets[partitions[by_start]]
        self.x = rows.x

    def rows_of(self, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n], the rows that have these places of the mega-batch: a hub that is also there with its
        partition is one row."""
        rows, hubs = np.empty(len(local), np.int64), local < len(self._hubs)
        rows[hubs] = self._hubs[local[hubs]]
        others = local[~hubs]
        slot = np.searchsorted(self._starts, others, side="right") - 1
        rows[~hubs] = others - self._starts[slot] + self._firsts[slot]
        return rows

    def local(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32 [n], a place of each of these rows, -1 where it is not in memory."""
        partition = np.searchsorted(self._offsets, rows, side="right") - 1
        start = self._start_of[partition]
        local: NDArray[np.int32] = np.where(start < 0, -1, start + rows - self._offsets[partition]).astype(
            np.int32
        )
        if len(self._hubs) and len(self.x):
            at = np.minimum(np.searchsorted(self._hub_sorted, rows), len(self._hubs) - 1)
            hubs = (local < 0) & (self._hub_sorted[at] == rows)
            local[hubs] = self._hub_local[at[hubs]]
        return local


class ResidentTier(OverSource):
    """The rows of a mega-batch over ``below``. One thread asks for them, and says what is held.

    Args:
        below: gives rows of these tables by row.
        tables: each with the rows of its hubs, which have the first places of each mega-batch.
    """

    name = "partitions"

    def __init__(self, below: RowSource, tables: Sequence[tuple[Table, NDArray[Any]]]) -> None:
        super().__init__(below)
        self._of = {table.name: _OfTable(table, hub_rows) for table, hub_rows in tables}
        self._hits = 0

    @staticmethod
    def table_bytes(partitions: int, hubs: int) -> int:
        """Memory that it takes beside the rows of a table."""
        return _PARTITION_BYTES * partitions + _HUB_BYTES * hubs

    @property
    def tables(self) -> list[str]:
        return list(self._of)

    @property
    def memory_bytes(self) -> int:
        """Rows in memory and where they are; a loader's budget counts the rows as what they are, its own."""
        return sum(one.memory_bytes for one in self._of.values())

    def hold(self, mega: PartitionSet) -> None:
        """These are in memory from now on, and those before are not."""
        for name, one in self._of.items():
            one.hold(mega.partitions, mega.rows[name])

    def rows_of(self, table: str, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n], the rows of a table that have these places of the mega-batch: a hub that is also there
        with its partition is one row."""
        return self._of[table].rows_of(local)

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        missing: dict[str, tuple[Any, Any]] = {}
        for name, wanted in ids.items():
            of, rows = self._of[name], filled[name]
            local = of.local(wanted)
            here = local >= 0
            to = np.arange(len(wanted), dtype=np.int32) if at is None else at[name]
            raw = check_out(rows, (len(rows), *of.table.row_shape), of.x.dtype)
            move_rows(address_of(of.x), local[here], address_of(raw), to[here], of.table.row_bytes)
            self._hits += int(here.sum())
            if not here.all():
                missing[name] = wanted[~here], to[~here]
        if not missing:
            return answered(filled)
        below = self._below.submit(
            {name: wanted for name, (wanted, _) in missing.items()},
            out={name: filled[name] for name in missing}, at={name: to for name, (_, to) in missing.items()},
        )  # fmt: skip
        return chained(below, lambda: filled)

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._of[table].local(ids) >= 0

    def hits(self) -> int:
        return self._hits

    def close(self) -> None:
        self._closed = True
        for one in self._of.values():
            one.x = one.x[:0]


class OnDevices:
    """What mini-batches of partitions are gathered from where a device keeps rows: a device tier over
    ``resident``, in the host memory that :meth:`host_bytes` says."""

    def __init__(self, device: Device, resident: ResidentTier, tables: Sequence[Table]) -> None:
        self.resident = resident
        tier = device.over(resident, device.host_bytes(tables))
        self._tier: DeviceTier = tier  # type: ignore[assignment]

    @staticmethod
    def host_bytes(device: Device, parts: Parts) -> int:
        """Host memory that it takes: slot maps, rows on their way, and where rows of partitions are."""
        hubs = Hubs(parts).most
        tables = [table for name, table in parts.tables.items() if parts.row_bytes(name)]
        places = [ResidentTier.table_bytes(len(one.partition_offsets), hubs[one.name]) for one in tables]
        return device.host_bytes(tables) + sum(places)

    def gather(self, local: Mapping[str, NDArray[np.int64]]) -> dict[str, Any]:
        """The rows at these places of the mega-batch, by table, tensors [n, *row shape] on the first device.
        Raises what devices raise."""
        rows = {name: self.resident.rows_of(name, local[name]) for name in self.resident.tables}
        found: dict[str, Any] = self._tier.submit(rows, out=None).result()
        return found

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
