"""The feature buffer: rows of mini-batches that are not known beforehand, in a fixed number of slots (after
GNNDrive, ICPP'24).

``ticket = buffer.begin(ids)`` gives each row of a mini-batch a slot of the array ``x`` and starts to read
those that are in none; ``ticket.result()`` waits until all are there; ``buffer.gather(ticket)`` copies them
out; ``ticket.release()`` gives the slots back, whose rows can be found until their slot is needed. A row that
is in the buffer, or on its way for anybody, is not read again. Tickets may be begun, waited for and released
by any thread.

Who gets slots and who waits: :mod:`featstore.tiers.claims`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import (
    as_choice,
    as_count,
    as_flag,
    as_sequence,
    check_options,
    known_name,
)
from featstore.base.buffers import ALIGNMENT, empty_rows
from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import check_out, finished, parse_ids, parse_row_places, rows_of
from featstore.base.native import address_of
from featstore.base.rows import IN_ORDER, move_rows
from featstore.errors import (
    ArgumentError,
    BudgetError,
)
from featstore.storage.store import Table
from featstore.tiers import RowSource
from featstore.tiers.claims import Claims, check_reader
from featstore.tiers.slots import layout
from featstore.tiers.slots import slots as sl
from featstore.tiers.slots.contents import are_present, joined, present_slots
from featstore.tiers.slots.rows import check_memory, slots_for, switch_policy
from featstore.tiers.tickets import BufferStats, Ticket
from featstore.units import parse_bytes

_LOADED_AT_ONCE = 1 << 15  # rows that are read at once beforehand
#: Where a slot map counts what :class:`BufferStats` has, in that order.
COUNTED = [layout.HITS, layout.MISSES, layout.WAITS, layout.EVICTIONS, layout.BATCHES]


class FeatureBuffer(Claims):
    """A buffer of rows of one table; see the module's text. A context manager. It belongs to one process.

    Args:
        reader: reads what is missing; it stays open.
        table: the table's name; not needed where the reader has only one.
        slots, memory: how many rows fit, or how much memory (bytes or ``"2GiB"``) rows and slot map take; one
            of the two.
        policy: a name of :data:`featstore.tiers.slots.layout.POLICIES`.
        static: node ids of rows to be loaded now and kept for good, beside any policy; or an iterator of
            pieces of them, all different. They count as slots.
        batches: for ``"min"``: the number of mini-batches of the trace.
        policies: names of others that :meth:`switch` may change to, for whose slot maps there shall be room.
        block: uint8, memory to put the rows in, aligned to 64 bytes; made where not given.
        options: of :func:`featstore.tiers.slots.layout.make_slot_map`.

    ``x`` is the array of rows, [slots, *row shape].

    Raises BudgetError, IdError; what the reader raises while it loads ``static``.
    """

    def __init__(
        self, reader: RowSource, table: str | None = None, *, slots: int | None = None,
        memory: int | str | None = None, policy: str = "lru", static: Any = None, batches: int = 0,
        policies: Sequence[str] = (), block: NDArray[np.uint8] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        check_reader(reader)
        check_options(options, layout.OPTIONS, "a feature buffer")
        names = reader.tables
        if table is None and len(names) != 1:
            raise ArgumentError(
                f"this reader has {len(names)} tables; say which: {', '.join(map(repr, names))}"
            )
        self._reader = reader
        self._table = names[0] if table is None else known_name(table, names, "the reader has no table")
        self._rows = reader.store.table(self._table)
        self.policy = layout.POLICIES[as_choice(policy, "policy", layout.POLICIES)]
        self._batches = batches = as_count(batches, "batches", 0, layout.NEVER)
        if (slots is None) == (memory is None):
            raise ArgumentError("say either slots or memory")
        if slots is None:
            slots = slots_for(
                parse_bytes(0 if memory is None else memory, "memory"),
                self._rows.row_bytes,
                self.policy,
                batches,
            )
        slots = as_count(slots, "slots", 1, layout.BUFFER_ROWS_MAX)
        others = [
            layout.POLICIES[as_choice(name, "policies", layout.POLICIES)]
            for name in as_sequence(policies, "policies", "names of policies")
        ]
        self._map_memory = empty_rows(
            max(layout.slot_map_bytes(slots, p, batches) for p in (self.policy, *others)), 1
        )
        self._map = layout.make_slot_map(
            slots, self.policy, memory=self._map_memory, batches=batches, **options
        )
        self.slots, self.dtype = slots, dtype_from_name(self._rows.entry.dtype)
        x = empty_rows(slots, self._rows.row_bytes) if block is None else self._rows_in(block)
        self.x: NDArray[Any] = x.view(self.dtype).reshape(slots, *self._rows.row_shape)
        self._start(static)

    def _rows_in(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        check_memory(block, "block")
        needed = self.slots * self._rows.row_bytes
        if len(block) < needed:
            raise BudgetError(needed, len(block), f"hold {self.slots:,} rows in the block given")
        if block.ctypes.data % ALIGNMENT:
            raise ArgumentError(f"the block for a feature buffer's rows must be aligned to {ALIGNMENT} bytes")
        return block[:needed]

    def _start(self, static: Any) -> None:
        self._start_claims()
        sl.load_kernels(self._map)
        move_rows(0, self._no_slots(), 0, IN_ORDER, 0)
        if static is not None:
            try:
                self._keep(static)
            except BaseException:
                self.close()
                raise

    @staticmethod
    def _no_slots() -> NDArray[np.int32]:
        return np.empty(0, np.int32)

    @property
    def table(self) -> Table:
        """The table whose rows these are."""
        return self._rows

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._rows.row_shape

    @property
    def row_bytes(self) -> int:
        return self._rows.row_bytes

    # Rows out, slots back.

    def gather(self, ticket: Ticket, out: Any = None, *, at: Any = None) -> Any:
        """The rows of a ticket's ids, in their order and shape, copied out of the buffer when they are there;
        a tensor where the ids were one.

        ``out``: a C-contiguous array or tensor to fill and return instead; with ``at``, integers as many as
        ids, row i goes to ``out[at[i]]``, and ``out`` may be longer. Raises as :meth:`Ticket.result` does.
        """
        self._check_own(ticket)
        if at is not None:
            return self._scatter(ticket, out, parse_row_places(at, len(ticket.ids), rows_of(out)))
        slots = ticket.result()
        shape, row_bytes = (*ticket.shape, *self._rows.row_shape), self._rows.row_bytes
        rows = empty_rows(len(slots), row_bytes) if out is None else check_out(out, shape, self.dtype)
        move_rows(address_of(self.x), slots, address_of(rows), IN_ORDER, row_bytes)
        return finished(rows, shape, self.dtype, ticket.tensor) if out is None else out

    def _scatter(self, ticket: Ticket, out: Any, places: NDArray[np.int32]) -> Any:
        raw = check_out(out, (rows_of(out), *self._rows.row_shape), self.dtype)
        slots, row_bytes = ticket.result(), self._rows.row_bytes
        move_rows(address_of(self.x), slots, address_of(raw), places, row_bytes)
        return out

    def holds(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [n], which of these rows (node ids [n]) are there."""
        self._check_process()
        values = parse_ids(ids).values
        self.check_ids(values)
        with self._lock:
            self._enter_ended()
            return are_present(self._map, values)

    def stats(self) -> BufferStats:
        """What has been counted so far."""
        self._check_process()
        with self._lock:
            c = self._map.counts
            return BufferStats(*(int(c[at]) for at in COUNTED))

    def load(self, ids: Any, *, uses: int = 1) -> None:
        """Read rows beforehand, as if they had been asked for so many times, but for the counts. In pieces:
        what is known of a read takes memory by its rows. Raises what :meth:`begin` raises."""
        values = parse_ids(ids).values
        as_count(uses, "uses", 1, layout.COUNT_MAX)
        with self.uncounted():
            for low in range(0, len(values), _LOADED_AT_ONCE):
                for _ in range(uses):
                    with self.begin(values[low : low + _LOADED_AT_ONCE]) as ticket:
                        ticket.result()

    def load_last(self, pieces: Iterable[NDArray[np.int64]], count: int, *, uses: int) -> None:
        """The same of ``count`` rows in pieces: the last ones, as many as there are slots for."""
        spare = max(0, count - self.slots_unkept)
        for piece in pieces:
            self.load(piece[spare:], uses=uses)
            spare -= min(spare, len(piece))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is asked meanwhile is not counted."""
        before = self._map.counts[COUNTED].copy()
        try:
            yield
        finally:
            with self._lock:
                self._map.counts[COUNTED] = before

    def switch(self, policy: str, static: Any = None, *, wait: bool = False) -> None:
        """Go on with another policy, or another set of rows kept for good. The rows stay, what the policy
        knew of them is forgotten.

        Waits for reads under way. Raises ArgumentError while tickets hold slots, unless it is to ``wait`` for
        these, too, and nobody begins others; BudgetError where it is none
        of ``policies``, and needs a larger slot map; what :meth:`begin` raises.
        """
        self._check_open()
        number = layout.POLICIES[as_choice(policy, "policy", layout.POLICIES)]
        wait = as_flag(wait, "wait")
        with self._awaited() as wake:
            while not self._run(self._switch_now, number, wait):
                self._wait(wake, None, "reads to end")
        if static is not None:
            self._keep(static)

    def _switch_now(self, policy: int, wait: bool) -> bool:
        """Change the policy; False while reads are under way, or tickets held that are waited for. Runs in
        the buffer's thread."""
        with self._lock:
            self._enter_ended()
            if self._claims - self._kept and not wait:
                raise ArgumentError("the policy cannot change while tickets hold slots: release them first")
            if self._reading or self._claims - self._kept:
                return False
            self._unkeep()
            counted = self._map.counts[COUNTED].copy()
            try:
                self._map = switch_policy(self.x, self._map, policy, self._map_memory, self._rows.row_bytes)
            except BaseException:  # some rows have moved: it is empty, and any policy's
                self._map = layout.make_slot_map(self.slots, policy, memory=self._map_memory)
                self._map.counts[COUNTED], self.policy = counted, policy
                raise
            self._map.counts[COUNTED] = counted
            self.policy = policy
            return True

    def _keep(self, static: Any) -> None:
        """Have these rows for good: ids, or an iterator of pieces of them, all different. Of each there are
        only its pins."""
        pieces = static if isinstance(static, Iterator) else iter([np.unique(parse_ids(static).values)])
        try:
            with self.uncounted():
                for piece in pieces:
                    if self.slots_unkept < len(piece):
                        needed = self.slots - self.slots_unkept + len(piece)
                        self._raise_budget(needed, f"keep {needed:,} rows for good")
                    for low in range(0, len(piece), _LOADED_AT_ONCE):
                        ids = piece[low : low + _LOADED_AT_ONCE]
                        uses = np.full(len(ids), layout.NEVER) if self.policy == layout.MIN else None
                        ticket = self.begin(ids, uses)
                        ticket.result()
                        self._kept.add(ticket.give_away())
        except BaseException:
            with self._lock:
                self._unkeep()
            raise

    def _unkeep(self) -> None:
        """Keep nothing for good any more. With the lock."""
        for claim in list(self._kept):
            self._unclaim(claim)
            self._kept.discard(claim)

    @property
    def policy_name(self) -> str:
        return next(name for name, number in layout.POLICIES.items() if number == self.policy)

    def cached_ids(self) -> NDArray[np.int64]:
        """int64, the node ids of the rows that are in the buffer, but for those kept for good; what would
        leave first is at the front, as far as the policy has an order."""
        self._check_process()
        with self._lock:
            self._enter_ended()
            return joined(self.cached_pieces())

    def settle(self) -> None:
        """Enter in the slot map which reads have ended."""
        self._check_process()
        with self._lock:
            self._enter_ended()

    def cached_pieces(self) -> Iterator[NDArray[np.int64]]:
        """The ids of :meth:`cached_ids` in pieces, which take no memory by the slots (a byte each where rows
        are kept for good); reads that have ended since :meth:`settle` are not among them. Nothing may be
        asked of the buffer meanwhile."""
        kept = np.zeros(self.slots if self._kept else 0, bool)
        for claim in self._kept:
            kept[claim.slots] = True
        for slots in present_slots(self._map):
            wanted = slots[~kept[slots]] if len(kept) else slots
            yield self._map.slots["row"][wanted]

    # Ending.

    def close(self) -> None:
        """Begin nothing more, stop reads, and wait until none writes into ``x`` any more. May be called more
        than once."""
        if self._pid != os.getpid():
            return
        self._closed = True
        self._runner.end()
        for read in list(self._reading):
            request = read.request
            if request is not None:
                request.abandon()
        self._notify()

    def __enter__(self) -> FeatureBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<FeatureBuffer of {self.slots:,} rows of {self._table!r}, {self.policy_name}: "
            f"{asdict(self.stats())}>"
        )
