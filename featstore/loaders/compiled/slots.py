"""Rows that stay in memory between mini-batches: the slots that the compiled trace's schedule gives away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import empty_rows
from featstore.base.compilation import njit
from featstore.base.native import address_of
from featstore.base.rows import move_rows
from featstore.layout.records import TableRecord
from featstore.loaders.compiled.sources import CompiledSources, TablePart, none_goes_on


@njit(cache=True, nogil=True)
def exchange_rows(
    block: int, held: NDArray[Any], rows: int, row_bytes: int, hit_slot: NDArray[Any],
    hit_place: NDArray[Any], copy_from: NDArray[Any], copy_place: NDArray[Any], admit_place: NDArray[Any],
    admit_slot: NDArray[Any],
) -> None:  # fmt: skip
    """What :meth:`ResidentSlots.exchange` does, of slots and rows at two addresses; in one kernel, for after
    each there is Python of other threads to wait for. ``held``: where a slot of the schedule lies."""
    move_rows(block, held[hit_slot], rows, hit_place, row_bytes)
    move_rows(rows, copy_from, rows, copy_place, row_bytes)
    move_rows(rows, admit_place, block, held[admit_slot], row_bytes)


class ResidentSlots:
    """The slots of each table, and where each of the schedule's slots lies among them: a round ends with the
    first rows in other slots, which a map turns round instead of copying. ``together``: so many records may
    be read at once."""

    def __init__(self, sources: CompiledSources, together: int) -> None:
        self._sources, self._together = sources, together
        compiled = sources.compiled
        self.blocks = [
            empty_rows(limit.slots, row_bytes)
            for limit, row_bytes in zip(sources.limits, sources.row_bytes, strict=True)
        ]
        self._after_round = [compiled.turn(name) for name, _ in sources.tables]
        self._slot_of: list[NDArray[Any]] = []  # by table and slot of the schedule

    def _rows(self, number: int) -> NDArray[Any]:
        return self._sources.shaped(number, self.blocks[number])

    def load(self) -> None:
        """Bring what is in memory before the first mini-batch, slot by slot."""
        self._slot_of = [np.arange(limit.slots, dtype=np.int32) for limit in self._sources.limits]
        for number, (_, table) in enumerate(self._sources.tables):
            count = self._sources.limits[number].slots
            if count:
                out = self._rows(number)
                self._sources.pack.read_runs({table.resident: [(0, count)]}, out={table.resident: out})

    def begin_round(self) -> None:
        """After the last mini-batch: find the first rows where they are now, and bring back those that are
        gone."""
        for number, (_, table) in enumerate(self._sources.tables):
            after, held = self._after_round[number], self._slot_of[number]
            lost = np.flatnonzero(after < 0)
            taken = np.zeros(len(after), bool)
            taken[after[after >= 0]] = True
            begun = after.copy()
            begun[lost] = np.flatnonzero(~taken)[: len(lost)]
            self._slot_of[number] = held[begun]
            if len(lost):
                request = self._sources.pack.submit(
                    {table.resident: lost},
                    out={table.resident: self._rows(number)},
                    at={table.resident: self._slot_of[number][lost]},
                )
                with none_goes_on([request]):
                    request.result()

    def exchange(self, number: int, record: TableRecord, out: NDArray[np.uint8]) -> None:
        """Copy what a mini-batch finds here into ``out``, the bytes of its rows, fill those that stand there
        twice, and keep what stays; in this order, in which every row is there before it is copied."""
        exchange_rows(
            address_of(self.blocks[number]), self._slot_of[number], address_of(out),
            self._sources.row_bytes[number], record.hit_slot, record.hit_place, record.copy_from,
            record.copy_place, record.admit_place, record.admit_slot,
        )  # fmt: skip

    def restore(self, end: int) -> None:
        """Put here what mini-batches 0 to ``end`` would have left: of each slot its last admission."""
        last = [np.full(limit.slots, -1, np.int32) for limit in self._sources.limits]
        for index, tables in self._records(range(end)):
            for number, record in enumerate(tables):
                last[number][record.admit_slot] = index
        needed = np.zeros(end + 1, np.bool_)
        for admissions in last:
            needed[admissions] = True  # -1 is the last place
        for index, tables in self._records(np.flatnonzero(needed[:end]).tolist()):
            parts = []
            for number, record in enumerate(tables):
                wanted = last[number][record.admit_slot] == index
                moved = np.full(record.host_count, -1, np.int32)
                moved[record.brought_place(record.admit_place[wanted])] = record.admit_slot[wanted]
                parts.append(TablePart(number, record, self._rows(number), moved=moved))
            requests = self._sources.submit(parts)
            with none_goes_on(requests):
                for request in requests:
                    request.result()

    def _records(self, indices: Sequence[int]) -> Iterator[tuple[int, list[TableRecord]]]:
        """The records of these mini-batches, as many read together as a loader has room for."""
        for at in range(0, len(indices), self._together):
            some = indices[at : at + self._together]
            found = self._sources.records(some, self._sources.submit_records(some))
            yield from ((index, tables) for index, (tables, _) in zip(some, found, strict=True))
