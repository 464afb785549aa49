"""The feature buffer: rows of mini-batches that are not known beforehand, in a fixed number of slots (after
GNNDrive, ICPP'24).

``ticket = buffer.begin(ids)`` gives each row of a mini-batch a slot of the array ``x`` and starts to read
those that are in none; ``ticket.result()`` waits until all are there; ``buffer.gather(ticket)`` copies them
out; ``ticket.release()`` gives the slots back, whose rows can be found until their slot is needed. A row that
is in the buffer, or on its way for anybody, is not read again. Tickets may be begun, waited for and released
by any thread.

*No deadlock.* A ticket gets all its slots or none, so nobody waits while he holds a part of what he wants. A
mini-batch that fits the buffer but not beside those in use waits for releases, as long as there is somebody
to wait for: a read under way that frees slots when it ends, or a ticket whose owner (the thread that began
it) is alive and not itself waiting in ``begin``. Where all others who hold slots wait, the last who would
join them gets a BudgetError instead, and so does a single thread that holds everything itself. A ticket that
is passed on to another thread for release belongs to nobody (:meth:`Ticket.hand_over`), and is waited for.

*No lost read.* Slots are changed under one lock, which is held for the time of a kernel. Reads end in threads
of the engine, which must not wait: they only put the ended read on a list and wake up who waits; the next who
holds the lock enters it in the slot map. When a read fails or is cancelled, the tickets that wait for its
rows read them themselves.

*No torn step.* Slots are taken and reads begun by one thread of the buffer's own, which no signal interrupts;
what was done is noted by the kernels themselves. Whoever is interrupted gives back what was taken for him. A
ticket that is forgotten is released when it is collected.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, as_count
from featstore.base.buffers import ALIGNMENT, empty_rows
from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import as_integers, check_out, finished, parse_ids
from featstore.base.native import address_of
from featstore.base.rows import IN_ORDER, move_rows
from featstore.base.threads import Runner, Wake
from featstore.errors import (
    ArgumentError,
    BudgetError,
    CancelledError,
    ClosedError,
    IdError,
    WaitTimeoutError,
)
from featstore.tiers import RowSource
from featstore.tiers.slots import layout
from featstore.tiers.slots import slots as sl
from featstore.tiers.slots.contents import joined, present_slots
from featstore.tiers.slots.rows import buffer_bytes, slots_for, switch_policy
from featstore.tiers.tickets import BufferStats, Claim, Read, Ticket
from featstore.units import parse_bytes

_PATIENCE_SECONDS = 1.0  # who waits looks this often whether those he waits for are alive
_LOADED_AT_ONCE = 1 << 15  # rows that are read at once beforehand
#: Where a slot map counts what :class:`BufferStats` has, in that order.
COUNTED = [layout.HITS, layout.MISSES, layout.WAITS, layout.EVICTIONS, layout.BATCHES]


class FeatureBuffer:
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
        names = reader.tables
        if table is None and len(names) != 1:
            raise ArgumentError(
                f"this reader has {len(names)} tables; say which: {', '.join(map(repr, names))}"
            )
        self._reader, self._table = reader, names[0] if table is None else table
        self._rows = reader.store.table(self._table)
        self.policy = layout.POLICIES[as_choice(policy, "policy", layout.POLICIES)]
        self._batches = batches = as_count(batches, "batches", 0, layout.NEVER)
        if (slots is None) == (memory is None):
            raise ArgumentError("say either slots or memory")
        if slots is None:
            slots = slots_for(parse_bytes(memory or 0, "memory"), self._rows.row_bytes, self.policy, batches)
        slots = as_count(slots, "slots", 1, 2**31 - 1)
        others = [layout.POLICIES[as_choice(name, "policies", layout.POLICIES)] for name in policies]
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
        needed = self.slots * self._rows.row_bytes
        if len(block) < needed:
            raise BudgetError(needed, len(block), f"hold {self.slots:,} rows in the block given")
        if block.ctypes.data % ALIGNMENT:
            raise ArgumentError(f"the block for a feature buffer's rows must be aligned to {ALIGNMENT} bytes")
        return block[:needed]

    def _start(self, static: Any) -> None:
        self._lock = threading.Lock()  # of the slot map
        self._wakes: set[Wake] = set()  # of those who wait
        #: Called when a read has ended or slots were given back; must not wait.
        self.on_change: Callable[[], None] | None = None
        self._ended: deque[Read] = deque()
        self._forgotten: deque[Claim] = deque()
        self._reading: set[Read] = set()
        self._claims: set[Claim] = set()  # those that hold pins
        self._waiting: set[threading.Thread] = set()
        self._closed, self._pid = False, os.getpid()
        self._kept: set[Claim] = set()  # of rows kept for good
        self._runner = Runner("featstore-buffer")
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
    def memory_bytes(self) -> int:
        """Memory of rows and slot map."""
        return self.slots * self._rows.row_bytes + len(self._map_memory)

    # Beginning.

    def begin(self, ids: Any, next_use: Any = None, *, timeout: float | None = None) -> Ticket:
        """Claim slots for a mini-batch and start to read what is missing.

        Args:
            ids: node ids, integers of any dtype and shape; duplicates are fine, and read once.
            next_use: for ``"min"``: for each id the mini-batch that uses it next, or ``NEVER``.
            timeout: seconds to wait for slots that others hold, for ever by default.

        Raises IdError; BudgetError where the buffer is too small for this mini-batch, or for all those that
        wait for each other; TimeoutError; what the reader's ``submit`` raises.
        """
        self._check_open()
        parsed = parse_ids(ids, copy=True)
        self.check_ids(parsed.values)
        ticket = Ticket(self, parsed, self._parse_uses(next_use))
        deadline = None if timeout is None else time.monotonic() + timeout
        me = threading.current_thread()
        try:
            with self._awaited() as wake:
                while not self._run(self._take, ticket):
                    self._wait(wake, deadline, "slots that other tickets hold")
            return ticket
        except BaseException:
            ticket._given_up = True
            self.release(ticket)
            raise
        finally:
            with self._lock:
                self._waiting.discard(me)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the feature buffer is closed")
        self._check_process()

    def _check_process(self) -> None:
        """Raise ClosedError in a forked child: the thread and who held the lock stayed in the parent."""
        if self._pid != os.getpid():
            raise ClosedError(
                "this feature buffer belongs to the process that made it; make one in each process"
            )

    def check_ids(self, ids: NDArray[np.int64]) -> None:
        """Raise IdError for ids that the table has not."""
        if len(ids) == 0:
            return
        for bad in (ids.min(), ids.max()):
            if not 0 <= bad < self._rows.rows:
                raise IdError(
                    f"node id {bad} is out of range: table {self._table!r} has {self._rows.rows:,} rows"
                )

    @staticmethod
    def _parse_uses(next_use: Any) -> NDArray[np.int32]:
        if next_use is None:
            return sl.NO_NEXT_USE
        uses = as_integers(next_use, "next uses must be integers", ArgumentError).reshape(-1)
        if len(uses) and not 0 <= uses.min() <= uses.max() <= layout.NEVER:
            raise ArgumentError("next uses must be integers, numbers of mini-batches or NEVER")
        return uses.astype(np.int32)

    def _run(self, step: Callable[..., bool], *arguments: Any) -> bool:
        """Take a step in the buffer's own thread, where no signal interrupts it."""
        if self._closed:
            raise ClosedError("the feature buffer is closed")
        return bool(self._runner.run(partial(step, *arguments)))

    def _take(self, ticket: Ticket) -> bool:
        """Take slots and start the read; False where it has to wait. Runs in the buffer's thread."""
        claim, short = ticket._claim, 1
        with self._lock:
            self._check_open()
            self._enter_ended()
            while short > 0 and not ticket._given_up:
                short = -sl.acquire(
                    self._map,
                    ticket.ids,
                    claim.slots,
                    ticket._missed,
                    ticket._waits,
                    ticket._next_use,
                    claim.outcome,
                )[0]
                if short > 0 and not self._enter_ended():
                    self._check_wait(ticket, short)
                    if claim.owner is not None:
                        self._waiting.add(claim.owner)
                    return False
            if ticket._given_up:
                return False
            self._claims.add(claim)
            if claim.owner is not None:
                self._waiting.discard(claim.owner)
            ticket._waits = ticket._waits[: claim.outcome[1]]
            read = self._new_read(ticket, -short)
        self._submit(read)
        return True

    def _check_wait(self, ticket: Ticket, short: int) -> None:
        """Raise BudgetError where waiting for slots would not help. With the lock."""
        ids = np.unique(ticket.ids)
        if len(ids) > self.slots_unkept:
            needed = (
                self.slots - self.slots_unkept + len(np.setdiff1d(ids, self._kept_ids(), assume_unique=True))
            )
            if needed > self.slots:
                self._raise_budget(needed, f"hold the {len(ids):,} rows of a mini-batch")
        if self._reading or any(self._ends(claim, ticket._claim.owner) for claim in self._claims):
            return
        self._raise_budget(
            self.slots + short,
            "hold one more mini-batch beside those that are in use, none of which can be released "
            "before (release a ticket first, or hand it over to the thread that will)",
        )

    def _ends(self, claim: Claim, me: threading.Thread | None) -> bool:
        """Whether another's pins can be expected to be released while this thread waits."""
        if claim in self._kept:
            return False
        who = claim.owner
        return (
            claim.forgotten or who is None or (who is not me and who not in self._waiting and who.is_alive())
        )

    def _raise_budget(self, slots: int, what: str) -> None:
        row_bytes = self._rows.row_bytes
        raise BudgetError(buffer_bytes(slots, row_bytes, self.policy, self._batches), self.memory_bytes, what)

    def _new_read(self, ticket: Ticket, count: int) -> Read:
        """What a ticket has to read: its first ``count`` missed positions. With the lock."""
        positions = ticket._missed[:count]
        read = Read(ticket.ids[positions], ticket.slots[positions])
        if count:
            ticket._reads.append(read)
            self._reading.add(read)
        return read

    def _submit(self, read: Read) -> None:
        """Start a read, without the lock: ``submit`` may wait for other reads to end."""
        if len(read.slots) == 0:
            return
        try:
            table = self._table
            request = self._reader.submit({table: read.ids}, out={table: self.x}, at={table: read.slots})
        except BaseException as error:
            self._end(read, error)
            raise
        read.request = request
        request._future.add_done_callback(lambda future: self._end(read, future.exception()))

    def _end(self, read: Read, error: BaseException | None) -> None:
        """A read has ended. Called by the engine's threads."""
        read.error = error
        self._ended.append(read)
        self._notify()

    # Waiting.

    def _notify(self) -> None:
        for wake in self._wakes.copy():
            wake.set()
        if self.on_change is not None:
            self.on_change()

    @contextmanager
    def _awaited(self) -> Iterator[Wake]:
        """What wakes up this thread when something has happened from now on."""
        wake = Wake()
        self._wakes.add(wake)
        try:
            yield wake
        finally:
            self._wakes.discard(wake)

    def _wait(self, wake: Wake, deadline: float | None, what: str) -> None:
        """Wait until something has happened, or for some time."""
        patience = (
            _PATIENCE_SECONDS if deadline is None else min(_PATIENCE_SECONDS, deadline - time.monotonic())
        )
        if patience <= 0:
            raise WaitTimeoutError(f"still waiting for {what}")
        wake.wait(patience)

    def _enter_ended(self) -> bool:
        """Enter in the slot map which reads have ended, and release forgotten tickets; whether there were
        any. With the lock.

        What is entered is taken from its list last, and entered once: an interrupt loses nothing."""
        found = False
        while self._ended:
            read, found = self._ended[0], True
            sl.unpin(
                self._map, read.slots, layout.PRESENT if read.error is None else layout.FAILED, read.once
            )
            self._reading.discard(read)
            read.request = None
            self._ended.popleft()
        while self._forgotten:
            self._unclaim(self._forgotten[0])
            self._forgotten.popleft()
            found = True
        return found

    def _unclaim(self, claim: Claim) -> None:
        sl.release(self._map, claim.slots, claim.outcome)
        self._claims.discard(claim)

    def forget(self, claim: Claim) -> None:
        """Whoever holds the lock next releases the claim: taking the lock here could be for the second time
        in this thread."""
        self._forgotten.append(claim)

    def wait_for(self, ticket: Ticket, timeout: float | None) -> NDArray[np.int32]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._awaited() as wake:
            while not self.arrived(ticket):
                self._wait(wake, deadline, "rows to be read")
        return ticket.slots

    def arrived(self, ticket: Ticket) -> bool:
        """Whether all rows of a ticket are there. Raises what :meth:`Ticket.result` raises."""
        self._check_process()
        while True:
            with self._lock:
                self._enter_ended()
                if not ticket._claim.held:
                    raise CancelledError("the ticket was released before its rows were there")
                for read in ticket._reads:
                    if not read.once[0] and read.error is not None:
                        raise read.error
                own = all(not read.once[0] for read in ticket._reads)
                waits = len(ticket._waits)
            if not waits:
                return own
            self._check_open()
            if self._run(self._look_again, ticket):
                return False

    def _look_again(self, ticket: Ticket) -> bool:
        """Whether a ticket still waits for others' reads; reads what they failed to. Runs in the buffer's
        thread."""
        with self._lock:
            self._enter_ended()
            if not ticket._claim.held:
                return False
            still, reads = sl.look_again(self._map, ticket.slots, ticket._waits, ticket._missed)
            ticket._waits = ticket._waits[:still]
            read = self._new_read(ticket, reads)
        self._submit(read)
        return bool(still > 0)

    # Rows out, slots back.

    def gather(self, ticket: Ticket, out: Any = None) -> Any:
        """The rows of a ticket's ids, in their order and shape, copied out of the buffer when they are there;
        a tensor where the ids were one.

        ``out``: a C-contiguous array or tensor to fill and return instead. Raises as :meth:`Ticket.result`
        does.
        """
        slots = ticket.result()
        shape, row_bytes = (*ticket._shape, *self._rows.row_shape), self._rows.row_bytes
        rows = empty_rows(len(slots), row_bytes) if out is None else check_out(out, shape, self.dtype)
        move_rows(address_of(self.x), slots, address_of(rows), IN_ORDER, row_bytes)
        return finished(rows, shape, self.dtype, ticket._tensor) if out is None else out

    def release(self, ticket: Ticket) -> None:
        if self._pid != os.getpid():
            return  # the slots are the parent's, and so is the ticket
        with self._lock:
            self._unclaim(ticket._claim)
        self._notify()

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
        with self.uncounted():
            for low in range(0, len(values), _LOADED_AT_ONCE):
                for _ in range(uses):
                    with self.begin(values[low : low + _LOADED_AT_ONCE]) as ticket:
                        ticket.result()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is asked meanwhile is not counted."""
        before = self._map.counts[COUNTED].copy()
        try:
            yield
        finally:
            with self._lock:
                self._map.counts[COUNTED] = before

    def switch(self, policy: str, static: Any = None) -> None:
        """Go on with another policy, or another set of rows kept for good. The rows stay, what the policy
        knew of them is forgotten.

        Waits for reads under way. Raises ArgumentError while tickets hold slots; BudgetError where it is none
        of ``policies``, and needs a larger slot map; what :meth:`begin` raises.
        """
        self._check_open()
        number = layout.POLICIES[as_choice(policy, "policy", layout.POLICIES)]
        with self._awaited() as wake:
            while not self._run(self._switch_now, number):
                self._wait(wake, None, "reads to end")
        if static is not None:
            self._keep(static)

    def _switch_now(self, policy: int) -> bool:
        """Change the policy; False while reads are under way. Runs in the buffer's thread."""
        with self._lock:
            self._enter_ended()
            if self._claims - self._kept:
                raise ArgumentError("the policy cannot change while tickets hold slots: release them first")
            if self._reading:
                return False
            self._unkeep()
            counted = self._map.counts[COUNTED].copy()
            self._map = switch_policy(self.x, self._map, policy, self._map_memory, self._rows.row_bytes)
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

    def _kept_ids(self) -> NDArray[np.int64]:
        return joined(self.kept_pieces())

    @property
    def policy_name(self) -> str:
        return next(name for name, number in layout.POLICIES.items() if number == self.policy)

    @property
    def slots_unkept(self) -> int:
        """Slots that are not taken by rows kept for good."""
        return self.slots - sum(len(claim.slots) for claim in self._kept)

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

    def kept_pieces(self) -> Iterator[NDArray[np.int64]]:
        """The ids of the rows kept for good, int64, in pieces."""
        for claim in self._kept:
            yield self._map.slots["row"][claim.slots]

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
