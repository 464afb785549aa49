"""How the budget of a shared buffer is split: the reader, what is known of requests, and all the rest is
slots of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from featstore.base.buffers import ALIGNMENT
from featstore.errors import BudgetError
from featstore.plan.budget import own_bytes
from featstore.reader.lookup import table_need
from featstore.shared.guests import BYTES_PER_ID
from featstore.shared.service import ROOM_BATCHES
from featstore.storage.store import Table
from featstore.tiers.slots import layout
from featstore.tiers.slots.rows import SlotCost, least_bytes, share_slots

_READER_SHARE = 2  # of the budget, at most, is for the reader's staging and planning
_REQUESTS_SHARE = 16  # of the budget, at most, is for what is known of requests,
_SPARE_SHARE = 4  # and of what is left over when all has what it must have
_BATCH_SHARE = 4  # of a table's slots, for one request, unless all of its rows have slots
_REQUEST_BYTES = ROOM_BATCHES * BYTES_PER_ID  # for each id of a request of the largest size


@dataclass(frozen=True)
class Split:
    """A budget, split: ``reader_bytes`` for the reader; by table the ``slots``, the ids of a request
    (``batch_rows``) and where in the shared memory the slots are (``offsets``); ``size``: of that memory."""

    reader_bytes: int
    slots: Mapping[str, int]
    batch_rows: Mapping[str, int]
    offsets: Mapping[str, int]
    size: int
    memory: Mapping[str, int]

    @classmethod
    def of(
        cls, tables: Sequence[Table], memory_bytes: int, policy: int, batch_rows: int | None, verify: bool
    ) -> Split:
        """Split so many bytes. Raises BudgetError with the smallest budget that works."""
        least, cost = 1 if batch_rows is None else batch_rows, SlotCost([policy])
        needs = [table_need(table, verify) for table in tables]
        padding = ALIGNMENT * (len(tables) - 1)  # between the tables' slots
        fixed = _REQUEST_BYTES * least + least_bytes(tables, cost, least) + padding
        reader = own_bytes(memory_bytes, needs, most=memory_bytes // _READER_SHARE)
        if memory_bytes < reader + fixed:
            needed = memory_bytes
            while (more := own_bytes(needed, needs, most=needed // _READER_SHARE) + fixed) > needed:
                needed = more  # a larger budget has a larger reader, too
            raise BudgetError(needed, memory_bytes, f"serve requests of {least:,} ids")
        spare = min(memory_bytes // _REQUESTS_SHARE, (memory_bytes - reader - fixed) // _SPARE_SHARE)
        ids = least + (spare // _REQUEST_BYTES if batch_rows is None else 0)
        requests = _REQUEST_BYTES * ids
        slots = share_slots(tables, memory_bytes - reader - requests - padding, cost, least)
        batches, offsets, size, rows = {}, {}, 0, padding
        for table in tables:
            count = slots[table.name]
            whole = batch_rows is not None or count >= table.rows
            batches[table.name] = ids if whole else max(1, min(ids, count // _BATCH_SHARE))
            offsets[table.name] = size
            size += -(-count * table.row_bytes // ALIGNMENT) * ALIGNMENT
            rows += count * table.row_bytes
        maps = sum(layout.slot_map_bytes(count, policy) for count in slots.values())
        used = {"reader": reader, "requests": requests, "slot map": maps, "rows": rows}
        used["unused"] = memory_bytes - sum(used.values())
        return cls(reader, slots, batches, offsets, max(1, size), used)
