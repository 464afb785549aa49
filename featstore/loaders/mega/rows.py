"""The nodes of one table in mega-batches: where they are on disk and in memory, and which are hubs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import populate
from featstore.base.dtypes import node_dtype
from featstore.loaders.mega.features import SlotRows
from featstore.loaders.mega.induce import Places
from featstore.loaders.mega.partition_set import ResidentRows
from featstore.loaders.mega.schedule import Step
from featstore.loaders.mega.sizes import RowNeeds, Sizes

_COUNTED_ROWS = 1 << 20  # whose steps are counted together

if TYPE_CHECKING:
    from featstore.reader.reader import Reader
    from featstore.storage.store import Table


class TableRows:
    """The rows of ``table``, of which ``hub_rows`` stay in memory. ``has_features``: rows are loaded.
    ``node_ids``: [rows], by what other ids its nodes are called in mini-batches, or None. ``place_bytes``: of
    each place of a mega-batch what else is known of its node."""

    def __init__(
        self, table: Table, hub_rows: NDArray[Any], has_features: bool, node_ids: NDArray[Any] | None,
        place_bytes: int,
    ) -> None:  # fmt: skip
        self.table, self.hub_rows, self.has_features = table, hub_rows, has_features
        self.offsets, self._place_bytes = table.partition_offsets, place_bytes
        maps = table.maps()
        self._node_of_row = None if maps is None else maps[1]
        self.node_dtype = node_dtype(table.rows)
        if node_ids is not None:
            self._node_of_row = node_ids if maps is None else node_ids[maps[1]]
            self.node_dtype = node_ids.dtype
        self._hub_partitions = np.searchsorted(self.offsets, hub_rows, side="right") - 1
        self.places = Places(self.offsets, hub_rows)
        self.slot_rows = 0
        self.x: NDArray[Any] | None = None

    @property
    def hubs(self) -> int:
        return len(self.hub_rows)

    @property
    def held_bytes(self) -> int:
        """What is held of it for good, beside what follows from :meth:`needs`."""
        return 0 if self._node_of_row is None else self._node_of_row.nbytes

    def needs(self) -> RowNeeds:
        """What the sizes of buffers follow from."""
        row_bytes = self.table.row_bytes if self.has_features else 0
        place_bytes = self.node_dtype.itemsize + self._place_bytes
        return RowNeeds(self.table.rows, row_bytes, place_bytes, np.diff(self.offsets), self.hubs)

    def allocate(self, sizes: Sizes, reader: Reader) -> None:
        """Make the buffers, and bring the hubs into theirs."""
        self.slot_rows = sizes.slot_rows[self.table.name]
        places = self.hubs + sizes.slots * self.slot_rows
        self._node = np.full(places, -1, self.node_dtype)
        if self.has_features:
            self.x = np.empty((places, *self.table.row_shape), self.table.dtype)
            populate(self.x.reshape(-1).view(np.uint8))
        if self.hubs:
            if self.x is not None:
                reader.read({self.table.name: self.hub_rows}, out={self.table.name: self.x[: self.hubs]})
            self._node[: self.hubs] = (
                self.hub_rows if self._node_of_row is None else self._node_of_row[self.hub_rows]
            )

    def hubs_away(self, step: Step) -> NDArray[np.bool_]:
        """bool [hubs]: those whose partition is not in memory."""
        return ~np.isin(self._hub_partitions, step.partitions)

    def runs(self, partitions: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n, 2], the rows of these partitions, from and to."""
        return np.stack([self.offsets[partitions], self.offsets[partitions + 1]], axis=1)

    def starts(self, step: Step) -> NDArray[np.int64]:
        """int64 [n], the local ids at which a step's partitions begin."""
        starts: NDArray[np.int64] = self.hubs + step.slots * self.slot_rows
        return starts

    def wanted(self, step: Step, fresh: NDArray[np.bool_]) -> list[SlotRows]:
        """The rows of a step's ``fresh`` partitions, for their slots."""
        if self.x is None:
            return []
        runs = self.runs(step.partitions)[fresh]
        return [SlotRows(self.table.name, self.x, runs, self.starts(step)[fresh])]

    def name_rows(self, step: Step, fresh: NDArray[np.bool_]) -> None:
        """Say which nodes are in the slots of a step's ``fresh`` partitions."""
        runs = self.runs(step.partitions)[fresh]
        for (low, high), start in zip(runs.tolist(), self.starts(step)[fresh].tolist(), strict=True):
            slot = self._node[start : start + self.slot_rows]
            slot[: high - low] = (
                np.arange(low, high) if self._node_of_row is None else self._node_of_row[low:high]
            )
            slot[high - low :] = -1

    def resident(self, step: Step) -> ResidentRows:
        """What of it is in memory when a step's partitions are."""
        starts, runs = self.starts(step), self.runs(step.partitions)
        here = ~self.hubs_away(step)
        base = np.zeros(len(self.offsets) - 1, np.int64)
        base[step.partitions] = starts - self.offsets[step.partitions]
        copies: NDArray[np.int64] = base[self._hub_partitions[here]] + self.hub_rows[here]
        lengths = runs[:, 1] - runs[:, 0]
        return ResidentRows(self.x, self._node, starts, lengths, self.hubs, copies, self.slot_rows)


class TrainingRows:
    """The training nodes of one table, as rows, ascending. ``ids``: int64, node ids; None for all nodes."""

    def __init__(self, table: Table, ids: NDArray[np.int64] | None) -> None:
        self.table, dtype = table.name, node_dtype(table.rows)
        if ids is None:
            self.rows: NDArray[Any] = np.arange(table.rows, dtype=dtype)
        else:
            row_of_node = table.row_of_node()
            self.rows = np.sort((ids if row_of_node is None else row_of_node[ids]).astype(dtype))
        self._offsets = table.partition_offsets
        # Looked up once, in the dtype of the rows: any other would have all of them converted.
        firsts = np.searchsorted(self.rows, self._offsets[:-1].astype(self.rows.dtype))
        self._firsts = np.append(firsts, len(self.rows))

    def seeds(self, schedule: Any, step: Step, rows: Mapping[str, TableRows]) -> NDArray[np.int64]:
        """int64, local ids of those of a step, ascending."""
        found, starts = [], rows[self.table].starts(step)
        for partition, start in zip(step.partitions.tolist(), starts.tolist(), strict=True):
            low, high = self._firsts[partition : partition + 2]
            of = self.rows[low:high].astype(np.int64)
            used = schedule.used_in(of, np.full(len(of), partition), step.index)
            found.append(of[used] - self._offsets[partition] + start)
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)

    def seed_counts(self, schedule: Any) -> NDArray[np.int64]:
        """How many each step uses, int64 [steps]."""
        counts = np.zeros(schedule.steps, np.int64)
        for low in range(0, len(self.rows), _COUNTED_ROWS):
            some = self.rows[low : low + _COUNTED_ROWS].astype(np.int64)
            partition = np.searchsorted(self._firsts, np.arange(low, low + len(some)), side="right") - 1
            counts += np.bincount(schedule.used_by(some, partition), minlength=schedule.steps)
        return counts
